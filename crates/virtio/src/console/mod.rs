// SPDX-License-Identifier: Apache-2.0
//! The console (virtio 1.2, 5.3): one port, `hvc0` in a Linux guest.
//!
//! [`Console`] is the device behind the transport; [`ConsolePort`] is the main loop's end of it: input goes in there, and a
//! full output is resumed from there. Both queues are kicked inline: a Linux guest spins until its output is given back,
//! so the kicking vCPU may as well do the work. No thread, no wake-up, one write for all that is queued.

mod output;
mod receive;
mod transmit;

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::reactor::Token;
use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use self::output::Output;
use self::receive::Receive;
use self::transmit::Transmit;
use crate::device::{Activation, DeviceStatus, VirtioDevice};
use crate::queue::DEFAULT_SIZE;
use crate::stats::Counters;

/// `VIRTIO_CONSOLE_F_SIZE`: the configuration holds columns and rows.
const F_SIZE: u64 = 1;
/// The queue the guest receives on.
const RECEIVE: u16 = 0;
/// The queue the guest sends on.
const TRANSMIT: u16 = 1;
/// Token: the output has room again.
const OUTPUT_READY: Token = 0;
/// Token: the input has room again.
const INPUT_READY: Token = 1;

struct Shared {
    transmit: Mutex<Transmit>,
    receive: Mutex<Receive>,
    status: Mutex<Option<Arc<DeviceStatus>>>,
    /// Columns in the low half, rows in the high one.
    size: AtomicU32,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The device's end.
pub struct Console {
    shared: Arc<Shared>,
    features: u64,
    counters: Arc<Counters>,
}

/// The main loop's end. Dropping it leaves the device working, without input.
pub struct ConsolePort {
    shared: Arc<Shared>,
    room: EventFd,
    waiter: RawFd,
}

/// Characters of a terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Characters in a line.
    pub columns: u16,
    /// Lines.
    pub rows: u16,
}

impl Console {
    /// A console that writes to `output`, whose flags and position are respected: it is neither made non-blocking nor
    /// closed. `size` is offered to the guest if it is known.
    ///
    /// # Errors
    /// When the host has no descriptors left.
    pub fn new(output: &File, size: Option<TerminalSize>) -> io::Result<(Self, ConsolePort)> {
        let counters = Arc::<Counters>::default();
        let room = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let output = Output::new(output)?;
        let waiter = output.waiter();
        let shared = Arc::new(Shared {
            transmit: Mutex::new(Transmit::new(output, Arc::clone(&counters))),
            receive: Mutex::new(Receive::new(room.try_clone()?, Arc::clone(&counters))),
            status: Mutex::new(None),
            size: AtomicU32::new(size.map_or(0, pack)),
        });
        let features = if size.is_some() { F_SIZE } else { 0 };
        Ok((Self { shared: Arc::clone(&shared), features, counters }, ConsolePort { shared, room, waiter }))
    }

    /// What it counts.
    #[must_use]
    pub const fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }
}

fn pack(size: TerminalSize) -> u32 {
    u32::from(size.columns) | u32::from(size.rows) << 16
}

impl ConsolePort {
    /// Descriptors for the main loop to watch for input, each with the token to give to [`ConsolePort::on_ready`]. They
    /// stay open while this value lives.
    #[must_use]
    pub fn sources(&self) -> [(RawFd, Token); 2] {
        [(self.waiter, OUTPUT_READY), (self.room.as_raw_fd(), INPUT_READY)]
    }

    /// A source is readable. `true`: input that was refused may be offered again.
    pub fn on_ready(&mut self, token: Token) -> bool {
        match token {
            OUTPUT_READY => {
                lock(&self.shared.transmit).resume();
                false
            }
            INPUT_READY => self.room.read().is_ok(),
            _ => false,
        }
    }

    /// Hands input to the guest and gives how many bytes were taken, less than all while the guest does not read. Offer
    /// the rest when [`ConsolePort::on_ready`] says so.
    pub fn input(&mut self, bytes: &[u8]) -> usize {
        lock(&self.shared.receive).input(bytes)
    }

    /// The terminal changed its size. Ignored by a guest that was not offered one.
    pub fn resize(&mut self, size: TerminalSize) {
        self.shared.size.store(pack(size), Ordering::Release);
        if let Some(status) = lock(&self.shared.status).as_ref() {
            status.config_changed();
        }
    }

    /// The vCPUs have stopped: writes what the guest still had queued, waiting for a slow reader at most `patience`.
    /// `false` if some of it was not taken.
    pub fn drain(&mut self, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        let mut transmit = lock(&self.shared.transmit);
        transmit.run();
        while transmit.is_stalled() {
            let left = end.saturating_duration_since(Instant::now());
            let ms = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
            if !transmit.output().poll(ms) && ms == 0 {
                return false;
            }
            transmit.resume();
        }
        true
    }

    /// Why output is being dropped, if it is: the reader is gone, or the disk is full.
    pub fn take_trouble(&mut self) -> Option<io::Error> {
        lock(&self.shared.transmit).take_trouble()
    }
}

impl VirtioDevice for Console {
    fn kind(&self) -> u16 {
        3
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &[DEFAULT_SIZE, DEFAULT_SIZE]
    }

    /// `struct virtio_console_config`: cols, rows, max_nr_ports, emerg_wr.
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 12];
        config[..4].copy_from_slice(&self.shared.size.load(Ordering::Acquire).to_le_bytes());
        let from = usize::try_from(offset).ok().and_then(|at| config.get(at..)).unwrap_or_default();
        for (out, byte) in data.iter_mut().zip(from) {
            *out = *byte;
        }
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> io::Result<()> {
        *lock(&self.shared.status) = Some(Arc::clone(&activation.status));
        for queue in activation.queues {
            let status = Arc::clone(&activation.status);
            match queue.index {
                RECEIVE => lock(&self.shared.receive).activate(queue, status),
                TRANSMIT => lock(&self.shared.transmit).activate(queue, status),
                _ => {}
            }
        }
        Ok(())
    }

    fn reset(&mut self) {
        *lock(&self.shared.status) = None;
        lock(&self.shared.receive).reset();
        lock(&self.shared.transmit).reset();
    }

    fn inline_queues(&self) -> u64 {
        1 << RECEIVE | 1 << TRANSMIT
    }

    fn on_kick(&mut self, queue: u16) {
        self.counters.kick();
        match queue {
            RECEIVE => lock(&self.shared.receive).run(),
            TRANSMIT => lock(&self.shared.transmit).run(),
            _ => {}
        }
    }
}
