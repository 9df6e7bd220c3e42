// SPDX-License-Identifier: Apache-2.0
//! Our own I/O APIC in its machine: its registers for vCPU threads, its lines for device threads, its routes for KVM.
//!
//! What a pin sends goes straight to KVM as a message, under the chip's lock: a guest masks and unmasks pins in every
//! interrupt of some drivers, and a routing table that changed with each mask would cost a grace period of the host's kernel.
//! KVM knows routes for level-triggered pins alone, which tell it whose interrupt's end it has to report.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use base::EventFd;
use irq::{IoApic, MsiMessage};

use crate::msi::KvmMsi;

/// How long a vCPU waits that only ends a level's interrupts: the guest is slower, the host has nothing to do.
const STORM_PAUSE: Duration = Duration::from_millis(10);

/// The chip and who asserts its pins.
struct Chip {
    registers: IoApic,
    /// For each pin a bit for each device that asserts it.
    asserted: Vec<u64>,
    /// Devices that are released by the end of an interrupt and look again then: pin, bit, what tells them.
    resampled: Vec<(u8, u64, EventFd)>,
}

/// The chip and where its messages go.
pub struct IoApicHost {
    chip: Mutex<Chip>,
    routes: KvmMsi,
}

impl IoApicHost {
    /// A chip of `pins` pins whose messages go to `routes`.
    #[must_use]
    pub fn new(pins: u8, routes: &KvmMsi) -> Self {
        let registers = IoApic::new(pins);
        let asserted = vec![0; usize::from(registers.pins())];
        Self { chip: Mutex::new(Chip { registers, asserted, resampled: Vec::new() }), routes: routes.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Chip> {
        self.chip.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a read at `offset` of the page.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        self.lock().registers.read(offset, data);
    }

    /// Answers a write at `offset` of the page.
    pub fn write(&self, offset: u64, data: &[u8]) {
        // The lock spans the route so that two vCPUs can't install theirs in the wrong order.
        let mut chip = self.lock();
        let written = chip.registers.write(offset, data);
        let Some(pin) = written.pin else { return };
        self.routes.watch_pin(pin, chip.registers.level_message(pin));
        if let Some(message) = written.send {
            self.send(&mut chip, pin, message);
        }
    }

    /// A local APIC ended the interrupt of `vector`: lines that are still asserted are sent again. Gives how long its vCPU has to
    /// wait before it goes on, if nobody has done anything about such a line for thousands of interrupts.
    #[must_use]
    pub fn end(&self, vector: u8) -> Option<Duration> {
        let mut guard = self.lock();
        let chip = &mut *guard;
        // Those that look again go first: what of them is still there comes back as a new interrupt.
        let pins: Vec<u8> = chip.registers.waiting(vector).collect();
        let Chip { registers, asserted, resampled } = chip;
        for (pin, bit, ended) in resampled.iter().filter(|(pin, ..)| pins.contains(pin)) {
            release(registers, asserted, *pin, *bit);
            // Only a full counter refuses, and then it is readable.
            let _ = ended.write(1);
        }
        let mut again = Vec::new();
        let storm = chip.registers.end(vector, |pin, send| again.extend(send.map(|message| (pin, message))));
        for (pin, message) in again {
            self.send(chip, pin, message);
        }
        storm.then_some(STORM_PAUSE)
    }

    /// The device behind `bit` of `pin` is released by the end of each interrupt from now on, and told by `ended`.
    pub fn resample(&self, pin: u8, bit: u64, ended: EventFd) {
        self.lock().resampled.push((pin, bit, ended));
    }

    /// The device behind `bit` is gone from `pin`.
    pub fn leave(&self, pin: u8, bit: u64) {
        let mut chip = self.lock();
        chip.resampled.retain(|(other, of, _)| (*other, *of) != (pin, bit));
        let Chip { registers, asserted, .. } = &mut *chip;
        release(registers, asserted, pin, bit);
    }

    /// Something happened at a device on `pin`: an edge, and from now on the device behind `bit` asserts it. Without a bit it
    /// is an edge and nothing more.
    pub fn raise(&self, pin: u8, bit: u64) {
        let mut chip = self.lock();
        let Some(asserted) = chip.asserted.get_mut(usize::from(pin)) else { return };
        *asserted |= bit;
        let stays = *asserted != 0;
        // Each event is an edge, also of a line that others assert.
        if !chip.registers.is_level(pin) {
            let _ = chip.registers.set_line(pin, false);
        }
        if let Some(message) = chip.registers.set_line(pin, true) {
            self.send(&mut chip, pin, message);
        }
        if !stays {
            let _ = chip.registers.set_line(pin, false);
        }
    }

    /// The device behind `bit` no longer asserts `pin`, unless `still` sees that it does.
    pub fn release(&self, pin: u8, bit: u64, still: &dyn Fn() -> bool) {
        let mut chip = self.lock();
        let Chip { registers, asserted, .. } = &mut *chip;
        if !still() {
            release(registers, asserted, pin, bit);
        }
        // Else who made it so has raised it, or is about to.
    }

    fn send(&self, chip: &mut Chip, pin: u8, message: MsiMessage) {
        if !self.routes.vm().signal_msi(message.address, message.data).unwrap_or(false) {
            chip.registers.refused(pin);
        }
    }
}

/// The device behind `bit` asserts `pin` no longer.
fn release(registers: &mut IoApic, asserted: &mut [u64], pin: u8, bit: u64) {
    let Some(asserted) = asserted.get_mut(usize::from(pin)) else { return };
    *asserted &= !bit;
    if *asserted == 0 {
        // A line that goes down sends nothing.
        let _ = registers.set_line(pin, false);
    }
}
