// SPDX-License-Identifier: Apache-2.0
//! `bench-imago`: times requests on an image through the imago crate, with those options of `qemu-img bench` that
//! `bench_block` uses, and its last line. imago's file storage blocks the thread that asks, and its futures stay on one
//! thread, so each request in flight has a thread of its own, all on one image: the most parallel way to use it. Every
//! thread takes the next offset in turn.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use imago::file::File;
use imago::io_buffers::IoBuffer;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate, StorageOpenOptions};

/// What was asked for.
struct Asked {
    path: PathBuf,
    raw: bool,
    direct: bool,
    count: u64,
    depth: usize,
    size: u64,
    step: u64,
    write: bool,
}

fn asked() -> Result<Asked, String> {
    let path = PathBuf::new();
    let mut asked =
        Asked { path, raw: false, direct: false, count: 75_000, depth: 64, size: 4096, step: 4096, write: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "-w" {
            asked.write = true;
            continue;
        }
        if !word.starts_with('-') {
            asked.path = word.into();
            continue;
        }
        let value = words.next().ok_or(format!("{word} has no value"))?;
        let number = || value.parse::<u64>().map_err(|_| format!("{word}: `{value}` is no number"));
        match word.as_str() {
            "-f" => asked.raw = value == "raw",
            "-t" => asked.direct = value == "none",
            "-c" => asked.count = number()?,
            "-d" => asked.depth = number()?.clamp(1, 256) as usize,
            "-s" => asked.size = number()?.max(1),
            "-S" => asked.step = number()?,
            _ => return Err(format!("{word} is no option of this program")),
        }
    }
    Ok(asked)
}

async fn open(asked: &Asked) -> std::io::Result<FormatAccess<File>> {
    let how = StorageOpenOptions::new().direct(asked.direct).write(asked.write);
    let gate = PermissiveImplicitOpenGate::default();
    if asked.raw {
        let raw =
            Raw::<File>::builder_path(&asked.path).storage_open_options(how).write(asked.write).open(gate).await?;
        return Ok(FormatAccess::new(raw));
    }
    let image =
        Qcow2::<File>::builder_path(&asked.path).storage_open_options(how).write(asked.write).open(gate).await?;
    Ok(FormatAccess::new(image))
}

/// One request after the other until there are no more to make.
async fn worker(asked: &Asked, image: &FormatAccess<File>, next: &AtomicU64) -> std::io::Result<()> {
    let mut buffer = IoBuffer::new(asked.size as usize, 4096)?;
    buffer.as_mut().into_slice().fill(90);
    loop {
        let turn = next.fetch_add(1, Ordering::Relaxed);
        if turn >= asked.count {
            return Ok(());
        }
        let offset = (u128::from(turn) * u128::from(asked.step) % u128::from(image.size())) as u64;
        if asked.write {
            image.write(buffer.as_ref(), offset).await?;
        } else {
            image.read(buffer.as_mut(), offset).await?;
        }
    }
}

/// Runs a future to its end on this thread.
fn wait<T>(future: impl Future<Output = std::io::Result<T>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(|e| e.to_string())?;
    runtime.block_on(future).map_err(|e| e.to_string())
}

fn run(asked: &Asked) -> Result<(), String> {
    let image = wait(open(asked))?;
    let next = AtomicU64::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let start = || wait(worker(asked, &image, &next));
        let threads: Vec<_> = (0..asked.depth).map(|_| scope.spawn(start)).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread died".to_owned())?)
    })?;
    println!("Run completed in {:.3} seconds.", start.elapsed().as_secs_f64());
    if asked.write { wait(image.flush()) } else { Ok(()) }
}

fn main() -> ExitCode {
    match asked().and_then(|asked| run(&asked)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("bench-imago: {message}");
            ExitCode::FAILURE
        }
    }
}
