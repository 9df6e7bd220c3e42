// SPDX-License-Identifier: Apache-2.0
//! What a network device did, for the ledger. Each worker counts in plain integers and publishes them before it sleeps; anyone
//! may read them at any time. Packets that the host's kernel moved are the tap's own counters.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::coalesce::{Coalescer, Waited};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct NetCounts { $($(#[$doc])* pub $name: u64,)* }

        impl std::ops::AddAssign for NetCounts {
            fn add_assign(&mut self, other: Self) { $(self.$name += other.$name;)* }
        }

        /// The counters of a pair of queues, shared with its worker.
        #[derive(Debug, Default)]
        struct Pair { $($name: AtomicU64,)* }

        impl Pair {
            fn read(&self) -> NetCounts {
                NetCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }

            fn publish(&self, counts: &NetCounts) {
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
    /// Times packets had to wait for a rate limit.
    throttled,
    /// How long, in nanoseconds of the throttle's clock.
    throttled_ns,
    /// Interrupts that waited for further packets.
    coalesced,
    /// How long, in nanoseconds of the device's clock.
    coalesced_ns,
}

impl NetCounts {
    /// Whether the interrupt of `coalescer`'s queue is due; counts what it waited.
    pub(super) fn put_off(&mut self, coalescer: &mut Coalescer) -> bool {
        let mut waited = Waited::default();
        let due = coalescer.take(&mut waited);
        self.coalesced += waited.times;
        self.coalesced_ns += waited.ns;
        due
    }
}

/// A tap whose packets the host's kernel moves.
#[derive(Debug)]
struct Counted {
    name: String,
    /// Its counters when that began.
    before: [u64; 4],
    /// As they were last seen: they go with the tap.
    last: Mutex<[u64; 4]>,
}

/// The counters of a device.
#[derive(Debug)]
pub struct NetStats {
    pairs: Box<[Pair]>,
    tap: Option<Counted>,
}

impl NetStats {
    /// Of a device with so many `pairs` of queues; `tap`: the interface whose packets the host's kernel moves.
    pub(super) fn new(pairs: u16, tap: Option<String>) -> Self {
        let tap = tap.and_then(|name| {
            let before = of_interface(&name)?;
            Some(Counted { name, before, last: Mutex::new(before) })
        });
        Self { pairs: (0..pairs).map(|_| Pair::default()).collect(), tap }
    }

    /// The counters as the workers last published them. Each is exact, but they may be of two neighbouring rounds.
    #[must_use]
    pub fn read(&self) -> NetCounts {
        let mut sum = NetCounts::default();
        for pair in &self.pairs {
            sum += pair.read();
        }
        if let Some(tap) = &self.tap {
            self.look();
            let (now, before) = (*tap.last.lock().unwrap_or_else(PoisonError::into_inner), tap.before);
            sum.sent += now[0].saturating_sub(before[0]);
            sum.sent_bytes += now[1].saturating_sub(before[1]);
            sum.received += now[2].saturating_sub(before[2]);
            sum.received_bytes += now[3].saturating_sub(before[3]);
        }
        sum
    }

    /// Remembers the counters of a tap, before it may vanish.
    pub(super) fn look(&self) {
        if let Some(tap) = &self.tap
            && let Some(now) = of_interface(&tap.name)
        {
            *tap.last.lock().unwrap_or_else(PoisonError::into_inner) = now;
        }
    }

    /// What the worker of pair `index` counted before.
    pub(super) fn of(&self, index: u16) -> NetCounts {
        self.pairs.get(usize::from(index)).map(Pair::read).unwrap_or_default()
    }

    /// Only the worker of pair `index` calls this, so plain stores will do.
    pub(super) fn publish(&self, index: u16, counts: &NetCounts) {
        if let Some(pair) = self.pairs.get(usize::from(index)) {
            pair.publish(counts);
        }
    }
}

/// Packets and bytes that went into an interface (a tap's reader calls them sent), and out of it.
fn of_interface(name: &str) -> Option<[u64; 4]> {
    let read = |what: &str| {
        let text = fs::read_to_string(format!("/sys/class/net/{name}/statistics/{what}")).ok()?;
        text.trim().parse().ok()
    };
    Some([read("rx_packets")?, read("rx_bytes")?, read("tx_packets")?, read("tx_bytes")?])
}
