// SPDX-License-Identifier: Apache-2.0
//! The thread that serves a NIC: owns its queues and its wire, shares atomics and the little that [`Shared`] holds.
//!
//! It sleeps in one epoll: the queues' eventfds, the wire and `stop`, each reported once for each change, so that a wake needs
//! no read of an eventfd and a ring or a socket that is full makes no noise. It also watches over the wire: one that ends, or
//! does not move for a while though it has to, shows as a link that is down.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use base::reactor::{Reactor, Token};
use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use mem::GuestRam;

use super::ctrl::Control;
use super::feature;
use super::rx::Receive;
use super::shared::Shared;
use super::stats::{NetCounts, NetStats};
use super::tx::{Round, Transmit};
use super::wire::Wire;
use crate::device::{Activation, ActiveQueue, DeviceStatus};
use crate::fault::GuestFault;

/// Queues of a device with one pair; what comes after them is the control queue.
pub const RX_QUEUE: u16 = 0;
pub const TX_QUEUE: u16 = 1;

const KICK: Token = 0;
const WIRE: Token = 1;
const STOP: Token = 2;
/// The worker's stack; its calls are shallow, and the largest thing on it is a page for frames nobody wants.
const STACK: usize = 128 << 10;

/// What the device gives its worker and gets back at the end.
pub struct Engine {
    /// The host's end; `None` once it is gone.
    pub wire: Option<Box<dyn Wire>>,
    /// What may change of the configuration.
    pub shared: Arc<Shared>,
    /// Where the counters go.
    pub stats: Arc<NetStats>,
    /// How long the wire may stand still while it has to move.
    pub patience: Duration,
    /// For the user: `net0`.
    pub name: String,
}

/// A running worker, as its device sees it.
pub struct Handle {
    thread: JoinHandle<Option<Box<Engine>>>,
    stop: Arc<Stop>,
}

struct Stop {
    asked: AtomicBool,
    event: EventFd,
}

impl Handle {
    /// Stops the worker and gives the engine back; `None` if the worker died.
    pub fn stop(self) -> Option<Box<Engine>> {
        self.stop.asked.store(true, Ordering::Release);
        // The only failure is a full counter, and then the worker is awake anyway.
        let _ = self.stop.event.write(1);
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

/// Starts the worker on a thread called `name`.
///
/// # Errors
/// When the host has no thread or descriptor left, or refuses the offloads that were agreed on.
pub fn start(mut engine: Box<Engine>, activation: Activation, name: &str) -> Result<Handle, NotStarted> {
    let fail = |engine, error| NotStarted { engine, error };
    let prepared = prepare(&mut engine, &activation);
    let (reactor, stop) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => return Err(fail(engine, error)),
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
    let worker = Worker::new(engine, activation, reactor, Arc::clone(&stop));
    match hand_over.send(worker) {
        Ok(()) => Ok(Handle { thread, stop }),
        Err(mpsc::SendError(worker)) => Err(fail(worker.engine, io::Error::other("the worker thread died"))),
    }
}

fn prepare(engine: &mut Engine, activation: &Activation) -> io::Result<(Reactor, Arc<Stop>)> {
    let reactor = Reactor::new()?;
    let stop = Stop { asked: AtomicBool::new(false), event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? };
    reactor.add_edge(&stop.event, STOP)?;
    for queue in &activation.queues {
        reactor.add_edge(&queue.kick, KICK)?;
    }
    if let Some(wire) = &mut engine.wire {
        // A wire that is gone refuses; the worker will find out. Offloads that the host does not want it does not use.
        let _ = wire.accept_offloads(activation.features);
        reactor.add_edge(&wire.fd(), WIRE)?;
    }
    Ok((reactor, Arc::new(stop)))
}

/// How the wire does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// It moves, or has no reason to.
    Well,
    /// It has had to move since then and did not.
    Stuck(Instant),
    /// The same, for so long that the link is down.
    Stalled,
}

struct Worker {
    engine: Box<Engine>,
    rx: Option<Receive>,
    tx: Option<Transmit>,
    ctrl: Option<Control>,
    reactor: Reactor,
    /// Keeps the memory of packets under way mapped.
    _ram: GuestRam,
    status: Arc<DeviceStatus>,
    stop: Arc<Stop>,
    /// The guest broke a queue: do nothing more.
    dead: bool,
    pace: Pace,
    moved: u64,
    counts: NetCounts,
}

impl Worker {
    fn new(engine: Box<Engine>, activation: Activation, reactor: Reactor, stop: Arc<Stop>) -> Self {
        let Activation { ram, features, queues, status } = activation;
        let (mut rx, mut tx, mut ctrl) = (None, None, None);
        for queue in queues {
            match queue.index {
                RX_QUEUE => rx = Some(Receive::new(queue, features & feature::MRG_RXBUF != 0)),
                TX_QUEUE => tx = Some(transmit(queue, engine.wire.as_deref())),
                _ => ctrl = Some(Control::new(queue, features)),
            }
        }
        let (counts, moved) = (engine.stats.read(), 0);
        let pace = Pace::Well;
        Self { engine, rx, tx, ctrl, reactor, _ram: ram, status, stop, dead: false, pace, moved, counts }
    }

