// SPDX-License-Identifier: Apache-2.0
//! Compressed clusters on their way from a file to the requests that want bytes of them: requests for one cluster share one
//! read and one unpacking, several clusters are unpacked by a few threads, the last ones are kept. Called by `read` on the
//! handle's thread; `Pool` is shared by all handles on a chain and ends its threads with the last of them.
//!
//! Of a deflate stream no more is unpacked than someone asked for, until a second request shows that the rest is of use.
//!
//! Locks: `Pool::queue` (jobs, handles to threads), held for a push or a pop.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use base::Seg;

use crate::disk::Op;
use crate::qcow2::format::compress::Decompressor;
use crate::qcow2::format::entry::Compressed;
use crate::qcow2::format::header::Compression;
use crate::storage::buffer::{AlignedBuf, scatter};

use super::handle::Handle;
use super::inbox::Inbox;
use super::task::{Tag, Task};

/// Most threads of one chain.
const MOST_THREADS: usize = 4;
/// Their stacks; inflating calls nothing deep.
const STACK: usize = 256 << 10;
/// Bytes of unpacked clusters that a handle keeps; one cluster at least.
const KEPT: usize = 512 << 10;

/// Compressed data is read in whole units of this many bytes, which any device takes.
const UNIT: u64 = 4096;

/// A compressed cluster: the image's place in the chain, and where its data begins.
pub type Key = (usize, u64);

/// A cluster to be unpacked.
#[derive(Debug)]
pub struct Job {
    key: Key,
    kind: Compression,
    data: AlignedBuf,
    /// Where in it.
    range: Range<usize>,
    /// Bytes of the cluster that are wanted, from its start on.
    upto: usize,
    /// That is all of it.
    all: bool,
    /// Room for them, if there is some to use again.
    bytes: Vec<u8>,
}

/// How that ended.
#[derive(Debug)]
pub struct Unpacked {
    key: Key,
    /// The start of the cluster, as far as it was wanted.
    bytes: Vec<u8>,
    whole: bool,
}

/// Decompressors of one thread, made on first use.
#[derive(Debug, Default)]
struct Decompressors {
    zlib: Option<Decompressor>,
    zstd: Option<Decompressor>,
}

impl Decompressors {
    fn run(&mut self, mut job: Job) -> Unpacked {
        let slot = match job.kind {
            Compression::Zlib => &mut self.zlib,
            Compression::Zstd => &mut self.zstd,
        };
        if slot.is_none() {
            *slot = Decompressor::new(job.kind).ok();
        }
        job.bytes.resize(job.upto, 0);
        let data = job.data.bytes().get(job.range).unwrap_or_default();
        let run = if job.all { Decompressor::run } else { Decompressor::run_start };
        let whole = slot.as_mut().is_some_and(|d| run(d, data, &mut job.bytes).is_ok());
        Unpacked { key: job.key, bytes: job.bytes, whole }
    }
}

