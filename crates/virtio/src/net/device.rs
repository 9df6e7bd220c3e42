// SPDX-License-Identifier: Apache-2.0
//! The network device as the transport sees it: features, configuration space, start and stop of the worker. Lives under the
//! PCI function's lock; the wire is here while the device is reset and with the worker while it runs.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::shared::{NetPort, Shared};
use super::stats::NetStats;
use super::tap::Tap;
use super::user::User;
use super::wire::{NetError, Wire};
use super::worker::{self, Engine, Handle};
use super::{feature, mac};
use crate::device::{Activation, VirtioDevice};
use crate::queue::DEFAULT_SIZE;

/// The queues' largest sizes: receive, transmit, control.
const QUEUE_SIZES: [u16; 3] = [DEFAULT_SIZE, DEFAULT_SIZE, 64];
/// How long the other end may stand still while packets wait for it.
const PATIENCE: Duration = Duration::from_secs(5);

/// A virtio network device.
pub struct Net {
    thread: String,
    features: u64,
    shared: Arc<Shared>,
    stats: Arc<NetStats>,
    state: State,
}

enum State {
    Idle(Box<Engine>),
    Running(Handle),
    /// The worker died and took the wire with it.
    Lost,
}

impl Net {
    /// A device on `wire`, as `spec` describes it, the machine's NIC `number`.
    ///
    /// # Errors
    /// [`NetError::Host`].
    pub fn new(wire: Box<dyn Wire>, spec: &spec::Net, number: usize) -> Result<Self, NetError> {
        let own = feature::MAC | feature::STATUS | feature::MRG_RXBUF;
        let control = feature::CTRL_VQ | feature::CTRL_RX | feature::CTRL_MAC_ADDR;
        let mtu = if spec.mtu.is_some() { feature::MTU } else { 0 };
        let mac = spec.mac.map_or_else(|| mac::drawn(number), |mac| mac.0);
        let shared = Shared::new(mac, spec.mtu.unwrap_or(0)).map_err(|source| NetError::Host { number, source })?;
        let (shared, stats) = (Arc::new(shared), Arc::new(NetStats::default()));
        let features = own | control | mtu | wire.features();
        let engine = Engine {
            wire: Some(wire),
            shared: Arc::clone(&shared),
            stats: Arc::clone(&stats),
            patience: PATIENCE,
            name: format!("net{number}"),
        };
        let state = State::Idle(Box::new(engine));
        Ok(Self { thread: format!("net-{number}"), features, shared, stats, state })
    }

    /// Makes the wire that `spec` describes and a device on it, the machine's NIC `number`.
    ///
    /// # Errors
    /// See [`NetError`].
    pub fn open(spec: &spec::Net, number: usize) -> Result<Self, NetError> {
        let mtu = spec.mtu.unwrap_or(0);
        let wire: Box<dyn Wire> = match (spec.kind, spec.fd, &spec.tap) {
            (spec::NetKind::User, Some(fd), _) => Box::new(User::adopt(number, fd)?),
            (spec::NetKind::User, None, _) => Box::new(User::start(number, spec.mtu)?),
            (spec::NetKind::Tap, Some(fd), _) => Box::new(Tap::adopt(number, fd, mtu)?),
            (spec::NetKind::Tap, None, name) => Box::new(Tap::open(number, name.as_deref().unwrap_or_default(), mtu)?),
        };
        Self::new(wire, spec, number)
    }

    /// How long the other end may stand still while packets wait for it, instead of five seconds.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        if let State::Idle(engine) = &mut self.state {
            engine.patience = patience;
        }
        self
    }

    /// The device's counters; they go on through resets.
    #[must_use]
    pub fn stats(&self) -> Arc<NetStats> {
        Arc::clone(&self.stats)
    }

    /// The main loop's end.
    #[must_use]
    pub fn port(&self) -> NetPort {
        NetPort(Arc::clone(&self.shared))
    }
}

impl VirtioDevice for Net {
    fn kind(&self) -> u16 {
        1
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
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
            State::Idle(engine) => {
                self.shared.attach(Some(Arc::clone(&activation.status)));
                match worker::start(engine, activation, &self.thread) {
                    Ok(handle) => {
                        self.state = State::Running(handle);
                        Ok(())
                    }
                    Err(not) => {
                        self.state = State::Idle(not.engine);
                        Err(not.error)
                    }
                }
            }
            State::Running(_) | State::Lost => Err(io::Error::other("the NIC's worker thread died earlier")),
        }
    }

    fn reset(&mut self) {
        self.shared.attach(None);
        self.state = match std::mem::replace(&mut self.state, State::Lost) {
            State::Running(handle) => handle.stop().map_or(State::Lost, State::Idle),
            other => other,
        };
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        self.reset();
    }
}
