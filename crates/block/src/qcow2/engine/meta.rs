// SPDX-License-Identifier: Apache-2.0
//! What changes of an image, under one lock that is held for moments: which slices are dirty or wanted, which guest clusters
//! are being allocated, which tables are new, what was freed and when it may be used again.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::Ordering;

use crate::qcow2::format::be64;
use crate::qcow2::format::entry::{Mapping, OFFSET_MASK};
use crate::qcow2::format::header::{Header, Table, incompatible};
use crate::storage::Storage;

use super::fetch::{Fetches, Need, Want};
use super::image::{Image, l1_raw};
use super::inbox::Waiter;
use super::refs::{Refs, Run, damaged};
use super::side;

/// So many freed clusters start a cycle by themselves.
const MANY_FREES: usize = 16_384;

/// What must not happen to a slot of the cache yet.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotState {
    /// Differs from the disk.
    pub dirty: bool,
    /// A copy is being written.
    pub writing: bool,
    /// So many allocations will change it when their data is written.
    pub pins: u32,
}

/// An L2 table that is not on disk.
#[derive(Debug)]
pub struct NewTable {
    /// What its slices hold that are not in the cache: a copy of the table it replaces, or zeroes.
    pub base: Option<Vec<u8>>,
}

/// A guest cluster whose host cluster is being written for the first time.
#[derive(Debug)]
pub struct InFlight {
    /// Offset of the host cluster.
    pub host: u64,
    /// Nothing but the data of each request is written, so others may write theirs at the same time.
    pub open: bool,
    /// Requests that write to it.
    pub users: u32,
    /// The entry says so.
    pub published: bool,
    /// Who waits for all of them.
    pub waiters: Vec<Waiter>,
}

/// The state of cycles.
#[derive(Debug, Default)]
pub struct Cycles {
    /// One is under way, on some thread.
    pub running: bool,
    /// Something is to be written by the next one.
    pub dirty: bool,
    /// The next one should begin without waiting for a flush.
    pub wanted: bool,
    /// Flushes for the next one.
    pub waiters: Vec<Waiter>,
}

/// References to be dropped, in the order of their way: published, on disk, nobody uses them any more.
#[derive(Debug, Default)]
pub struct Frees {
    /// No longer referred to by the tables in memory.
    pub fresh: Vec<u64>,
    /// Nor by those on disk.
    pub durable: Vec<u64>,
    /// As `durable`, and requests older than this ticket are all that may still use them.
    pub aging: Option<(usize, Vec<u64>)>,
    /// May be dropped now.
    pub ripe: Vec<u64>,
    /// Flushes that wait for refcounts which dropping them needs.
    pub waiters: Vec<Waiter>,
}

/// The L1 table and the disk.
#[derive(Debug, Default)]
pub struct L1Disk {
    /// Entries whose tables are durable and which are not.
    pub pending: BTreeMap<usize, u64>,
    /// The table as it is on disk.
    pub entries: Vec<u64>,
}

/// A header that is to take the place of the present one.
#[derive(Debug)]
pub struct NewHead {
    header: Header,
    /// Its first sector.
    sector: Vec<u8>,
    /// The entries of another L1 table that it names.
    l1: Option<Vec<u64>>,
}

impl NewHead {
    /// Writes it, after the L1 table that it names if that is another one, and waits until it is durable.
    ///
    /// # Errors
    /// What the host says.
    pub fn write(&self, storage: &mut Storage) -> io::Result<()> {
        if let Some(entries) = &self.l1 {
            let mut bytes: Vec<u8> = entries.iter().flat_map(|e| e.to_be_bytes()).collect();
            // The table has its clusters for itself.
            bytes.resize(bytes.len().next_multiple_of(1 << self.header.cluster_bits), 0);
            side::write(storage, self.header.l1.offset, &bytes)?;
        }
        side::flush(storage)?;
        side::write(storage, 0, &self.sector)?;
        side::flush(storage)
    }
}

