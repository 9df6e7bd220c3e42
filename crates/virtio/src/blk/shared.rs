// SPDX-License-Identifier: Apache-2.0
//! What the device, its workers and whoever resizes it share: atomics only, so that no request waits for anybody.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use block::Disk;

use super::request::ID_LEN;
use super::stats::BlkStats;
use crate::throttle::Throttle;

/// The part of a device that all its threads see.
pub struct Shared {
    /// What `GET_ID` answers.
    pub id: [u8; ID_LEN],
    /// Where the counters go.
    pub stats: Arc<BlkStats>,
    /// The disk's rate limits.
    pub throttle: Option<Throttle>,
    /// Bytes of the disk; a multiple of the logical block size.
    pub capacity: AtomicU64,
    /// Finished writes may wait for a flush; else a write is finished once it is durable.
    pub writeback: AtomicBool,
}

/// Changes a disk while its device runs. Used by one thread at a time, which may have to wait for the host.
pub struct BlkControl {
    /// A handle of its own. The lock is held while the host works, so that two resizes come one after the other; no
    /// request takes it.
    disk: Mutex<Disk>,
    shared: Arc<Shared>,
    path: PathBuf,
    block: u64,
}

impl BlkControl {
    pub(super) fn new(disk: Disk, shared: Arc<Shared>, block: u32) -> Self {
        Self { path: disk.path().to_owned(), disk: Mutex::new(disk), shared, block: block.into() }
    }

    /// Where the image is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the disk as its requests may use them.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.shared.capacity.load(Ordering::Acquire)
    }

    /// Makes the disk `bytes` long; never shorter, since what lies behind the new end would be lost with requests for it
    /// under way. The guest hears of it through [`crate::VirtioDevice::update_config`].
    ///
    /// # Errors
    /// In one line, what can't be had of this disk, or what the host says.
    pub fn resize(&self, bytes: u64) -> io::Result<()> {
        let refused = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let mut disk = self.disk.lock().unwrap_or_else(PoisonError::into_inner);
        let size = self.size();
        if bytes == size {
            return Ok(());
        }
        if bytes < size {
            return refused(format!(
                "a disk in use does not shrink, and it has {size} bytes; use `tare img resize` when it is not"
            ));
        }
        if !bytes.is_multiple_of(self.block) {
            return refused(format!("{bytes} bytes are no multiple of the disk's block size, {}", self.block));
        }
        disk.resize(bytes)?;
        // A worker that sees a request the guest made after hearing of the new size sees the size too.
        self.shared.capacity.store(bytes, Ordering::Release);
        Ok(())
    }
}
