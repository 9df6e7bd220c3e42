// SPDX-License-Identifier: Apache-2.0
//! Where the guest's virtio devices are: on a PCI bus or at pages of their own, as the description says. `build` fills it,
//! vCPU threads bring it accesses that the address space says are its own.

use std::sync::{Arc, Mutex, PoisonError};

use base::news::News;
use boot::Ecam;
use mem::GuestRam;
use spec::Transport;
use vfio::Opened;
use virtio::VirtioDevice;
use virtio::transport::pci::VirtioPci;

use crate::error::Error;
use crate::layout::{ECAM, PCI_HOTPLUG_GSI, PCI_HOTPLUG_PORTS};
use crate::ledger::Party;
use crate::lines::Lines;
use crate::mmio_host::{MmioHost, Registers};
use crate::msi::KvmMsi;
use crate::pci_host::PciHost;
use crate::spaces::{Device, Spaces};

/// All virtio devices of a machine.
pub enum Bus {
    /// PCI functions.
    Pci(PciHost),
    /// Pages of registers.
    Mmio(MmioHost),
}

/// One device where the guest finds it, under its own lock.
#[derive(Clone)]
pub enum Function {
    /// A PCI function.
    Pci(Arc<Mutex<VirtioPci>>),
    /// A page of registers.
    Mmio(Registers),
}

impl Function {
    /// The user hears through `news` when the device called `name` breaks down.
    pub fn report_to(&self, name: &str, news: &Arc<News>) {
        match self {
            Self::Pci(device) => device.lock().unwrap_or_else(PoisonError::into_inner).status().report_to(name, news),
            Self::Mmio(device) => device.lock().unwrap_or_else(PoisonError::into_inner).status().report_to(name, news),
        }
    }

    /// The device may have changed its configuration: the guest hears of it.
    pub fn update_config(&self) {
        match self {
            Self::Pci(device) => device.lock().unwrap_or_else(PoisonError::into_inner).update_config(),
            Self::Mmio(device) => device.lock().unwrap_or_else(PoisonError::into_inner).update_config(),
        }
    }
}

