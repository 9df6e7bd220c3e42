// SPDX-License-Identifier: Apache-2.0
//! Interrupt lines for devices that have no messages: pins of the I/O APIC, ours or KVM's, or lines of the paravirtual
//! controller.
//!
//! `MmioHost` asks for them while the machine is built; device threads raise them, vCPU threads release them.

use std::sync::Arc;

use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd, Gpa, Gsi};
use irq::IrqLine;
use kvm::Vm;

use crate::error::{Error, host};
use crate::intx::PciPins;
use crate::ioapic::IoApicHost;
use crate::vioapic::VioapicHost;

/// A pin that somebody has. Devices that share a pin of KVM's share its eventfd, too: KVM delivers what comes through one in
/// turn, so that no edge is lost between two.
struct Shared {
    gsi: Gsi,
    end: End,
    users: u32,
}

/// Where a line ends.
#[derive(Clone)]
enum End {
    /// At a pin of KVM's I/O APIC and PIC, through an irqfd.
    Kvm(Arc<EventFd>),
    /// At a pin of our own.
    Ours(Arc<IoApicHost>),
}

/// Gives out lines.
pub struct Lines {
    vm: Vm,
    ioapic: Option<Arc<IoApicHost>>,
    vioapic: Option<Arc<VioapicHost>>,
    pins: Vec<Shared>,
}

/// A device's hold on a pin: its bit there, or none if it has edges only.
struct Line {
    end: End,
    pin: u8,
    bit: u64,
}

impl IrqLine for Line {
    fn pulse(&self) {
        match &self.end {
            // Only a counter at its limit refuses, and then an edge is pending anyway.
            End::Kvm(irqfd) => drop(irqfd.write(1)),
            End::Ours(ioapic) => ioapic.raise(self.pin, self.bit),
        }
    }

    fn release(&self, still: &dyn Fn() -> bool) {
        if let End::Ours(ioapic) = &self.end {
            ioapic.release(self.pin, self.bit, still);
        }
    }
}

impl Lines {
    /// Lines to the pins of `ioapic`, or of KVM's, and to `vioapic` if there is one.
    #[must_use]
    pub fn new(vm: &Vm, ioapic: Option<Arc<IoApicHost>>, vioapic: Option<Arc<VioapicHost>>) -> Self {
        Self { vm: vm.clone(), ioapic, vioapic, pins: Vec::new() }
    }

    /// Inputs for the pins of PCI functions.
    #[must_use]
    pub fn pci_pins(&self) -> PciPins {
        PciPins::new(&self.vm, self.ioapic.clone())
    }

    /// A line of the paravirtual controller for the device at `at`, if there is a controller with a line left.
    #[must_use]
    pub fn paravirtual(&self, at: Gpa) -> Option<Arc<dyn IrqLine>> {
        self.vioapic.as_ref()?.line(at)
    }

    /// A line to pin `gsi`, which other devices may have, too. Once raised it is asserted until it is released.
    ///
    /// # Errors
    /// [`Error::Host`] when the host is out of descriptors, [`Error::Kvm`] when KVM is out of irqfds.
    pub fn pin(&mut self, gsi: Gsi) -> Result<Arc<dyn IrqLine>, Error> {
        let (end, user) = self.end(gsi)?;
        // There are fewer devices than bits; if there were more, two would share one.
        Ok(Arc::new(Line { end, pin: gsi.0 as u8, bit: 1 << (user % 64) }))
    }

    /// A line to pin `gsi` for a device that has edges only and never releases it.
    ///
    /// # Errors
    /// As [`Lines::pin`].
    pub fn edge(&mut self, gsi: Gsi) -> Result<Arc<dyn IrqLine>, Error> {
        let (end, _) = self.end(gsi)?;
        Ok(Arc::new(Line { end, pin: gsi.0 as u8, bit: 0 }))
    }

    /// Where lines to pin `gsi` end, and how many there were.
    fn end(&mut self, gsi: Gsi) -> Result<(End, u32), Error> {
        if let Some(shared) = self.pins.iter_mut().find(|shared| shared.gsi == gsi) {
            shared.users += 1;
            return Ok((shared.end.clone(), shared.users - 1));
        }
        let end = match &self.ioapic {
            Some(ioapic) => End::Ours(ioapic.clone()),
            None => {
                let irqfd = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(host("make an eventfd"))?;
                self.vm.add_irqfd(&irqfd, gsi)?;
                End::Kvm(Arc::new(irqfd))
            }
        };
        self.pins.push(Shared { gsi, end: end.clone(), users: 1 });
        Ok((end, 0))
    }
}
