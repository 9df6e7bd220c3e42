// SPDX-License-Identifier: Apache-2.0
//! What a running monitor weighs beside its guest's memory: guests of 64 MiB, 1 GiB and 16 GiB, then ten at once; beside it the
//! smallest C program that runs a guest (`first_instruction`'s). Promised: 3 MiB resident, whatever the guest's size, and 1.5 MiB
//! for the tenth machine where shared pages are divided among their users.
//!
//! `cargo run --release -p tare --example footprint`, with the release build of tare beside it and a C compiler; runs on any
//! /dev/kvm. The guest has one vCPU and one disk, reads a block of the disk, says so and halts. The kernel (smaps) is asked then.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod smaps;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use smaps::Weight;
use testkit::Code;

/// Where the code runs: 2 MiB.
const ENTRY: u64 = 0x20_0000;
/// What the guest reads from its disk and writes to its console.
const SAID: &[u8; 8] = b"running\n";
const SIZES: [(&str, u64); 3] = [("64M", 64 << 20), ("1G", 1 << 30), ("16G", 16 << 30)];
const SAMPLES: usize = 5;
const AT_ONCE: usize = 10;
const MIB: f64 = 1024.0;
/// Promised, KiB.
const RSS: f64 = 3.0 * MIB;
const PSS: f64 = 1.5 * MIB;

fn main() {
    if fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        println!("skipped: no usable /dev/kvm");
        return;
    }
    let dir = std::env::temp_dir().join(format!("tare-footprint-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let bench = Bench::new(&dir);
    println!("KiB beside guest memory, medians of {SAMPLES}: one vCPU, one disk, the guest has read a block and halts");
    println!("{:<28}{:>8}{:>8}{:>10}{:>10}{:>7}", "", "RSS", "PSS", "written", "promised", "ratio");
    row("smallest C program, 64M", &median(|| Running::start(&mut bench.smallest()).weight()), None);
    let mut first = None;
    for (name, size) in SIZES {
        if size > host_memory() {
            println!("tare, {name:<22} skipped: this host has less memory");
            continue;
        }
        let weight = median(|| Running::start(&mut bench.tare(name, 0)).weight());
        row(&format!("tare, {name}"), &weight, Some(("RSS", weight.rss, RSS)));
        let flat = *first.get_or_insert(weight.rss);
        if flat < weight.rss {
            println!("{:<28}{:>+8} on the smallest guest's", "", weight.rss - flat);
        }
    }
    let machines: Vec<Running> = (0..AT_ONCE).map(|n| Running::start(&mut bench.tare("64M", n))).collect();
    let tenth = machines.last().unwrap().weight();
    row(&format!("tare, 64M, the last of {AT_ONCE}"), &tenth, Some(("PSS", tenth.pss, PSS)));
    println!("\nwhat that is made of, KiB:\n{:<28}{:>8}{:>8}{:>10}", "", "RSS", "PSS", "written");
    for part in machines.last().unwrap().parts() {
        println!("{:<28}{:>8}{:>8}{:>10}", part.0, part.1.rss, part.1.pss, part.1.written);
    }
    drop(machines);
    fs::remove_dir_all(&dir).unwrap();
}

/// A line of the table; with which figure is promised, what it is and what it may be.
fn row(name: &str, weight: &Weight, promised: Option<(&str, u64, f64)>) {
    let verdict = promised.map_or(String::new(), |(what, is, most)| {
        let ratio = is as f64 / most;
        format!("{:>10}{ratio:>7.2} {}", format!("{what} {most:.0}"), if ratio <= 1.0 { "kept" } else { "missed" })
    });
    println!("{name:<28}{:>8}{:>8}{:>10}{verdict}", weight.rss, weight.pss, weight.written);
}

fn median(sample: impl Fn() -> Weight) -> Weight {
    let mut samples: Vec<Weight> = (0..SAMPLES).map(|_| sample()).collect();
    samples.sort_by_key(|w| w.rss);
    samples[SAMPLES / 2]
}

/// The programs and their files.
struct Bench {
    dir: PathBuf,
    tare: PathBuf,
    smallest: PathBuf,
}

impl Bench {
    fn new(dir: &Path) -> Self {
        let mut code = Code::new();
        fs::write(dir.join("guest.elf"), code.read_disk().halt().elf(ENTRY)).unwrap();
        let mut code = Code::new();
        fs::write(dir.join("guest.bin"), code.say(std::str::from_utf8(SAID).unwrap()).halt().as_bytes()).unwrap();
        for n in 0..AT_ONCE {
            let path = disk(dir, n);
            fs::write(&path, SAID).unwrap();
            fs::File::options().write(true).open(path).unwrap().set_len(64 << 20).unwrap();
        }
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/first_instruction/smallest.c");
        let smallest = dir.join("smallest");
        let done = Command::new("cc").args(["-O2", "-pthread", "-o"]).arg(&smallest).arg(source).status();
        assert!(done.expect("a C compiler, cc").success(), "the C program does not compile");
        let beside = std::env::current_exe().unwrap();
        let tare = beside.parent().and_then(Path::parent).unwrap().join("tare");
        Self { dir: dir.into(), tare, smallest }
    }

    fn smallest(&self) -> Command {
        let mut command = Command::new(&self.smallest);
        command.arg(self.dir.join("guest.bin"));
        command
    }

    /// A machine with the `n`th disk.
    fn tare(&self, memory: &str, n: usize) -> Command {
        let mut command = Command::new(&self.tare);
        command.args(["run", "--console", "serial", "--transport", "mmio", "--memory", memory]);
        command.arg("--disk").arg(disk(&self.dir, n)).arg("--kernel").arg(self.dir.join("guest.elf"));
        command
    }
}

fn disk(dir: &Path, n: usize) -> PathBuf {
    dir.join(format!("disk{n}.raw"))
}

/// A monitor whose guest has said what it should; killed in the end.
struct Running(Child);

impl Running {
    fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("a program beside this one");
        let mut said = [0; SAID.len()];
        child.stdout.as_mut().unwrap().read_exact(&mut said).expect("the guest says something");
        assert_eq!(&said, SAID);
        // What the monitor does after the guest's last exit is over well within this.
        std::thread::sleep(Duration::from_millis(100));
        Self(child)
    }

    fn weight(&self) -> Weight {
        self.parts().iter().fold(Weight::default(), |sum, (_, part)| sum.plus(part))
    }

    fn parts(&self) -> Vec<(String, Weight)> {
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", self.0.id())).unwrap();
        smaps::parts(&smaps)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may be over already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Memory of the host in bytes.
fn host_memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap();
    let kib =
        text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}
