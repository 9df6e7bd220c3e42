// SPDX-License-Identifier: Apache-2.0
//! The guest's RAM as mapped in this process, with bounded, volatile access. Shared by all threads; no lock.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::mmap::Mmap;
use base::{Gpa, Hva, Seg};
use vm_memory::bitmap::BitmapSlice;
use vm_memory::{
    AtomicAccess, ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion, VolatileSlice,
};

use crate::hot::Hot;
use crate::pool::Lent;

/// What can go wrong with guest memory.
#[derive(Debug, thiserror::Error)]
pub enum MemError {
    /// The host would not give the memory.
    #[error("cannot map {size} bytes of guest memory: {source}; ask for less with --memory or free some on the host")]
    Map {
        /// Bytes asked for.
        size: u64,
        /// The host's reason.
        source: io::Error,
    },
    /// The host has too few huge pages set aside.
    #[error(
        "the guest needs {want} pages of {page} and {free} are free: memory.pages; write a larger number to \
         {folder}/nr_hugepages, or add fallback=on"
    )]
    HugePages {
        /// Pages it takes.
        want: u64,
        /// Pages there are.
        free: u64,
        /// Size of one.
        page: String,
        /// Where the host counts them.
        folder: String,
    },
    /// What should be behind the memory can't be.
    #[error("{what}, {source}: {place}; {hint}")]
    Backing {
        /// What can't.
        what: String,
        /// Key of the description.
        place: &'static str,
        /// The host's reason.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// The host has no such node.
    #[error(
        "memory can't come from node {node}, {source}: memory.host-node; `ls /sys/devices/system/node` lists nodes"
    )]
    Node {
        /// The node.
        node: u32,
        /// The host's reason.
        source: io::Error,
    },
    /// The host gave some of it and no more.
    #[error(
        "{done} MiB of {size} MiB of guest memory could be had, then no more, {source}: memory; ask for less, free some \
         on the host, or raise the limit of this cgroup"
    )]
    Ready {
        /// MiB that exist.
        done: u64,
        /// MiB asked for.
        size: u64,
        /// The host's reason.
        source: io::Error,
    },
    /// The pool did not lend it.
    #[error("{what}: memory.pool {socket}; {hint}")]
    Pool {
        /// What went wrong.
        what: String,
        /// The pool's socket.
        socket: String,
        /// What to do.
        hint: &'static str,
    },
    /// The ranges overlap or are empty.
    #[error("guest memory ranges are empty or overlap: {0}")]
    Layout(String),
    /// An address range that is not RAM.
    #[error("{0} for {1} bytes is outside guest memory")]
    Outside(Gpa, usize),
}

/// A range of a guest's memory that another process owns and lends us as a file.
#[derive(Clone, Copy, Debug)]
pub struct SharedRange<'a> {
    /// Where the guest has it.
    pub at: Gpa,
    /// Bytes.
    pub len: u64,
    /// The file.
    pub file: &'a File,
    /// Where in the file it begins.
    pub offset: u64,
}

/// Alignment of each range in this process: with it, KVM can map 2 MiB of guest memory by one entry.
const ALIGN: usize = 2 << 20;

/// All RAM of one guest. Cloning shares it.
#[derive(Clone, Debug)]
pub struct GuestRam {
    map: Arc<GuestMemoryMmap<()>>,
    /// Memory that comes and goes, past all that stays.
    hot: Option<Arc<Hot>>,
    /// Owns the memory that `map` only points to; dropped with the last clone.
    owner: Arc<Owner>,
}

/// Mappings, and then the loan that they are of: dropped in this order.
#[derive(Debug)]
struct Owner {
    maps: Vec<Mmap>,
    _lent: Option<Lent>,
    /// Nobody else has these pages, and they have no size or place that must be kept.
    plain: bool,
}

impl GuestRam {
    /// Maps private anonymous memory for each range, in transparent huge pages where the host has them; nothing is touched,
    /// so it costs address space only.
    ///
    /// # Errors
    /// [`MemError::Map`] when the host refuses, [`MemError::Layout`] for overlapping ranges.
    pub fn anonymous(ranges: &[(Gpa, u64)]) -> Result<Self, MemError> {
        let mut parts = Vec::with_capacity(ranges.len());
        for &(at, size) in ranges {
            let len = usize::try_from(size).map_err(|_| MemError::Layout(format!("{at} of {size} bytes")))?;
            let mine = Mmap::anonymous_aligned(len, ALIGN).map_err(|source| MemError::Map { size, source })?;
            mine.advise_huge_pages();
            parts.push((at, mine));
        }
        Self::of(parts, None, true)
    }

