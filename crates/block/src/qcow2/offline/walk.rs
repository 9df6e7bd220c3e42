// SPDX-License-Identifier: Apache-2.0
//! Walks everything that an image refers to and counts it. A check compares the outcome with the refcounts in the file; an edit
//! builds the next refcounts from it. An L2 table that several L1 tables share is read once and counted as often as it is
//! used, so an image with many snapshots costs no more than its tables.

use std::collections::HashMap;

use super::super::format::entry::{COMPRESSED, COPIED, L1_RESERVED, Layout, Mapping, OFFSET_MASK};
use super::super::format::header::Table;
use super::super::format::refcount;
use super::super::format::{be64, entry};
use super::check::Report;
use super::counts::Counts;
use super::{Error, Image};

/// The most L1 entries read in one walk, all snapshots together: eight tables of the largest size.
const MAX_L1_ENTRIES: u64 = 32 << 20;
/// Entries of a snapshot's L1 table that are in memory at a time.
const PART: usize = 256 << 10;

/// What a walk found.
#[derive(Debug)]
pub struct Walk {
    /// References to each host cluster, those of the refcount structures excepted.
    pub counts: Counts,
    /// References of the refcount table to itself and its blocks.
    pub refcounts: Counts,
    /// Refcount blocks by their place in the refcount table; only those that can be used.
    pub blocks: Vec<(u64, u64)>,
    /// The refcount table can't be trusted and must be built anew.
    pub rebuild: bool,
    /// Errors found on the way, and the counts of an image's clusters.
    pub report: Report,
    file_size: u64,
}

impl Walk {
    /// Walks all of `image`.
    ///
    /// # Errors
    /// The file can't be read. Damage is no error but in the report.
    pub fn run(image: &Image) -> Result<Walk, Error> {
        Walk::telling(image, &mut |_, _| ())
    }

    /// As [`Walk::run`]; `tell` is called after each L2 table with how many were read and how many there are.
    ///
    /// # Errors
    /// As [`Walk::run`].
    pub fn telling(image: &Image, tell: &mut dyn FnMut(u64, u64)) -> Result<Walk, Error> {
        let mut walk = Walk {
            counts: Counts::default(),
            refcounts: Counts::default(),
            blocks: Vec::new(),
            rebuild: false,
            report: Report::default(),
            file_size: image.size()?,
        };
        let header = image.header();
        let cluster = header.cluster_size();
        walk.report.total_clusters = header.size.div_ceil(cluster);
        walk.area(header.cluster_bits, 0, cluster, "the header");
        walk.area(header.cluster_bits, header.l1.offset, image.l1.len() as u64 * 8, "the L1 table");
        let mut tables = Counts::default();
        walk.tables_of(image, (0, &image.l1), 1, "the L1 table", &mut tables);
        let mut budget = MAX_L1_ENTRIES;
        match &image.snapshots {
            Err(e) => walk.report.check_error(format!("the snapshot table {e}")),
            Ok(snapshots) => {
                let mut seen: HashMap<Table, (u32, String)> = HashMap::new();
                for s in snapshots {
                    seen.entry(s.l1).or_insert_with(|| (0, s.id.clone())).0 += 1;
                }
                for (table, (weight, id)) in seen {
                    let Some(left) = budget.checked_sub(u64::from(table.count)) else {
                        walk.report.check_error("its snapshots have more L1 entries than can be looked at".into());
                        break;
                    };
                    budget = left;
                    let count = u64::from(table.count);
                    walk.weighed(header.cluster_bits, table.offset, count * 8, "a snapshot's L1 table", weight);
                    let what = format!("the L1 table of snapshot {id}");
                    for first in (0..count).step_by(PART) {
                        let part = image.read_numbers(table.offset + first * 8, (count - first).min(PART as u64))?;
                        walk.tables_of(image, (first, &part), weight, &what, &mut tables);
                    }
                }
                let bytes = super::super::format::snapshot::serialize(snapshots).len();
                walk.area(header.cluster_bits, header.snapshots.offset, bytes as u64, "the snapshot table");
            }
        }
        walk.data(image, tables, tell)?;
        if let Some(luks) = header.extensions.encryption {
            walk.area(header.cluster_bits, luks.offset, luks.len, "the LUKS header");
        }
        super::bitmap::walk(image, &mut walk)?;
        walk.refcount_structures(image)?;
        Ok(walk)
    }

