// SPDX-License-Identifier: Apache-2.0
//! Samples of where this process spends its CPU time: the kernel's `perf_event_open` with its software clock, which needs no
//! counters of the CPU, a ring for each CPU, and a thread that empties them.
//!
//! The main thread starts it before it makes any other thread: what it samples is the thread that starts it and all that
//! this one starts from then on. The kernel gives its own callers; those in this process are followed on a copy of the stack
//! by `objects`, since code without frame pointers tells nobody where it came from.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use super::objects::Stacks;

/// Samples that are kept at most; what comes later is counted as lost.
const LIMIT: usize = 4 << 20;
/// Bytes of a stack that are copied at most, from its top.
const STACK: u32 = 8 << 10;
/// Bytes of a ring, as far as the kernel lets this user lock them.
const RINGS: [usize; 3] = [2 << 20, 512 << 10, 64 << 10];
/// How often rings are emptied.
const TURN: Duration = Duration::from_millis(2);
const PAGE: usize = 4096;

/// `struct perf_event_attr` up to its fifth version.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    frequency: u64,
    sample: u64,
    read: u64,
    flags: u64,
    wakeup: u32,
    breakpoint: u32,
    config_1: u64,
    config_2: u64,
    branches: u64,
    registers: u64,
    stack: u32,
    clock: i32,
    registers_then: u64,
    watermark: u32,
    max_stack: u16,
    reserved: u16,
}

/// `PERF_SAMPLE_*`: instruction, thread, time, callers, registers and stack in user space.
const SAMPLE: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 5 | 1 << 12 | 1 << 13;
/// Bits of the flags: disabled, inherit, exclude_kernel, exclude_hv, comm, freq, exclude_callchain_user, use_clockid.
const FLAGS: u64 = 1 | 1 << 1 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 22 | 1 << 25;
const WITHOUT_KERNEL: u64 = 1 << 5 | 1 << 21;
/// bp, sp and ip of `PERF_REG_X86_*`.
const REGISTERS: u64 = 1 << 6 | 1 << 7 | 1 << 8;
const ENABLE: libc::c_ulong = 0x2400;
const DISABLE: libc::c_ulong = 0x2401;

/// Kinds of records.
const LOST: u32 = 2;
const COMM: u32 = 3;
const TAKEN: u32 = 9;

/// What was sampled.
#[derive(Default)]
pub struct Samples {
    /// Nanoseconds of `CLOCK_MONOTONIC`, thread, and index of the stack.
    pub taken: Vec<(u64, u32, u32)>,
    /// Different stacks, innermost address first.
    pub stacks: Vec<Arc<[u64]>>,
    /// What threads are called.
    pub names: HashMap<u32, String>,
    /// How many were lost.
    pub lost: u64,
    known: HashMap<Arc<[u64]>, u32>,
}

/// The events of one CPU and their ring.
struct Ring {
    fd: OwnedFd,
    /// A page that says how far the kernel is, then the ring.
    at: *mut AtomicU64,
    size: usize,
}

// SAFETY: the mapping is this value's alone, and stays where it is until it is dropped.
unsafe impl Send for Ring {}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length, and used by nobody else.
        unsafe { libc::munmap(self.at.cast(), PAGE + self.size) };
    }
}

