// SPDX-License-Identifier: Apache-2.0
//! The thread that serves a pair of a NIC's queues: owns them and their wire, shares atomics and the little that [`Shared`]
//! holds. The first pair's also serves the control queue.
//!
//! It sleeps in one epoll: the queues' eventfds, the wire and `stop`, each reported once for each change, so that a wake needs
//! no read of an eventfd and a ring or a socket that is full makes no noise. Where the host's kernel serves the pair
//! ([`Service`]), the worker looks once a second whether the tap is still there, and takes the queues over when it is not.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use base::reactor::{Reactor, Token};
use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use mem::GuestRam;

use super::ctrl::Control;
use super::feature;
use super::limit::Limit;
use super::pairs::Pairs;
use super::reach::VhostMemory;
use super::rx::Receive;
use super::shared::Shared;
use super::stats::{NetCounts, NetStats};
use super::tx::{Round, Transmit};
use super::vhost::{NotTaken, Service, Vhost};
use super::watch::Watch;
use super::wire::Wire;
use crate::coalesce::Coalescer;
use crate::device::{Activation, ActiveQueue, DeviceStatus};
use crate::fault::GuestFault;
use crate::throttle::Throttle;

const KICK: Token = 0;
const WIRE: Token = 1;
const STOP: Token = 2;
const WAKE: Token = 3;
const BROKEN: Token = 4;
/// The kernel's signals for receive and, one up, transmit.
const RELAY: Token = 5;
/// The worker's stack; its calls are shallow, and the largest thing on it is a page for frames nobody wants.
const STACK: usize = 128 << 10;
/// How often the worker looks after a tap that the kernel serves.
const LOOK: Duration = Duration::from_secs(1);

/// What the device gives a worker and gets back at the end.
pub struct Engine {
    /// Which pair this is.
    pub index: u16,
    /// The host's end; `None` once it is gone.
    pub wire: Option<Box<dyn Wire>>,
    /// Who serves the pair in the kernel, while nobody does.
    pub vhost: Option<Vhost>,
    /// What it reaches, if that may change; else it is what the guest has when it starts.
    pub memory: Option<Arc<VhostMemory>>,
    /// What may change of the configuration.
    pub shared: Arc<Shared>,
    /// Which pairs are in use.
    pub pairs: Arc<Pairs>,
    /// Where the counters go.
    pub stats: Arc<NetStats>,
    /// Rate limits, to the guest and from it.
    pub limits: [Option<Arc<Throttle>>; 2],
    /// How each queue's interrupts wait for further packets.
    pub coalescer: Coalescer,
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

/// Starts the worker of one pair on a thread called `name`; `activation` has its queues only.
///
/// # Errors
/// When the host has no thread or descriptor left.
pub fn start(engine: Box<Engine>, activation: Activation, name: &str) -> Result<Handle, NotStarted> {
    let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC);
    let (reactor, event) = match Reactor::new().and_then(|reactor| Ok((reactor, stop?))) {
        Ok(both) => both,
        Err(error) => return Err(NotStarted { engine, error }),
    };
    let stop = Arc::new(Stop { asked: AtomicBool::new(false), event });
    // The thread starts empty-handed, so that nothing is lost if it does not start.
    let (hand_over, taken) = mpsc::sync_channel::<Worker>(1);
    let spawned = thread::Builder::new()
        .name(name.to_owned())
        .stack_size(STACK)
        .spawn(move || taken.recv().ok().map(Worker::run));
    let thread = match spawned {
        Ok(thread) => thread,
        Err(error) => return Err(NotStarted { engine, error }),
    };
    let mut worker = Worker::new(engine, activation.status, activation.ram, reactor, Arc::clone(&stop));
    if let Err(error) = worker.take(activation.features, activation.queues) {
        return Err(NotStarted { engine: worker.finish(), error });
    }
    match hand_over.send(worker) {
        Ok(()) => Ok(Handle { thread, stop }),
        Err(mpsc::SendError(worker)) => {
            let error = io::Error::other("the worker thread died");
            Err(NotStarted { engine: worker.finish(), error })
        }
    }
}

struct Worker {
    engine: Box<Engine>,
    features: u64,
    rx: Option<Receive>,
    tx: Option<Transmit>,
    ctrl: Option<Control>,
    /// The kernel has the pair, and `rx` and `tx` are empty.
    service: Option<Service>,
    reactor: Reactor,
    /// Keeps the memory of packets under way mapped.
    ram: GuestRam,
    status: Arc<DeviceStatus>,
    stop: Arc<Stop>,
    /// The guest broke a queue: do nothing more.
    dead: bool,
    watch: Watch,
    /// How long a rate limit holds the next packet.
    wait: Option<Duration>,
    counts: NetCounts,
}

