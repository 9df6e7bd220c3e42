// SPDX-License-Identifier: Apache-2.0
//! Guest memory made ready, as its description says: who works on it and when, what the user sees meanwhile, and what each
//! phase of it took.
//!
//! `build` calls it before devices exist; with `prealloc=vcpu` the vCPUs' threads do the work, with `background` a thread
//! that `run` stops at the end.

use std::io::Write;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mem::prealloc::{Prealloc, Way};
use mem::{GuestRam, MemError};
use serde::Serialize;
use spec::{Iommu, Prealloc as When};

use crate::error::{Error, host};
use crate::hotplug::{self, MemoryControl};
use crate::ledger::memory;
use crate::room;
use crate::vcpu::affinity::CpuSet;

/// How often the progress bar moves.
const TURN: Duration = Duration::from_millis(100);
/// How often a log gets a line.
const LINES: Duration = Duration::from_secs(5);
/// Characters of the bar.
const BAR: usize = 30;

/// What each phase of a machine's start took, and what came of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StartUp {
    /// How memory was made ready, as in `prealloc=`.
    pub prealloc: &'static str,
    /// By how many threads.
    pub threads: usize,
    /// Finding addresses and what is behind them, nanoseconds.
    pub mmap_ns: u64,
    /// Faults, and the zeroing that the kernel does in them, before the guest started, nanoseconds.
    pub fault_and_zero_ns: u64,
    /// Pinning for devices that are passed through, nanoseconds.
    pub pin_ns: u64,
    /// Telling KVM, nanoseconds.
    pub map_ns: u64,
    /// Making vCPUs, nanoseconds.
    pub vcpu_ns: u64,
    /// Bytes that existed when the guest started, by this.
    pub ready: u64,
    /// Of it, in huge pages.
    pub huge: u64,
    /// How devices of the host are behind the IOMMU, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iommu: Option<Iommu>,
}

impl StartUp {
    /// The line of the ledger.
    #[must_use]
    pub fn line(&self) -> String {
        let ms = |ns: u64| ns as f64 / 1e6;
        let rate = if self.fault_and_zero_ns > 0 && self.ready > 0 {
            format!(" ({:.1} GiB/s)", self.ready as f64 / (1u64 << 30) as f64 / (self.fault_and_zero_ns as f64 / 1e9))
        } else {
            String::new()
        };
        let iommu = self.iommu.map_or_else(String::new, |iommu| format!("; devices by {iommu}"));
        format!(
            "start-up: prealloc {} by {} threads: mmap {:.2} ms, fault and zero {:.2} ms{rate}, pin {:.2} ms, map {:.2} ms, \
             vCPU {:.2} ms; {} MiB ready, {} of them huge{iommu}",
            self.prealloc,
            self.threads,
            ms(self.mmap_ns),
            ms(self.fault_and_zero_ns),
            ms(self.pin_ns),
            ms(self.map_ns),
            ms(self.vcpu_ns),
            self.ready >> 20,
            self.huge >> 20
        )
    }
}

/// The memory of `spec`, found or lent, its addresses known and nothing touched; `startup` hears how long that took.
///
/// # Errors
/// [`Error::Memory`] and [`Error::TooMuch`].
pub fn find(spec: &spec::Vm, startup: &mut StartUp) -> Result<GuestRam, Error> {
    // Devices that are passed through have all of it made at once, too.
    let by_hand = spec.memory.prealloc == When::Off;
    if !(by_hand && spec.vfio.is_empty()) && spec.memory.prealloc != When::Pool && !spec.memory.pages.are_reserved() {
        room::check(spec.memory.size, if by_hand { room::PINNED } else { room::ASKED })?;
    }
    let begun = Instant::now();
    let backed = mem::backing::back(&mem::ranges(spec.memory.at_start()), hotplug::to_plug(spec), &spec.memory)?;
    startup.mmap_ns = nanoseconds(begun);
    if let Some(line) = backed.fell_back {
        base::news::print(&line);
    }
    Ok(backed.ram)
}

/// Nanoseconds since `begun`.
pub fn nanoseconds(begun: Instant) -> u64 {
    begun.elapsed().as_nanos() as u64
}

/// Work that is left for when the vCPUs start.
pub enum Later {
    /// None.
    Nothing,
    /// For the vCPUs' threads.
    Vcpus(Arc<Prealloc>),
    /// For a thread beside them.
    Background(Arc<Prealloc>),
}

