// SPDX-License-Identifier: Apache-2.0
//! One thread's handle on a chain: its storages, its requests in flight. Requests are tasks; a task finds out where its
//! bytes are, sends off what it can, and is parked where it has to wait. No thread ever waits for another here, except in
//! `detach`.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use base::segs::total_len;
use base::{EventFd, Seg};

use crate::disk::{Completion, Limits, Op, Request};
use crate::qcow2::format::crypto::SECTOR;
use crate::storage::Storage;
use crate::storage::buffer::{AlignedBuf, gather_into};

use super::chain::{Chain, Layer};
use super::cycle;
use super::image::Image;
use super::inbox::{Inbox, News, Waiter};
use super::slab::Slab;
use super::task::{Kind, Parent, State, Tag, Task};
use super::unpack::{Unpacked, Unpacking};
use super::write::Alloc;
use super::zero::Change;

/// Pieces of one task under way at a time.
const MOST_PIECES: u32 = 32;
/// Pieces of all tasks under way at a time; what storages are asked for has 16-bit numbers.
const MOST_IOS: usize = 60_000;
/// Zeroes to write from.
const ZEROES: usize = 64 << 10;

/// Larger buffers are not kept.
const LARGEST_SPARE: usize = 256 << 10;

/// What a handle has to look at next.
#[derive(Debug, Default)]
struct Todo {
    /// Tasks whose turn it is.
    ready: VecDeque<u32>,
    /// Tasks for which there were no numbers left.
    starved: Vec<u32>,
    /// Pieces that ended while their task was being looked at.
    late: Vec<(u32, i32)>,
    landed: Vec<Completion>,
    news: Vec<News>,
    /// Clusters that were unpacked elsewhere.
    unpacked: Vec<Unpacked>,
}

impl Todo {
    /// Nothing that could go on now, landed pieces aside.
    fn nothing(&self) -> bool {
        self.news.is_empty() && self.ready.is_empty() && self.late.is_empty() && self.unpacked.is_empty()
    }
}

/// One thread's handle.
pub struct Handle {
    /// What is open.
    pub chain: Arc<Chain>,
    users: Arc<AtomicUsize>,
    files: Vec<Storage>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) tasks: Slab<Task>,
    pub(super) allocs: Slab<Alloc>,
    ios: Slab<Tag>,
    todo: Todo,
    pub(super) cycle: Option<Box<cycle::Run>>,
    done: Vec<Completion>,
    sent: bool,
    /// Only ever read, so all handles have the same.
    zeroes: Arc<AlignedBuf>,
    pub(super) spare: Vec<AlignedBuf>,
    pub(super) unpacking: Unpacking,
    closed: Option<i32>,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("tasks", &self.tasks.len()).field("ios", &self.ios.len()).finish_non_exhaustive()
    }
}

/// The number of an error.
pub fn errno_of(result: &io::Result<()>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(e) => e.raw_os_error().filter(|e| *e != 0).unwrap_or(libc::EIO),
    }
}

impl Handle {
    /// The first handle on a chain.
    ///
    /// # Errors
    /// No memory, or a storage that can't be shared.
    pub fn new(chain: Chain) -> io::Result<Self> {
        let zeroes = Arc::new(AlignedBuf::zeroed(ZEROES)?);
        Self::of(Arc::new(chain), Arc::default(), zeroes, Unpacking::default())
    }

    /// Another one.
    ///
    /// # Errors
    /// As [`Handle::new`].
    pub fn share(&self) -> io::Result<Self> {
        let (chain, users) = (Arc::clone(&self.chain), Arc::clone(&self.users));
        Self::of(chain, users, Arc::clone(&self.zeroes), self.unpacking.share())
    }

