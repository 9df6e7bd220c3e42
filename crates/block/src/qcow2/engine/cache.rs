// SPDX-License-Identifier: Apache-2.0
//! The cache of L2 tables, in slices of 4 KiB (or a cluster, if that is smaller). Any thread looks entries up without a lock;
//! who changes something holds the image's `Meta` lock, so that there is one writer at a time.
//!
//! Each slot has a sequence number, odd while it is being changed: a reader that sees the same even number before and after
//! has read one state of the slot.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

/// Slots that a slice can be in.
const WAYS: usize = 8;
/// Fewest sets: even the smallest cache serves some requests at once.
const LEAST_SETS: usize = 4;

/// A place for one slice.
#[derive(Debug, Default)]
struct Slot {
    seq: AtomicU32,
    /// Number of the slice plus one; 0: empty.
    tag: AtomicU64,
    /// Looked up since the last search for a victim.
    used: AtomicBool,
    /// Made when the slot is first filled.
    words: OnceLock<Box<[AtomicU64]>>,
}

/// The cache of one image.
#[derive(Debug)]
pub struct Cache {
    slots: Box<[Slot]>,
    sets: u64,
    /// Numbers in a slice.
    words: usize,
}

impl Cache {
    /// A cache for an image of `slices` slices of `words` numbers each, within `budget` bytes where that is possible.
    pub fn new(slices: u64, words: usize, budget: u64) -> Self {
        let slots = (budget / (words as u64 * 8)).min(slices.next_multiple_of(WAYS as u64)).min(1 << 22);
        let sets = (slots as usize).div_ceil(WAYS).max(LEAST_SETS);
        let slots = (0..sets * WAYS).map(|_| Slot::default()).collect();
        Self { slots, sets: sets as u64, words }
    }

    /// How many slices fit.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Numbers in a slice.
    pub fn words(&self) -> usize {
        self.words
    }

    fn set(&self, slice: u64) -> std::ops::Range<usize> {
        // The remainder fits: there are as many sets as fit into memory.
        let first = (slice % self.sets) as usize * WAYS;
        first..first + WAYS
    }

    /// The number at `word` of `slice`, and the one after it if `pair`; `None` if the slice is not here.
    #[inline]
    pub fn get(&self, slice: u64, word: usize, pair: bool) -> Option<(u64, u64)> {
        for slot in self.slots.get(self.set(slice))? {
            if slot.tag.load(Ordering::Acquire) != slice + 1 {
                continue;
            }
            loop {
                let before = slot.seq.load(Ordering::Acquire);
                if before & 1 != 0 {
                    std::hint::spin_loop();
                    continue;
                }
                if slot.tag.load(Ordering::Relaxed) != slice + 1 {
                    break;
                }
                let words = slot.words.get()?;
                let first = words.get(word)?.load(Ordering::Relaxed);
                let second = if pair { words.get(word + 1)?.load(Ordering::Relaxed) } else { 0 };
                fence(Ordering::Acquire);
                if slot.seq.load(Ordering::Relaxed) == before {
                    if !slot.used.load(Ordering::Relaxed) {
                        slot.used.store(true, Ordering::Relaxed);
                    }
                    return Some((first, second));
                }
            }
        }
        None
    }

    /// The slot that `slice` is in. For holders of the lock.
    pub fn find(&self, slice: u64) -> Option<usize> {
        let set = self.set(slice);
        let first = set.start;
        self.slots.get(set)?.iter().position(|s| s.tag.load(Ordering::Relaxed) == slice + 1).map(|i| first + i)
    }

    /// Puts a slice in, over one that `may_go`. `None`: none may. For holders of the lock.
    pub fn install(
        &self,
        slice: u64,
        content: impl IntoIterator<Item = u64>,
        may_go: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let index = self.victim(slice, may_go)?;
        let slot = self.slots.get(index)?;
        let words = slot.words.get_or_init(|| (0..self.words).map(|_| AtomicU64::new(0)).collect());
        self.change(slot, || {
            slot.tag.store(slice + 1, Ordering::Relaxed);
            for (to, from) in words.iter().zip(content) {
                to.store(from, Ordering::Relaxed);
            }
        });
        slot.used.store(true, Ordering::Relaxed);
        Some(index)
    }

