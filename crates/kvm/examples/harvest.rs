// SPDX-License-Identifier: Apache-2.0
//! What it costs to learn which pages of 1 GiB a guest wrote: by bitmap, by bitmap with manual protection, and by ring, for
//! few pages and for many. Part of `make bench-memory`; needs a KVM, but only for a guest of thirty bytes.

#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::{Duration, Instant};

use common::{LOGGED, Writer};
use kvm::bitmap_words;

const SIZE: u64 = 1 << 30;
const PAGES: u32 = (SIZE / 4096) as u32;
/// The largest that KVM has, 65,536 entries.
const RING: u32 = 1 << 20;
const ROUNDS: u32 = 3;

fn timed(act: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    act();
    begun.elapsed()
}

fn main() {
    println!("\nharvest of the dirty log of 1 GiB, microseconds (best of {ROUNDS})");
    println!("    {:>12} {:>12} {:>12} {:>12} {:>12}", "pages", "bitmap", "manual get", "and clear", "ring");
    for dirty in [0, 64, 4096, 32_768] {
        let (bitmap, manual, ring) = (by_bitmap(dirty, false), by_bitmap(dirty, true), by_ring(dirty));
        let us = |took: Option<Duration>| took.map_or("-".to_owned(), |t| format!("{:.1}", t.as_secs_f64() * 1e6));
        println!(
            "    {dirty:>12} {:>12} {:>12} {:>12} {:>12}",
            us(bitmap.map(|b| b.0)),
            us(manual.map(|m| m.0)),
            us(manual.map(|m| m.1)),
            us(ring)
        );
    }
}

/// Reading, and clearing where that is apart.
fn by_bitmap(dirty: u32, manual: bool) -> Option<(Duration, Duration)> {
    let mut guest = Writer::new(SIZE, |vm| !manual || vm.manual_dirty_protect())?;
    let mut bitmap = vec![0; bitmap_words(SIZE)];
    let mut best = (Duration::MAX, Duration::MAX);
    for _ in 0..ROUNDS {
        if dirty > 0 {
            guest.write(0, dirty, PAGES / dirty);
        }
        let get = timed(|| guest.dirty_bitmap(&mut bitmap).unwrap());
        assert_eq!(bitmap.iter().map(|word| word.count_ones()).sum::<u32>(), dirty);
        let clear = timed(|| {
            if manual {
                guest.vm.clear_dirty(LOGGED, 0, PAGES, &bitmap).unwrap();
            }
        });
        best = (best.0.min(get), best.1.min(clear));
    }
    Some(best)
}

/// Taking and resetting.
fn by_ring(dirty: u32) -> Option<Duration> {
    let mut guest = Writer::new(SIZE, |vm| vm.dirty_ring(RING))?;
    let mut ring = guest.vcpu.dirty_ring(RING).ok()?;
    let mut best = Duration::MAX;
    for _ in 0..ROUNDS {
        if dirty > 0 {
            guest.write(0, dirty, PAGES / dirty);
        }
        let mut seen = 0;
        best = best.min(timed(|| {
            ring.harvest(|slot, _| seen += u32::from(slot == LOGGED));
            let _ = guest.vm.reset_dirty_rings();
        }));
        assert_eq!(seen, dirty);
    }
    Some(best)
}
