// SPDX-License-Identifier: Apache-2.0
//! The PCI face (virtio 1.2, 4.1): a modern, non-transitional function with one 64-bit BAR that holds the register blocks
//! and the MSI-X table, and one of ports for kicks. No legacy interrupt: a stock driver that has MSI-X asks for nothing else.
//!
//! `machine` puts a [`VirtioPci`] behind a mutex, places its BARs, and binds an ioeventfd to each notify address and port;
//! device threads reach the guest through [`Lines`], without that mutex.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use base::{EventFd, Gpa};
use irq::MsiSink;
use mem::GuestRam;
use pci::msix::{self, Msix, MsixLine};
use pci::{BarKind, BarSpec, ConfigSpace, Effect, Identity, PciDevice, Placement};

use super::core::{Core, Ring};
use crate::device::{DeviceStatus, Interrupt, VirtioDevice};

/// The BAR with everything in it, two numbers wide.
pub const BAR: u8 = 0;
/// The BAR of ports, where queues are kicked too: KVM has to find, read and decode the guest's instruction to know what was
/// written to memory, while the processor itself says what went to a port.
const PORTS: u8 = 2;
/// Ports from one queue's to the next one's.
const PORT_STEP: u16 = 2;
/// The most ports that a BAR may have; a device with more queues does without.
const MOST_PORTS: u16 = 256;
/// Its size in bytes.
pub const BAR_SIZE: u64 = 0x4000;
/// Vendor of all virtio devices.
const VENDOR: u16 = 0x1af4;
/// A modern device's id is this plus the virtio device id.
const DEVICE_BASE: u16 = 0x1040;
/// "No vector" in the vector registers.
const NO_VECTOR: u16 = 0xffff;

/// Blocks inside the BAR.
const COMMON: u64 = 0x0000;
const COMMON_SIZE: u64 = 0x40;
const ISR: u64 = 0x0100;
const ISR_SIZE: u64 = 4;
const DEVICE: u64 = 0x0200;
const DEVICE_SIZE: u64 = 0x0e00;
const NOTIFY: u64 = 0x1000;
const NOTIFY_STEP: u32 = 4;
const TABLE: u64 = 0x2000;
const PENDING: u64 = 0x3000;

/// Structure types of vendor capabilities (4.1.4).
const CAP_VENDOR: u8 = 0x09;
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_PCI: u8 = 5;

/// Interrupts of one function: which queue uses which vector, and the vectors.
struct Lines {
    lines: Arc<[MsixLine]>,
    queues: Box<[AtomicU16]>,
    config: AtomicU16,
    /// The ISR register, for a driver that polls without MSI-X.
    isr: AtomicU8,
}

impl Lines {
    #[inline]
    fn send(&self, vector: &AtomicU16, isr: u8) {
        let sent = self.lines.get(usize::from(vector.load(Ordering::Relaxed))).is_some_and(MsixLine::notify);
        if !sent {
            self.isr.fetch_or(isr, Ordering::AcqRel);
        }
    }

    fn get(&self, queue: Option<u16>) -> u16 {
        match queue {
            Some(index) => self.queues.get(usize::from(index)).map_or(NO_VECTOR, |v| v.load(Ordering::Relaxed)),
            None => self.config.load(Ordering::Relaxed),
        }
    }

    /// A vector that does not exist leaves "no vector", which the driver reads back (4.1.5.1.2).
    fn set(&self, queue: Option<u16>, vector: u16) {
        let vector = if usize::from(vector) < self.lines.len() { vector } else { NO_VECTOR };
        match queue {
            Some(index) => {
                if let Some(slot) = self.queues.get(usize::from(index)) {
                    slot.store(vector, Ordering::Relaxed);
                }
            }
            None => self.config.store(vector, Ordering::Relaxed),
        }
    }

    fn clear(&self) {
        for slot in self.queues.iter().chain([&self.config]) {
            slot.store(NO_VECTOR, Ordering::Relaxed);
        }
        self.isr.store(0, Ordering::Relaxed);
    }
}

impl Interrupt for Lines {
    #[inline]
    fn queue(&self, index: u16) {
        if let Some(vector) = self.queues.get(usize::from(index)) {
            self.send(vector, 1);
        }
    }

    fn config(&self) {
        self.send(&self.config, 2);
    }