/// Everything that changes.
#[derive(Debug)]
pub struct Meta {
    /// By slot of the cache.
    pub slots: Vec<SlotState>,
    dirty_slots: usize,
    /// Slices being read, and who waits for them.
    pub loading: HashMap<u64, Vec<Waiter>>,
    /// Who waits for room in the cache.
    pub room: Vec<Waiter>,
    /// By guest cluster.
    pub in_flight: HashMap<u64, InFlight>,
    /// By index in the L1 table.
    pub tables: BTreeMap<usize, NewTable>,
    /// What is being read beside slices.
    pub fetches: Fetches,
    /// The L1 table and the disk.
    pub l1: L1Disk,
    /// Refcounts; none for an image that is not written.
    pub refs: Option<Refs>,
    /// References to be dropped.
    pub frees: Frees,
    /// Cycles.
    pub cycles: Cycles,
    /// The header.
    pub header: Header,
    /// Its first sector.
    pub head: Vec<u8>,
    /// For the file's length, and to be shared by who has to wait for I/O, without the lock.
    pub side: Storage,
    /// Smallest unit of direct I/O in bytes.
    pub unit: usize,
}

impl Meta {
    /// The state of an image just opened.
    pub fn new(
        side: Storage,
        refs: Option<Refs>,
        (header, head, l1_disk): (Header, Vec<u8>, Vec<u64>),
        slots: usize,
        unit: usize,
    ) -> Self {
        Self {
            slots: vec![SlotState::default(); slots],
            dirty_slots: 0,
            loading: HashMap::new(),
            room: Vec::new(),
            in_flight: HashMap::new(),
            tables: BTreeMap::new(),
            fetches: Fetches::default(),
            l1: L1Disk { pending: BTreeMap::new(), entries: l1_disk },
            refs,
            frees: Frees::default(),
            cycles: Cycles::default(),
            header,
            head,
            side,
            unit,
        }
    }

    /// Up to `most` adjacent host clusters; see [`Refs::alloc`].
    ///
    /// # Errors
    /// See there; `EROFS` without refcounts.
    pub fn alloc(&mut self, most: u64, grow: bool) -> Result<Run, Need> {
        let refs = self.refs.as_mut().ok_or_else(|| io::Error::from_raw_os_error(libc::EROFS))?;
        self.cycles.dirty = true;
        refs.alloc(most, grow, &mut self.side)
    }

    /// Makes the file reach up to the end of cluster `end - 1`.
    ///
    /// # Errors
    /// See [`Refs::reach`].
    pub fn reach(&mut self, end: u64) -> io::Result<()> {
        self.refs.as_mut().map_or(Ok(()), |refs| refs.reach(end, &mut self.side))
    }

    /// Takes back a cluster that [`Meta::alloc`] gave, nothing having referred to it.
    pub fn unalloc(&mut self, cluster: u64) {
        let Some(refs) = &mut self.refs else { return };
        if let Err(Need::Read(_)) = refs.drop_one(cluster) {
            // Its count has gone from memory since: dropped along with those that the next flush drops.
            self.frees.ripe.push(cluster);
        }
    }

    /// Puts a slice that was read, or that is made up, into the cache; the slot, or `None` if there is no room.
    pub fn install(&mut self, image: &Image, slice: u64, bytes: &[u8]) -> Option<usize> {
        let words = bytes.chunks_exact(8).map(|b| be64(b, 0));
        image.cache.install(slice, words, |i| self.slots.get(i).is_some_and(|s| !s.dirty && !s.writing && s.pins == 0))
    }