impl Worker {
    fn new(engine: Box<Engine>, status: Arc<DeviceStatus>, ram: GuestRam, reactor: Reactor, stop: Arc<Stop>) -> Self {
        let (counts, watch) = (engine.stats.of(engine.index), Watch::new(engine.patience));
        Self {
            engine,
            features: 0,
            rx: None,
            tx: None,
            ctrl: None,
            service: None,
            reactor,
            ram,
            status,
            stop,
            dead: false,
            watch,
            wait: None,
            counts,
        }
    }

    /// Takes the pair's queues, and the control queue.
    fn take(&mut self, features: u64, queues: Vec<ActiveQueue>) -> io::Result<()> {
        self.features = features;
        self.reactor.add_edge(&self.stop.event, STOP)?;
        if let Some(wake) = self.engine.pairs.wake(self.engine.index) {
            self.reactor.add_edge(wake, WAKE)?;
        }
        if let Some(wire) = &mut self.engine.wire {
            // A wire that is gone refuses; the worker will find out. Offloads that the host does not want it does not use.
            let _ = wire.accept_offloads(features);
        }
        let first = self.engine.index * 2;
        let (pair, ctrl): (Vec<_>, Vec<_>) = queues.into_iter().partition(|q| q.index == first || q.index == first + 1);
        for queue in ctrl {
            self.reactor.add_edge(&queue.kick, KICK)?;
            self.ctrl = Some(Control::new(queue, features));
        }
        match self.lend(pair) {
            Ok(()) => Ok(()),
            Err(pair) => self.serve(pair),
        }
    }

    /// Gives the pair to the kernel, if that serves here; else it comes back.
    fn lend(&mut self, pair: Vec<ActiveQueue>) -> Result<(), Vec<ActiveQueue>> {
        let Some(wire) = &self.engine.wire else { return Err(pair) };
        let Some(vhost) = self.engine.vhost.take() else { return Err(pair) };
        let memory = self.engine.memory.clone().unwrap_or_else(|| Arc::new(VhostMemory::new(&self.ram)));
        let taken = Service::start(vhost, &memory, self.features, pair, wire.fd()).map_err(|not| *not);
        let watched = taken.and_then(|service| {
            let relays =
                service.relays().try_for_each(|(index, fd)| self.reactor.add_edge(fd, RELAY + u64::from(index)));
            match relays.and_then(|()| self.reactor.add_edge(&service.errors, BROKEN)) {
                Ok(()) => Ok(service),
                Err(error) => {
                    let (vhost, queues) = service.stop();
                    Err(NotTaken { vhost, queues, error })
                }
            }
        });
        match watched {
            Ok(service) => {
                self.service = Some(service);
                Ok(())
            }
            Err(NotTaken { vhost, queues, error }) => {
                self.engine.vhost = Some(vhost);
                let name = &self.engine.name;
                self.engine
                    .shared
                    .tell(format!("{name}: vhost-net does not serve it, {error}; tare moves its packets"));
                Err(queues)
            }
        }
    }

    /// Serves the pair here.
    fn serve(&mut self, pair: Vec<ActiveQueue>) -> io::Result<()> {
        if let Some(wire) = &self.engine.wire {
            self.reactor.add_edge(&wire.fd(), WIRE)?;
        }
        let [rx, tx] = &self.engine.limits;
        for queue in pair {
            self.reactor.add_edge(&queue.kick, KICK)?;
            if queue.index % 2 == 0 {
                let merged = self.features & feature::MRG_RXBUF != 0;
                self.rx = Some(Receive::new(queue, merged, Limit::new(rx.clone()), self.engine.coalescer.clone()));
            } else {
                let out = self.engine.wire.as_deref().map_or_else(super::Outbox::packets, Wire::outbox);
                self.tx = Some(Transmit::new(queue, out, Limit::new(tx.clone()), self.engine.coalescer.clone()));
            }
        }
        Ok(())
    }

    /// Takes the pair back from the kernel.
    fn take_back(&mut self) -> io::Result<()> {
        let Some(service) = self.service.take() else { return Ok(()) };
        let (vhost, pair) = service.stop();
        self.engine.vhost = Some(vhost);
        self.serve(pair)
    }

    /// The thread's life.
    fn run(mut self) -> Box<Engine> {
        while !self.stop.asked.load(Ordering::Acquire) {
            let more = match self.turn() {
                Ok(more) => more,
                Err(fault) => {
                    self.break_down(fault);
                    false
                }
            };
            let limit = self.look_after();
            if !more && let Err(e) = self.sleep(limit) {
                self.status.host_failed(&e);
                break;
            }
        }
        self.finish()
    }

    /// Lets go of the guest's memory and gives the engine back.
    fn finish(mut self) -> Box<Engine> {
        if let Some(service) = self.service.take() {
            self.engine.vhost = Some(service.stop().0);
        }
        if let Some(wire) = &mut self.engine.wire {
            match &mut self.tx {
                Some(tx) => wire.suspend(&mut tx.out),
                None => wire.suspend(&mut super::Outbox::packets()),
            }
        }
        self.engine.stats.publish(self.engine.index, &self.counts);
        self.engine
    }

