// SPDX-License-Identifier: Apache-2.0
//! VFIO's system calls (`linux/vfio.h`): container, group and device. Called by `container` and `iommufd`, and through
//! [`Hardware`] by the device, on whichever thread asks; the kernel has its own locks.
//!
//! Not with rust-vmm's `vfio-ioctls`: it ties a container to `kvm-ioctls`, which only `kvm` may know, maps memory by itself,
//! and turns the host's reasons into its own.

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use base::Hva;
use spec::PciAddress;
use vfio_bindings::bindings::vfio::{
    VFIO_BASE, VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE,
    VFIO_GROUP_FLAGS_VIABLE, VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE, VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP,
    VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE, VFIO_TYPE, VFIO_TYPE1v2_IOMMU, vfio_device_info,
    vfio_group_status, vfio_iommu_type1_dma_map, vfio_iommu_type1_dma_unmap, vfio_irq_info, vfio_region_info,
};

use crate::dma::DmaSink;
use crate::layout::{Hardware, Interrupts, Region};

/// The number of request `n` of VFIO: `_IO`, without sizes.
pub const fn request(n: u32) -> libc::c_ulong {
    (VFIO_TYPE as libc::c_ulong) << 8 | (VFIO_BASE + n) as libc::c_ulong
}

const GET_API_VERSION: libc::c_ulong = request(0);
const CHECK_EXTENSION: libc::c_ulong = request(1);
const SET_IOMMU: libc::c_ulong = request(2);
const GROUP_GET_STATUS: libc::c_ulong = request(3);
const GROUP_SET_CONTAINER: libc::c_ulong = request(4);
const GROUP_GET_DEVICE_FD: libc::c_ulong = request(6);
const DEVICE_GET_INFO: libc::c_ulong = request(7);
const DEVICE_GET_REGION_INFO: libc::c_ulong = request(8);
const DEVICE_GET_IRQ_INFO: libc::c_ulong = request(9);
const DEVICE_SET_IRQS: libc::c_ulong = request(10);
const DEVICE_RESET: libc::c_ulong = request(11);
const IOMMU_MAP_DMA: libc::c_ulong = request(13);
const IOMMU_UNMAP_DMA: libc::c_ulong = request(14);

