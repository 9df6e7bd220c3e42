// SPDX-License-Identifier: Apache-2.0
//! The cycle: puts what changed of the metadata on disk, in the order that makes a power cut at any point leave leaks at
//! worst. One at a time for an image; all flushes that wait when it begins are answered when it ends.
//!
//! 1. *Bodies*: refcount blocks, new L2 tables, a moved refcount table. Nothing on disk refers to what is new in them.
//! 2. Sync. Guest data that completed before the cycle began is durable too: the copies that follow were taken before.
//! 3. *Names*: entries of the refcount table for new blocks, or the header's word of a moved one; sync, if there were any.
//! 4. *Links*: slices of L2 tables, then L1 entries of new tables.
//! 5. Sync. From here on, what was freed before the cycle began may be used again, once nobody is reading it any more.

use std::sync::Arc;

use crate::disk::Op;
use crate::qcow2::format::header::Table;
use crate::storage::buffer::AlignedBuf;

use super::chain::Chain;
use super::fetch::Need;
use super::handle::Handle;
use super::image::Image;
use super::inbox::Waiter;
use super::meta::Meta;
use super::refs::{Dirty, Refs};
use super::side;
use super::task::{State, Tag, Task};

/// How far a cycle is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Bodies,
    SyncBodies,
    Names,
    SyncNames,
    Links,
    SyncLinks,
}

/// A new table in a cycle: its index, its L1 entry, the slots whose content went into it.
type Fresh = (usize, u64, Vec<usize>);

/// A cycle under way, on this thread.
#[derive(Debug)]
pub struct Run {
    phase: Phase,
    /// Requests to the storage that are not done.
    left: usize,
    errno: i32,
    flushes: Vec<Waiter>,
    /// Tasks of this handle that end no sooner than the cycle does.
    holds: Vec<u32>,
    dirty: Dirty,
    tables: Vec<Fresh>,
    /// Slots, where they belong, and copies of them.
    slices: Vec<(usize, u64, Vec<u8>)>,
    frees: Vec<u64>,
    replaced: Vec<(u64, u64)>,
    l1: Vec<(usize, u64)>,
    /// Only a sync was asked for.
    plain: bool,
}

/// Writes to be sent off: where, what.
type Writes = Vec<(u64, Vec<u8>)>;

