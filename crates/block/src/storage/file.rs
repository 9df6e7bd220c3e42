// SPDX-License-Identifier: Apache-2.0
//! Regular files and block devices: decides, for each request, whether it is served at once on the calling thread or handed
//! to a back end that can wait (io_uring or threads).
//!
//! Why at once: a read that hits the page cache and a write that goes into it are a copy, and one plain system call is the
//! cheapest copy there is. File systems make io_uring hand buffered writes and every `fsync` to kernel threads, which
//! costs two context switches per request, the more so where worker and vCPU share a CPU. What turns out to wait
//! (a cache miss, a throttled write, a slow flush) goes to the back end, and [`Patience`] remembers it. So do long copies
//! while several requests are under way: two threads that copy are faster than one.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use base::{EventFd, Seg};

use crate::disk::{Completion, Op, Request};
use crate::open::OpenFile;
use crate::options::{Aio, Cache, Options};

use super::around::Around;
use super::bounce::Bounce;
use super::patience::Patience;
use super::sys;
use super::threads::Threads;
use super::uring::Uring;

/// An operation that held the worker longer than this should have gone to the back end.
const LONG: Duration = Duration::from_millis(1);

/// To copy so many bytes takes longer than to hand them to another thread.
const LONG_COPY: u64 = 32 << 10;
/// So many requests that are under way, or served and not yet taken, make a crowd.
const CROWD: usize = 4;

/// Nanoseconds a byte of a large write may take beyond that: 256 MB/s.
const SLOWEST: u64 = 4;

/// What waits for requests that have to.
#[derive(Debug)]
enum Back {
    /// Not attached: everything is served at once, however long it takes.
    None,
    Uring(Box<Uring>),
    Threads(Threads),
}

/// What a request in flight will mean when it completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Modify,
    /// A flush, and how many modifications it covers.
    Flush(u64),
}

/// A file or block device.
#[derive(Debug)]
pub struct FileStorage {
    file: Arc<File>,
    block_device: bool,
    cache: Cache,
    aio: Aio,
    back: Back,
    /// Completions nobody has reaped yet.
    pub ready: Vec<Completion>,
    /// By request id.
    kinds: Vec<Kind>,
    in_flight: usize,
    durable: Arc<Durable>,
    bounce: Bounce,
    reads: Patience,
    writes: Patience,
    flushes: Patience,
    around: Option<Box<Around>>,
    /// Another thread could run beside this one.
    several_cpus: bool,
}

/// Which flushes have anything to do; one for all storages on the same open file.
#[derive(Debug)]
struct Durable {
    /// Modifications that completed, plus one for what was dirty before we came.
    modified: AtomicU64,
    /// How many of them the last good flush covers.
    flushed: AtomicU64,
    /// A flush failed: the page cache may have dropped data, so no later flush may claim success.
    lost: AtomicBool,
}

impl Durable {
    fn modified(&self) -> u64 {
        self.modified.load(Ordering::Acquire)
    }
}

impl FileStorage {
    /// A storage on an open file; synchronous until [`Self::attach`].
    pub fn new(open: OpenFile, options: &Options) -> Self {
        let wanted = options.cache == Cache::Writeback && options.aio == Aio::Auto && !open.block_device;
        let around = if wanted && !options.readonly { Around::new(&open.file) } else { None };
        Self {
            around,
            several_cpus: std::thread::available_parallelism().is_ok_and(|n| n.get() > 1),
            bounce: Bounce::new(open.direct_align),
            file: Arc::new(open.file),
            block_device: open.block_device,
            cache: options.cache,
            aio: options.aio,
            back: Back::None,
            ready: Vec::new(),
            kinds: Vec::new(),
            in_flight: 0,
            durable: Arc::new(Durable {
                modified: AtomicU64::new(1),
                flushed: AtomicU64::new(0),
                lost: AtomicBool::new(false),
            }),
            reads: Patience::default(),
            writes: Patience::default(),
            flushes: Patience::default(),
        }
    }

    /// See [`super::Storage::share`].
    pub fn share(&self) -> Self {
        Self {
            file: Arc::clone(&self.file),
            block_device: self.block_device,
            cache: self.cache,
            aio: self.aio,
            back: Back::None,
            ready: Vec::new(),
            kinds: Vec::new(),
            in_flight: 0,
            durable: Arc::clone(&self.durable),
            bounce: self.bounce.share(),
            around: self.around.as_ref().and_then(|around| Around::new(&around.file)),
            several_cpus: self.several_cpus,
            reads: Patience::default(),
            writes: Patience::default(),
            flushes: Patience::default(),
        }
    }

