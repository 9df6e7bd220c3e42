// SPDX-License-Identifier: Apache-2.0
//! What a network device did, for the ledger. The worker counts in plain integers and publishes them before it sleeps; anyone
//! may read them at any time.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct NetCounts { $($(#[$doc])* pub $name: u64,)* }

        /// The counters of a device, shared with its worker.
        #[derive(Debug, Default)]
        pub struct NetStats { $($name: AtomicU64,)* }

        impl NetStats {
            /// The counters as the worker last published them. Each is exact, but they may be of two neighbouring rounds.
            #[must_use]
            pub fn read(&self) -> NetCounts {
                NetCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }

            /// Only the worker calls this, so plain stores will do.
            pub(super) fn publish(&self, counts: &NetCounts) {
                $(self.$name.store(counts.$name, Ordering::Relaxed);)*
            }
        }
    };
}

counters! {
    /// Packets that the guest sent and the host took.
    sent,
    /// Their bytes, without the virtio header.
    sent_bytes,
    /// Packets that the guest got.
    received,
    /// Their bytes, without the virtio header.
    received_bytes,
    /// Packets of the guest that the host did not take: too long or short, refused, or the link was down.
    sent_dropped,
    /// Packets for the guest that no buffer of it could hold.
    received_dropped,
    /// Commands on the control queue.
    commands,
    /// Things the guest did wrong.
    faults,
    /// Kicks of the guest that the worker saw: neighbouring ones count once.
    kicks,
    /// Times the worker woke up.
    wakes,
    /// Interrupts sent.
    interrupts,
}
