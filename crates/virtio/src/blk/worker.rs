// SPDX-License-Identifier: Apache-2.0
//! The threads that serve a block device: one for each queue, or one for all. Each owns its queues, a handle on the disk and
//! the table of its requests in flight, shares nothing but atomics, takes no lock.
//!
//! It sleeps in one place, on the eventfds of its queues. The guest's kicks write to them, and so do the disk's completions
//! (to the first) and `stop`, so that a wake costs one system call whatever caused it. After a wake it takes all there is,
//! sends it off in one batch, answers what is done, and interrupts the guest at most once per queue and round.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use base::{EventFd, Seg};
use block::{Completion, Disk, Op};
use mem::GuestRam;

use super::request::{Request, Shape, StatusByte};
use super::shared::Shared;
use super::sleep::{Sleeper, schedule};
use super::stats::BlkCounts;
use crate::coalesce::{Coalescer, Waited};
use crate::device::{Activation, ActiveQueue, DeviceStatus, status};
use crate::fault::{Answer, GuestFault};
use crate::queue::{Chain, DEFAULT_SIZE};

/// `VIRTIO_BLK_S_OK`.
const OK: u8 = 0;
/// `VIRTIO_BLK_S_IOERR`.
const IOERR: u8 = 1;
/// A worker's stack; its calls are shallow and nothing big lives on it.
const STACK: usize = 128 << 10;
/// Chains taken of one queue before the finished ones are shown to the guest: bounds the delay of the first by the work for
/// the rest.
const ROUND: usize = 32;

/// A request the disk has; goes through [`Worker::finish`], and nowhere else.
#[derive(Debug)]
struct InFlight {
    status: StatusByte,
    op: Op,
    len: u32,
    /// It is done but for the flush that makes it durable.
    flushing: bool,
}

/// What the workers of one device have in common.
#[derive(Clone)]
pub struct Setup {
    /// Names of threads begin so.
    pub name: String,
    /// One thread for all queues.
    pub one_thread: bool,
    /// Whether the device has more queues than one.
    pub several: bool,
    /// What requests may be; its size is looked up anew for each.
    pub shape: Shape,
    /// Atomics.
    pub shared: Arc<Shared>,
    /// What the interrupts of each queue wait for.
    pub coalescer: Coalescer,
}

/// The running workers, as their device sees them.
pub struct Workers {
    threads: Vec<JoinHandle<()>>,
    kicks: Vec<EventFd>,
    stop: Arc<AtomicBool>,
}

impl Workers {
    /// Stops the workers after what they have in flight.
    pub fn stop(self) {
        self.stop.store(true, Ordering::Release);
        for kick in &self.kicks {
            // The only failure is a full counter, and then the worker is awake anyway.
            let _ = kick.write(1);
        }
        for thread in self.threads {
            // One that died has said so by its panic; its requests stay unanswered.
            let _ = thread.join();
        }
    }
}

/// Starts the workers for the queues that the driver enabled, each with a handle of its own on `disk`.
///
/// # Errors
/// When the host has no thread or descriptor left. Nothing runs then.
pub fn start(disk: &Disk, setup: &Setup, activation: Activation) -> io::Result<Workers> {
    let Activation { ram, queues, status, .. } = activation;
    // A driver that enabled no queue has a device that does nothing, and no thread.
    let shared = setup.one_thread && !queues.is_empty();
    let groups: Vec<Vec<ActiveQueue>> =
        if shared { vec![queues] } else { queues.into_iter().map(|q| vec![q]).collect() };
    let mut out = Workers { threads: Vec::new(), kicks: Vec::new(), stop: Arc::default() };
    for group in groups {
        let number = group.first().map_or(0, |q| q.index);
        let name =
            if setup.several && !setup.one_thread { format!("{}-q{number}", setup.name) } else { setup.name.clone() };
        let begun = (|| {
            let kick = group.first().map(|q| q.kick.try_clone()).transpose()?;
            let life = Life { _ram: ram.clone(), status: Arc::clone(&status), stop: Arc::clone(&out.stop) };
            let worker = Worker::new(disk.share()?, setup, group, number, life);
            Ok((kick, thread::Builder::new().name(name).stack_size(STACK).spawn(move || worker.run())?))
        })();
        match begun {
            Ok((kick, thread)) => {
                out.kicks.extend(kick);
                out.threads.push(thread);
            }
            Err(error) => {
                out.stop();
                return Err(error);
            }
        }
    }
    Ok(out)
}

