// SPDX-License-Identifier: Apache-2.0
//! Entries of the L1 and L2 tables: what an entry says about a guest cluster, and how it is written. The engine classifies one
//! on every lookup, so all of this is small, inlines, and allocates only to complain.
//!
//! A standard L2 entry is one number; an extended one (32 subclusters) is followed by a bitmap: "allocated" in the low half,
//! "reads as zeroes" in the high half, bit `i` of each for subcluster `i`.

use super::FormatError;

/// Bit 63 of L1 and standard L2 entries: what it points to has a refcount of exactly one, so it may be written in place.
pub const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry: a compressed cluster.
pub const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of a standard L2 entry: reads as zeroes (version 3, not with extended entries).
pub const ZERO: u64 = 1;
/// The bits of an L1 or standard L2 entry that are an offset.
pub const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
/// Reserved bits of an L1 entry.
pub const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
/// Reserved bits of a standard L2 entry.
pub const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;
/// Subclusters in a cluster with extended entries.
pub const SUBCLUSTERS: u32 = 32;
/// Compressed data is counted in sectors of so many bytes.
pub const COMPRESSED_SECTOR: u64 = 512;

/// What of an image's header decides how its entries are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Log2 of the cluster size: 9 to 21.
    pub cluster_bits: u32,
    /// L2 entries are extended: 16 bytes, with subclusters.
    pub extended: bool,
    /// Guest data is in a file of its own, each cluster at its guest offset.
    pub data_file: bool,
    /// Version 3: the zero flag exists.
    pub zero_flag: bool,
}

/// What an L2 entry says of one guest cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// Nothing here: the backing file's content, or zeroes without one.
    Unallocated,
    /// All of it reads as zeroes; `host` may keep a cluster for later.
    Zero {
        /// A cluster set aside.
        host: Option<u64>,
        /// That cluster's refcount is one.
        copied: bool,
    },
    /// All of it is in the host cluster.
    Data {
        /// Offset of the cluster in the file (the data file if there is one).
        host: u64,
        /// Its refcount is one: it may be written in place.
        copied: bool,
    },
    /// Extended entries: subclusters of different state, or a cluster set aside of which nothing is used yet.
    Partial(Partial),
    /// All of it is the outcome of decompressing a byte range.
    Compressed(Compressed),
}

/// A cluster whose subclusters differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Partial {
    /// Offset of the host cluster; always there if `allocated` has a bit.
    pub host: Option<u64>,
    /// Its refcount is one.
    pub copied: bool,
    /// Bit `i`: subcluster `i` is in the host cluster.
    pub allocated: u32,
    /// Bit `i`: subcluster `i` reads as zeroes. No bit is in both.
    pub zero: u32,
}

/// Where compressed data is. The range ends at a sector's end: the stream itself may end earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compressed {
    /// First byte in the file; need not be aligned.
    pub host: u64,
    /// Bytes up to the end of its last 512-byte sector.
    pub len: u64,
}

impl Compressed {
    /// The host clusters that the range touches: each has a reference of this entry. Empty never.
    pub fn clusters(&self, cluster_bits: u32) -> std::ops::RangeInclusive<u64> {
        self.host >> cluster_bits..=(self.host + self.len - 1) >> cluster_bits
    }
}

/// An L2 table as an L1 entry names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L2Table {
    /// Offset of the table in the file.
    pub offset: u64,
    /// Its refcount is one.
    pub copied: bool,
}

