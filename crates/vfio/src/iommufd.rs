// SPDX-License-Identifier: Apache-2.0
//! iommufd's system calls (`linux/iommufd.h`), and those of a device that is reached by its own node instead of its group's
//! (`linux/vfio.h`). Called by `container`, on whichever thread asks; the kernel has its own locks.
//!
//! The four structures are our own: a dependency would have been longer than they are. Pages are combined where they lie
//! side by side, which is the kernel's default (`IOMMU_OPTION_HUGE_PAGES`).

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;

use base::Hva;
use vfio_bindings::bindings::vfio::{
    vfio_device_attach_iommufd_pt, vfio_device_bind_iommufd, vfio_device_detach_iommufd_pt,
};

use crate::dma::DmaSink;
use crate::sys::{DeviceFd, request, structure};

/// The number of command `n` of iommufd: `_IO(';', n)`, without sizes.
const fn command(n: u32) -> libc::c_ulong {
    (b';' as libc::c_ulong) << 8 | n as libc::c_ulong
}

const DESTROY: libc::c_ulong = command(0x80);
const IOAS_ALLOC: libc::c_ulong = command(0x81);
const IOAS_MAP: libc::c_ulong = command(0x85);
const IOAS_UNMAP: libc::c_ulong = command(0x86);

const DEVICE_BIND_IOMMUFD: libc::c_ulong = request(18);
const DEVICE_ATTACH_IOMMUFD_PT: libc::c_ulong = request(19);
const DEVICE_DETACH_IOMMUFD_PT: libc::c_ulong = request(20);

const MAP_FIXED_IOVA: u32 = 1 << 0;
const MAP_WRITEABLE: u32 = 1 << 1;
const MAP_READABLE: u32 = 1 << 2;

/// `struct iommu_destroy`.
#[repr(C)]
struct Destroy {
    size: u32,
    id: u32,
}

/// `struct iommu_ioas_alloc`.
#[repr(C)]
struct IoasAlloc {
    size: u32,
    flags: u32,
    out_ioas_id: u32,
}

/// `struct iommu_ioas_map`.
#[repr(C)]
struct IoasMap {
    size: u32,
    flags: u32,
    ioas_id: u32,
    reserved: u32,
    user_va: u64,
    length: u64,
    iova: u64,
}

/// `struct iommu_ioas_unmap`.
#[repr(C)]
struct IoasUnmap {
    size: u32,
    ioas_id: u32,
    iova: u64,
    length: u64,
}

const _: () = assert!(size_of::<Destroy>() == 8 && size_of::<IoasAlloc>() == 12);
const _: () = assert!(size_of::<IoasMap>() == 40 && size_of::<IoasUnmap>() == 24);

/// An address space for DMA of `/dev/iommu`, the only one of its descriptor.
pub struct Ioas {
    file: File,
    id: u32,
}

impl Ioas {
    /// A new one.
    ///
    /// # Errors
    /// What `open` says, and the host's.
    pub fn open(iommu: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(iommu)?;
        let mut alloc = IoasAlloc { size: size_of::<IoasAlloc>() as u32, flags: 0, out_ioas_id: 0 };
        // SAFETY: the structure is what the request reads and fills.
        unsafe { structure(&file, IOAS_ALLOC, &raw mut alloc) }?;
        Ok(Self { file, id: alloc.out_ioas_id })
    }

    /// Something that is none, for tests of what is around it.
    #[cfg(test)]
    pub const fn fake(file: File) -> Self {
        Self { file, id: 1 }
    }

    /// Another handle on the same one, for maps.
    ///
    /// # Errors
    /// When the host is out of descriptors.
    pub fn sink(&self) -> io::Result<IoasSink> {
        Ok(IoasSink { file: self.file.try_clone()?, id: self.id })
    }
}

impl Drop for Ioas {
    fn drop(&mut self) {
        let mut destroy = Destroy { size: size_of::<Destroy>() as u32, id: self.id };
        // Where a device is still attached the kernel does it with the last descriptor.
        // SAFETY: the structure is what the request reads; devices lose access and nothing else happens.
        let _ = unsafe { structure(&self.file, DESTROY, &raw mut destroy) };
    }
}

/// Maps of an [`Ioas`].
pub struct IoasSink {
    file: File,
    id: u32,
}

/// The memory that `DmaMaps` names is that of the machine's address space, which `machine` keeps mapped for as long as
/// anything may reach it; the end of the [`Ioas`] unmaps the rest.
impl DmaSink for IoasSink {
    fn map(&mut self, iova: u64, host: Hva, size: u64) -> io::Result<()> {
        let mut map = IoasMap {
            size: size_of::<IoasMap>() as u32,
            flags: MAP_FIXED_IOVA | MAP_WRITEABLE | MAP_READABLE,
            ioas_id: self.id,
            reserved: 0,
            user_va: host.0,
            length: size,
            iova,
        };
        // SAFETY: the structure is what the request takes. The memory belongs to the guest: it is reached through volatile
        // accesses and raw pointers alone, so that a device that writes there breaks nothing; the kernel pins its pages.
        unsafe { structure(&self.file, IOAS_MAP, &raw mut map) }.map(drop)
    }

