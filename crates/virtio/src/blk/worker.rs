// SPDX-License-Identifier: Apache-2.0
//! The thread that serves a block device: owns the queue, the disk and the table of requests in flight, shares nothing but
//! atomics, takes no lock.
//!
//! It sleeps in one place, a blocking read of the queue's eventfd. The guest's kicks write to it, and so do the disk's
//! completions and `stop`, so that a wake costs one system call whatever caused it. After a wake it takes all there is,
//! sends it off in one batch, answers what is done, and interrupts the guest at most once per round.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use base::{EventFd, Seg};
use block::{Completion, Disk, Op};
use mem::GuestRam;

use super::request::{ID_LEN, Request, Shape, StatusByte};
use super::stats::{BlkCounts, BlkStats};
use crate::device::{Activation, ActiveQueue, DeviceStatus};
use crate::fault::{Answer, GuestFault};
use crate::queue::Chain;

/// `VIRTIO_BLK_S_OK`.
const OK: u8 = 0;
/// `VIRTIO_BLK_S_IOERR`.
const IOERR: u8 = 1;
/// The worker's stack; its calls are shallow and nothing big lives on it.
const STACK: usize = 128 << 10;
/// Chains taken before the finished ones are shown to the guest: bounds the delay of the first by the work for the rest.
const ROUND: usize = 32;

/// A request the disk has; goes through [`Worker::finish`], and nowhere else.
#[derive(Debug)]
struct InFlight {
    status: StatusByte,
    op: Op,
    len: u32,
}

/// What the device gives its worker and gets back at the end.
pub struct Engine {
    /// The disk.
    pub disk: Disk,
    /// What `GET_ID` answers.
    pub id: [u8; ID_LEN],
    /// Where the counters go.
    pub stats: Arc<BlkStats>,
}

/// A running worker, as its device sees it.
pub struct Handle {
    thread: JoinHandle<Option<Box<Engine>>>,
    stop: Arc<AtomicBool>,
    kick: EventFd,
}

impl Handle {
    /// Stops the worker after what it has in flight and gives the engine back; `None` if the worker died.
    pub fn stop(self) -> Option<Box<Engine>> {
        self.stop.store(true, Ordering::Release);
        // The only failure is a full counter, and then the worker is awake anyway.
        let _ = self.kick.write(1);
        self.thread.join().ok().flatten()
    }
}

/// Why a worker could not be started; the engine comes back.
pub struct NotStarted {
    /// As it was.
    pub engine: Box<Engine>,
    /// The host's reason.
    pub error: io::Error,
}

/// Starts the worker of the device's first queue on a thread called `name`.
///
/// # Errors
/// When the host has no thread or descriptor left, or the driver enabled no queue.
pub fn start(engine: Box<Engine>, activation: Activation, name: &str) -> Result<Handle, NotStarted> {
    let fail = |engine, error| NotStarted { engine, error };
    let Some(queue) = activation.queues.into_iter().find(|q| q.index == 0) else {
        return Err(fail(engine, io::Error::new(io::ErrorKind::InvalidInput, "the driver enabled no queue")));
    };
    let kick = match queue.kick.try_clone() {
        Ok(kick) => kick,
        Err(e) => return Err(fail(engine, e)),
    };
    // The thread starts empty-handed, so that nothing is lost if it does not start.
    let (hand_over, taken) = mpsc::sync_channel::<Worker>(1);
    let spawned = thread::Builder::new()
        .name(name.to_owned())
        .stack_size(STACK)
        .spawn(move || taken.recv().ok().map(Worker::run));
    let thread = match spawned {
        Ok(thread) => thread,
        Err(e) => return Err(fail(engine, e)),
    };
    let stop = Arc::new(AtomicBool::new(false));
    let worker = Worker::new(engine, queue, activation.ram, activation.status, Arc::clone(&stop));
    match hand_over.send(worker) {
        Ok(()) => Ok(Handle { thread, stop, kick }),
        Err(mpsc::SendError(worker)) => Err(fail(worker.engine, io::Error::other("the worker thread died"))),
    }
}

