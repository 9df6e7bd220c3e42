// SPDX-License-Identifier: Apache-2.0
//! What the block device offers and says of itself: feature bits (virtio 1.2, 5.2.3), block sizes, and the configuration
//! space (5.2.4). Used by the device.

use base::SECTOR_SIZE;
use block::Disk;

use super::request::MAX_RANGE_SECTORS;
use crate::queue::DEFAULT_SIZE;

/// Feature bits (5.2.3).
pub mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may switch the write cache.
    pub const CONFIG_WCE: u64 = 1 << 11;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// Data segments of one request: what a chain holds beside header and status.
const SEG_MAX: u32 = DEFAULT_SIZE as u32 - 2;
/// Bytes of the configuration space up to and with the write-zeroes fields.
const CONFIG_LEN: usize = 60;
/// Where the capacity is, in sectors.
const CAPACITY: usize = 0;
/// Where the write cache's switch is, the one byte that the driver may write.
pub const WRITEBACK: u64 = 32;
/// The largest physical block that is not a format's own unit: no medium has a larger one.
const LARGEST_PHYSICAL: u32 = 4096;

/// Block sizes as the guest hears of them, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Unit of addressing; a power of two, at least 512.
    pub logical: u32,
    /// Smallest write that rewrites nothing beside it; a power of two, at least `logical`.
    physical: u32,
    /// Best size of a large request, 0 for no opinion: a qcow2 image's cluster.
    optimal: u32,
    /// Unit in which a discard frees space.
    discard: u32,
}

impl Blocks {
    /// Those that `spec` names, else those of `disk`.
    pub fn new(disk: &Disk, spec: &spec::Disk) -> Self {
        let limits = disk.limits();
        let logical = spec.logical_block_size.unwrap_or_else(|| limits.block_size.max(SECTOR_SIZE as u32));
        let unit = limits.discard_granularity.max(logical);
        let physical = spec.physical_block_size.unwrap_or_else(|| unit.min(LARGEST_PHYSICAL)).max(logical);
        Self { logical, physical, optimal: if unit > physical { unit } else { 0 }, discard: unit }
    }
}

/// The features to offer for `disk`.
pub fn features(disk: &Disk, spec: &spec::Disk, queues: usize) -> u64 {
    let mut features = feature::SEG_MAX | feature::BLK_SIZE | feature::TOPOLOGY;
    if queues > 1 {
        features |= feature::MQ;
    }
    if disk.readonly() {
        return features | feature::RO;
    }
    features |= feature::DISCARD | feature::WRITE_ZEROES;
    // Without FLUSH the guest takes every finished write for durable and sends no flushes, which is what the user asked for
    // with `cache=unsafe`.
    if spec.cache != spec::Cache::Unsafe {
        features |= feature::FLUSH | feature::CONFIG_WCE;
    }
    features
}

/// The configuration space, little-endian.
pub struct ConfigSpace([u8; CONFIG_LEN]);

impl ConfigSpace {
    /// For a disk of `size` bytes behind `queues` queues.
    pub fn new(size: u64, blocks: Blocks, queues: usize) -> Self {
        let Blocks { logical, physical, optimal, discard } = blocks;
        // 2^exponent logical blocks to a physical one.
        let ratio = physical / logical;
        let exponent = ratio.max(1).ilog2() as u8;
        let min_io = u16::try_from(ratio).unwrap_or(1).max(1);
        let align = discard / SECTOR_SIZE as u32;
        let mut config = Self([0; CONFIG_LEN]);
        config.set_size(size);
        config.put(12, &SEG_MAX.to_le_bytes());
        config.put(20, &logical.to_le_bytes());
        config.put(24, &[exponent, 0]);
        config.put(26, &min_io.to_le_bytes());
        config.put(28, &(optimal / logical).to_le_bytes());
        config.set_writeback(true);
        config.put(34, &u16::try_from(queues).unwrap_or(1).to_le_bytes());
        config.put(36, &MAX_RANGE_SECTORS.to_le_bytes());
        config.put(40, &1u32.to_le_bytes());
        config.put(44, &align.to_le_bytes());
        config.put(48, &MAX_RANGE_SECTORS.to_le_bytes());
        config.put(52, &1u32.to_le_bytes());
        config.put(56, &[1]);
        config
    }

    /// The disk has another size.
    pub fn set_size(&mut self, bytes: u64) {
        self.put(CAPACITY, &(bytes / SECTOR_SIZE).to_le_bytes());
    }

    /// The write cache is on, or off.
    pub fn set_writeback(&mut self, on: bool) {
        self.put(WRITEBACK as usize, &[on.into()]);
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        for (to, from) in self.0.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    }

    /// Copies from byte `offset` on; what lies past the end is left alone.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let Ok(offset) = usize::try_from(offset) else { return };
        for (to, from) in data.iter_mut().zip(self.0.iter().skip(offset)) {
            *to = *from;
        }
    }
}