    /// Counts the clusters of `len` bytes at `offset`.
    pub fn area(&mut self, cluster_bits: u32, offset: u64, len: u64, what: &str) {
        self.weighed(cluster_bits, offset, len, what, 1);
    }

    /// Counts the clusters of `len` bytes at `offset` that are used `weight` times.
    fn weighed(&mut self, cluster_bits: u32, offset: u64, len: u64, what: &str, weight: u32) {
        if len > 0 && !self.outside(cluster_bits, offset, len, what, weight) {
            for cluster in offset >> cluster_bits..=(offset + len - 1) >> cluster_bits {
                self.counts.add(cluster, weight);
            }
        }
    }

    /// Reports a range that ends a cluster or more past the file's end. (The last cluster may be a piece only.)
    fn outside(&mut self, cluster_bits: u32, offset: u64, len: u64, what: &str, weight: u32) -> bool {
        let past = offset.checked_add(len).is_none_or(|end| end >= self.file_size.saturating_add(1 << cluster_bits));
        if past {
            self.report.corruption(weight, || format!("{what} at {offset:#x} is past the end of the file"));
        }
        past
    }

    /// Counts the L2 tables that an L1 table names, from its entry `first` on.
    fn tables_of(&mut self, image: &Image, (first, l1): (u64, &[u64]), weight: u32, what: &str, tables: &mut Counts) {
        let layout = image.layout();
        for (i, raw) in (first..).zip(l1).filter(|(_, raw)| **raw != 0) {
            if *raw == COPIED {
                self.report
                    .corruption(weight, || format!("entry {i} of {what} is marked as used once, but has no table"));
            }
            if raw & L1_RESERVED != 0 {
                self.report.corruption(weight, || format!("entry {i} of {what} ({raw:#x}) has reserved bits set"));
            }
            let offset = raw & OFFSET_MASK;
            if offset & (layout.cluster_size() - 1) != 0 {
                self.report.corruption(weight, || {
                    format!("entry {i} of {what}: an L2 table at {offset:#x}, not at a cluster's start")
                });
            } else if offset != 0
                && !self.outside(layout.cluster_bits, offset, layout.cluster_size(), "an L2 table", weight)
            {
                self.counts.add(offset >> layout.cluster_bits, weight);
                tables.add(offset >> layout.cluster_bits, weight);
            }
        }
    }

    /// Counts what L2 tables name: first the active ones in order, then the rest.
    fn data(&mut self, image: &Image, mut tables: Counts, tell: &mut dyn FnMut(u64, u64)) -> Result<(), Error> {
        let layout = image.layout();
        let bits = layout.cluster_bits;
        let total = tables.used().count() as u64;
        let mut done = 0;
        for (i, raw) in image.l1.iter().enumerate() {
            let offset = raw & OFFSET_MASK;
            let weight = tables.get(offset >> bits);
            if weight == 0 || offset & (layout.cluster_size() - 1) != 0 {
                continue;
            }
            tables.sub(offset >> bits, weight);
            let guest = (i as u64) << (layout.l2_bits() + bits);
            self.l2_table(image, offset, weight, Some(guest))?;
            done += 1;
            tell(done, total);
        }
        let mut rest: Vec<u64> = tables.used().map(|(cluster, _)| cluster).collect();
        rest.sort_unstable();
        for cluster in rest {
            self.l2_table(image, cluster << bits, tables.get(cluster), None)?;
            done += 1;
            tell(done, total);
        }
        Ok(())
    }