    /// The file and whether its I/O is direct, if it is a regular one.
    pub fn plain(&self) -> Option<(Arc<File>, bool)> {
        (!self.block_device).then(|| (Arc::clone(&self.file), self.direct()))
    }

    /// See [`super::Storage::len`].
    pub fn len(&self) -> io::Result<u64> {
        if self.block_device { sys::device_size(&self.file) } else { Ok(self.file.metadata()?.len()) }
    }

    /// See [`super::Storage::set_len`].
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        if self.block_device {
            let fits = sys::device_size(&self.file)? >= len;
            return if fits { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) };
        }
        self.file.set_len(len)?;
        self.durable.modified.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// See [`super::Storage::reserve`].
    pub fn reserve(&self, old: u64, len: u64) -> io::Result<()> {
        if self.block_device {
            return self.set_len(len);
        }
        match sys::allocate(&self.file, old, len) {
            Err(e) if sys::cannot(&e) => return self.set_len(len),
            other => other?,
        }
        self.durable.modified.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    /// See [`super::Storage::hole_end`].
    pub fn hole_end(&self, offset: u64) -> u64 {
        if self.block_device {
            return offset;
        }
        match sys::next_data(&self.file, offset) {
            Ok(Some(at)) => at.max(offset),
            Ok(None) => u64::MAX,
            Err(_) => offset,
        }
    }

    /// See [`super::Storage::data_end`].
    pub fn data_end(&self, offset: u64) -> u64 {
        if self.block_device { u64::MAX } else { sys::next_hole(&self.file, offset).unwrap_or(u64::MAX) }
    }

    /// See [`super::Storage::grows`].
    pub fn grows(&self) -> bool {
        !self.block_device
    }

    /// See [`crate::Disk::attach`].
    pub fn attach(&mut self, wake: &EventFd) -> io::Result<()> {
        self.back = match self.aio {
            Aio::Threads => Back::Threads(Threads::new(&self.file, self.block_device, wake)?),
            Aio::IoUring => Back::Uring(Box::new(Uring::new(&self.file, self.block_device, self.direct(), wake)?)),
            Aio::Auto => match Uring::new(&self.file, self.block_device, self.direct(), wake) {
                Ok(ring) => Back::Uring(Box::new(ring)),
                Err(_) => Back::Threads(Threads::new(&self.file, self.block_device, wake)?),
            },
        };
        Ok(())
    }

    /// See [`crate::Disk::detach`].
    pub fn detach(&mut self) {
        let mut done = Vec::new();
        match &mut self.back {
            Back::None => {}
            Back::Uring(ring) => ring.drain(&mut done),
            Back::Threads(pool) => pool.drain(&mut done),
        }
        for completion in done {
            self.finish(completion);
        }
        self.back = Back::None;
    }

    /// See [`crate::Disk::engine`].
    pub fn engine(&self) -> &'static str {
        match self.back {
            Back::None => "detached",
            Back::Uring(_) => "io_uring",
            Back::Threads(_) => "threads",
        }
    }

    /// Takes a request whose range was checked.
    pub fn submit(&mut self, request: &Request<'_>) {
        let kind = match request.op {
            Op::Read => Kind::Read,
            Op::Flush => Kind::Flush(self.durable.modified()),
            Op::Write | Op::Discard | Op::WriteZeroes { .. } => Kind::Modify,
        };
        let result = match self.no_need(kind) {
            Some(result) => Some(result),
            None => self.try_at_once(request),
        };
        if let Some(result) = result {
            self.conclude(kind, result.is_ok());
            self.ready.push(Completion { id: request.id, result });
            return;
        }
        let index = usize::from(request.id);
        if index >= self.kinds.len() {
            self.kinds.resize(index + 1, Kind::Read);
        }
        if let Some(slot) = self.kinds.get_mut(index) {
            *slot = kind;
        }
        // The ring would copy what is cached on this thread, as soon as it is told of it.
        let apart = self.aio == Aio::Auto && !self.direct() && kind == Kind::Read && self.crowded(request.len);
        self.in_flight += 1;
        match &mut self.back {
            Back::Uring(ring) => ring.submit(request, apart),
            Back::Threads(pool) => pool.submit(request),
            // `try_at_once` leaves nothing over without a back end.
            Back::None => {}
        }
    }

    /// Flushes that need no system call.
    fn no_need(&self, kind: Kind) -> Option<io::Result<()>> {
        let Kind::Flush(covers) = kind else { return None };
        if self.cache == Cache::Unsafe {
            return Some(Ok(()));
        }
        if self.durable.lost.load(Ordering::Acquire) {
            return Some(Err(io::Error::from_raw_os_error(libc::EIO)));
        }
        (covers == self.durable.flushed.load(Ordering::Acquire)).then_some(Ok(()))
    }

    /// Serves the request on this thread if that is the thing to do; `None` leaves it to the back end.
    fn try_at_once(&mut self, request: &Request<'_>) -> Option<io::Result<()>> {
        let Request { op, offset, len, segs, .. } = *request;
        if self.direct() && matches!(op, Op::Read | Op::Write) && !self.bounce.fits(segs, offset) {
            return Some(match op {
                Op::Read => self.bounce.read(&self.file, segs, offset),
                _ => self.bounce.write(&self.file, segs, offset),
            });
        }
        if matches!(self.back, Back::None) {
            return Some(sys::execute(&self.file, self.block_device, op, offset, len, segs));
        }
        if self.aio != Aio::Auto {
            return None;
        }
        match op {
            Op::Read | Op::Write if self.direct() => None,
            Op::Read => self.read_cached(request),
            Op::Write => {
                if let Some(done) = self.write_around(request) {
                    return Some(done);
                }
                if self.crowded(len) || !self.writes.try_now() {
                    return None;
                }
                let start = coarse_now();
                let result = sys::write_all(&self.file, segs, offset);
                // The coarse clock has ticks of 1 to 10 ms: it sees what is far too long, for almost nothing.
                judge(&mut self.writes, coarse_now().saturating_sub(start));
                Some(result)
            }
            Op::Flush | Op::Discard | Op::WriteZeroes { .. } => {
                // These may sleep for as long as the medium likes: never while others could be answered meanwhile.
                if self.in_flight > 0 || !self.flushes.try_now() {
                    return None;
                }
                let start = Instant::now();
                let result = sys::execute(&self.file, self.block_device, op, offset, len, segs);
                judge(&mut self.flushes, start.elapsed());
                Some(result)
            }
        }
    }

    /// Requests go past the page cache.
    fn direct(&self) -> bool {
        self.cache == Cache::None
    }

    /// Whether a copy is long and others wait behind it: then a thread of the kernel's does it meanwhile.
    fn crowded(&self, len: u64) -> bool {
        self.several_cpus && len >= LONG_COPY && self.ready.len() + self.in_flight >= CROWD
    }

    /// Writes around the page cache if that is the thing to do.
    fn write_around(&mut self, request: &Request<'_>) -> Option<io::Result<()>> {
        let Request { offset, len, segs, .. } = *request;
        let around = self.around.as_mut()?;
        let now = around.now(segs, offset, len);
        around.wrote(len);
        if !now || self.in_flight > 0 {
            around.left(offset, len, false);
            return None;
        }
        let start = Instant::now();
        let result = sys::write_all(&around.file, segs, offset);
        around.left(offset, len, true);
        if result.as_ref().is_err_and(|e| sys::cannot(e) || e.raw_os_error() == Some(libc::EINVAL)) {
            // A file system with rules of its own: the cached write will do.
            self.around = None;
            return None;
        }
        // Longer ones may take longer: what counts is time spent waiting, not moving bytes.
        around.taken += 1;
        judge(&mut around.patience, start.elapsed().saturating_sub(Duration::from_nanos(len * SLOWEST)));
        Some(result)
    }

    /// Reads around the page cache if that is the thing to do.
    fn read_around(&mut self, request: &Request<'_>) -> Option<io::Result<()>> {
        let Request { offset, len, segs, .. } = *request;
        let around = self.around.as_mut()?;
        if self.in_flight > 0 || !around.reads_now(segs, offset, len) {
            return None;
        }
        let start = Instant::now();
        let result = sys::read_all(&around.file, segs, offset);
        if result.is_err() {
            // The cached read meets the error again, or knows how to do without direct I/O.
            around.left(offset, len, false);
            return None;
        }
        let took = start.elapsed();
        around.was_read(offset, len, took);
        judge(&mut around.reads, took.saturating_sub(Duration::from_nanos(len * SLOWEST)));
        Some(result)
    }

    fn read_cached(&mut self, request: &Request<'_>) -> Option<io::Result<()>> {
        if let Some(done) = self.read_around(request) {
            return Some(done);
        }
        if self.crowded(request.len) || request.segs.len() > sys::MAX_SEGS || !self.reads.try_now() {
            return None;
        }
        let asked = self.around.as_ref().is_some_and(|around| around.asks(request.len)).then(Instant::now);
        match sys::read_nowait(&self.file, request.segs, request.offset) {
            Ok(n) if n as u64 == request.len => {
                self.reads.good();
                if let (Some(start), Some(around)) = (asked, &mut self.around) {
                    around.hit(request.len, start.elapsed());
                }
                Some(Ok(()))
            }
            Err(e) if sys::cannot(&e) => {
                self.reads.never();
                None
            }
            // A miss, whole or in part, or an error that the back end will meet again and report.
            Ok(_) | Err(_) => {
                self.reads.bad();
                None
            }
        }
    }

    /// See [`crate::Disk::commit`].
    pub fn commit(&mut self) {
        match &mut self.back {
            Back::None => {}
            Back::Uring(ring) => ring.commit(),
            Back::Threads(pool) => pool.commit(),
        }
    }

    /// See [`crate::Disk::lend`].
    pub fn lend(&mut self, memory: &[Seg]) {
        if let Back::Uring(ring) = &mut self.back {
            ring.lend(memory);
        }
    }

    /// See [`crate::Disk::linger`].
    pub fn linger(&mut self) {
        match &mut self.back {
            Back::Uring(ring) if self.ready.is_empty() => ring.linger(),
            _ => self.commit(),
        }
    }

    /// Requests that a back end has.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// See [`crate::Disk::reap`].
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        if self.in_flight > 0 {
            let mut arrived = std::mem::take(&mut self.ready);
            let answered = arrived.len();
            match &mut self.back {
                Back::None => {}
                Back::Uring(ring) => ring.reap(&mut arrived),
                Back::Threads(pool) => pool.reap(&mut arrived),
            }
            self.ready = arrived;
            for i in answered..self.ready.len() {
                self.conclude_at(i);
            }
        }
        done.append(&mut self.ready);
    }

    /// See [`crate::Disk::want_wake`].
    pub fn want_wake(&mut self, on: bool) {
        if let Back::Uring(ring) = &mut self.back {
            ring.want_wake(on);
        }
    }

    fn finish(&mut self, completion: Completion) {
        self.ready.push(completion);
        self.conclude_at(self.ready.len() - 1);
    }

    /// Books the back end's completion at `ready[i]`.
    fn conclude_at(&mut self, i: usize) {
        let Some((id, ok)) = self.ready.get(i).map(|c| (usize::from(c.id), c.result.is_ok())) else { return };
        let kind = self.kinds.get(id).copied().unwrap_or(Kind::Read);
        self.in_flight = self.in_flight.saturating_sub(1);
        self.conclude(kind, ok);
    }

    fn conclude(&mut self, kind: Kind, ok: bool) {
        match kind {
            Kind::Read => {}
            // Failed writes count too: part of them may have arrived.
            Kind::Modify => {
                self.durable.modified.fetch_add(1, Ordering::AcqRel);
            }
            Kind::Flush(covers) if ok => {
                self.durable.flushed.fetch_max(covers, Ordering::AcqRel);
                if let Some(around) = &mut self.around {
                    around.flushed();
                }
            }
            Kind::Flush(_) => self.durable.lost.store(true, Ordering::Release),
        }
    }
}

