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

/// Where the code runs: 2 MiB.
const ENTRY: u64 = 0x20_0000;
/// mov dx, 0x3f8; mov al, '\n'; out dx, al; mov dx, 0x600; mov al, 0x34; out dx, al; hlt
const CODE: [u8; 15] = [0x66, 0xba, 0xf8, 0x03, 0xb0, b'\n', 0xee, 0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xf4];
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
    fs::write(&raw, CODE).unwrap();
    fs::write(&elf, elf_of(&CODE)).unwrap();
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

/// An ELF64 executable with `code` as its one segment.
fn elf_of(code: &[u8]) -> Vec<u8> {
    let mut out = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    out.extend_from_slice(&[2, 0, 62, 0, 1, 0, 0, 0]);
    for word in [ENTRY, 64, 0] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.extend_from_slice(&[0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 64, 0, 0, 0, 0, 0]);
    out.extend_from_slice(&[1, 0, 0, 0, 5, 0, 0, 0]);
    let len = code.len() as u64;
    for word in [0x1000, ENTRY, ENTRY, len, len, 0x1000] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.resize(0x1000, 0);
    out.extend_from_slice(code);
    out
}
