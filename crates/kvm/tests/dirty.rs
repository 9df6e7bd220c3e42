// SPDX-License-Identifier: Apache-2.0
//! Dirty tracking by bitmap and by ring, with a guest that writes to known pages. Skips where there is no KVM.

#![allow(clippy::unwrap_used)]

mod common;

use common::{LOGGED, Writer};
use kvm::{DirtyRing, bitmap_words};

const SIZE: u64 = 4 << 20;

/// The pages that are set.
fn pages(bitmap: &[u64]) -> Vec<u64> {
    (0..bitmap.len() as u64 * 64).filter(|page| bitmap[(page / 64) as usize] >> (page % 64) & 1 != 0).collect()
}

#[test]
fn a_bitmap_has_the_pages_that_were_written_and_forgets_them() {
    let Some(mut guest) = Writer::new(SIZE, |_| true) else { return };
    let mut bitmap = vec![0; bitmap_words(SIZE)];
    guest.write(3, 5, 100);
    guest.dirty_bitmap(&mut bitmap).unwrap();
    assert_eq!(pages(&bitmap), [3, 103, 203, 303, 403]);
    guest.dirty_bitmap(&mut bitmap).unwrap();
    assert_eq!(pages(&bitmap), []);
    guest.write(103, 1, 1);
    guest.dirty_bitmap(&mut bitmap).unwrap();
    assert_eq!(pages(&bitmap), [103]);
    assert!(guest.dirty_bitmap(&mut []).is_err(), "no room for it");
}

#[test]
fn with_manual_protection_pages_stay_until_they_are_cleared() {
    let Some(mut guest) = Writer::new(SIZE, kvm::Vm::manual_dirty_protect) else { return };
    let mut bitmap = vec![0; bitmap_words(SIZE)];
    guest.write(0, 8, 64);
    for _ in 0..2 {
        guest.dirty_bitmap(&mut bitmap).unwrap();
        assert_eq!(pages(&bitmap), [0, 64, 128, 192, 256, 320, 384, 448]);
    }
    guest.vm.clear_dirty(LOGGED, 64, 128, &bitmap[1..3]).unwrap();
    guest.dirty_bitmap(&mut bitmap).unwrap();
    assert_eq!(pages(&bitmap), [0, 192, 256, 320, 384, 448]);
    guest.write(64, 1, 1);
    guest.dirty_bitmap(&mut bitmap).unwrap();
    assert_eq!(pages(&bitmap), [0, 64, 192, 256, 320, 384, 448]);
    assert!(guest.vm.clear_dirty(LOGGED, 0, 1024, &bitmap[..1]).is_err(), "a bitmap that is too short");
}

#[test]
fn a_ring_has_the_pages_that_were_written_also_after_a_reset() {
    const RING: u32 = 64 << 10;
    let Some(mut guest) = Writer::new(SIZE, |vm| vm.dirty_ring(RING)) else { return };
    let mut ring = guest.vcpu.dirty_ring(RING).unwrap();
    let taken = |ring: &mut DirtyRing| {
        let mut pages = Vec::new();
        ring.harvest(|slot, page| pages.extend((slot == LOGGED).then_some(page)));
        pages.sort_unstable();
        pages
    };
    guest.write(7, 4, 10);
    assert_eq!(taken(&mut ring), [7, 17, 27, 37]);
    guest.write(7, 2, 10);
    // They are writable still, so that hardware notes nothing; a KVM that interprets the write may.
    let again = taken(&mut ring);
    assert!(again.iter().all(|page| [7, 17].contains(page)), "{again:?}");
    assert_eq!(guest.vm.reset_dirty_rings().unwrap() as usize, 4 + again.len());
    guest.write(17, 3, 20);
    assert_eq!(taken(&mut ring), [17, 37, 57]);
}
