// SPDX-License-Identifier: Apache-2.0
//! The directory of persistent dirty bitmaps and the tables it points to. Read and written by the offline editor; the engine
//! only marks bitmaps as in use, or refuses images that have enabled ones.

use super::entry::OFFSET_MASK;
use super::{FormatError, be16, be32, be64};

/// Flag: not closed cleanly, content unknown.
pub const IN_USE: u32 = 1;
/// Flag: enabled, every writer must keep it.
pub const AUTO: u32 = 1 << 1;
/// Flag: usable even by who doesn't know its extra data.
pub const EXTRA_COMPATIBLE: u32 = 1 << 2;
/// Log2 of the bytes that a bit stands for.
pub const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;
/// The longest name in bytes.
pub const MAX_NAME: usize = 1023;
/// The most entries in a bitmap's table.
pub const MAX_TABLE_ENTRIES: u32 = 0x800_0000 / 8;
/// Bytes of a directory entry before extra data and name.
const FIXED: usize = 24;

/// One bitmap as the directory has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Offset of its table.
    pub table: u64,
    /// Entries in that table, a cluster of bits each.
    pub entries: u32,
    /// [`IN_USE`], [`AUTO`], [`EXTRA_COMPATIBLE`].
    pub flags: u32,
    /// Log2 of the bytes that a bit stands for.
    pub granularity_bits: u8,
    /// Its name.
    pub name: String,
    /// Data of later versions, kept as it is.
    pub extra: Vec<u8>,
}

/// Reads a directory of `count` bitmaps.
///
/// # Errors
/// Entries that are cut off or out of the format's limits, names that occur twice.
pub fn parse(bytes: &[u8], count: u32, cluster_bits: u32) -> Result<Vec<Bitmap>, FormatError> {
    let mut found: Vec<Bitmap> = Vec::new();
    let mut names = std::collections::HashSet::new();
    let mut at = 0;
    for number in 1..=count {
        let cut = || FormatError::Corrupt(format!("bitmap {number} of {count} is cut off"));
        let entry = bytes.get(at..).filter(|e| e.len() >= FIXED).ok_or_else(cut)?;
        let (name, extra) = (be16(entry, 18) as usize, be32(entry, 20) as usize);
        let len = FIXED.saturating_add(extra).saturating_add(name);
        let entry = entry.get(..len).ok_or_else(cut)?;
        let bitmap = Bitmap {
            table: be64(entry, 0),
            entries: be32(entry, 8),
            flags: be32(entry, 12),
            granularity_bits: entry[17],
            name: String::from_utf8(entry[FIXED + extra..].to_vec())
                .map_err(|_| FormatError::Unsupported(format!("the name of bitmap {number} is not UTF-8")))?,
            extra: entry[FIXED..FIXED + extra].to_vec(),
        };
        let bad = entry[16] != 1
            || bitmap.flags & !7 != 0
            || !GRANULARITY_BITS.contains(&bitmap.granularity_bits)
            || !(1..=MAX_NAME).contains(&name)
            || !(1..=MAX_TABLE_ENTRIES).contains(&bitmap.entries)
            || bitmap.table == 0
            || bitmap.table & ((1 << cluster_bits) - 1) != 0
            || bitmap.table > OFFSET_MASK;
        if bad || !names.insert(bitmap.name.clone()) {
            return FormatError::corrupt(format!("bitmap {number} of {count} has an impossible directory entry"));
        }
        found.push(bitmap);
        at = (at + len).next_multiple_of(8);
    }
    Ok(found)
}

/// The directory's bytes.
pub fn serialize(bitmaps: &[Bitmap]) -> Vec<u8> {
    let mut out = Vec::new();
    for b in bitmaps {
        out.extend(b.table.to_be_bytes());
        out.extend(b.entries.to_be_bytes());
        out.extend(b.flags.to_be_bytes());
        out.extend([1, b.granularity_bits]);
        out.extend((b.name.len() as u16).to_be_bytes());
        out.extend((b.extra.len() as u32).to_be_bytes());
        out.extend(&b.extra);
        out.extend(b.name.as_bytes());
        out.resize(out.len().next_multiple_of(8), 0);
    }
    out
}

/// Where a cluster of bits is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bits {
    /// Nowhere: all clear.
    Clear,
    /// Nowhere: all set.
    Set,
    /// In the cluster at this offset.
    At(u64),
}

/// Reads an entry of a bitmap's table.
///
/// # Errors
/// Reserved bits or an offset that is not at a cluster's start.
pub fn table_entry(raw: u64, cluster_bits: u32) -> Result<Bits, FormatError> {
    let offset = raw & OFFSET_MASK;
    match raw & !OFFSET_MASK {
        0 if offset == 0 => Ok(Bits::Clear),
        1 if offset == 0 => Ok(Bits::Set),
        0 if offset & ((1 << cluster_bits) - 1) == 0 => Ok(Bits::At(offset)),
        _ => FormatError::corrupt(format!("bitmap table entry {raw:#x}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn table_entries() {
        assert_eq!(table_entry(0, 16), Ok(Bits::Clear));
        assert_eq!(table_entry(1, 16), Ok(Bits::Set));
        assert_eq!(table_entry(0x20000, 16), Ok(Bits::At(0x20000)));
        for bad in [0x20001, 0x20200, 2, 1 << 56] {
            assert!(table_entry(bad, 16).is_err(), "{bad:#x}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(all in prop::collection::vec(("[a-z ]{1,20}", 1u64..1000, 1u32..9, 0u32..8, 9u8..32, 0usize..9), 0..6), at in 0usize..300, value in any::<u8>()) {
            let mut bitmaps: Vec<Bitmap> = Vec::new();
            for (name, table, entries, flags, granularity_bits, extra) in all {
                if bitmaps.iter().all(|b| b.name != name) {
                    bitmaps.push(Bitmap { table: table << 16, entries, flags, granularity_bits, name, extra: vec![3; extra] });
                }
            }
            let mut bytes = serialize(&bitmaps);
            prop_assert_eq!(&parse(&bytes, bitmaps.len() as u32, 16).unwrap(), &bitmaps);
            if !bytes.is_empty() {
                prop_assert!(parse(&bytes[..bytes.len() - 8], bitmaps.len() as u32, 16).is_err());
                let at = at % bytes.len();
                bytes[at] = value;
                let _ = parse(&bytes, bitmaps.len() as u32, 16);
            }
        }
    }
}
