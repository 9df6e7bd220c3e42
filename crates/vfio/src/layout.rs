// SPDX-License-Identifier: Apache-2.0
//! What a device is made of as VFIO offers it: regions, interrupts; and which parts of a BAR a guest may reach directly.
//! Called while a device is made, on the main thread.

use std::io;
use std::ops::Range;
use std::os::fd::{OwnedFd, RawFd};

/// Region number of configuration space; BARs 0 to 5 have their own numbers.
pub const CONFIG: u32 = 7;
const PAGE: u64 = 4096;

/// Kinds of interrupt, by their index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Interrupts {
    /// The interrupt pin. The host masks it with each interrupt.
    Pin = 0,
    /// A message, or 2, 4, ... 32 of them.
    Msi = 1,
    /// A table of messages.
    MsiX = 2,
}

/// A region: a BAR, or configuration space.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Region {
    /// Bytes; 0 is none.
    pub size: u64,
    /// Can be read.
    pub read: bool,
    /// Can be written.
    pub write: bool,
    /// Parts that may be mapped, by their offsets.
    pub mappable: Vec<Range<u64>>,
}

/// A device as VFIO offers it. The real one makes system calls; tests have one of their own.
pub trait Hardware: Send {
    /// What region `index` is.
    ///
    /// # Errors
    /// The host's.
    fn region(&self, index: u32) -> io::Result<Region>;

    /// Reads from a region, as one access where `data` is 1, 2, 4 or 8 bytes.
    ///
    /// # Errors
    /// The host's.
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()>;

    /// Writes there.
    ///
    /// # Errors
    /// The host's.
    fn write(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()>;

    /// How many interrupts of `kind` it has.
    ///
    /// # Errors
    /// The host's.
    fn interrupts(&self, kind: Interrupts) -> io::Result<u32>;

    /// Switches interrupts of `kind` on, each writing to its eventfd, or all of them off when there are none. Other kinds
    /// must be off.
    ///
    /// # Errors
    /// The host's, such as when it is out of interrupt vectors; they are off then.
    fn signal(&self, kind: Interrupts, fds: &[RawFd]) -> io::Result<()>;

    /// Unmasks the interrupt pin, which is switched on, whenever `fd` is written.
    ///
    /// # Errors
    /// The host's.
    fn unmask_on(&self, fd: RawFd) -> io::Result<()>;

    /// Brings the device back to what it was after power-on, where it can do that.
    ///
    /// # Errors
    /// The host's.
    fn reset(&self) -> io::Result<()>;

    /// A descriptor to map `region` from, and the region's place in it.
    ///
    /// # Errors
    /// The host's.
    fn map(&self, region: u32) -> io::Result<(OwnedFd, u64)>;
}

/// The parts of `region` that a guest may reach directly: those that can be mapped, in whole pages, without `hidden`.
#[must_use]
pub fn direct_parts(region: &Region, hidden: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut parts: Vec<Range<u64>> = Vec::new();
    for part in &region.mappable {
        let end = part.end.min(region.size) / PAGE * PAGE;
        parts.extend(part.start.checked_next_multiple_of(PAGE).map(|start| start..end));
    }
    for hole in hidden {
        let hole = hole.start / PAGE * PAGE..hole.end.next_multiple_of(PAGE);
        parts =
            parts.into_iter().flat_map(|p| [p.start..p.end.min(hole.start), p.start.max(hole.end)..p.end]).collect();
    }
    parts.retain(|part| part.start < part.end);
    parts
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "a range is what is meant")]
mod tests {
    use super::*;

    fn region(size: u64, mappable: &[Range<u64>]) -> Region {
        Region { size, read: true, write: true, mappable: mappable.to_vec() }
    }

    #[test]
    fn tables_are_cut_out_by_pages() {
        let whole = region(0x4000, &[0..0x4000]);
        assert_eq!(direct_parts(&whole, &[]), [0..0x4000]);
        assert_eq!(direct_parts(&whole, &[0x2000..0x2410, 0x3000..0x3008]), [0..0x2000]);
        assert_eq!(direct_parts(&whole, &[0x1ff8..0x2008]), [0..0x1000, 0x3000..0x4000]);
        assert_eq!(direct_parts(&whole, &[0..0x10]), [0x1000..0x4000]);
        assert_eq!(direct_parts(&whole, &[0..0x4000]), []);
    }

    #[test]
    fn only_whole_pages_of_what_can_be_mapped() {
        assert_eq!(direct_parts(&region(0x100, &[0..0x100]), &[]), []);
        let sparse = region(0x1_0000, &[0x800..0x3000, 0x8000..0x8fff, 0xf000..0x2_0000]);
        assert_eq!(direct_parts(&sparse, &[0x2000..0x2004]), [0x1000..0x2000, 0xf000..0x1_0000]);
        assert_eq!(direct_parts(&region(0x4000, &[]), &[]), []);
    }
}