/// Makes `ram` ready as far as that is to be done before the guest starts.
///
/// # Errors
/// [`Error::Memory`] when the host has less.
pub fn make(spec: &spec::Vm, ram: &GuestRam, startup: &mut StartUp) -> Result<Later, Error> {
    // Pages that the host has set aside are the guest's already.
    let asking = |work: Prealloc| {
        Arc::new(if spec.memory.pages.are_reserved() { work } else { work.asking(Box::new(room::left)) })
    };
    let work = |way| asking(Prealloc::new(ram, way));
    let vcpus = usize::from(spec.cpus.count);
    let (name, threads, way) = match spec.memory.prealloc {
        When::Off => ("off", 0, None),
        When::Pool => ("pool", 0, None),
        When::Touch => ("touch", 1, Some(Way::Touch)),
        When::Populate => ("populate", 1, Some(Way::Populate)),
        When::Parallel => ("parallel", spec.memory.prealloc_threads.map_or(vcpus, usize::from), Some(Way::Populate)),
        When::Vcpu => ("vcpu", vcpus, None),
        When::Background => ("background", 1, None),
    };
    (startup.prealloc, startup.threads) = (name, threads);
    match (way, spec.memory.prealloc) {
        (Some(way), _) => {
            let begun = Instant::now();
            let work = work(way);
            by_threads(&work, threads, spec.memory.host_node)?;
            startup.fault_and_zero_ns = nanoseconds(begun);
            startup.ready = work.done();
            startup.huge = huge(ram);
            Ok(Later::Nothing)
        }
        (None, When::Vcpu) => Ok(Later::Vcpus(work(Way::Populate))),
        (None, When::Background) if spec.memory.boot.is_some() => {
            let begun = Instant::now();
            let first = work(Way::Populate);
            by_threads(&first, vcpus, spec.memory.host_node)?;
            startup.fault_and_zero_ns = nanoseconds(begun);
            (startup.ready, startup.huge) = (first.done(), huge(ram));
            let rest = spec.memory.size - spec.memory.at_start();
            Ok(Later::Background(asking(Prealloc::of_hot(ram, rest, Way::Populate))))
        }
        (None, When::Background) => Ok(Later::Background(work(Way::Populate))),
        (None, _) => Ok(Later::Nothing),
    }
}

/// Bytes of `ram` that are in huge pages.
pub fn huge(ram: &GuestRam) -> u64 {
    let ranges: Vec<(u64, u64)> = ram.regions().map(|(_, size, host)| (host.0, host.0 + size)).collect();
    memory(&std::fs::read_to_string("/proc/self/smaps").unwrap_or_default(), &ranges).guest_huge
}

/// Has `threads` threads do `work`, on the CPUs of `node` if that is said, while this one shows how far they are.
fn by_threads(work: &Arc<Prealloc>, threads: usize, node: Option<u32>) -> Result<(), Error> {
    let cpus = node.and_then(cpus_of);
    let mut running = Vec::with_capacity(threads);
    for number in 0..threads {
        let (work, cpus) = (work.clone(), cpus.clone());
        let thread =
            std::thread::Builder::new().name(format!("ready-{number}")).stack_size(64 << 10).spawn(move || {
                // Where the kernel will not have it the work is done all the same.
                let _ = cpus.map(|cpus| cpus.pin_self());
                work.work();
            });
        running.push(thread.map_err(host("start a thread that makes memory ready"))?);
    }
    show(work, &running);
    for thread in running {
        // A thread that panics has said so, and its piece is missing from the count.
        let _ = thread.join();
    }
    finished(work)
}

/// How it went, for the user.
fn finished(work: &Prealloc) -> Result<(), Error> {
    work.result().map_err(|source| MemError::Ready { done: work.done() >> 20, size: work.total() >> 20, source }.into())
}

/// Shows the user how far memory is, until all threads are done: a bar on a terminal, and lines in a log. Short work shows none.
fn show(work: &Prealloc, running: &[JoinHandle<()>]) {
    use std::io::IsTerminal;
    let begun = Instant::now();
    let mut shown = Shown { terminal: std::io::stderr().is_terminal(), last: None };
    let mut nap = Duration::from_micros(50);
    // Standard error may be closed; there is nobody left to tell.
    while running.iter().any(|thread| !thread.is_finished()) {
        std::thread::sleep(nap);
        nap = (nap * 2).min(TURN);
        let _ = std::io::stderr().write_all(shown.turn(work.done(), work.total(), begun.elapsed()).as_bytes());
    }
    let _ = std::io::stderr().write_all(shown.end(work.done(), work.total(), begun.elapsed()).as_bytes());
}

/// What the user has seen so far.
struct Shown {
    terminal: bool,
    /// When something was written last, since the beginning.
    last: Option<Duration>,
}

