// SPDX-License-Identifier: Apache-2.0
//! The flat view: who answers at each address once priorities and aliases are resolved. Rendered by writers, searched by
//! every vCPU thread on every exit; never changed once it is published.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{EventFd, Gpa, Hva};

use super::index::Index;
use super::tree::{Kind, ROOT, RegionId, Tree};

/// Who answers in a range.
#[derive(Clone, Debug)]
pub enum Target<D> {
    /// RAM; the host address of the range's first byte.
    Ram(Hva),
    /// A device's own memory; the host address of the range's first byte.
    Direct(Hva),
    /// Memory that only reads; the device answers writes, the range's first byte being this one of its.
    Rom(Hva, Option<(D, u64)>),
    /// A device.
    Mmio(D),
}

/// A run of addresses with one answer.
#[derive(Clone, Debug)]
pub struct FlatRange<D> {
    /// First address.
    pub start: u64,
    /// Bytes, at least one.
    pub size: u64,
    /// Whose it is.
    pub region: RegionId,
    /// First byte of it that is seen here.
    pub offset: u64,
    /// Who answers.
    pub target: Target<D>,
    /// Writes are noted.
    pub log: bool,
}

impl<D> FlatRange<D> {
    /// First address past the range.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.start + self.size
    }

    /// Whether the same memory or device answers in the same way at the same addresses.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (self.start, self.size, self.region, self.offset) == (other.start, other.size, other.region, other.offset)
            && self.is_readonly() == other.is_readonly()
    }

    const fn is_readonly(&self) -> bool {
        matches!(self.target, Target::Rom(..))
    }

    /// Host address of its first byte, if it is memory, and whether the guest may write there.
    #[must_use]
    pub const fn memory(&self) -> Option<(Hva, bool)> {
        match &self.target {
            Target::Ram(host) | Target::Direct(host) => Some((*host, true)),
            Target::Rom(host, _) => Some((*host, false)),
            Target::Mmio(_) => None,
        }
    }

    /// Whether `next` goes on where this one ends, in address and in what answers.
    fn goes_on(&self, next: &Self) -> bool {
        self.end() == next.start
            && self.region == next.region
            && self.offset.checked_add(self.size) == Some(next.offset)
            && (self.log, self.is_readonly()) == (next.log, next.is_readonly())
    }
}

/// A doorbell at its address.
#[derive(Clone, Debug)]
pub struct FlatDoorbell {
    /// Where.
    pub at: Gpa,
    /// Only 32-bit writes of this value; `None` is any write.
    pub value: Option<u32>,
    /// What is signalled.
    pub fd: Arc<EventFd>,
}

impl FlatDoorbell {
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (self.at, self.value) == (other.at, other.value) && Arc::ptr_eq(&self.fd, &other.fd)
    }
}

/// A rendered address space.
#[derive(Clone, Debug)]
pub struct FlatView<D> {
    /// Finds a range by an address.
    index: Index,
    ranges: Box<[FlatRange<D>]>,
    doorbells: Box<[FlatDoorbell]>,
}

impl<D: Clone> FlatView<D> {
    /// Where nothing answers.
    pub(super) fn empty() -> Self {
        Self { index: Index::new(Box::new([])), ranges: Box::new([]), doorbells: Box::new([]) }
    }

    /// Renders `tree`.
    #[must_use]
    pub fn render(tree: &Tree<D>) -> Self {
        let mut canvas = Canvas { tree, ranges: BTreeMap::new() };
        let all = (0, i128::from(u64::MAX));
        canvas.draw(ROOT, 0, all, false);
        let mut ranges: Vec<FlatRange<D>> = Vec::with_capacity(canvas.ranges.len());
        for next in canvas.ranges.into_values() {
            match ranges.last_mut() {
                Some(last) if last.goes_on(&next) => last.size += next.size,
                _ => ranges.push(next),
            }
        }
        let doorbells = ranges.iter().flat_map(|range| doorbells(tree, range)).collect();
        let index = Index::new(ranges.iter().map(|r| r.start).collect());
        Self { index, ranges: ranges.into(), doorbells }
    }