    fn queue_fd(&self, index: u16) -> Option<RawFd> {
        self.lines.get(usize::from(self.get(Some(index))))?.lend()
    }
}

/// A virtio device as a PCI function.
pub struct VirtioPci {
    core: Core,
    config: ConfigSpace,
    msix: Msix,
    lines: Arc<Lines>,
    /// Offset of the MSI-X capability.
    msix_at: u16,
    /// Offset of the capability through which configuration space reaches the BAR.
    window_at: u16,
    device_features: u32,
    driver_features: u32,
    queue: u16,
}

impl VirtioPci {
    /// `device` as a function with the vectors that its queues are worth and one for configuration changes.
    ///
    /// # Errors
    /// When the host has no descriptors or interrupts left.
    pub fn new(device: Box<dyn VirtioDevice>, ram: GuestRam, sink: &dyn MsiSink) -> io::Result<Self> {
        let count = device.queue_sizes().len() as u16;
        let msix = Msix::new(sink.vectors(device.queue_vectors().saturating_add(1))?);
        let lines = Arc::new(Lines {
            lines: msix.lines(),
            queues: (0..count).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            config: AtomicU16::new(NO_VECTOR),
            isr: AtomicU8::new(0),
        });
        let core = Core::new(device, ram, Arc::clone(&lines) as Arc<dyn Interrupt>)?;
        let mut config = ConfigSpace::new(identity(core.kind()));
        config.add_bar(BarSpec { bar: BAR, kind: BarKind::Memory64, size: BAR_SIZE, prefetchable: false });
        for (kind, at, len) in
            [(CFG_COMMON, COMMON, COMMON_SIZE), (CFG_ISR, ISR, ISR_SIZE), (CFG_DEVICE, DEVICE, DEVICE_SIZE)]
        {
            config.add_capability(CAP_VENDOR, &vendor_cap(16, kind, BAR, at, len), &[]);
        }
        // A driver takes the first kind that it can use (4.1.4): ports, where the bus gave it some.
        if let Some(ports) = count.checked_mul(PORT_STEP).filter(|ports| *ports <= MOST_PORTS) {
            let size = u64::from(ports.next_power_of_two().max(4));
            config.add_bar(BarSpec { bar: PORTS, kind: BarKind::Io, size, prefetchable: false });
            config.add_capability(CAP_VENDOR, &notify_cap(PORTS, 0, count, PORT_STEP.into()), &[]);
        }
        config.add_capability(CAP_VENDOR, &notify_cap(BAR, NOTIFY, count, NOTIFY_STEP), &[]);
        let mut window = [0; 18];
        window[..14].copy_from_slice(&vendor_cap(20, CFG_PCI, 0, 0, 0));
        // Writable: BAR, offset and length; the data that follows never reaches these bytes.
        let mut writable = [0; 18];
        writable[2] = 0xff;
        writable[6..14].fill(0xff);
        let window_at = config.add_capability(CAP_VENDOR, &window, &writable);
        let (body, mask) = msix.capability(BAR, TABLE as u32, PENDING as u32);
        let msix_at = config.add_capability(msix::CAPABILITY, &body, &mask);
        Ok(Self { core, config, msix, lines, msix_at, window_at, device_features: 0, driver_features: 0, queue: 0 })
    }

    /// Where the driver kicks queue `index`, by the BAR as it is placed now; `None` for a queue that isn't there.
    #[must_use]
    pub fn notify_address(&self, index: u16) -> Option<Gpa> {
        let bar = self.placements().into_iter().find(|p| p.bar == BAR)?;
        let offset = NOTIFY + u64::from(index) * u64::from(NOTIFY_STEP);
        (index < self.core.queue_count()).then_some(Gpa(bar.address.checked_add(offset)?))
    }

    /// The port where the driver kicks queue `index`, by the BAR as it is placed now; `None` where that is no port, or for a
    /// queue that isn't there.
    #[must_use]
    pub fn notify_port(&self, index: u16) -> Option<u16> {
        let bar = self.placements().into_iter().find(|p| p.bar == PORTS)?;
        let first = u16::try_from(bar.address).ok().filter(|first| *first != 0)?;
        (index < self.core.queue_count()).then_some(first.checked_add(index.checked_mul(PORT_STEP)?)?)
    }