    fn of(
        chain: Arc<Chain>,
        users: Arc<AtomicUsize>,
        zeroes: Arc<AlignedBuf>,
        unpacking: Unpacking,
    ) -> io::Result<Self> {
        let unsupported = || io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        let files = chain.files.iter().map(|f| f.share().ok_or_else(unsupported)).collect::<io::Result<Vec<_>>>()?;
        users.fetch_add(1, Ordering::SeqCst);
        Ok(Self {
            unpacking,
            chain,
            users,
            files,
            inbox: Arc::default(),
            tasks: Slab::new(),
            allocs: Slab::new(),
            ios: Slab::new(),
            todo: Todo::default(),
            cycle: None,
            done: Vec::new(),
            sent: false,
            zeroes,
            spare: Vec::new(),
            closed: None,
        })
    }

    /// The image that is written.
    pub fn top(&self) -> Option<&Image> {
        self.chain.top()
    }

    /// Sizes that the host likes: whole clusters are what can be freed.
    pub fn limits(&self) -> Limits {
        let cluster = self.top().map_or(512, |t| t.layout.cluster_size() as u32);
        Limits { discard_granularity: cluster.max(self.chain.limits.block_size), ..self.chain.limits }
    }

    /// The first file's way to the kernel.
    pub fn engine(&self) -> &'static str {
        self.files.first().map_or("none", Storage::engine)
    }

    /// Puts something around the storage of the first file.
    pub fn wrap(&mut self, around: impl FnOnce(Storage) -> Storage) {
        if let Some(first) = self.files.first_mut() {
            let inner = std::mem::replace(first, Storage::Gone);
            *first = around(inner);
        }
    }

    /// See [`crate::Disk::attach`].
    pub fn attach(&mut self, wake: &EventFd) -> io::Result<()> {
        self.inbox.set_wake(Some(wake.try_clone()?));
        for file in &mut self.files {
            file.attach(wake)?;
        }
        Ok(())
    }

    /// See [`crate::Disk::detach`].
    pub fn detach(&mut self) {
        loop {
            for file in &mut self.files {
                file.detach();
            }
            self.pump();
            if self.tasks.len() == 0 && self.cycle.is_none() && self.ios.len() == 0 {
                break;
            }
            if !self.inbox.any() {
                // Another thread has what we wait for.
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        self.inbox.set_wake(None);
    }

    /// See [`crate::Disk::submit`].
    pub fn submit(&mut self, request: &Request<'_>) {
        let Request { id, op, offset, len, segs } = *request;
        if let Err(errno) = self.check(request) {
            return self.answer(id, errno);
        }
        if matches!(op, Op::Read | Op::Write) && self.go_straight(request) {
            return;
        }
        let kind = match op {
            Op::Read => Kind::Read(0),
            Op::Write => Kind::Write,
            Op::Discard => Kind::Zero(Change::Discard),
            Op::WriteZeroes { unmap } => Kind::Zero(Change::Zero(unmap)),
            Op::Flush => Kind::Flush,
        };
        let (offset, end) = if op == Op::Flush { (0, 0) } else { (offset, offset + len) };
        let ticket = if op == Op::Flush { None } else { self.top().map(|t| t.epochs.enter()) };
        self.start(kind, offset, end, segs.to_vec(), Parent::Guest(id), ticket);
    }

    /// Starts a task, and runs it as far as it goes.
    pub(super) fn start(
        &mut self,
        kind: Kind,
        offset: u64,
        end: u64,
        segs: Vec<Seg>,
        parent: Parent,
        ticket: Option<usize>,
    ) {
        let state = State::Ready;
        let task = Task { kind, offset, end, cursor: offset, segs, pending: 0, errno: 0, state, parent, ticket };
        let index = self.tasks.add(task);
        self.run(index);
    }

    fn check(&self, request: &Request<'_>) -> Result<(), i32> {
        let Some(top) = self.top() else { return Err(libc::EIO) };
        if request.op == Op::Flush {
            return Ok(());
        }
        if request.op != Op::Read {
            if !top.writable {
                return Err(libc::EROFS);
            }
            if top.broken.load(Ordering::Acquire) {
                return Err(libc::EIO);
            }
        }
        if request.offset.checked_add(request.len).is_none_or(|end| end > top.size()) {
            return Err(libc::EINVAL);
        }
        if matches!(request.op, Op::Read | Op::Write) && total_len(request.segs) != request.len {
            return Err(libc::EINVAL);
        }
        let writes = matches!(request.op, Op::Write | Op::WriteZeroes { .. });
        if writes && (request.offset | request.len) & (self.granule() - 1) != 0 {
            return Err(libc::EINVAL);
        }
        Ok(())
    }

    /// See [`crate::Disk::commit`].
    pub fn commit(&mut self) {
        self.sent = false;
        for file in &mut self.files {
            file.commit();
        }
    }

    /// See [`crate::Disk::linger`].
    pub fn linger(&mut self) {
        let idle = self.done.is_empty() && !self.inbox.any() && !self.unpacking.any();
        let busiest = self.files.iter().enumerate().max_by_key(|(_, f)| f.in_flight()).map(|(at, _)| at);
        self.sent = false;
        for (at, file) in self.files.iter_mut().enumerate() {
            if !idle || Some(at) != busiest {
                file.commit();
            }
        }
        if let Some(file) = busiest.filter(|_| idle).and_then(|at| self.files.get_mut(at)) {
            file.linger();
        }
    }

    /// See [`crate::Disk::lend`].
    pub fn lend(&mut self, memory: &[Seg]) {
        for file in &mut self.files {
            file.lend(memory);
        }
    }

    /// See [`crate::Disk::reap`].
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        self.pump();
        done.append(&mut self.done);
    }

    /// See [`crate::Disk::want_wake`].
    pub fn want_wake(&mut self, on: bool) {
        for file in &mut self.files {
            file.want_wake(on);
        }
    }

    /// Takes what has landed, and lets everything go on that can, until nothing more happens.
    pub(super) fn pump(&mut self) {
        loop {
            let mut landed = std::mem::take(&mut self.todo.landed);
            for file in &mut self.files {
                file.reap(&mut landed);
            }
            self.inbox.take(&mut self.todo.news, &mut self.todo.unpacked);
            if landed.is_empty() && self.todo.nothing() {
                self.todo.landed = landed;
                if self.sent {
                    self.commit();
                    continue;
                }
                break;
            }
            for Completion { id, result } in landed.drain(..) {
                self.land(u32::from(id), errno_of(&result));
            }
            self.todo.landed = landed;
            let mut news = std::mem::take(&mut self.todo.news);
            for News { task, outcome } in news.drain(..) {
                self.hear(task, outcome);
            }
            self.todo.news = news;
            for unpacked in std::mem::take(&mut self.todo.unpacked) {
                self.unpacked(unpacked);
            }
            for (task, errno) in std::mem::take(&mut self.todo.late) {
                self.part_done(task, errno);
            }
            while let Some(task) = self.todo.ready.pop_front() {
                self.run(task);
            }
        }
    }

    /// Writes have to be in multiples of so many bytes, a power of two: sectors are encrypted whole.
    pub fn granule(&self) -> u64 {
        if self.top().is_some_and(|top| top.cipher.is_some()) { SECTOR as u64 } else { 1 }
    }

    /// Asks a storage of the chain for something. Guest data on its way to an encrypted image is encrypted here.
    pub(super) fn issue(&mut self, file: usize, tag: Tag, op: Op, offset: u64, len: u64, segs: &[Seg]) {
        if op == Op::Write && !matches!(tag, Tag::Cycle(_)) && self.granule() > 1 {
            return self.issue_sealed(file, tag, offset, len, segs);
        }
        self.send(file, tag, op, offset, len, segs);
    }

    /// Writes guest data encrypted: from a copy, since the segments are the guest's.
    fn issue_sealed(&mut self, file: usize, tag: Tag, offset: u64, len: u64, segs: &[Seg]) {
        let chain = Arc::clone(&self.chain);
        let cipher = chain.top().and_then(|top| top.cipher.as_ref());
        let (Some(cipher), Ok(mut buf)) = (cipher, self.buffer(len as usize)) else {
            let id = self.ios.add(tag) as u16;
            if let Some(storage) = self.files.get_mut(file) {
                storage.refuse(id, io::Error::from_raw_os_error(libc::ENOMEM));
            }
            return;
        };
        gather_into(segs, buf.bytes_mut());
        // Only ciphers that count by the place in the file are written with.
        cipher.encrypt(cipher.sector(0, offset), buf.bytes_mut());
        let whole = [buf.seg(0, len as usize)];
        self.send(file, Tag::Seals(Box::new(tag), buf), Op::Write, offset, len, &whole);
    }

    /// Whether another piece may be sent off.
    pub(super) fn has_room(&self) -> bool {
        self.ios.len() < MOST_IOS
    }

    pub(super) fn send(&mut self, file: usize, tag: Tag, op: Op, offset: u64, len: u64, segs: &[Seg]) {
        // `run` keeps the number of pieces below what 16 bits hold, with room for the rest.
        let id = self.ios.add(tag) as u16;
        self.sent = true;
        if let Some(storage) = self.files.get_mut(file) {
            storage.submit(&Request { id, op, offset, len, segs });
        }
    }

    fn land(&mut self, id: u32, errno: i32) {
        let Some(mut tag) = self.ios.remove(id) else { return };
        if let Tag::Seals(inner, buf) = tag {
            self.recycle(Some(buf));
            tag = *inner;
        }
        match tag {
            Tag::Sealed(what) => self.unseal(*what, errno),
            // These are in no other of their kind.
            Tag::Seals(..) => {}
            Tag::Part(task) => self.part_done(task, errno),
            Tag::Straight(id, ticket) => {
                if let (Some(ticket), Some(top)) = (ticket, self.top()) {
                    top.epochs.leave(ticket);
                }
                self.answer(id, errno);
            }
            Tag::Load(place, slice, buf) => self.loaded(place, slice, buf, errno),
            Tag::Squeezed(what) => self.unsqueeze(*what, errno),
            Tag::Fill(alloc) => self.filled(alloc, errno),
            Tag::Join(task, cluster) => {
                self.leave_cluster(cluster, errno);
                self.part_done(task, errno);
            }
            Tag::Fetch(want, buf) => self.fetched(want, Some(&buf), errno),
            Tag::Cycle(bufs) => {
                drop(bufs);
                self.cycle_part(errno);
            }
        }
        if !self.todo.starved.is_empty() && self.ios.len() < MOST_IOS / 2 {
            self.todo.ready.extend(self.todo.starved.drain(..));
        }
    }

    fn hear(&mut self, index: u32, outcome: Option<i32>) {
        let Some(task) = self.tasks.get_mut(index) else { return };
        if task.state != State::Parked {
            return;
        }
        task.state = State::Ready;
        match outcome {
            None => self.todo.ready.push_back(index),
            Some(errno) => {
                task.errno = errno;
                task.cursor = task.end;
                self.settle(index);
            }
        }
    }

    /// One who is told when the task may go on.
    pub(super) fn waiter(&self, task: u32) -> Waiter {
        Waiter { inbox: Arc::clone(&self.inbox), task }
    }

    /// Lets a task go as far as it can.
    fn run(&mut self, index: u32) {
        let Some(mut task) = self.tasks.take(index) else { return };
        if task.state == State::Parked {
            self.tasks.put(index, task);
            return;
        }
        task.state = State::Ready;
        if task.kind == Kind::Flush {
            self.step_flush(index, &mut task);
        }
        while task.errno == 0 && task.cursor < task.end && task.state == State::Ready {
            if task.pending >= MOST_PIECES {
                task.state = State::Throttled;
            } else if !self.has_room() {
                task.state = State::Throttled;
                self.todo.starved.push(index);
            } else {
                match task.kind {
                    Kind::Read(top) => self.step_read(index, &mut task, top),
                    Kind::Write => self.step_write(index, &mut task),
                    Kind::Zero(change) => self.step_zero(index, &mut task, change),
                    Kind::Flush => task.cursor = task.end,
                }
            }
        }
        self.tasks.put(index, task);
        self.settle(index);
    }

    /// A piece of a task is done.
    pub(super) fn part_done(&mut self, index: u32, errno: i32) {
        let Some(task) = self.tasks.get_mut(index) else {
            // It is on its way through `run` just now.
            self.todo.late.push((index, errno));
            return;
        };
        task.pending = task.pending.saturating_sub(1);
        if errno != 0 && task.errno == 0 {
            task.errno = errno;
        }
        if task.state == State::Throttled {
            task.state = State::Ready;
            self.todo.ready.push_back(index);
        } else {
            self.settle(index);
        }
    }

    /// Ends a task of which nothing is left.
    fn settle(&mut self, index: u32) {
        let Some(task) = self.tasks.get_mut(index) else { return };
        let over = task.errno != 0 || task.cursor >= task.end;
        if !over || task.pending > 0 || task.state == State::Parked {
            return;
        }
        let Some(task) = self.tasks.remove(index) else { return };
        if let (Some(ticket), Some(top)) = (task.ticket, self.top()) {
            top.epochs.leave(ticket);
        }
        match task.parent {
            Parent::Guest(id) => self.answer(id, task.errno),
            Parent::Alloc(alloc) => self.old_read(alloc, task.errno),
            Parent::Task(parent) => self.part_done(parent, task.errno),
            Parent::Close => self.closed = Some(task.errno),
        }
    }

    /// Whether there are numbers enough for pieces that could be spared.
    pub(super) fn roomy(&self) -> bool {
        self.ios.len() < MOST_IOS / 2
    }

    fn answer(&mut self, id: u16, errno: i32) {
        let result = if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) };
        self.done.push(Completion { id, result });
    }

    /// A buffer of `len` bytes, a used one if there is one.
    pub(super) fn buffer(&mut self, len: usize) -> io::Result<AlignedBuf> {
        match self.spare.iter().position(|b| b.len() == len) {
            Some(at) => Ok(self.spare.swap_remove(at)),
            None => AlignedBuf::zeroed(len),
        }
    }

    /// Keeps a buffer for the next one who needs one.
    pub(super) fn recycle(&mut self, buf: Option<AlignedBuf>) {
        let few = self.spare.len() < 64;
        self.spare.extend(buf.filter(|b| few && b.len() <= LARGEST_SPARE));
    }

    /// Segments that read as `len` zeroes, appended to `out`.
    pub(super) fn zero_segs(&self, mut len: u64, out: &mut Vec<Seg>) {
        while len > 0 {
            let n = len.min(ZEROES as u64);
            out.push(self.zeroes.seg(0, n as usize));
            len -= n;
        }
    }

    /// Waits until a flush is through; for closing and for tools.
    ///
    /// # Errors
    /// The flush's.
    pub fn flush_now(&mut self) -> io::Result<()> {
        self.wait_for(Kind::Flush, 0, 0)
    }

    /// Does something and waits until it is done.
    ///
    /// # Errors
    /// Those of what is done.
    pub(super) fn wait_for(&mut self, kind: Kind, from: u64, to: u64) -> io::Result<()> {
        self.closed = None;
        let ticket = if kind == Kind::Flush { None } else { self.top().map(|t| t.epochs.enter()) };
        self.start(kind, from, to, Vec::new(), Parent::Close, ticket);
        loop {
            self.commit();
            self.pump();
            if let Some(errno) = self.closed.take() {
                return if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) };
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn close(&mut self) {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top().filter(|t| t.writable) else { return };
        // Freed clusters get free in a second round.
        for _ in 0..3 {
            let meta = top.lock();
            let left = meta.cycles.dirty || meta.ripening();
            drop(meta);
            if !left || self.flush_now().is_err() {
                break;
            }
        }
        top.lock().trim();
    }

    /// The images of the chain from `place` down.
    pub(super) fn image_at(chain: &Chain, place: usize) -> Option<&Image> {
        match chain.places.get(place).map(|p| &p.layer) {
            Some(Layer::Qcow2(image)) => Some(image),
            _ => None,
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.detach();
        if self.users.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.close();
        }
    }
}
