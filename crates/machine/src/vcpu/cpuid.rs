// SPDX-License-Identifier: Apache-2.0
//! What CPUID tells the guest: what KVM supports, less what costs exits and gives nothing, plus identity and topology.
//!
//! Called once per vCPU before it first runs. Leaf numbers follow Intel SDM 2A "CPUID" and AMD APM 3, appendix E.

use kvm::CpuidEntry;
use spec::Cpus;

const HYPERVISOR: u32 = 1 << 31;
const TSC_DEADLINE: u32 = 1 << 24;
const HTT: u32 = 1 << 28;
/// AMD leaf 0x8000_0001 ecx: core and data-fabric performance counter extensions, and L2 counters.
const AMD_PERFCTR: u32 = 1 << 23 | 1 << 24 | 1 << 28;

/// What the tables are made from.
pub struct Inputs<'a> {
    /// KVM_GET_SUPPORTED_CPUID.
    pub supported: &'a [CpuidEntry],
    /// Count and grouping of the vCPUs.
    pub cpus: &'a Cpus,
    /// KVM emulates the TSC-deadline timer.
    pub tsc_deadline: bool,
    /// TSC frequency in kHz, where known.
    pub tsc_khz: Option<u32>,
}

/// The CPUID table of vCPU `id`.
#[must_use]
pub fn table(inputs: &Inputs<'_>, id: u8) -> Vec<CpuidEntry> {
    let amd = inputs.supported.iter().any(|e| e.function == 0 && e.ebx == u32::from_le_bytes(*b"Auth"));
    let topology = Topology::new(inputs.cpus);
    let mut out: Vec<CpuidEntry> = Vec::with_capacity(inputs.supported.len() + 4);
    for entry in inputs.supported {
        let mut entry = *entry;
        match entry.function {
            // rewritten below
            0xb | 0x1f | 0x4000_0010 => continue,
            0x1 => {
                entry.ebx = (entry.ebx & 0x0000_ffff) | u32::from(id) << 24 | topology.logical_per_socket << 16;
                entry.ecx |= HYPERVISOR;
                if inputs.tsc_deadline {
                    entry.ecx |= TSC_DEADLINE;
                }
                if topology.logical_per_socket > 1 {
                    entry.edx |= HTT;
                } else {
                    entry.edx &= !HTT;
                }
            }
            0x4 | 0x8000_001d => topology.cache_sharing(&mut entry),
            // No performance counters: a guest that finds them probes each with two exits.
            0xa => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
            0x8000_0001 => entry.ecx &= !AMD_PERFCTR,
            0x8000_0008 => {
                entry.ecx = (topology.apic_id_bits() << 12) | (topology.logical_per_socket - 1);
            }
            0x8000_001e => {
                entry.eax = u32::from(id);
                entry.ebx = ((topology.threads - 1) << 8) | (u32::from(id) / topology.threads);
                entry.ecx = 0;
            }
            _ => {}
        }
        out.push(entry);
    }
    let highest = out.iter().find(|e| e.function == 0).map_or(0, |e| e.eax);
    if highest >= 0xb {
        out.extend(topology.extended(0xb, id));
        if !amd && highest >= 0x1f {
            out.extend(topology.extended(0x1f, id));
        }
    }
    timing_leaf(inputs, &mut out);
    out
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

struct Topology {
    threads: u32,
    logical_per_socket: u32,
}

impl Topology {
    fn new(cpus: &Cpus) -> Self {
        let threads = u32::from(cpus.threads.max(1));
        let logical_per_socket = (u32::from(cpus.count) / u32::from(cpus.sockets.max(1))).max(1);
        Self { threads, logical_per_socket }
    }

    fn thread_bits(&self) -> u32 {
        self.threads.next_power_of_two().trailing_zeros()
    }

    fn apic_id_bits(&self) -> u32 {
        self.logical_per_socket.next_power_of_two().trailing_zeros()
    }

    /// Sub-leaves 0 (threads), 1 (cores) and 2 (end) of leaf 0xb or 0x1f.
    fn extended(&self, function: u32, id: u8) -> [CpuidEntry; 3] {
        let level = |index: u32, shift: u32, count: u32, kind: u32| CpuidEntry {
            function,
            index,
            flags: 1, // KVM_CPUID_FLAG_SIGNIFCANT_INDEX
            eax: shift,
            ebx: count,
            ecx: index | kind << 8,
            edx: u32::from(id),
            ..Default::default()
        };
        [
            level(0, self.thread_bits(), self.threads, 1),
            level(1, self.apic_id_bits(), self.logical_per_socket, 2),
            level(2, 0, 0, 0),
        ]
    }

    /// Which vCPUs share a cache, so that the guest does not believe the host's count: L1 and L2 a core's threads, L3 a
    /// socket's.
    fn cache_sharing(&self, entry: &mut CpuidEntry) {
        if entry.eax & 0x1f == 0 {
            return;
        }
        let level = (entry.eax >> 5) & 7;
        let sharing = if level >= 3 { self.logical_per_socket } else { self.threads };
        let cores = if entry.function == 4 { self.logical_per_socket / self.threads - 1 } else { 0 };
        entry.eax = (entry.eax & 0x3fff) | (sharing - 1) << 14 | cores.min(63) << 26;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn entry(function: u32, eax: u32, ebx: u32, ecx: u32, edx: u32) -> CpuidEntry {
        CpuidEntry { function, eax, ebx, ecx, edx, ..Default::default() }
    }

    #[test]
    fn identity_and_topology_are_the_vcpus_own() {
        let supported = [
            entry(0, 0x1f, u32::from_le_bytes(*b"Genu"), 0, 0),
            entry(1, 0, 0xff00_1234, 0, HTT),
            entry(0xa, 0x0730_0404, 0, 0, 0x603),
            entry(0x1f, 1, 1, 1, 1),
            entry(0x4000_0000, 0x4000_0001, 0, 0, 0),
        ];
        let cpus = Cpus { count: 8, sockets: 2, threads: 2 };
        let inputs = Inputs { supported: &supported, cpus: &cpus, tsc_deadline: true, tsc_khz: Some(2_000_000) };
        let table = table(&inputs, 5);
        let leaf = |f: u32, i: u32| *table.iter().find(|e| e.function == f && e.index == i).unwrap();
        assert_eq!(leaf(1, 0).ebx, 5 << 24 | 4 << 16 | 0x1234);
        assert_eq!(leaf(1, 0).ecx, HYPERVISOR | TSC_DEADLINE);
        assert_eq!(leaf(1, 0).edx & HTT, HTT);
        assert_eq!(leaf(0xa, 0).eax, 0);
        assert_eq!((leaf(0xb, 0).eax, leaf(0xb, 0).ebx, leaf(0xb, 0).edx), (1, 2, 5));
        assert_eq!((leaf(0xb, 1).eax, leaf(0xb, 1).ebx), (2, 4));
        assert_eq!(leaf(0xb, 1).ecx, 0x201);
        assert_eq!(leaf(0x1f, 0).ebx, 2, "the host's own topology is replaced");
        assert_eq!(leaf(0x4000_0010, 0).eax, 2_000_000);
        assert_eq!(leaf(0x4000_0000, 0).eax, 0x4000_0010);
    }
}