    /// Memory of mappings that are readable and writable, each at its guest address; given back to the pool it was `lent`
    /// by when the last clone is gone. `plain` memory may have files mapped over it ([`GuestRam::map_file`]).
    ///
    /// # Errors
    /// [`MemError::Layout`] for ranges that overlap.
    pub(crate) fn of(parts: Vec<(Gpa, Mmap)>, lent: Option<Lent>, plain: bool) -> Result<Self, MemError> {
        let mut regions = Vec::with_capacity(parts.len());
        let mut owner = Vec::with_capacity(parts.len());
        for (at, mine) in parts {
            let (len, size) = (mine.len(), mine.len() as u64);
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            // SAFETY: `mine` maps len bytes with these permissions and is kept beside the map for as long as any clone
            // of this value lives.
            let map = unsafe { MmapRegion::build_raw(mine.as_ptr(), len, prot, flags) }
                .map_err(|e| MemError::Map { size, source: io::Error::other(e) })?;
            owner.push(mine);
            let region = GuestRegionMmap::new(map, GuestAddress(at.0))
                .ok_or_else(|| MemError::Layout(format!("{at} of {size} bytes")))?;
            regions.push(region);
        }
        let map = GuestMemoryMmap::from_regions(regions).map_err(|e| MemError::Layout(e.to_string()))?;
        Ok(Self { map: Arc::new(map), hot: None, owner: Arc::new(Owner { maps: owner, _lent: lent, plain }) })
    }

    /// Maps memory that another process owns, shared with it. A file that is shorter than its range is refused; one that
    /// shrinks later kills whoever touches what is gone, which is the owner's to avoid.
    ///
    /// # Errors
    /// [`MemError::Map`] when the host refuses, [`MemError::Layout`] for ranges that overlap, are empty or are not in
    /// their file.
    pub fn shared(ranges: &[SharedRange<'_>]) -> Result<Self, MemError> {
        let mut regions = Vec::with_capacity(ranges.len());
        let mut owner = Vec::with_capacity(ranges.len());
        for range in ranges {
            let &SharedRange { at, len: size, file, offset } = range;
            let wrong = || MemError::Layout(format!("{at} of {size} bytes"));
            let refused = |source| MemError::Map { size, source };
            let end = offset.checked_add(size).ok_or_else(wrong)?;
            let len = usize::try_from(size).ok().filter(|n| *n > 0).ok_or_else(wrong)?;
            if at.0.checked_add(size).is_none() || file.metadata().map_err(refused)?.len() < end {
                return Err(wrong());
            }
            // Mapped from the file's start: the offset may be anything.
            let whole = usize::try_from(end).map_err(|_| wrong())?;
            let mine = Mmap::shared_at(file, 0, whole).map_err(refused)?;
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            // SAFETY: `mine` maps offset + len bytes with these permissions and is kept beside the map for as long as any
            // clone of this value lives.
            let map = unsafe { MmapRegion::build_raw(mine.as_ptr().add(whole - len), len, prot, flags) }
                .map_err(|e| MemError::Map { size, source: io::Error::other(e) })?;
            owner.push(mine);
            regions.push(GuestRegionMmap::new(map, GuestAddress(at.0)).ok_or_else(wrong)?);
        }
        regions.sort_by_key(GuestMemoryRegion::start_addr);
        let map = GuestMemoryMmap::from_regions(regions).map_err(|e| MemError::Layout(e.to_string()))?;
        Ok(Self { map: Arc::new(map), hot: None, owner: Arc::new(Owner { maps: owner, _lent: None, plain: false }) })
    }

    /// Has the guest see `len` bytes of `file` from `offset` on at `at`, without a copy: the host's own pages of the file,
    /// until the guest writes to one, which is then its own. All three are multiples of 4 KiB. A file that is written to
    /// meanwhile may show that; one that is cut short ends the machine when the guest looks there.
    ///
    /// Returns whether it was done: not in memory that is shared, of huge pages set aside or bound to a node, and not where
    /// the host can't map that file. Nothing has changed then.
    #[must_use]
    pub fn map_file(&self, at: Gpa, file: &File, offset: u64, len: u64) -> bool {
        let aligned = [at.0, offset, len].iter().all(|n| n.is_multiple_of(4096));
        if !self.owner.plain || !aligned {
            return false;
        }
        let Ok(len) = usize::try_from(len) else { return false };
        let Some(seg) = self.seg(at, len) else { return false };
        let place = self.owner.maps.iter().find_map(|map| {
            let from = (seg.ptr as usize).checked_sub(map.as_ptr() as usize)?;
            (from < map.len()).then_some((map, from))
        });
        place.is_some_and(|(map, from)| {
            map.put(from, len, Some((file.as_raw_fd(), offset)), libc::MAP_PRIVATE | libc::MAP_NORESERVE).is_ok()
        })
    }

    /// The same with memory that comes and goes, which must lie past all that stays.
    ///
    /// # Errors
    /// [`MemError::Layout`] where it does not.
    pub fn with_hot(self, hot: Hot) -> Result<Self, MemError> {
        if self.regions().any(|(at, size, _)| at.0 + size > hot.start().0) {
            return Err(MemError::Layout(format!("memory to plug at {} is not past all other", hot.start())));
        }
        Ok(Self { hot: Some(Arc::new(hot)), ..self })
    }

    /// Memory that comes and goes, if there is any. No method but this one and those that find bytes tells of it.
    #[must_use]
    pub const fn hot(&self) -> Option<&Arc<Hot>> {
        self.hot.as_ref()
    }

    /// Where `len` bytes at `at` are to be looked for.
    #[inline]
    fn around(&self, at: Gpa, len: usize) -> &GuestMemoryMmap<()> {
        match &self.hot {
            Some(hot) if at >= hot.start() && hot.is_plugged(at, len as u64) => hot.map(),
            _ => &self.map,
        }
    }

    /// The map of what stays as rust-vmm crates want it.
    #[must_use]
    pub fn map(&self) -> &GuestMemoryMmap<()> {
        &self.map
    }

    /// Every region of what stays, lowest first: guest address, size in bytes, host address.
    pub fn regions(&self) -> impl Iterator<Item = (Gpa, u64, Hva)> + '_ {
        self.map.iter().map(|r| (Gpa(r.start_addr().0), r.len(), Hva(r.as_ptr() as u64)))
    }

