// SPDX-License-Identifier: Apache-2.0
//! Message interrupts through KVM: each vector is an irqfd whose interrupt number is routed to the guest's message.
//!
//! Routes change on vCPU threads (the guest programs MSI-X), under one lock; sending is one eventfd write and takes none.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, PoisonError};

use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd, Gsi};
use irq::{MsiMessage, MsiSink, MsiVector};
use kvm::{Route, Vm};

use crate::layout::FIRST_MSI_GSI;

/// Pins of the in-kernel IOAPIC, which keep their one-to-one routes.
const IOAPIC_PINS: u32 = 24;

/// The VM's interrupt routes and the numbers given out. Cloning shares them.
#[derive(Clone)]
pub struct KvmMsi {
    shared: Arc<Shared>,
}

struct Shared {
    vm: Vm,
    routes: Mutex<Routes>,
}

struct Routes {
    /// What level-triggered pins of our own I/O APIC send, masked or not: KVM reports the end of interrupts that it has a
    /// route for. `None` if the I/O APIC is KVM's.
    pins: Option<Vec<Option<MsiMessage>>>,
    /// One slot per number given out, from `FIRST_MSI_GSI` on.
    messages: Vec<Option<MsiMessage>>,
    /// Those of them whose vectors are gone: the next ones take them.
    free: Vec<usize>,
}

impl Routes {
    /// The table as KVM wants it.
    fn table(&self) -> Vec<Route> {
        fn add(out: &mut Vec<Route>, first: u32, messages: impl Iterator<Item = Option<MsiMessage>>) {
            let route = |(gsi, m): (u32, Option<MsiMessage>)| {
                m.map(|m| Route::Msi { gsi: Gsi(gsi), address: m.address, data: m.data })
            };
            out.extend((first..).zip(messages).filter_map(route));
        }
        let mut out = Vec::new();
        match &self.pins {
            Some(pins) => add(&mut out, 0, pins.iter().copied()),
            None => out.extend((0..IOAPIC_PINS).map(|n| Route::Pin { gsi: Gsi(n) })),
        }
        add(&mut out, FIRST_MSI_GSI, self.messages.iter().copied());
        out
    }
}

struct Vector {
    gsi: Gsi,
    index: usize,
    irqfd: EventFd,
    /// The irqfd is not KVM's at the moment: what is written to it stays.
    held: Mutex<bool>,
    shared: Arc<Shared>,
}

impl KvmMsi {
    /// The machine whose routes they are.
    #[must_use]
    pub fn vm(&self) -> &Vm {
        &self.shared.vm
    }

    /// Routes for `vm`, pins only so far: those of our own I/O APIC, or KVM's.
    #[must_use]
    pub fn new(vm: Vm, own_pins: Option<u8>) -> Self {
        let pins = own_pins.map(|pins| vec![None; usize::from(pins)]);
        Self {
            shared: Arc::new(Shared {
                vm,
                routes: Mutex::new(Routes { pins, messages: Vec::new(), free: Vec::new() }),
            }),
        }
    }

    /// The level of a pin of our own I/O APIC sends `message` from now on, or the pin has none.
    pub fn watch_pin(&self, pin: u8, message: Option<MsiMessage>) {
        let mut routes = self.shared.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = routes.pins.as_mut().and_then(|pins| pins.get_mut(usize::from(pin))) else { return };
        if *slot != message {
            *slot = message;
            // The table is no longer than the one before it was, or by one that was counted for; the guest can't be told of a
            // failure.
            let _ = self.shared.vm.set_routes(&routes.table());
        }
    }
}

impl MsiSink for KvmMsi {
    fn vectors(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiVector>>> {
        let mut out: Vec<Arc<dyn MsiVector>> = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let index = {
                let mut routes = self.shared.routes.lock().unwrap_or_else(PoisonError::into_inner);
                match routes.free.pop() {
                    // KVM may still know the route of the one before.
                    Some(index) if out.is_empty() => {
                        self.shared.vm.set_routes(&routes.table()).map_err(io::Error::other)?;
                        index
                    }
                    Some(index) => index,
                    None => {
                        routes.messages.push(None);
                        routes.messages.len() - 1
                    }
                }
            };
            let gsi = Gsi(FIRST_MSI_GSI + index as u32);
            let irqfd = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
            self.shared.vm.add_irqfd(&irqfd, gsi).map_err(io::Error::other)?;
            out.push(Arc::new(Vector { gsi, index, irqfd, held: Mutex::new(false), shared: self.shared.clone() }));
        }
        Ok(out)
    }
}

impl MsiVector for Vector {
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        let mut routes = self.shared.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = routes.messages.get_mut(self.index).filter(|slot| **slot != message) else { return Ok(()) };
        *slot = message;
        // The lock is held across the ioctl so that two vCPUs can't install their tables in the wrong order.
        self.shared.vm.set_routes(&routes.table()).map_err(io::Error::other)
    }

    fn notify(&self) {
        // Only a counter at its limit refuses, and then the interrupt is pending anyway.
        let _ = self.irqfd.write(1);
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.irqfd.as_raw_fd())
    }

    fn hold(&self, held: bool) -> io::Result<()> {
        let mut now = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if *now == held {
            return Ok(());
        }
        // The lock is held across the ioctl so that flag and KVM agree.
        if held {
            // What the counter has was sent when it came: only what comes from here on is held.
            let _ = self.irqfd.read();
            self.shared.vm.remove_irqfd(&self.irqfd, self.gsi).map_err(io::Error::other)?;
        } else {
            // KVM looks at the counter first, and sends what was held.
            self.shared.vm.add_irqfd(&self.irqfd, self.gsi).map_err(io::Error::other)?;
        }
        *now = held;
        Ok(())
    }

    fn is_pending(&self) -> bool {
        base::fd::is_readable(&self.irqfd)
    }
}

/// A device that goes gives its interrupts back. KVM lets go of an irqfd that is closed, and its routes are the next change's: a
/// machine that ends pays for neither.
impl Drop for Vector {
    fn drop(&mut self) {
        let mut routes = self.shared.routes.lock().unwrap_or_else(PoisonError::into_inner);
        routes.messages.get_mut(self.index).into_iter().for_each(|message| *message = None);
        routes.free.push(self.index);
    }
}

impl std::fmt::Debug for Vector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "message vector on {}", self.gsi)
    }
}
