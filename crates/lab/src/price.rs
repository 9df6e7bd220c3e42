// SPDX-License-Identifier: Apache-2.0
//! VM exits by kind, and what they would cost on hardware.
//!
//! Instruction-counted time does not know what a world switch costs. The constants here are assumptions, stated in every
//! report: round numbers for a server core at 3 GHz, of the size commonly measured for hardware with nested paging.
//! They price the round trip with the kernel's and, where it is involved, the monitor's dispatch, not the device's work.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One kind of exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Name in tables and JSON.
    pub name: &'static str,
    /// Assumed cost in nanoseconds.
    pub ns: u64,
    /// Where the number comes from.
    pub why: &'static str,
}

/// The price list, in table order.
pub const KINDS: &[Kind] = &[
    Kind {
        name: "pio",
        ns: 2300,
        why: "port I/O answered in user space: about 7,000 cycles with the return to the monitor",
    },
    Kind { name: "mmio", ns: 2700, why: "as port I/O, plus fetching and decoding the instruction" },
    Kind {
        name: "kernel mmio",
        ns: 1100,
        why: "MMIO answered inside KVM (IOAPIC, APIC, ioeventfd): decode, no return to user space",
    },
    Kind {
        name: "kernel pio",
        ns: 600,
        why: "port I/O answered inside KVM (ioeventfd, coalesced writes): nothing to decode, no return to user space",
    },
    Kind { name: "page fault", ns: 1000, why: "nested page fault without the cost of clearing the page" },
    Kind { name: "halt", ns: 1700, why: "HLT: world switch, scheduling out and in" },
    Kind { name: "interrupt", ns: 600, why: "host interrupt while the guest runs" },
    Kind { name: "irq window", ns: 500, why: "waiting for the guest to take an interrupt" },
    Kind { name: "other", ns: 450, why: "answered inside KVM: MSR, CPUID, control registers; about 1,300 cycles" },
];

/// Exits of one subject in one workload.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Exits {
    /// All exits.
    pub total: u64,
    /// By kind; the names are those of [`KINDS`].
    pub by_kind: BTreeMap<String, u64>,
    /// What they would cost on hardware, in milliseconds, by the stated constants.
    pub priced_ms: f64,
}

impl Exits {
    /// Sorts KVM's own counters (`/sys/kernel/debug/kvm/*`, the difference between two readings) into kinds.
    pub fn from_kvm(counters: &BTreeMap<String, u64>) -> Self {
        let get = |name: &str| counters.get(name).copied().unwrap_or(0);
        let total = get("exits");
        let mut left = total;
        let mut by_kind = BTreeMap::new();
        let mut take = |name: &str, count: u64| {
            let count = count.min(left);
            left -= count;
            by_kind.insert(name.to_owned(), count);
        };
        // KVM gives the guest's FPU state back once for each return to user space, whatever it was for.
        let returns = counters.get("fpu_reload").map_or(u64::MAX, |n| n.saturating_sub(get("signal_exits")));
        let (ports, mmio) = (get("io_exits"), get("mmio_exits"));
        let monitor = ports.min(returns.saturating_sub(mmio));
        take("pio", monitor);
        take("kernel pio", ports - monitor);
        take("mmio", mmio);
        take("halt", get("halt_exits"));
        take("interrupt", get("irq_exits") + get("nmi_exits"));
        take("irq window", get("irq_window_exits") + get("nmi_window_exits"));
        take("page fault", get("pf_taken"));
        take("kernel mmio", get("insn_emulation").saturating_sub(get("mmio_exits")));
        take("other", u64::MAX);
        Self::priced(total, by_kind)
    }

    /// Puts the price on counts.
    pub fn priced(total: u64, by_kind: BTreeMap<String, u64>) -> Self {
        let ns: u64 = KINDS.iter().map(|kind| kind.ns * by_kind.get(kind.name).copied().unwrap_or(0)).sum();
        Self { total, by_kind, priced_ms: ns as f64 / 1e6 }
    }

    /// The sample in the middle by total: one real sample, so that kinds add up to the total.
    pub fn median(samples: &[Exits]) -> Option<Exits> {
        let mut sorted: Vec<&Exits> = samples.iter().collect();
        sorted.sort_by_key(|exits| exits.total);
        sorted.get(sorted.len().checked_sub(1)? / 2).map(|exits| (*exits).clone())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn counters(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
        pairs.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect()
    }

    #[test]
    fn kinds_add_up_to_the_total() {
        let exits = Exits::from_kvm(&counters(&[
            ("exits", 1000),
            ("io_exits", 500),
            ("mmio_exits", 20),
            ("insn_emulation", 50),
            ("halt_exits", 100),
            ("irq_exits", 80),
            ("pf_taken", 200),
        ]));
        assert_eq!(
            (exits.by_kind["pio"], exits.by_kind["kernel pio"]),
            (500, 0),
            "where KVM does not say who answered"
        );
        assert_eq!(exits.by_kind["kernel mmio"], 30);
        assert_eq!(exits.by_kind["other"], 1000 - 500 - 20 - 30 - 100 - 80 - 200);
        assert_eq!(exits.by_kind.values().sum::<u64>(), 1000);
    }

    #[test]
    fn ports_that_kvm_answers_are_told_apart() {
        let some = [("exits", 900), ("io_exits", 500), ("mmio_exits", 20), ("signal_exits", 3), ("fpu_reload", 123)];
        let exits = Exits::from_kvm(&counters(&some));
        assert_eq!((exits.by_kind["pio"], exits.by_kind["kernel pio"], exits.by_kind["mmio"]), (100, 400, 20));
        assert_eq!(exits.by_kind.values().sum::<u64>(), 900);
        // A reading in the middle of an exit is one behind.
        let behind = Exits::from_kvm(&counters(&[("exits", 9), ("io_exits", 2), ("mmio_exits", 5), ("fpu_reload", 4)]));
        assert_eq!((behind.by_kind["pio"], behind.by_kind["kernel pio"]), (0, 2));
    }

    #[test]
    fn counters_that_overlap_never_exceed_the_total() {
        let exits = Exits::from_kvm(&counters(&[("exits", 10), ("io_exits", 8), ("pf_taken", 100)]));
        assert_eq!(exits.by_kind["page fault"], 2);
        assert_eq!(exits.by_kind.values().sum::<u64>(), 10);
    }

    #[test]
    fn price_is_counts_times_constants() {
        let exits = Exits::priced(1_000_000, counters(&[("pio", 1_000_000)]));
        assert_eq!(exits.priced_ms, 2300.0);
        assert!(KINDS.iter().all(|kind| kind.ns > 0 && !kind.why.is_empty()));
    }

    #[test]
    fn median_is_a_real_sample() {
        let sample = |total| Exits::priced(total, counters(&[("pio", total)]));
        assert_eq!(Exits::median(&[sample(9), sample(1), sample(5)]).unwrap().total, 5);
        assert_eq!(Exits::median(&[]), None);
    }
}
