// SPDX-License-Identifier: Apache-2.0
//! The io_uring back end: one ring per disk, the file registered, one `io_uring_enter` per batch. Made, used and dropped by
//! the disk's worker thread (`SINGLE_ISSUER` holds it to that).
//!
//! Completions need no system call to be seen: without `DEFER_TASKRUN` the kernel posts them when the worker next enters or
//! sleeps in the kernel, and writes the worker's eventfd, which the worker sleeps on anyway. While the worker is up the
//! eventfd is switched off in the shared ring.
//!
//! How large the batches are depends on who serves them. The page cache does on this thread or the kernel's: the fewer calls
//! the better, and [`Uring::linger`] lets a group of answers grow for some microseconds. A device does beside us, and idles
//! while a long batch is prepared: past the cache the kernel is called once for every [`TO_DEVICE`] requests, and nobody waits.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use base::{EventFd, Seg};
use io_uring::{IoUring, opcode, squeue, types};

use crate::disk::{Completion, Op, Request};

use super::patience::Patience;
use super::sys;

/// Entries of the submission queue; a longer batch takes another system call.
const ENTRIES: u32 = 128;
/// Longest single segment handed over at once, in bytes; the rest follows when it is done.
const LONGEST: u64 = 1 << 30;
/// So many requests in flight are worth waiting for several of them.
const MANY: usize = 8;
/// One in so many of them is waited for. More would save more calls, and leave the device with less to do meanwhile.
const PART: usize = 8;
/// Longest such wait.
const LINGER: Duration = Duration::from_micros(60);
/// Requests of one call where a device serves them: a call each would cost more, and a longer batch keeps it waiting.
const TO_DEVICE: usize = 4;
/// Longest piece of memory that the kernel registers, bytes.
const LONGEST_REGION: usize = 1 << 30;
/// `IORING_ENTER_GETEVENTS`.
const GETEVENTS: u32 = 1;
/// The file's place in the ring's table.
const FILE: types::Fixed = types::Fixed(0);

/// One request in flight.
#[derive(Debug, Default)]
struct Flight {
    op: Option<Op>,
    offset: u64,
    len: u64,
    done: u64,
    /// What the request came with.
    segs: Vec<Seg>,
    /// What is left of it, after a short transfer; must stay put until the kernel has taken the entry.
    rest: Vec<Seg>,
    /// The registered memory that all of it lies in.
    region: Option<u16>,
    /// A thread of the kernel's does it.
    apart: bool,
}

/// A ring and what flies in it.
pub struct Uring {
    ring: IoUring,
    file: Arc<File>,
    block_device: bool,
    /// Requests go past the page cache.
    direct: bool,
    /// By request id.
    flights: Vec<Flight>,
    /// Requests answered without the ring.
    early: Vec<Completion>,
    /// Ids pushed and not known to be taken by the kernel.
    pushed: Vec<u16>,
    /// Ids whose transfer came up short and must be pushed again.
    short: Vec<u16>,
    in_flight: usize,
    broken: bool,
    /// Memory that the ring knows, in the order of its table.
    regions: Vec<Seg>,
    /// Whether lingering pays; `None` on kernels that can't wait for a limited time.
    patience: Option<Patience>,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("in_flight", &self.in_flight)
            .field("broken", &self.broken)
            .finish_non_exhaustive()
    }
}

fn build() -> io::Result<IoUring> {
    let newest = IoUring::builder().setup_clamp().setup_coop_taskrun().setup_single_issuer().build(ENTRIES);
    match newest {
        // Kernels before 6.0 don't know the flags.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::builder().setup_clamp().build(ENTRIES),
        other => other,
    }
}