impl Bus {
    /// Without devices, which will be in `spaces`. Messages go through `routes`, other interrupts through `lines`.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn new(
        spec: &spec::Vm,
        spaces: &Spaces,
        ram: &GuestRam,
        (routes, lines): (&KvmMsi, Lines),
    ) -> Result<Self, Error> {
        Ok(match spec.transport {
            Transport::Pci => Self::Pci(PciHost::new(spaces, ram, (routes, lines.pci_pins()))?),
            Transport::Mmio => Self::Mmio(MmioHost::new(spaces, ram, lines, spec.mmio_status)),
        })
    }

    /// Puts `device` into the next place and gives it as it is there.
    ///
    /// # Errors
    /// [`Error::TooMuch`] when there is no place left, [`Error::Host`] when the host is out of descriptors or interrupts.
    pub fn add(&mut self, device: Box<dyn VirtioDevice>) -> Result<Function, Error> {
        match self {
            Self::Pci(bus) => bus.add(device).map(Function::Pci),
            Self::Mmio(bus) => bus.add(device).map(Function::Mmio),
        }
    }

    /// Puts a device of the host into the next place.
    ///
    /// # Errors
    /// As [`PciHost::add_vfio`], and [`Error::TooMuch`] without a PCI bus.
    pub fn add_vfio(&mut self, device: Opened, news: &Arc<News>) -> Result<(), Error> {
        let Self::Pci(bus) = self else {
            let what = "a machine without a PCI bus can't have a PCI device: --vfio; take --transport mmio out";
            return Err(Error::TooMuch(what.to_owned()));
        };
        bus.add_vfio(device, news)
    }

    /// Whether functions may have interrupt pins.
    #[must_use]
    pub fn has_pins(&self) -> bool {
        matches!(self, Self::Pci(_)) && (self.hotplug().is_some() || !self.passed().is_empty())
    }

    /// Functions may come and go from now on, if it is a PCI bus.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn allow_hotplug(&mut self) -> Result<(), Error> {
        match self {
            Self::Pci(bus) => bus.allow_hotplug(),
            Self::Mmio(_) => Ok(()),
        }
    }

    /// How the guest hears of functions that come and go, if any may.
    #[must_use]
    pub fn hotplug(&self) -> Option<boot::PciHotplug> {
        let Self::Pci(bus) = self else { return None };
        let (slots, port) = (bus.hotplug_slots(), PCI_HOTPLUG_PORTS.0);
        (slots != 0).then_some(boot::PciHotplug { port, gsi: PCI_HOTPLUG_GSI, slots })
    }

    /// Where the devices of the host that are on it are there.
    #[must_use]
    pub fn passed(&self) -> Vec<spec::PciAddress> {
        match self {
            Self::Pci(bus) => bus.passed().into_iter().map(|(_, address)| address).collect(),
            Self::Mmio(_) => Vec::new(),
        }
    }

    /// Lets the guest read what it can without leaving; see [`PciHost::map_config`].
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn map_config(&mut self) -> Result<(), Error> {
        match self {
            Self::Pci(bus) => bus.map_config(),
            Self::Mmio(_) => Ok(()),
        }
    }

    /// The configuration window, if there is a bus with something on it. An empty one would only be probed: four hundred
    /// exits and two dozen lines of boot log.
    #[must_use]
    pub fn ecam(&self) -> Option<Ecam> {
        match self {
            Self::Pci(bus) if !bus.is_empty() => Some(Ecam { base: ECAM.0, buses: 1 }),
            _ => None,
        }
    }

    /// The devices that are no PCI functions.
    #[must_use]
    pub fn virtio_mmio(&self) -> Vec<boot::VirtioMmio> {
        match self {
            Self::Pci(_) => Vec::new(),
            Self::Mmio(bus) => bus.described(),
        }
    }

    /// Answers a read at byte `offset` of `device`, if it is on this bus.
    pub fn read(&self, device: Device, offset: u64, data: &mut [u8]) -> Option<Party> {
        match (self, device) {
            (Self::Pci(bus), Device::Ecam) => {
                bus.config_read(offset, data);
                Some(Party::PciEcam)
            }
            (Self::Pci(bus), Device::Bar { function, bar }) => {
                bus.bar_read(function, bar, offset, data);
                Some(Party::PciBar)
            }
            (Self::Mmio(bus), Device::VirtioMmio(number)) => {
                bus.read(number, offset, data);
                Some(Party::VirtioMmio)
            }
            _ => None,
        }
    }

    /// Answers a write there.
    pub fn write(&self, device: Device, offset: u64, data: &[u8]) -> Option<Party> {
        match (self, device) {
            (Self::Pci(bus), Device::Ecam) => {
                bus.config_write(offset, data);
                Some(Party::PciEcam)
            }
            (Self::Pci(bus), Device::Bar { function, bar }) => {
                bus.bar_write(function, bar, offset, data);
                Some(Party::PciBar)
            }
            (Self::Mmio(bus), Device::VirtioMmio(number)) => {
                bus.write(number, offset, data);
                Some(Party::VirtioMmio)
            }
            _ => None,
        }
    }

    /// Answers a read at port `offset` of BAR `bar` of the PCI function with this index.
    pub fn port_read(&self, (function, bar): (u8, u8), offset: u16, data: &mut [u8]) -> Option<Party> {
        self.read(Device::Bar { function, bar }, offset.into(), data)
    }

    /// Answers a write there.
    pub fn port_write(&self, (function, bar): (u8, u8), offset: u16, data: &[u8]) -> Option<Party> {
        self.write(Device::Bar { function, bar }, offset.into(), data)
    }

    /// Stops all devices: work in flight is finished or dropped, threads end. The guest must not run any more.
    pub fn stop(&self) {
        match self {
            Self::Pci(bus) => bus.stop(),
            Self::Mmio(bus) => bus.stop(),
        }
    }
}
