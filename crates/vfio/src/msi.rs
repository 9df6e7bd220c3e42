// SPDX-License-Identifier: Apache-2.0
//! MSI of a device that is passed through (PCI Local Bus 3.0, 6.8.1): the guest writes a capability of its own, and the
//! device's interrupts are eventfds that KVM turns into the guest's messages.
//!
//! Called under the function's lock, on the vCPU thread that wrote.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use irq::{MsiMessage, MsiVector};
use pci::ConfigSpace;

use crate::layout::{Hardware, Interrupts};

/// Capability id.
pub const CAPABILITY: u8 = 0x05;
/// Message control: on.
const ENABLE: u16 = 1 << 0;
/// Message control: the address has 64 bits.
const WIDE: u16 = 1 << 7;
/// Message control: there are mask and pending bits.
const MASKS: u16 = 1 << 8;

/// The capability and what of it is switched on.
pub struct Msi {
    at: u16,
    /// What the device can do: message control without what is written there.
    can: u16,
    vectors: Vec<Arc<dyn MsiVector>>,
    /// What the guest asked for last.
    now: Asked,
}

/// What a guest asks for: how many interrupts, their first message, which of them are masked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Asked {
    count: usize,
    message: MsiMessage,
    masked: u32,
}

impl Msi {
    /// How many interrupts a capability with this message control has.
    #[must_use]
    pub const fn count(control: u16) -> u16 {
        let log = control >> 1 & 7;
        1 << if log > 5 { 5 } else { log }
    }

    /// The one at `at`, whose message control is `control`, with its vectors; off.
    #[must_use]
    pub fn new(at: u16, control: u16, vectors: Vec<Arc<dyn MsiVector>>) -> Self {
        Self { at, can: control & (WIDE | MASKS | 0b1110), vectors, now: Asked::default() }
    }

    /// The capability's body and writable bits.
    #[must_use]
    pub fn capability(&self) -> (Vec<u8>, Vec<u8>) {
        let mut body = vec![0; self.len() - 2];
        let mut writable = vec![0; self.len() - 2];
        body[..2].copy_from_slice(&self.can.to_le_bytes());
        writable[0] = 0x71;
        let data = usize::from(self.data_at() - self.at) - 2;
        writable[2..data].fill(0xff);
        writable[2] = 0xfc;
        writable[data..data + 2].fill(0xff);
        if self.can & MASKS != 0 {
            let bits = (1u64 << self.vectors.len()) - 1;
            writable[data + 4..data + 8].copy_from_slice(&(bits as u32).to_le_bytes());
        }
        (body, writable)
    }

    /// Bytes of the capability.
    const fn len(&self) -> usize {
        let address = if self.can & WIDE != 0 { 8 } else { 4 };
        4 + address + if self.can & MASKS != 0 { 12 } else { 2 }
    }

    /// Where the message control word is.
    #[must_use]
    pub const fn control_at(&self) -> u16 {
        self.at + 2
    }

    const fn data_at(&self) -> u16 {
        self.at + if self.can & WIDE != 0 { 12 } else { 8 }
    }

    /// The pending bits and where they are, if the device has them.
    #[must_use]
    pub fn pending(&self) -> Option<(u16, u32)> {
        let bit = |(n, vector): (usize, &Arc<dyn MsiVector>)| {
            u32::from(self.now.masked >> n & 1 == 1 && n < self.now.count && vector.is_pending()) << n
        };
        let bits = || self.vectors.iter().enumerate().map(bit).sum();
        (self.can & MASKS != 0).then(|| (self.data_at() + 8, bits()))
    }

    fn asked(&self, config: &ConfigSpace) -> Asked {
        let control = config.get(self.at + 2, 2) as u16;
        if control & ENABLE == 0 {
            return Asked::default();
        }
        let high = if self.can & WIDE != 0 { config.get(self.at + 8, 4) } else { 0 };
        let address = u64::from(high) << 32 | u64::from(config.get(self.at + 4, 4));
        let data = config.get(self.data_at(), 2);
        let masked = if self.can & MASKS != 0 { config.get(self.data_at() + 4, 4) } else { 0 };
        let count = (1usize << (control >> 4 & 7).min(5)).min(self.vectors.len());
        Asked { count, message: MsiMessage { address, data }, masked }
    }

    /// The guest wrote the capability.
    ///
    /// # Errors
    /// The host's, such as when it is out of interrupt vectors; MSI is off for the device then.
    pub fn follow(&mut self, hardware: &dyn Hardware, config: &ConfigSpace) -> io::Result<()> {
        let asked = self.asked(config);
        if asked == self.now {
            return Ok(());
        }
        let before = std::mem::replace(&mut self.now, asked);
        for (n, vector) in self.vectors.iter().enumerate() {
            if n >= asked.count {
                if n < before.count {
                    vector.route(None)?;
                }
                continue;
            }
            // The device counts its messages up in the low bits of the data.
            let low = asked.count as u32 - 1;
            let data = asked.message.data & !low | n as u32;
            vector.route(Some(MsiMessage { data, ..asked.message }))?;
            vector.hold(asked.masked >> n & 1 == 1)?;
        }
        if asked.count == before.count {
            return Ok(());
        }
        if before.count > 0 {
            hardware.signal(Interrupts::Msi, &[])?;
        }
        if asked.count == 0 {
            return Ok(());
        }
        let fds: Option<Vec<RawFd>> = self.vectors.iter().take(asked.count).map(|vector| vector.fd()).collect();
        let fds = fds.ok_or_else(|| io::Error::other("an interrupt has no eventfd"))?;
        hardware.signal(Interrupts::Msi, &fds).inspect_err(|_| self.now.count = 0)
    }

    /// Back to power-on.
    pub fn reset(&mut self, hardware: &dyn Hardware) {
        if self.now.count > 0 {
            // The device is reset next, or closed.
            let _ = hardware.signal(Interrupts::Msi, &[]);
            self.vectors.iter().take(self.now.count).for_each(|vector| drop(vector.route(None)));
        }
        self.now = Asked::default();
    }
}