/// A request whose argument is a number.
fn number(file: &impl AsRawFd, request: libc::c_ulong, argument: libc::c_ulong) -> io::Result<libc::c_int> {
    // SAFETY: the requests that are called like this take no pointer.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

/// A request whose argument is a structure.
///
/// # Safety
/// `argument` is what the request takes, its `argsz` no larger than it is, and what it has the kernel do to memory or
/// descriptors is the caller's to answer for.
pub unsafe fn structure<T>(file: &impl AsRawFd, request: libc::c_ulong, argument: *mut T) -> io::Result<libc::c_int> {
    // SAFETY: as promised by the caller.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), request, argument) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

/// `/dev/vfio/vfio`: one address space for DMA.
pub struct ContainerFd(File);

impl ContainerFd {
    /// A new one.
    ///
    /// # Errors
    /// What `open` says, and `ENOSYS` where VFIO has no type 1 IOMMU.
    pub fn open(dev: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(dev.join("vfio"))?;
        let unfit = || io::Error::from_raw_os_error(libc::ENOSYS);
        if number(&file, GET_API_VERSION, 0)? != 0 {
            return Err(unfit());
        }
        if number(&file, CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU.into())? != 1 {
            return Err(unfit());
        }
        Ok(Self(file))
    }

    /// Chooses the kind of IOMMU, once a group is in.
    ///
    /// # Errors
    /// The host's.
    pub fn use_type1(&self) -> io::Result<()> {
        number(&self.0, SET_IOMMU, VFIO_TYPE1v2_IOMMU.into()).map(drop)
    }

    /// Another handle on the same one.
    ///
    /// # Errors
    /// When the host is out of descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        self.0.try_clone().map(Self)
    }
}

/// The memory that `DmaMaps` names is that of the machine's address space, which `machine` keeps mapped for as long as
/// anything may reach it; the container's end unmaps the rest.
impl DmaSink for ContainerFd {
    fn map(&mut self, iova: u64, host: Hva, size: u64) -> io::Result<()> {
        let mut map = vfio_iommu_type1_dma_map {
            argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
            flags: VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE,
            vaddr: host.0,
            iova,
            size,
        };
        // SAFETY: the structure is what the request takes. The memory belongs to the guest: it is reached through volatile
        // accesses and raw pointers alone, so that a device that writes there breaks nothing; the kernel pins its pages.
        unsafe { structure(&self.0, IOMMU_MAP_DMA, &raw mut map) }.map(drop)
    }

    fn unmap(&mut self, iova: u64, size: u64) -> io::Result<()> {
        let mut unmap = vfio_iommu_type1_dma_unmap {
            argsz: size_of::<vfio_iommu_type1_dma_unmap>() as u32,
            iova,
            size,
            ..vfio_iommu_type1_dma_unmap::default()
        };
        // SAFETY: the structure is what the request takes; the device loses access and nothing else happens.
        unsafe { structure(&self.0, IOMMU_UNMAP_DMA, &raw mut unmap) }.map(drop)
    }
}

/// `/dev/vfio/N`: devices that the IOMMU can't tell apart.
pub struct GroupFd(File);

impl GroupFd {
    /// Group `number`. Only one process at a time has it.
    ///
    /// # Errors
    /// What `open` says: `EBUSY` if somebody has it.
    pub fn open(dev: &Path, number: u32) -> io::Result<Self> {
        File::options().read(true).write(true).open(dev.join(number.to_string())).map(Self)
    }

    /// Whether all devices of the group can be handed on.
    ///
    /// # Errors
    /// The host's.
    pub fn is_viable(&self) -> io::Result<bool> {
        let mut status = vfio_group_status { argsz: size_of::<vfio_group_status>() as u32, flags: 0 };
        // SAFETY: the structure is what the request fills.
        unsafe { structure(&self.0, GROUP_GET_STATUS, &raw mut status) }?;
        Ok(status.flags & VFIO_GROUP_FLAGS_VIABLE != 0)
    }

    /// Puts it into `container`.
    ///
    /// # Errors
    /// The host's.
    pub fn join(&self, container: &ContainerFd) -> io::Result<()> {
        let mut fd = container.0.as_raw_fd();
        // SAFETY: the request reads one descriptor, which is open.
        unsafe { structure(&self.0, GROUP_SET_CONTAINER, &raw mut fd) }.map(drop)
    }

    /// Opens one of its devices.
    ///
    /// # Errors
    /// The host's.
    pub fn device(&self, address: PciAddress) -> io::Result<DeviceFd> {
        let mut name = address.to_string().into_bytes();
        name.push(0);
        // SAFETY: the request reads a string that ends in a zero byte.
        let fd = unsafe { structure(&self.0, GROUP_GET_DEVICE_FD, name.as_mut_ptr()) }?;
        // SAFETY: the kernel gave this descriptor to us and to nobody else.
        DeviceFd::new(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}

impl AsRawFd for GroupFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A device's descriptor.
pub struct DeviceFd {
    file: File,
    /// It can be reset.
    resets: bool,
}

impl DeviceFd {
    /// The PCI device that `file` is.
    ///
    /// # Errors
    /// The host's, and `ENODEV` for any other device.
    pub fn new(file: File) -> io::Result<Self> {
        let mut info = vfio_device_info { argsz: size_of::<vfio_device_info>() as u32, ..vfio_device_info::default() };
        // SAFETY: the structure is what the request fills.
        unsafe { structure(&file, DEVICE_GET_INFO, &raw mut info) }?;
        if info.flags & VFIO_DEVICE_FLAGS_PCI == 0 {
            return Err(io::Error::from_raw_os_error(libc::ENODEV));
        }
        Ok(Self { file, resets: info.flags & VFIO_DEVICE_FLAGS_RESET != 0 })
    }

    /// What the kernel says of region `index`, with room for what follows the structure: whole words.
    fn region_words(&self, index: u32) -> io::Result<(vfio_region_info, Vec<u64>)> {
        let head = size_of::<vfio_region_info>();
        let mut words = vec![0u64; head / 8];
        loop {
            let bytes = words.len() * 8;
            let info = vfio_region_info { argsz: bytes as u32, index, ..vfio_region_info::default() };
            let at = words.as_mut_ptr().cast::<vfio_region_info>();
            // SAFETY: there is room for the structure, aligned as it needs; the kernel fills at most `argsz` bytes.
            let info = unsafe {
                at.write(info);
                structure(&self.file, DEVICE_GET_REGION_INFO, at)?;
                at.read()
            };
            let wanted = (info.argsz as usize).div_ceil(8);
            // A kernel that wants ever more is none; 64 KiB hold four thousand areas.
            if wanted <= words.len() || bytes > 64 << 10 {
                return Ok((info, words));
            }
            words.resize(wanted, 0);
        }
    }
}

/// The areas of a region that can be mapped, from the capability that lists them; `None` where there is none.
fn sparse(words: &[u64], info: &vfio_region_info) -> Option<Vec<Range<u64>>> {
    let u32_at = |at: usize| Some((words.get(at / 8)? >> (at % 8 / 4 * 32)) as u32);
    let mut at = (info.flags & VFIO_REGION_INFO_FLAG_CAPS != 0).then_some(info.cap_offset as usize)?;
    // A list that runs in circles ends here.
    for _ in 0..64 {
        if at == 0 || at % 8 != 0 {
            return None;
        }
        if u32_at(at)? & 0xffff == VFIO_REGION_INFO_CAP_SPARSE_MMAP {
            let count = u32_at(at + 8)? as usize;
            let area = |n: usize| Some((*words.get(at / 8 + 2 + n * 2)?, *words.get(at / 8 + 3 + n * 2)?));
            let areas = (0..count).map_while(area).map(|(from, size)| from..from.saturating_add(size));
            return Some(areas.collect());
        }
        at = u32_at(at + 4)? as usize;
    }
    None
}

impl Hardware for DeviceFd {
    fn region(&self, index: u32) -> io::Result<Region> {
        let (info, words) = match self.region_words(index) {
            Ok(found) => found,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(Region::default()),
            Err(error) => return Err(error),
        };
        let has = |flag| info.flags & flag != 0;
        let mappable = match sparse(&words, &info) {
            _ if !has(VFIO_REGION_INFO_FLAG_MMAP) => Vec::new(),
            Some(areas) => areas,
            None => std::iter::once(0..info.size).collect(),
        };
        let (read, write) = (has(VFIO_REGION_INFO_FLAG_READ), has(VFIO_REGION_INFO_FLAG_WRITE));
        Ok(Region { size: info.size, read, write, mappable })
    }

    fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(data, place(region) + offset)
    }

    fn write(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, place(region) + offset)
    }

    fn interrupts(&self, kind: Interrupts) -> io::Result<u32> {
        let argsz = size_of::<vfio_irq_info>() as u32;
        let mut info = vfio_irq_info { argsz, index: kind as u32, ..vfio_irq_info::default() };
        // SAFETY: the structure is what the request fills.
        unsafe { structure(&self.file, DEVICE_GET_IRQ_INFO, &raw mut info) }?;
        Ok(info.count)
    }

    fn signal(&self, kind: Interrupts, fds: &[RawFd]) -> io::Result<()> {
        // struct vfio_irq_set, and a descriptor for each interrupt behind it.
        let data = if fds.is_empty() { VFIO_IRQ_SET_DATA_NONE } else { VFIO_IRQ_SET_DATA_EVENTFD };
        let bytes = 20 + fds.len() as u32 * 4;
        let mut words = vec![bytes, VFIO_IRQ_SET_ACTION_TRIGGER | data, kind as u32, 0, fds.len() as u32];
        words.extend(fds.iter().map(|fd| *fd as u32));
        // SAFETY: the kernel reads `argsz` bytes, which is how long this is; the descriptors are open, and it takes
        // references of its own.
        let rc = unsafe { structure(&self.file, DEVICE_SET_IRQS, words.as_mut_ptr()) }?;
        // A positive answer is how many there would be.
        if rc == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::ENOSPC)) }
    }

    fn unmask_on(&self, fd: RawFd) -> io::Result<()> {
        let flags = VFIO_IRQ_SET_ACTION_UNMASK | VFIO_IRQ_SET_DATA_EVENTFD;
        let mut words = [24, flags, Interrupts::Pin as u32, 0, 1, fd as u32];
        // SAFETY: the kernel reads `argsz` bytes, which is how long this is; the descriptor is open, and it takes a reference
        // of its own.
        unsafe { structure(&self.file, DEVICE_SET_IRQS, words.as_mut_ptr()) }.map(drop)
    }

    fn reset(&self) -> io::Result<()> {
        if self.resets { number(&self.file, DEVICE_RESET, 0).map(drop) } else { Ok(()) }
    }

    fn map(&self, region: u32) -> io::Result<(OwnedFd, u64)> {
        Ok((self.file.try_clone()?.into(), place(region)))
    }
}