    /// The bytes of a slice of a table that is not on disk.
    pub fn unwritten(&self, image: &Image, slice: u64) -> Option<Vec<u8>> {
        let first = slice << image.slice_bits();
        let table = self.tables.get(&image.table_of(first))?;
        let len = image.slice_bytes();
        let at = ((first & ((1 << image.layout.l2_bits()) - 1)) * image.layout.entry_size()) as usize;
        let base = table.base.as_ref().and_then(|b| b.get(at..at + len));
        Some(base.map_or_else(|| vec![0; len], <[u8]>::to_vec))
    }

    /// Marks a slot as different from the disk.
    pub fn dirty(&mut self, slot: usize) {
        self.cycles.dirty = true;
        if let Some(s) = self.slots.get_mut(slot)
            && !s.dirty
        {
            s.dirty = true;
            self.dirty_slots += 1;
        }
        if self.frees.fresh.len() > MANY_FREES {
            self.cycles.wanted = true;
        }
    }

    /// A copy of the slot is about to be written.
    pub fn start_writing(&mut self, slot: usize) {
        if let Some(s) = self.slots.get_mut(slot) {
            if s.dirty {
                self.dirty_slots -= 1;
            }
            (s.dirty, s.writing) = (false, true);
        }
    }

    /// The copy was written, or not.
    pub fn end_writing(&mut self, slot: usize, ok: bool) {
        if let Some(s) = self.slots.get_mut(slot) {
            s.writing = false;
        }
        if !ok {
            self.dirty(slot);
        }
    }

    /// Keeps the slot in the cache until [`Meta::unpin`].
    pub fn pin(&mut self, slot: usize) {
        if let Some(s) = self.slots.get_mut(slot) {
            s.pins += 1;
        }
    }

    /// Lets the slot go.
    pub fn unpin(&mut self, slot: usize) {
        if let Some(s) = self.slots.get_mut(slot) {
            s.pins = s.pins.saturating_sub(1);
            if s.pins == 0 {
                self.made_room();
            }
        }
    }

    /// Someone who waits for room may try again.
    pub fn made_room(&mut self) {
        for waiter in self.room.drain(..) {
            waiter.go_on();
        }
    }

    /// Says in the cache that `cluster` is `mapping` from now on; drops the references of `old`.
    pub fn publish(&mut self, image: &Image, slot: usize, cluster: u64, mapping: &Mapping, old: &Mapping) {
        let Some((raw, bitmap)) = image.layout.encode(mapping) else { return };
        let (_, word) = image.place(cluster);
        image.cache.set_entry(slot, word, raw, image.layout.extended.then_some(bitmap));
        let kept = host_of(mapping);
        self.drop_references(image, old, kept);
        self.dirty(slot);
        // Room for others before they need it; where all have room, only a flush needs a cycle.
        if self.dirty_slots > self.slots.len() * 3 / 4 && !image.cached_whole() {
            self.cycles.wanted = true;
        }
    }

    fn drop_references(&mut self, image: &Image, old: &Mapping, kept: Option<u64>) {
        if image.layout.data_file {
            return;
        }
        match old {
            Mapping::Compressed(c) => self.frees.fresh.extend(c.clusters(image.layout.cluster_bits)),
            old => {
                let gone = host_of(old).filter(|h| Some(*h) != kept);
                self.frees.fresh.extend(gone.map(|h| h >> image.layout.cluster_bits));
            }
        }
    }

    /// Makes sure that the L2 table `index` may be changed: makes one where there is none, and a copy of one that a
    /// snapshot shares.
    ///
    /// # Errors
    /// The shared table or a refcount block to read; `ENOSPC`; `EIO` where the image is damaged.
    pub fn own_table(&mut self, image: &Image, index: usize) -> Result<(), Need> {
        let entry = image.layout.l1_entry(image.l1.get(index)).map_err(|_| damaged())?;
        if entry.is_some_and(|t| t.copied) {
            return Ok(());
        }
        if let Some(old) = entry
            && !self.fetches.copies.contains_key(&index)
        {
            // Nobody changes it while it is shared: the copy stays true until it is used.
            return Err(Need::Read(Want::Table(index, old.offset)));
        }
        let run = self.alloc(1, true).inspect_err(|need| {
            if matches!(need, Need::Failed(_)) {
                self.fetches.copies.remove(&index);
            }
        })?;
        if let Some(refs) = &mut self.refs {
            refs.reserved.insert(run.first);
        }
        self.tables.insert(index, NewTable { base: self.fetches.copies.remove(&index) });
        if let Some(old) = entry {
            self.frees.fresh.push(old.offset >> image.layout.cluster_bits);
        }
        image.l1.set(index, l1_raw(run.first << image.layout.cluster_bits));
        Ok(())
    }

