// SPDX-License-Identifier: Apache-2.0
//! The network device as the transport sees it: features, configuration space, start and stop of the workers. Lives under the
//! PCI function's lock; the wires are here while the device is reset and with the workers while it runs.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use base::news::News;

use super::pairs::Pairs;
use super::reach::VhostMemory;
use super::shared::Shared;
use super::stats::NetStats;
use super::tap::Tap;
use super::user::User;
use super::vhost::Vhost;
use super::wire::{NetError, Wire};
use super::worker::{self, Engine, Handle};
use super::{feature, mac};
use crate::coalesce::Coalescer;
use crate::device::{Activation, ActiveQueue, VirtioDevice};
use crate::queue::DEFAULT_SIZE;
use crate::throttle::{Clock, Throttle};

/// The largest size of the control queue.
const CONTROL_SIZE: u16 = 64;
/// How long the other end may stand still while packets wait for it.
const PATIENCE: Duration = Duration::from_secs(5);

/// A virtio network device.
pub struct Net {
    number: usize,
    features: u64,
    queue_sizes: Vec<u16>,
    shared: Arc<Shared>,
    pairs: Arc<Pairs>,
    stats: Arc<NetStats>,
    limits: spec::Throttle,
    coalesce: Option<spec::Coalesce>,
    state: State,
}

enum State {
    Idle(Vec<Engine>),
    /// The workers, and the engines of pairs that this driver can't use.
    Running(Vec<Handle>, Vec<Engine>),
    /// A worker died and took its wire with it.
    Lost,
}

impl Net {
    /// A device on `wire`, as `spec` describes it, the machine's NIC `number`.
    ///
    /// # Errors
    /// [`NetError::Host`].
    pub fn new(wire: Box<dyn Wire>, spec: &spec::Net, number: usize) -> Result<Self, NetError> {
        let pairs = Pairs::new(std::iter::empty()).map_err(|source| NetError::Host { number, source })?;
        Self::assemble(vec![(wire, None)], Arc::new(pairs), None, (spec, number))
    }

    /// Makes what `spec` describes at the host's end and a device on it, the machine's NIC `number`.
    ///
    /// # Errors
    /// See [`NetError`].
    pub fn open(spec: &spec::Net, number: usize) -> Result<Self, NetError> {
        let mtu = spec.mtu.unwrap_or(0);
        let wire: Box<dyn Wire> = match (spec.kind, &spec.fd.0[..]) {
            (spec::NetKind::User, [fd, ..]) => Box::new(User::adopt(number, *fd)?),
            (spec::NetKind::User, []) => Box::new(User::start(number, spec.mtu)?),
            (spec::NetKind::Tap, fds @ [_, ..]) => return Self::on_taps(adopt(fds, mtu, number)?, spec, number),
            (spec::NetKind::Tap, []) => {
                let (name, queues) = (spec.tap.as_deref().unwrap_or_default(), spec.pairs().max(1));
                let taps = (0..queues).map(|_| Tap::open(number, name, mtu, queues > 1));
                return Self::on_taps(taps.collect::<Result<_, _>>()?, spec, number);
            }
        };
        Self::new(wire, spec, number)
    }

    /// A device on the queues of a tap.
    fn on_taps(taps: Vec<Tap>, spec: &spec::Net, number: usize) -> Result<Self, NetError> {
        let host = |source| NetError::Host { number, source };
        let pairs = Pairs::new(taps.iter().skip(1).map(Tap::queue)).map_err(host)?;
        let interface = taps.first().filter(|_| spec.vhost).and_then(Tap::interface);
        let mut lacking = None;
        let mut wires: Vec<(Box<dyn Wire>, Option<Vhost>)> = Vec::with_capacity(taps.len());
        for (index, tap) in taps.into_iter().enumerate() {
            let vhost = match spec.vhostfd.0.get(index).copied() {
                Some(fd) => {
                    let want = "an unused descriptor of /dev/vhost-net";
                    Some(Vhost::adopt(fd).map_err(|_| NetError::Descriptor { number, fd, want })?)
                }
                None if spec.vhost => match Vhost::open() {
                    Ok(vhost) => Some(vhost),
                    Err(why) => {
                        lacking = Some(why);
                        None
                    }
                },
                None => None,
            };
            wires.push((Box::new(tap), vhost));
        }
        let device = Self::assemble(wires, Arc::new(pairs), interface.filter(|_| lacking.is_none()), (spec, number))?;
        if let Some(why) = lacking {
            device.shared.tell(format!(
                "/dev/vhost-net can't be used, {why}: net{number}; tare moves its packets; load the module vhost_net and let \
                 this user open it"
            ));
        }
        Ok(device)
    }