/// Where a region is in the device's file: VFIO for PCI has had them at these places since it began, and vfio-pci's own
/// answer is the same.
const fn place(region: u32) -> u64 {
    (region as u64) << 40
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_are_found_behind_other_capabilities_and_circles_end() {
        let info = |cap_offset| vfio_region_info {
            flags: VFIO_REGION_INFO_FLAG_CAPS | VFIO_REGION_INFO_FLAG_MMAP,
            cap_offset,
            size: 0x10000,
            ..vfio_region_info::default()
        };
        let mut words = vec![0u64; 16];
        // At 32: another one, next at 48. At 48: two areas.
        words[4] = 3 | 1 << 16 | 48 << 32;
        words[6] = 1 | 1 << 16;
        words[7] = 2;
        words[8..12].copy_from_slice(&[0x1000, 0x2000, 0x8000, 0x1000]);
        assert_eq!(sparse(&words, &info(32)), Some(vec![0x1000..0x3000, 0x8000..0x9000]));
        assert_eq!(sparse(&words, &info(0)), None);
        words[7] = 1000;
        assert_eq!(sparse(&words, &info(32)).map(|areas| areas.len()), Some(4), "no more than there is room for");
        words[4] = 3 | 1 << 16 | 32 << 32;
        assert_eq!(sparse(&words, &info(32)), None);
        assert_eq!(sparse(&words, &info(4096)), None);
    }
}
