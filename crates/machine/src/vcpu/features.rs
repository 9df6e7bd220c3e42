// SPDX-License-Identifier: Apache-2.0
//! CPU features of the guest: what the host's KVM can give, less what the user takes away and what costs more than it
//! gives. Called by `build` once, before there are vCPUs, and by `tare doctor` for the names; `cpuid` makes each vCPU's
//! table from the result.

use kvm::CpuidEntry;
use spec::{CpuModel, CpuidBits, CpuidRegister, cpu_features, cpuid_bits};

/// Performance counters: a guest that finds them probes each with two exits, so it gets them only when they are asked for.
const ASKED_FOR: &[&str] = &["arch_perfmon", "perfctr_core", "perfctr_nb", "perfctr_llc"];

/// Leaves that belong to one feature and say nothing without it.
const LEAVES: &[(&str, u32)] = &[
    ("monitor", 0x5),
    ("arch_perfmon", 0xa),
    ("xsave", 0xd),
    ("sgx", 0x12),
    ("intel_pt", 0x14),
    ("amx_tile", 0x1d),
    ("amx_tile", 0x1e),
    ("avx10", 0x24),
    ("svm", 0x8000_000a),
    ("ibs", 0x8000_001b),
    ("perfctr_core", 0x8000_0022),
];

/// State components in XCR0 and IA32_XSS that belong to one feature (Intel SDM 1, "Enumeration of CPU Support for XSAVE").
const COMPONENTS: &[(&str, u64)] = &[
    ("avx", 1 << 2),
    ("mpx", 3 << 3),
    ("avx512f", 7 << 5),
    ("intel_pt", 1 << 8),
    ("pku", 1 << 9),
    ("amx_tile", 3 << 17),
];
/// Shadow stacks and indirect branch tracking share theirs.
const CET: u64 = 3 << 11;

/// Bits of leaf 1 edx that AMD repeats in leaf 0x8000_0001 edx.
const REPEATED: u32 = 0x0183_f3ff;

/// What a guest may be given.
pub struct Given(Vec<CpuidEntry>);

impl Given {
    /// What KVM says that it supports, and what it leaves to others to say: that there is a hypervisor, a TSC-deadline timer if
    /// the local APIC has one, and `MWAIT` if that does not leave the guest, with the host's own leaf 5.
    pub fn new(supported: Vec<CpuidEntry>, tsc_deadline: bool, mwait: Option<CpuidEntry>) -> Self {
        let mut given = Self(supported);
        given.put("hypervisor", true);
        given.put("tsc_deadline_timer", tsc_deadline);
        if let Some(leaf) = mwait {
            given.put("monitor", true);
            given.0.retain(|e| e.function != leaf.function);
            given.0.push(leaf);
        }
        given
    }

    /// The table that `model` makes of it, not yet any vCPU's own.
    ///
    /// # Errors
    /// The name of a feature that must be there and isn't.
    pub fn choose(mut self, model: &CpuModel) -> Result<Vec<CpuidEntry>, &'static str> {
        if let Some(missing) = model.with.iter().find(|name| !self.has(name)) {
            return Err(missing);
        }
        let mut gone = model.taken();
        gone.extend(ASKED_FOR.iter().filter(|name| !model.with.contains(name)));
        for name in &gone {
            self.put(name, false);
        }
        self.empty_leaves(&gone);
        self.drop_state(&gone);
        self.repeat();
        Ok(self.0)
    }

    /// The names of all features that are there.
    pub fn names(&self) -> Vec<&'static str> {
        let mut names: Vec<&str> = Vec::new();
        for (name, at) in cpu_features() {
            if self.is_set(at) && !names.contains(&name) {
                names.push(name);
            }
        }
        names
    }

    fn has(&self, name: &str) -> bool {
        cpuid_bits(name).any(|at| self.is_set(at))
    }

    fn is_set(&self, at: CpuidBits) -> bool {
        let entry = self.0.iter().find(|e| (e.function, e.index) == (at.leaf, at.sub_leaf));
        entry.is_some_and(|e| *register(&mut e.clone(), at.register) & at.bits != 0)
    }

    fn put(&mut self, name: &str, there: bool) {
        for at in cpuid_bits(name) {
            for entry in self.0.iter_mut().filter(|e| (e.function, e.index) == (at.leaf, at.sub_leaf)) {
                let register = register(entry, at.register);
                *register = if there { *register | at.bits } else { *register & !at.bits };
            }
        }
    }

    fn empty_leaves(&mut self, gone: &[&str]) {
        for (_, leaf) in LEAVES.iter().filter(|(name, _)| gone.contains(name)) {
            for entry in self.0.iter_mut().filter(|e| e.function == *leaf) {
                (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
            }
        }
    }

    /// Takes the state components of features that are gone out of leaf 0xd, and their room out of its sizes.
    fn drop_state(&mut self, gone: &[&str]) {
        let mut state: u64 = COMPONENTS.iter().filter(|(name, _)| gone.contains(name)).map(|(_, bits)| bits).sum();
        let one_gone = gone.contains(&"user_shstk") || gone.contains(&"ibt");
        if one_gone && !self.has("user_shstk") && !self.has("ibt") {
            state |= CET;
        }
        if state == 0 {
            return;
        }
        self.0.retain(|e| e.function != 0xd || e.index < 2 || e.index > 63 || state >> e.index & 1 == 0);
        // Room of the components that XCR0 can still name: the legacy area and the header, then each at its place.
        let parts = self.0.iter().filter(|e| e.function == 0xd && e.index >= 2 && e.ecx & 1 == 0);
        let size = parts.map(|e| e.ebx.saturating_add(e.eax)).max().unwrap_or(0).max(576);
        for entry in self.0.iter_mut().filter(|e| e.function == 0xd) {
            let (low, high) = (!(state as u32), !((state >> 32) as u32));
            match entry.index {
                0 if entry.eax != 0 => {
                    (entry.eax, entry.edx) = (entry.eax & low, entry.edx & high);
                    (entry.ebx, entry.ecx) = (size, size);
                }
                1 => (entry.ecx, entry.edx) = (entry.ecx & low, entry.edx & high),
                _ => {}
            }
        }
    }

    /// AMD's copy of leaf 1 has no more than leaf 1.
    fn repeat(&mut self) {
        let first = |e: &&CpuidEntry| e.function == 0 && e.ebx == u32::from_le_bytes(*b"Auth");
        let one = self.0.iter().find(|e| e.function == 1).map(|e| e.edx);
        if let (Some(_), Some(edx)) = (self.0.iter().find(first), one) {
            for entry in self.0.iter_mut().filter(|e| e.function == 0x8000_0001) {
                entry.edx &= !REPEATED | edx;
            }
        }
    }
}