impl Handle {
    /// A flush: part of the next cycle, or a mere sync if nothing of the metadata changed.
    pub(super) fn step_flush(&mut self, index: u32, task: &mut Task) {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return };
        if !top.writable || task.pending > 0 || task.end != task.offset || task.errno != 0 {
            return;
        }
        let mut meta = top.lock();
        if meta.ripening() && !meta.cycles.running && (!meta.cycles.dirty || !meta.frees.ripe.is_empty()) {
            drop(meta);
            if self.ripen(top, Some(self.waiter(index))) {
                task.state = State::Parked;
                return;
            }
            meta = top.lock();
        }
        if meta.cycles.running || meta.cycles.dirty {
            task.state = State::Parked;
            meta.cycles.waiters.push(self.waiter(index));
            let start = !meta.cycles.running;
            drop(meta);
            if start {
                self.start_cycle(top);
            }
            return;
        }
        // Who was woken to run the next cycle finds here that none is needed; nor do those who waited for it.
        let others = std::mem::take(&mut meta.cycles.waiters);
        drop(meta);
        others.into_iter().for_each(Waiter::go_on);
        // Done when these are; a second look must not ask again.
        task.end = task.offset;
        for file in files(&chain) {
            task.pending += 1;
            self.issue(file, Tag::Part(index), Op::Flush, 0, 0, &[]);
        }
    }

    /// Starts a cycle if one is wanted, or if someone waits for room in the cache that a cycle would make.
    pub(super) fn need_cycle(&mut self) {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return };
        let meta = top.lock();
        let needed = meta.cycles.wanted || !meta.room.is_empty();
        let start = needed && meta.cycles.dirty && !meta.cycles.running;
        drop(meta);
        if start {
            self.start_cycle(top);
        }
    }

    /// Keeps a request that started a cycle from ending before it: a cycle goes on only while its handle has requests in
    /// flight. True if there is a cycle to wait for; the task then has a piece more.
    pub(super) fn hold(&mut self, task: u32) -> bool {
        self.need_cycle();
        match &mut self.cycle {
            Some(run) => {
                run.holds.push(task);
                true
            }
            None => false,
        }
    }

    fn start_cycle(&mut self, top: &Image) {
        let mut meta = top.lock();
        if meta.cycles.running || self.cycle.is_some() {
            // Its end wakes who waits for the next one.
            return;
        }
        meta.cycles.running = true;
        meta.cycles.wanted = false;
        let plain = !std::mem::take(&mut meta.cycles.dirty);
        let run = collect(&mut meta, top, plain);
        let mut writes: Writes = run.dirty.blocks.iter().map(|(_, offset, data)| (*offset, data.clone())).collect();
        for (index, _, slots) in &run.tables {
            writes.push((Meta::table_offset(top, *index), table_bytes(&meta, top, *index, slots)));
        }
        if let Some((offset, table)) = &run.dirty.table {
            writes.push((*offset, table.iter().flat_map(|e| e.to_be_bytes()).collect()));
        }
        drop(meta);
        self.cycle = Some(Box::new(run));
        self.write_all(writes);
        self.turn_cycle(top);
    }

    /// Sends off writes to the image's own file, neighbours together.
    fn write_all(&mut self, mut writes: Writes) {
        writes.sort_by_key(|(offset, _)| *offset);
        let mut writes = writes.into_iter().peekable();
        let file = self.chain.places.first().map_or(0, |p| p.file);
        while let Some((start, data)) = writes.next() {
            let (mut end, mut parts) = (start + data.len() as u64, vec![data]);
            while let Some((_, data)) = writes.next_if(|(offset, _)| *offset == end && parts.len() < 64) {
                end += data.len() as u64;
                parts.push(data);
            }
            let bufs: Vec<AlignedBuf> = parts.iter().filter_map(|d| AlignedBuf::with(d, d.len()).ok()).collect();
            let Some(run) = &mut self.cycle else { return };
            if bufs.len() != parts.len() {
                run.errno = libc::ENOMEM;
                continue;
            }
            run.left += 1;
            let segs: Vec<_> = bufs.iter().map(|b| b.seg(0, b.len())).collect();
            self.issue(file, Tag::Cycle(bufs), Op::Write, start, end - start, &segs);
        }
    }

    fn sync_all(&mut self, all: bool) {
        let files: Vec<usize> = files(&self.chain).take(if all { 2 } else { 1 }).collect();
        for file in files {
            if let Some(run) = &mut self.cycle {
                run.left += 1;
            }
            self.issue(file, Tag::Cycle(Vec::new()), Op::Flush, 0, 0, &[]);
        }
    }

    /// Something of the cycle is done.
    pub(super) fn cycle_part(&mut self, errno: i32) {
        let Some(run) = &mut self.cycle else { return };
        run.left -= 1;
        if errno != 0 && run.errno == 0 {
            run.errno = errno;
        }
        let chain = Arc::clone(&self.chain);
        if let Some(top) = chain.top() {
            self.turn_cycle(top);
        }
    }

    /// Goes on to the next phase, once the last one is through.
    fn turn_cycle(&mut self, top: &Image) {
        while let Some(run) = &mut self.cycle {
            if run.left > 0 {
                return;
            }
            if run.errno != 0 {
                return self.end_cycle(top);
            }
            match run.phase {
                Phase::Bodies => {
                    run.phase = Phase::SyncBodies;
                    self.sync_all(true);
                }
                Phase::SyncBodies if run.plain => return self.end_cycle(top),
                Phase::SyncBodies => {
                    run.phase = Phase::Names;
                    let mut meta = top.lock();
                    let writes = names(&mut meta, run);
                    drop(meta);
                    self.write_all(writes);
                }
                Phase::Names => {
                    run.phase = Phase::SyncNames;
                    if !run.dirty.fresh.is_empty() || run.dirty.table.is_some() {
                        self.sync_all(false);
                    }
                }
                Phase::SyncNames => {
                    run.phase = Phase::Links;
                    let mut meta = top.lock();
                    let writes = links(&mut meta, run);
                    drop(meta);
                    self.write_all(writes);
                }
                Phase::Links => {
                    run.phase = Phase::SyncLinks;
                    if !run.slices.is_empty() || !run.l1.is_empty() {
                        self.sync_all(false);
                    }
                }
                Phase::SyncLinks => return self.end_cycle(top),
            }
        }
    }

    /// Books how the cycle went, answers its flushes, starts the next one if someone waits for it.
    fn end_cycle(&mut self, top: &Image) {
        let Some(mut run) = self.cycle.take() else { return };
        let ok = run.errno == 0;
        let mut meta = top.lock();
        if matches!(run.phase, Phase::Bodies | Phase::SyncBodies) {
            book_bodies(&mut meta, &run, ok);
            for (_, _, slots) in &run.tables {
                slots.iter().for_each(|s| meta.end_writing(*s, ok));
            }
        }
        if matches!(run.phase, Phase::Names | Phase::SyncNames) && !ok {
            for (_, _, slots) in &run.tables {
                slots.iter().for_each(|s| meta.end_writing(*s, false));
            }
        }
        for (slot, _, _) in &run.slices {
            meta.end_writing(*slot, ok);
        }
        if ok {
            for (index, raw) in &run.l1 {
                if meta.l1.pending.get(index) == Some(raw) {
                    meta.l1.pending.remove(index);
                }
            }
            meta.frees.durable.append(&mut run.frees);
        } else {
            meta.cycles.dirty = true;
            meta.frees.fresh.append(&mut run.frees);
            if let Some(refs) = &mut meta.refs {
                refs.replaced.append(&mut run.replaced);
            }
        }
        meta.cycles.running = false;
        meta.mark_broken(top);
        if ok {
            meta.made_room();
        } else {
            for waiter in meta.room.drain(..) {
                waiter.flushed(run.errno);
            }
        }
        // Whoever waits runs the next one: this handle may have nothing more to do, and nobody to drive it.
        let leader = if meta.cycles.waiters.is_empty() { None } else { Some(meta.cycles.waiters.remove(0)) };
        drop(meta);
        for waiter in run.flushes {
            waiter.flushed(run.errno);
        }
        for task in run.holds {
            self.part_done(task, 0);
        }
        if ok {
            self.ripen(top, None);
        }
        if let Some(leader) = leader {
            leader.go_on();
        }
    }

    /// Gives freed clusters back: their space to the host, then their numbers to the allocator. True if that has to wait for
    /// refcounts, and so does the flush `waiter`.
    pub(super) fn ripen(&mut self, top: &Image, waiter: Option<Waiter>) -> bool {
        loop {
            let mut meta = top.lock();
            let ripe = meta.ripe(top);
            if ripe.is_empty() {
                return false;
            }
            let Meta { refs: Some(refs), side, frees, .. } = &mut *meta else { return false };
            let runs = match last_references(refs, &ripe) {
                Ok(runs) => runs,
                Err(Need::Read(want)) => {
                    frees.ripe.extend(ripe);
                    // Without a request in flight nobody might drive the read: the next flush does.
                    let Some(waiter) = waiter else { return false };
                    frees.waiters.push(waiter);
                    self.fetch_table(meta, want, None);
                    return true;
                }
                Err(Need::Failed(_)) => {
                    meta.broke(top);
                    continue;
                }
            };
            let own = side.share();
            drop(meta);
            if let Some(mut own) = own {
                let bits = top.layout.cluster_bits;
                for (first, count) in runs {
                    // A hint: a host that can't keeps the space until the cluster is used again.
                    let _ = side::discard(&mut own, first << bits, count << bits);
                }
            }
            drop_all(&mut top.lock(), top, &ripe);
        }
    }
}

