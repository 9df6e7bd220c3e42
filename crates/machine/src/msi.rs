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

/// The VM's interrupt routes and the numbers given out.
pub struct KvmMsi {
    shared: Arc<Shared>,
}

struct Shared {
    vm: Vm,
    /// One slot per number given out, from `FIRST_MSI_GSI` on.
    messages: Mutex<Vec<Option<MsiMessage>>>,
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
    /// Routes for `vm`, pins only so far.
    #[must_use]
    pub fn new(vm: Vm) -> Self {
        Self { shared: Arc::new(Shared { vm, messages: Mutex::new(Vec::new()) }) }
    }
}

impl MsiSink for KvmMsi {
    fn vectors(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiVector>>> {
        let mut out: Vec<Arc<dyn MsiVector>> = Vec::with_capacity(usize::from(count));
        for _ in 0..count {
            let index = {
                let mut messages = self.shared.messages.lock().unwrap_or_else(PoisonError::into_inner);
                messages.push(None);
                messages.len() - 1
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
        let mut messages = self.shared.messages.lock().unwrap_or_else(PoisonError::into_inner);
        if messages[self.index] == message {
            return Ok(());
        }
        messages[self.index] = message;
        let pins = (0..IOAPIC_PINS).map(|n| Route::Pin { gsi: Gsi(n) });
        let sent = messages.iter().enumerate().filter_map(|(i, m)| {
            m.map(|m| Route::Msi { gsi: Gsi(FIRST_MSI_GSI + i as u32), address: m.address, data: m.data })
        });
        let routes: Vec<Route> = pins.chain(sent).collect();
        // The lock is held across the ioctl so that two vCPUs can't install their tables in the wrong order.
        self.shared.vm.set_routes(&routes).map_err(io::Error::other)
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

impl std::fmt::Debug for Vector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "message vector on {}", self.gsi)
    }
}