fn register(entry: &mut CpuidEntry, which: CpuidRegister) -> &mut u32 {
    match which {
        CpuidRegister::Eax => &mut entry.eax,
        CpuidRegister::Ebx => &mut entry.ebx,
        CpuidRegister::Ecx => &mut entry.ecx,
        CpuidRegister::Edx => &mut entry.edx,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use spec::FromText;

    use super::*;

    fn entry(function: u32, index: u32, registers: [u32; 4]) -> CpuidEntry {
        let [eax, ebx, ecx, edx] = registers;
        CpuidEntry { function, index, flags: u32::from(function == 0xd), eax, ebx, ecx, edx, ..Default::default() }
    }

    /// A host that has everything there is a name for, and state for AVX, MPX, AVX-512, PKU, AMX and CET.
    fn everything(vendor: &[u8; 4]) -> Vec<CpuidEntry> {
        let mut all = vec![entry(0, 0, [0x24, u32::from_le_bytes(*vendor), 0, 0])];
        for leaf in [1, 5, 6, 0xa, 0x12, 0x14, 0x1d, 0x1e, 0x24, 0x8000_0001, 0x8000_0007, 0x8000_0008, 0x8000_000a] {
            all.push(entry(leaf, 0, [u32::MAX; 4]));
        }
        all.extend((0..3).map(|sub| entry(7, sub, [u32::MAX; 4])));
        all.push(entry(0xd, 0, [0x602e7 | 3 << 3, 11008, 11008, 0]));
        all.push(entry(0xd, 1, [u32::MAX, 0, 1 << 8 | CET as u32, 0]));
        for (part, size, at) in
            [(2, 256, 576), (3, 64, 960), (4, 64, 1024), (5, 64, 1088), (6, 512, 1152), (7, 1024, 1664), (9, 8, 2688)]
        {
            all.push(entry(0xd, part, [size, at, 0, 0]));
        }
        all.push(entry(0xd, 11, [16, 0, 1, 0]));
        all.push(entry(0xd, 12, [24, 0, 1, 0]));
        all.push(entry(0xd, 17, [64, 2752, 2, 0]));
        all.push(entry(0xd, 18, [8192, 2816, 6, 0]));
        all
    }

    fn made(vendor: &[u8; 4], model: &str) -> Given {
        let model = CpuModel::from_text(model).unwrap();
        Given(Given(everything(vendor)).choose(&model).unwrap())
    }

    fn leaf(given: &Given, function: u32, index: u32) -> Option<[u32; 4]> {
        let entry = given.0.iter().find(|e| (e.function, e.index) == (function, index))?;
        Some([entry.eax, entry.ebx, entry.ecx, entry.edx])
    }

    #[test]
    fn host_is_what_kvm_gives_but_performance_counters() {
        let before = everything(b"Genu");
        let after = made(b"Genu", "host");
        for (old, new) in before.iter().zip(&after.0) {
            let mut old = *old;
            match old.function {
                0xa => (old.eax, old.ebx, old.ecx, old.edx) = (0, 0, 0, 0),
                0x8000_0001 => old.ecx &= !(1 << 23 | 1 << 24 | 1 << 28),
                _ => {}
            }
            assert_eq!(old, *new);
        }
        let kept = made(b"Genu", "host,+arch_perfmon,+perfctr_core");
        assert_eq!(leaf(&kept, 0xa, 0), Some([u32::MAX; 4]));
        assert!(kept.has("perfctr_core") && !kept.has("perfctr_llc"));
    }

    /// Each name by itself: it is gone, what needs it is gone, and all else is as it was, but for bits that have two names.
    #[test]
    fn each_feature_can_be_taken_away() {
        let host = made(b"Genu", "host").names();
        for name in &host {
            let Ok(model) = CpuModel::from_text(&format!("-{name}")) else { continue };
            let given = Given(Given(everything(b"Genu")).choose(&model).unwrap());
            let (left, taken) = (given.names(), model.taken());
            for lost in host.iter().filter(|n| !left.contains(n)) {
                let same_bit = cpuid_bits(lost).all(|at| cpuid_bits(name).any(|own| own == at));
                let leaf = |at: CpuidBits| LEAVES.iter().any(|(of, leaf)| taken.contains(of) && at.leaf == *leaf);
                assert!(taken.contains(lost) || same_bit || cpuid_bits(lost).all(leaf), "{lost} went with {name}");
            }
            assert!(left.iter().all(|kept| !taken.contains(kept)), "without {name}");
        }
    }

    #[test]
    fn state_goes_with_its_features() {
        let masks = |model: &str| leaf(&made(b"Genu", model), 0xd, 0).unwrap();
        assert_eq!(masks("-sse4_2"), [0x602ff, 11008, 11008, 0], "untouched");
        assert_eq!(masks("-avx512f"), [0x6021f, 11008, 11008, 0], "the place of AMX stays");
        assert_eq!(masks("-amx_tile"), [0x2ff, 2696, 2696, 0]);
        assert_eq!(masks("-amx_tile,-avx512f,-pku"), [0x1f, 1088, 1088, 0]);
        assert_eq!(masks("-amx_tile,-avx,-pku,-mpx"), [3, 576, 576, 0]);
        assert_eq!(masks("-xsave"), [0; 4]);
        let given = made(b"Genu", "-amx_tile,-user_shstk");
        assert_eq!(leaf(&given, 0xd, 17), None);
        assert!(leaf(&given, 0xd, 11).is_some(), "indirect branch tracking still has it");
        assert_eq!((leaf(&given, 0x1d, 0), leaf(&given, 0x1e, 0)), (Some([0; 4]), Some([0; 4])));
        let given = made(b"Genu", "-ibt,-user_shstk,-intel_pt");
        assert_eq!((leaf(&given, 0xd, 11), leaf(&given, 0xd, 12)), (None, None));
        assert_eq!(leaf(&given, 0xd, 1).unwrap()[2], 0);
    }

    #[test]
    fn amd_says_leaf_one_twice() {
        let edx = |vendor, model: &str| leaf(&made(vendor, model), 0x8000_0001, 0).unwrap()[3];
        assert_eq!(edx(b"Auth", "-mmx") & (1 << 23), 0);
        assert_eq!(edx(b"Genu", "-vme") & (1 << 1), 1 << 1, "the bit is AMD's alone");
        assert_ne!(edx(b"Auth", "-vme") & (1 << 29), 0, "long mode is not one of those");
    }

    #[test]
    fn what_kvm_cannot_give_is_named() {
        let model = CpuModel::from_text("+x2apic,+avx2").unwrap();
        let bare = vec![entry(1, 0, [0, 0, 1 << 21, 0]), entry(7, 0, [0; 4])];
        assert_eq!(Given(bare.clone()).choose(&model), Err("avx2"));
        let given = Given::new(bare, true, Some(entry(5, 0, [64, 64, 3, 0x20])));
        assert_eq!(given.names(), ["monitor", "x2apic", "tsc_deadline_timer", "hypervisor"]);
        assert_eq!(leaf(&given, 5, 0), Some([64, 64, 3, 0x20]));
        let none = Given::new(vec![entry(1, 0, [0, 0, u32::MAX, 0])], false, None);
        assert!(!none.has("tsc_deadline_timer") && none.has("hypervisor"));
    }

    /// Against the kernel: what `/proc/cpuinfo` shows of this host, its CPUID says at the same place.
    #[test]
    fn names_are_those_of_proc_cpuinfo() {
        let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let Some(flags) = text.lines().find_map(|l| l.strip_prefix("flags")) else {
            println!("skipped: /proc/cpuinfo shows no flags");
            return;
        };
        let flags: Vec<&str> = flags.split_ascii_whitespace().collect();
        for (name, _) in cpu_features().filter(|(name, _)| flags.contains(name)) {
            let is_set = |at: CpuidBits| {
                let [eax, ebx, ecx, edx] = super::super::host::cpuid(at.leaf, at.sub_leaf);
                let value = match at.register {
                    CpuidRegister::Eax => eax,
                    CpuidRegister::Ebx => ebx,
                    CpuidRegister::Ecx => ecx,
                    CpuidRegister::Edx => edx,
                };
                value & at.bits != 0
            };
            assert!(cpuid_bits(name).any(is_set), "{name} is in /proc/cpuinfo");
        }
    }
}