struct Worker {
    engine: Box<Engine>,
    queue: ActiveQueue,
    /// Keeps the memory of requests in flight mapped.
    _ram: GuestRam,
    status: Arc<DeviceStatus>,
    stop: Arc<AtomicBool>,
    /// By head.
    slots: Box<[Option<InFlight>]>,
    in_flight: usize,
    /// The guest broke the queue: answer what is in flight, take nothing more.
    dead: bool,
    /// The disk was told to write the eventfd for each completion.
    waking: bool,
    counts: BlkCounts,
    chain: Chain,
    data: Vec<Seg>,
    done: Vec<Completion>,
    shape: Shape,
}

impl Worker {
    fn new(
        engine: Box<Engine>,
        queue: ActiveQueue,
        ram: GuestRam,
        status: Arc<DeviceStatus>,
        stop: Arc<AtomicBool>,
    ) -> Self {
        let slots = (0..queue.ring.size()).map(|_| None).collect();
        let shape = Shape { size: engine.disk.size(), readonly: engine.disk.readonly() };
        let counts = engine.stats.read();
        Self {
            engine,
            queue,
            _ram: ram,
            status,
            stop,
            slots,
            in_flight: 0,
            dead: false,
            waking: false,
            counts,
            chain: Chain::new(),
            data: Vec::new(),
            done: Vec::new(),
            shape,
        }
    }

    /// The thread's life.
    fn run(mut self) -> Box<Engine> {
        schedule();
        // The queue's eventfd comes non-blocking, for users of epoll; this thread sleeps in the read itself.
        let ready = blocking(&self.queue.kick, true).and_then(|()| self.engine.disk.attach(&self.queue.kick));
        match ready {
            Ok(()) => {
                self.engine.disk.want_wake(false);
                while !self.stop.load(Ordering::Acquire) {
                    if self.turn() {
                        self.sleep();
                    }
                }
                self.wind_up();
            }
            Err(e) => self.status.host_failed(&e),
        }
        // Whoever reads it next expects it as it came. It can't fail: it is open and the first change worked.
        let _ = blocking(&self.queue.kick, false);
        self.engine
    }

    /// One round: takes what the guest offers, answers what is done. `true` when there is nothing left to do but sleep.
    fn turn(&mut self) -> bool {
        self.queue.ring.disable_kicks();
        let mut drained = self.dead;
        for _ in 0..ROUND {
            if drained {
                break;
            }
            let begun = match self.queue.ring.pop(&mut self.chain) {
                Ok(true) => self.begin(),
                Ok(false) => {
                    drained = true;
                    Ok(())
                }
                Err(fault) => Err(fault),
            };
            if let Err(fault) = begun {
                self.counts.faults += 1;
                self.dead = true;
                drained = true;
                self.status.needs_reset(fault);
            }
        }
        self.engine.disk.commit();
        self.answer_done();
        drained && self.may_sleep()
    }

    /// Looks for the last time, after telling guest and disk to wake us for what comes next.
    fn may_sleep(&mut self) -> bool {
        if !self.dead && self.queue.ring.enable_kicks() {
            return false;
        }
        if self.in_flight > 0 {
            self.engine.disk.want_wake(true);
            self.waking = true;
            self.answer_done();
        }
        true
    }

