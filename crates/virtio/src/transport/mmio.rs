// SPDX-License-Identifier: Apache-2.0
//! The MMIO face (virtio 1.2, 4.2): a page of 32-bit registers with the device's configuration behind them, and one
//! interrupt line for everything. No shared memory regions, no queue reset: what is not offered reads as the standard says.
//!
//! `machine` puts a [`VirtioMmio`] behind a mutex, gives it its page and its line, and binds an ioeventfd for each queue to
//! the one notify register; device threads reach the guest through [`Line`], without that mutex.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use base::EventFd;
use irq::IrqLine;
use mem::GuestRam;

use super::core::{Core, Ring};
use crate::device::{DeviceStatus, Interrupt, VirtioDevice};

/// Bytes of registers and configuration.
pub const SIZE: u64 = 0x1000;
/// Offset of the register that a driver writes a queue's index to, 32 bits, to kick it.
pub const NOTIFY: u64 = 0x050;

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// Not a legacy device.
const VERSION: u32 = 2;
/// The vendor that virtio's PCI devices name, too.
const VENDOR: u32 = 0x1af4;
/// What is read of a shared memory region that is not there.
const NO_REGION: u32 = u32::MAX;
/// Where the device's configuration starts.
const CONFIG: u64 = 0x100;

/// The configuration's generation.
const GENERATION: u64 = 0x0fc;
/// What is shown of it while configuration changes: no generation, those have a byte.
const BETWEEN: u32 = 1 << 31;

/// Interrupt status: a queue has used buffers.
const USED: u32 = 1;
/// Interrupt status: configuration or status changed.
const CHANGED: u32 = 2;

/// Where [`Shown`] has the interrupt status.
const STATUS_WORD: usize = 0x060 / 4;
/// Bytes of configuration that are shown; no device has more.
const SHOWN_CONFIG: u64 = 0x100;
/// Words that are shown.
const SHOWN_WORDS: usize = ((CONFIG + SHOWN_CONFIG) / 4) as usize;

/// The page of registers in memory, as a guest may read it.
#[repr(C)]
#[derive(Debug)]
pub struct Shown([AtomicU32; SHOWN_WORDS]);

impl Default for Shown {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

/// Where [`Shown`] is, and whether the guest reads it there instead of leaving for each register.
pub trait Showing: Send + Sync {
    /// The page.
    fn page(&self) -> &Shown;

    /// What the page holds may be old from now on: the guest leaves for each read until [`Showing::publish`] has it back.
    /// Called from any thread.
    fn withdraw(&self) {}

    /// How often it was withdrawn.
    fn withdrawals(&self) -> u64 {
        0
    }

    /// The page holds what the guest may read, unless it was withdrawn more often than `withdrawals`.
    fn publish(&self, _withdrawals: u64) {}
}

/// A page that no guest reads.
#[derive(Debug, Default)]
pub struct Hidden(Shown);

impl Showing for Hidden {
    fn page(&self) -> &Shown {
        &self.0
    }
}

/// The interrupt of one device: why, which stands in the page, and the line.
struct Line {
    shown: Arc<dyn Showing>,
    line: Arc<dyn IrqLine>,
}

impl Line {
    fn status(&self) -> &AtomicU32 {
        &self.shown.page().0[STATUS_WORD]
    }

    /// An edge for each event, also where an earlier one was not acknowledged yet: a guest may have masked that one away.
    #[inline]
    fn send(&self, why: u32) {
        self.status().fetch_or(why, Ordering::AcqRel);
        self.line.pulse();
    }

    /// The driver has seen `why`.
    fn acknowledge(&self, why: u32) {
        if self.status().fetch_and(!why, Ordering::AcqRel) & !why == 0 {
            self.line.release(&|| self.status().load(Ordering::Acquire) != 0);
        }
    }
}

impl Interrupt for Line {
    #[inline]
    fn queue(&self, _index: u16) {
        self.send(USED);
    }

    fn config(&self) {
        // The device's own thread can't show what changed: it has no way to the registers' lock.
        self.shown.withdraw();
        self.send(CHANGED);
    }
}

/// A virtio device as a page of registers.
pub struct VirtioMmio {
    core: Core,
    line: Arc<Line>,
    device_features: u32,
    driver_features: u32,
    queue: u16,
}

impl VirtioMmio {
    /// `device` with `line` as its interrupt.
    ///
    /// # Errors
    /// When the host has no descriptors left.
    pub fn new(device: Box<dyn VirtioDevice>, ram: GuestRam, line: Arc<dyn IrqLine>) -> io::Result<Self> {
        Self::shown(device, ram, line, Arc::new(Hidden::default()))
    }

    /// [`VirtioMmio::new`] whose registers are shown in a page, too.
    ///
    /// # Errors
    /// As there.
    pub fn shown(
        device: Box<dyn VirtioDevice>,
        ram: GuestRam,
        line: Arc<dyn IrqLine>,
        shown: Arc<dyn Showing>,
    ) -> io::Result<Self> {
        let line = Arc::new(Line { shown, line });
        let core = Core::new(device, ram, Arc::clone(&line) as Arc<dyn Interrupt>)?;
        let new = Self { core, line, device_features: 0, driver_features: 0, queue: 0 };
        new.show();
        Ok(new)
    }

