// SPDX-License-Identifier: Apache-2.0
//! The next state of an image, made beside the present one. An edit begins with what is used now, changes counts and tables as
//! the operation wants, and ends with [`Edit::commit`], which writes everything new to clusters that the present state does not
//! use and then switches over with one write to the header.

use std::collections::BTreeMap;

use super::super::format::be64;
use super::super::format::entry::{COMPRESSED, COPIED, L2_RESERVED, Layout, Mapping, OFFSET_MASK, ZERO};
use super::super::format::header::{Header, Table, autoclear, incompatible};
use super::super::format::refcount;
use super::super::format::snapshot::{self, Snapshot};
use super::counts::Counts;
use super::image::numbers;
use super::walk::{Walk, entries, host_of};
use super::{Error, Image};

/// A change in the making.
#[derive(Debug)]
pub struct Edit<'a> {
    pub image: &'a mut Image,
    /// What the present state uses; never written to.
    old: Counts,
    /// What the next state uses, its refcount structures excepted until the commit.
    pub new: Counts,
    cursor: u64,
    /// The next header.
    pub header: Header,
    /// The next active L1 table; the commit sets its and its tables' "writable in place" bits.
    pub l1: Vec<u64>,
    /// The next snapshots.
    pub snapshots: Vec<Snapshot>,
    /// Cut off what nothing uses at the file's end.
    truncate: bool,
}