/// Whether this host lets us make a ring with all we need.
///
/// # Errors
/// Why not: `ENOSYS` (no io_uring), `EPERM` (forbidden), `ENOMEM` (locked memory), `EOPNOTSUPP` (too old).
pub fn probe() -> io::Result<()> {
    let ring = build()?;
    if !ring.params().is_feature_submit_stable() || !ring.params().is_feature_nodrop() {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    let mut ops = io_uring::Probe::new();
    ring.submitter().register_probe(&mut ops)?;
    let needed =
        [opcode::Read::CODE, opcode::Write::CODE, opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE];
    if needed.iter().all(|&op| ops.is_supported(op)) {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
}

impl Uring {
    /// A ring for `file`, which was opened for `direct` I/O or not, owned by the calling thread; writes to `wake` when a
    /// completion appears.
    ///
    /// # Errors
    /// Those of [`probe`].
    pub fn new(file: &Arc<File>, block_device: bool, direct: bool, wake: &EventFd) -> io::Result<Self> {
        let ring = build()?;
        if !ring.params().is_feature_submit_stable() || !ring.params().is_feature_nodrop() {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        ring.submitter().register_eventfd(wake.as_raw_fd())?;
        let patience = ring.params().is_feature_ext_arg().then(Patience::default);
        Ok(Self {
            regions: Vec::new(),
            patience,
            ring,
            file: Arc::clone(file),
            block_device,
            direct,
            flights: Vec::new(),
            early: Vec::new(),
            pushed: Vec::new(),
            short: Vec::new(),
            in_flight: 0,
            broken: false,
        })
    }

    /// Registers memory that requests will come with; see [`crate::Disk::lend`]. Without it they are served all the same, and
    /// faster where the page cache copies: the kernel's copy from and to registered memory is the slower one.
    pub fn lend(&mut self, memory: &[Seg]) {
        let fits = memory.iter().all(|s| s.len > 0 && s.len <= LONGEST_REGION) && memory.len() <= usize::from(u16::MAX);
        if !self.direct || self.in_flight > 0 || !self.regions.is_empty() || memory.is_empty() || !fits {
            return;
        }
        let table: Vec<libc::iovec> =
            memory.iter().map(|s| libc::iovec { iov_base: s.ptr.cast(), iov_len: s.len }).collect();
        // SAFETY: the memory is mapped, and stays mapped where it is until this ring is dropped, by the promise that comes
        // with `Disk::lend`; the ring is dropped by `detach`.
        if unsafe { self.ring.submitter().register_buffers(&table) }.is_ok() {
            self.regions = memory.to_vec();
        }
    }

    /// The registered memory that holds all of the request.
    fn region(&self, segs: &[Seg]) -> Option<u16> {
        let [seg] = segs else { return None };
        let from = seg.ptr as usize;
        let holds = |r: &Seg| (r.ptr as usize..=r.ptr as usize + r.len - seg.len.min(r.len)).contains(&from);
        self.regions.iter().position(|r| seg.len <= r.len && holds(r)).map(|at| at as u16)
    }

    /// Queues a request. One that is to be done `apart` is done by a thread of the kernel's, even if it could be done at once.
    pub fn submit(&mut self, request: &Request<'_>, apart: bool) {
        let Request { id, op, offset, len, segs } = *request;
        let quick = op == Op::WriteZeroes { unmap: false } && !self.block_device;
        if self.broken || (matches!(op, Op::Discard | Op::WriteZeroes { .. }) && !quick) {
            // No ring operation covers these with their fallbacks; they are rare and bounded by the device's limits.
            let result = sys::execute(&self.file, self.block_device, op, offset, len, segs);
            self.early.push(Completion { id, result });
            return;
        }
        let index = usize::from(id);
        let region = self.region(segs);
        if index >= self.flights.len() {
            self.flights.resize_with(index + 1, Flight::default);
        }
        let Some(flight) = self.flights.get_mut(index) else { return };
        flight.op = Some(op);
        (flight.region, flight.apart) = (region, apart);
        (flight.offset, flight.len, flight.done) = (offset, len, 0);
        flight.segs.clear();
        flight.segs.extend_from_slice(segs);
        flight.rest.clear();
        self.in_flight += 1;
        self.push(id);
    }

    /// Puts the flight's next (or only) entry into the submission queue.
    fn push(&mut self, id: u16) {
        let Some(flight) = self.flights.get(usize::from(id)) else { return };
        let flags = if flight.apart { squeue::Flags::ASYNC } else { squeue::Flags::empty() };
        let entry = flight.entry().user_data(u64::from(id)).flags(flags);
        if self.ring.submission().is_full() {
            self.commit();
        }
        if self.broken {
            self.land(id, Err(io::Error::from_raw_os_error(libc::EIO)));
            return;
        }
        // SAFETY: the entry points at the flight's segments, which stay put until the kernel took the entry (`flights` only
        // moves the Vec headers, the segments' heap storage is left alone until the id is used again), and through them at
        // bytes that stay mapped until the request ends by the promise of the Seg's maker.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        match pushed {
            Ok(()) => {
                self.pushed.push(id);
                if self.direct && self.pushed.len() >= TO_DEVICE {
                    self.commit();
                }
            }
            // Can't be: a successful commit empties the queue. Answer rather than lose it.
            Err(_) => self.land(id, Err(io::Error::from_raw_os_error(libc::EAGAIN))),
        }
    }

    /// Hands what is queued to the kernel.
    pub fn commit(&mut self) {
        while !self.pushed.is_empty() && !self.broken {
            match self.ring.submit() {
                Ok(taken) => {
                    self.pushed.drain(..taken.min(self.pushed.len()));
                }
                Err(e) => match e.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // Out of memory for requests, or completions not reaped: wait for one of those in flight, if any.
                    Some(libc::EAGAIN | libc::EBUSY) if self.in_flight > self.pushed.len() => self.wait_one(),
                    _ => self.give_up(e.raw_os_error().unwrap_or(libc::EIO)),
                },
            }
        }
    }

    /// As [`Self::commit`], and where much is in flight through the page cache, sleeps in the same call until a part of it is done, at most
    /// [`LINGER`]. Backs off where that time passes in vain.
    pub fn linger(&mut self) {
        let worth = !self.direct && self.in_flight >= MANY && self.early.is_empty() && !self.broken;
        if !worth || !self.patience.as_mut().is_some_and(Patience::try_now) {
            return self.commit();
        }
        let want = self.in_flight / PART;
        let limit = types::Timespec::from(LINGER);
        let arguments = types::SubmitArgs::new().timespec(&limit);
        // An error says that the time is over, or `commit` will meet it again and deal with it.
        if let Ok(taken) = self.ring.submitter().submit_with_args(want, &arguments) {
            self.pushed.drain(..taken.min(self.pushed.len()));
        }
        let came = self.ring.completion().len() >= want;
        if let Some(patience) = &mut self.patience {
            if came {
                patience.good();
            } else {
                patience.bad();
            }
        }
        self.commit();
    }

    /// The kernel takes no more entries: fails those it has not seen, and never submits again, so that it never will.
    fn give_up(&mut self, errno: i32) {
        self.broken = true;
        for id in std::mem::take(&mut self.pushed) {
            self.land(id, Err(io::Error::from_raw_os_error(errno)));
        }
    }

    fn land(&mut self, id: u16, result: io::Result<()>) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.early.push(Completion { id, result });
    }

    /// Sleeps until the kernel has posted a completion, and keeps it for the next [`Self::reap`].
    fn wait_one(&mut self) {
        if self.ring.completion().is_empty() {
            // SAFETY: nothing is submitted (count 0) and no argument is passed, so the kernel reads no memory of ours.
            let waited = unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 1, GETEVENTS, None) };
            if waited.is_err_and(|e| e.kind() != io::ErrorKind::Interrupted) {
                std::thread::yield_now();
            }
        }
        let mut done = std::mem::take(&mut self.early);
        self.collect(&mut done);
        self.early = done;
    }

    /// Appends the completions there are.
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        self.collect(done);
        while let Some(id) = self.short.pop() {
            self.push(id);
        }
        self.commit();
        done.append(&mut self.early);
    }

    /// Moves completions from the ring to `done`, and what is not complete to `short`.
    fn collect(&mut self, done: &mut Vec<Completion>) {
        loop {
            for cqe in self.ring.completion() {
                let id = cqe.user_data() as u16;
                let Some(flight) = self.flights.get_mut(usize::from(id)) else { continue };
                match flight.advance(cqe.result()) {
                    Some(Err(e)) if flight.zeroes() && sys::cannot(&e) => {
                        // The other ways to zeroes, slower ones.
                        let (op, offset, len) = (Op::WriteZeroes { unmap: false }, flight.offset, flight.len);
                        let result = sys::execute(&self.file, self.block_device, op, offset, len, &[]);
                        self.in_flight = self.in_flight.saturating_sub(1);
                        done.push(Completion { id, result });
                    }
                    Some(result) => {
                        self.in_flight = self.in_flight.saturating_sub(1);
                        done.push(Completion { id, result });
                    }
                    None => self.short.push(id),
                }
            }
            if !self.ring.submission().cq_overflow() {
                return;
            }
            // More was done than the ring has places for: the kernel puts in the rest when it is asked, and never else.
            // SAFETY: nothing is submitted (count 0) and no argument is passed, so the kernel reads no memory of ours.
            let asked = unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 0, GETEVENTS, None) };
            if asked.is_err_and(|e| e.kind() != io::ErrorKind::Interrupted) {
                return;
            }
        }
    }

    /// Switches the eventfd on before a sleep and off after it.
    pub fn want_wake(&mut self, on: bool) {
        let queue = self.ring.completion();
        if on {
            queue.enable_eventfd()
        } else {
            queue.disable_eventfd()
        }
        if on {
            // The switch must be visible before the caller looks at the ring for the last time.
            std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        }
    }

    /// Waits for all that is in flight.
    pub fn drain(&mut self, done: &mut Vec<Completion>) {
        self.commit();
        self.reap(done);
        while self.in_flight > 0 {
            self.wait_one();
            self.reap(done);
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel takes a ring apart some time after it is closed; until then its file table would keep the image
        // locked, and its buffer table memory that was given back. The only failure is a table that is not there.
        let _ = self.ring.submitter().unregister_files();
        if !self.regions.is_empty() {
            let _ = self.ring.submitter().unregister_buffers();
        }
    }
}