    fn break_down(&mut self, fault: GuestFault) {
        self.counts.faults += 1;
        self.dead = true;
        if let Some(service) = self.service.take() {
            self.engine.vhost = Some(service.stop().0);
        }
        self.status.needs_reset(fault);
    }

    /// One round over all queues; whether there may be more to do at once.
    fn turn(&mut self) -> Result<bool, GuestFault> {
        self.wait = None;
        if self.dead {
            return Ok(false);
        }
        let mut more = false;
        if let Some(ctrl) = &mut self.ctrl {
            let Engine { wire, shared, pairs, .. } = &mut *self.engine;
            more |= ctrl.run(wire.as_mut(), shared, pairs, &mut self.counts)?;
        }
        let active = self.engine.pairs.is_active(self.engine.index);
        if let Some(tx) = &mut self.tx {
            let round = tx.run(self.engine.wire.as_mut().filter(|_| active), &mut self.counts)?;
            more |= self.after(round);
        }
        if let (Some(rx), Some(wire), true) = (&mut self.rx, &mut self.engine.wire, active) {
            let round = rx.run(&mut **wire, &mut self.counts)?;
            more |= self.after(round);
        }
        // Also what came before the wire was gone.
        if let Some(rx) = &mut self.rx {
            rx.interrupt(&mut self.counts);
        }
        Ok(more)
    }

    fn after(&mut self, round: Round) -> bool {
        match round {
            Round::Idle => false,
            Round::More => true,
            Round::Wait(wait) => {
                self.wait = Some(self.wait.map_or(wait, |other| other.min(wait)));
                false
            }
            // Its queue of the tap was detached meanwhile: the guest does not use the pair any more.
            Round::Gone(_) if !self.engine.pairs.is_active(self.engine.index) => true,
            Round::Gone(error) => {
                self.lose(&error);
                // Packets that waited for it are given back.
                true
            }
        }
    }

    /// The wire is gone.
    fn lose(&mut self, error: &io::Error) {
        if let Some(mut wire) = self.engine.wire.take() {
            let _ = self.reactor.remove(&wire.fd());
            let why = wire.epitaph(error);
            let name = &self.engine.name;
            let line = format!("{name}: {why}; the guest's link is down, and stays so until tare is started again");
            self.engine.shared.set_link(false, line);
        }
        self.watch.end();
    }

    /// Watches over the wire; gives how long the worker may sleep.
    fn look_after(&mut self) -> Option<Duration> {
        let active = self.engine.pairs.is_active(self.engine.index);
        let wire = self.engine.wire.as_deref()?;
        if self.service.is_some() {
            // The kernel says nothing when a tap vanishes.
            if active && base::fd::is_broken(&wire.fd()) {
                self.lose(&io::Error::from_raw_os_error(libc::EBADFD));
                if let Err(e) = self.take_back() {
                    self.status.host_failed(&e);
                }
            }
            if self.engine.index == 0 {
                self.engine.stats.look();
            }
            return Some(LOOK);
        }
        let (moved, in_part) = wire.progress();
        let waited_for = self.tx.as_ref().is_some_and(|tx| !tx.out.is_empty())
            || self.rx.as_ref().is_some_and(|rx| in_part && !rx.ready && !rx.starved);
        let waited_for = waited_for && !self.dead && active;
        let next = self.watch.look(moved, waited_for, &self.engine.name, &self.engine.shared);
        [next, self.wait].into_iter().flatten().min()
    }

    /// How long the next interrupt that was put off has to wait yet.
    fn held(&self) -> Option<Duration> {
        if self.dead {
            return None;
        }
        let rx = self.rx.as_ref().and_then(|rx| rx.coalescer.wait());
        let tx = self.tx.as_ref().and_then(|tx| tx.coalescer.wait());
        [rx, tx].into_iter().flatten().min()
    }

    fn sleep(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.engine.stats.publish(self.engine.index, &self.counts);
        let mut broken = false;
        // Rounded up, so that the time is over when the wait is.
        let mut limit_ms = limit.map(|limit| u32::try_from(limit.as_millis()).unwrap_or(u32::MAX).saturating_add(1));
        if let Some(held) = self.held() {
            self.reactor.wait(limit.map_or(held, |limit| limit.min(held)));
            limit_ms = Some(0);
        }
        for event in self.reactor.turn(limit_ms)? {
            match event.token {
                KICK => self.counts.kicks += 1,
                WIRE | WAKE => {
                    if let Some(rx) = &mut self.rx {
                        rx.ready = true;
                    }
                }
                // Reported also when it is added.
                BROKEN => broken = self.service.as_ref().is_some_and(|service| service.errors.read().is_ok()),
                relay if relay >= RELAY => {
                    if let Some(service) = &self.service {
                        self.counts.interrupts += 1;
                        service.relay((relay - RELAY) as u32);
                    }
                }
                _ => {}
            }
        }
        self.counts.wakes += 1;
        if broken {
            self.break_down(GuestFault::KernelRefused);
        }
        Ok(())
    }
}
