// SPDX-License-Identifier: Apache-2.0
//! Where each vCPU sits, and how CPUID says so: an APIC id made of socket, core and thread, each in bits of its own.
//!
//! Pure: called by `cpuid` for the tables and by `build` for the numbers that vCPUs are made with. Follows Intel SDM 3A,
//! "Detecting Hardware Multi-Threading Support and Topology" and "x2APIC ID", and AMD APM 3, appendix E.

use kvm::CpuidEntry;

/// `KVM_CPUID_FLAG_SIGNIFCANT_INDEX`: the entry is one of several sub-leaves.
const SUB_LEAF: u32 = 1;

/// Sockets of cores of threads, all at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    sockets: u32,
    cores: u32,
    threads: u32,
}

/// One vCPU's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Its number at the local APIC, which is KVM's number of the vCPU.
    pub apic_id: u32,
    /// Its socket.
    pub socket: u32,
    /// Its core in the socket.
    pub core: u32,
}

impl From<spec::Topology> for Topology {
    fn from(said: spec::Topology) -> Self {
        Self { sockets: said.sockets.into(), cores: said.cores.into(), threads: said.threads.into() }
    }
}

impl Topology {
    /// Where vCPU `index` sits: threads of a core are neighbours, and cores of a socket.
    pub fn seat(&self, index: u8) -> Seat {
        let index = u32::from(index);
        let (thread, core) = (index % self.threads, index / self.threads % self.cores);
        let socket = index / self.threads / self.cores;
        let apic_id = (socket << self.core_bits() | core) << self.thread_bits() | thread;
        Seat { apic_id, socket, core }
    }

    /// The APIC ids of all vCPUs in their order. They have gaps where cores or threads are no power of two.
    pub fn apic_ids(&self) -> Vec<u32> {
        // At most 64 vCPUs (spec::MAX_CPUS).
        (0..(self.sockets * self.in_socket()) as u8).map(|index| self.seat(index).apic_id).collect()
    }

    /// vCPUs of one socket.
    pub fn in_socket(&self) -> u32 {
        self.cores * self.threads
    }

    /// Threads of one core.
    pub fn in_core(&self) -> u32 {
        self.threads
    }

    fn thread_bits(&self) -> u32 {
        self.threads.next_power_of_two().trailing_zeros()
    }

    fn core_bits(&self) -> u32 {
        self.cores.next_power_of_two().trailing_zeros()
    }

    /// Bits of an APIC id below the socket's.
    pub fn socket_bits(&self) -> u32 {
        self.thread_bits() + self.core_bits()
    }

    /// Sub-leaves 0 (threads), 1 (cores) and 2 (end) of leaf 0xb or 0x1f for the vCPU `seat`.
    pub fn extended(&self, function: u32, seat: Seat) -> [CpuidEntry; 3] {
        let level = |index: u32, shift: u32, count: u32, kind: u32| CpuidEntry {
            function,
            index,
            flags: SUB_LEAF,
            eax: shift,
            ebx: count,
            ecx: index | kind << 8,
            edx: seat.apic_id,
            ..Default::default()
        };
        [
            level(0, self.thread_bits(), self.threads, 1),
            level(1, self.socket_bits(), self.in_socket(), 2),
            level(2, 0, 0, 0),
        ]
    }

    /// Which vCPUs share the cache of an entry of leaf 4 or 0x8000_001d, so that the guest does not believe the host's
    /// count: L1 and L2 a core's threads, L3 a socket's. Both fields count the APIC ids set aside, gaps included.
    pub fn share_cache(&self, entry: &mut CpuidEntry) {
        if entry.eax & 0x1f == 0 {
            return;
        }
        let level = (entry.eax >> 5) & 7;
        let sharing = 1u32 << if level >= 3 { self.socket_bits() } else { self.thread_bits() };
        let cores = if entry.function == 4 { (1 << self.core_bits()) - 1 } else { 0 };
        entry.eax = (entry.eax & 0x3fff) | (sharing - 1) << 14 | cores << 26;
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Every grouping that `--cpus` takes.
    pub fn all() -> Vec<Topology> {
        let mut out = Vec::new();
        for sockets in 1..=64u32 {
            for cores in 1..=64 / sockets {
                for threads in 1..=64 / sockets / cores {
                    out.push(Topology { sockets, cores, threads });
                }
            }
        }
        out
    }

    impl Topology {
        /// vCPUs.
        pub fn count(&self) -> u8 {
            (self.sockets * self.in_socket()) as u8
        }

        /// Sockets, cores, threads.
        pub fn split(&self) -> [u32; 3] {
            [self.sockets, self.cores, self.threads]
        }
    }

    #[test]
    fn apic_ids_are_unique_and_fit_the_tables() {
        for t in all() {
            let ids = t.apic_ids();
            assert_eq!(ids.len(), usize::from(t.count()));
            assert_eq!(ids[0], 0, "the boot vCPU");
            assert!(ids.windows(2).all(|w| w[0] < w[1]), "{t:?}: {ids:?}");
            assert!(ids.iter().all(|id| *id < 255), "an MADT entry and leaf 1 have eight bits: {t:?}");
        }
    }

    #[test]
    fn gaps_are_where_a_group_is_no_power_of_two() {
        let t = Topology { sockets: 2, cores: 3, threads: 2 };
        assert_eq!(t.apic_ids(), [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13]);
        let seat = t.seat(9);
        assert_eq!((seat.socket, seat.core, seat.apic_id), (1, 1, 11));
        assert_eq!(Topology { sockets: 1, cores: 6, threads: 1 }.apic_ids(), [0, 1, 2, 3, 4, 5]);
    }
}
