// SPDX-License-Identifier: Apache-2.0
//! The block device as the transport sees it: features, configuration space, start and stop of the workers. Lives under the
//! PCI function's lock; its handle on the disk is never on the way of a request, the workers have their own.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base::SECTOR_SIZE;
use base::news::News;
use block::{Completion, Disk, Op};

use super::config::{self, Blocks, ConfigSpace, WRITEBACK, feature};
use super::request::{ID_LEN, Shape};
use super::shared::{BlkControl, Shared};
use super::stats::BlkStats;
use super::worker::{self, Setup, Workers};
use crate::coalesce::Coalescer;
use crate::device::{Activation, VirtioDevice};
use crate::queue::DEFAULT_SIZE;
use crate::throttle::{Clock, Throttle};

/// A virtio block device.
pub struct Blk {
    disk: Disk,
    setup: Setup,
    features: u64,
    blocks: Blocks,
    config: ConfigSpace,
    /// The capacity that the configuration space has.
    shown: u64,
    queue_sizes: Vec<u16>,
    warning: Option<String>,
    workers: Option<Workers>,
}

impl Blk {
    /// A device for `disk`, which was opened as `spec` says.
    #[must_use]
    pub fn new(disk: Disk, spec: &spec::Disk) -> Self {
        Self::with_clock(disk, spec, Clock::default())
    }

    /// The same with a clock for its rate limits and its interrupts.
    #[must_use]
    pub fn with_clock(disk: Disk, spec: &spec::Disk, clock: Clock) -> Self {
        let queues = usize::from(spec.queues.unwrap_or(1).max(1));
        let features = config::features(&disk, spec, queues);
        let blocks = Blocks::new(&disk, spec);
        let size = disk.size() - disk.size() % u64::from(blocks.logical);
        let hidden = disk.size() - size;
        let warning = disk.warning().map(str::to_owned).or_else(|| {
            let (path, block) = (disk.path().display(), blocks.logical);
            (hidden > 0).then(|| {
                format!("disk {path}: its last {hidden} bytes are no whole block of {block} and hidden from the guest")
            })
        });
        let mut id = [0; ID_LEN];
        for (to, from) in id.iter_mut().zip(spec.serial.as_deref().unwrap_or_default().bytes()) {
            *to = from;
        }
        let shared = Shared {
            id,
            stats: Arc::new(BlkStats::new(queues)),
            throttle: Throttle::new(&spec.throttle, clock.clone()),
            capacity: AtomicU64::new(size),
            writeback: AtomicBool::new(true),
        };
        let setup = Setup {
            name: "blk".into(),
            one_thread: spec.threads == spec::DiskThreads::Shared,
            several: queues > 1,
            shape: Shape { size, block: SECTOR_SIZE as u32, readonly: disk.readonly() },
            shared: Arc::new(shared),
            coalescer: Coalescer::new(spec.coalesce, clock),
        };
        Self {
            disk,
            setup,
            features,
            blocks,
            config: ConfigSpace::new(size, blocks, queues),
            shown: size,
            queue_sizes: vec![DEFAULT_SIZE; queues],
            warning,
            workers: None,
        }
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
        options.qcow2.zeros = match spec.zeros {
            spec::Zeros::Auto => block::Zeros::Auto,
            spec::Zeros::Write => block::Zeros::Write,
            spec::Zeros::Fallocate => block::Zeros::Fallocate,
        };
        options.qcow2.backing = match &spec.backing {
            spec::Backing::None => block::BackingGate::None,
            spec::Backing::Folder => block::BackingGate::SameFolder,
            spec::Backing::Any => block::BackingGate::Any,
            spec::Backing::Listed(paths) => block::BackingGate::Listed(paths.0.clone()),
        };
        options.qcow2.keys = spec.key.0.iter().map(|file| block::Secret::read(file)).collect::<Result<_, _>>()?;
        let device = Self::new(Disk::open(&options)?, spec);
        if device.shown == 0 {
            let what = format!("it has no whole block of {} bytes; choose a smaller one", device.blocks.logical);
            return Err(block::Error::Unsupported(spec.path.clone(), what));
        }
        Ok(device)
    }