    /// The range at `at`.
    #[inline]
    #[must_use]
    pub fn find(&self, at: u64) -> Option<&FlatRange<D>> {
        let range = self.ranges.get(self.index.count_to(at).wrapping_sub(1))?;
        (at - range.start < range.size).then_some(range)
    }

    /// The host address of `len` bytes of RAM at `at`, if all of them are in one range.
    #[inline]
    #[must_use]
    pub fn translate(&self, at: Gpa, len: u64) -> Option<Hva> {
        let range = self.find(at.0)?;
        let Target::Ram(host) = range.target else { return None };
        let skip = at.0 - range.start;
        (len <= range.size - skip).then_some(Hva(host.0 + skip))
    }

    /// All ranges, lowest first; they don't overlap.
    #[must_use]
    pub fn ranges(&self) -> &[FlatRange<D>] {
        &self.ranges
    }

    /// All doorbells that can be reached.
    #[must_use]
    pub fn doorbells(&self) -> &[FlatDoorbell] {
        &self.doorbells
    }
}

fn doorbells<D: Clone>(tree: &Tree<D>, range: &FlatRange<D>) -> Vec<FlatDoorbell> {
    let Ok(region) = tree.get(range.region) else { return Vec::new() };
    let seen = region.doorbells.iter().filter(|bell| {
        let from_start = bell.offset.checked_sub(range.offset);
        from_start.is_some_and(|skip| skip < range.size)
    });
    seen.map(|bell| FlatDoorbell {
        at: Gpa(range.start + (bell.offset - range.offset)),
        value: bell.value,
        fd: bell.fd.clone(),
    })
    .collect()
}

/// Ranges drawn so far, by their start; what is there is never drawn over.
struct Canvas<'a, D> {
    tree: &'a Tree<D>,
    ranges: BTreeMap<u64, FlatRange<D>>,
}

impl<D: Clone> Canvas<'_, D> {
    /// Draws region `id`, whose first byte would be at `base`, as far as it is inside `clip`.
    fn draw(&mut self, id: RegionId, base: i128, clip: (i128, i128), readonly: bool) {
        let Ok(region) = self.tree.get(id) else { return };
        let clip = (clip.0.max(base), clip.1.min(base + i128::from(region.size)));
        if clip.0 >= clip.1 {
            return;
        }
        if let Kind::Alias { of, offset, readonly: masked } = region.kind {
            return self.draw(of, base - i128::from(offset), clip, readonly || masked);
        }
        let tree = self.tree;
        for (at, child) in tree.children(id) {
            self.draw(child, base + i128::from(at), clip, readonly);
        }
        let make = |start: u64, size: u64| {
            let offset = (i128::from(start) - base) as u64;
            let moved = |host: Hva| Hva(host.0 + offset);
            let target = match (&region.kind, readonly) {
                (Kind::Ram(host), false) => Target::Ram(moved(*host)),
                (Kind::Direct(host), false) => Target::Direct(moved(*host)),
                (Kind::Ram(host) | Kind::Direct(host), true) => Target::Rom(moved(*host), None),
                (Kind::Rom(host, device, at), _) => Target::Rom(moved(*host), Some((device.clone(), at + offset))),
                (Kind::Mmio(device), _) => Target::Mmio(device.clone()),
                (Kind::Container | Kind::Alias { .. }, _) => return None,
            };
            Some(FlatRange { start, size, region: id, offset, target, log: region.log })
        };
        // The clip lies within addresses.
        self.fill(clip.0 as u64, clip.1 as u64, make);
    }

    /// Draws into what is free of `start..end`.
    fn fill(&mut self, start: u64, end: u64, make: impl Fn(u64, u64) -> Option<FlatRange<D>>) {
        let mut at = self.ranges.range(..=start).next_back().map_or(start, |(_, r)| r.end().max(start));
        let mut gaps = Vec::new();
        for range in self.ranges.range(start..end).map(|(_, r)| r) {
            if range.start > at {
                gaps.push((at, range.start));
            }
            at = at.max(range.end());
        }
        if at < end {
            gaps.push((at, end));
        }
        let new = gaps.into_iter().filter_map(|(from, to)| make(from, to - from));
        self.ranges.extend(new.map(|range| (range.start, range)));
    }
}
