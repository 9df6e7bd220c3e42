// SPDX-License-Identifier: Apache-2.0
//! The pool beside QEMU: how long a start takes to have its memory, when a pool has it ready.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use mem::backing::back;
use spec::{Memory, Pages, Prealloc as When};

use crate::prealloc::{cpus, fits, qemu};
use crate::{Options, available, promise, timed};

/// What QEMU's start is compared at.
const LARGE: u64 = 8 << 30;

/// The pool's process, which goes with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn run(options: &Options) {
    let sizes: Vec<u64> = [1 << 30, 4 << 30, LARGE, 16 << 30]
        .into_iter()
        .filter(|s| *s <= options.max && s + (2 << 30) < available())
        .collect();
    let Some(&most) = sizes.last() else { return println!("\npool: too little memory") };
    println!(
        "\npool of {} GiB in transparent huge pages: from asking to memory that is mapped, and to all of it faulted in",
        most >> 30
    );
    let Ok(folder) = tempfile::tempdir() else { return println!("    no folder for a socket") };
    let socket = folder.path().join("pool");
    let Some(_running) = start(&socket, most) else { return println!("    no pool can be started; build tare first") };
    let mut at_large = f64::NAN;
    let mut slowest: f64 = 0.0;
    for size in sizes {
        let mut best = (Duration::MAX, Duration::MAX);
        for _ in 0..options.rounds.max(3) {
            let Some(took) = ask(&socket, size) else { continue };
            best = (best.0.min(took.0), best.1.min(took.1));
        }
        let (mapped, faulted) = (best.0.as_secs_f64() * 1e3, best.1.as_secs_f64() * 1e3);
        println!("    {:>3} GiB  mapped {mapped:>8.3} ms   faulted {faulted:>8.1} ms", size >> 30);
        slowest = slowest.max(mapped);
        if size == LARGE {
            at_large = mapped;
        }
    }
    promise("10 ms beside the slowest", 10.0 / slowest, 1.0);
    drop(_running);
    if !fits(LARGE, Pages::Transparent) || LARGE > options.max {
        return println!("    8 GiB don't fit beside QEMU here");
    }
    let bare = qemu(LARGE, Pages::Transparent, 0);
    let with = (0..options.rounds).filter_map(|_| qemu(LARGE, Pages::Transparent, cpus())).min();
    if let Some(took) = with.zip(bare).map(|(with, bare)| with.saturating_sub(bare).as_secs_f64() * 1e3) {
        println!("    QEMU preallocates 8 GiB with {} threads in {took:.1} ms", cpus());
        promise("pool beside QEMU at 8 GiB", took / at_large, 50.0);
    }
}

/// The pool as users start it, once it is full.
fn start(socket: &Path, size: u64) -> Option<Running> {
    let exe = std::env::current_exe().ok()?;
    let tare = exe.parent()?.parent()?.join("tare");
    let mut command = Command::new(tare);
    command.arg("memory-pool").arg("--socket").arg(socket).args(["--size", &size.to_string(), "--threads", "2"]);
    let running = Running(command.stderr(Stdio::null()).spawn().ok()?);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(300) {
        if ask(socket, size).is_some() {
            return Some(running);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    None
}

/// One start from the pool, once it has the memory again: until mapped, and until faulted in.
fn ask(socket: &Path, size: u64) -> Option<(Duration, Duration)> {
    let memory = Memory { size, prealloc: When::Pool, pool: Some(socket.into()), ..Memory::default() };
    let ranges = mem::ranges(size);
    for _ in 0..600 {
        let begun = Instant::now();
        let Ok(backed) = back(&ranges, None, &memory) else {
            std::thread::sleep(Duration::from_millis(50));
            if !socket.exists() {
                return None;
            }
            continue;
        };
        let mapped = begun.elapsed();
        let work = mem::prealloc::Prealloc::new(&backed.ram, mem::prealloc::Way::Populate);
        let ((), faulted) = timed(|| work.work());
        return Some((mapped, mapped + faulted));
    }
    None
}
