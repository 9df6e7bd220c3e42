// SPDX-License-Identifier: Apache-2.0
//! The container: which devices a machine has of the host, and the one address space that they all do DMA in. It is the
//! kernel's own container with groups of devices, or an address space of iommufd with devices: the first device decides.
//!
//! `machine` owns one while any device is passed through, under a lock of its own. Everything that it opened is closed with
//! it, on each way out: nothing stays half bound.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};

use spec::{Iommu, PciAddress, Vfio};

use crate::dma::{DmaMaps, DmaSink};
use crate::error::VfioError;
use crate::iommufd::{Ioas, NodeFd};
use crate::layout::Hardware;
use crate::sys::{ContainerFd, GroupFd};
use crate::sysfs::{Described, Sysfs, VFIO_DRIVER};

/// Devices that a machine has taken.
pub struct Container {
    // Before what they are in: an address space ends when nothing is attached to it.
    devices: Vec<Claim>,
    way: Way,
    sysfs: Sysfs,
}

/// How they get behind the IOMMU.
enum Way {
    /// A container and its groups.
    Groups(ContainerFd, Vec<(u32, GroupFd)>),
    /// Nodes of devices, which their claims have.
    Iommufd(Ioas),
}

/// A device that is the machine's.
struct Claim {
    address: PciAddress,
    group: u32,
    /// Its own, and where that is.
    node: Option<(NodeFd, PathBuf)>,
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
/// What to do when iommufd is not there.
const IOMMUFD: &str = "this host's kernel needs iommufd (CONFIG_IOMMUFD), and this user leave to open it; iommu=container does \
                       without";
/// What to do about a refusal that has no name of its own.
const KERNEL_LOG: &str = "the host's kernel log says more";
/// What to do about a device that another process has.
const END_IT: &str = "end that machine first";

/// The device at `address` and its group, if it can be handed on at all.
fn check(sysfs: &Sysfs, address: PciAddress) -> Result<(Described, u32), VfioError> {
    let found = sysfs.describe(address)?;
    let group = found.group.ok_or(VfioError::NoIommu(address))?;
    if found.driver.as_deref() != Some(VFIO_DRIVER) {
        return Err(VfioError::NotBound { address, owner: found.owner() });
    }
    Ok((found, group))
}

impl Container {
    /// An empty one, of the kind that `first` is to be in: its own choice, or the one that is there for it.
    ///
    /// # Errors
    /// [`VfioError::Host`] where the host has no such kind, and what stands in the way of `first`.
    pub fn open(first: &Vfio) -> Result<Self, VfioError> {
        Self::of(Sysfs::host(), first)
    }

    fn of(sysfs: Sysfs, first: &Vfio) -> Result<Self, VfioError> {
        check(&sysfs, first.host)?;
        let iommu = if first.iommu == Iommu::Auto { sysfs.way(first.host) } else { first.iommu };
        let way = if iommu == Iommu::Iommufd {
            Way::Iommufd(Ioas::open(&sysfs.iommu()).map_err(VfioError::host("open /dev/iommu", IOMMUFD))?)
        } else {
            let opened = ContainerFd::open(&sysfs.vfio());
            Way::Groups(opened.map_err(VfioError::host("open /dev/vfio/vfio", LOAD))?, Vec::new())
        };
        Ok(Self { devices: Vec::new(), way, sysfs })
    }

    /// Which kind it is; never [`Iommu::Auto`].
    #[must_use]
    pub const fn iommu(&self) -> Iommu {
        match self.way {
            Way::Groups(..) => Iommu::Container,
            Way::Iommufd(_) => Iommu::Iommufd,
        }
    }

