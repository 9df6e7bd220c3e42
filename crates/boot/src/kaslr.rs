// SPDX-License-Identifier: Apache-2.0
//! Where a kernel goes that tare unpacks: the choice its own decompressor would make (arch/x86/boot/compressed/kaslr.c).

use crate::bzimage::BzImage;
use crate::cmdline;
use crate::unpack::Placement;

/// Bytes of virtual address space a kernel built for KASLR may lie in.
const KERNEL_IMAGE_SIZE: u64 = 1 << 30;
/// Least alignment: the kernel maps itself with 2 MiB pages.
const MIN_ALIGN: u64 = 2 << 20;
/// Words on the command line with which the guest restricts memory: then the physical address stays as linked.
const RESTRICTS: [&str; 4] = ["mem", "memmap", "hugepages", "efi_fake_mem"];

/// Picks addresses with `seed`; `end` is where free low RAM ends. Without a seed, or with `nokaslr`, as linked.
#[must_use]
pub fn place(bz: &BzImage, end: u64, text: &str, seed: Option<u64>) -> Placement {
    let linked = Placement { at: bz.pref, shift: 0 };
    let Some(mut state) = seed.filter(|_| !cmdline::has(text, "nokaslr")) else { return linked };
    let align = u64::from(bz.header.kernel_alignment).max(MIN_ALIGN);
    let mut pick = |space: u64| {
        let slots = space.checked_sub(bz.init_size).map_or(1, |free| free / align + 1);
        ((u128::from(mix(&mut state)) * u128::from(slots)) >> 64) as u64 * align
    };
    let shift = pick(KERNEL_IMAGE_SIZE.saturating_sub(bz.pref));
    let up = pick(end.saturating_sub(bz.pref));
    let fixed = RESTRICTS.iter().any(|word| cmdline::has(text, word));
    Placement { at: if fixed { bz.pref } else { bz.pref + up }, shift }
}

/// SplitMix64: spreads one good seed over several numbers.
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::zero_page::bare_header;

    fn bz() -> BzImage {
        let (pref, init_size) = (0x100_0000, 0x337_8000);
        BzImage { header: bare_header(), code: 0, code_len: 0, payload: 0, payload_len: 0, pref, init_size }
    }

    #[test]
    fn places_are_aligned_inside_and_many() {
        let (mut at, mut shifts) = (BTreeSet::new(), BTreeSet::new());
        let end = 0xf00_1000;
        for seed in 0..20_000 {
            let p = place(&bz(), end, "quiet", Some(seed));
            assert_eq!((p.at % MIN_ALIGN, p.shift % MIN_ALIGN), (0, 0));
            assert!(p.at >= 0x100_0000 && p.at + 0x337_8000 <= end);
            assert!(0x100_0000 + p.shift + 0x337_8000 <= KERNEL_IMAGE_SIZE);
            at.insert(p.at);
            shifts.insert(p.shift);
        }
        assert_eq!(at.len() as u64, (end - 0x100_0000 - 0x337_8000) / MIN_ALIGN + 1);
        assert_eq!(shifts.len() as u64, (KERNEL_IMAGE_SIZE - 0x100_0000 - 0x337_8000) / MIN_ALIGN + 1);
    }

    #[test]
    fn it_stays_where_it_is_told_to() {
        let linked = Placement { at: 0x100_0000, shift: 0 };
        assert_eq!(place(&bz(), 1 << 30, "", None), linked);
        assert_eq!(place(&bz(), 1 << 30, "quiet nokaslr", Some(7)), linked);
        let p = place(&bz(), 1 << 30, "mem=512M", Some(7));
        assert!(p.at == linked.at && p.shift != 0);
        assert_eq!(place(&bz(), 0x437_8000, "", Some(7)).at, linked.at, "no room to move");
    }
}