impl Ring {
    /// Events of the calling thread, and of those that it starts, while they are on `cpu`.
    fn open(cpu: i32, attributes: &Attributes) -> io::Result<Self> {
        const CLOSE_ON_EXEC: libc::c_ulong = 8;
        // SAFETY: the struct is as long as it says, and is only read; the other arguments are numbers.
        let fd =
            unsafe { libc::syscall(libc::SYS_perf_event_open, ptr::from_ref(attributes), 0, cpu, -1, CLOSE_ON_EXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fresh from the kernel, and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        let mut error = io::Error::from(io::ErrorKind::OutOfMemory);
        for size in RINGS {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping where the kernel likes it.
            let at = unsafe { libc::mmap(ptr::null_mut(), PAGE + size, prot, libc::MAP_SHARED, fd.as_raw_fd(), 0) };
            if at != libc::MAP_FAILED {
                return Ok(Self { fd, at: at.cast(), size });
            }
            error = io::Error::last_os_error();
        }
        Err(error)
    }

    fn control(&self, what: libc::c_ulong) {
        // SAFETY: the call takes numbers. One that is refused leaves the events as they are.
        unsafe { libc::ioctl(self.fd.as_raw_fd(), what as _, 0) };
    }

    /// The kernel's position (0) or ours (1).
    fn position(&self, which: usize) -> &AtomicU64 {
        // SAFETY: `data_head` and `data_tail` of `struct perf_event_mmap_page`, aligned, inside its page.
        unsafe { &*self.at.add(1024 / 8 + which) }
    }

    /// Gives each record that is there to `take`.
    fn empty(&self, record: &mut Vec<u8>, mut take: impl FnMut(&[u8])) {
        let (head, mut tail) = (self.position(0).load(Ordering::Acquire), self.position(1).load(Ordering::Relaxed));
        while tail < head {
            self.copy(tail, 8, record);
            let size = record.get(6..8).and_then(|b| b.try_into().ok()).map_or(0, u16::from_le_bytes);
            if size < 8 {
                // No kernel writes this; what follows can't be found.
                tail = head;
                break;
            }
            self.copy(tail, size.into(), record);
            take(record);
            tail += u64::from(size);
        }
        fence(Ordering::SeqCst);
        self.position(1).store(tail, Ordering::Release);
    }

    /// `len` bytes from position `from` on, which the kernel has written.
    fn copy(&self, from: u64, len: usize, to: &mut Vec<u8>) {
        to.clear();
        let at = (from % self.size as u64) as usize;
        let first = len.min(self.size - at);
        for (at, len) in [(at, first), (0, len - first)] {
            // SAFETY: inside the ring; the kernel writes nothing there until the tail has moved past it.
            to.extend_from_slice(unsafe { std::slice::from_raw_parts(self.at.cast::<u8>().add(PAGE + at), len) });
        }
    }
}

/// Numbers of a record, one after another.
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (part, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(part)
    }

    fn u64(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.take(8)?.try_into().ok()?))
    }

    fn u32(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }
}

impl Samples {
    /// Notes a record.
    fn record(&mut self, record: &[u8], stacks: &mut Stacks) -> Option<()> {
        let mut words = Words(record);
        let kind = words.u32()?;
        words.u32()?;
        match kind {
            LOST => {
                words.u64()?;
                self.lost += words.u64()?;
            }
            COMM => {
                words.u32()?;
                let thread = words.u32()?;
                let name = words.0.split(|byte| *byte == 0).next()?;
                self.names.insert(thread, String::from_utf8_lossy(name).into_owned());
            }
            TAKEN => self.sample(words, stacks)?,
            _ => {}
        }
        Some(())
    }

    fn sample(&mut self, mut words: Words<'_>, stacks: &mut Stacks) -> Option<()> {
        let here = words.u64()?;
        words.u32()?;
        let (thread, time) = (words.u32()?, words.u64()?);
        // Markers of whose callers follow are the last 4095 numbers.
        let callers = words.u64()?;
        let mut stack = Vec::new();
        for _ in 0..callers {
            stack.extend(Some(words.u64()?).filter(|at| *at < u64::MAX - 4095));
        }
        if stack.is_empty() && super::objects::is_kernels(here) {
            stack.push(here);
        }
        if words.u64()? != 0 {
            let (bp, sp, ip) = (words.u64()?, words.u64()?, words.u64()?);
            let size = words.u64()? as usize;
            let copied = words.take(size)?;
            let valid = if size > 0 { words.u64()? as usize } else { 0 };
            stack.extend(stacks.follow(ip, sp, bp, copied.get(..valid.min(size))?));
        }
        if self.taken.len() >= LIMIT {
            self.lost += 1;
            return Some(());
        }
        let stack: Arc<[u64]> = stack.into();
        let number = *self.known.entry(stack.clone()).or_insert_with(|| {
            self.stacks.push(stack);
            self.stacks.len() as u32 - 1
        });
        self.taken.push((time, thread, number));
        Some(())
    }
}

/// A running sampler.
pub struct Sampler {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Samples>,
    /// Whether the kernel's own callers are seen.
    pub kernel: bool,
}

