// SPDX-License-Identifier: Apache-2.0
//! What a virtio device is to the transport, and what it gets when the driver is ready.
//!
//! The transport calls a device on the thread of the vCPU that touched a register, under the lock of that PCI function.
//! From [`VirtioDevice::activate`] on, a device owns its queues and signals through [`QueueIrq`] and [`DeviceStatus`], which
//! take no lock and may be used from any thread.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use base::EventFd;
use base::news::{News, Tally};
use mem::GuestRam;

use crate::fault::GuestFault;
use crate::queue::Queue;

/// A virtio device without its transport.
pub trait VirtioDevice: Send {
    /// Virtio device id (virtio 1.2, 5): 1 network, 2 block, 3 console, 4 entropy.
    fn kind(&self) -> u16;

    /// Device features offered. `VERSION_1`, `EVENT_IDX` and `INDIRECT_DESC` are the transport's to offer.
    fn features(&self) -> u64;

    /// The largest size of each queue: powers of two, at most [`crate::queue::MAX_SIZE`].
    fn queue_sizes(&self) -> &[u16];

    /// How many interrupts of their own its queues are worth, one each unless the device says less: at least one. A driver
    /// that is offered less than one each lets all of them share one.
    fn queue_vectors(&self) -> u16 {
        self.queue_sizes().len() as u16
    }

    /// Copies device configuration from byte `offset` on; bytes past its end are left alone (the caller zeroed them).
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes device configuration; what can't be written is ignored.
    fn write_config(&mut self, offset: u64, data: &[u8]);

    /// Takes over what changed the device's configuration from outside; `true` if something did. The transport then tells
    /// the driver, under the same lock, so that no driver reads half a change.
    fn update_config(&mut self) -> bool {
        false
    }

    /// The driver is ready (`DRIVER_OK`): take the queues and run. Queues that the driver did not enable are missing.
    ///
    /// # Errors
    /// When the host can't give what running takes (a thread, a descriptor); the guest sees `DEVICE_NEEDS_RESET`.
    fn activate(&mut self, activation: Activation) -> io::Result<()>;

    /// Stops: finishes or drops work in flight, gives queues and memory back. Nothing is signalled after it returns.
    /// Idempotent, and legal before any `activate`.
    fn reset(&mut self);

    /// Queues, one bit each, whose kicks the device wants on the kicking vCPU's own thread through
    /// [`VirtioDevice::on_kick`], instead of through the queue's eventfd. Right for short work that the guest waits for
    /// anyway: no wake-up, no thread. Never changes.
    fn inline_queues(&self) -> u64 {
        0
    }

    /// An inline queue was kicked. Also called before `activate`; must not block.
    fn on_kick(&mut self, _queue: u16) {}
}

/// What a device gets when the driver is ready.
pub struct Activation {
    /// The guest's memory; keep a clone while requests are in flight.
    pub ram: GuestRam,
    /// Features that driver and device agreed on, transport bits included.
    pub features: u64,
    /// The queues that the driver enabled, in ascending order of index.
    pub queues: Vec<ActiveQueue>,
    /// Where the device says that it broke or that its configuration changed.
    pub status: Arc<DeviceStatus>,
}

/// One live queue: its rings and its two signals.
pub struct ActiveQueue {
    /// Which of the device's queues this is.
    pub index: u16,
    /// The rings.
    pub ring: Queue,
    /// Readable after the guest kicked the queue (never for an inline queue). Non-blocking.
    pub kick: EventFd,
    /// The queue's interrupt.
    pub irq: QueueIrq,
}

/// How a transport face delivers interrupts. Implementations take no lock: device threads call this per batch of requests.
pub trait Interrupt: Send + Sync {
    /// Tells the driver that queue `index` has used buffers.
    fn queue(&self, index: u16);
    /// Tells the driver that configuration or status changed.
    fn config(&self);
    /// An eventfd by which the host's kernel tells the driver what [`Interrupt::queue`] does, good while the face lives.
    /// Called under the function's lock. `None`: only the face itself can.
    fn queue_fd(&self, _index: u16) -> Option<RawFd> {
        None
    }
}

/// The interrupt of one queue.
#[derive(Clone)]
pub struct QueueIrq {
    face: Arc<dyn Interrupt>,
    index: u16,
}

impl QueueIrq {
    /// The interrupt of queue `index` behind `face`.
    #[must_use]
    pub fn new(face: Arc<dyn Interrupt>, index: u16) -> Self {
        Self { face, index }
    }

    /// Tells the driver that there are used buffers; ask [`Queue::needs_notification`] first.
    pub fn notify(&self) {
        self.face.queue(self.index);
    }

    /// See [`Interrupt::queue_fd`]; good while this value lives.
    #[must_use]
    pub fn fd(&self) -> Option<RawFd> {
        self.face.queue_fd(self.index)
    }
}

