// SPDX-License-Identifier: Apache-2.0
//! The interrupt pin of a device that is passed through (PCI Local Bus 3.0, 2.2.6): the host's kernel masks it with each
//! interrupt and says so by an eventfd, and unmasks it when the guest's interrupt controller says that the interrupt ended. A level
//! that is still there is an interrupt again.
//!
//! Called under the function's lock, on the vCPU thread that wrote.

use std::io;
use std::sync::Arc;

use irq::{LevelPin, Resampled};

use crate::layout::{Hardware, Interrupts};

/// The pin, and whether it is connected.
pub struct Intx {
    pin: Arc<dyn LevelPin>,
    on: Option<Box<dyn Resampled>>,
    /// The host could not: it is not asked again until the machine starts anew.
    refused: bool,
}

impl Intx {
    /// At this input of the interrupt controller; off.
    #[must_use]
    pub fn new(pin: Arc<dyn LevelPin>) -> Self {
        Self { pin, on: None, refused: false }
    }

    /// Whether it is on.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.on.is_some()
    }

    /// Whether it can be switched on.
    #[must_use]
    pub const fn is_off(&self) -> bool {
        self.on.is_none() && !self.refused
    }

    /// Switches it on; messages must be off.
    ///
    /// # Errors
    /// The host's; it is off then.
    pub fn switch_on(&mut self, hardware: &dyn Hardware) -> io::Result<()> {
        self.refused = true;
        let connected = self.pin.connect()?;
        hardware.signal(Interrupts::Pin, &[connected.trigger()])?;
        let unmasked = hardware.unmask_on(connected.ended());
        self.on = Some(connected);
        unmasked.inspect_err(|_| drop(self.switch_off(hardware)))?;
        self.refused = false;
        Ok(())
    }

    /// Switches it off.
    ///
    /// # Errors
    /// The host's; the guest hears nothing more all the same.
    pub fn switch_off(&mut self, hardware: &dyn Hardware) -> io::Result<()> {
        let Some(connected) = self.on.take() else { return Ok(()) };
        let done = hardware.signal(Interrupts::Pin, &[]);
        drop(connected);
        done
    }
}
