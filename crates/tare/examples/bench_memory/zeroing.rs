// SPDX-License-Identifier: Apache-2.0
//! Zeroing kinds over memory that exists: what the pool's threads do with memory that came back.

use std::time::Duration;

use base::mmap::Mmap;
use mem::Zeroing;

use crate::{Options, gib, timed};

/// Larger than any cache.
const SIZE: usize = 1 << 30;

pub fn run(options: &Options) {
    println!("\nzeroing 1 GiB that exists, one thread");
    let Ok(mut map) = Mmap::anonymous_aligned(SIZE, 2 << 20) else { return println!("  no memory for it") };
    map.advise_huge_pages();
    let _ = map.populate();
    let ways: Vec<Zeroing> = Zeroing::ALL.into_iter().filter(|way| way.is_there()).collect();
    let mut best = vec![Duration::MAX; ways.len()];
    for _ in 0..options.rounds.max(3) {
        for (best, way) in best.iter_mut().zip(&ways) {
            *best = timed(|| way.fill(&mut map, 0, SIZE)).1.min(*best);
        }
    }
    let erms = best.first().copied().unwrap_or_default().as_secs_f64();
    for (best, way) in best.iter().zip(&ways) {
        let seconds = best.as_secs_f64();
        println!("  zero={:<7} {:>6.2} GiB/s  {:>5.2} of erms", way.name(), gib(SIZE as u64) / seconds, erms / seconds);
    }
    println!("  zero=auto    takes {}", Zeroing::fastest().name());
}
