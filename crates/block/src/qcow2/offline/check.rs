// SPDX-License-Identifier: Apache-2.0
//! Check and repair. A check counts what the image refers to, compares that with the refcounts in the file and the "writable in
//! place" bits with those refcounts; the counts of its report mean what qemu-img's mean. A repair builds the refcounts anew
//! from what was counted and puts them in place at once, so that it can be interrupted.

use super::super::format::entry::{COMPRESSED, COPIED, OFFSET_MASK};
use super::super::format::header::incompatible;
use super::counts::Counts;
use super::edit::Edit;
use super::walk::{Walk, entries, host_of};
use super::{Error, Image};

/// The most lines that a report has; what is beyond is counted only.
const MAX_MESSAGES: usize = 1000;

/// What a repair may touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Refcounts that are too high: clusters that nobody uses.
    Leaks,
    /// Everything that can be put right without losing data.
    All,
}

/// The outcome of a check, or of the check after a repair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Things that could not be checked.
    pub check_errors: u64,
    /// Inconsistencies that endanger data.
    pub corruptions: u64,
    /// Clusters that are counted as used, but are not.
    pub leaks: u64,
    /// Corruptions that the repair put right.
    pub corruptions_fixed: u64,
    /// Leaks that the repair put right.
    pub leaks_fixed: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Clusters of the disk that have a host cluster or compressed data.
    pub allocated_clusters: u64,
    /// Those of them that don't follow the one before, compressed ones always.
    pub fragmented_clusters: u64,
    /// Compressed clusters.
    pub compressed_clusters: u64,
    /// Where the last used cluster ends in the file.
    pub image_end: u64,
    /// What was found, one line each, the first thousand.
    pub messages: Vec<String>,
}

impl Report {
    /// Nothing wrong.
    pub fn clean(&self) -> bool {
        self.check_errors == 0 && self.corruptions == 0 && self.leaks == 0
    }

    pub(super) fn corruption(&mut self, weight: u32, message: impl FnOnce() -> String) {
        self.corruptions += u64::from(weight);
        self.say(message);
    }

    pub(super) fn check_error(&mut self, message: String) {
        self.check_errors += 1;
        self.say(|| message);
    }

    fn say(&mut self, message: impl FnOnce() -> String) {
        if self.messages.len() < MAX_MESSAGES {
            self.messages.push(message());
        }
    }
}

/// The clusters whose refcount in the file differs from what was counted, with the former, as far as 32 bits count.
#[derive(Default)]
struct Wrong(Counts);

impl Wrong {
    fn insert(&mut self, cluster: u64, found: u64) {
        // One more, so that nought is something.
        self.0.add(cluster, u32::try_from(found).unwrap_or(u32::MAX).saturating_add(1));
    }

    fn get(&self, cluster: u64) -> Option<u64> {
        self.0.get(cluster).checked_sub(1).map(u64::from)
    }
}

impl Image {
    /// Checks all of the image; changes nothing.
    ///
    /// # Errors
    /// The file can't be read. What is wrong with the image is in the report.
    pub fn check(&self) -> Result<Report, Error> {
        self.check_telling(&mut |_, _| ())
    }

    /// As [`Image::check`]; `tell` hears how many of how many tables were read, after each.
    ///
    /// # Errors
    /// As [`Image::check`].
    pub fn check_telling(&self, tell: &mut dyn FnMut(u64, u64)) -> Result<Report, Error> {
        let mut walk = Walk::telling(self, tell)?;
        let wrong = self.compare(&mut walk)?;
        self.check_copied(&mut walk, &wrong)?;
        Ok(walk.report)
    }

    /// Checks the image, repairs what `what` allows, and checks it again. An image that comes out clean loses its dirty
    /// and corrupt marks.
    ///
    /// # Errors
    /// The file can't be read or written, or is opened for reading only.
    pub fn repair(&mut self, what: Repair) -> Result<Report, Error> {
        let mut walk = Walk::run(self)?;
        let wrong = self.compare(&mut walk)?;
        self.check_copied(&mut walk, &wrong)?;
        let before = walk.report.clone();
        let marked = self.header.has(incompatible::DIRTY | incompatible::CORRUPT);
        if !self.writable {
            return Error::refused(&self.path, "is opened for reading only, so it can't be repaired");
        }
        if before.check_errors > 0 || (before.clean() && !marked) {
            return Ok(before);
        }
        if what == Repair::Leaks && before.corruptions > 0 {
            self.lower_leaked(&walk, &wrong)?;
        } else {
            Edit::for_repair(self, walk)?.commit()?;
        }
        let mut after = self.check()?;
        if after.corruptions == 0 && after.check_errors == 0 && self.header.corrupt() {
            self.header.features.incompatible &= !incompatible::CORRUPT;
            let (at, bytes) = self.header.patch_features();
            self.write(at, &bytes)?;
            self.sync()?;
        }
        after.corruptions_fixed = before.corruptions.saturating_sub(after.corruptions);
        after.leaks_fixed = before.leaks.saturating_sub(after.leaks);
        Ok(after)
    }

