// SPDX-License-Identifier: Apache-2.0
//! From exec to the guest's first instruction: tare beside the smallest C program that makes the same ioctls, in turn, and
//! the ratio of the medians. Promised: 1.3.
//!
//! `cargo run --release -p tare --example first_instruction [pairs]`, with the release build of tare beside it and a C
//! compiler; runs on any /dev/kvm. The guest's first instructions write one character; a clock runs from the start of the
//! process until the character comes out of its standard output.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use testkit::Code;

/// Where the code runs: 2 MiB.
const ENTRY: u64 = 0x20_0000;
const PAIRS: usize = 100;
const PROMISED: f64 = 1.3;

fn main() {
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        println!("skipped: no usable /dev/kvm");
        return;
    }
    let pairs = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(PAIRS);
    let dir = std::env::temp_dir().join(format!("tare-first-instruction-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let (raw, elf) = (dir.join("guest.bin"), dir.join("guest.elf"));
    let mut code = Code::new();
    code.say("\n").power_off().halt();
    fs::write(&raw, code.as_bytes()).unwrap();
    fs::write(&elf, code.elf(ENTRY)).unwrap();
    let smallest = compile(&dir);
    let beside = std::env::current_exe().unwrap();
    let tare = beside.parent().and_then(Path::parent).unwrap().join("tare");
    let mut c = Command::new(smallest);
    c.arg(&raw);
    let mut ours = Command::new(&tare);
    ours.args(["run", "--console", "serial", "--no-rng", "--memory", "64M", "--kernel"]).arg(&elf);

    let (mut of_c, mut of_tare) = (Vec::new(), Vec::new());
    for _ in 0..pairs {
        of_c.push(micros(&mut c));
        of_tare.push(micros(&mut ours));
    }
    fs::remove_dir_all(&dir).unwrap();
    let (c, tare) = (median(&mut of_c), median(&mut of_tare));
    let ratio = tare / c;
    let verdict = if ratio <= PROMISED { "as promised" } else { "missed" };
    println!(
        "exec to first instruction, us, median of {pairs}: smallest C {c:.0}, tare {tare:.0}, ratio {ratio:.2} ({verdict}: {PROMISED})"
    );
}

/// Microseconds from the start of the process to the first byte of its output.
fn micros(command: &mut Command) -> f64 {
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let begun = Instant::now();
    let mut child = command.spawn().unwrap();
    let mut byte = [0u8];
    child.stdout.as_mut().unwrap().read_exact(&mut byte).expect("the guest says something");
    let took = begun.elapsed();
    assert!(child.wait().unwrap().success(), "{command:?} failed");
    took.as_secs_f64() * 1e6
}

fn compile(dir: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/first_instruction/smallest.c");
    let program = dir.join("smallest");
    let done = Command::new("cc").args(["-O2", "-pthread", "-o"]).arg(&program).arg(source).status();
    assert!(done.expect("a C compiler, cc").success(), "the C program does not compile");
    program
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
