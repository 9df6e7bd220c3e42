// SPDX-License-Identifier: Apache-2.0
//! The served cases: `tare img serve`, `qemu-nbd` and `qemu-storage-daemon` in turn under fio's nbd engine, which belongs to
//! none of them. Processor time is the server's.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::Asked;
use crate::cases::Case;
use crate::images::Folder;
use crate::measure::{self, Cost, Side};

/// One run by one server.
pub fn run(case: &Case, side: Side, asked: &Asked, folder: &Folder, image: &Path) -> Result<Cost, String> {
    let socket = folder.file("socket");
    let _ = std::fs::remove_file(&socket);
    let mut command = server(case, side, asked, &socket, image);
    let server = measure::spawn(&mut command)?;
    let begun = Instant::now();
    while !socket.exists() && begun.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(5));
    }
    if !socket.exists() {
        measure::end(&server);
        return Err(format!("{} did not open its socket", command.get_program().to_string_lossy()));
    }
    let answer = measure::run(
        Command::new("fio")
            .args(["--name=served", "--ioengine=nbd", "--output-format=json", "--randrepeat=1", "--norandommap"])
            .arg(format!("--uri=nbd+unix:///{}?socket={}", export(side), socket.display()))
            .arg(format!("--rw={}", if case.write { "randwrite" } else { "randread" }))
            .arg(format!("--bs={}", case.block))
            .arg(format!("--iodepth={}", case.depth))
            .arg(format!("--number_ios={}", case.count))
            .arg(format!("--size={}", asked.size)),
    );
    let cpu = measure::end(&server);
    let answer = answer?;
    let json: serde_json::Value = answer
        .stdout
        .find('{')
        .and_then(|at| serde_json::from_str(answer.stdout.get(at..)?).ok())
        .ok_or("fio printed no JSON")?;
    let part = if case.write { "write" } else { "read" };
    let rate = json["jobs"][0][part]["iops"].as_f64().filter(|rate| *rate > 0.0).ok_or("fio names no rate")?;
    let ios = json["jobs"][0][part]["total_ios"].as_f64().unwrap_or(case.count as f64).max(1.0);
    Ok(Cost { rate, cpu: cpu.as_secs_f64() * 1e6 / ios })
}

/// The name under which a server knows the image. The daemon has no nameless one.
fn export(side: Side) -> &'static str {
    if side == Side::Daemon { "disk" } else { "" }
}

fn server(case: &Case, side: Side, asked: &Asked, socket: &Path, image: &Path) -> Command {
    let format = case.kind.format();
    match side {
        Side::Qemu => {
            let mut command = Command::new("qemu-nbd");
            command.args(["--persistent", "--shared=4", "-f", format]);
            command.arg(format!("--cache={}", case.cache)).arg(format!("--aio={}", asked.aio));
            command.arg("-k").arg(socket).arg(image);
            command
        }
        Side::Daemon => {
            let direct = if case.cache == "none" { "on" } else { "off" };
            let file = format!(
                "driver=file,node-name=file,filename={},aio={},cache.direct={direct},cache.no-flush=off",
                image.display(),
                asked.aio
            );
            let disk = format!("driver={format},node-name=disk,file=file,cache.direct={direct},cache.no-flush=off");
            let listen = format!("addr.type=unix,addr.path={},max-connections=4", socket.display());
            let mut command = Command::new("qemu-storage-daemon");
            command.args(["--blockdev", &file, "--blockdev", &disk, "--nbd-server", &listen]);
            command.args(["--export", "type=nbd,id=export,node-name=disk,name=disk,writable=on"]);
            command
        }
        Side::Tare | Side::Auto | Side::Imago => {
            let mut command = Command::new(&asked.tare);
            command.args(["img", "serve", "-f", format, "-t", case.cache, "-i", &asked.aio]);
            command.arg("--nbd").arg(socket).arg(image);
            command
        }
    }
}
