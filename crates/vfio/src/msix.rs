// SPDX-License-Identifier: Apache-2.0
//! MSI-X of a device that is passed through: the guest has a table of its own (`pci::msix`), and the device's interrupts are
//! eventfds that KVM turns into the guest's messages. The device's own table is the host's.
//!
//! Called under the function's lock, on the vCPU thread that wrote.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use pci::msix::{ENTRY_SIZE, Msix};

use crate::layout::{Hardware, Interrupts};

/// Table, pending bits and what of them is switched on.
pub struct Table {
    /// As the guest sees it.
    pub msix: Msix,
    /// Where the capability is.
    at: u16,
    bar: u8,
    table: Range<u64>,
    pending: Range<u64>,
    entries: usize,
    /// Interrupts that the host has given the device; 0 while MSI-X is off.
    on: usize,
}

/// What the device's own capability says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    /// Entries of the table.
    pub entries: u16,
    /// BAR and first byte of the table.
    pub table: (u8, u32),
    /// BAR and first byte of the pending bits.
    pub pending: (u8, u32),
}

impl Places {
    /// Reads the capability at `at` of configuration space.
    #[must_use]
    pub fn read(raw: &[u8; 256], at: usize) -> Option<Self> {
        let word = |skip: usize| Some(u32::from_le_bytes(raw.get(at + skip..at + skip + 4)?.try_into().ok()?));
        let split = |word: u32| ((word & 7) as u8, word & !7);
        Some(Self { entries: (word(0)? >> 16 & 0x7ff) as u16 + 1, table: split(word(4)?), pending: split(word(8)?) })
    }

    /// The bytes of `bar` that the guest must not see as they are.
    #[must_use]
    pub fn hidden(&self, bar: u8) -> Vec<Range<u64>> {
        let mut hidden = Vec::new();
        let (table, pending) = (u64::from(self.table.1), u64::from(self.pending.1));
        if self.table.0 == bar {
            hidden.push(table..table + u64::from(self.entries) * ENTRY_SIZE);
        }
        if self.pending.0 == bar {
            hidden.push(pending..pending + u64::from(self.entries).div_ceil(64) * 8);
        }
        hidden
    }
}

impl Table {
    /// A table for the capability at `at`, off.
    #[must_use]
    pub fn new(msix: Msix, at: u16, places: &Places) -> Self {
        let (table, pending) = (u64::from(places.table.1), u64::from(places.pending.1));
        let entries = usize::from(places.entries);
        let pending_bytes = entries.div_ceil(64) as u64 * 8;
        Self {
            msix,
            at,
            bar: places.table.0,
            table: table..table + entries as u64 * ENTRY_SIZE,
            // In another BAR the guest reads the device's own, which are as good as none.
            pending: if places.pending.0 == places.table.0 { pending..pending + pending_bytes } else { 0..0 },
            entries,
            on: 0,
        }
    }

    /// Where the message control word is.
    #[must_use]
    pub const fn control_at(&self) -> u16 {
        self.at + 2
    }

    /// Reads, if table or pending bits are there.
    pub fn read(&self, bar: u8, offset: u64, data: &mut [u8]) -> bool {
        if bar == self.bar && self.table.contains(&offset) {
            self.msix.read_table(offset - self.table.start, data);
        } else if bar == self.bar && self.pending.contains(&offset) {
            self.msix.read_pending(offset - self.pending.start, data);
        } else {
            return false;
        }
        true
    }

    /// Writes, if table or pending bits are there; what the device refused if it needed more interrupts for that.
    pub fn write(&mut self, hardware: &dyn Hardware, bar: u8, offset: u64, data: &[u8]) -> Option<io::Result<()>> {
        if bar == self.bar && self.table.contains(&offset) {
            self.msix.write_table(offset - self.table.start, data);
            if self.on > 0 && self.msix.used() > self.on {
                return Some(self.switch_on(hardware));
            }
            return Some(Ok(()));
        }
        (bar == self.bar && self.pending.contains(&offset)).then_some(Ok(()))
    }

    /// The guest wrote the message control word.
    ///
    /// # Errors
    /// The host's, such as when it is out of interrupt vectors; MSI-X is off for the device then.
    pub fn set_control(&mut self, hardware: &dyn Hardware, control: u16) -> io::Result<()> {
        self.msix.set_control(control);
        match (control >> 15 == 1, self.on > 0) {
            (true, false) => self.switch_on(hardware),
            (false, true) => self.switch_off(hardware),
            _ => Ok(()),
        }
    }

    /// Gives the device as many interrupts as the guest uses, rounded up so that growing is rare: a host can't add to those
    /// that are there.
    fn switch_on(&mut self, hardware: &dyn Hardware) -> io::Result<()> {
        let grown = self.on > 0;
        if grown {
            self.switch_off(hardware)?;
        }
        let count = self.msix.used().max(1).next_power_of_two().min(self.entries);
        let lines = self.msix.lines();
        let fds: Option<Vec<RawFd>> = lines.iter().take(count).map(pci::msix::MsixLine::lend).collect();
        let fds = fds.ok_or_else(|| io::Error::other("an interrupt has no eventfd"))?;
        hardware.signal(Interrupts::MsiX, &fds)?;
        self.on = count;
        if grown {
            // What the device sent in between is lost: each handler looks once more.
            for line in lines.iter().take(count) {
                line.notify();
            }
        }
        Ok(())
    }

    fn switch_off(&mut self, hardware: &dyn Hardware) -> io::Result<()> {
        self.on = 0;
        hardware.signal(Interrupts::MsiX, &[])
    }

    /// Back to power-on.
    pub fn reset(&mut self, hardware: &dyn Hardware) {
        if self.on > 0 {
            // The device is reset next, or closed.
            let _ = self.switch_off(hardware);
        }
        self.msix.reset();
    }
}