/// What a worker's life depends on.
struct Life {
    /// Keeps the memory of requests in flight mapped.
    _ram: GuestRam,
    status: Arc<DeviceStatus>,
    stop: Arc<AtomicBool>,
}

/// Used again for each request.
#[derive(Default)]
struct Scratch {
    chain: Chain,
    data: Vec<Seg>,
    done: Vec<Completion>,
}

struct Worker {
    disk: Disk,
    queues: Vec<ActiveQueue>,
    /// One for each of them.
    coalescers: Vec<Coalescer>,
    shared: Arc<Shared>,
    shape: Shape,
    life: Life,
    /// Which row of the counters is its own.
    row: u16,
    /// By the disk's request number: queue by queue, then by head.
    slots: Box<[Option<InFlight>]>,
    in_flight: usize,
    /// The queue that is looked at first; it changes, so that none has all the tokens of a throttled disk.
    first: usize,
    /// The guest broke a queue of the device: answer what is in flight, take nothing more.
    dead: bool,
    /// The disk was told to write the eventfd for each completion.
    waking: bool,
    /// Since when requests have waited for the rate limits.
    held_since: Option<u64>,
    counts: BlkCounts,
    scratch: Scratch,
}

/// What there was to take of a queue.
enum Took {
    /// All of it.
    All,
    /// As much as one round may.
    Some,
    /// It waits for the rate limits so long.
    Held(Duration),
}

/// What to do after a round.
enum Next {
    /// Another.
    Again,
    /// Sleep until there is something.
    Sleep,
    /// Sleep at most so long.
    SleepFor(Duration),
}

impl Worker {
    fn new(disk: Disk, setup: &Setup, queues: Vec<ActiveQueue>, row: u16, life: Life) -> Self {
        let slots = (0..queues.len() * usize::from(DEFAULT_SIZE)).map(|_| None).collect();
        Self {
            disk,
            coalescers: vec![setup.coalescer.clone(); queues.len()],
            queues,
            shape: setup.shape,
            life,
            row,
            slots,
            in_flight: 0,
            first: 0,
            dead: false,
            waking: false,
            held_since: None,
            counts: setup.shared.stats.row(row),
            shared: Arc::clone(&setup.shared),
            scratch: Scratch::default(),
        }
    }

    /// The thread's life.
    fn run(mut self) {
        schedule();
        match self.attach() {
            Ok(mut sleeper) => {
                self.disk.want_wake(false);
                while !self.life.stop.load(Ordering::Acquire) {
                    match self.turn() {
                        Next::Again => {}
                        Next::Sleep => self.sleep(&mut sleeper, None),
                        Next::SleepFor(limit) => self.sleep(&mut sleeper, Some(limit)),
                    }
                }
                self.wind_up();
            }
            Err(e) => self.life.status.host_failed(&e),
        }
    }

    fn attach(&mut self) -> io::Result<Sleeper> {
        let kicks = self.queues.iter().map(|q| q.kick.try_clone()).collect::<io::Result<_>>()?;
        let sleeper = Sleeper::new(kicks)?;
        match self.queues.first() {
            Some(queue) => self.disk.attach(&queue.kick).map(|()| sleeper),
            None => Ok(sleeper),
        }
    }

    /// One round: takes what the guest offers, answers what is done.
    fn turn(&mut self) -> Next {
        // A broken queue stops the others of its device too.
        self.dead |= self.life.status.get() & status::NEEDS_RESET != 0;
        let count = self.queues.len();
        let (mut drained, mut held) = (true, None);
        for i in 0..count {
            match self.take((self.first + i) % count) {
                Took::All => {}
                Took::Some => drained = false,
                Took::Held(wait) => held = Some(wait),
            }
        }
        self.first = (self.first + 1) % count.max(1);
        self.disk.commit();
        self.answer_done();
        match held {
            _ if !drained => Next::Again,
            Some(wait) => {
                // No queue asks for kicks: what comes now would wait as well.
                self.want_completions();
                Next::SleepFor(self.quiet().map_or(wait, |quiet| quiet.min(wait)))
            }
            None if self.may_sleep() => self.quiet().map_or(Next::Sleep, Next::SleepFor),
            None => Next::Again,
        }
    }

