// SPDX-License-Identifier: Apache-2.0
//! Random histories of a disk: what a guest and its admin might do to it, from a seed; and the search for a shorter history
//! that still fails.

use std::time::{Duration, Instant};

use super::rng::Rng;

/// One request of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read and compare.
    Read {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// Write what [`fill`] gives for this name.
    Write {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// Names the content; never 0.
        id: u32,
    },
    /// Write zeroes.
    Zero {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// The space may be given back.
        unmap: bool,
    },
    /// Discard.
    Discard {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// Flush.
    Flush,
}

impl Step {
    /// First byte and length.
    #[must_use]
    pub fn range(&self) -> (u64, u64) {
        match *self {
            Self::Read { at, len }
            | Self::Write { at, len, .. }
            | Self::Zero { at, len, .. }
            | Self::Discard { at, len } => (at, len),
            Self::Flush => (0, 0),
        }
    }
}

/// Requests in flight at the same time; no two of them touch the same byte.
pub type Batch = Vec<Step>;

/// A part of a history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    /// Requests at the same time.
    Batch(Batch),
    /// The disk gets another size, while it is open.
    Resize(u64),
    /// The disk is closed and opened again; another engine may go on.
    Reopen,
    /// A snapshot with this number is taken, while the disk is closed.
    SnapshotCreate(u32),
    /// The disk goes back to that snapshot, while it is closed.
    SnapshotApply(u32),
    /// That snapshot is dropped, while the disk is closed.
    SnapshotDelete(u32),
}

/// What histories may do.
#[derive(Clone, Debug)]
pub struct Style {
    /// Bytes of the disk at first.
    pub size: u64,
    /// Unit of the image: requests start and end near its multiples often.
    pub cluster: u64,
    /// Requests are multiples of so many bytes.
    pub grain: u64,
    /// Longest request in bytes.
    pub longest: u64,
    /// Batches.
    pub batches: usize,
    /// Most requests in flight.
    pub depth: u64,
    /// Most snapshots at a time.
    pub snapshots: usize,
    /// One request in so many is a flush.
    pub flush: u64,
    /// With resizes.
    pub resize: bool,
    /// With reopening.
    pub reopen: bool,
}

/// What happens to a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct History {
    /// In this order.
    pub items: Vec<Item>,
}

impl History {
    /// A random one.
    #[must_use]
    pub fn random(rng: &mut Rng, style: &Style) -> Self {
        let mut items = Vec::new();
        let (mut size, mut id, mut snapshots, mut named) = (style.size, 1, Vec::new(), 0);
        for n in 0..style.batches {
            let mut batch: Batch = Vec::new();
            for _ in 0..1 + rng.below(style.depth) {
                if let Some(step) = random_step(rng, style, size, &batch, &mut id) {
                    batch.push(step);
                }
            }
            items.push(Item::Batch(batch));
            if style.resize && rng.one_in(9) {
                let clusters = (style.size / style.cluster).max(4);
                size = ((clusters / 2 + rng.below(clusters)) * style.cluster).next_multiple_of(512);
                if rng.one_in(2) {
                    size += 512 * rng.below(8);
                }
                items.push(Item::Resize(size));
            }
            if (style.reopen || style.snapshots > 0) && n + 1 < style.batches && rng.one_in(6) {
                items.push(Item::Reopen);
                if style.snapshots > 0 {
                    match rng.below(5) {
                        0..3 if snapshots.len() < style.snapshots => {
                            named += 1;
                            items.push(Item::SnapshotCreate(named));
                            snapshots.push((named, size));
                        }
                        3 if !snapshots.is_empty() => {
                            let (name, old) = *rng.pick(&snapshots);
                            items.push(Item::SnapshotApply(name));
                            size = old;
                        }
                        4 if !snapshots.is_empty() => {
                            let at = rng.below(snapshots.len() as u64) as usize;
                            items.push(Item::SnapshotDelete(snapshots.swap_remove(at).0));
                        }
                        _ => {}
                    }
                }
            }
        }
        Self { items }
    }

    /// Whether it makes sense: ranges inside the disk, snapshots that exist.
    #[must_use]
    pub fn is_sound(&self, mut size: u64) -> bool {
        let mut snapshots: Vec<(u32, u64)> = Vec::new();
        let mut closed = false;
        for item in &self.items {
            let wants_closed =
                matches!(item, Item::SnapshotCreate(_) | Item::SnapshotApply(_) | Item::SnapshotDelete(_));
            if wants_closed && !closed {
                return false;
            }
            closed = wants_closed || *item == Item::Reopen;
            match item {
                Item::Batch(batch) => {
                    if batch.iter().any(|s| s.range().0 + s.range().1 > size) {
                        return false;
                    }
                }
                Item::Resize(to) => size = *to,
                Item::Reopen => {}
                Item::SnapshotCreate(n) => snapshots.push((*n, size)),
                Item::SnapshotApply(n) => match snapshots.iter().find(|s| s.0 == *n) {
                    Some(s) => size = s.1,
                    None => return false,
                },
                Item::SnapshotDelete(n) => match snapshots.iter().position(|s| s.0 == *n) {
                    Some(at) => drop(snapshots.swap_remove(at)),
                    None => return false,
                },
            }
        }
        true
    }