    /// Up to all that is freed, on disk and used by nobody any more and counted by one refcount block: host clusters, sorted,
    /// one for each reference to drop.
    pub fn ripe(&mut self, image: &Image) -> Vec<u64> {
        for _ in 0..2 {
            if self.frees.aging.as_ref().is_some_and(|(ticket, _)| image.epochs.over(*ticket))
                && let Some((_, mut clusters)) = self.frees.aging.take()
            {
                self.frees.ripe.append(&mut clusters);
            }
            if self.frees.aging.is_none() && !self.frees.durable.is_empty() {
                let ticket = image.epochs.turn();
                self.frees.aging = Some((ticket, std::mem::take(&mut self.frees.durable)));
            }
        }
        let Some(refs) = &self.refs else { return Vec::new() };
        self.frees.ripe.sort_unstable();
        let block = self.frees.ripe.first().map(|c| refs.block_of(*c));
        let same = self.frees.ripe.iter().take_while(|c| Some(refs.block_of(**c)) == block).count();
        self.frees.ripe.drain(..same).collect()
    }

    /// Whether anything waits for [`Meta::ripe`].
    pub fn ripening(&self) -> bool {
        self.frees.aging.is_some() || !self.frees.durable.is_empty() || !self.frees.ripe.is_empty()
    }

    /// Whether no entry of a slice claims a cluster that a table is in, which writing in place would destroy.
    pub fn plausible(&self, image: &Image, slice: u64, bytes: &[u8]) -> bool {
        let Some(refs) = &self.refs else { return true };
        if image.layout.data_file {
            return true;
        }
        let size = image.layout.entry_size() as usize;
        let first = slice << image.slice_bits();
        bytes.chunks_exact(size).zip(first..).all(|(entry, cluster)| {
            let (raw, bitmap) = (be64(entry, 0), if size == 16 { be64(entry, 8) } else { 0 });
            let mapping = image.layout.classify(raw, bitmap, cluster << image.layout.cluster_bits);
            let host = mapping.ok().as_ref().and_then(host_of);
            host.is_none_or(|h| !refs.reserved.contains(&(h >> image.layout.cluster_bits)))
        })
    }

    /// Cuts off what the file was given ahead of need.
    pub fn trim(&mut self) {
        if let Some(refs) = &mut self.refs {
            refs.trim(&mut self.side);
        }
    }

    /// The image contradicts itself: no guest data is written any more, and the header says so (version 3), so that nobody
    /// else writes to it before it is repaired. Waits for that, once in an image's life.
    pub fn broke(&mut self, image: &Image) {
        if !image.broken.swap(true, Ordering::AcqRel) {
            self.mark_broken(image);
        }
    }

    /// Puts the mark of a damaged image on disk; again after writes of the header that began before.
    pub fn mark_broken(&mut self, image: &Image) {
        if !image.writable || self.header.version < 3 || !image.broken.load(Ordering::Acquire) {
            return;
        }
        let mut header = self.header.clone();
        header.features.incompatible |= incompatible::CORRUPT;
        let patch = header.patch_features();
        let new = self.patched(header, patch, None);
        // The lock is held meanwhile: what another thread writes of the header comes before or after this whole. Where the
        // mark can't be written, the writes that are refused from now on still do no harm.
        let _ = new.write(&mut self.side);
        self.new_head_written(new);
    }