    /// `counted`: the interface whose packets the host's kernel moves.
    fn assemble(
        wires: Vec<(Box<dyn Wire>, Option<Vhost>)>,
        pairs: Arc<Pairs>,
        counted: Option<String>,
        (spec, number): (&spec::Net, usize),
    ) -> Result<Self, NetError> {
        let own = feature::MAC | feature::STATUS | feature::MRG_RXBUF;
        let control = feature::CTRL_VQ | feature::CTRL_RX | feature::CTRL_MAC_ADDR;
        let mtu = if spec.mtu.is_some() { feature::MTU } else { 0 };
        let several = if pairs.count() > 1 { feature::MQ } else { 0 };
        let mac = spec.mac.map_or_else(|| mac::drawn(number), |mac| mac.0);
        let shared = Shared::new(mac, spec.mtu.unwrap_or(0), pairs.count());
        let shared = Arc::new(shared.map_err(|source| NetError::Host { number, source })?);
        let features = own | control | mtu | several | wires.first().map_or(0, |(wire, _)| wire.features());
        let stats = Arc::new(NetStats::new(pairs.count(), counted));
        let mut queue_sizes = vec![DEFAULT_SIZE; usize::from(pairs.count()) * 2];
        queue_sizes.push(CONTROL_SIZE);
        let engine = |(index, (wire, vhost)): (u16, (Box<dyn Wire>, Option<Vhost>))| Engine {
            index,
            wire: Some(wire),
            vhost,
            memory: None,
            shared: Arc::clone(&shared),
            pairs: Arc::clone(&pairs),
            stats: Arc::clone(&stats),
            limits: [None, None],
            coalescer: Coalescer::new(None, Clock::default()),
            patience: PATIENCE,
            name: format!("net{number}"),
        };
        let state = State::Idle((0..).zip(wires).map(engine).collect());
        let limits =
            spec::Throttle { bps: spec.bps, bps_burst: spec.bps_burst, iops: spec.pps, iops_burst: spec.pps_burst };
        let coalesce = spec.coalesce;
        let device = Self { number, features, queue_sizes, shared, pairs, stats, limits, coalesce, state };
        Ok(device.with_clock(Clock::default()))
    }

    /// How long the other end may stand still while packets wait for it, instead of five seconds.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        for engine in self.idle() {
            engine.patience = patience;
        }
        self
    }

    /// What the host's kernel reaches follows `memory`; without it, it is what the guest has when it starts the device.
    #[must_use]
    pub fn reaching(mut self, memory: &Arc<VhostMemory>) -> Self {
        for engine in self.idle() {
            engine.memory = Some(Arc::clone(memory));
        }
        self
    }

    /// Rate limits and interrupts that wait by another clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Clock) -> Self {
        let limits = [clock.clone(), clock.clone()].map(|clock| Throttle::new(&self.limits, clock).map(Arc::new));
        let coalescer = Coalescer::new(self.coalesce, clock);
        for engine in self.idle() {
            engine.coalescer.clone_from(&coalescer);
            engine.limits.clone_from(&limits);
        }
        self
    }

    fn idle(&mut self) -> &mut [Engine] {
        match &mut self.state {
            State::Idle(engines) => engines,
            State::Running(..) | State::Lost => &mut [],
        }
    }

    /// The device's counters; they go on through resets.
    #[must_use]
    pub fn stats(&self) -> Arc<NetStats> {
        Arc::clone(&self.stats)
    }

    /// Says through `news` what the user should know: links that go down and come back, what the host refuses.
    #[must_use]
    pub fn reporting_to(self, news: &Arc<News>) -> Self {
        self.shared.report_to(news);
        self
    }

    /// Starts a worker for each pair that the driver may use.
    fn start(&mut self, engines: Vec<Engine>, activation: Activation) -> io::Result<()> {
        let Activation { ram, features, queues, status } = activation;
        // Without `MQ` the control queue follows the first pair, whatever the device could do (5.1.2).
        let usable = if features & feature::MQ != 0 { self.pairs.count() } else { 1 };
        let mut shares: Vec<Vec<ActiveQueue>> = (0..usable).map(|_| Vec::new()).collect();
        for queue in queues {
            let owner = if queue.index < usable * 2 { queue.index / 2 } else { 0 };
            if queue.index <= usable * 2
                && let Some(share) = shares.get_mut(usize::from(owner))
            {
                share.push(queue);
            }
        }
        let mut shares = shares.into_iter();
        let (mut handles, mut rest, mut failure) = (Vec::new(), Vec::new(), None);
        for engine in engines {
            let Some(queues) = shares.next().filter(|_| failure.is_none()) else {
                rest.push(engine);
                continue;
            };
            let name = match engine.index {
                0 => format!("net-{}", self.number),
                index => format!("net-{}-q{index}", self.number),
            };
            let activation = Activation { ram: ram.clone(), features, queues, status: Arc::clone(&status) };
            match worker::start(Box::new(engine), activation, &name) {
                Ok(handle) => handles.push(handle),
                Err(not) => {
                    rest.push(*not.engine);
                    failure = Some(not.error);
                }
            }
        }
        self.state = State::Running(handles, rest);
        match failure {
            Some(error) => {
                self.stop();
                Err(error)
            }
            None => Ok(()),
        }
    }

    fn stop(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Lost) {
            State::Running(handles, rest) => {
                let stopped: Vec<_> = handles.into_iter().map(|handle| handle.stop().map(|engine| *engine)).collect();
                let engines: Option<Vec<_>> = stopped.into_iter().chain(rest.into_iter().map(Some)).collect();
                engines.map_or(State::Lost, |mut engines| {
                    engines.sort_by_key(|engine| engine.index);
                    State::Idle(engines)
                })
            }
            other => other,
        };
        // The next driver begins with one; where the tap is gone there is nothing to detach.
        let _ = self.pairs.select(1);
    }
}