    /// How long the next interrupt that was put off has to wait yet.
    fn quiet(&self) -> Option<Duration> {
        self.coalescers.iter().filter_map(Coalescer::wait).min()
    }

    /// Takes what queue `at` offers.
    fn take(&mut self, at: usize) -> Took {
        if let Some(queue) = self.queues.get_mut(at) {
            queue.ring.disable_kicks();
        }
        for _ in 0..ROUND {
            let Some(queue) = self.queues.get_mut(at).filter(|_| !self.dead) else { return Took::All };
            let mut now = 0;
            if let Some(throttle) = self.shared.throttle.as_ref().filter(|_| queue.ring.has_more()) {
                now = throttle.now();
                if let Some(wait) = throttle.wait(now) {
                    if self.held_since.is_none() {
                        self.held_since = Some(now);
                        self.counts.throttled += 1;
                    }
                    return Took::Held(wait);
                }
                let since = self.held_since.take().unwrap_or(now);
                self.counts.throttled_ns += now.saturating_sub(since);
            }
            let begun = match queue.ring.pop(&mut self.scratch.chain) {
                Ok(true) => self.begin(at, now),
                Ok(false) => return Took::All,
                Err(fault) => Err(fault),
            };
            if let Err(fault) = begun {
                self.counts.faults += 1;
                self.dead = true;
                self.life.status.needs_reset(fault);
            }
        }
        Took::Some
    }

    /// Looks for the last time, after telling guest and disk to wake us for what comes next.
    fn may_sleep(&mut self) -> bool {
        // Each queue is asked, also after one that has more.
        let more = self.queues.iter_mut().filter(|_| !self.dead).fold(false, |more, q| q.ring.enable_kicks() | more);
        if more {
            return false;
        }
        self.want_completions();
        true
    }

    fn want_completions(&mut self) {
        if self.in_flight > 0 {
            self.disk.want_wake(true);
            self.waking = true;
            self.answer_done();
        }
    }

    fn sleep(&mut self, sleeper: &mut Sleeper, limit: Option<Duration>) {
        self.shared.stats.publish(self.row, &self.counts);
        self.counts.signals += sleeper.sleep(limit);
        self.counts.wakes += 1;
        if std::mem::take(&mut self.waking) {
            self.disk.want_wake(false);
        }
    }

    /// Starts the request in the chain of queue `at`; `now` is the throttle's time.
    fn begin(&mut self, at: usize, now: u64) -> Result<(), GuestFault> {
        let Scratch { chain, data, .. } = &mut self.scratch;
        let head = chain.head();
        let status = StatusByte::of(chain)?;
        self.shape.size = self.shared.capacity.load(Ordering::Acquire);
        match Request::parse(chain, self.shape, data) {
            Ok(Request::Disk { op, offset, len }) => {
                if let Some(throttle) = &self.shared.throttle {
                    throttle.charge(now, if matches!(op, Op::Read | Op::Write) { len.into() } else { 0 });
                }
                // The queue gives heads below its size only, and each once, so the slot is there and free.
                let id = at * usize::from(DEFAULT_SIZE) + usize::from(head);
                if let (Some(slot), Ok(id)) = (self.slots.get_mut(id), u16::try_from(id)) {
                    *slot = Some(InFlight { status, op, len, flushing: false });
                    self.in_flight += 1;
                    self.disk.submit(&block::Request { id, op, offset, len: len.into(), segs: data });
                }
            }
            Ok(Request::GetId) => {
                self.counts.others += 1;
                let written = chain.write_at(0, &self.shared.id) as u32;
                self.answer(at, head, status, OK, written);
            }
            Err(fault) => {
                let Answer::Status(code) = fault.answer() else { return Err(fault) };
                self.counts.faults += 1;
                self.counts.others += 1;
                self.answer(at, head, status, code, 0);
            }
        }
        Ok(())
    }