    fn l2_table(&mut self, image: &Image, table: u64, weight: u32, guest: Option<u64>) -> Result<(), Error> {
        let layout = image.layout();
        let bytes = image.read(table, layout.cluster_size())?;
        let mut next = None;
        for (raw, bitmap, i) in entries(&layout, &bytes) {
            let at = guest.map_or(0, |g| g + (i << layout.cluster_bits));
            let active = guest.is_some();
            if raw & COMPRESSED != 0 && raw & COPIED != 0 {
                self.report.corruption(weight, || {
                    format!("compressed cluster of guest offset {at:#x} is marked as writable in place")
                });
            }
            match layout.classify(raw, bitmap, at) {
                Err(e) => {
                    self.report.corruption(weight, || e.to_string());
                    self.keep(&layout, raw, weight);
                }
                Ok(Mapping::Compressed(c)) => {
                    if !self.outside(layout.cluster_bits, c.host, c.len, "compressed data", weight) {
                        c.clusters(layout.cluster_bits).for_each(|cluster| self.counts.add(cluster, weight));
                    }
                    if active {
                        self.report.allocated_clusters += 1;
                        self.report.compressed_clusters += 1;
                        self.report.fragmented_clusters += 1;
                    }
                }
                Ok(mapping) => {
                    let Some((host, _)) = host_of(&mapping) else { continue };
                    if active {
                        self.report.allocated_clusters += 1;
                        self.report.fragmented_clusters += u64::from(next.is_some_and(|n| n != host));
                        next = Some(host + layout.cluster_size());
                    }
                    if !layout.data_file
                        && !self.outside(layout.cluster_bits, host, layout.cluster_size(), "a data cluster", weight)
                    {
                        self.counts.add(host >> layout.cluster_bits, weight);
                    }
                }
            }
        }
        Ok(())
    }

    /// Counts what an entry that can't be understood seems to point to, so that nobody takes it.
    fn keep(&mut self, layout: &Layout, raw: u64, weight: u32) {
        let (host, size) = (raw & OFFSET_MASK, layout.cluster_size());
        if raw & COMPRESSED == 0 && host != 0 && !layout.data_file && host + size <= self.file_size {
            let clusters = host >> layout.cluster_bits..=(host + size - 1) >> layout.cluster_bits;
            clusters.for_each(|cluster| self.counts.add(cluster, weight));
        }
    }

    fn refcount_structures(&mut self, image: &Image) -> Result<(), Error> {
        let header = image.header();
        let bits = header.cluster_bits;
        let table = header.refcount_table;
        let clusters = u64::from(table.count);
        if clusters == 0 {
            self.report.corruption(1, || "there is no refcount table".into());
            self.rebuild = true;
            return Ok(());
        }
        if self.outside(bits, table.offset, clusters << bits, "the refcount table", 1) {
            self.rebuild = true;
            return Ok(());
        }
        for cluster in 0..clusters {
            self.refcounts.add((table.offset >> bits) + cluster, 1);
        }
        let entries = image.read_numbers(table.offset, clusters << (bits - 3))?;
        for (slot, raw) in entries.into_iter().enumerate() {
            match refcount::table_entry(raw, bits) {
                Ok(None) => {}
                Ok(Some(offset)) => {
                    if self.outside(bits, offset, header.cluster_size(), "a refcount block", 1) {
                        self.rebuild = true;
                        continue;
                    }
                    let cluster = offset >> bits;
                    self.refcounts.add(cluster, 1);
                    if self.refcounts.get(cluster) + self.counts.get(cluster) != 1 {
                        self.report.corruption(1, || {
                            format!("the refcount block at {offset:#x} is also used for something else")
                        });
                        self.rebuild = true;
                    }
                    self.blocks.push((slot as u64, offset));
                }
                Err(e) => {
                    self.report.corruption(1, || e.to_string());
                    self.rebuild = true;
                }
            }
        }
        Ok(())
    }
}

/// The entries of an L2 table: number, bitmap, index; those that say nothing left out.
pub fn entries<'a>(layout: &Layout, bytes: &'a [u8]) -> impl Iterator<Item = (u64, u64, u64)> + use<'a> {
    let (size, extended) = (layout.entry_size() as usize, layout.extended);
    bytes.chunks_exact(size).enumerate().filter_map(move |(i, e)| {
        let (raw, bitmap) = (be64(e, 0), if extended { be64(e, 8) } else { 0 });
        (raw != 0 || bitmap != 0).then_some((raw, bitmap, i as u64))
    })
}

/// The host cluster that an entry keeps, and whether it is marked as writable in place. Compressed data excepted.
pub fn host_of(mapping: &Mapping) -> Option<(u64, bool)> {
    match *mapping {
        Mapping::Data { host, copied } => Some((host, copied)),
        Mapping::Zero { host, copied } => host.map(|h| (h, copied)),
        Mapping::Partial(entry::Partial { host, copied, .. }) => host.map(|h| (h, copied)),
        Mapping::Unallocated | Mapping::Compressed(_) => None,
    }
}