impl Shown {
    /// What to write now.
    fn turn(&mut self, done: u64, total: u64, after: Duration) -> String {
        let wait = if self.terminal { TURN * 2 } else { LINES };
        if after < self.last.map_or(wait, |last| last + if self.terminal { TURN } else { LINES }) {
            return String::new();
        }
        self.last = Some(after);
        if self.terminal { format!("\r{}", bar(done, total, after)) } else { line(done, total, after) }
    }

    /// What to write at the end: the bar goes, a log that has a line gets the last one.
    fn end(&self, done: u64, total: u64, after: Duration) -> String {
        match (self.last, self.terminal) {
            (None, _) => String::new(),
            (Some(_), true) => format!("\r{:width$}\r", "", width = BAR + 50),
            (Some(_), false) => line(done, total, after),
        }
    }
}

/// A line of a log.
fn line(done: u64, total: u64, after: Duration) -> String {
    let (gib, seconds) = (|bytes: u64| bytes as f64 / (1u64 << 30) as f64, after.as_secs_f64().max(1e-9));
    let rate = gib(done) / seconds;
    format!("tare: memory: {:.1} of {:.1} GiB ready after {seconds:.1} s, {rate:.1} GiB/s\n", gib(done), gib(total))
}

fn bar(done: u64, total: u64, after: Duration) -> String {
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let full = (done as u128 * BAR as u128 / u128::from(total.max(1))) as usize;
    let rate = gib(done) / after.as_secs_f64().max(1e-9);
    let (full, free) = ("#".repeat(full), "-".repeat(BAR - full.min(BAR)));
    format!("tare: memory [{full}{free}] {:.1} of {:.1} GiB, {rate:.1} GiB/s", gib(done), gib(total))
}

/// The CPUs of a node of the host, if it has any.
fn cpus_of(node: u32) -> Option<CpuSet> {
    let text = std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()?;
    CpuSet::listed(text.trim())
}

/// A thread that goes on with the work while the guest runs.
pub struct Background {
    work: Arc<Prealloc>,
    thread: JoinHandle<()>,
}

impl Background {
    /// Starts it, if there is such work; what becomes ready of a part that is plugged is the guest's to plug, through `memory`.
    ///
    /// # Errors
    /// When the host gives no more threads.
    pub fn start(later: &Later, memory: Option<&MemoryControl>) -> Result<Option<Self>, Error> {
        let Later::Background(work) = later else { return Ok(None) };
        let (own, work) = (work.clone(), work.clone());
        let mut rest = memory.cloned().map(Rest::new);
        let thread = std::thread::Builder::new().name("ready-0".to_owned()).stack_size(64 << 10).spawn(move || {
            // The guest goes first; a kernel that will not have it goes on with a plain thread.
            let _ = base::sched::yield_to_all();
            own.work_telling(|done| rest.iter_mut().for_each(|rest| rest.grow(done)));
            if let Err(e) = finished(&own) {
                // The guest goes on: it gets each page when it first touches it, if the host has one then.
                base::news::print_beside_guest(&e.to_string());
            }
        });
        Ok(Some(Self { work, thread: thread.map_err(host("start a thread that makes memory ready"))? }))
    }

    /// Ends it, after the piece at hand; gives the bytes that it made ready.
    pub fn stop(self) -> u64 {
        self.work.stop();
        // A thread that panics has said so.
        let _ = self.thread.join();
        self.work.done()
    }
}

/// The rest of a guest's memory, which it is told to plug as it becomes ready.
struct Rest {
    memory: MemoryControl,
    /// Bytes at the start, and what the guest was told last.
    first: u64,
    told: u64,
}

impl Rest {
    fn new(memory: MemoryControl) -> Self {
        let first = memory.wanted();
        Self { memory, first, told: first }
    }