    /// Queues to bind an ioeventfd for, each with its eventfd. Inline queues are missing: their kicks have to reach
    /// [`PciDevice::bar_write`].
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
    }

    /// Whether the driver reaches the BAR through configuration space just now, so that reading that has effects.
    #[must_use]
    pub fn window_in_use(&self) -> bool {
        self.window().is_some()
    }

    /// The state machine behind the registers.
    #[must_use]
    pub const fn core(&self) -> &Core {
        &self.core
    }

    /// The dword of the common block at `at`, of which an access may take a part.
    fn common(&self, at: u64) -> u32 {
        let queue = self.core.queue(self.queue);
        let half = |addr: Option<Gpa>, high: bool| addr.map_or(0, |g| (g.0 >> if high { 32 } else { 0 }) as u32);
        let pair = |low: u16, high: u16| u32::from(low) | u32::from(high) << 16;
        match at {
            0x00 => self.device_features,
            0x04 => self.core.offered_word(self.device_features),
            0x08 => self.driver_features,
            0x0c => self.core.accepted_word(self.driver_features),
            0x10 => pair(self.lines.get(None), self.core.queue_count()),
            0x14 => {
                let state = u16::from_le_bytes([self.core.status(), self.core.generation()]);
                pair(state, self.queue)
            }
            0x18 => pair(queue.map_or(0, |q| q.size), self.lines.get(Some(self.queue))),
            0x1c => pair(queue.map_or(0, |q| q.enabled.into()), if queue.is_some() { self.queue } else { 0 }),
            0x20 | 0x24 => half(queue.map(|q| q.desc), at == 0x24),
            0x28 | 0x2c => half(queue.map(|q| q.avail), at == 0x2c),
            0x30 | 0x34 => half(queue.map(|q| q.used), at == 0x34),
            _ => 0,
        }
    }

    /// A driver writes fields whole (4.1.3.1); anything else is ignored.
    fn write_common(&mut self, at: u64, data: &[u8]) {
        match *data {
            [byte] if at == 0x14 => {
                self.core.set_status(byte);
                if byte == 0 {
                    self.clear();
                }
            }
            [a, b] => {
                let value = u16::from_le_bytes([a, b]);
                match at {
                    0x10 => self.lines.set(None, value),
                    0x16 => self.queue = value,
                    0x18 => self.core.set_queue_size(self.queue, value),
                    0x1a => self.lines.set(Some(self.queue), value),
                    0x1c if value == 1 => self.core.enable_queue(self.queue),
                    _ => {}
                }
            }
            [a, b, c, d] => {
                let value = u32::from_le_bytes([a, b, c, d]);
                match at {
                    0x00 => self.device_features = value,
                    0x08 => self.driver_features = value,
                    0x0c => self.core.accept(self.driver_features, value),
                    0x20 | 0x24 => self.core.set_ring(self.queue, Ring::Desc, at == 0x24, value),
                    0x28 | 0x2c => self.core.set_ring(self.queue, Ring::Avail, at == 0x2c, value),
                    0x30 | 0x34 => self.core.set_ring(self.queue, Ring::Used, at == 0x34, value),
                    _ => {}
                }
            }
            [..] if data.len() == 8 => {
                let (low, high) = data.split_at(4);
                self.write_common(at, low);
                self.write_common(at + 4, high);
            }
            _ => {}
        }
    }

    /// What a device reset means for this face.
    fn clear(&mut self) {
        self.lines.clear();
        (self.device_features, self.driver_features, self.queue) = (0, 0, 0);
    }

    /// An access through the capability of type 5 (4.1.4.9): the place in the BAR that it points at now.
    fn window(&self) -> Option<(u64, usize)> {
        let bar = self.config.get(self.window_at + 4, 1);
        let (offset, len) = (self.config.get(self.window_at + 8, 4), self.config.get(self.window_at + 12, 4));
        let aligned = matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len);
        (bar == u32::from(BAR) && aligned).then_some((u64::from(offset), len as usize))
    }

    fn window_data(&self) -> std::ops::Range<u16> {
        self.window_at + 16..self.window_at + 20
    }
}

fn identity(kind: u16) -> Identity {
    let class = match kind {
        1 => 0x02_00_00,
        2 => 0x01_80_00,
        3 => 0x07_80_00,
        _ => 0xff_00_00,
    };
    // A modern device's subsystem id is 0x40 or more, which keeps legacy drivers away (4.1.2.1).
    Identity {
        vendor: VENDOR,
        device: DEVICE_BASE + kind,
        revision: 1,
        class,
        subsystem_vendor: VENDOR,
        subsystem: 0x40 + kind,
    }
}

