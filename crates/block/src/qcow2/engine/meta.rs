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
    /// L1 entries whose tables are durable and which are not.
    pub l1_pending: BTreeMap<usize, u64>,
    /// The L1 table as it is on disk.
    pub l1_disk: Vec<u64>,
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
    /// For waiting I/O.
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
            l1_pending: BTreeMap::new(),
            l1_disk,
            refs,
            frees: Frees::default(),
            cycles: Cycles::default(),
            header,
            head,
            side,
            unit,
        }
    }

    /// Up to `most` adjacent host clusters.
    ///
    /// # Errors
    /// See [`Refs::alloc`]; `EROFS` without refcounts.
    pub fn alloc(&mut self, most: u64) -> io::Result<Run> {
        let refs = self.refs.as_mut().ok_or_else(|| io::Error::from_raw_os_error(libc::EROFS))?;
        self.cycles.dirty = true;
        refs.alloc(most, &mut self.side)
    }

    /// Takes back what [`Meta::alloc`] gave, nothing having referred to it.
    pub fn unalloc(&mut self, first: u64, count: u64) {
        if let Some(refs) = &mut self.refs {
            refs.give_back(first, count, &mut self.side);
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
    /// `ENOSPC`, or what reading the old table said.
    pub fn own_table(&mut self, image: &Image, index: usize) -> io::Result<()> {
        let entry = image.layout.l1_entry(image.l1.get(index)).map_err(|_| damaged())?;
        if entry.is_some_and(|t| t.copied) {
            return Ok(());
        }
        let file_len = self.refs.as_ref().map_or(0, |r| r.file_len);
        let base = match entry {
            Some(old) => Some(side::read(&mut self.side, old.offset, image.layout.cluster_size() as usize, file_len)?),
            None => None,
        };
        let run = self.alloc(1)?;
        if let Some(refs) = &mut self.refs {
            refs.reserved.insert(run.first);
        }
        self.tables.insert(index, NewTable { base });
        if let Some(old) = entry {
            self.frees.fresh.push(old.offset >> image.layout.cluster_bits);
        }
        image.l1.set(index, l1_raw(run.first << image.layout.cluster_bits));
        Ok(())
    }

    /// What is freed, on disk and used by nobody any more: host clusters, one for each reference to drop.
    pub fn ripe(&mut self, image: &Image) -> Vec<u64> {
        let mut ripe = Vec::new();
        for _ in 0..2 {
            if self.frees.aging.as_ref().is_some_and(|(ticket, _)| image.epochs.over(*ticket))
                && let Some((_, mut clusters)) = self.frees.aging.take()
            {
                ripe.append(&mut clusters);
            }
            if self.frees.aging.is_none() && !self.frees.durable.is_empty() {
                let ticket = image.epochs.turn();
                self.frees.aging = Some((ticket, std::mem::take(&mut self.frees.durable)));
            }
        }
        ripe
    }

    /// Whether anything waits for [`Meta::ripe`].
    pub fn ripening(&self) -> bool {
        self.frees.aging.is_some() || !self.frees.durable.is_empty()
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
        self.header.features.incompatible |= incompatible::CORRUPT;
        let (at, bytes) = self.header.patch_features();
        // Where the mark can't be written, the writes that are refused from now on still do no harm.
        let _ = self.save_head(at, &bytes);
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
            self.l1_disk.iter().skip(first).take(self.unit / 8).flat_map(|e| e.to_be_bytes()).collect();
        // The table has its clusters for itself.
        bytes.resize(self.unit.min(1 << self.header.cluster_bits).max(bytes.len()), 0);
        (self.header.l1.offset + first as u64 * 8, bytes)
    }

    /// Writes the header's first sector and waits until it is durable.
    fn save_head(&mut self, at: u64, bytes: &[u8]) -> io::Result<()> {
        let mut head = self.head.clone();
        if let Some(to) = head.get_mut(at as usize..at as usize + bytes.len()) {
            to.copy_from_slice(bytes);
        }
        side::flush(&mut self.side)?;
        side::write(&mut self.side, 0, &head)?;
        self.head = head;
        side::flush(&mut self.side)
    }

    /// Says in the header how large the disk is.
    ///
    /// # Errors
    /// What the host says.
    pub fn save_size(&mut self, bytes: u64) -> io::Result<()> {
        let mut header = self.header.clone();
        header.size = bytes;
        let (at, patch) = header.patch_size();
        self.save_head(at, &patch)?;
        self.header = header;
        Ok(())
    }

    /// Clusters for an L1 table of at least so many entries: offset and entries.
    ///
    /// # Errors
    /// See [`Refs::alloc`].
    pub fn alloc_l1(&mut self, entries: u64) -> io::Result<(u64, u32)> {
        let cluster = 1u64 << self.header.cluster_bits;
        let clusters = (entries * 8).div_ceil(cluster);
        let refs = self.refs.as_mut().ok_or_else(|| io::Error::from_raw_os_error(libc::EROFS))?;
        self.cycles.dirty = true;
        let run = refs.alloc_exact(clusters, &mut self.side)?;
        refs.reserved.extend(run.first..run.first + clusters);
        Ok((run.first * cluster, entries as u32))
    }

    /// Puts the L1 table at `offset`, with `count` entries. Not while a cycle is running.
    ///
    /// # Errors
    /// What the host says; the table is where it was, then.
    pub fn move_l1(&mut self, offset: u64, count: u32) -> io::Result<()> {
        let cluster = 1usize << self.header.cluster_bits;
        let mut table = self.l1_disk.clone();
        table.resize(count as usize, 0);
        let mut bytes: Vec<u8> = table.iter().flat_map(|e| e.to_be_bytes()).collect();
        bytes.resize(bytes.len().next_multiple_of(cluster), 0);
        side::write(&mut self.side, offset, &bytes)?;
        let mut header = self.header.clone();
        let old = std::mem::replace(&mut header.l1, Table { offset, count });
        let (at, patch) = header.patch_l1();
        self.save_head(at, &patch)?;
        (self.header, self.l1_disk) = (header, table);
        let clusters = (u64::from(old.count) * 8).div_ceil(cluster as u64);
        let first = old.offset / cluster as u64;
        self.frees.durable.extend(first..first + clusters);
        Ok(())
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