    /// `done` bytes of it are ready. Once somebody else has said how much there is to be, nothing is said any more.
    fn grow(&mut self, done: u64) {
        let bytes = self.first + done / spec::PLUG_UNIT * spec::PLUG_UNIT;
        if bytes > self.told && self.memory.wanted() == self.told && self.memory.resize(bytes).is_ok() {
            self.told = bytes;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn vm(prealloc: When) -> spec::Vm {
        let mut vm = spec::Vm::new("k");
        vm.memory = spec::Memory { size: 16 << 20, prealloc, ..spec::Memory::default() };
        vm.cpus.count = 2;
        vm
    }

    #[test]
    fn each_way_makes_all_of_it_ready_when_it_is_due() {
        for (when, name, threads, before) in [
            (When::Off, "off", 0, 0),
            (When::Touch, "touch", 1, 16 << 20),
            (When::Populate, "populate", 1, 16 << 20),
            (When::Parallel, "parallel", 2, 16 << 20),
            (When::Vcpu, "vcpu", 2, 0),
            (When::Background, "background", 1, 0),
        ] {
            let (vm, mut startup) = (vm(when), StartUp::default());
            let ram = find(&vm, &mut startup).unwrap();
            let later = make(&vm, &ram, &mut startup).unwrap();
            assert_eq!((startup.prealloc, startup.threads, startup.ready), (name, threads, before));
            let after = match (Background::start(&later, None).unwrap(), &later) {
                (Some(background), _) => {
                    while background.work.done() < 16 << 20 {
                        std::thread::yield_now();
                    }
                    background.stop()
                }
                (None, Later::Vcpus(work)) => {
                    work.work();
                    work.done()
                }
                _ => startup.ready,
            };
            assert_eq!(after, if when == When::Off { 0 } else { 16 << 20 }, "{name}");
            assert!(startup.line().contains(&format!("prealloc {name} by {threads} threads")));
            assert!(startup.line().ends_with("of them huge"));
            startup.iommu = Some(Iommu::Iommufd);
            assert!(startup.line().ends_with("of them huge; devices by iommufd"));
        }
    }

    #[test]
    fn a_part_is_ready_at_once_and_the_rest_where_it_can_be_plugged() {
        let (mut vm, mut startup) = (vm(When::Background), StartUp::default());
        vm.memory = spec::Memory { size: 144 << 20, boot: Some(16 << 20), ..vm.memory };
        let ram = find(&vm, &mut startup).unwrap();
        assert_eq!((ram.size(), ram.hot().unwrap().size()), (16 << 20, 128 << 20));
        let later = make(&vm, &ram, &mut startup).unwrap();
        assert_eq!(startup.ready, 16 << 20);
        let Later::Background(work) = later else { panic!("the rest is left") };
        work.work();
        assert_eq!(work.done(), 128 << 20);
    }

    #[test]
    fn what_no_host_has_is_refused_before_anything_is_touched() {
        let mut vm = vm(When::Parallel);
        vm.memory.size = 8 << 40;
        let said = find(&vm, &mut StartUp::default()).err().unwrap().to_string();
        assert!(said.starts_with("8388608 MiB of guest memory can't be made ready") && !said.contains('\n'), "{said}");
    }

    #[test]
    fn a_terminal_has_a_bar_and_a_log_has_lines() {
        let (gib, ms) = (1u64 << 30, Duration::from_millis);
        let mut terminal = Shown { terminal: true, last: None };
        assert_eq!((terminal.turn(0, gib, ms(100)), terminal.end(gib, gib, ms(150))), (String::new(), String::new()));
        let first = terminal.turn(gib / 2, gib, ms(200));
        assert!(first.starts_with("\rtare: memory [####") && first.ends_with("0.5 of 1.0 GiB, 2.5 GiB/s"), "{first:?}");
        assert_eq!(terminal.turn(gib / 2, gib, ms(250)), "", "not more often than it can be seen");
        assert!(terminal.turn(gib, gib, ms(300)).contains(&"#".repeat(30)));
        let end = terminal.end(gib, gib, ms(400));
        assert!(end.starts_with('\r') && end.ends_with('\r') && end.trim().is_empty(), "nothing is left of it");
        let mut log = Shown { terminal: false, last: None };
        assert_eq!(log.turn(gib, 8 * gib, ms(4900)), "");
        assert_eq!(log.turn(4 * gib, 8 * gib, ms(5000)), "tare: memory: 4.0 of 8.0 GiB ready after 5.0 s, 0.8 GiB/s\n");
        assert_eq!(log.turn(5 * gib, 8 * gib, ms(6000)), "");
        assert_eq!(log.end(8 * gib, 8 * gib, ms(8000)), "tare: memory: 8.0 of 8.0 GiB ready after 8.0 s, 1.0 GiB/s\n");
    }

    #[test]
    fn the_bar_fills_up() {
        let second = Duration::from_secs(1);
        assert_eq!(bar(0, 8 << 30, second), format!("tare: memory [{}] 0.0 of 8.0 GiB, 0.0 GiB/s", "-".repeat(30)));
        let half = format!("tare: memory [{}{}] 4.0 of 8.0 GiB, 4.0 GiB/s", "#".repeat(15), "-".repeat(15));
        assert_eq!(bar(4 << 30, 8 << 30, second), half);
        assert!(bar(8 << 30, 8 << 30, second * 2).contains(&"#".repeat(30)));
    }
}
