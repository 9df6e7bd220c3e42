// SPDX-License-Identifier: Apache-2.0
//! Interrupt lines for devices that have no messages: pins of the I/O APIC, ours or KVM's.
//!
//! `MmioHost` asks for them while the machine is built; device threads raise them, vCPU threads release them.

use std::sync::Arc;

use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd, Gsi};
use irq::IrqLine;
use kvm::Vm;

use crate::error::{Error, host};
use crate::ioapic::IoApicHost;

/// One pin's irqfd. Devices that share the pin share the eventfd, too: KVM delivers what comes through one in turn, so that
/// no edge is lost between two.
struct Shared {
    gsi: Gsi,
    irqfd: Arc<EventFd>,
    users: u32,
}

/// Gives out lines.
pub struct Lines {
    vm: Vm,
    ioapic: Option<Arc<IoApicHost>>,
    pins: Vec<Shared>,
}

/// A device's hold on a pin.
struct Line {
    irqfd: Arc<EventFd>,
    /// Our own I/O APIC, the pin and this device's bit on it.
    level: Option<(Arc<IoApicHost>, u8, u64)>,
}

impl IrqLine for Line {
    fn pulse(&self) {
        if let Some((ioapic, pin, bit)) = &self.level
            && ioapic.raise(*pin, *bit)
        {
            return;
        }
        // Only a counter at its limit refuses, and then an edge is pending anyway.
        let _ = self.irqfd.write(1);
    }

    fn release(&self, still: &dyn Fn() -> bool) {
        if let Some((ioapic, pin, bit)) = &self.level {
            ioapic.release(*pin, *bit, still);
        }
    }
}

impl Lines {
    /// Lines to the pins of `ioapic`, or of KVM's.
    #[must_use]
    pub fn new(vm: &Vm, ioapic: Option<Arc<IoApicHost>>) -> Self {
        Self { vm: vm.clone(), ioapic, pins: Vec::new() }
    }

    /// A line to pin `gsi`, which other devices may have, too.
    ///
    /// # Errors
    /// [`Error::Host`] when the host is out of descriptors, [`Error::Kvm`] when KVM is out of irqfds.
    pub fn pin(&mut self, gsi: Gsi) -> Result<Arc<dyn IrqLine>, Error> {
        let shared = match self.pins.iter_mut().position(|shared| shared.gsi == gsi) {
            Some(at) => self.pins.get_mut(at),
            None => {
                let irqfd = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(host("make an eventfd"))?;
                self.vm.add_irqfd(&irqfd, gsi)?;
                self.pins.push(Shared { gsi, irqfd: Arc::new(irqfd), users: 0 });
                self.pins.last_mut()
            }
        };
        let shared = shared.ok_or_else(|| Error::TooMuch(format!("no interrupt {gsi}")))?;
        // There are fewer devices than bits; if there were more, two would share one.
        let bit = 1 << (shared.users % 64);
        shared.users += 1;
        let level = self.ioapic.clone().map(|ioapic| (ioapic, gsi.0 as u8, bit));
        Ok(Arc::new(Line { irqfd: shared.irqfd.clone(), level }))
    }
}
