// SPDX-License-Identifier: Apache-2.0
//! What a block device did, for the ledger. The worker counts in plain integers and publishes them once per batch; anyone
//! may read them at any time.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct BlkCounts { $($(#[$doc])* pub $name: u64,)* }

        /// The counters of a device, shared with its worker.
        #[derive(Debug, Default)]
        pub struct BlkStats { $($name: AtomicU64,)* }

        impl BlkStats {
            /// The counters as the worker last published them. Each is exact, but they may be of two neighbouring batches.
            #[must_use]
            pub fn read(&self) -> BlkCounts {
                BlkCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }

            /// Only the worker calls this, so plain stores will do.
            pub(super) fn publish(&self, counts: &BlkCounts) {
                $(self.$name.store(counts.$name, Ordering::Relaxed);)*
            }
        }
    };
}

counters! {
    /// Reads finished, failed ones included.
    reads,
    /// Writes finished, failed ones included.
    writes,
    /// Flushes finished, failed ones included.
    flushes,
    /// Discards and write-zeroes finished, failed ones included.
    discards,
    /// Other requests: serial number, unknown, malformed.
    others,
    /// Bytes read without error.
    read_bytes,
    /// Bytes written without error.
    write_bytes,
    /// Requests that the host failed.
    errors,
    /// Requests that the guest got wrong.
    faults,
    /// Kicks by the guest and completions that woke the worker, as counted by its eventfd.
    signals,
    /// Times the worker woke up.
    wakes,
    /// Interrupts sent.
    interrupts,
}

impl BlkCounts {
    /// Requests finished, of all kinds.
    #[must_use]
    pub const fn requests(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.discards + self.others
    }
}
