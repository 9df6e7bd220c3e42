// SPDX-License-Identifier: Apache-2.0
//! Inputs of the interrupt controller for the interrupt pins of PCI functions: four, shared by slot, as on a board.
//!
//! With KVM's own I/O APIC, KVM does all of it: an irqfd with a resample descriptor. With ours a thread for each function that
//! uses its pin asserts the input, and the chip releases it when it hears of the interrupt's end. A function that changes to
//! messages, as nearly all do, gives its thread back.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use base::reactor::Reactor;
use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd, Gsi};
use irq::{LevelPin, Resampled};
use kvm::Vm;

use crate::ioapic::IoApicHost;
use crate::layout::{PCI_PIN_GSI, PCI_PINS};

/// The thread's stack: an eventfd and a lock.
const STACK: usize = 64 << 10;
const TRIGGER: u64 = 0;
const STOP: u64 = 1;

/// Where the inputs are.
#[derive(Clone)]
pub struct PciPins {
    vm: Vm,
    ioapic: Option<Arc<IoApicHost>>,
}

impl PciPins {
    /// At the pins of `ioapic`, or of KVM's.
    #[must_use]
    pub fn new(vm: &Vm, ioapic: Option<Arc<IoApicHost>>) -> Self {
        Self { vm: vm.clone(), ioapic }
    }

    /// The input for the function in `slot`.
    #[must_use]
    pub fn pin(&self, slot: u8) -> Arc<dyn LevelPin> {
        let gsi = Gsi(PCI_PIN_GSI.0 + u32::from(slot) % PCI_PINS);
        Arc::new(Pin { gsi, bit: 1 << (slot % 32), pins: self.clone() })
    }
}

/// An input, and the function's bit there.
struct Pin {
    gsi: Gsi,
    bit: u64,
    pins: PciPins,
}

impl LevelPin for Pin {
    fn connect(&self) -> io::Result<Box<dyn Resampled>> {
        let trigger = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let ended = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let (gsi, vm) = (self.gsi, &self.pins.vm);
        let Some(ioapic) = &self.pins.ioapic else {
            vm.add_resampled_irqfd(&trigger, &ended, gsi).map_err(io::Error::other)?;
            return Ok(Box::new(InKvm { trigger, ended, gsi, vm: vm.clone() }));
        };
        let (pin, bit, ioapic) = (gsi.0 as u8, self.bit, ioapic.clone());
        let stop = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let watch = Watch { trigger: trigger.try_clone()?, stop: stop.try_clone()?, ioapic: ioapic.clone(), pin, bit };
        let mut reactor = Reactor::new()?;
        reactor.add(&watch.trigger, TRIGGER)?;
        reactor.add(&watch.stop, STOP)?;
        let thread = thread::Builder::new().name(format!("intx-{pin}")).stack_size(STACK);
        let thread = thread.spawn(move || watch.run(&mut reactor))?;
        ioapic.resample(pin, bit, ended.try_clone()?);
        Ok(Box::new(Ours { trigger, ended, stop, thread: Some(thread), ioapic, place: (pin, bit) }))
    }
}

/// At KVM's own I/O APIC.
struct InKvm {
    trigger: EventFd,
    ended: EventFd,
    gsi: Gsi,
    vm: Vm,
}

impl Resampled for InKvm {
    fn trigger(&self) -> RawFd {
        self.trigger.as_raw_fd()
    }
    fn ended(&self) -> RawFd {
        self.ended.as_raw_fd()
    }
}

impl Drop for InKvm {
    fn drop(&mut self) {
        // KVM releases the input.
        let _ = self.vm.remove_irqfd(&self.trigger, self.gsi);
    }
}

/// At ours.
struct Ours {
    trigger: EventFd,
    ended: EventFd,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
    ioapic: Arc<IoApicHost>,
    place: (u8, u64),
}

impl Resampled for Ours {
    fn trigger(&self) -> RawFd {
        self.trigger.as_raw_fd()
    }
    fn ended(&self) -> RawFd {
        self.ended.as_raw_fd()
    }
}

impl Drop for Ours {
    fn drop(&mut self) {
        // Only a full counter refuses, and then it is readable.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.ioapic.leave(self.place.0, self.place.1);
    }
}

/// What the thread has.
struct Watch {
    trigger: EventFd,
    stop: EventFd,
    ioapic: Arc<IoApicHost>,
    pin: u8,
    bit: u64,
}

impl Watch {
    fn run(&self, reactor: &mut Reactor) {
        loop {
            let Ok(ready) = reactor.turn(None) else { return };
            let tokens: Vec<_> = ready.map(|ready| ready.token).collect();
            if tokens.contains(&STOP) {
                return;
            }
            if self.trigger.read().is_ok() {
                self.ioapic.raise(self.pin, self.bit);
            }
        }
    }
}