/// The tap behind `fds`, each a queue of it, for NIC `number`.
fn adopt(fds: &[u32], mtu: u16, number: usize) -> Result<Vec<Tap>, NetError> {
    let mut taps: Vec<Tap> = Vec::with_capacity(fds.len());
    for &fd in fds {
        let tap = Tap::adopt(number, fd, mtu)?;
        if taps.first().is_some_and(|first| first.interface() != tap.interface()) {
            return Err(NetError::Descriptor { number, fd, want: "another queue of the first one's tap" });
        }
        taps.push(tap);
    }
    Ok(taps)
}

impl VirtioDevice for Net {
    fn kind(&self) -> u16 {
        1
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    /// One for a single pair. An answer follows its request: by the time the guest can take the interrupt for a packet that
    /// left, the one for the packet that came is often due, and it is the same one. Pairs that belong to different CPUs have
    /// one for each queue.
    fn queue_vectors(&self) -> u16 {
        match self.queue_sizes.len() as u16 {
            0..=3 => 1,
            more => more,
        }
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let config = self.shared.config();
        let Ok(offset) = usize::try_from(offset) else { return };
        for (to, from) in data.iter_mut().zip(config.iter().skip(offset)) {
            *to = *from;
        }
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {
        // A modern driver sets its address through the control queue; nothing else can be written (5.1.4).
    }

    fn activate(&mut self, activation: Activation) -> io::Result<()> {
        self.reset();
        match std::mem::replace(&mut self.state, State::Lost) {
            State::Idle(engines) => {
                self.shared.attach(Some(Arc::clone(&activation.status)));
                self.start(engines, activation)
            }
            State::Running(..) | State::Lost => Err(io::Error::other("the NIC's worker thread died earlier")),
        }
    }

    fn reset(&mut self) {
        self.shared.attach(None);
        self.stop();
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.reset();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::AsRawFd;

    use spec::FromText;

    use super::super::sys;
    use super::*;

    #[test]
    fn queues_of_one_tap_are_passed_in() {
        let Ok(first) = sys::open_tap("", true) else {
            println!("skipped: this user can make no tap");
            return;
        };
        let second = sys::open_tap(&sys::tap_name(&first).unwrap(), true).unwrap();
        let stranger = sys::open_tap("", true).unwrap();
        let open = |a: &std::fs::File, b: &std::fs::File| {
            let text = format!("tap,fd={}:{}", a.as_raw_fd(), b.as_raw_fd());
            Net::open(&spec::Net::from_text(&text).unwrap(), 2)
        };
        let device = open(&first, &second).unwrap();
        assert_eq!(device.queue_sizes().len(), 5, "two pairs and the control queue");
        assert_eq!(device.queue_vectors(), 5, "pairs of different CPUs have vectors of their own");
        drop(device);
        let refused = open(&first, &stranger).err().unwrap().to_string();
        let fd = stranger.as_raw_fd();
        assert!(
            refused.starts_with(&format!("descriptor {fd} is not another queue of the first one's tap: net2")),
            "{refused}"
        );
    }
}