    /// Names the worker threads after the disk's number.
    #[must_use]
    pub fn numbered(mut self, number: usize) -> Self {
        self.setup.name = format!("blk-{number}");
        self
    }

    /// Says through `news` what goes wrong with the disk; see [`Disk::report_to`].
    #[must_use]
    pub fn reporting_to(mut self, news: &Arc<News>) -> Self {
        self.disk.report_to(news);
        self
    }

    /// The device's counters; they go on through resets.
    #[must_use]
    pub fn stats(&self) -> Arc<BlkStats> {
        Arc::clone(&self.setup.shared.stats)
    }

    /// What the user should hear about the image, once, before the guest runs.
    #[must_use]
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// The way to change the disk while the device runs.
    ///
    /// # Errors
    /// When the host has no descriptors left.
    pub fn control(&self) -> io::Result<BlkControl> {
        // Direct I/O wants whole blocks of the host up to the end, whatever the guest is told.
        let block = self.blocks.logical.max(self.disk.limits().block_size);
        Ok(BlkControl::new(self.disk.share()?, Arc::clone(&self.setup.shared), block))
    }

    /// The driver switches the write cache.
    fn set_writeback(&mut self, on: bool) {
        let was = self.setup.shared.writeback.swap(on, Ordering::AcqRel);
        self.config.set_writeback(on);
        if was && !on && self.workers.is_some() {
            // What is written is durable from here on, and so is what was. The vCPU waits for it under the function's lock:
            // it asked for nothing else, and no request takes that lock.
            flush(&mut self.disk);
        }
    }
}

/// Waits until what was written is durable; an error shows again at the guest's next flush.
fn flush(disk: &mut Disk) {
    disk.submit(&block::Request { id: 0, op: Op::Flush, offset: 0, len: 0, segs: &[] });
    let mut done: Vec<Completion> = Vec::new();
    loop {
        disk.commit();
        disk.reap(&mut done);
        if !done.is_empty() {
            return;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

impl VirtioDevice for Blk {
    fn kind(&self) -> u16 {
        2
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        // Only `writeback` can be written, and only where CONFIG_WCE was offered (5.2.4).
        if let (WRITEBACK, [value], true) = (offset, data, self.features & feature::CONFIG_WCE != 0) {
            self.set_writeback(*value != 0);
        }
    }

    fn update_config(&mut self) -> bool {
        let size = self.setup.shared.capacity.load(Ordering::Acquire);
        if size == self.shown {
            return false;
        }
        self.shown = size;
        self.config.set_size(size);
        true
    }

    fn activate(&mut self, activation: Activation) -> io::Result<()> {
        self.stop();
        let agreed = activation.features;
        // A driver that does not know of larger blocks may ask for any sectors.
        let whole = agreed & feature::BLK_SIZE != 0;
        self.setup.shape.block = if whole { self.blocks.logical } else { SECTOR_SIZE as u32 };
        if self.features & feature::CONFIG_WCE != 0 && agreed & feature::CONFIG_WCE == 0 {
            // A driver that can't flush takes every finished write for durable (5.2.6.2).
            self.set_writeback(agreed & feature::FLUSH != 0);
        }
        self.workers = Some(worker::start(&self.disk, &self.setup, activation)?);
        Ok(())
    }

    fn reset(&mut self) {
        self.stop();
        self.setup.shared.writeback.store(true, Ordering::Release);
        self.config.set_writeback(true);
    }
}

impl Blk {
    fn stop(&mut self) {
        if let Some(workers) = self.workers.take() {
            workers.stop();
        }
    }
}

impl Drop for Blk {
    fn drop(&mut self) {
        self.stop();
    }
}