    fn victim(&self, slice: u64, may_go: impl Fn(usize) -> bool) -> Option<usize> {
        let set = self.set(slice);
        let slots = self.slots.get(set.clone())?;
        if let Some(i) = slots.iter().position(|s| s.tag.load(Ordering::Relaxed) == 0) {
            return Some(set.start + i);
        }
        let candidates = || set.clone().filter(|i| may_go(*i));
        let idle = candidates().find(|i| self.slots.get(*i).is_some_and(|s| !s.used.load(Ordering::Relaxed)));
        let chosen = idle.or_else(|| candidates().next())?;
        for slot in slots {
            slot.used.store(false, Ordering::Relaxed);
        }
        Some(chosen)
    }

    fn change(&self, slot: &Slot, how: impl FnOnce()) {
        slot.seq.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::Release);
        how();
        slot.seq.fetch_add(1, Ordering::Release);
    }

    /// Sets the number at `word` of the slice in slot `index`, and the one after it if there is a second. For holders of
    /// the lock.
    pub fn set_entry(&self, index: usize, word: usize, first: u64, second: Option<u64>) {
        let Some(slot) = self.slots.get(index) else { return };
        let Some(words) = slot.words.get() else { return };
        self.change(slot, || {
            if let Some(w) = words.get(word) {
                w.store(first, Ordering::Relaxed);
            }
            if let (Some(second), Some(w)) = (second, words.get(word + 1)) {
                w.store(second, Ordering::Relaxed);
            }
        });
    }

    /// The slice in slot `index`, and its number. For holders of the lock.
    pub fn content(&self, index: usize) -> Option<(u64, &[AtomicU64])> {
        let slot = self.slots.get(index)?;
        Some((slot.tag.load(Ordering::Relaxed).checked_sub(1)?, slot.words.get()?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_cache_that_covers_the_image_never_evicts() {
        for slices in [1, 7, 8, 9, 64, 1000] {
            let cache = Cache::new(slices, 64, 1 << 30);
            for slice in 0..slices {
                cache.install(slice, std::iter::repeat_n(slice, 64), |_| panic!("nothing has to go")).unwrap();
            }
            for slice in 0..slices {
                assert_eq!(cache.get(slice, 63, false), Some((slice, 0)));
            }
        }
    }

    #[test]
    fn what_may_not_go_stays() {
        let cache = Cache::new(1000, 64, 0);
        let sets = cache.capacity() as u64 / WAYS as u64;
        for i in 0..8 {
            cache.install(i * sets, [i], |_| true).unwrap();
        }
        assert_eq!(cache.install(8 * sets, [8], |_| false), None);
        let keep = cache.find(3 * sets).unwrap();
        for i in 8..100 {
            cache.install(i * sets, [i], |s| s != keep).unwrap();
            assert_eq!(cache.get(i * sets, 0, false), Some((i, 0)));
        }
        assert_eq!(cache.get(3 * sets, 0, false), Some((3, 0)));
    }

    #[test]
    fn readers_see_pairs_whole() {
        let cache = Cache::new(100, 64, 0);
        let sets = cache.capacity() as u64 / WAYS as u64;
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut seen = 0u64;
                    while !stop.load(Ordering::Relaxed) || seen == 0 {
                        for slice in [0, 9 * sets] {
                            let Some((a, b)) = cache.get(slice, 10, true) else { continue };
                            assert_eq!(a ^ b, slice, "half of one state, half of another");
                            seen += 1;
                        }
                    }
                });
            }
            for i in 0..20_000u64 {
                let slice = if i % 3 == 0 { 0 } else { 9 * sets };
                let content = (0..64).map(|w| if w == 11 { i ^ slice } else { i });
                let slot = cache.find(slice).or_else(|| cache.install(slice, content, |_| true)).unwrap();
                cache.set_entry(slot, 10, i, Some(i ^ slice));
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