    /// Answers what the disk has finished and interrupts the guest if it wants to hear of it.
    fn answer_done(&mut self) {
        let mut done = std::mem::take(&mut self.scratch.done);
        loop {
            self.disk.reap(&mut done);
            let flushes =
                done.drain(..).fold(false, |any, Completion { id, result }| self.finish(id, result.is_ok()) | any);
            if !flushes {
                break;
            }
            self.disk.commit();
        }
        self.scratch.done = done;
        let mut waited = Waited::default();
        for (queue, coalescer) in self.queues.iter_mut().zip(&mut self.coalescers) {
            if coalescer.take(&mut waited) && queue.ring.needs_notification() {
                self.counts.interrupts += 1;
                queue.irq.notify();
            }
        }
        self.counts.coalesced += waited.times;
        self.counts.coalesced_ns += waited.ns;
    }

    /// Answers one request of the disk, or, if it has to be durable first, asks for that: `true`.
    fn finish(&mut self, id: u16, ok: bool) -> bool {
        let Some(slot) = self.slots.get_mut(usize::from(id)) else { return false };
        let Some(InFlight { status, op, len, flushing }) = slot.take() else {
            debug_assert!(false, "the disk answered a request nobody made");
            return false;
        };
        let changed = ok && !flushing && matches!(op, Op::Write | Op::WriteZeroes { .. });
        if changed && !self.shared.writeback.load(Ordering::Acquire) {
            *slot = Some(InFlight { status, op, len, flushing: true });
            self.disk.submit(&block::Request { id, op: Op::Flush, offset: 0, len: 0, segs: &[] });
            return true;
        }
        self.in_flight -= 1;
        let bytes = if ok { u64::from(len) } else { 0 };
        self.counts.errors += u64::from(!ok);
        match op {
            Op::Read => {
                (self.counts.reads, self.counts.read_bytes) = (self.counts.reads + 1, self.counts.read_bytes + bytes)
            }
            Op::Write => {
                (self.counts.writes, self.counts.write_bytes) =
                    (self.counts.writes + 1, self.counts.write_bytes + bytes);
            }
            Op::Flush => self.counts.flushes += 1,
            Op::Discard | Op::WriteZeroes { .. } => self.counts.discards += 1,
        }
        let (at, head) = (usize::from(id / DEFAULT_SIZE), id % DEFAULT_SIZE);
        let written = if op == Op::Read && ok { len } else { 0 };
        self.answer(at, head, status, if ok { OK } else { IOERR }, written);
        false
    }

    /// Writes the status byte and gives the chain back; `written` bytes from the start of the writable part were written
    /// before it. The driver is told how long the run of written bytes is (virtio 1.2, 2.7.8.2), status included if the run
    /// reaches it.
    fn answer(&mut self, at: usize, head: u16, status: StatusByte, code: u8, written: u32) {
        status.write(code);
        let run = if written >= status.before { status.before + 1 } else { written };
        if let Some(queue) = self.queues.get_mut(at) {
            queue.ring.push_used(head, run);
        }
        if let Some(coalescer) = self.coalescers.get_mut(at) {
            coalescer.finish();
        }
    }

    /// Answers everything in flight; the guest is resetting the device and hears nothing of it.
    fn wind_up(&mut self) {
        self.disk.detach();
        loop {
            let mut done = Vec::new();
            self.disk.reap(&mut done);
            let flushes = done.drain(..).fold(false, |any, c| self.finish(c.id, c.result.is_ok()) | any);
            if !flushes {
                break;
            }
            self.disk.commit();
            self.disk.detach();
        }
        debug_assert_eq!(self.in_flight, 0, "the disk lost a request");
        if let (Some(since), Some(throttle)) = (self.held_since.take(), &self.shared.throttle) {
            self.counts.throttled_ns += throttle.now().saturating_sub(since);
        }
        self.shared.stats.publish(self.row, &self.counts);
    }
}
