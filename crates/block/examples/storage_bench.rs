// SPDX-License-Identifier: Apache-2.0
//! Compares the ways to the kernel (`aio=auto`, `io_uring`, `threads`) on one file, all in one run, in turns.
//!
//! `cargo run --release -p block --example storage_bench -- [DIR] [MIB] [PART]`: prints wall time, CPU time (user and system, all
//! threads) and context switches per request, and each mode's CPU time over that of `io_uring`, as medians. Run it under
//! `taskset -c 0` to see what a host with one CPU pays for handing work to other threads. The file is cached, so this
//! measures the way and not the device; `cache=none` reaches the device under DIR. PART divides the number of requests, for
//! machines where time is counted in instructions and figures repeat.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base::{EventFd, Seg};
use block::{Aio, Cache, Completion, Disk, Op, Options, Request};

const ROUNDS: usize = 7;
const MODES: [(&str, Aio); 3] = [("auto", Aio::Auto), ("io_uring", Aio::IoUring), ("threads", Aio::Threads)];

#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    cache: Cache,
    /// Of each ten requests so many are writes.
    writes: u64,
    /// A flush after so many requests; 0 for none.
    flush_every: u64,
    block: u64,
    depth: usize,
    requests: u64,
}

const fn case(name: &'static str, writes: u64, flush_every: u64, block: u64, depth: usize) -> Case {
    Case { name, cache: Cache::Writeback, writes, flush_every, block, depth, requests: 20_000 }
}

fn cases() -> Vec<Case> {
    let few = |c: Case, requests| Case { requests, ..c };
    let direct = |c: Case| Case { cache: Cache::None, requests: 3_000, ..c };
    vec![
        case("read 4k qd1", 0, 0, 4096, 1),
        case("read 16k qd1", 0, 0, 16 << 10, 1),
        case("read 16k qd32", 0, 0, 16 << 10, 32),
        case("write 4k qd1", 10, 0, 4096, 1),
        case("write 16k qd1", 10, 0, 16 << 10, 1),
        case("write 16k qd32", 10, 0, 16 << 10, 32),
        few(case("write 1m qd2", 10, 0, 1 << 20, 2), 1_000),
        case("rndrw 16k qd2", 4, 0, 16 << 10, 2),
        few(case("rndrw 16k qd2 flush/100", 4, 100, 16 << 10, 2), 5_000),
        direct(case("none: read 16k qd1", 0, 0, 16 << 10, 1)),
        direct(case("none: read 16k qd32", 0, 0, 16 << 10, 32)),
        direct(case("none: write 16k qd32", 10, 0, 16 << 10, 32)),
    ]
}

#[derive(Clone, Copy, Default)]
struct Cost {
    wall: f64,
    cpu: f64,
    switches: f64,
}

fn usage() -> (Duration, u64) {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills the structure, which all-zero bytes are a valid value of.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    (time(usage.ru_utime) + time(usage.ru_stime), (usage.ru_nvcsw + usage.ru_nivcsw) as u64)
}

fn run(path: &Path, case: Case, aio: Aio) -> Result<Cost, block::Error> {
    let options = Options { cache: case.cache, aio, ..Options::new(path) };
    let mut disk = Disk::open(&options)?;
    let wake = EventFd::new(0).unwrap();
    disk.attach(&wake).unwrap();
    disk.want_wake(false);
    let blocks = disk.size() / case.block;
    let area = base::mmap::Mmap::anonymous(case.depth * case.block as usize).unwrap();
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut free: Vec<u16> = (0..case.depth as u16).collect();
    let mut done: Vec<Completion> = Vec::new();
    let (mut sent, mut answered) = (0, 0);
    let (start, (cpu, switches)) = (Instant::now(), usage());
    while answered < case.requests {
        while sent < case.requests {
            let Some(id) = free.pop() else { break };
            sent += 1;
            let flush = case.flush_every != 0 && sent % case.flush_every == 0;
            let op = match next() % 10 {
                _ if flush => Op::Flush,
                n if n < case.writes => Op::Write,
                _ => Op::Read,
            };
            let ptr = area.as_ptr().wrapping_add(usize::from(id) * case.block as usize);
            let seg = [Seg { ptr, len: case.block as usize }];
            let (len, segs) = if flush { (0, &[][..]) } else { (case.block, &seg[..]) };
            disk.submit(&Request { id, op, offset: next() % blocks * case.block, len, segs });
        }
        disk.commit();
        disk.reap(&mut done);
        if done.is_empty() {
            disk.want_wake(true);
            disk.reap(&mut done);
            if done.is_empty() {
                wake.read().unwrap();
            }
            disk.want_wake(false);
        }
        for c in done.drain(..) {
            c.result.unwrap();
            answered += 1;
            free.push(c.id);
        }
    }
    let n = case.requests as f64;
    let wall = start.elapsed().as_secs_f64();
    disk.detach();
    let (cpu_end, switches_end) = usage();
    Ok(Cost {
        wall: wall * 1e6 / n,
        cpu: (cpu_end - cpu).as_secs_f64() * 1e6 / n,
        switches: (switches_end - switches) as f64 / n,
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let dir = arguments.next().map_or_else(std::env::temp_dir, PathBuf::from);
    let mib: u64 = arguments.next().map_or(128, |m| m.parse().expect("size in MiB"));
    let part: u64 = arguments.next().map_or(1, |p| p.parse().expect("a divisor"));
    let path = dir.join(format!("storage-bench-{}.raw", std::process::id()));
    std::fs::write(&path, vec![0x5a; (mib << 20) as usize]).unwrap();
    println!("{:<26}{:<10}{:>9}{:>9}{:>11}{:>15}", "case", "aio", "wall us", "cpu us", "switches", "cpu/io_uring");
    for case in cases() {
        let case = Case { requests: (case.requests / part).max(200), ..case };
        let mut costs: [Vec<Cost>; 3] = Default::default();
        for round in 0..ROUNDS {
            for turn in 0..MODES.len() {
                let mode = (turn + round) % MODES.len();
                match run(&path, case, MODES[mode].1) {
                    Ok(cost) => costs[mode].push(cost),
                    Err(e) if round == 0 => println!("{:<26}{:<10} not here: {e}", case.name, MODES[mode].0),
                    Err(_) => {}
                }
            }
        }
        let of = |mode: usize, what: fn(&Cost) -> f64| median(costs[mode].iter().map(what).collect());
        for (mode, (name, _)) in MODES.iter().enumerate().filter(|(m, _)| !costs[*m].is_empty()) {
            let ratio = of(mode, |c| c.cpu) / of(1, |c| c.cpu);
            println!(
                "{:<26}{name:<10}{:>9.2}{:>9.2}{:>11.2}{ratio:>14.2}x",
                case.name,
                of(mode, |c| c.wall),
                of(mode, |c| c.cpu),
                of(mode, |c| c.switches)
            );
        }
    }
    std::fs::remove_file(&path).unwrap();
}