impl Flight {
    fn entry(&self) -> squeue::Entry {
        let segs = if self.done == 0 { &self.segs } else { &self.rest };
        let offset = self.offset + self.done;
        let iov = segs.as_ptr().cast::<libc::iovec>();
        let count = segs.len().min(sys::MAX_SEGS) as u32;
        let len = |one: &Seg| (one.len as u64).min(LONGEST) as u32;
        match (self.op, segs.as_slice(), self.region) {
            (Some(Op::Read), [one], Some(r)) => {
                opcode::ReadFixed::new(FILE, one.ptr, len(one), r).offset(offset).build()
            }
            (Some(Op::Write), [one], Some(r)) => {
                opcode::WriteFixed::new(FILE, one.ptr, len(one), r).offset(offset).build()
            }
            (Some(Op::Read), [one], None) => opcode::Read::new(FILE, one.ptr, len(one)).offset(offset).build(),
            (Some(Op::Write), [one], None) => opcode::Write::new(FILE, one.ptr, len(one)).offset(offset).build(),
            (Some(Op::Read), ..) => opcode::Readv::new(FILE, iov, count).offset(offset).build(),
            (Some(Op::Write), ..) => opcode::Writev::new(FILE, iov, count).offset(offset).build(),
            (Some(Op::WriteZeroes { .. }), ..) => {
                opcode::Fallocate::new(FILE, self.len).offset(offset).mode(sys::ZERO_RANGE).build()
            }
            _ => opcode::Fsync::new(FILE).flags(types::FsyncFlags::DATASYNC).build(),
        }
    }

    /// Whether it is `fallocate`'s.
    fn zeroes(&self) -> bool {
        matches!(self.op, Some(Op::WriteZeroes { .. }))
    }

    /// Books what the kernel said; `None` means that there is more to do.
    fn advance(&mut self, result: i32) -> Option<io::Result<()>> {
        let Ok(n) = u64::try_from(result) else {
            if matches!(-result, libc::EINTR | libc::EAGAIN) {
                return None;
            }
            return Some(Err(io::Error::from_raw_os_error(-result)));
        };
        if self.op == Some(Op::Flush) || self.zeroes() {
            return Some(Ok(()));
        }
        self.done += n;
        if self.done >= self.len {
            return Some(Ok(()));
        }
        if n == 0 {
            // A file that shrank behind our back.
            return Some(Err(io::Error::from_raw_os_error(libc::EIO)));
        }
        sys::skip(&self.segs, self.done, &mut self.rest);
        None
    }
}