    fn unmap(&mut self, iova: u64, size: u64) -> io::Result<()> {
        let mut unmap = IoasUnmap { size: size_of::<IoasUnmap>() as u32, ioas_id: self.id, iova, length: size };
        // SAFETY: the structure is what the request takes; the device loses access and nothing else happens.
        unsafe { structure(&self.file, IOAS_UNMAP, &raw mut unmap) }.map(drop)
    }
}

/// `/dev/vfio/devices/vfioN`: one device. It can do nothing until it is bound.
pub struct NodeFd(File);

impl NodeFd {
    /// The device whose node is at `path`. Several processes may open it, one may bind it.
    ///
    /// # Errors
    /// What `open` says.
    pub fn open(path: &Path) -> io::Result<Self> {
        File::options().read(true).write(true).open(path).map(Self)
    }

    /// Makes the device this process's and that of `ioas`'s descriptor. KVM has to have been told before.
    ///
    /// # Errors
    /// The host's: `EBUSY` or `EPERM` where its group is not free, `EINVAL` where the device itself is not, `EPERM` where
    /// nothing keeps its interrupts apart.
    pub fn bind(&self, ioas: &Ioas) -> io::Result<()> {
        let mut bind = vfio_device_bind_iommufd {
            argsz: size_of::<vfio_device_bind_iommufd>() as u32,
            iommufd: ioas.file.as_raw_fd(),
            ..vfio_device_bind_iommufd::default()
        };
        // SAFETY: the structure is what the request reads and fills; its descriptor is open.
        unsafe { structure(&self.0, DEVICE_BIND_IOMMUFD, &raw mut bind) }.map(drop)
    }

    /// Lets the device, which is bound, reach what is mapped in `ioas`.
    ///
    /// # Errors
    /// The host's: `ENOMEM` when what is mapped there can't be pinned.
    pub fn attach(&self, ioas: &Ioas) -> io::Result<()> {
        let mut attach = vfio_device_attach_iommufd_pt {
            argsz: size_of::<vfio_device_attach_iommufd_pt>() as u32,
            pt_id: ioas.id,
            ..vfio_device_attach_iommufd_pt::default()
        };
        // SAFETY: the structure is what the request reads and fills.
        unsafe { structure(&self.0, DEVICE_ATTACH_IOMMUFD_PT, &raw mut attach) }.map(drop)
    }

    /// The device, which is bound.
    ///
    /// # Errors
    /// The host's.
    pub fn device(&self) -> io::Result<DeviceFd> {
        DeviceFd::new(self.0.try_clone()?)
    }
}

impl AsRawFd for NodeFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Whoever else has the device open, it reaches no memory from here on; one that was not attached is as it was.
impl Drop for NodeFd {
    fn drop(&mut self) {
        let argsz = size_of::<vfio_device_detach_iommufd_pt>() as u32;
        let mut detach = vfio_device_detach_iommufd_pt { argsz, ..vfio_device_detach_iommufd_pt::default() };
        // SAFETY: the structure is what the request reads; the device loses access and nothing else happens.
        let _ = unsafe { structure(&self.0, DEVICE_DETACH_IOMMUFD_PT, &raw mut detach) };
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::mem::offset_of;

    use super::*;

    #[test]
    fn numbers_and_fields_are_those_of_the_headers() {
        assert_eq!([DESTROY, IOAS_ALLOC, IOAS_MAP, IOAS_UNMAP], [0x3b80, 0x3b81, 0x3b85, 0x3b86]);
        assert_eq!([DEVICE_BIND_IOMMUFD, DEVICE_ATTACH_IOMMUFD_PT, DEVICE_DETACH_IOMMUFD_PT], [0x3b76, 0x3b77, 0x3b78]);
        assert_eq!((offset_of!(Destroy, id), offset_of!(IoasAlloc, out_ioas_id)), (4, 8));
        assert_eq!((offset_of!(IoasMap, ioas_id), offset_of!(IoasMap, user_va)), (8, 16));
        assert_eq!((offset_of!(IoasMap, length), offset_of!(IoasMap, iova)), (24, 32));
        assert_eq!((offset_of!(IoasUnmap, ioas_id), offset_of!(IoasUnmap, iova)), (4, 8));
        assert_eq!(offset_of!(IoasUnmap, length), 16);
        // What kernels before 6.16 know of these, and refuse to have less of.
        assert_eq!(offset_of!(vfio_device_bind_iommufd, out_devid), 12);
        assert_eq!(offset_of!(vfio_device_attach_iommufd_pt, pt_id), 8);
        assert_eq!(offset_of!(vfio_device_detach_iommufd_pt, flags), 4);
    }

    #[test]
    fn a_file_that_is_neither_says_so_and_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("iommu");
        assert_eq!(Ioas::open(&path).err().unwrap().kind(), io::ErrorKind::NotFound);
        std::fs::write(&path, "as it was").unwrap();
        assert_eq!(Ioas::open(&path).err().unwrap().raw_os_error(), Some(libc::ENOTTY));
        let node = NodeFd::open(&path).unwrap();
        assert_eq!(node.device().err().unwrap().raw_os_error(), Some(libc::ENOTTY));
        drop(node);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "as it was");
    }
}