/// Threads that unpack, started as the load asks for them.
#[derive(Debug, Default)]
pub struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Shared {
    queue: Mutex<Queue>,
    work: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<(Job, Arc<Inbox>)>,
    idle: usize,
    stop: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while holding these; if it did, the data is still whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Has a thread do it, which tells `inbox`; gives the job back where there is no thread to be had.
    fn give(&self, job: Job, inbox: &Arc<Inbox>) -> Result<(), Job> {
        let mut threads = lock(&self.threads);
        let mut queue = lock(&self.shared.queue);
        let most = std::thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        if queue.idle <= queue.jobs.len() && threads.len() < most && most > 1 {
            let shared = Arc::clone(&self.shared);
            let name = format!("blk-unpack-{}", threads.len());
            threads.extend(std::thread::Builder::new().name(name).stack_size(STACK).spawn(move || shared.serve()));
        }
        if threads.is_empty() {
            return Err(job);
        }
        queue.jobs.push_back((job, Arc::clone(inbox)));
        drop(queue);
        self.shared.work.notify_one();
        Ok(())
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.queue).stop = true;
        self.shared.work.notify_all();
        for thread in lock(&self.threads).drain(..) {
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn serve(&self) {
        let mut decompressors = Decompressors::default();
        let mut queue = lock(&self.queue);
        loop {
            if let Some((job, inbox)) = queue.jobs.pop_front() {
                drop(queue);
                inbox.unpacked(decompressors.run(job));
                queue = lock(&self.queue);
            } else if queue.stop {
                return;
            } else {
                queue.idle += 1;
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
            }
        }
    }
}

/// Bytes that a task wants of a cluster.
#[derive(Debug)]
struct Wanted {
    task: u32,
    /// Where they begin in the cluster.
    within: usize,
    len: usize,
    /// Where they go.
    segs: Vec<Seg>,
}

impl Wanted {
    fn end(&self) -> usize {
        self.within + self.len
    }
}

/// What a handle has in unpacking.
#[derive(Debug, Default)]
pub struct Unpacking {
    pool: Arc<Pool>,
    here: Decompressors,
    /// The last clusters, or starts of them; the oldest first.
    kept: VecDeque<(Key, Vec<u8>)>,
    /// Clusters that are being read or unpacked, how they are kept, and for whom.
    under_way: HashMap<Key, (Compressed, Vec<Wanted>)>,
}

impl Unpacking {
    /// For another handle on the same chain.
    pub fn share(&self) -> Self {
        Self { pool: Arc::clone(&self.pool), ..Self::default() }
    }

    /// Whether threads are at work for this handle, or data is on its way to it.
    pub fn any(&self) -> bool {
        !self.under_way.is_empty()
    }

    fn kept(&self, key: Key) -> Option<&Vec<u8>> {
        self.kept.iter().rev().find(|(k, _)| *k == key).map(|(_, bytes)| bytes)
    }

    fn keep(&mut self, key: Key, bytes: Vec<u8>, cluster: usize) {
        self.kept.retain(|(k, _)| *k != key);
        while self.kept.len() >= (KEPT / cluster.max(1)).clamp(1, 16) {
            self.kept.pop_front();
        }
        self.kept.push_back((key, bytes));
    }

    /// Memory to unpack into.
    fn room(&mut self, cluster: usize) -> Vec<u8> {
        if self.kept.len() >= (KEPT / cluster.max(1)).clamp(1, 16) {
            return self.kept.pop_front().map(|(_, bytes)| bytes).unwrap_or_default();
        }
        Vec::new()
    }
}

/// Compressed data on its way.
#[derive(Debug)]
pub struct Squeezed {
    key: Key,
    buf: AlignedBuf,
    range: Range<usize>,
}

impl Handle {
    /// Gets `len` bytes from `within` on of a compressed cluster of the image at `place`, for a piece of a task.
    pub(super) fn read_squeezed(
        &mut self,
        (index, task): (u32, &mut Task),
        place: usize,
        what: Compressed,
        within: u64,
        segs: Vec<Seg>,
    ) {
        let len = base::segs::total_len(&segs) as usize;
        let wanted = Wanted { task: index, within: within as usize, len, segs };
        let key = (place, what.host);
        if let Some(bytes) = self.unpacking.kept(key).and_then(|b| b.get(wanted.within..wanted.end())) {
            scatter(bytes, &wanted.segs);
            return;
        }
        if let Some((_, others)) = self.unpacking.under_way.get_mut(&key) {
            task.pending += 1;
            others.push(wanted);
        } else if self.fetch(place, what) {
            task.pending += 1;
            self.unpacking.under_way.insert(key, (what, vec![wanted]));
        } else {
            task.errno = libc::EIO;
        }
    }

    /// Sends off the read of a cluster's compressed data; `false` if there is none or no memory.
    fn fetch(&mut self, place: usize, what: Compressed) -> bool {
        let file = self.chain.places.get(place).map_or(0, |p| p.file);
        let file_end = self.file_end(file);
        let end = file_end.min(what.host.saturating_add(what.len));
        if end <= what.host {
            return false;
        }
        // Read with what lies around it: direct I/O takes only whole blocks, and would wait here for anything else.
        let start = what.host / UNIT * UNIT;
        let len = end.next_multiple_of(UNIT).min(file_end) - start;
        let Ok(buf) = AlignedBuf::zeroed(len as usize) else { return false };
        let segs = [buf.seg(0, len as usize)];
        let range = (what.host - start) as usize..(end - start) as usize;
        let squeezed = Squeezed { key: (place, what.host), buf, range };
        self.issue(file, Tag::Squeezed(Box::new(squeezed)), Op::Read, start, len, &segs);
        true
    }

    /// Compressed data has arrived.
    pub(super) fn unsqueeze(&mut self, squeezed: Squeezed, errno: i32) {
        let Squeezed { key, buf, range } = squeezed;
        let chain = Arc::clone(&self.chain);
        let image = Self::image_at(&chain, key.0).filter(|_| errno == 0);
        let Some(image) = image else {
            return self.unpacking_failed(key, if errno == 0 { libc::EIO } else { errno });
        };
        let cluster = image.layout.cluster_size() as usize;
        let wanted = self.unpacking.under_way.get(&key).map_or(&[][..], |(_, wanted)| wanted.as_slice());
        let furthest = wanted.iter().map(Wanted::end).max().unwrap_or(cluster);
        let again = wanted.len() > 1 || self.unpacking.kept(key).is_some();
        // Stopping early pays for the slower reader only where it is early.
        let start = image.compression == Compression::Zlib && !again && furthest <= cluster / 3 * 2;
        let upto = if start { furthest } else { cluster };
        let bytes = self.unpacking.room(cluster);
        let job = Job { key, kind: image.compression, data: buf, range, upto, all: !start, bytes };
        // One alone is done sooner here than a thread wakes up; a disk that is not attached has nobody to wake.
        let alone = self.unpacking.under_way.len() <= 1 || !self.inbox.can_wake();
        let job = if alone { Err(job) } else { self.unpacking.pool.give(job, &self.inbox) };
        if let Err(job) = job {
            let unpacked = self.unpacking.here.run(job);
            self.unpacked(unpacked);
        }
    }

    /// A cluster was unpacked.
    pub(super) fn unpacked(&mut self, unpacked: Unpacked) {
        let Unpacked { key, bytes, whole } = unpacked;
        if !whole {
            return self.unpacking_failed(key, libc::EIO);
        }
        let Some((what, all)) = self.unpacking.under_way.remove(&key) else { return };
        let cluster = Self::image_at(&self.chain, key.0).map_or(0, |i| i.layout.cluster_size() as usize);
        let mut left = Vec::new();
        for wanted in all {
            // One that came after the job was given away may want more than that.
            match bytes.get(wanted.within..wanted.end()) {
                Some(found) => {
                    scatter(found, &wanted.segs);
                    self.part_done(wanted.task, 0);
                }
                None => left.push(wanted),
            }
        }
        // Its start being kept, all of it is unpacked next time.
        self.unpacking.keep(key, bytes, cluster);
        if left.is_empty() {
            return;
        }
        // One of those that were served may have asked for the cluster again.
        if let Some((_, others)) = self.unpacking.under_way.get_mut(&key) {
            others.extend(left);
            return;
        }
        let fetched = self.fetch(key.0, what);
        self.unpacking.under_way.insert(key, (what, left));
        if !fetched {
            self.unpacking_failed(key, libc::ENOMEM);
        }
    }

    fn unpacking_failed(&mut self, key: Key, errno: i32) {
        let Some((_, all)) = self.unpacking.under_way.remove(&key) else { return };
        for wanted in all {
            self.part_done(wanted.task, errno);
        }
    }
}