impl Layout {
    /// Bytes in a cluster.
    #[inline]
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes in an L2 entry: 8 or 16.
    #[inline]
    pub fn entry_size(&self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    /// Log2 of the entries in an L2 table.
    #[inline]
    pub fn l2_bits(&self) -> u32 {
        self.cluster_bits - if self.extended { 4 } else { 3 }
    }

    /// Log2 of the bytes of a subcluster; a cluster's without extended entries.
    #[inline]
    pub fn subcluster_bits(&self) -> u32 {
        if self.extended { self.cluster_bits - 5 } else { self.cluster_bits }
    }

    /// L1 entries that a disk of `size` bytes needs.
    pub fn l1_entries(&self, size: u64) -> u64 {
        let shift = self.cluster_bits + self.l2_bits();
        (size >> shift) + u64::from(size & ((1 << shift) - 1) != 0)
    }

    /// Reads an L1 entry. `None`: no L2 table, all its clusters are unallocated.
    ///
    /// # Errors
    /// Reserved bits set or a table that is not at a cluster's start.
    #[inline]
    pub fn l1_entry(&self, raw: u64) -> Result<Option<L2Table>, FormatError> {
        let offset = raw & OFFSET_MASK;
        if raw & L1_RESERVED != 0 {
            return FormatError::corrupt(format!("L1 entry {raw:#x} has reserved bits set"));
        }
        if offset & (self.cluster_size() - 1) != 0 {
            return FormatError::corrupt(format!("L2 table at {offset:#x}, not at a cluster's start"));
        }
        Ok((offset != 0).then_some(L2Table { offset, copied: raw & COPIED != 0 }))
    }

    /// Reads an L2 entry and its bitmap (0 with standard entries) for the cluster at `guest`, of which only images with a
    /// data file make use: there host and guest offset must be equal.
    ///
    /// # Errors
    /// An entry that the format does not allow; what is read from it or written to it would be wrong.
    #[inline]
    pub fn classify(&self, raw: u64, bitmap: u64, guest: u64) -> Result<Mapping, FormatError> {
        if raw & COMPRESSED != 0 {
            return self.compressed(raw, bitmap);
        }
        let offset = raw & OFFSET_MASK;
        let copied = raw & COPIED != 0;
        if raw & L2_RESERVED != 0 || (raw & ZERO != 0 && (self.extended || !self.zero_flag)) {
            return FormatError::corrupt(format!("L2 entry {raw:#x} of guest offset {guest:#x} has reserved bits set"));
        }
        if offset & (self.cluster_size() - 1) != 0 {
            return FormatError::corrupt(format!(
                "data of guest offset {guest:#x} at {offset:#x}, not at a cluster's start"
            ));
        }
        let host = (offset != 0 || (copied && self.data_file)).then_some(offset);
        // Without a host cluster the bit says nothing.
        let copied = copied && host.is_some();
        if self.data_file && host.is_some_and(|h| h != guest) {
            return FormatError::corrupt(format!(
                "guest offset {guest:#x} at {offset:#x} of the data file, where it must be at its own offset"
            ));
        }
        if self.extended {
            return subclusters(host, copied, bitmap, guest);
        }
        Ok(match host {
            host if raw & ZERO != 0 => Mapping::Zero { host, copied },
            Some(host) => Mapping::Data { host, copied },
            None => Mapping::Unallocated,
        })
    }

    fn compressed(&self, raw: u64, bitmap: u64) -> Result<Mapping, FormatError> {
        if self.data_file {
            return FormatError::corrupt(format!("compressed cluster ({raw:#x}) in an image with a data file"));
        }
        if self.extended && bitmap != 0 {
            return FormatError::corrupt(format!("compressed cluster ({raw:#x}) with a bitmap of subclusters"));
        }
        let shift = self.compressed_shift();
        let host = raw & ((1 << shift) - 1);
        // COPIED has no meaning here and does no harm in reading; a check reports it.
        let sectors = ((raw & (COMPRESSED - 1)) >> shift) + 1;
        if host > OFFSET_MASK | 0x1ff || host < self.cluster_size() {
            return FormatError::corrupt(format!("compressed data at {host:#x}"));
        }
        let len = sectors * COMPRESSED_SECTOR - host % COMPRESSED_SECTOR;
        Ok(Mapping::Compressed(Compressed { host, len }))
    }

    /// The bit of a compressed entry where the count of sectors begins.
    #[inline]
    fn compressed_shift(&self) -> u32 {
        62 - (self.cluster_bits - 8)
    }

    /// The entry and bitmap that [`Layout::classify`] reads as `mapping`. Offsets must be what `classify` would accept; for
    /// [`Mapping::Compressed`] a `len` that does not end at a sector's end is rounded up to it. `None` if a compressed range
    /// is beyond what an entry of this cluster size can say.
    #[inline]
    pub fn encode(&self, mapping: &Mapping) -> Option<(u64, u64)> {
        let place =
            |host: Option<u64>, copied: bool| host.unwrap_or(0) | if copied && host.is_some() { COPIED } else { 0 };
        let all = u64::from(u32::MAX);
        Some(match *mapping {
            Mapping::Unallocated => (0, 0),
            Mapping::Zero { host, copied } if self.extended => (place(host, copied), all << 32),
            Mapping::Zero { host, copied } => (place(host, copied) | ZERO, 0),
            Mapping::Data { host, copied } => (place(Some(host), copied), if self.extended { all } else { 0 }),
            Mapping::Partial(p) => (place(p.host, p.copied), u64::from(p.zero) << 32 | u64::from(p.allocated)),
            Mapping::Compressed(c) => {
                let shift = self.compressed_shift();
                let last = c.host.checked_add(c.len)?.checked_sub(1)?;
                let more = (last / COMPRESSED_SECTOR).checked_sub(c.host / COMPRESSED_SECTOR)?;
                if c.host >= 1 << shift || c.host > OFFSET_MASK | 0x1ff || more >= 1 << (62 - shift) {
                    return None;
                }
                (COMPRESSED | more << shift | c.host, 0)
            }
        })
    }
}

fn subclusters(host: Option<u64>, copied: bool, bitmap: u64, guest: u64) -> Result<Mapping, FormatError> {
    let (allocated, zero) = (bitmap as u32, (bitmap >> 32) as u32);
    if allocated & zero != 0 {
        return FormatError::corrupt(format!("subclusters of guest offset {guest:#x} are both allocated and zero"));
    }
    Ok(match host {
        None if allocated != 0 => {
            return FormatError::corrupt(format!("subclusters of guest offset {guest:#x} are allocated nowhere"));
        }
        None if zero == 0 => Mapping::Unallocated,
        host if zero == u32::MAX => Mapping::Zero { host, copied },
        Some(host) if allocated == u32::MAX => Mapping::Data { host, copied },
        host => Mapping::Partial(Partial { host, copied, allocated, zero }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STANDARD: Layout = Layout { cluster_bits: 16, extended: false, data_file: false, zero_flag: true };
    const EXTENDED: Layout = Layout { extended: true, ..STANDARD };
    const EXTERNAL: Layout = Layout { data_file: true, ..STANDARD };
    const OLD: Layout = Layout { zero_flag: false, ..STANDARD };

    #[test]
    fn standard_entries() {
        let read = |raw| STANDARD.classify(raw, 0, 0);
        assert_eq!(read(0), Ok(Mapping::Unallocated));
        assert_eq!(read(1), Ok(Mapping::Zero { host: None, copied: false }));
        assert_eq!(read(0x50000), Ok(Mapping::Data { host: 0x50000, copied: false }));
        assert_eq!(read(COPIED | 0x50000), Ok(Mapping::Data { host: 0x50000, copied: true }));
        assert_eq!(read(COPIED | 0x50001), Ok(Mapping::Zero { host: Some(0x50000), copied: true }));
        assert_eq!(read(COPIED), Ok(Mapping::Unallocated), "a bit without a meaning");
        for bad in [0x50200, 0x50002, 1 << 56, 1 << 61 | 0x50000, COMPRESSED] {
            assert!(read(bad).is_err(), "{bad:#x}");
        }
        assert!(OLD.classify(1, 0, 0).is_err(), "version 2 has no zero flag");
        assert!(OLD.classify(COPIED | 0x50000, 0, 0).is_ok());
    }

    #[test]
    fn data_file_entries() {
        assert_eq!(EXTERNAL.classify(COPIED, 0, 0), Ok(Mapping::Data { host: 0, copied: true }));
        assert_eq!(EXTERNAL.classify(0, 0, 0), Ok(Mapping::Unallocated));
        assert_eq!(EXTERNAL.classify(COPIED | 0x50000, 0, 0x50000), Ok(Mapping::Data { host: 0x50000, copied: true }));
        assert!(EXTERNAL.classify(COPIED | 0x50000, 0, 0x60000).is_err());
        assert!(EXTERNAL.classify(COMPRESSED | 0x50000, 0, 0x50000).is_err());
    }

    #[test]
    fn extended_entries() {
        let read = |raw, bitmap| EXTENDED.classify(raw, bitmap, 0);
        let all = u64::from(u32::MAX);
        assert_eq!(read(0, 0), Ok(Mapping::Unallocated));
        assert_eq!(read(0, all << 32), Ok(Mapping::Zero { host: None, copied: false }));
        assert_eq!(read(COPIED | 0x50000, all), Ok(Mapping::Data { host: 0x50000, copied: true }));
        assert_eq!(
            read(COPIED | 0x50000, 0),
            Ok(Mapping::Partial(Partial { host: Some(0x50000), copied: true, allocated: 0, zero: 0 })),
            "set aside, nothing in use"
        );
        assert_eq!(
            read(0x50000, 2 << 32 | 1),
            Ok(Mapping::Partial(Partial { host: Some(0x50000), copied: false, allocated: 1, zero: 2 }))
        );
        assert_eq!(
            read(0, 2 << 32),
            Ok(Mapping::Partial(Partial { host: None, copied: false, allocated: 0, zero: 2 }))
        );
        for (raw, bitmap) in [(0x50000, 1 << 32 | 1), (0, 1), (0x50001, all), (1, 0), (COMPRESSED | 0x50000, 1)] {
            assert!(read(raw, bitmap).is_err(), "{raw:#x} {bitmap:#x}");
        }
    }

    #[test]
    fn compressed_entries() {
        // 64 KiB clusters: the count of sectors begins at bit 54.
        let raw = COMPRESSED | 3 << 54 | 0x50123;
        let expect = Compressed { host: 0x50123, len: 4 * 512 - 0x123 };
        assert_eq!(STANDARD.classify(raw, 0, 0), Ok(Mapping::Compressed(expect)));
        assert_eq!(STANDARD.encode(&Mapping::Compressed(Compressed { host: 0x50123, len: 1500 })), Some((raw, 0)));
        assert_eq!(expect.clusters(16), 5..=5);
        assert_eq!(Compressed { host: 0x5ff00, len: 257 }.clusters(16), 5..=6);
        assert_eq!(STANDARD.encode(&Mapping::Compressed(Compressed { host: 1 << 54, len: 1 })), None);
        assert_eq!(STANDARD.encode(&Mapping::Compressed(Compressed { host: 0x50000, len: 257 * 512 })), None);
        let tiny = Layout { cluster_bits: 9, ..STANDARD };
        assert!(tiny.classify(COMPRESSED | 1 << 60, 0, 0).is_err(), "beyond bit 55");
        assert!(STANDARD.classify(COMPRESSED | 0x123, 0, 0).is_err(), "in the header");
    }

    #[test]
    fn l1_entries() {
        assert_eq!(STANDARD.l1_entry(0), Ok(None));
        assert_eq!(STANDARD.l1_entry(COPIED | 0x40000), Ok(Some(L2Table { offset: 0x40000, copied: true })));
        assert!(STANDARD.l1_entry(0x40200).is_err());
        assert!(STANDARD.l1_entry(0x40001).is_err());
        assert!(STANDARD.l1_entry(1 << 62).is_err());
        assert_eq!(STANDARD.l1_entries(0), 0);
        assert_eq!(STANDARD.l1_entries(512 << 20), 1);
        assert_eq!(STANDARD.l1_entries((512 << 20) + 1), 2);
        assert_eq!(EXTENDED.l1_entries(512 << 20), 2);
        assert_eq!(STANDARD.l1_entries(u64::MAX), 1 << 35);
    }

    fn layouts() -> impl Strategy<Value = Layout> {
        (9u32..=21, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(bits, extended, data_file, v3)| Layout {
            cluster_bits: if extended { bits.max(14) } else { bits },
            extended,
            data_file,
            zero_flag: v3 || extended || data_file,
        })
    }

    proptest! {
        /// Any number at all is read without a panic, and what is accepted is written back as it was.
        #[test]
        fn what_is_read_is_written_back(layout in layouts(), raw in any::<u64>(), bitmap in any::<u64>(), small in any::<bool>(), guest in 0u64..1000) {
            let guest = guest << layout.cluster_bits;
            let raw = match (small, layout.data_file) {
                (true, true) => raw & (COPIED | ZERO) | guest,
                (true, false) => raw & (COPIED | COMPRESSED | ZERO | 0xff << layout.cluster_bits),
                _ => raw,
            };
            let bitmap = if layout.extended { bitmap & bitmap.rotate_left(32).wrapping_neg() } else { 0 };
            if let Ok(mapping) = layout.classify(raw, bitmap, guest) {
                let meaningless = raw & COMPRESSED != 0 || (raw & OFFSET_MASK == 0 && !layout.data_file);
                let ignored = if meaningless { COPIED } else { 0 };
                prop_assert_eq!(layout.encode(&mapping), Some((raw & !ignored, bitmap)));
                if let Mapping::Compressed(c) = mapping {
                    prop_assert!(c.len > 0 && (c.host + c.len) % 512 == 0);
                }
            }
            let _ = layout.l1_entry(raw);
        }
    }
}
