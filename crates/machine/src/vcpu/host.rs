// SPDX-License-Identifier: Apache-2.0
//! The host's own CPUID, for what KVM leaves to the monitor to say. Called by `build`.

use std::arch::x86_64::{__cpuid, __cpuid_count};

use kvm::CpuidEntry;

/// EAX, EBX, ECX and EDX of the host; zeroes for a leaf past its last, where a processor says anything.
pub fn cpuid(leaf: u32, sub_leaf: u32) -> [u32; 4] {
    // SAFETY: every x86-64 processor has the instruction.
    #[allow(unused_unsafe, reason = "newer toolchains call it safe")]
    let (last, found) = unsafe { (__cpuid(leaf & 0x8000_0000), __cpuid_count(leaf, sub_leaf)) };
    if leaf > last.eax { [0; 4] } else { [found.eax, found.ebx, found.ecx, found.edx] }
}

/// Leaf 5: how large a line `MONITOR` watches, and the sleep states of `MWAIT`.
pub fn monitor_leaf() -> CpuidEntry {
    let [eax, ebx, ecx, edx] = cpuid(5, 0);
    CpuidEntry { function: 5, eax, ebx, ecx, edx, ..Default::default() }
}
