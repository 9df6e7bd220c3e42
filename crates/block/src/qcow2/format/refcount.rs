// SPDX-License-Identifier: Apache-2.0
//! Reference counts: how many times a host cluster is used, in numbers of 1 to 64 bits packed into refcount blocks. Used by
//! the engine's allocator and by the offline editor, each on blocks it has in memory.

use super::FormatError;

/// The most bytes that a refcount table may have (QEMU's limit).
pub const MAX_TABLE_BYTES: u64 = 8 << 20;
/// The bits of a refcount table entry that are its block's offset.
pub const TABLE_OFFSET_MASK: u64 = 0xffff_ffff_ffff_fe00;

/// How wide a count is: `1 << order` bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width {
    order: u32,
}

impl Width {
    /// Sixteen bits: what version 2 always has and version 3 has unless told otherwise.
    pub const DEFAULT: Width = Width { order: 4 };

    /// The width of `1 << order` bits.
    ///
    /// # Errors
    /// More than 64 bits.
    pub fn from_order(order: u32) -> Result<Width, FormatError> {
        if order > 6 {
            return FormatError::corrupt(format!("refcounts of 2^{order} bits, 64 at most are possible"));
        }
        Ok(Width { order })
    }

    /// The width of `bits` bits, if that is a power of two up to 64.
    pub fn from_bits(bits: u32) -> Option<Width> {
        (bits.is_power_of_two() && bits <= 64).then(|| Width { order: bits.trailing_zeros() })
    }

    /// Log2 of the bits.
    pub fn order(self) -> u32 {
        self.order
    }

    /// Bits in a count.
    pub fn bits(self) -> u32 {
        1 << self.order
    }