    /// As [`Meta::broke`], if that is what the error says: a kind that no host has.
    pub fn broke_by(&mut self, image: &Image, error: &io::Error) {
        if error.kind() == io::ErrorKind::InvalidData {
            self.broke(image);
        }
    }

    /// The L1 table around entry `index` as it is on disk: offset in the file and bytes, in units of `unit`.
    pub fn l1_sector(&self, index: usize) -> (u64, Vec<u8>) {
        let first = index * 8 / self.unit * self.unit / 8;
        let mut bytes: Vec<u8> =
            self.l1.entries.iter().skip(first).take(self.unit / 8).flat_map(|e| e.to_be_bytes()).collect();
        // The table has its clusters for itself.
        bytes.resize(self.unit.min(1 << self.header.cluster_bits).max(bytes.len()), 0);
        (self.header.l1.offset + first as u64 * 8, bytes)
    }

    /// The present header with a patch, for [`Meta::new_head_written`].
    fn patched(&self, header: Header, (at, patch): (u64, impl AsRef<[u8]>), l1: Option<Vec<u64>>) -> NewHead {
        let (mut sector, patch) = (self.head.clone(), patch.as_ref());
        if let Some(to) = sector.get_mut(at as usize..at as usize + patch.len()) {
            to.copy_from_slice(patch);
        }
        NewHead { header, sector, l1 }
    }

    /// A header that says how large the disk is.
    pub fn head_with_size(&self, bytes: u64) -> NewHead {
        let mut header = self.header.clone();
        header.size = bytes;
        let patch = header.patch_size();
        self.patched(header, patch, None)
    }

    /// A header that names an L1 table at `offset`, with `count` entries.
    pub fn head_with_l1(&self, offset: u64, count: u32) -> NewHead {
        let mut header = self.header.clone();
        header.l1 = Table { offset, count };
        let patch = header.patch_l1();
        let mut table = self.l1.entries.clone();
        table.resize(count as usize, 0);
        self.patched(header, patch, Some(table))
    }

    /// The header, and what it names, is durable.
    pub fn new_head_written(&mut self, new: NewHead) {
        let old = std::mem::replace(&mut self.header, new.header);
        self.head = new.sector;
        if let Some(table) = new.l1 {
            self.l1.entries = table;
            let cluster = 1u64 << old.cluster_bits;
            let clusters = (u64::from(old.l1.count) * 8).div_ceil(cluster);
            let first = old.l1.offset / cluster;
            self.frees.durable.extend(first..first + clusters);
        }
    }

    /// Clusters for an L1 table of at least so many entries: offset and entries.
    ///
    /// # Errors
    /// See [`Refs::alloc`].
    pub fn alloc_l1(&mut self, entries: u64) -> Result<(u64, u32), Need> {
        let cluster = 1u64 << self.header.cluster_bits;
        let clusters = (entries * 8).div_ceil(cluster);
        let refs = self.refs.as_mut().ok_or_else(|| io::Error::from_raw_os_error(libc::EROFS))?;
        self.cycles.dirty = true;
        let run = refs.alloc_exact(clusters, &mut self.side)?;
        refs.reserved.extend(run.first..run.first + clusters);
        Ok((run.first * cluster, entries as u32))
    }

    /// Offset of the table that L1 entry `index` names in memory.
    pub fn table_offset(image: &Image, index: usize) -> u64 {
        image.l1.get(index) & OFFSET_MASK
    }
}

/// The host cluster that a mapping refers to, compressed ones aside.
pub fn host_of(mapping: &Mapping) -> Option<u64> {
    match mapping {
        Mapping::Data { host, .. } => Some(*host),
        Mapping::Zero { host, .. } => *host,
        Mapping::Partial(p) => p.host,
        Mapping::Unallocated | Mapping::Compressed(_) => None,
    }
}