impl Sampler {
    /// Samples the calling thread, and all that it starts from now on, `rate` times a second of their CPU time.
    ///
    /// # Errors
    /// Why the kernel will not have it.
    pub fn start(rate: u64, mut stacks: Stacks) -> io::Result<Self> {
        // The thread first, so that it is none of those that are sampled.
        let (send, receive) = mpsc::channel::<Vec<Ring>>();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::Builder::new().name("profile".to_owned()).spawn(move || {
            let (mut samples, mut record) = (Samples::default(), Vec::new());
            let Ok(rings) = receive.recv() else { return samples };
            loop {
                let last = stopped.load(Ordering::Acquire);
                if last {
                    rings.iter().for_each(|ring| ring.control(DISABLE));
                }
                for ring in &rings {
                    ring.empty(&mut record, |record| {
                        // A record that ends early says nothing.
                        let _ = samples.record(record, &mut stacks);
                    });
                }
                if last {
                    return samples;
                }
                std::thread::sleep(TURN);
            }
        })?;
        let mut attributes = Attributes {
            kind: 1, // PERF_TYPE_SOFTWARE, of which event 0 is the CPU's clock
            size: size_of::<Attributes>() as u32,
            frequency: rate,
            sample: SAMPLE,
            flags: FLAGS,
            registers: REGISTERS,
            stack: STACK,
            clock: libc::CLOCK_MONOTONIC,
            ..Attributes::default()
        };
        let mut kernel = true;
        let rings = match open_all(&attributes) {
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                kernel = false;
                attributes.flags |= WITHOUT_KERNEL;
                open_all(&attributes)?
            }
            other => other?,
        };
        rings.iter().for_each(|ring| ring.control(ENABLE));
        // The thread waits for it.
        let _ = send.send(rings);
        Ok(Self { stop, thread, kernel })
    }

    /// Ends it and gives what it saw.
    #[must_use]
    pub fn stop(self) -> Samples {
        self.stop.store(true, Ordering::Release);
        // A thread that panics has said so.
        self.thread.join().unwrap_or_default()
    }
}

/// Nanoseconds of the clock that samples are stamped with, which is `Instant`'s too.
#[must_use]
pub fn monotonic() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the struct is written to and is long enough. This clock is there on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A ring for each CPU that is on.
fn open_all(attributes: &Attributes) -> io::Result<Vec<Ring>> {
    // SAFETY: the call takes a number.
    let most = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) }.max(1);
    let mut rings = Vec::new();
    for cpu in 0..most as i32 {
        match Ring::open(cpu, attributes) {
            Ok(ring) => rings.push(ring),
            // It is off.
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(rings)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::profile::objects::{Objects, is_kernels};
    use machine::Symbols;

    #[test]
    fn the_attributes_are_as_long_as_the_kernel_knows_them() {
        assert_eq!(size_of::<Attributes>(), 112);
    }

    /// Keeps a CPU busy in this process, and now and then in the kernel.
    #[inline(never)]
    fn spin_for_the_sampler(until: impl Fn() -> bool) -> u64 {
        let mut number = 1u64;
        while !until() {
            for _ in 0..10_000 {
                number = std::hint::black_box(number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
            }
        }
        number
    }

    #[test]
    fn a_busy_thread_is_seen_with_its_name_and_its_callers() {
        let objects = Objects::own();
        let sampler = match Sampler::start(2000, objects.stacks()) {
            Ok(sampler) => sampler,
            Err(e) => return println!("skipped: no perf events here, {e}"),
        };
        let busy = std::thread::Builder::new().name("busy".to_owned()).spawn(|| {
            // By its own CPU time, of which there may be little at first.
            let used = || std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
            spin_for_the_sampler(|| {
                let ns = used().split_ascii_whitespace().next().and_then(|ns| ns.parse::<u64>().ok());
                ns.is_none_or(|ns| ns > 100_000_000)
            })
        });
        busy.unwrap().join().unwrap();
        let kernel = sampler.kernel;
        let samples = sampler.stop();
        let named = |(_, thread, stack): &(u64, u32, u32)| {
            let name = samples.names.get(thread).cloned().unwrap_or_default();
            let frames = samples.stacks[*stack as usize].iter();
            (name, frames.map(|at| objects.name(*at, &Symbols::default())).collect::<Vec<_>>())
        };
        let busy: Vec<Vec<String>> =
            samples.taken.iter().map(named).filter(|(name, _)| name == "busy").map(|(_, frames)| frames).collect();
        assert!(busy.len() > 20, "{} samples, {} lost", busy.len(), samples.lost);
        let spun = busy.iter().filter(|frames| {
            let at = frames.iter().position(|name| name.contains("spin_for_the_sampler"));
            // Its callers follow: this test's closure, and the start of the thread.
            at.is_some_and(|at| frames[at..].iter().any(|name| name.contains("thread")))
        });
        assert!(spun.count() * 2 > busy.len(), "{:?}", busy.first());
        let in_kernel = samples.stacks.iter().filter(|stack| stack.iter().any(|at| is_kernels(*at))).count();
        assert!(kernel || in_kernel == 0);
    }
}