/// Of the references to be dropped, sorted, the clusters that have no others: runs of them.
fn last_references(refs: &mut Refs, ripe: &[u64]) -> Result<Vec<(u64, u64)>, Need> {
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for same in ripe.chunk_by(|a, b| a == b) {
        let cluster = same[0];
        if refs.get(cluster)? == same.len() as u64 {
            match runs.last_mut() {
                Some((first, count)) if *first + *count == cluster => *count += 1,
                _ => runs.push((cluster, 1)),
            }
        }
    }
    Ok(runs)
}

/// Drops the references, or puts them back where the block has gone meanwhile.
fn drop_all(meta: &mut Meta, top: &Image, ripe: &[u64]) {
    let Meta { refs: Some(refs), cycles, frees, .. } = meta else { return };
    cycles.dirty = true;
    let mut bad = false;
    for (at, cluster) in ripe.iter().enumerate() {
        match refs.drop_one(*cluster) {
            Ok(0) => {
                refs.reserved.remove(cluster);
            }
            Ok(_) => {}
            Err(Need::Read(_)) => {
                frees.ripe.extend(ripe.iter().skip(at));
                break;
            }
            Err(Need::Failed(_)) => bad = true,
        }
    }
    if bad {
        meta.broke(top);
    }
}

/// The files that a flush concerns: the image's own, and its data file.
fn files(chain: &Chain) -> impl Iterator<Item = usize> + use<> {
    let place = chain.places.first().map_or((0, 0), |p| (p.file, p.data));
    [Some(place.0), (place.1 != place.0).then_some(place.1)].into_iter().flatten()
}

