// SPDX-License-Identifier: Apache-2.0
//! What CPUID tells the guest: the features chosen for it (`features`), plus each vCPU's identity and place.
//!
//! Called once per vCPU before it first runs. Leaf numbers follow Intel SDM 2A "CPUID" and AMD APM 3, appendix E.

use kvm::CpuidEntry;

use super::topology::{Seat, Topology};

const HTT: u32 = 1 << 28;
/// AMD leaf 0x8000_0001 ecx: leaf 1's HTT counts cores.
const CMP_LEGACY: u32 = 1 << 1;

/// What the tables are made from.
pub struct Inputs<'a> {
    /// Every vCPU's features.
    pub features: &'a [CpuidEntry],
    /// Grouping of the vCPUs.
    pub topology: Topology,
    /// TSC frequency in kHz, where known.
    pub tsc_khz: Option<u32>,
}

/// The CPUID table of vCPU `index`.
#[must_use]
pub fn table(inputs: &Inputs<'_>, index: u8) -> Vec<CpuidEntry> {
    let amd = inputs.features.iter().any(|e| e.function == 0 && e.ebx == u32::from_le_bytes(*b"Auth"));
    let topology = &inputs.topology;
    let seat = topology.seat(index);
    let mut out: Vec<CpuidEntry> = Vec::with_capacity(inputs.features.len() + 6);
    for entry in inputs.features {
        let mut entry = *entry;
        match entry.function {
            // Rewritten below; AMD's 0x8000_0026 says what 0xb does, and a guest that finds it empty reads that.
            0xb | 0x1f | 0x4000_0010 | 0x8000_0026 => continue,
            0x1 => identity(&mut entry, topology, seat),
            0x4 | 0x8000_001d => topology.share_cache(&mut entry),
            0x8000_0001 if amd => set(&mut entry.ecx, CMP_LEGACY, topology.in_socket() > 1),
            0x8000_0008 if amd => entry.ecx = topology.socket_bits() << 12 | (topology.in_socket() - 1),
            0x8000_001e => {
                entry.eax = seat.apic_id;
                entry.ebx = (topology.in_core() - 1) << 8 | seat.core;
                // One node a socket.
                entry.ecx = seat.socket;
            }
            _ => {}
        }
        out.push(entry);
    }
    let highest = out.iter().find(|e| e.function == 0).map_or(0, |e| e.eax);
    if highest >= 0xb {
        out.extend(topology.extended(0xb, seat));
        if !amd && highest >= 0x1f {
            out.extend(topology.extended(0x1f, seat));
        }
    }
    timing_leaf(inputs, &mut out);
    out
}

/// Leaf 1: the first eight bits of the APIC id, and how many ids a socket has set aside.
fn identity(entry: &mut CpuidEntry, topology: &Topology, seat: Seat) {
    let ids = if topology.in_socket() > 1 { 1 << topology.socket_bits() } else { 1 };
    entry.ebx = (entry.ebx & 0x0000_ffff) | (seat.apic_id & 0xff) << 24 | ids << 16;
    set(&mut entry.edx, HTT, topology.in_socket() > 1);
}

fn set(register: &mut u32, bits: u32, on: bool) {
    *register = if on { *register | bits } else { *register & !bits };
}