    /// Brings the page up to date. A driver that reads configuration from it while it changes sees a generation that is
    /// neither the one before nor the one after, and reads again (2.5.1).
    fn show(&self) {
        let withdrawals = self.line.shown.withdrawals();
        let Shown(words) = self.line.shown.page();
        let put = |offset: u64, value: u32| {
            if let Some(word) = words.get((offset / 4) as usize)
                && word.load(Ordering::Relaxed) != value
            {
                word.store(value, Ordering::SeqCst);
            }
        };
        let configuration = |offset: u64| {
            let mut word = [0; 4];
            self.core.read_config(offset, &mut word);
            u32::from_le_bytes(word)
        };
        let old = |offset: u64| words.get((offset / 4) as usize).map_or(0, |word| word.load(Ordering::Relaxed));
        let changes = |offset: &u64| old(CONFIG + offset) != configuration(*offset);
        if (0..SHOWN_CONFIG).step_by(4).any(|offset| changes(&offset)) {
            put(GENERATION, BETWEEN);
            (0..SHOWN_CONFIG).step_by(4).for_each(|offset| put(CONFIG + offset, configuration(offset)));
        }
        // The interrupt status lives there.
        let registers = (0..CONFIG).step_by(4).filter(|offset| *offset != 4 * STATUS_WORD as u64);
        registers.for_each(|offset| put(offset, self.register(offset)));
        self.line.shown.publish(withdrawals);
    }

    /// Queues to bind an ioeventfd for at [`NOTIFY`], each with its eventfd. Inline queues are missing: their kicks have to
    /// reach [`VirtioMmio::write`].
    pub fn kicks(&self) -> impl Iterator<Item = (u16, &EventFd)> {
        self.core.kicks()
    }

    /// What the device's threads share with the transport.
    #[must_use]
    pub const fn status(&self) -> &Arc<DeviceStatus> {
        self.core.shared_status()
    }

    /// The device may have changed its configuration; see [`VirtioDevice::update_config`].
    pub fn update_config(&mut self) {
        self.core.update_config();
        self.show();
    }

    /// The state machine behind the registers.
    #[must_use]
    pub const fn core(&self) -> &Core {
        &self.core
    }

    /// Reads the page. A driver reads registers whole (4.2.2.2); anything else reads as zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match offset {
            CONFIG..SIZE => self.core.read_config(offset - CONFIG, data),
            0..CONFIG if data.len() == 4 => data.copy_from_slice(&self.register(offset).to_le_bytes()),
            _ => {}
        }
    }

    fn register(&self, offset: u64) -> u32 {
        match offset {
            0x000 => MAGIC,
            0x004 => VERSION,
            0x008 => self.core.kind().into(),
            0x00c => VENDOR,
            0x010 => self.core.offered_word(self.device_features),
            0x034 => self.core.queue(self.queue).map_or(0, |queue| queue.max_size.into()),
            0x044 => self.core.queue(self.queue).map_or(0, |queue| queue.enabled.into()),
            0x060 => self.line.status().load(Ordering::Acquire),
            0x070 => self.core.status().into(),
            0x0b0 | 0x0b4 | 0x0b8 | 0x0bc => NO_REGION,
            GENERATION => self.core.generation().into(),
            _ => 0,
        }
    }

    /// Writes the page. A driver writes registers whole (4.2.2.2); anything else is ignored.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (CONFIG..SIZE, _) => self.core.write_config(offset - CONFIG, data),
            (0..CONFIG, &[a, b, c, d]) => self.set_register(offset, u32::from_le_bytes([a, b, c, d])),
            _ => return,
        }
        // Kicks and acknowledgements, which are all there is while a driver runs, change nothing else.
        if !matches!(offset, NOTIFY | 0x064) {
            self.show();
        }
    }

    fn set_register(&mut self, offset: u64, value: u32) {
        match offset {
            0x014 => self.device_features = value,
            0x020 => self.core.accept(self.driver_features, value),
            0x024 => self.driver_features = value,
            // No device has a queue of the last number.
            0x030 => self.queue = u16::try_from(value).unwrap_or(u16::MAX),
            // 0 is refused as every size is that does not fit.
            0x038 => self.core.set_queue_size(self.queue, u16::try_from(value).unwrap_or(0)),
            0x044 if value == 0 => self.core.disable_queue(self.queue),
            0x044 if value == 1 => self.core.enable_queue(self.queue),
            NOTIFY => {
                if let Ok(index) = u16::try_from(value) {
                    self.core.kick(index);
                }
            }
            0x064 => self.line.acknowledge(value),
            0x070 if value == 0 => self.reset(),
            // Bits past the byte mean nothing, and no reset.
            0x070 if value & 0xff != 0 => self.core.set_status(value as u8),
            0x080 | 0x084 => self.core.set_ring(self.queue, Ring::Desc, offset == 0x084, value),
            0x090 | 0x094 => self.core.set_ring(self.queue, Ring::Avail, offset == 0x094, value),
            0x0a0 | 0x0a4 => self.core.set_ring(self.queue, Ring::Used, offset == 0x0a4, value),
            _ => {}
        }
    }

    /// Back to the state after power-on, which is what a driver's reset does, too.
    pub fn reset(&mut self) {
        self.core.reset();
        self.line.acknowledge(u32::MAX);
        (self.device_features, self.driver_features, self.queue) = (0, 0, 0);
        self.show();
    }
}
