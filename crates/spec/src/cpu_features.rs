// SPDX-License-Identifier: Apache-2.0
//! Names of CPU features and where CPUID says them: those of `/proc/cpuinfo`, and for bits that it does not show, the
//! kernel's own. Read by `cpu_model` for what the user says and by `machine` for the tables of its vCPUs.
//!
//! Bits are those of Intel SDM 2A "CPUID" and AMD APM 3, appendix E. A name may stand in several places, where Intel and
//! AMD chose different ones or one bit has several meanings.

/// A register of CPUID's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuidRegister {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

/// One place that says whether a feature is there: any of the bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuidBits {
    /// EAX as CPUID is asked.
    pub leaf: u32,
    /// ECX as CPUID is asked.
    pub sub_leaf: u32,
    /// Where in the answer.
    pub register: CpuidRegister,
    /// Which bits of it.
    pub bits: u32,
}

/// Leaf, sub-leaf, register, and the names of its bits from 0 up; a dot has none.
type Word = (u32, u32, CpuidRegister, &'static str);

use CpuidRegister::{Eax, Ebx, Ecx, Edx};

const WORDS: &[Word] = &[
    (
        0x1,
        0,
        Edx,
        "fpu vme de pse tsc msr pae mce cx8 apic . sep mtrr pge mca cmov pat pse36 pn clflush . dts acpi mmx fxsr sse sse2 \
         ss ht tm ia64 pbe",
    ),
    (
        0x1,
        0,
        Ecx,
        "pni pclmulqdq dtes64 monitor ds_cpl vmx smx est tm2 ssse3 cid sdbg fma cx16 xtpr pdcm . pcid dca sse4_1 sse4_2 \
         x2apic movbe popcnt tsc_deadline_timer aes xsave . avx f16c rdrand hypervisor",
    ),
    (0x6, 0, Eax, "dtherm ida arat . pln . pts hwp hwp_notify hwp_act_window hwp_epp hwp_pkg_req . . . . . . . hfi"),
    (0x6, 0, Ecx, "aperfmperf . . epb"),
    (
        0x7,
        0,
        Ebx,
        "fsgsbase tsc_adjust sgx bmi1 hle avx2 . smep bmi2 erms invpcid rtm cqm . mpx rdt_a avx512f avx512dq rdseed adx \
         smap avx512ifma . clflushopt clwb intel_pt avx512pf avx512er avx512cd sha_ni avx512bw avx512vl",
    ),
    (
        0x7,
        0,
        Ecx,
        ". avx512vbmi umip pku . waitpkg avx512_vbmi2 user_shstk gfni vaes vpclmulqdq avx512_vnni avx512_bitalg tme \
         avx512_vpopcntdq . la57 . . . . . rdpid . bus_lock_detect cldemote . movdiri movdir64b enqcmd sgx_lc",
    ),
    (
        0x7,
        0,
        Edx,
        ". . avx512_4vnniw avx512_4fmaps fsrm uintr . . avx512_vp2intersect . md_clear . . . serialize hybrid_cpu tsxldtrk . \
         pconfig arch_lbr ibt . amx_bf16 avx512_fp16 amx_tile amx_int8 ibrs stibp flush_l1d arch_capabilities . ssbd",
    ),
    (0x7, 0, Edx, ". . . . . . . . . . . . . . . . . . . . . . . . . . ibpb"),
    (
        0x7,
        1,
        Eax,
        "sha512 sm3 sm4 . avx_vnni avx512_bf16 lass cmpccxadd arch_perfmon_ext . fzrm fsrs fsrc . . . . fred lkgs wrmsrns . \
         amx_fp16 . avx_ifma . . lam",
    ),
    (
        0x7,
        1,
        Edx,
        ". . . . avx_vnni_int8 avx_ne_convert . . amx_complex . avx_vnni_int16 . . . prefetchiti . . . . avx10",
    ),
    (0x7, 2, Edx, "intel_psfd ipred_ctrl rrsba_ctrl ddpd_u bhi_ctrl mcdt_no"),
    (0xd, 1, Eax, "xsaveopt xsavec xgetbv1 xsaves xfd"),
    (
        0x8000_0001,
        0,
        Edx,
        ". . . . . . . . . . . syscall . . . . . . . mp nx . mmxext . . fxsr_opt pdpe1gb rdtscp . lm 3dnowext 3dnow",
    ),
    (
        0x8000_0001,
        0,
        Ecx,
        "lahf_lm cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw ibs xop skinit wdt . lwp fma4 tce \
         . nodeid_msr . tbm topoext perfctr_core perfctr_nb . bpext ptsc perfctr_llc mwaitx",
    ),
    (0x8000_0007, 0, Edx, ". . . . . . . . nonstop_tsc"),
    (0x8000_0007, 0, Edx, ". . . . . . . . constant_tsc"),
    (
        0x8000_0008,
        0,
        Ebx,
        "clzero irperf xsaveerptr . rdpru . . . . wbnoinvd . . ibpb . ibrs stibp . stibp_always_on . . . . . amd_ppin ssbd \
         virt_ssbd . cppc amd_psfd btc_no . brs",
    ),
    (
        0x8000_000a,
        0,
        Edx,
        "npt lbrv svm_lock nrip_save tsc_scale vmcb_clean flushbyasid decodeassists . . pausefilter . pfthreshold avic . \
         v_vmsave_vmload vgif . x2avic . v_spec_ctrl . . . . vnmi",
    ),
    (0x8000_001f, 0, Eax, "sme sev . sev_es sev_snp . . . . . sme_coherent"),
    (
        0x8000_0021,
        0,
        Eax,
        ". . . . . . . . autoibrs no_smm_ctl_msr . . . . . . . . . . . . . . . . . sbpb ibpb_brtype srso_no",
    ),
];

/// Features that are more than a bit.
const MORE: &[(&str, CpuidBits)] = &[("arch_perfmon", CpuidBits { leaf: 0xa, sub_leaf: 0, register: Eax, bits: 0xff })];

/// Features that are of no use without another: each of the first with the second.
const NEEDS: &[(&str, &str)] = &[
    ("sse", "fxsr"),
    ("sse2", "sse"),
    ("pni ssse3 aes pclmulqdq sha_ni gfni", "sse2"),
    ("sse4_1 sse4a", "ssse3"),
    ("sse4_2", "sse4_1"),
    ("mmxext 3dnow", "mmx"),
    ("3dnowext", "3dnow"),
    ("xsaveopt xsavec xgetbv1 xsaves xfd avx mpx pku amx_tile xsaveerptr", "xsave"),
    ("user_shstk ibt uintr enqcmd", "xsaves"),
    ("avx2 f16c fma fma4 xop vaes vpclmulqdq sha512 sm3 sm4", "avx"),
    ("vaes", "aes"),
    ("vpclmulqdq", "pclmulqdq"),
    ("avx512f avx_vnni avx_ifma avx_vnni_int8 avx_vnni_int16 avx_ne_convert", "avx2"),
    (
        "avx512dq avx512ifma avx512pf avx512er avx512cd avx512bw avx512vl avx512_vnni avx512_vpopcntdq avx512_4vnniw \
         avx512_4fmaps avx512_vp2intersect avx10",
        "avx512f",
    ),
    ("avx512vbmi avx512_vbmi2 avx512_bitalg avx512_bf16 avx512_fp16", "avx512bw"),
    ("amx_bf16 amx_int8 amx_fp16 amx_complex", "amx_tile"),
    ("invpcid", "pcid"),
    ("sgx_lc", "sgx"),
    ("perfctr_llc perfctr_nb", "perfctr_core"),
    (
        "npt lbrv svm_lock nrip_save tsc_scale vmcb_clean flushbyasid decodeassists pausefilter pfthreshold avic \
         v_vmsave_vmload vgif x2avic v_spec_ctrl vnmi",
        "svm",
    ),
];

/// The names of all CPU features and where CPUID says that they are there, in the order of the leaves. A name in several
/// places is there if any of them says so.
pub fn cpu_features() -> impl Iterator<Item = (&'static str, CpuidBits)> {
    let in_words = WORDS.iter().flat_map(|&(leaf, sub_leaf, register, names)| {
        let named = (0..).zip(names.split_ascii_whitespace()).filter(|(_, name)| *name != ".");
        named.map(move |(bit, name)| (name, CpuidBits { leaf, sub_leaf, register, bits: 1u32 << bit }))
    });
    in_words.chain(MORE.iter().copied())
}

/// Where CPUID says whether the feature `name` is there; empty for a name that is none.
pub fn cpuid_bits(name: &str) -> impl Iterator<Item = CpuidBits> {
    cpu_features().filter(move |(known, _)| *known == name).map(|(_, at)| at)
}

/// The features that are of no use without `name` itself.
pub fn needed_by(name: &str) -> impl Iterator<Item = &'static str> {
    NEEDS.iter().filter(move |(_, what)| *what == name).flat_map(|(who, _)| who.split_ascii_whitespace())
}

