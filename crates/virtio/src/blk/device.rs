// SPDX-License-Identifier: Apache-2.0
//! The block device as the transport sees it: features, configuration space, start and stop of the worker. Lives under the
//! PCI function's lock; the disk is here while the device is reset and with the worker while it runs.

use std::io;
use std::sync::Arc;

use base::SECTOR_SIZE;
use block::{Disk, Limits};

use super::request::{ID_LEN, MAX_RANGE_SECTORS};
use super::stats::BlkStats;
use super::worker::{self, Engine, Handle};
use crate::device::{Activation, VirtioDevice};
use crate::queue::DEFAULT_SIZE;

/// Feature bits (virtio 1.2, 5.2.3).
mod feature {
    pub const SEG_MAX: u64 = 1 << 2;
    pub const RO: u64 = 1 << 5;
    pub const BLK_SIZE: u64 = 1 << 6;
    pub const FLUSH: u64 = 1 << 9;
    pub const TOPOLOGY: u64 = 1 << 10;
    pub const DISCARD: u64 = 1 << 13;
    pub const WRITE_ZEROES: u64 = 1 << 14;
}

/// The queue's largest size.
const QUEUE_SIZES: [u16; 1] = [DEFAULT_SIZE];
/// Data segments of one request: what a chain holds beside header and status.
const SEG_MAX: u32 = DEFAULT_SIZE as u32 - 2;
/// Bytes of the configuration space up to and with the write-zeroes fields (5.2.4).
const CONFIG_LEN: usize = 60;

/// A virtio block device.
pub struct Blk {
    name: String,
    features: u64,
    config: [u8; CONFIG_LEN],
    stats: Arc<BlkStats>,
    state: State,
}

enum State {
    Idle(Box<Engine>),
    Running(Handle),
    /// The worker died and took the disk with it.
    Lost,
}

impl Blk {
    /// A device for `disk`, which was opened as `spec` says.
    #[must_use]
    pub fn new(disk: Disk, spec: &spec::Disk) -> Self {
        let stats = Arc::new(BlkStats::default());
        let mut features = feature::SEG_MAX | feature::BLK_SIZE | feature::TOPOLOGY;
        if disk.readonly() {
            features |= feature::RO;
        } else {
            features |= feature::DISCARD | feature::WRITE_ZEROES;
            // Without FLUSH the guest takes every finished write for durable and sends no flushes, which is what the
            // user asked for with `cache=unsafe`.
            if spec.cache != spec::Cache::Unsafe {
                features |= feature::FLUSH;
            }
        }
        let config = config_space(disk.size(), disk.limits());
        let mut id = [0; ID_LEN];
        for (to, from) in id.iter_mut().zip(spec.serial.as_deref().unwrap_or_default().bytes()) {
            *to = from;
        }
        let engine = Box::new(Engine { disk, id, stats: Arc::clone(&stats) });
        Self { name: "blk".into(), features, config, stats, state: State::Idle(engine) }
    }

    /// Opens the disk that `spec` describes and makes a device for it.
    ///
    /// # Errors
    /// Those of [`Disk::open`], for the user.
    pub fn open(spec: &spec::Disk) -> Result<Self, block::Error> {
        let mut options = block::Options::new(&spec.path);
        options.readonly = spec.readonly;
        options.cache = match spec.cache {
            spec::Cache::Writeback => block::Cache::Writeback,
            spec::Cache::None => block::Cache::None,
            spec::Cache::Unsafe => block::Cache::Unsafe,
        };
        options.aio = match spec.aio {
            spec::Aio::Auto => block::Aio::Auto,
            spec::Aio::IoUring => block::Aio::IoUring,
            spec::Aio::Threads => block::Aio::Threads,
        };
        options.format = match spec.format {
            spec::DiskFormat::Raw => block::Format::Raw,
            spec::DiskFormat::Qcow2 => block::Format::Qcow2,
        };
        options.qcow2.l2_cache = spec.l2_cache;
        options.qcow2.cow = match spec.cow {
            spec::Cow::Explicit => block::Cow::Explicit,
            spec::Cow::Unallocated => block::Cow::Unallocated,
            spec::Cow::ZeroAware => block::Cow::ZeroAware,
        };
        options.qcow2.backing = match spec.backing {
            spec::Backing::None => block::BackingGate::None,
            spec::Backing::Folder => block::BackingGate::SameFolder,
            spec::Backing::Any => block::BackingGate::Any,
        };
        Ok(Self::new(Disk::open(&options)?, spec))
    }

    /// Names the worker thread after the disk's number.
    #[must_use]
    pub fn numbered(mut self, number: usize) -> Self {
        self.name = format!("blk-{number}");
        self
    }

    /// The device's counters; they go on through resets.
    #[must_use]
    pub fn stats(&self) -> Arc<BlkStats> {
        Arc::clone(&self.stats)
    }

    /// What the user should hear about the image, once, before the guest runs.
    #[must_use]
    pub fn warning(&self) -> Option<&str> {
        match &self.state {
            State::Idle(engine) => engine.disk.warning(),
            State::Running(_) | State::Lost => None,
        }
    }
}

/// The configuration space (5.2.4), little-endian.
fn config_space(size: u64, limits: Limits) -> [u8; CONFIG_LEN] {
    let block = limits.block_size.max(SECTOR_SIZE as u32);
    let physical = limits.discard_granularity.max(block);
    // 2^exponent logical blocks to a physical one, and the smallest I/O that is not rewritten below.
    let exponent = (physical / block).max(1).ilog2() as u8;
    let min_io = u16::try_from(physical / block).unwrap_or(1).max(1);
    let align = physical / SECTOR_SIZE as u32;
    let mut config = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| {
        for (to, from) in config.iter_mut().skip(at).zip(bytes) {
            *to = *from;
        }
    };
    put(0, &(size / SECTOR_SIZE).to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &block.to_le_bytes());
    put(24, &[exponent, 0]);
    put(26, &min_io.to_le_bytes());
    put(34, &1u16.to_le_bytes());
    put(36, &MAX_RANGE_SECTORS.to_le_bytes());
    put(40, &1u32.to_le_bytes());
    put(44, &align.to_le_bytes());
    put(48, &MAX_RANGE_SECTORS.to_le_bytes());
    put(52, &1u32.to_le_bytes());
    put(56, &[1]);
    config
}

impl VirtioDevice for Blk {
    fn kind(&self) -> u16 {
        2
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let Ok(offset) = usize::try_from(offset) else { return };
        for (to, from) in data.iter_mut().zip(self.config.iter().skip(offset)) {
            *to = *from;
        }
    }

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {
        // Only `writeback` can be written, and only where CONFIG_WCE was offered (5.2.4).
    }

    fn activate(&mut self, activation: Activation) -> io::Result<()> {
        self.reset();
        match std::mem::replace(&mut self.state, State::Lost) {
            State::Idle(engine) => match worker::start(engine, activation, &self.name) {
                Ok(handle) => {
                    self.state = State::Running(handle);
                    Ok(())
                }
                Err(not) => {
                    self.state = State::Idle(not.engine);
                    Err(not.error)
                }
            },
            State::Running(_) | State::Lost => Err(io::Error::other("the disk's worker thread died earlier")),
        }
    }

    fn reset(&mut self) {
        self.state = match std::mem::replace(&mut self.state, State::Lost) {
            State::Running(handle) => handle.stop().map_or(State::Lost, State::Idle),
            other => other,
        };
    }
}

impl Drop for Blk {
    fn drop(&mut self) {
        self.reset();
    }
}