/// Leaf 0x4000_0010, agreed on by several hypervisors: eax is the TSC frequency and ebx the APIC bus frequency, in kHz, so
/// that a guest need not measure either.
fn timing_leaf(inputs: &Inputs<'_>, out: &mut Vec<CpuidEntry>) {
    let Some(khz) = inputs.tsc_khz else { return };
    if let Some(base) = out.iter_mut().find(|e| e.function == 0x4000_0000) {
        base.eax = base.eax.max(0x4000_0010);
        out.push(CpuidEntry { function: 0x4000_0010, eax: khz, ebx: 1_000_000, ..Default::default() });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::vcpu::topology::tests::all;

    fn entry(function: u32, eax: u32, ebx: u32, ecx: u32, edx: u32) -> CpuidEntry {
        CpuidEntry { function, eax, ebx, ecx, edx, ..Default::default() }
    }

    fn sub(function: u32, index: u32, eax: u32) -> CpuidEntry {
        CpuidEntry { function, index, flags: 1, eax, ..Default::default() }
    }

    /// Data and instruction caches of levels 1, 1, 2 and 3, shared as on some host, and the end of the list.
    fn caches(function: u32) -> Vec<CpuidEntry> {
        let shared = 0xfc1f_c000;
        [0x21, 0x22, 0x43, 0x63, 0].into_iter().zip(0..).map(|(kind, i)| sub(function, i, kind | shared)).collect()
    }

    fn intel() -> Vec<CpuidEntry> {
        let mut all = vec![
            entry(0, 0x1f, u32::from_le_bytes(*b"Genu"), 0, 0),
            entry(1, 0, 0xff40_1234, 0, 0),
            sub(0xb, 0, 1),
            sub(0x1f, 0, 1),
            entry(0x4000_0000, 0x4000_0001, 0, 0, 0),
            entry(0x8000_0008, 0x302e, 0, 0x77, 0),
        ];
        all.extend(caches(4));
        all
    }

    fn amd() -> Vec<CpuidEntry> {
        let mut all = vec![
            entry(0, 0x10, u32::from_le_bytes(*b"Auth"), 0, 0),
            entry(1, 0, 0xff40_1234, 0, HTT),
            entry(0x8000_0001, 0, 0, u32::MAX, 0),
            entry(0x8000_0008, 0x302e, 0, 0x703f, 0),
            entry(0x8000_001e, 99, 99, 99, 0),
            sub(0x8000_0026, 0, 1),
        ];
        all.extend(caches(0x8000_001d));
        all
    }

    fn tables(features: &[CpuidEntry], topology: Topology) -> Vec<Vec<CpuidEntry>> {
        let inputs = Inputs { features, topology, tsc_khz: Some(2_000_000) };
        (0..topology.count()).map(|index| table(&inputs, index)).collect()
    }

    fn leaf(table: &[CpuidEntry], function: u32, index: u32) -> CpuidEntry {
        let mut found = table.iter().filter(|e| e.function == function && e.index == index);
        let entry = *found.next().unwrap_or_else(|| panic!("no leaf {function:#x}.{index}"));
        assert!(found.next().is_none(), "leaf {function:#x}.{index} is there once");
        entry
    }

    /// Bits that hold `count` numbers.
    fn bits(count: u32) -> u32 {
        count.next_power_of_two().trailing_zeros()
    }

    /// Sockets, cores and threads as somebody finds them who has every vCPU's APIC id and the widths of its parts.
    fn seen(vcpus: impl Iterator<Item = (u32, u32, u32)>) -> [u32; 3] {
        let mut found: BTreeMap<u32, BTreeMap<u32, BTreeSet<u32>>> = BTreeMap::new();
        for (id, thread_bits, socket_bits) in vcpus {
            let core = (id & ((1 << socket_bits) - 1)) >> thread_bits;
            let threads = found.entry(id >> socket_bits).or_default().entry(core).or_default();
            assert!(threads.insert(id & ((1 << thread_bits) - 1)), "two vCPUs in one place");
        }
        let cores: BTreeSet<usize> = found.values().map(BTreeMap::len).collect();
        let threads: BTreeSet<usize> = found.values().flat_map(BTreeMap::values).map(BTreeSet::len).collect();
        assert_eq!((cores.len(), threads.len()), (1, 1), "all sockets and all cores are alike");
        let only = |set: BTreeSet<usize>| set.into_iter().next().unwrap() as u32;
        [found.len() as u32, only(cores), only(threads)]
    }

    /// Each vCPU's group: those whose APIC ids are equal above the bits that hold `sharing`.
    fn sharers(tables: &[Vec<CpuidEntry>], ids: &[u32], function: u32, cache: u32) -> BTreeSet<usize> {
        let mut groups: BTreeMap<u32, usize> = BTreeMap::new();
        for (table, id) in tables.iter().zip(ids) {
            let sharing = (leaf(table, function, cache).eax >> 14 & 0xfff) + 1;
            *groups.entry(id >> bits(sharing)).or_default() += 1;
        }
        groups.into_values().collect()
    }

    /// Every topology reads back from the leaves, each of the ways that guests read them.
    #[test]
    fn intel_topologies_round_trip() {
        for topology in all() {
            let tables = tables(&intel(), topology);
            let of = |f: u32, i: u32| tables.iter().map(move |t| leaf(t, f, i)).collect::<Vec<_>>();
            for function in [0xb, 0x1f] {
                let (threads, cores) = (of(function, 0), of(function, 1));
                assert!(threads.iter().all(|l| l.ecx == 0x100) && cores.iter().all(|l| l.ecx == 0x201));
                assert!(of(function, 2).iter().all(|l| (l.ebx, l.ecx) == (0, 2)), "the end");
                let seats = threads.iter().zip(&cores).map(|(t, c)| (t.edx, t.eax, c.eax));
                assert_eq!(seen(seats), topology.split(), "leaf {function:#x}");
                let [_, c, t] = topology.split();
                assert!(threads.iter().all(|l| l.ebx == t) && cores.iter().all(|l| l.ebx == c * t));
            }
            // Before there was leaf 0xb: the socket's share of ids from leaf 1, the cores' from leaf 4.
            let ids: Vec<u32> = of(1, 0).iter().map(|l| l.ebx >> 24).collect();
            assert_eq!(ids, of(0xb, 0).iter().map(|l| l.edx).collect::<Vec<_>>());
            let old = of(1, 0).into_iter().zip(of(4, 0)).map(|(one, four)| {
                let many = one.edx & HTT != 0;
                let socket_bits = if many { bits(one.ebx >> 16 & 0xff) } else { 0 };
                (one.ebx >> 24, socket_bits - bits((four.eax >> 26) + 1), socket_bits)
            });
            assert_eq!(seen(old), topology.split(), "leaves 1 and 4");
            let [_, c, t] = topology.split().map(|n| n as usize);
            for (cache, shared) in [(0, t), (1, t), (2, t), (3, c * t)] {
                assert_eq!(sharers(&tables, &ids, 4, cache), BTreeSet::from([shared]), "{topology:?} cache {cache}");
            }
            assert_eq!(leaf(&tables[0], 4, 4).eax, 0xfc1f_c000, "the end of the list is left alone");
            assert_eq!(leaf(&tables[0], 0x8000_0008, 0).ecx, 0x77, "AMD's words are not Intel's");
        }
    }

    #[test]
    fn amd_topologies_round_trip() {
        for topology in all() {
            let tables = tables(&amd(), topology);
            let of = |f: u32, i: u32| tables.iter().map(move |t| leaf(t, f, i)).collect::<Vec<_>>();
            let seats = of(0xb, 0).into_iter().zip(of(0xb, 1)).map(|(t, c)| (t.edx, t.eax, c.eax));
            assert_eq!(seen(seats), topology.split());
            let (sizes, places) = (of(0x8000_0008, 0), of(0x8000_001e, 0));
            let old = sizes.iter().zip(&places).map(|(size, place)| {
                let threads = (place.ebx >> 8 & 0xff) + 1;
                (place.eax, bits(threads), size.ecx >> 12 & 0xf)
            });
            assert_eq!(seen(old), topology.split(), "leaves 0x8000_0008 and 0x8000_001e");
            let [s, c, t] = topology.split();
            assert!(sizes.iter().all(|l| (l.ecx & 0xff) + 1 == c * t));
            let cores: BTreeSet<(u32, u32)> = places.iter().map(|l| (l.ecx & 0xff, l.ebx & 0xff)).collect();
            assert_eq!(cores.len() as u32, s * c, "node and core name a core");
            let ids: Vec<u32> = places.iter().map(|l| l.eax).collect();
            for (cache, shared) in [(0, t), (1, t), (2, t), (3, c * t)] {
                assert_eq!(sharers(&tables, &ids, 0x8000_001d, cache), BTreeSet::from([shared as usize]));
            }
            let one = leaf(&tables[0], 1, 0);
            let legacy = leaf(&tables[0], 0x8000_0001, 0).ecx;
            assert_eq!((one.edx & HTT != 0, legacy & CMP_LEGACY != 0), (c * t > 1, c * t > 1));
            assert!(tables.iter().flatten().all(|e| e.function != 0x8000_0026 && e.function != 0x1f));
        }
    }

    #[test]
    fn identity_and_timing_are_the_machines_own() {
        let cpus = spec::Cpus { count: 8, sockets: Some(2), cores: None, threads: Some(2) };
        let tables = tables(&intel(), cpus.topology().unwrap().into());
        let sixth = &tables[5];
        assert_eq!(leaf(sixth, 1, 0).ebx, 5 << 24 | 4 << 16 | 0x1234);
        assert_eq!(leaf(sixth, 1, 0).edx & HTT, HTT);
        assert_eq!(leaf(sixth, 0x4000_0010, 0).eax, 2_000_000);
        assert_eq!(leaf(sixth, 0x4000_0000, 0).eax, 0x4000_0010);
        let mut alone = amd();
        alone[1].ebx = 0;
        let table = &tables_of_one(&alone)[0];
        assert_eq!((leaf(table, 1, 0).ebx, leaf(table, 1, 0).edx & HTT), (1 << 16, 0));
    }

    fn tables_of_one(features: &[CpuidEntry]) -> Vec<Vec<CpuidEntry>> {
        tables(features, spec::Cpus::default().topology().unwrap().into())
    }
}