    /// Bytes of RAM in all these regions.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.map.iter().map(|r| r.len()).sum()
    }

    /// A bounded view of `len` bytes at `at`, or `None` if any byte of it is outside one region.
    #[must_use]
    pub fn slice(&self, at: Gpa, len: usize) -> Option<VolatileSlice<'_, impl BitmapSlice>> {
        self.around(at, len).get_slice(GuestAddress(at.0), len).ok()
    }

    /// The same range as an I/O segment. The memory stays mapped while any clone of this value lives, which the holder of
    /// the segment keeps for as long as the request runs.
    #[must_use]
    pub fn seg(&self, at: Gpa, len: usize) -> Option<Seg> {
        let slice = self.slice(at, len)?;
        Some(Seg { ptr: slice.ptr_guard_mut().as_ptr(), len })
    }

    /// Reads a plain value at `at`; `None` outside RAM.
    #[must_use]
    pub fn read<T: ByteValued>(&self, at: Gpa) -> Option<T> {
        self.around(at, size_of::<T>()).read_obj(GuestAddress(at.0)).ok()
    }

    /// Writes a plain value at `at`; `None` outside RAM.
    pub fn write<T: ByteValued>(&self, at: Gpa, value: T) -> Option<()> {
        self.around(at, size_of::<T>()).write_obj(value, GuestAddress(at.0)).ok()
    }

    /// Copies `data` into guest memory.
    ///
    /// # Errors
    /// [`MemError::Outside`] if any byte falls outside RAM; some bytes may have been written.
    pub fn write_bytes(&self, at: Gpa, data: &[u8]) -> Result<(), MemError> {
        self.around(at, data.len()).write_slice(data, GuestAddress(at.0)).map_err(|_| MemError::Outside(at, data.len()))
    }

    /// Copies guest memory into `data`.
    ///
    /// # Errors
    /// [`MemError::Outside`] if any byte falls outside RAM.
    pub fn read_bytes(&self, at: Gpa, data: &mut [u8]) -> Result<(), MemError> {
        self.around(at, data.len()).read_slice(data, GuestAddress(at.0)).map_err(|_| MemError::Outside(at, data.len()))
    }

    /// Atomic load of an aligned value; `None` outside RAM or misaligned.
    #[must_use]
    pub fn load<T: AtomicAccess>(&self, at: Gpa, order: Ordering) -> Option<T> {
        self.around(at, size_of::<T>()).load(GuestAddress(at.0), order).ok()
    }

    /// Atomic store of an aligned value; `None` outside RAM or misaligned.
    pub fn store<T: AtomicAccess>(&self, at: Gpa, value: T, order: Ordering) -> Option<()> {
        self.around(at, size_of::<T>()).store(value, GuestAddress(at.0), order).ok()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn views_never_cross_the_end() {
        let ram = GuestRam::anonymous(&[(Gpa(0), 0x4000), (Gpa(0x10_0000), 0x1000)]).unwrap();
        assert_eq!(ram.size(), 0x5000);
        assert!(ram.slice(Gpa(0x3fff), 1).is_some());
        assert!(ram.slice(Gpa(0x3fff), 2).is_none());
        assert!(ram.seg(Gpa(u64::MAX), 2).is_none());
        assert!(ram.write(Gpa(0x10_0000), 0xabcdu16).is_some());
        assert_eq!(ram.load::<u16>(Gpa(0x10_0000), Ordering::Acquire), Some(0xabcd));
        assert!(ram.load::<u16>(Gpa(0x10_0001), Ordering::Acquire).is_none(), "misaligned");
        assert!(ram.write_bytes(Gpa(0x3ffe), &[1, 2, 3]).is_err());
    }
}