    /// A shorter history for which `fails` still says true; gives up looking after `budget`.
    pub fn shrink(&self, size: u64, budget: Duration, mut fails: impl FnMut(&Self) -> bool) -> Self {
        let until = Instant::now() + budget;
        let mut best = self.clone();
        let mut chunk = best.items.len().div_ceil(2);
        while chunk > 0 && Instant::now() < until {
            let mut at = 0;
            while at < best.items.len() && Instant::now() < until {
                let mut shorter = best.clone();
                shorter.items.drain(at..(at + chunk).min(best.items.len()));
                if shorter.is_sound(size) && fails(&shorter) {
                    best = shorter;
                } else {
                    at += chunk;
                }
            }
            chunk /= 2;
        }
        for item in 0..best.items.len() {
            let mut step = 0;
            while Instant::now() < until {
                let mut shorter = best.clone();
                let Some(Item::Batch(batch)) = shorter.items.get_mut(item) else { break };
                if step >= batch.len() || batch.len() < 2 {
                    break;
                }
                batch.remove(step);
                if fails(&shorter) {
                    best = shorter;
                } else {
                    step += 1;
                }
            }
        }
        best
    }
}

fn random_step(rng: &mut Rng, style: &Style, size: u64, others: &[Step], id: &mut u32) -> Option<Step> {
    if rng.one_in(style.flush) {
        return Some(Step::Flush);
    }
    for _ in 0..10 {
        let (at, len) = random_range(rng, style, size);
        let clash = others.iter().map(Step::range).any(|(a, l)| l > 0 && at < a + l && a < at + len);
        if len == 0 || clash {
            continue;
        }
        return Some(match rng.below(20) {
            0..5 => Step::Read { at, len },
            5..14 => {
                *id += 1;
                Step::Write { at, len, id: *id }
            }
            14..16 => Step::Zero { at, len, unmap: false },
            16..18 => Step::Zero { at, len, unmap: true },
            _ => Step::Discard { at, len },
        });
    }
    None
}

fn random_range(rng: &mut Rng, style: &Style, size: u64) -> (u64, u64) {
    let grain = if rng.one_in(3) { style.grain } else { style.grain.max(512) };
    let fit = |x: u64| x / grain * grain;
    let at = match rng.below(8) {
        // At or near a cluster's edge.
        0..3 => (rng.below(size / style.cluster + 1) * style.cluster + fit(rng.below(3 * grain))).saturating_sub(grain),
        3 => size.saturating_sub(rng.below(2 * style.cluster)),
        // Most of them in a small part of the disk, so that they meet.
        4..6 => rng.below(size.min(4 * style.cluster)),
        _ => rng.below(size),
    };
    let at = fit(at.min(size.saturating_sub(1)));
    let len = match rng.below(8) {
        0..3 => grain * (1 + rng.below(8)),
        3 => style.cluster,
        4 => style.cluster * (1 + rng.below(3)),
        _ => rng.below(style.longest),
    };
    let len = fit(len).clamp(grain, style.longest.max(grain));
    (at, len.min(fit(size - at)))
}

/// Contents with this bit in their name can be compressed: all but the first word of each sector is zero.
pub const THIN: u32 = 1 << 31;

/// The 8 bytes at `word * 8` of the content named `id`; the first of each sector is the name, marked.
#[must_use]
pub fn word(id: u32, word: u64) -> u64 {
    match id {
        0 => 0,
        _ if word.is_multiple_of(64) => 0xda7a_0000_0000_0000 | u64::from(id),
        _ if id & THIN != 0 => 0,
        _ => {
            let mixed = (u64::from(id) << 40 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed ^ (mixed >> 31)
        }
    }
}

/// Bytes `at..at + len` of the content named `id`: other at each place, so that a byte in the wrong place is noticed. Name 0
/// is zeroes.
#[must_use]
pub fn fill(id: u32, at: u64, len: u64) -> Vec<u8> {
    let first = at / 8;
    let words = (at + len).div_ceil(8) - first;
    let bytes: Vec<u8> = (first..first + words).flat_map(|w| word(id, w).to_le_bytes()).collect();
    let skip = (at % 8) as usize;
    bytes[skip..skip + len as usize].to_vec()
}
