// SPDX-License-Identifier: Apache-2.0
//! How much the host wants plugged, and how much is: shared by the device, which runs on vCPUs' threads, and by whoever
//! changes the size of a machine. Atomics only.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What both sides see, in bytes.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    pub requested: AtomicU64,
    pub plugged: AtomicU64,
}

/// Asks for more or less memory. The guest hears of it through [`crate::VirtioDevice::update_config`], and does what it can.
#[derive(Clone, Debug)]
pub struct MemControl {
    pub(super) sizes: Arc<Sizes>,
    pub(super) block: u64,
    pub(super) region: u64,
}

impl MemControl {
    /// Wants `bytes` plugged from now on.
    ///
    /// # Errors
    /// What can be wanted, in words: whole blocks, and no more than there is room for.
    pub fn request(&self, bytes: u64) -> Result<(), String> {
        if bytes > self.region {
            return Err(format!("at most {} MiB can be plugged", self.region >> 20));
        }
        if !bytes.is_multiple_of(self.block) {
            return Err(format!("memory is plugged in blocks of {} MiB", self.block >> 20));
        }
        self.sizes.requested.store(bytes, Ordering::Release);
        Ok(())
    }

    /// Bytes that are wanted.
    #[must_use]
    pub fn requested(&self) -> u64 {
        self.sizes.requested.load(Ordering::Acquire)
    }

    /// Bytes that are plugged.
    #[must_use]
    pub fn plugged(&self) -> u64 {
        self.sizes.plugged.load(Ordering::Acquire)
    }

    /// The most that can be.
    #[must_use]
    pub const fn most(&self) -> u64 {
        self.region
    }
}
