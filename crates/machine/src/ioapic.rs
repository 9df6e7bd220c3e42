// SPDX-License-Identifier: Apache-2.0
//! Our own I/O APIC in its machine: its registers for vCPU threads, its levels for device threads, its routes for KVM.
//!
//! A pin that the guest programmed for edges needs none of this when it fires: its irqfd is routed to the message, and its
//! devices write the eventfd. A level goes through the chip's lock, since whether to send depends on the interrupt before.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use irq::{IoApic, MsiMessage};

use crate::msi::{KvmMsi, PinRoute};

/// What devices and the chip say to each other about a pin. Both sides write theirs first and then read the other's, in
/// one total order, so that an event while the guest changes the trigger mode is seen by one of them.
#[derive(Default)]
struct Pin {
    /// A bit for each device on the line that asserts it.
    asserted: AtomicU64,
    /// The guest wants the level.
    level: AtomicBool,
}

/// The chip, its pins and where its messages go.
pub struct IoApicHost {
    chip: Mutex<IoApic>,
    pins: Vec<Pin>,
    routes: KvmMsi,
}

impl IoApicHost {
    /// A chip of `pins` pins whose messages go to `routes`.
    #[must_use]
    pub fn new(pins: u8, routes: &KvmMsi) -> Self {
        let chip = IoApic::new(pins);
        let pins = (0..chip.pins()).map(|_| Pin::default()).collect();
        Self { chip: Mutex::new(chip), pins, routes: routes.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, IoApic> {
        self.chip.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers a read at `offset` of the page.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        self.lock().read(offset, data);
    }

    /// Answers a write at `offset` of the page.
    pub fn write(&self, offset: u64, data: &[u8]) {
        // The lock spans the route so that two vCPUs can't install theirs in the wrong order.
        let mut chip = self.lock();
        let written = chip.write(offset, data);
        let Some((number, pin)) = written.pin.and_then(|n| Some((n, self.pins.get(usize::from(n))?))) else { return };
        let level = chip.is_level(number);
        let route = PinRoute { message: chip.message(number), watched: chip.level_message(number) };
        self.routes.route_pin(number, route);
        pin.level.store(level, Ordering::SeqCst);
        // A level that was sent by the write itself asserts still; one that came as an edge before is found here.
        let asserted = level && pin.asserted.load(Ordering::SeqCst) != 0;
        let found = chip.set_line(number, asserted);
        if let Some(message) = written.send.or(found) {
            self.send(&mut chip, number, message);
        }
    }

    /// A local APIC ended the interrupt of `vector`: lines that are still asserted are sent again.
    pub fn end(&self, vector: u8) {
        let mut chip = self.lock();
        let waiting: Vec<u8> = chip.waiting(vector).collect();
        for number in waiting {
            let asserted = self.pins.get(usize::from(number)).is_some_and(|p| p.asserted.load(Ordering::SeqCst) != 0);
            // It waits: nothing is sent yet.
            let _ = chip.set_line(number, asserted);
        }
        let mut again = Vec::new();
        chip.end(vector, |number, send| again.extend(send.map(|message| (number, message))));
        for (number, message) in again {
            self.send(&mut chip, number, message);
        }
    }

    /// The device behind `bit` asserts pin `number`. `false` where the guest wants edges: then the caller signals one.
    pub fn raise(&self, number: u8, bit: u64) -> bool {
        let Some(pin) = self.pins.get(usize::from(number)) else { return false };
        pin.asserted.fetch_or(bit, Ordering::SeqCst);
        let level = pin.level.load(Ordering::SeqCst);
        if level {
            self.follow(number, pin);
        }
        level
    }

    /// The device behind `bit` no longer asserts pin `number`, unless `still` sees that it does.
    pub fn release(&self, number: u8, bit: u64, still: &dyn Fn() -> bool) {
        let Some(pin) = self.pins.get(usize::from(number)) else { return };
        pin.asserted.fetch_and(!bit, Ordering::SeqCst);
        if still() {
            pin.asserted.fetch_or(bit, Ordering::SeqCst);
        }
        if pin.level.load(Ordering::SeqCst) {
            self.follow(number, pin);
        }
    }

    /// Tells the chip what its line is now.
    fn follow(&self, number: u8, pin: &Pin) {
        let mut chip = self.lock();
        // Under the lock: the last to take it tells the newest.
        let asserted = pin.asserted.load(Ordering::SeqCst) != 0;
        if !chip.is_level(number) {
            return;
        }
        if let Some(message) = chip.set_line(number, asserted) {
            self.send(&mut chip, number, message);
        }
    }

    fn send(&self, chip: &mut IoApic, number: u8, message: MsiMessage) {
        if !self.routes.vm().signal_msi(message.address, message.data).unwrap_or(false) {
            chip.refused(number);
        }
    }
}