fn judge(patience: &mut Patience, took: Duration) {
    if took > LONG { patience.bad() } else { patience.good() }
}

/// The time of the last clock tick; never a system call.
fn coarse_now() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a live timespec for the length of the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut now) };
    Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use base::Seg;

    use super::*;

    fn storage(cache: Cache) -> FileStorage {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let options = Options { cache, ..Options::new("unused") };
        FileStorage::new(OpenFile { file, block_device: false, direct_align: 512 }, &options)
    }

    /// One request to its end; on a slow medium that is the back end's.
    fn serve(storage: &mut FileStorage, request: &Request<'_>) -> io::Result<()> {
        storage.submit(request);
        storage.commit();
        let mut done = Vec::new();
        while done.is_empty() {
            storage.reap(&mut done);
            std::thread::yield_now();
        }
        assert_eq!(done.len(), 1);
        done.pop().unwrap().result
    }

    fn flush(storage: &mut FileStorage) -> Option<i32> {
        let request = Request { id: 0, op: Op::Flush, offset: 0, len: 0, segs: &[] };
        serve(storage, &request).err().map(|e| e.raw_os_error().unwrap())
    }

    #[test]
    fn a_flush_with_nothing_to_do_does_nothing() {
        let mut s = storage(Cache::Writeback);
        assert!(s.no_need(Kind::Flush(s.durable.modified())).is_none(), "what was there before us may be dirty");
        assert_eq!(flush(&mut s), None);
        assert!(s.no_need(Kind::Flush(s.durable.modified())).is_some());
        s.conclude(Kind::Modify, false);
        assert!(s.no_need(Kind::Flush(s.durable.modified())).is_none(), "a failed write may have written");
        assert_eq!(flush(&mut s), None);
        // A write that completes while a flush is under way is not covered by it.
        let covers = s.durable.modified();
        s.conclude(Kind::Modify, true);
        s.conclude(Kind::Flush(covers), true);
        assert!(s.no_need(Kind::Flush(s.durable.modified())).is_none());
    }

    /// Writes with and without the page cache in one file, some over the dirty pages of others, read back after each.
    #[test]
    fn what_goes_around_the_cache_and_through_it_agrees() {
        const SIZE: usize = 1 << 20;
        // Not in /tmp, which may be in memory and have no direct I/O.
        let file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.set_len(SIZE as u64).unwrap();
        let mut storage =
            FileStorage::new(OpenFile { file, block_device: false, direct_align: 512 }, &Options::new("unused"));
        if storage.around.is_none() {
            println!("skipped: the file system of the sources has no direct I/O that is known to be safe");
            return;
        }
        storage.attach(&EventFd::new(0).unwrap()).unwrap();
        let area = base::mmap::Mmap::anonymous(2 * SIZE).unwrap();
        let (source, target) = (area.as_ptr(), area.as_ptr().wrapping_add(SIZE));
        let mut model = vec![0u8; SIZE];
        let mut went_around = 0;
        let mut seed = 1u64;
        for round in 0..400u64 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (page, pages) = ((seed >> 33) % 256, [1, 3, 16, 32][(seed >> 20) as usize % 4]);
            let len = (pages * 4096).min(SIZE as u64 - page * 4096);
            let bytes: Vec<u8> = (0..len).map(|i| (i / 512 + round) as u8).collect();
            // SAFETY: `source` has SIZE bytes and `len` is no more; nobody else uses the area.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), source, bytes.len()) };
            let at = (page * 4096) as usize;
            model[at..at + bytes.len()].copy_from_slice(&bytes);
            let segs = [Seg { ptr: source, len: bytes.len() }];
            let request = Request { id: 1, op: Op::Write, offset: at as u64, len, segs: &segs };
            let around = storage.around.as_mut().unwrap();
            // However slow this medium is: the test is of agreement, not of the habit.
            around.patience = Patience::default();
            let before = around.taken;
            serve(&mut storage, &request).unwrap();
            went_around += storage.around.as_ref().unwrap().taken - before;
            if round % 3 == 0 {
                assert_eq!(flush(&mut storage), None);
            }
            let (first, many) = ((seed >> 41) % 15 * 65536, 65536 * (1 + (seed >> 50) % 2));
            let part = [Seg { ptr: target, len: many as usize }];
            let request = Request { id: 2, op: Op::Read, offset: first, len: many, segs: &part };
            storage.around.as_mut().unwrap().reads = Patience::default();
            serve(&mut storage, &request).unwrap();
            // SAFETY: the read above filled so many bytes of the area, and nothing writes them while the slice lives.
            let read = unsafe { std::slice::from_raw_parts(target, many as usize) };
            assert!(read == &model[first as usize..(first + many) as usize], "round {round}");
            let whole = [Seg { ptr: target, len: SIZE }];
            sys::read_all(&storage.file, &whole, 0).unwrap();
            // SAFETY: the read above filled these SIZE bytes, and nothing writes them while the slice lives.
            let read = unsafe { std::slice::from_raw_parts(target, SIZE) };
            assert!(read == model, "round {round}");
        }
        assert!(went_around > 20, "{went_around} writes went around");
        let reads = storage.around.as_ref().unwrap().read;
        assert!(reads > 10, "{reads} reads went around");
        storage.detach();
    }

    #[test]
    fn after_a_failed_flush_none_succeeds() {
        let mut s = storage(Cache::Writeback);
        s.conclude(Kind::Flush(1), false);
        assert_eq!(flush(&mut s), Some(libc::EIO));
        assert_eq!(flush(&mut s), Some(libc::EIO));
        let mut s = storage(Cache::Unsafe);
        assert_eq!(flush(&mut s), None);
    }
}