    /// The thread's life.
    fn run(mut self) -> Box<Engine> {
        while !self.stop.asked.load(Ordering::Acquire) {
            let more = match self.turn() {
                Ok(more) => more,
                Err(fault) => {
                    self.counts.faults += 1;
                    self.dead = true;
                    self.status.needs_reset(fault);
                    false
                }
            };
            let limit = self.look_after();
            if !more && let Err(e) = self.sleep(limit) {
                self.status.host_failed(&e);
                break;
            }
        }
        if let (Some(wire), Some(tx)) = (&mut self.engine.wire, &mut self.tx) {
            wire.suspend(&mut tx.out);
        }
        self.engine.stats.publish(&self.counts);
        self.engine
    }

    /// One round over all queues; whether there may be more to do at once.
    fn turn(&mut self) -> Result<bool, GuestFault> {
        if self.dead {
            return Ok(false);
        }
        let mut more = false;
        if let Some(ctrl) = &mut self.ctrl {
            let Engine { wire, shared, .. } = &mut *self.engine;
            more |= ctrl.run(wire.as_mut(), shared, &mut self.counts)?;
        }
        if let Some(tx) = &mut self.tx {
            let round = tx.run(self.engine.wire.as_mut(), &mut self.counts)?;
            more |= self.after(round);
        }
        if let (Some(rx), Some(wire)) = (&mut self.rx, &mut self.engine.wire) {
            let round = rx.run(&mut **wire, &mut self.counts)?;
            more |= self.after(round);
        }
        Ok(more)
    }

    fn after(&mut self, round: Round) -> bool {
        match round {
            Round::Idle => false,
            Round::More => true,
            Round::Gone(error) => {
                if let Some(mut wire) = self.engine.wire.take() {
                    let _ = self.reactor.remove(&wire.fd());
                    let why = wire.epitaph(&error);
                    let line = format!(
                        "{}: {why}; the guest's link is down, and stays so until tare is started again",
                        self.engine.name
                    );
                    self.engine.shared.set_link(false, line);
                }
                self.pace = Pace::Well;
                // Packets that waited for it are given back.
                true
            }
        }
    }

    /// Watches over the wire; gives how long the worker may sleep.
    fn look_after(&mut self) -> Option<Duration> {
        let wire = self.engine.wire.as_deref()?;
        let (moved, in_part) = wire.progress();
        let moves = moved != self.moved;
        self.moved = moved;
        let waits_for_it = self.tx.as_ref().is_some_and(|tx| !tx.out.is_empty())
            || self.rx.as_ref().is_some_and(|rx| in_part && !rx.ready && !rx.starved);
        let (name, patience) = (&self.engine.name, self.engine.patience);
        match self.pace {
            Pace::Stalled if moves => {
                let line = format!("{name}: the other end moves again; the guest's link is up");
                self.engine.shared.set_link(true, line);
                self.pace = Pace::Well;
            }
            Pace::Stalled => {}
            _ if self.dead || !waits_for_it => self.pace = Pace::Well,
            Pace::Well => self.pace = Pace::Stuck(Instant::now()),
            Pace::Stuck(_) if moves => self.pace = Pace::Stuck(Instant::now()),
            Pace::Stuck(since) if since.elapsed() >= patience => {
                let line = format!(
                    "{name}: the other end has not moved for {} s; the guest's link is down until it does",
                    patience.as_secs()
                );
                self.engine.shared.set_link(false, line);
                self.pace = Pace::Stalled;
            }
            Pace::Stuck(_) => {}
        }
        match self.pace {
            Pace::Stuck(since) => Some(patience.saturating_sub(since.elapsed())),
            Pace::Well | Pace::Stalled => None,
        }
    }

    fn sleep(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.engine.stats.publish(&self.counts);
        // Rounded up, so that the time is over when the wait is.
        let limit = limit.map(|limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).saturating_add(1));
        for event in self.reactor.turn(limit)? {
            match event.token {
                KICK => self.counts.kicks += 1,
                WIRE => {
                    if let Some(rx) = &mut self.rx {
                        rx.ready = true;
                    }
                }
                _ => {}
            }
        }
        self.counts.wakes += 1;
        Ok(())
    }
}

fn transmit(queue: ActiveQueue, wire: Option<&dyn Wire>) -> Transmit {
    let out = wire.map_or_else(super::Outbox::packets, Wire::outbox);
    Transmit::new(queue, out)
}