/// Device status bits (virtio 1.2, 2.1).
pub mod status {
    /// The guest has found the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The guest has a driver for it.
    pub const DRIVER: u8 = 2;
    /// The driver is set up and ready.
    pub const DRIVER_OK: u8 = 4;
    /// Features are agreed.
    pub const FEATURES_OK: u8 = 8;
    /// The device met something that it can't recover from.
    pub const NEEDS_RESET: u8 = 64;
    /// The driver gave up.
    pub const FAILED: u8 = 128;
}

/// The part of a device's status that device threads and the transport share: the status byte, the configuration
/// generation, and what went wrong last. All but the last is atomics.
pub struct DeviceStatus {
    byte: AtomicU8,
    generation: AtomicU8,
    changed: AtomicBool,
    face: Arc<dyn Interrupt>,
    trouble: Mutex<Option<String>>,
    report: OnceLock<Report>,
}

/// Where a device's trouble is told, and as whose.
struct Report {
    name: String,
    news: Arc<News>,
    times: Tally,
}

impl DeviceStatus {
    /// A device that was just reset, signalling through `face`.
    #[must_use]
    pub fn new(face: Arc<dyn Interrupt>) -> Self {
        Self {
            byte: AtomicU8::new(0),
            generation: AtomicU8::new(0),
            changed: AtomicBool::new(false),
            face,
            trouble: Mutex::new(None),
            report: OnceLock::new(),
        }
    }

    /// From now on the user hears through `news` when the device called `name` breaks down: the first time, the tenth, the
    /// hundredth, since a hostile driver can reset it and break it again. Only the first call counts.
    pub fn report_to(&self, name: &str, news: &Arc<News>) {
        let report = Report { name: name.to_owned(), news: Arc::clone(news), times: Tally::default() };
        // A second call is a mistake without consequences.
        let _ = self.report.set(report);
    }

    /// The status byte as the driver reads it.
    #[must_use]
    pub fn get(&self) -> u8 {
        self.byte.load(Ordering::Acquire)
    }

    /// Sets status bits; bits can only be cleared by [`DeviceStatus::clear`].
    pub(crate) fn set(&self, bits: u8) {
        self.byte.fetch_or(bits, Ordering::AcqRel);
    }

    /// Back to 0, as on reset.
    pub(crate) fn clear(&self) {
        self.byte.store(0, Ordering::Release);
    }

    /// The guest broke the rules beyond repair: sets `DEVICE_NEEDS_RESET` and, if the driver is running, tells it (2.1.2).
    /// The caller stops using the queues. Only the first call after a reset signals.
    pub fn needs_reset(&self, fault: GuestFault) {
        self.fail("its driver broke the rules", fault.as_str().to_owned());
    }

    /// The host failed the device: the guest sees the same as for [`DeviceStatus::needs_reset`].
    pub fn host_failed(&self, why: &io::Error) {
        self.fail("the host failed it", why.to_string());
    }

    fn fail(&self, whose: &str, why: String) {
        // Who sees the bit finds the reason: it is kept from others until it is there.
        let mut trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.byte.fetch_or(status::NEEDS_RESET, Ordering::AcqRel);
        if before & status::NEEDS_RESET != 0 {
            return;
        }
        *trouble = Some(why.clone());
        drop(trouble);
        if let Some((report, times)) = self.report.get().and_then(|r| Some((r, r.times.count()?))) {
            let times = if times == 1 { String::new() } else { format!(", {times} times so far") };
            let line = format!("{}: {whose} ({why}){times}; it stands still until the guest resets it", report.name);
            report.news.say(line);
        }
        if before & status::DRIVER_OK != 0 {
            self.face.config();
        }
    }

    /// What last put the device into `DEVICE_NEEDS_RESET`; taken. For tests; the user hears of it by `report_to`.
    pub fn take_trouble(&self) -> Option<String> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// The device changed its configuration: a new generation, and an interrupt if the driver is running. Call it under
    /// the lock that guards the configuration, so that no driver reads half a change within one generation.
    pub fn config_changed(&self) {
        self.changed.store(true, Ordering::Release);
        if self.get() & status::DRIVER_OK != 0 {
            self.face.config();
        }
    }

    /// The configuration generation, as the driver reads it. It moves only when configuration changed since it was last
    /// read, so that two equal reads around a set of fields mean that the fields belong together (4.1.4.3.1).
    pub(crate) fn generation(&self) -> u8 {
        if self.changed.swap(false, Ordering::AcqRel) {
            self.generation.fetch_add(1, Ordering::AcqRel).wrapping_add(1)
        } else {
            self.generation.load(Ordering::Acquire)
        }
    }
}