/// `struct virtio_pci_notify_cap` past its id and next pointer: a place for each of `count` queues, `step` apart.
fn notify_cap(bar: u8, offset: u64, count: u16, step: u32) -> [u8; 18] {
    let mut cap = [0; 18];
    cap[..14].copy_from_slice(&vendor_cap(20, CFG_NOTIFY, bar, offset, u64::from(count) * u64::from(step)));
    cap[14..].copy_from_slice(&step.to_le_bytes());
    cap
}

/// `struct virtio_pci_cap` past its id and next pointer.
fn vendor_cap(len: u8, kind: u8, bar: u8, offset: u64, size: u64) -> [u8; 14] {
    let mut cap = [0; 14];
    cap[0] = len;
    cap[1] = kind;
    cap[2] = bar;
    cap[6..10].copy_from_slice(&(offset as u32).to_le_bytes());
    cap[10..].copy_from_slice(&(size as u32).to_le_bytes());
    cap
}

impl PciDevice for VirtioPci {
    /// The window capability's data is a part of the BAR.
    fn reads_have_effects(&self) -> bool {
        self.window_in_use()
    }

    fn config_read(&mut self, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
        let Some((at, len)) = self.window().filter(|_| self.window_data().contains(&offset)) else { return };
        let mut bytes = [0; 4];
        self.bar_read(BAR, at, bytes.get_mut(..len).unwrap_or_default());
        for (out, byte) in data.iter_mut().zip(bytes.iter().skip(usize::from(offset - self.window_at - 16))) {
            *out = *byte;
        }
    }

    fn config_write(&mut self, offset: u16, data: &[u8]) -> Effect {
        if offset == self.window_data().start {
            if let Some((at, len)) = self.window()
                && let Some(data) = data.get(..len)
            {
                self.bar_write(BAR, at, data);
            }
            return Effect::None;
        }
        let effect = self.config.write(offset, data);
        if offset < self.msix_at + 4 && usize::from(offset) + data.len() > usize::from(self.msix_at) {
            self.msix.set_control(self.config.get(self.msix_at + 2, 2) as u16);
        }
        effect
    }

    fn placements(&self) -> Vec<Placement> {
        self.config.placements()
    }

    fn place(&mut self, bar: u8, address: u64) {
        self.config.place(bar, address);
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if bar != BAR {
            return;
        }
        match offset {
            COMMON..COMMON_END => {
                for (byte, at) in data.iter_mut().zip(offset..) {
                    let word = self.common(at & !3).to_le_bytes();
                    *byte = word.get((at & 3) as usize).copied().unwrap_or_default();
                }
            }
            ISR => {
                if let Some(first) = data.first_mut() {
                    *first = self.lines.isr.swap(0, Ordering::AcqRel);
                }
            }
            DEVICE..DEVICE_END => self.core.read_config(offset - DEVICE, data),
            TABLE..PENDING => self.msix.read_table(offset - TABLE, data),
            PENDING..BAR_SIZE => self.msix.read_pending(offset - PENDING, data),
            _ => {}
        }
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        if bar == PORTS {
            if offset.is_multiple_of(PORT_STEP.into()) {
                self.core.kick((offset / u64::from(PORT_STEP)) as u16);
            }
            return;
        }
        if bar != BAR {
            return;
        }
        match offset {
            COMMON..COMMON_END => self.write_common(offset, data),
            DEVICE..DEVICE_END => self.core.write_config(offset - DEVICE, data),
            NOTIFY..TABLE if offset.is_multiple_of(u64::from(NOTIFY_STEP)) => {
                self.core.kick(((offset - NOTIFY) / u64::from(NOTIFY_STEP)) as u16);
            }
            TABLE..PENDING => self.msix.write_table(offset - TABLE, data),
            _ => {}
        }
    }

    fn reset(&mut self) {
        self.core.reset();
        self.clear();
        self.config.reset();
        self.msix.reset();
    }
}

const COMMON_END: u64 = COMMON + COMMON_SIZE;
const DEVICE_END: u64 = DEVICE + DEVICE_SIZE;