    /// Compares the refcounts in the file with those counted.
    fn compare(&self, walk: &mut Walk) -> Result<Wrong, Error> {
        let (bits, width) = (self.header.cluster_bits, self.header.width);
        let group_bits = width.block_bits(bits);
        let end = self.size()?.div_ceil(self.header.cluster_size());
        let mut wrong = Wrong::default();
        let mut used_end = walk.counts.used_end().max(walk.refcounts.used_end());
        let mut judge = |walk: &mut Walk, cluster: u64, found: u64| {
            let counted = u64::from(walk.counts.get(cluster)) + u64::from(walk.refcounts.get(cluster));
            if found == counted {
                return;
            }
            wrong.insert(cluster, found);
            let line = move || format!("cluster {cluster} has refcount {found}, but is used {counted} times");
            if found > counted {
                walk.report.leaks += 1;
                walk.report.say(line);
            } else {
                walk.report.corruption(1, line);
                walk.rebuild |= found == 0;
            }
        };
        let blocks = std::mem::take(&mut walk.blocks);
        for (slot, offset) in &blocks {
            let first = slot << group_bits;
            if first >= end {
                continue;
            }
            let block = self.read(*offset, self.header.cluster_size())?;
            for i in 0..(1u64 << group_bits).min(end - first) {
                let found = width.get(&block, i as usize);
                judge(walk, first + i, found);
                if found > 0 {
                    used_end = used_end.max(first + i + 1);
                }
            }
        }
        let slots: std::collections::HashSet<u64> = blocks.iter().map(|(slot, _)| *slot).collect();
        walk.blocks = blocks;
        // Clusters that no block speaks of.
        for cluster in walk.counts.near_used(&walk.refcounts) {
            if !slots.contains(&(cluster >> group_bits)) {
                judge(walk, cluster, 0);
            }
        }
        walk.report.image_end = used_end << bits;
        Ok(wrong)
    }

    /// Compares the active tables' "writable in place" bits with the refcounts in the file.
    fn check_copied(&self, walk: &mut Walk, wrong: &Wrong) -> Result<(), Error> {
        let layout = self.layout();
        let bits = layout.cluster_bits;
        let size = self.size()?;
        let Walk { counts, refcounts, report, .. } = walk;
        let one = |offset: u64| {
            let cluster = offset >> bits;
            let counted = u64::from(counts.get(cluster)) + u64::from(refcounts.get(cluster));
            wrong.get(cluster).unwrap_or(counted) == 1
        };
        for (i, raw) in self.l1.iter().enumerate() {
            let table = raw & OFFSET_MASK;
            if table == 0 || table & (layout.cluster_size() - 1) != 0 || table >= size {
                continue;
            }
            if one(table) != (raw & COPIED != 0) {
                report.corruption(1, || format!("L1 entry {i} ({raw:#x}) says wrongly whether its table is used once"));
            }
            let bytes = self.read(table, layout.cluster_size())?;
            for (raw, bitmap, j) in entries(&layout, &bytes) {
                let guest = (i as u64) << (layout.l2_bits() + bits) | j << bits;
                if raw & COMPRESSED != 0 {
                    continue;
                }
                let Ok(mapping) = layout.classify(raw, bitmap, guest) else { continue };
                if let Some((host, copied)) = host_of(&mapping)
                    && (layout.data_file || one(host)) != copied
                {
                    report.corruption(1, || {
                        format!(
                            "L2 entry {raw:#x} of guest offset {guest:#x} says wrongly whether its cluster is used once"
                        )
                    });
                }
            }
        }
        Ok(())
    }

    /// Lowers refcounts that are too high, in place; an interruption leaves the rest of the leaks.
    fn lower_leaked(&self, walk: &Walk, wrong: &Wrong) -> Result<(), Error> {
        let width = self.header.width;
        let group_bits = width.block_bits(self.header.cluster_bits);
        for (slot, offset) in &walk.blocks {
            let mut block = self.read(*offset, self.header.cluster_size())?;
            let mut changed = false;
            for i in 0..1u64 << group_bits {
                let cluster = (slot << group_bits) + i;
                let Some(found) = wrong.get(cluster) else { continue };
                let counted = u64::from(walk.counts.get(cluster)) + u64::from(walk.refcounts.get(cluster));
                changed |= found > counted && width.set(&mut block, i as usize, counted);
            }
            if changed {
                self.write(*offset, &block)?;
            }
        }
        self.sync()
    }
}
