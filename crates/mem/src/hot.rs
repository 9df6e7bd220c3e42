// SPDX-License-Identifier: Apache-2.0
//! Memory that comes and goes while the guest runs: a range of addresses with something behind all of it, of which the guest
//! has the blocks that are plugged.
//!
//! The memory device (`virtio::mem`) marks blocks, on a vCPU's thread; every thread that looks for guest memory asks for
//! the marks, without a lock. What is not plugged can be found by none of them. A request that found its memory before the
//! guest took it out may still reach it: the bytes are nobody's then, and the mapping stays.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use base::mmap::Mmap;
use base::{Gpa, Hva};
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use crate::ram::MemError;

/// The range and its marks.
#[derive(Debug)]
pub struct Hot {
    start: Gpa,
    size: u64,
    /// Bytes of a block, a power of two.
    block: u64,
    /// One bit for each block that is plugged.
    plugged: Box<[AtomicU64]>,
    /// All of the range.
    map: GuestMemoryMmap<()>,
    /// Others see what is written: holes are made in the file.
    shared: bool,
    /// The memory behind `map`.
    behind: Mmap,
}

impl Hot {
    /// The memory of `behind`, which is readable and writable and whole blocks long, at `start`; nothing is plugged.
    ///
    /// # Errors
    /// [`MemError::Layout`] for what is no range of blocks.
    pub fn new(start: Gpa, behind: Mmap, block: u64, shared: bool) -> Result<Self, MemError> {
        let size = behind.len() as u64;
        let wrong = || MemError::Layout(format!("{size} bytes to plug at {start} in blocks of {block}"));
        let fits =
            block.is_power_of_two() && block >= 4096 && size.is_multiple_of(block) && start.0.is_multiple_of(block);
        if !fits || start.checked_add(size).is_none() {
            return Err(wrong());
        }
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: `behind` maps as many bytes with these permissions, and lives beside the map and as long.
        let map = unsafe { MmapRegion::build_raw(behind.as_ptr(), behind.len(), prot, flags) }.map_err(|_| wrong())?;
        let region = GuestRegionMmap::new(map, GuestAddress(start.0)).ok_or_else(wrong)?;
        let map = GuestMemoryMmap::from_regions(vec![region]).map_err(|_| wrong())?;
        let plugged = (0..(size / block).div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Ok(Self { start, size, block, plugged, map, shared, behind })
    }

    /// Its first address.
    #[must_use]
    pub const fn start(&self) -> Gpa {
        self.start
    }

    /// Its bytes, plugged or not.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// Bytes of a block.
    #[must_use]
    pub const fn block(&self) -> u64 {
        self.block
    }

    /// Where it is in this process.
    #[must_use]
    pub fn host(&self) -> Hva {
        Hva(self.behind.as_ptr() as u64)
    }

    pub(crate) const fn map(&self) -> &GuestMemoryMmap<()> {
        &self.map
    }

    /// The blocks that `len` bytes at `at` lie in, if they lie in the range.
    fn blocks(&self, at: Gpa, len: u64) -> Option<std::ops::Range<u64>> {
        let from = at.0.checked_sub(self.start.0)?;
        let end = from.checked_add(len)?;
        (end <= self.size).then(|| from / self.block..end.div_ceil(self.block).max(from / self.block + 1))
    }

    fn has(&self, block: u64) -> bool {
        let word = self.plugged.get((block / 64) as usize);
        word.is_some_and(|word| word.load(Ordering::Acquire) & 1 << (block % 64) != 0)
    }

    /// Whether all blocks that `len` bytes at `at` lie in are plugged.
    #[must_use]
    pub fn is_plugged(&self, at: Gpa, len: u64) -> bool {
        self.blocks(at, len).is_some_and(|mut blocks| blocks.all(|block| self.has(block)))
    }

    /// Whether any of them is.
    #[must_use]
    pub fn is_any_plugged(&self, at: Gpa, len: u64) -> bool {
        self.blocks(at, len).is_some_and(|mut blocks| blocks.any(|block| self.has(block)))
    }

    /// Marks the blocks that `len` bytes at `at` lie in as plugged or not. Blocks outside the range are left out.
    pub fn mark(&self, at: Gpa, len: u64, plugged: bool) {
        for block in self.blocks(at, len).unwrap_or_default() {
            let Some(word) = self.plugged.get((block / 64) as usize) else { continue };
            if plugged {
                word.fetch_or(1 << (block % 64), Ordering::AcqRel);
            } else {
                word.fetch_and(!(1 << (block % 64)), Ordering::AcqRel);
            }
        }
    }

    /// Gives what is behind `len` bytes at `at` back to the host.
    ///
    /// # Errors
    /// What the host says: a file may be unable to shrink.
    pub fn discard(&self, at: Gpa, len: u64) -> io::Result<()> {
        let (from, len) = self.place(at, len)?;
        self.behind.discard(from, len, self.shared)
    }

    /// Makes `len` bytes at `at` exist.
    ///
    /// # Errors
    /// What the host says.
    pub fn populate(&self, at: Gpa, len: u64) -> io::Result<()> {
        let (from, len) = self.place(at, len)?;
        self.behind.populate_part(from, len)
    }

    fn place(&self, at: Gpa, len: u64) -> io::Result<(usize, usize)> {
        let from = at.0.checked_sub(self.start.0).and_then(|from| usize::try_from(from).ok());
        from.zip(usize::try_from(len).ok()).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::GuestRam;

    const START: Gpa = Gpa(0x1_8000_0000);

    fn ram() -> GuestRam {
        let hot = Hot::new(START, Mmap::anonymous(8 << 20).unwrap(), 2 << 20, false).unwrap();
        GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap().with_hot(hot).unwrap()
    }

    #[test]
    fn only_what_is_plugged_is_found() {
        let ram = ram();
        let hot = ram.hot().unwrap().clone();
        let at = |mib: u64| Gpa(START.0 + (mib << 20));
        assert!(ram.seg(START, 1).is_none() && ram.write(START, 1u8).is_none());
        hot.mark(at(2), 4 << 20, true);
        assert!(
            hot.is_plugged(at(2), 4 << 20) && !hot.is_plugged(at(0), 4 << 20) && hot.is_any_plugged(at(0), 4 << 20)
        );
        assert!(!hot.is_any_plugged(at(6), 2 << 20) && !hot.is_plugged(at(6), 4 << 20));
        assert!(ram.seg(at(2), 4 << 20).is_some(), "a buffer may go over blocks");
        assert!(ram.seg(Gpa(at(2).0 - 1), 2).is_none() && ram.seg(Gpa(at(6).0 - 1), 2).is_none());
        ram.write(at(3), 0x1234_u16).unwrap();
        assert_eq!(ram.load::<u16>(at(3), Ordering::Acquire), Some(0x1234));
        assert!(ram.write_bytes(Gpa(at(6).0 - 1), &[1, 2]).is_err());
        hot.mark(at(2), 2 << 20, false);
        assert!(ram.read::<u16>(at(3)).is_none());
        hot.discard(at(2), 2 << 20).unwrap();
        hot.mark(at(2), 2 << 20, true);
        assert_eq!(ram.read::<u16>(at(3)), Some(0), "what was given back is gone");
        assert!(ram.seg(Gpa(u64::MAX), 2).is_none() && ram.seg(at(8), 0).is_none());
        assert_eq!((ram.size(), ram.regions().count()), (1 << 20, 1), "what stays is told alone");
    }

    #[test]
    fn what_is_no_range_is_refused() {
        let behind = || Mmap::anonymous(8 << 20).unwrap();
        assert!(Hot::new(Gpa(4096), behind(), 2 << 20, false).is_err());
        assert!(Hot::new(START, behind(), 3 << 20, false).is_err());
        assert!(Hot::new(START, behind(), 16 << 20, false).is_err());
        assert!(Hot::new(Gpa(u64::MAX << 21), behind(), 2 << 20, false).is_err());
        let hot = Hot::new(Gpa(0), behind(), 2 << 20, false).unwrap();
        assert!(GuestRam::anonymous(&[(Gpa(0), 4096)]).unwrap().with_hot(hot).is_err());
    }

    /// Marks against a plain set, and every lookup against the marks.
    #[test]
    fn marks_are_as_a_set_of_blocks_would_have_it() {
        let ram = ram();
        let hot = ram.hot().unwrap().clone();
        let (mut set, mut seed) = ([false; 4], 1u64);
        for _ in 0..2000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (from, count) = ((seed >> 33) % 4, 1 + (seed >> 40) % 4);
            let (at, len, on) = (Gpa(START.0 + (from << 21)), count << 21, seed >> 50 & 1 == 1);
            hot.mark(at, len, on);
            if from + count <= 4 {
                set[from as usize..(from + count) as usize].fill(on);
            }
            let (offset, len) = ((seed >> 20) % (8 << 20), 1 + (seed >> 12) % (4 << 20));
            let end = offset + len;
            let all = end <= 8 << 20 && (offset >> 21..=(end - 1) >> 21).all(|block| set[block as usize]);
            assert_eq!(ram.seg(Gpa(START.0 + offset), len as usize).is_some(), all, "{offset:#x} {len:#x} {set:?}");
        }
    }
}