/// What the feature `name` is of no use without.
pub fn needs(name: &str) -> impl Iterator<Item = &'static str> {
    NEEDS.iter().filter(move |(who, _)| who.split_ascii_whitespace().any(|n| n == name)).map(|(_, what)| *what)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn words_are_words() {
        for word in WORDS {
            assert!(word.3.split_ascii_whitespace().count() <= 32, "{word:?}");
        }
        for (name, _) in cpu_features() {
            assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_'), "{name}");
            assert!(cpuid_bits(name).count() >= 1, "{name}");
        }
        assert_eq!(cpuid_bits("nonsense").count(), 0);
    }

    /// A few bits that everybody knows, from each word that has many.
    #[test]
    fn names_stand_where_the_manuals_say() {
        for (name, leaf, sub_leaf, register, bit) in [
            ("pbe", 1, 0, Edx, 31),
            ("hypervisor", 1, 0, Ecx, 31),
            ("x2apic", 1, 0, Ecx, 21),
            ("avx512vl", 7, 0, Ebx, 31),
            ("avx512f", 7, 0, Ebx, 16),
            ("la57", 7, 0, Ecx, 16),
            ("sgx_lc", 7, 0, Ecx, 30),
            ("arch_capabilities", 7, 0, Edx, 29),
            ("lam", 7, 1, Eax, 26),
            ("avx10", 7, 1, Edx, 19),
            ("lm", 0x8000_0001, 0, Edx, 29),
            ("mwaitx", 0x8000_0001, 0, Ecx, 29),
            ("topoext", 0x8000_0001, 0, Ecx, 22),
            ("btc_no", 0x8000_0008, 0, Ebx, 29),
            ("vnmi", 0x8000_000a, 0, Edx, 25),
            ("srso_no", 0x8000_0021, 0, Eax, 29),
        ] {
            let found: Vec<_> = cpuid_bits(name).collect();
            assert_eq!(found, [CpuidBits { leaf, sub_leaf, register, bits: 1 << bit }], "{name}");
        }
        let both: Vec<_> = cpuid_bits("ibpb").map(|at| (at.leaf, at.bits)).collect();
        assert_eq!(both, [(7, 1 << 26), (0x8000_0008, 1 << 12)]);
    }

    #[test]
    fn needs_are_features_and_end() {
        fn depth(name: &str) -> usize {
            needs(name).map(|need| depth(need) + 1).max().unwrap_or(0)
        }
        for (who, what) in NEEDS {
            for name in who.split_ascii_whitespace().chain([*what]) {
                assert!(cpu_features().any(|(known, _)| known == name), "{name}");
                assert!(depth(name) < 8, "{name}");
            }
        }
    }
}