    fn sleep(&mut self) {
        self.engine.stats.publish(&self.counts);
        match self.queue.kick.read() {
            Ok(signals) => self.counts.signals += signals,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                // Someone else changed the mode of the shared eventfd; without this the thread would spin.
                let _ = blocking(&self.queue.kick, true);
            }
            // A signal: one more round finds nothing and sleeps again.
            Err(_) => {}
        }
        self.counts.wakes += 1;
        if std::mem::take(&mut self.waking) {
            self.engine.disk.want_wake(false);
        }
    }

    /// Starts the request in `chain`.
    fn begin(&mut self) -> Result<(), GuestFault> {
        let head = self.chain.head();
        let status = StatusByte::of(&self.chain)?;
        match Request::parse(&self.chain, self.shape, &mut self.data) {
            Ok(Request::Disk { op, offset, len }) => {
                // The queue gives heads below its size only, and each once, so the slot is there and free.
                if let Some(slot) = self.slots.get_mut(usize::from(head)) {
                    *slot = Some(InFlight { status, op, len });
                    self.in_flight += 1;
                    let len = u64::from(len);
                    self.engine.disk.submit(&block::Request { id: head, op, offset, len, segs: &self.data });
                }
            }
            Ok(Request::GetId) => {
                self.counts.others += 1;
                let written = self.chain.write_at(0, &self.engine.id) as u32;
                self.answer(head, status, OK, written);
            }
            Err(fault) => {
                let Answer::Status(code) = fault.answer() else { return Err(fault) };
                self.counts.faults += 1;
                self.counts.others += 1;
                self.answer(head, status, code, 0);
            }
        }
        Ok(())
    }

    /// Answers what the disk has finished and interrupts the guest if it wants to hear of it.
    fn answer_done(&mut self) {
        let mut done = std::mem::take(&mut self.done);
        self.engine.disk.reap(&mut done);
        for Completion { id, result } in done.drain(..) {
            self.finish(id, result.is_ok());
        }
        self.done = done;
        if self.queue.ring.needs_notification() {
            self.counts.interrupts += 1;
            self.queue.irq.notify();
        }
    }

    /// Answers one request of the disk.
    fn finish(&mut self, head: u16, ok: bool) {
        let Some(InFlight { status, op, len }) = self.slots.get_mut(usize::from(head)).and_then(Option::take) else {
            debug_assert!(false, "the disk answered a request nobody made");
            return;
        };
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
        self.answer(head, status, if ok { OK } else { IOERR }, if op == Op::Read && ok { len } else { 0 });
    }

    /// Writes the status byte and gives the chain back; `written` bytes from the start of the writable part were written
    /// before it. The driver is told how long the run of written bytes is (virtio 1.2, 2.7.8.2), status included if the run
    /// reaches it.
    fn answer(&mut self, head: u16, status: StatusByte, code: u8, written: u32) {
        status.write(code);
        let run = if written >= status.before { status.before + 1 } else { written };
        self.queue.ring.push_used(head, run);
    }

    /// Answers everything in flight; the guest is resetting the device and hears nothing of it.
    fn wind_up(&mut self) {
        self.engine.disk.detach();
        let mut done = Vec::new();
        self.engine.disk.reap(&mut done);
        for Completion { id, result } in done {
            self.finish(id, result.is_ok());
        }
        debug_assert_eq!(self.in_flight, 0, "the disk lost a request");
        self.engine.stats.publish(&self.counts);
    }
}

/// How much the worker goes before the vCPUs of its own machine, where both want one CPU: enough to preempt a vCPU whenever it
/// wakes up, so that the answer is there before the guest has gone idle, which would cost it a halt and the way back.
const NICE: libc::c_int = -5;

/// How the scheduler treats the worker; the one place to change it. What it takes first its guest has asked for; between
/// machines that each have a control group, nothing changes. Without the right to do so the worker runs like any other thread.
fn schedule() {
    // SAFETY: no pointers; 0 is the calling thread.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// Makes reads of `fd` sleep, or not.
fn blocking(fd: &EventFd, on: bool) -> io::Result<()> {
    // SAFETY: no pointers; the descriptor is open since `fd` is borrowed.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = if on { flags & !libc::O_NONBLOCK } else { flags | libc::O_NONBLOCK };
    // SAFETY: as above.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) } < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