/// Takes copies of all that a cycle writes.
fn collect(meta: &mut Meta, top: &Image, plain: bool) -> Run {
    let mut run = Run {
        phase: Phase::Bodies,
        left: 0,
        errno: 0,
        holds: Vec::new(),
        flushes: std::mem::take(&mut meta.cycles.waiters),
        dirty: Dirty::default(),
        tables: Vec::new(),
        slices: Vec::new(),
        frees: Vec::new(),
        replaced: Vec::new(),
        l1: Vec::new(),
        plain,
    };
    if plain {
        return run;
    }
    if let Some(refs) = &mut meta.refs {
        run.dirty = refs.take_dirty();
        run.replaced = std::mem::take(&mut refs.replaced);
    }
    run.frees = std::mem::take(&mut meta.frees.fresh);
    run.tables = meta.tables.keys().map(|index| (*index, top.l1.get(*index), Vec::new())).collect();
    let dirty: Vec<usize> = (0..meta.slots.len()).filter(|i| meta.slots.get(*i).is_some_and(|s| s.dirty)).collect();
    for slot in dirty {
        let Some((slice, words)) = top.cache.content(slot) else { continue };
        let table = top.table_of(slice << top.slice_bits());
        meta.start_writing(slot);
        if let Ok(at) = run.tables.binary_search_by_key(&table, |(index, _, _)| *index) {
            run.tables[at].2.push(slot);
            continue;
        }
        let bytes = words.iter().flat_map(|w| w.load(std::sync::atomic::Ordering::Relaxed).to_be_bytes()).collect();
        match top.slice_offset(slice) {
            Ok(offset) => run.slices.push((slot, offset, bytes)),
            // A slice in the cache has a table.
            Err(_) => run.errno = libc::EIO,
        }
    }
    run
}

/// A new table, whole.
fn table_bytes(meta: &Meta, top: &Image, index: usize, slots: &[usize]) -> Vec<u8> {
    let cluster = top.layout.cluster_size() as usize;
    let base = meta.tables.get(&index).and_then(|t| t.base.clone());
    let mut bytes = base.unwrap_or_else(|| vec![0; cluster]);
    let len = top.slice_bytes();
    let per_table = (cluster / len) as u64;
    for (slice, words) in slots.iter().filter_map(|s| top.cache.content(*s)) {
        let at = (slice % per_table) as usize * len;
        let Some(to) = bytes.get_mut(at..at + len) else { continue };
        for (to, word) in to.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.load(std::sync::atomic::Ordering::Relaxed).to_be_bytes());
        }
    }
    bytes
}

fn book_bodies(meta: &mut Meta, run: &Run, ok: bool) {
    let blocks: Vec<usize> = run.dirty.blocks.iter().map(|(index, _, _)| *index).collect();
    if let Some(refs) = &mut meta.refs {
        refs.blocks_written(&blocks, ok);
    }
}

/// The bodies are durable: what names the new ones.
fn names(meta: &mut Meta, run: &mut Run) -> Writes {
    book_bodies(meta, run, true);
    let unit = meta.unit;
    let Meta { refs: Some(refs), header, head, .. } = meta else { return Vec::new() };
    if let Some((offset, table)) = &run.dirty.table {
        let count = ((table.len() as u64 * 8) >> header.cluster_bits) as u32;
        header.refcount_table = Table { offset: *offset, count };
        let (at, bytes) = header.patch_refcount_table();
        if let Some(to) = head.get_mut(at as usize..at as usize + bytes.len()) {
            to.copy_from_slice(&bytes);
        }
        return vec![(0, head.clone())];
    }
    refs.enter(&run.dirty.fresh);
    let mut writes: Writes = run.dirty.fresh.iter().map(|index| refs.disk_sector(*index, unit)).collect();
    writes.dedup_by_key(|(offset, _)| *offset);
    writes
}

/// The names are durable: what links new clusters to the tree that the guest's data hangs on.
fn links(meta: &mut Meta, run: &mut Run) -> Writes {
    if let Some(refs) = &mut meta.refs {
        refs.entered(&run.dirty.fresh);
        if let Some((offset, table)) = run.dirty.table.clone() {
            refs.table_moved(offset, table);
        }
        let old = run.replaced.drain(..).flat_map(|(first, count)| first..first + count);
        run.frees.extend(old);
    }
    let mut writes: Writes = run.slices.iter().map(|(_, offset, bytes)| (*offset, bytes.clone())).collect();
    for (index, raw, slots) in &run.tables {
        slots.iter().for_each(|s| meta.end_writing(*s, true));
        meta.tables.remove(index);
        meta.l1.pending.insert(*index, *raw);
    }
    run.l1 = meta.l1.pending.iter().map(|(index, raw)| (*index, *raw)).collect();
    let mut sectors: Writes = Vec::new();
    for (index, raw) in &run.l1 {
        if let Some(entry) = meta.l1.entries.get_mut(*index) {
            *entry = *raw;
        }
    }
    for (index, _) in &run.l1 {
        let (offset, bytes) = meta.l1_sector(*index);
        if sectors.last().is_none_or(|(last, _)| *last != offset) {
            sectors.push((offset, bytes));
        }
    }
    writes.append(&mut sectors);
    writes
}
