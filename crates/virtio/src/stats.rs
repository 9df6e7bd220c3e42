// SPDX-License-Identifier: Apache-2.0
//! What a small device counts for the ledger. Written by whichever thread runs the device, read by `machine` at any time.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of a device since it was made; resets of the guest don't clear them.
#[derive(Debug, Default)]
pub struct Counters {
    requests: AtomicU64,
    bytes_from_guest: AtomicU64,
    bytes_to_guest: AtomicU64,
    kicks: AtomicU64,
    interrupts: AtomicU64,
}

/// [`Counters`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Chains given back to the guest.
    pub requests: u64,
    /// Bytes that the guest sent.
    pub bytes_from_guest: u64,
    /// Bytes that the guest was sent.
    pub bytes_to_guest: u64,
    /// Kicks that reached the device.
    pub kicks: u64,
    /// Interrupts that it sent.
    pub interrupts: u64,
}

impl Counters {
    pub(crate) fn request(&self, from_guest: u64, to_guest: u64) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.bytes_from_guest.fetch_add(from_guest, Ordering::Relaxed);
        self.bytes_to_guest.fetch_add(to_guest, Ordering::Relaxed);
    }

    pub(crate) fn kick(&self) {
        self.kicks.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn interrupt(&self) {
        self.interrupts.fetch_add(1, Ordering::Relaxed);
    }

    /// The counts now; each is right, together they may be of slightly different moments.
    #[must_use]
    pub fn get(&self) -> Counts {
        let get = |a: &AtomicU64| a.load(Ordering::Relaxed);
        Counts {
            requests: get(&self.requests),
            bytes_from_guest: get(&self.bytes_from_guest),
            bytes_to_guest: get(&self.bytes_to_guest),
            kicks: get(&self.kicks),
            interrupts: get(&self.interrupts),
        }
    }
}
