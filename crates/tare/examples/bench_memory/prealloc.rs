// SPDX-License-Identifier: Apache-2.0
//! Preallocation beside QEMU's, by size and pages: from nothing to all memory there. QEMU's is the difference between a
//! start with and one without it, to the first line of its monitor; tare's goes from the first `mmap` to the last page.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use base::mmap::Mmap;
use mem::Zeroing;
use mem::backing::back;
use mem::prealloc::{Prealloc, Way};
use spec::{Memory, Pages};

use crate::{Options, available, gib, promise, timed};

/// The sizes that the project promises something for.
const SIZES: [u64; 3] = [1 << 30, 4 << 30, 16 << 30];

pub fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Whether the host has that much to give, in such pages.
pub fn fits(size: u64, pages: Pages) -> bool {
    if !pages.are_reserved() {
        return size + (1 << 30) < available();
    }
    let file = format!("/sys/kernel/mm/hugepages/hugepages-{}kB/free_hugepages", pages.bytes() >> 10);
    let free = std::fs::read_to_string(file).ok().and_then(|t| t.trim().parse::<u64>().ok()).unwrap_or(0);
    free * pages.bytes() >= size
}

/// One start of QEMU, to its monitor's greeting, with `threads` that preallocate or none.
pub fn qemu(size: u64, pages: Pages, threads: usize) -> Option<Duration> {
    let prealloc =
        if threads == 0 { "prealloc=off".to_owned() } else { format!("prealloc=on,prealloc-threads={threads}") };
    let huge = match pages {
        Pages::Huge2M => ",hugetlb=on,hugetlbsize=2M",
        Pages::Huge1G => ",hugetlb=on,hugetlbsize=1G",
        _ => "",
    };
    let kind = if huge.is_empty() { "memory-backend-ram" } else { "memory-backend-memfd,share=off" };
    let mut command = Command::new("qemu-system-x86_64");
    command.args([
        "-accel",
        "tcg",
        "-M",
        "pc,memory-backend=m",
        "-nodefaults",
        "-display",
        "none",
        "-S",
        "-qmp",
        "stdio",
    ]);
    command.args(["-m", &format!("{}M", size >> 20), "-object", &format!("{kind},id=m,size={size}{huge},{prealloc}")]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    if pages == Pages::Small {
        // QEMU asks for huge pages itself, and has no flag against it.
        let small = || {
            // SAFETY: the call takes numbers, between fork and exec.
            let rc = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
            if rc < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
        };
        // SAFETY: `small` makes one system call and allocates nothing.
        unsafe { command.pre_exec(small) };
    }
    let (child, took) = timed(|| {
        let mut child = command.spawn().ok()?;
        let mut line = String::new();
        let read = BufReader::new(child.stdout.take()?).read_line(&mut line);
        let greeted = read.is_ok() && line.contains("QMP");
        let _ = child.kill();
        Some((child, greeted))
    });
    let (mut child, greeted) = child?;
    let _ = child.wait();
    greeted.then_some(took)
}

/// One preparation by tare.
fn tare(size: u64, pages: Pages, way: Way, threads: usize) -> Option<Duration> {
    let memory = Memory { size, pages, ..Memory::default() };
    let (ready, took) = timed(|| {
        let backed = back(&mem::ranges(size), None, &memory).ok()?;
        let work = Prealloc::new(&backed.ram, way);
        std::thread::scope(|scope| {
            (0..threads).for_each(|_| drop(scope.spawn(|| work.work())));
        });
        work.result().ok()?;
        Some(backed)
    });
    ready.map(|_| took)
}

/// What memory allows: as many threads that do nothing but write zeroes to memory that is there, with one instruction
/// (`rep stosb`) or past the caches, all at once or in steps. A kernel clears a page at a time, and the instruction is only
/// let off reading what it overwrites where it has very much of it.
fn allowed(size: u64, pages: Pages, threads: usize, (way, step): (Zeroing, usize)) -> Option<Duration> {
    let memory = Memory { size, pages, ..Memory::default() };
    let mut parts = Vec::new();
    for _ in 0..threads {
        let map = Mmap::reserved((size / threads as u64) as usize & !((2 << 20) - 1), 2 << 20).ok()?;
        let huge = if memory.pages == Pages::Huge2M { libc::MAP_HUGETLB | libc::MAP_HUGE_2MB } else { 0 };
        map.put(0, map.len(), None, libc::MAP_PRIVATE | huge).ok()?;
        if pages == Pages::Transparent {
            map.advise_huge_pages();
        }
        map.populate().ok()?;
        parts.push(map);
    }
    let ((), took) = timed(|| {
        std::thread::scope(|scope| {
            for map in &mut parts {
                scope.spawn(|| {
                    let len = map.len();
                    (0..len).step_by(step).for_each(|at| way.fill(map, at, step.min(len - at)));
                });
            }
        });
    });
    Some(took)
}

/// The best of what is measured, where anything was.
#[derive(Default)]
struct Best(Option<Duration>);

impl Best {
    fn add(&mut self, took: Option<Duration>) {
        self.0 = self.0.into_iter().chain(took).min();
    }

    fn show(&self, name: &str, size: u64) {
        match self.0 {
            Some(took) => println!(
                "    {name:<29} {:>8.1} ms {:>6.2} GiB/s",
                took.as_secs_f64() * 1e3,
                gib(size) / took.as_secs_f64()
            ),
            None => println!("    {name:<29}  could not be had"),
        }
    }

    fn seconds(&self) -> f64 {
        self.0.map_or(f64::NAN, |took| took.as_secs_f64())
    }
}

pub fn run(options: &Options) {
    for size in SIZES.into_iter().filter(|size| *size <= options.max) {
        for (pages, name) in [(Pages::Small, "4 KiB"), (Pages::Transparent, "THP"), (Pages::Huge2M, "2 MiB")] {
            if options.pages.is_some_and(|wanted| wanted != pages) {
                continue;
            }
            println!("\n{} GiB in {name} pages", size >> 30);
            if fits(size, pages) { case(options, size, pages) } else { println!("    this host has not as many free") }
        }
    }
}

/// Has the host find `size` bytes, if it is a virtual machine that gave back to its own host what nobody used: who comes first
/// would pay for that, for seconds now and then, and who comes next would not. Pages that are set aside were never given back.
fn found(size: u64, pages: Pages) {
    if pages.are_reserved() {
        return;
    }
    if let Ok(map) = Mmap::anonymous_aligned(size as usize, 2 << 20) {
        map.advise_huge_pages();
        // Where it can't be had the sample itself will say so.
        let _ = map.populate();
    }
}

fn case(options: &Options, size: u64, pages: Pages) {
    let cpus = cpus();
    let (mut touch, mut populate, mut parallel) = (Best::default(), Best::default(), Best::default());
    let (mut one, mut many, mut limit) = (Best::default(), Best::default(), Best::default());
    let (mut bare, mut wide, mut paged) = (Best::default(), Best::default(), Best::default());
    let fastest = Zeroing::fastest();
    for _ in 0..options.rounds {
        found(size, pages);
        bare.add(qemu(size, pages, 0));
        found(size, pages);
        parallel.add(tare(size, pages, Way::Populate, cpus));
        found(size, pages);
        many.add(qemu(size, pages, cpus));
        limit.add(allowed(size, pages, cpus, (Zeroing::Erms, usize::MAX)));
        wide.add(allowed(size, pages, cpus, (fastest, usize::MAX)));
        paged.add(allowed(size, pages, cpus, (Zeroing::Erms, 4096)));
        found(size, pages);
        populate.add(tare(size, pages, Way::Populate, 1));
        found(size, pages);
        one.add(qemu(size, pages, 1));
        found(size, pages);
        touch.add(tare(size, pages, Way::Touch, 1));
    }
    let less = |best: &Best| Best(best.0.zip(bare.0).map(|(with, without)| with.saturating_sub(without)));
    let (one, many) = (less(&one), less(&many));
    touch.show("tare prealloc=touch", size);
    populate.show("tare prealloc=populate", size);
    parallel.show(&format!("tare prealloc=parallel ({cpus})"), size);
    one.show("QEMU prealloc-threads=1", size);
    many.show(&format!("QEMU prealloc-threads={cpus}"), size);
    limit.show("what memory allows (erms)", size);
    wide.show(&format!("the same ({})", fastest.name()), size);
    paged.show("the same (erms, 4 KiB a time)", size);
    promise("parallel beside QEMU's best", one.seconds().min(many.seconds()) / parallel.seconds(), 1.0);
    promise("parallel beside what memory allows", limit.seconds() / parallel.seconds(), 0.9);
    println!("  parallel beside what it allows 4 KiB at a time: {:.2}", paged.seconds() / parallel.seconds());
}
