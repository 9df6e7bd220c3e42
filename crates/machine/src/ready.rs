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
use spec::Prealloc as When;

use crate::error::{Error, host};
use crate::hotplug::{self, MemoryControl};
use crate::ledger::memory;
use crate::vcpu::affinity::CpuSet;

/// How often the progress bar moves.
const TURN: Duration = Duration::from_millis(100);
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
        format!(
            "start-up: prealloc {} by {} threads: mmap {:.2} ms, fault and zero {:.2} ms{rate}, pin {:.2} ms, map {:.2} ms, \
             vCPU {:.2} ms; {} MiB ready, {} of them huge",
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
    if !matches!(spec.memory.prealloc, When::Off | When::Pool) && !spec.memory.pages.are_reserved() {
        check_room(spec.memory.size)?;
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
    let work = |way| Arc::new(Prealloc::new(ram, way));
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
            Ok(Later::Background(Arc::new(Prealloc::of_hot(ram, rest, Way::Populate))))
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

/// A progress bar on a terminal, until all threads are done. Short work shows none.
fn show(work: &Prealloc, running: &[JoinHandle<()>]) {
    use std::io::IsTerminal;
    let (begun, terminal) = (Instant::now(), std::io::stderr().is_terminal());
    let mut shown = false;
    let mut nap = Duration::from_micros(50);
    while running.iter().any(|thread| !thread.is_finished()) {
        std::thread::sleep(nap);
        nap = (nap * 2).min(TURN);
        if terminal && begun.elapsed() > TURN * 2 {
            // Standard error may be closed; there is nobody left to tell.
            let _ = write!(std::io::stderr(), "\r{}", bar(work.done(), work.total(), begun.elapsed()));
            shown = true;
        }
    }
    if shown {
        let _ = write!(std::io::stderr(), "\r{:width$}\r", "", width = BAR + 50);
    }
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

/// Refuses what would only wake the kernel's out-of-memory killer: more than is free, or than the limit of this cgroup.
fn check_room(size: u64) -> Result<(), Error> {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = field(&text, "MemAvailable:").map(|free| free + field(&text, "SwapFree:").unwrap_or(0));
    if let Some(free) = free.filter(|free| *free < size) {
        return Err(Error::TooMuch(format!(
            "{} MiB of guest memory can't be made ready, {} MiB are free on this host: --memory prealloc; ask for less, or \
             take prealloc= out",
            size >> 20,
            free >> 20
        )));
    }
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let mut folder = std::path::Path::new("/sys/fs/cgroup").join(own);
    while folder.starts_with("/sys/fs/cgroup") {
        let number = |name: &str| std::fs::read_to_string(folder.join(name)).ok()?.trim().parse::<u64>().ok();
        if let (Some(max), Some(now)) = (number("memory.max"), number("memory.current"))
            && max.saturating_sub(now) < size
        {
            return Err(Error::TooMuch(format!(
                "{} MiB of guest memory can't be made ready, this cgroup may have {} MiB more: --memory prealloc; raise \
                 {}/memory.max, or ask for less",
                size >> 20,
                max.saturating_sub(now) >> 20,
                folder.display()
            )));
        }
        if !folder.pop() {
            break;
        }
    }
    Ok(())
}

/// A field of `/proc/meminfo`, in bytes.
fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with(name))?;
    Some(line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()? << 10)
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
    fn the_bar_fills_up() {
        let second = Duration::from_secs(1);
        assert_eq!(bar(0, 8 << 30, second), format!("tare: memory [{}] 0.0 of 8.0 GiB, 0.0 GiB/s", "-".repeat(30)));
        let half = format!("tare: memory [{}{}] 4.0 of 8.0 GiB, 4.0 GiB/s", "#".repeat(15), "-".repeat(15));
        assert_eq!(bar(4 << 30, 8 << 30, second), half);
        assert!(bar(8 << 30, 8 << 30, second * 2).contains(&"#".repeat(30)));
    }
}