    /// Makes `device` the machine's, with its group if it has none of that yet. If there is a new descriptor, KVM is to hear
    /// of it before [`Container::device`] opens the device.
    ///
    /// # Errors
    /// What stands in the way, and what to do; nothing has happened then.
    pub fn claim(&mut self, device: &Vfio) -> Result<Option<RawFd>, VfioError> {
        let address = device.host;
        let (_, group) = check(&self.sysfs, address)?;
        let has = self.iommu();
        if device.iommu != Iommu::Auto && device.iommu != has {
            let why = format!("has iommu={}, and other devices of the machine are behind iommu={has}", device.iommu);
            return Err(VfioError::Unfit { address, why, hint: "say the same for all of them, or leave iommu= out" });
        }
        let (node, told) = match &mut self.way {
            Way::Groups(fd, groups) => {
                if groups.iter().any(|(number, _)| *number == group) {
                    (None, None)
                } else {
                    let taken = take(&self.sysfs, (fd, groups.is_empty()), address, group)?;
                    let told = taken.as_raw_fd();
                    groups.push((group, taken));
                    (None, Some(told))
                }
            }
            Way::Iommufd(_) => {
                let path = self.sysfs.node(address).ok_or_else(|| VfioError::Unfit {
                    address,
                    why: "has no node of its own in /dev/vfio/devices".to_owned(),
                    hint: "the host's kernel needs CONFIG_VFIO_DEVICE_CDEV; iommu=container does without",
                })?;
                let node = NodeFd::open(&path).map_err(|source| VfioError::Host {
                    what: format!("open {} for {address}", path.display()),
                    source,
                    hint: "see that this user may open it",
                })?;
                let told = node.as_raw_fd();
                (Some((node, path)), Some(told))
            }
        };
        self.devices.push(Claim { address, group, node });
        Ok(told)
    }

    /// Opens the device at `address`, which was claimed. It is as after power-on then.
    ///
    /// # Errors
    /// What stands in the way, and what to do; the device is claimed all the same.
    pub fn device(&self, address: PciAddress) -> Result<Opened, VfioError> {
        let what = format!("open {address} through VFIO");
        let gone = || VfioError::host(what.clone(), KERNEL_LOG)(io::Error::from_raw_os_error(libc::ENODEV));
        let claim = self.devices.iter().find(|claim| claim.address == address).ok_or_else(gone)?;
        let opened = match (&self.way, &claim.node) {
            (Way::Groups(_, groups), _) => {
                let group = groups.iter().find(|(number, _)| *number == claim.group).ok_or_else(gone)?;
                group.1.device(address)
            }
            (Way::Iommufd(ioas), Some((node, path))) => {
                let refused = |source| unbindable(&self.sysfs, (address, claim.group), path, source);
                node.bind(ioas).map_err(refused)?;
                node.attach(ioas).and_then(|()| node.device())
            }
            (Way::Iommufd(_), None) => return Err(gone()),
        };
        let hardware = opened.map_err(VfioError::host(what, KERNEL_LOG))?;
        // Opening it has reset it already, where the kernel could: this is for devices that need more.
        let _ = hardware.reset();
        Ok(Opened { address, hardware: Box::new(hardware) })
    }

    /// The descriptor that [`Container::release`] of `address` closes, which KVM has to forget before: the device's own, or
    /// that of its group if no other device is in there.
    #[must_use]
    pub fn closes(&self, address: PciAddress) -> Option<RawFd> {
        let claim = self.devices.iter().find(|claim| claim.address == address)?;
        match &self.way {
            Way::Iommufd(_) => claim.node.as_ref().map(|(node, _)| node.as_raw_fd()),
            Way::Groups(..) if self.devices.iter().any(|c| c.group == claim.group && c.address != address) => None,
            Way::Groups(_, groups) => {
                groups.iter().find(|(number, _)| *number == claim.group).map(|(_, group)| group.as_raw_fd())
            }
        }
    }

    /// The device at `address`, which is closed, goes; its group is closed with its last device. KVM and maps have to have let
    /// go by then.
    pub fn release(&mut self, address: PciAddress) {
        self.devices.retain(|claim| claim.address != address);
        if let Way::Groups(_, groups) = &mut self.way {
            groups.retain(|(number, _)| self.devices.iter().any(|claim| claim.group == *number));
        }
    }

