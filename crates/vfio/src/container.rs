// SPDX-License-Identifier: Apache-2.0
//! The container: which groups of devices a machine has, and the one address space that they all do DMA in.
//!
//! `machine` owns one while any device is passed through, under a lock of its own. Everything that it opened is closed with
//! it, on each way out: nothing stays half bound.

use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use spec::PciAddress;

use crate::dma::DmaMaps;
use crate::error::VfioError;
use crate::layout::Hardware;
use crate::sys::{ContainerFd, GroupFd};
use crate::sysfs::{Sysfs, VFIO_DRIVER};

/// Devices and groups that a machine has taken.
pub struct Container {
    fd: ContainerFd,
    groups: Vec<(u32, GroupFd)>,
    /// Its devices and their groups.
    devices: Vec<(PciAddress, u32)>,
    sysfs: Sysfs,
    dev: PathBuf,
}

/// A device that was opened.
pub struct Opened {
    /// Where it is on the host.
    pub address: PciAddress,
    /// The way to it.
    pub hardware: Box<dyn Hardware>,
}

/// What to do when VFIO itself is not there.
const LOAD: &str = "load it with `modprobe vfio-pci`, and see that this user may open it";
/// What to do about a refusal that has no name of its own.
const KERNEL_LOG: &str = "the host's kernel log says more";

impl Container {
    /// An empty one.
    ///
    /// # Errors
    /// [`VfioError::Host`] where the host has no VFIO.
    pub fn open() -> Result<Self, VfioError> {
        let dev = Path::new("/dev/vfio").to_owned();
        let fd = ContainerFd::open(&dev).map_err(VfioError::host("open /dev/vfio/vfio", LOAD))?;
        Ok(Self { fd, groups: Vec::new(), devices: Vec::new(), sysfs: Sysfs::host(), dev })
    }

    /// Opens the device at `address`, and takes its group if it has none of it yet. The device is as after power-on then.
    ///
    /// # Errors
    /// What stands in the way, and what to do.
    pub fn device(&mut self, address: PciAddress) -> Result<Opened, VfioError> {
        let found = self.sysfs.describe(address)?;
        let number = found.group.ok_or(VfioError::NoIommu(address))?;
        if found.driver.as_deref() != Some(VFIO_DRIVER) {
            return Err(VfioError::NotBound { address, owner: found.owner() });
        }
        if !self.groups.iter().any(|(n, _)| *n == number) {
            let group = self.take(address, number)?;
            self.groups.push((number, group));
        }
        let group = self.groups.iter().find(|(n, _)| *n == number);
        let group = group.map(|(_, group)| group).ok_or(VfioError::NoIommu(address))?;
        let opened = group.device(address).map_err(VfioError::host(format!("open {address} through VFIO"), KERNEL_LOG));
        self.devices.push((address, number));
        let hardware = opened.inspect_err(|_| self.release(address))?;
        // Opening it has reset it already, where the kernel could: this is for devices that need more.
        let _ = hardware.reset();
        Ok(Opened { address, hardware: Box::new(hardware) })
    }

    /// The descriptor of the group that [`Container::release`] of `address` closes: that of its last device.
    #[must_use]
    pub fn last_of_group(&self, address: PciAddress) -> Option<RawFd> {
        let (_, number) = self.devices.iter().find(|(other, _)| *other == address)?;
        if self.devices.iter().any(|(other, group)| group == number && *other != address) {
            return None;
        }
        self.groups.iter().find(|(n, _)| n == number).map(|(_, group)| group.as_raw_fd())
    }

    /// The device at `address`, which is closed, goes; its group is closed with its last device. KVM and maps have to have let
    /// go of the group by then.
    pub fn release(&mut self, address: PciAddress) {
        self.devices.retain(|(other, _)| *other != address);
        let devices = &self.devices;
        self.groups.retain(|(number, _)| devices.iter().any(|(_, group)| group == number));
    }

    /// Whether the device at `address` is the only one.
    #[must_use]
    pub fn is_last(&self, address: PciAddress) -> bool {
        self.devices.iter().all(|(other, _)| *other == address)
    }

    /// Whether it has no devices.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// Takes group `number` for the device at `address`.
    fn take(&self, address: PciAddress, number: u32) -> Result<GroupFd, VfioError> {
        let path = self.dev.join(number.to_string());
        let opened = GroupFd::open(&self.dev, number);
        let group = opened.map_err(|source| match source.raw_os_error() {
            Some(libc::EBUSY) => VfioError::InUse {
                address,
                user: format!("another process has {}", path.display()),
                place: "--vfio",
                hint: "end that machine first",
            },
            _ => VfioError::Host { what: format!("open {} for {address}", path.display()), source, hint: LOAD },
        })?;
        let viable = group.is_viable().map_err(VfioError::host(format!("ask about group {number}"), KERNEL_LOG))?;
        if !viable {
            let others = self.sysfs.in_the_way(number);
            let others = others.iter().map(|d| format!("{} ({})", d.address, d.owner()));
            let others = others.collect::<Vec<_>>().join(" and ");
            return Err(VfioError::Shared { address, group: number, others });
        }
        let join = |source| VfioError::Host {
            what: format!("put group {number} of {address} behind the IOMMU"),
            source,
            hint: "a host without interrupt remapping needs vfio_iommu_type1.allow_unsafe_interrupts=1, and its owner's trust \
                   in the guest",
        };
        group.join(&self.fd).map_err(join)?;
        if self.groups.is_empty() {
            self.fd.use_type1().map_err(join)?;
        }
        Ok(group)
    }

    /// The descriptors of its groups, which KVM wants to know.
    pub fn groups(&self) -> impl Iterator<Item = RawFd> + '_ {
        self.groups.iter().map(|(_, group)| group.as_raw_fd())
    }

    /// A listener that keeps what its devices reach equal to an address space.
    ///
    /// # Errors
    /// [`VfioError::Host`] when the host is out of descriptors.
    pub fn maps(&self) -> Result<DmaMaps<ContainerFd>, VfioError> {
        let fd = self.fd.try_clone();
        Ok(DmaMaps::new(fd.map_err(VfioError::host("copy a descriptor", "raise the limit on open files"))?))
    }
}