    /// The largest count.
    pub fn max(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// Log2 of the counts in a block of one cluster.
    pub fn block_bits(self, cluster_bits: u32) -> u32 {
        cluster_bits + 3 - self.order
    }

    /// The count of entry `index`; zero if the block has no such entry.
    pub fn get(self, block: &[u8], index: usize) -> u64 {
        match self.order {
            3 => block.get(index).map_or(0, |b| u64::from(*b)),
            4 => u64::from(super::be16(block, index.saturating_mul(2))),
            5 => u64::from(super::be32(block, index.saturating_mul(4))),
            6 => super::be64(block, index.saturating_mul(8)),
            order => {
                let (byte, shift) = narrow(order, index);
                block.get(byte).map_or(0, |b| u64::from(*b) >> shift & self.max())
            }
        }
    }

    /// Sets the count of entry `index`. False, and nothing done, if the block has no such entry or the width can't hold `count`.
    #[must_use]
    pub fn set(self, block: &mut [u8], index: usize, count: u64) -> bool {
        if count > self.max() {
            return false;
        }
        if self.order < 3 {
            let (byte, shift) = narrow(self.order, index);
            let Some(b) = block.get_mut(byte) else { return false };
            *b = *b & !((self.max() as u8) << shift) | (count as u8) << shift;
            return true;
        }
        let bytes = 1usize << (self.order - 3);
        let Some(start) = index.checked_mul(bytes) else { return false };
        let Some(place) = start.checked_add(bytes).and_then(|end| block.get_mut(start..end)) else { return false };
        place.copy_from_slice(&count.to_be_bytes()[8 - bytes..]);
        true
    }

    /// Adds `by` to entry `index` and returns the new count; `None`, and nothing done, if it would go below zero, above
    /// [`Width::max`], or if there is no such entry.
    pub fn add(self, block: &mut [u8], index: usize, by: i64) -> Option<u64> {
        let count = self.get(block, index).checked_add_signed(by)?;
        self.set(block, index, count).then_some(count)
    }
}

/// Where a count of less than a byte is: the byte, and the shift in it.
fn narrow(order: u32, index: usize) -> (usize, u32) {
    let per_byte_bits = 3 - order;
    (index >> per_byte_bits, ((index & ((1 << per_byte_bits) - 1)) as u32) << order)
}

/// The refcount block that a refcount table entry points to; `None` if it has none (all its counts are zero).
///
/// # Errors
/// Reserved bits set, or an offset that is no multiple of the cluster size.
pub fn table_entry(raw: u64, cluster_bits: u32) -> Result<Option<u64>, FormatError> {
    if raw & !TABLE_OFFSET_MASK != 0 {
        return FormatError::corrupt(format!("refcount table entry {raw:#x} has reserved bits set"));
    }
    if raw & ((1 << cluster_bits) - 1) != 0 {
        return FormatError::corrupt(format!("refcount block at {raw:#x}, not at a cluster's start"));
    }
    if raw > i64::MAX as u64 {
        return FormatError::corrupt(format!("refcount block at {raw:#x}, past any file's end"));
    }
    Ok((raw != 0).then_some(raw))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn layout_by_hand() {
        let w = |bits| Width::from_bits(bits).unwrap();
        let block = [0b1000_0001, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef];
        assert_eq!((0..8).map(|i| w(1).get(&block, i)).collect::<Vec<_>>(), [1, 0, 0, 0, 0, 0, 0, 1]);
        assert_eq!((0..4).map(|i| w(2).get(&block, i)).collect::<Vec<_>>(), [1, 0, 0, 2]);
        assert_eq!((2..4).map(|i| w(4).get(&block, i)).collect::<Vec<_>>(), [3, 2]);
        assert_eq!(w(8).get(&block, 1), 0x23);
        assert_eq!(w(16).get(&block, 1), 0x4567);
        assert_eq!(w(32).get(&block, 1), 0x89ab_cdef);
        assert_eq!(w(64).get(&block, 0), 0x8123_4567_89ab_cdef);
        assert_eq!(w(64).get(&block, 1), 0, "no such entry");
        assert_eq!(Width::from_bits(3), None);
        assert_eq!(Width::from_bits(128), None);
        assert!(Width::from_order(7).is_err());
        assert_eq!(Width::DEFAULT.block_bits(16), 15);
        assert_eq!(w(1).block_bits(16), 19);
        assert_eq!(w(64).block_bits(9), 6);
    }

    #[test]
    fn table_entries() {
        assert_eq!(table_entry(0, 16), Ok(None));
        assert_eq!(table_entry(0x30000, 16), Ok(Some(0x30000)));
        assert!(table_entry(0x30200, 16).is_err());
        assert!(table_entry(0x30001, 16).is_err());
        assert!(table_entry(1 << 63, 16).is_err());
        assert_eq!(table_entry(0x30200, 9), Ok(Some(0x30200)));
    }

    proptest! {
        /// Against a vector of numbers: a set changes its own entry and no other, what doesn't fit is refused.
        #[test]
        fn packed_counts_are_a_vector(order in 0u32..=6, ops in prop::collection::vec((0usize..80, any::<u64>(), 0u32..65), 1..200)) {
            let width = Width::from_order(order).unwrap();
            let entries = 64usize * 8 / width.bits() as usize;
            let (mut block, mut model) = (vec![0u8; 64], vec![0u64; entries]);
            for (index, value, shift) in ops {
                let value = value.checked_shr(shift).unwrap_or(0);
                let fits = index < entries && value <= width.max();
                prop_assert_eq!(width.set(&mut block, index, value), fits);
                if fits {
                    model[index] = value;
                }
                let by = value as i64 % 3;
                let expect = model.get(index).and_then(|m| m.checked_add_signed(by)).filter(|c| *c <= width.max());
                prop_assert_eq!(width.add(&mut block, index, by), expect);
                if let Some(count) = expect {
                    model[index] = count;
                }
                for (i, m) in model.iter().enumerate() {
                    prop_assert_eq!(width.get(&block, i), *m);
                }
            }
        }
    }
}