    /// Whether the device at `address` is the only one.
    #[must_use]
    pub fn is_last(&self, address: PciAddress) -> bool {
        self.devices.iter().all(|claim| claim.address == address)
    }

    /// Whether it has no devices.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
    }

    /// A listener that keeps what its devices reach equal to an address space.
    ///
    /// # Errors
    /// [`VfioError::Host`] when the host is out of descriptors.
    pub fn maps(&self) -> Result<DmaMaps<Box<dyn DmaSink>>, VfioError> {
        let sink = match &self.way {
            Way::Groups(fd, _) => fd.try_clone().map(|fd| Box::new(fd) as Box<dyn DmaSink>),
            Way::Iommufd(ioas) => ioas.sink().map(|sink| Box::new(sink) as Box<dyn DmaSink>),
        };
        Ok(DmaMaps::new(sink.map_err(VfioError::host("copy a descriptor", "raise the limit on open files"))?))
    }
}

/// Takes group `number` for the device at `address` into a container, which may be empty so far.
fn take(
    sysfs: &Sysfs,
    (container, empty): (&ContainerFd, bool),
    address: PciAddress,
    number: u32,
) -> Result<GroupFd, VfioError> {
    let path = sysfs.vfio().join(number.to_string());
    let group = GroupFd::open(&sysfs.vfio(), number).map_err(|source| match source.raw_os_error() {
        Some(libc::EBUSY) => in_use(address, &path),
        _ => VfioError::Host { what: format!("open {} for {address}", path.display()), source, hint: LOAD },
    })?;
    let viable = group.is_viable().map_err(VfioError::host(format!("ask about group {number}"), KERNEL_LOG))?;
    if !viable {
        return Err(VfioError::Shared { address, group: number, others: sysfs.others(number) });
    }
    let join = |source| VfioError::Host {
        what: format!("put group {number} of {address} behind the IOMMU"),
        source,
        hint: "a host without interrupt remapping needs vfio_iommu_type1.allow_unsafe_interrupts=1, and its owner's trust \
               in the guest",
    };
    group.join(container).map_err(join)?;
    if empty {
        container.use_type1().map_err(join)?;
    }
    Ok(group)
}

/// Why the device at `address`, in `group`, whose node is at `path`, can't be bound to iommufd.
fn unbindable(sysfs: &Sysfs, (address, group): (PciAddress, u32), path: &Path, source: io::Error) -> VfioError {
    let others = sysfs.others(group);
    let what = format!("put {address} behind the IOMMU");
    match source.raw_os_error() {
        // The kernel says that the group has another owner, a driver or a process, with the word that it has for interrupts.
        Some(libc::EBUSY | libc::EPERM) if !others.is_empty() => VfioError::Shared { address, group, others },
        Some(libc::EBUSY) => in_use(address, &sysfs.vfio().join(group.to_string())),
        Some(libc::EPERM) if sysfs.describe(address).is_ok_and(|device| sysfs.is_taken(&device)) => {
            in_use(address, &sysfs.vfio().join(group.to_string()))
        }
        Some(libc::EINVAL) => in_use(address, path),
        Some(libc::EPERM) => VfioError::Host {
            what,
            source,
            hint: "a host without interrupt remapping needs iommufd.allow_unsafe_interrupts=1, and its owner's trust in the \
                   guest",
        },
        _ => VfioError::Host { what, source, hint: KERNEL_LOG },
    }
}

/// Another process has what is at `path`.
fn in_use(address: PciAddress, path: &Path) -> VfioError {
    let user = format!("another process has {}", path.display());
    VfioError::InUse { address, user, place: "--vfio", hint: END_IT }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[path = "container_tests.rs"]
mod tests;