impl<'a> Edit<'a> {
    /// Begins to change `image`.
    ///
    /// # Errors
    /// The image is damaged, or opened for reading only.
    pub fn begin(image: &'a mut Image) -> Result<Edit<'a>, Error> {
        if !image.writable {
            return Error::refused(&image.path, "is opened for reading only");
        }
        if image.header.corrupt() {
            return Error::refused(&image.path, "is marked as damaged; repair it with `tare img check --repair`");
        }
        let size = image.size()?;
        image.header.check_layout(size).map_err(Error::format(&image.path))?;
        let walk = Walk::run(image)?;
        if walk.report.corruptions > 0 || walk.report.check_errors > 0 {
            let what = walk.report.messages.into_iter().next().unwrap_or_default();
            return Error::refused(
                &image.path,
                format!("is damaged ({what}); repair it with `tare img check --repair`"),
            );
        }
        Edit::with(image, walk)
    }

    /// Begins to build new refcounts for an image that may be damaged.
    ///
    /// # Errors
    /// The snapshot table can't be read.
    pub fn for_repair(image: &'a mut Image, walk: Walk) -> Result<Edit<'a>, Error> {
        let end = image.size()?.div_ceil(image.header.cluster_size());
        let mut edit = Edit::with(image, walk)?;
        // Nothing found free is trusted to be free.
        (edit.cursor, edit.truncate) = (end, false);
        Ok(edit)
    }

    /// Begins an image in an empty file.
    pub fn blank(image: &'a mut Image) -> Edit<'a> {
        let (header, l1) = (image.header.clone(), image.l1.clone());
        let mut new = Counts::default();
        new.add(0, 1);
        Edit { image, old: new.clone(), new, cursor: 1, header, l1, snapshots: Vec::new(), truncate: false }
    }

    fn with(image: &'a mut Image, walk: Walk) -> Result<Edit<'a>, Error> {
        let new = walk.counts;
        let mut old = new.clone();
        for (cluster, count) in walk.refcounts.used() {
            old.add(cluster, count);
        }
        let snapshots = image.snapshots()?.to_vec();
        let (mut header, l1) = (image.header.clone(), image.l1.clone());
        header.features.incompatible &= !incompatible::DIRTY;
        header.features.autoclear &= autoclear::KNOWN;
        header.extensions.stale_bitmaps = false;
        Ok(Edit { image, old, new, cursor: 1, header, l1, snapshots, truncate: true })
    }

    fn bits(&self) -> u32 {
        self.header.cluster_bits
    }

    /// Takes `count` clusters in a row that neither state uses, and returns the offset of the first.
    ///
    /// # Errors
    /// Beyond what a table entry can point to.
    pub fn allocate(&mut self, count: u64) -> Result<u64, Error> {
        let free = |edit: &Edit, cluster| edit.old.get(cluster) == 0 && edit.new.get(cluster) == 0;
        let (mut start, mut len) = (self.cursor, 0);
        while len < count {
            if free(self, start + len) {
                len += 1;
            } else {
                (start, len) = (start + len + 1, 0);
            }
        }
        if count == 1 {
            self.cursor = start + 1;
        }
        if (start + count) << self.bits() > OFFSET_MASK {
            return Error::refused(&self.image.path, "would grow beyond 64 PiB");
        }
        (start..start + count).for_each(|cluster| self.new.add(cluster, 1));
        Ok(start << self.bits())
    }

    /// Writes `bytes`, padded to whole clusters, to new clusters in a row; returns their offset.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn store(&mut self, bytes: &[u8]) -> Result<u64, Error> {
        let clusters = (bytes.len() as u64).div_ceil(self.header.cluster_size());
        let offset = self.allocate(clusters)?;
        let mut padded = bytes.to_vec();
        padded.resize((clusters << self.bits()) as usize, 0);
        self.image.write(offset, &padded)?;
        Ok(offset)
    }

    /// The next state does not have the `len` bytes at `offset` any more.
    pub fn release(&mut self, offset: u64, len: u64) {
        if len > 0 {
            let clusters = offset >> self.bits()..=(offset + len - 1) >> self.bits();
            clusters.for_each(|cluster| self.new.sub(cluster, 1));
        }
    }

    /// Counts all that an L1 table refers to once more (`more`) or once less.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn count_tree(&mut self, l1: &[u64], more: bool) -> Result<(), Error> {
        for raw in l1 {
            let table = raw & OFFSET_MASK;
            if table != 0 {
                let bytes = self.image.read(table, self.header.cluster_size())?;
                self.count(table >> self.bits(), more);
                self.count_table(&bytes, more);
            }
        }
        Ok(())
    }

    fn count(&mut self, cluster: u64, more: bool) {
        if more { self.new.add(cluster, 1) } else { self.new.sub(cluster, 1) }
    }

    /// Counts all that an L2 table refers to.
    fn count_table(&mut self, bytes: &[u8], more: bool) {
        let layout = self.header.layout();
        for (raw, bitmap, _) in entries(&layout, bytes) {
            self.count_entry(raw, bitmap, more);
        }
    }

    /// Counts what one L2 entry refers to; nothing in images with a data file.
    pub fn count_entry(&mut self, raw: u64, bitmap: u64, more: bool) {
        let layout = self.header.layout();
        match layout.classify(raw, bitmap, 0) {
            _ if layout.data_file => {}
            Ok(Mapping::Compressed(c)) => c.clusters(layout.cluster_bits).for_each(|cluster| self.count(cluster, more)),
            Ok(mapping) => {
                if let Some((host, _)) = host_of(&mapping) {
                    self.count(host >> layout.cluster_bits, more);
                }
            }
            Err(_) => {}
        }
    }

    /// Puts `bytes` in the place of L2 table `index`. Counts of what the tables refer to are the caller's business.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn replace_table(&mut self, index: usize, bytes: &[u8]) -> Result<(), Error> {
        let offset = self.store(bytes)?;
        let old = std::mem::replace(&mut self.l1[index], offset | COPIED) & OFFSET_MASK;
        if old != 0 {
            self.release(old, 1);
        }
        Ok(())
    }

    /// Makes the "writable in place" bits of the active tables agree with the next counts.
    fn settle(&mut self) -> Result<(), Error> {
        let layout = self.header.layout();
        let size = self.image.size()?;
        for index in 0..self.l1.len() {
            let table = match layout.l1_entry(self.l1[index]) {
                Ok(Some(table)) => table,
                Ok(None) => {
                    self.l1[index] = 0;
                    continue;
                }
                Err(_) => continue,
            };
            if table.offset >= size {
                continue;
            }
            let mut bytes = self.image.read(table.offset, layout.cluster_size())?;
            let mut changes = Vec::new();
            for (raw, bitmap, i) in entries(&layout, &bytes) {
                let guest = (index as u64) << (layout.l2_bits() + layout.cluster_bits) | i << layout.cluster_bits;
                let right = match layout.classify(raw, bitmap, guest) {
                    Ok(Mapping::Compressed(_)) => raw & !COPIED,
                    Ok(mapping) => match host_of(&mapping) {
                        Some(_) if layout.data_file => raw | COPIED,
                        Some((host, _)) if self.new.get(host >> layout.cluster_bits) == 1 => raw | COPIED,
                        Some(_) => raw & !COPIED,
                        None => raw,
                    },
                    Err(_) => {
                        let (right, bits) = mended(&layout, raw, bitmap);
                        if bits != bitmap {
                            changes.push(((i * layout.entry_size()) as usize + 8, bits));
                        }
                        let host = right & OFFSET_MASK;
                        let once = !layout.data_file && self.new.get(host >> layout.cluster_bits) == 1;
                        match layout.classify(right, bits, guest) {
                            Ok(mapping) if host_of(&mapping).is_some() && once => right | COPIED,
                            Ok(_) if !layout.data_file => right & !COPIED,
                            _ => right,
                        }
                    }
                };
                if right != raw {
                    changes.push(((i * layout.entry_size()) as usize, right));
                }
            }
            if changes.is_empty() {
                let once = self.new.get(table.offset >> layout.cluster_bits) == 1;
                self.l1[index] = table.offset | if once { COPIED } else { 0 };
                continue;
            }
            for (at, right) in changes {
                bytes[at..at + 8].copy_from_slice(&right.to_be_bytes());
            }
            self.replace_table(index, &bytes)?;
        }
        Ok(())
    }

    /// Writes all that is new and takes it into use. After an error the present state stands as it was.
    ///
    /// # Errors
    /// The file can't be written, or counts exceed what this image's refcounts can say.
    pub fn commit(mut self) -> Result<(), Error> {
        let bits = self.bits();
        self.settle()?;
        let old_l1 = self.image.header.l1;
        if self.l1 != self.image.l1 || old_l1.offset == 0 {
            if old_l1.offset != 0 {
                self.release(old_l1.offset, u64::from(old_l1.count) * 8);
            }
            let offset = self.store(&numbers(&self.l1))?;
            self.header.l1 = Table { offset, count: self.l1.len() as u32 };
        }
        let old_table = self.image.header.snapshots;
        let present = self.image.snapshots()?;
        if self.snapshots != present {
            let len = snapshot::serialize(present).len() as u64;
            let bytes = snapshot::serialize(&self.snapshots);
            if bytes.len() as u64 > snapshot::MAX_TABLE_BYTES {
                return Error::refused(&self.image.path, "would have a snapshot table of more than 64 MiB");
            }
            self.release(old_table.offset, len);
            let offset = if bytes.is_empty() { 0 } else { self.store(&bytes)? };
            self.header.snapshots = Table { offset, count: self.snapshots.len() as u32 };
        }
        self.write_refcounts()?;
        self.image.sync()?;
        write_header(self.image, &self.header)?;
        self.image.header = self.header;
        self.image.l1 = self.l1;
        self.image.snapshots = Ok(self.snapshots);
        let end = self.new.used_end() << bits;
        if self.truncate && self.image.size()? > end {
            self.image.medium.set_size(end).map_err(Error::io(&self.image.path, "shorten it"))?;
        }
        Ok(())
    }

    /// Writes a refcount table and blocks for the next counts, themselves included.
    fn write_refcounts(&mut self) -> Result<(), Error> {
        let (bits, width) = (self.bits(), self.header.width);
        let group_bits = width.block_bits(bits);
        let mut blocks: BTreeMap<u64, u64> = BTreeMap::new();
        let mut table = Table::default();
        loop {
            let missing: Vec<u64> =
                self.new.groups(group_bits).into_iter().filter(|g| !blocks.contains_key(g)).collect();
            for group in &missing {
                let block = self.allocate(1)?;
                blocks.insert(*group, block);
            }
            let slots = blocks.last_key_value().map_or(1, |(last, _)| last + 1);
            let clusters = (slots * 8).div_ceil(1 << bits);
            if clusters > u64::from(table.count) {
                self.release(table.offset, u64::from(table.count) << bits);
                if clusters << bits > refcount::MAX_TABLE_BYTES {
                    return Error::refused(
                        &self.image.path,
                        "would have a refcount table of more than 8 MiB; use larger clusters",
                    );
                }
                table = Table { offset: self.allocate(clusters)?, count: clusters as u32 };
            } else if missing.is_empty() {
                break;
            }
        }
        if u64::from(self.new.max()) > width.max() {
            return Error::refused(
                &self.image.path,
                format!(
                    "a cluster would be used {} times, its refcounts of {} bits say {} at most",
                    self.new.max(),
                    width.bits(),
                    width.max()
                ),
            );
        }
        let mut entries = vec![0; (u64::from(table.count) << (bits - 3)) as usize];
        for (group, offset) in &blocks {
            let mut block = vec![0; 1 << bits];
            for i in 0..1u64 << group_bits {
                let count = self.new.get((group << group_bits) + i);
                if count > 0 && !width.set(&mut block, i as usize, u64::from(count)) {
                    return Error::refused(&self.image.path, "its refcounts are too narrow");
                }
            }
            self.image.write(*offset, &block)?;
            entries[*group as usize] = *offset;
        }
        self.image.write(table.offset, &numbers(&entries))?;
        self.header.refcount_table = table;
        Ok(())
    }
}

/// What an L2 entry and bitmap that the format doesn't allow mean, as far as that can be told without losing data; else they
/// stay as they are.
fn mended(layout: &Layout, raw: u64, bitmap: u64) -> (u64, u64) {
    let host = raw & OFFSET_MASK;
    if raw & COMPRESSED != 0 {
        return (raw & !COPIED, 0);
    }
    if raw & L2_RESERVED != 0 {
        return (raw, bitmap);
    }
    if host & (layout.cluster_size() - 1) != 0 {
        let zero = raw & ZERO != 0 && layout.zero_flag && !layout.extended;
        return (if zero { ZERO } else { raw }, bitmap);
    }
    if !layout.extended {
        return (if host == 0 && !layout.data_file { raw & !COPIED } else { raw }, bitmap);
    }
    // Where a subcluster is both, the data counts; where it is allocated nowhere, it isn't.
    let kept = host != 0 || (layout.data_file && raw & COPIED != 0);
    let allocated = if kept { bitmap & u64::from(u32::MAX) } else { 0 };
    (if kept { raw & !ZERO } else { 0 }, bitmap >> 32 << 32 & !(allocated << 32) | allocated)
}

/// Puts `header` in place of the image's with one write to its first sector; what is beyond that sector is written and synced
/// before, to where the present header has nothing.
///
/// # Errors
/// Names too long for the header's cluster, or the file can't be written.
pub fn write_header(image: &Image, header: &Header) -> Result<(), Error> {
    let path = &image.path;
    let cluster = header.cluster_size();
    let present = image.read(0, cluster)?;
    let full = header.to_cluster().map_err(Error::format(path))?;
    let blank = present.iter().all(|b| *b == 0);
    let differs = |a: &[u8], b: &[u8]| a[512..] != b[512..];
    if blank {
        // Nothing to keep: but the magic comes last.
        image.write(512, &full[512..])?;
        image.sync()?;
        image.write(0, &full[..512])?;
        return image.sync();
    }
    if !differs(&present, &full) {
        image.write(0, &full[..512])?;
        return image.sync();
    }
    // Without the feature names the extensions fit into the first sector, mostly the backing file's name too; else that
    // goes where the old header has neither extensions nor its own name, behind or before it.
    let len = header.backing.as_ref().map_or(0, |name| name.len() as u64);
    let mut places = vec![None, Some((Header::used_bytes(&present) as u64).max(512))];
    if image.header.backing.is_some() && be64(&present, 8) >= 512 + len {
        places.push(Some(512));
    }
    let tries = places.into_iter().map(|place| header.to_cluster_at(place));
    let (place, compact) =
        tries.reduce(Result::or).unwrap_or_else(|| header.to_cluster_at(None)).map_err(Error::format(path))?;
    if len > 0 && place >= 512 {
        image.write(place, &compact[place as usize..(place + len) as usize])?;
        image.sync()?;
    }
    image.write(0, &compact[..512])?;
    image.sync()
}
