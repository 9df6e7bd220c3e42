// SPDX-License-Identifier: Apache-2.0
//! What a block device did, for the ledger. Each worker counts in plain integers and publishes them once per batch; anyone
//! may read the sum at any time.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct BlkCounts { $($(#[$doc])* pub $name: u64,)* }

        /// The counters of one worker.
        #[derive(Debug, Default)]
        struct Row { $($name: AtomicU64,)* }

        impl Row {
            fn read(&self) -> BlkCounts {
                BlkCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }

            /// Only the row's worker calls this, so plain stores will do.
            fn publish(&self, counts: &BlkCounts) {
                $(self.$name.store(counts.$name, Ordering::Relaxed);)*
            }
        }

        impl BlkCounts {
            fn plus(&self, other: &Self) -> Self {
                Self { $($name: self.$name + other.$name,)* }
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
    /// Kicks by the guest and completions that woke a worker, as counted by its eventfds.
    signals,
    /// Times a worker woke up.
    wakes,
    /// Interrupts sent.
    interrupts,
    /// Times a worker stopped with requests waiting, because of the rate limits.
    throttled,
    /// Nanoseconds for which it did.
    throttled_ns,
    /// Interrupts that waited for further requests to finish.
    coalesced,
    /// Nanoseconds for which they did.
    coalesced_ns,
}

impl BlkCounts {
    /// Requests finished, of all kinds.
    #[must_use]
    pub const fn requests(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.discards + self.others
    }
}

/// The counters of a device, shared with its workers; one row for each queue, of which a worker of several uses the first.
#[derive(Debug)]
pub struct BlkStats {
    rows: Box<[Row]>,
}

impl BlkStats {
    pub(super) fn new(queues: usize) -> Self {
        Self { rows: (0..queues).map(|_| Row::default()).collect() }
    }

    /// The counters as the workers last published them, added up. Each is exact, but they may be of neighbouring batches.
    #[must_use]
    pub fn read(&self) -> BlkCounts {
        self.rows.iter().fold(BlkCounts::default(), |sum, row| sum.plus(&row.read()))
    }

    /// What the worker with this row counted.
    pub(super) fn row(&self, index: u16) -> BlkCounts {
        self.rows.get(usize::from(index)).map(Row::read).unwrap_or_default()
    }

    pub(super) fn publish(&self, index: u16, counts: &BlkCounts) {
        if let Some(row) = self.rows.get(usize::from(index)) {
            row.publish(counts);
        }
    }
}
