// SPDX-License-Identifier: Apache-2.0
//! Refcounts of the open image and the allocator of host clusters. Lives under the image's `Meta` lock.
//!
//! Nothing here is read or written: what needs a block that is not in memory says so ([`Need::Read`]) and is asked again when
//! it is; the cycle takes copies of what is dirty ([`Refs::take_dirty`]) and says how it went.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;

use crate::qcow2::format::refcount::{MAX_TABLE_BYTES, Width, table_entry};
use crate::storage::Storage;

use super::fetch::{Need, Want};

/// Most bytes of blocks kept beside the dirty ones.
const KEPT_BYTES: u64 = 4 << 20;
/// Fewest blocks kept, however small the budget.
const LEAST_BLOCKS: usize = 4;
/// How far the file is made longer at a time, in bytes.
const AHEAD: u64 = 16 << 20;

/// A refcount block in memory.
#[derive(Debug)]
struct Block {
    data: Vec<u8>,
    dirty: bool,
    /// A copy is being written.
    writing: bool,
    /// When it was last looked at; `u64::MAX` before the first time: who asked for it has not been back yet.
    used: u64,
}

/// A run of clusters just allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Number of the first cluster.
    pub first: u64,
    /// How many.
    pub count: u64,
    /// They were never used: the file has zeroes there.
    pub fresh: bool,
}

/// What a cycle has to write of refcounts.
#[derive(Debug, Default)]
pub struct Dirty {
    /// Blocks: number, offset in the file, content.
    pub blocks: Vec<(usize, u64, Vec<u8>)>,
    /// Blocks that the table on disk does not know yet.
    pub fresh: Vec<usize>,
    /// A table that replaces the one the header names: offset, content.
    pub table: Option<(u64, Vec<u64>)>,
}

/// The refcounts of an image.
#[derive(Debug)]
pub struct Refs {
    width: Width,
    cluster_bits: u32,
    /// As it is in memory.
    table: Vec<u64>,
    /// As it is on disk, where the header says.
    disk: Vec<u64>,
    offset: u64,
    blocks: HashMap<usize, Block>,
    /// So many of them stay beside the dirty ones.
    kept: usize,
    pending: BTreeSet<usize>,
    /// The table moved to `offset`, and the header does not say so yet.
    moved: bool,
    /// Clusters of tables that were replaced.
    pub replaced: Vec<(u64, u64)>,
    /// No free cluster is below this one.
    guess: u64,
    /// From this cluster on the file was never written; `u64::MAX` if nobody knows.
    untouched: u64,
    /// Bytes in the file.
    pub file_len: u64,
    /// Clusters of tables; a refcount of zero does not make them free.
    pub reserved: HashSet<u64>,
    clock: u64,
}

fn no_space() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOSPC)
}

/// The image contradicts itself; becomes `EIO` for the guest.
pub fn damaged() -> io::Error {
    io::Error::from(io::ErrorKind::InvalidData)
}

impl Refs {
    /// Refcounts with this table, which the header says is at `offset`, of a file of `file_len` bytes; `grows` if bytes past
    /// the file's end can be had and are zeroes.
    pub fn new(width: Width, cluster_bits: u32, offset: u64, table: Vec<u64>, file_len: u64, grows: bool) -> Self {
        let clusters = file_len.div_ceil(1 << cluster_bits);
        let reserved = table.iter().filter(|e| **e != 0).map(|e| e >> cluster_bits);
        Self {
            reserved: reserved.collect(),
            width,
            cluster_bits,
            disk: table.clone(),
            table,
            offset,
            blocks: HashMap::new(),
            kept: LEAST_BLOCKS,
            pending: BTreeSet::new(),
            moved: false,
            replaced: Vec::new(),
            guess: 0,
            untouched: if grows { clusters } else { u64::MAX },
            file_len,
            clock: 0,
        }
    }

    /// Keeps blocks of about so many bytes.
    pub fn keep(&mut self, budget: u64) {
        self.kept = ((budget.min(KEPT_BYTES) >> self.cluster_bits) as usize).max(LEAST_BLOCKS);
    }

    fn block_bits(&self) -> u32 {
        self.width.block_bits(self.cluster_bits)
    }

    /// The content of the table on disk around entry `index`: offset in the file and bytes, in units of `unit`.
    pub fn disk_sector(&self, index: usize, unit: usize) -> (u64, Vec<u8>) {
        let first = index * 8 / unit * unit / 8;
        let bytes = self.disk.iter().skip(first).take(unit / 8).flat_map(|e| e.to_be_bytes()).collect();
        (self.offset + first as u64 * 8, bytes)
    }

    fn load(&mut self, index: usize) -> Result<Option<&mut Block>, Need> {
        self.clock += 1;
        let clock = self.clock;
        if !self.blocks.contains_key(&index) {
            let Some(raw) = self.table.get(index) else { return Ok(None) };
            let Some(offset) = table_entry(*raw, self.cluster_bits).map_err(|_| damaged())? else { return Ok(None) };
            if offset >= self.file_len {
                return Err(damaged().into());
            }
            return Err(Need::Read(Want::Block(index, offset)));
        }
        let Some(block) = self.blocks.get_mut(&index) else { return Ok(None) };
        block.used = clock;
        Ok(Some(block))
    }

    /// Takes a block that was asked for and is not here.
    pub fn put(&mut self, index: usize, data: Vec<u8>) {
        if self.blocks.contains_key(&index) {
            return;
        }
        self.make_room();
        self.blocks.insert(index, Block { data, dirty: false, writing: false, used: u64::MAX });
    }

    fn make_room(&mut self) {
        if self.blocks.len() < self.kept {
            return;
        }
        let idle = self.blocks.iter().filter(|(_, b)| !b.dirty && !b.writing && b.used != u64::MAX);
        let idle = idle.min_by_key(|(_, b)| b.used);
        if let Some(index) = idle.map(|(i, _)| *i) {
            self.blocks.remove(&index);
        }
    }

    fn split(&self, cluster: u64) -> (usize, usize) {
        let bits = self.block_bits();
        (usize::try_from(cluster >> bits).unwrap_or(usize::MAX), (cluster & ((1 << bits) - 1)) as usize)
    }

    /// Number of the block that counts a cluster.
    pub fn block_of(&self, cluster: u64) -> usize {
        self.split(cluster).0
    }

    /// The refcount of a cluster.
    ///
    /// # Errors
    /// A block to read, or `EIO`: the image is damaged.
    pub fn get(&mut self, cluster: u64) -> Result<u64, Need> {
        let width = self.width;
        let (index, entry) = self.split(cluster);
        Ok(self.load(index)?.map_or(0, |b| width.get(&b.data, entry)))
    }

    /// Takes one reference of a cluster away.
    ///
    /// # Errors
    /// A block to read; `EIO` if it has none: the image is damaged.
    pub fn drop_one(&mut self, cluster: u64) -> Result<u64, Need> {
        let width = self.width;
        let (index, entry) = self.split(cluster);
        let block = self.load(index)?.ok_or_else(damaged)?;
        let left = width.add(&mut block.data, entry, -1).ok_or_else(damaged)?;
        block.dirty = true;
        if left == 0 {
            self.guess = self.guess.min(cluster);
        }
        Ok(left)
    }

    fn set(&mut self, cluster: u64, count: u64) -> Result<(), Need> {
        let width = self.width;
        let (index, entry) = self.split(cluster);
        let block = self.load(index)?.ok_or_else(damaged)?;
        if !width.set(&mut block.data, entry, count) {
            return Err(damaged().into());
        }
        block.dirty = true;
        Ok(())
    }

    /// Makes the file reach up to the end of cluster `end - 1`.
    ///
    /// # Errors
    /// `ENOSPC`, or what the host says.
    pub fn reach(&mut self, end: u64, storage: &mut Storage) -> io::Result<()> {
        let bytes = end.checked_mul(1 << self.cluster_bits).filter(|b| *b < 1 << 55).ok_or_else(no_space)?;
        if bytes <= self.file_len {
            return Ok(());
        }
        // Ahead of need, but never much more than what there is: small images stay small.
        let ahead = AHEAD.min((self.file_len / 4).next_multiple_of(1 << self.cluster_bits));
        let generous = storage.reserve(self.file_len, bytes + ahead);
        self.file_len = match generous {
            Ok(()) => bytes + ahead,
            Err(_) => {
                storage.reserve(self.file_len, bytes)?;
                bytes
            }
        };
        Ok(())
    }

    /// Whether the file ends before cluster `end` does.
    pub fn short_of(&self, end: u64) -> bool {
        end << self.cluster_bits > self.file_len
    }

    /// The file was written up to the end of cluster `end - 1`.
    pub fn reached(&mut self, end: u64) {
        self.file_len = self.file_len.max(end << self.cluster_bits);
    }

    /// Up to `most` adjacent clusters, at least one, each with a refcount of one from now on; `grow`: the file reaches up to
    /// their end.
    ///
    /// # Errors
    /// A block to read; `ENOSPC`; `EIO` where the image is damaged. Nothing is allocated then.
    pub fn alloc(&mut self, most: u64, grow: bool, storage: &mut Storage) -> Result<Run, Need> {
        loop {
            let (index, entry) = self.split(self.guess);
            if self.ensure_block(index, storage)? {
                continue;
            }
            let (width, bits) = (self.width, self.block_bits());
            let base = (index as u64) << bits;
            let count = 1usize << bits;
            let block = self.load(index)?.ok_or_else(damaged)?;
            let free = |e: usize| width.get(&block.data, e) == 0;
            let Some(first) = (entry..count).find(|e| free(*e)) else {
                self.guess = base + count as u64;
                continue;
            };
            let run = (first..count).take(usize::try_from(most).unwrap_or(usize::MAX)).take_while(|e| free(*e)).count();
            let (first, run) = (base + first as u64, run as u64);
            if (first..first + run).any(|c| c == 0 || self.reserved.contains(&c)) {
                // A table lies in a cluster that nobody refers to: one step further and it would be overwritten.
                return Err(damaged().into());
            }
            if grow {
                self.reach(first + run, storage)?;
            }
            for cluster in first..first + run {
                self.set(cluster, 1)?;
            }
            self.guess = first + run;
            return Ok(self.used(first, run));
        }
    }

    fn used(&mut self, first: u64, count: u64) -> Run {
        let fresh = first >= self.untouched;
        if self.untouched != u64::MAX {
            self.untouched = self.untouched.max(first + count);
        }
        Run { first, count, fresh }
    }

    /// Exactly `count` adjacent clusters.
    ///
    /// # Errors
    /// See [`Refs::alloc`].
    pub fn alloc_exact(&mut self, count: u64, storage: &mut Storage) -> Result<Run, Need> {
        let mut misfits = Vec::new();
        let found = loop {
            match self.alloc(count, true, storage) {
                Ok(run) if run.count == count => break Ok(run),
                Ok(run) => misfits.push(run),
                Err(e) => break Err(e),
            }
        };
        for run in misfits {
            self.give_back(run.first, run.count);
        }
        found
    }

    /// Frees clusters that nothing ever referred to, neither on disk nor in memory.
    pub fn give_back(&mut self, first: u64, count: u64) {
        for cluster in first..first + count {
            // Their blocks are changed and not written, so they are here.
            let _ = self.drop_one(cluster);
        }
    }

    /// Makes the block `index` if there is none; true if it took a cluster for that.
    fn ensure_block(&mut self, index: usize, storage: &mut Storage) -> Result<bool, Need> {
        if index >= self.table.len() {
            self.grow(storage)?;
            return Ok(true);
        }
        if self.table.get(index).is_some_and(|e| *e != 0) {
            return Ok(false);
        }
        // A block keeps its own count: it lies in the range that it describes.
        let first = self.guess.max((index as u64) << self.block_bits());
        self.reach(first + 1, storage)?;
        self.add_block(index, first);
        self.set(first, 1)?;
        self.used(first, 1);
        self.guess = first + 1;
        Ok(true)
    }

    fn add_block(&mut self, index: usize, cluster: u64) {
        if let Some(entry) = self.table.get_mut(index) {
            *entry = cluster << self.cluster_bits;
        }
        let block = Block { data: vec![0; 1 << self.cluster_bits], dirty: true, writing: false, used: self.clock };
        self.blocks.insert(index, block);
        self.pending.insert(index);
        self.reserved.insert(cluster);
    }

    /// Makes a larger table behind everything that the old one covers, with the blocks that count its clusters.
    fn grow(&mut self, storage: &mut Storage) -> Result<(), Need> {
        let (old, bits) = (self.table.len() as u64, self.block_bits());
        let start = old << bits;
        let per_cluster = 1u64 << (self.cluster_bits - 3);
        let (mut clusters, mut blocks) = (1, 1);
        loop {
            let entries = (old + old / 2 + blocks).next_multiple_of(per_cluster);
            let (c, b) = (entries / per_cluster, (clusters + blocks).div_ceil(1 << bits));
            if (c, b) == (clusters, blocks) {
                break;
            }
            (clusters, blocks) = (c.max(clusters), b.max(blocks));
        }
        if clusters << self.cluster_bits > MAX_TABLE_BYTES {
            return Err(no_space().into());
        }
        let end = start + clusters + blocks;
        self.reach(end, storage)?;
        self.replaced.push((self.offset >> self.cluster_bits, (old * 8) >> self.cluster_bits));
        self.table.resize((clusters * per_cluster) as usize, 0);
        self.offset = start << self.cluster_bits;
        self.moved = true;
        for block in 0..blocks {
            self.add_block((old + block) as usize, start + clusters + block);
        }
        for cluster in start..end {
            self.set(cluster, 1)?;
        }
        self.reserved.extend(start..start + clusters);
        self.used(start, end - start);
        self.guess = self.guess.max(end);
        Ok(())
    }

    /// Cuts off the end of the file that was only reserved.
    pub fn trim(&mut self, storage: &mut Storage) {
        let end = self.untouched.saturating_mul(1 << self.cluster_bits);
        if end < self.file_len && storage.set_len(end).is_ok() {
            self.file_len = end;
        }
    }

    /// Copies of all that is not on disk.
    pub fn take_dirty(&mut self) -> Dirty {
        let mut dirty = Dirty { fresh: self.pending.iter().copied().collect(), ..Dirty::default() };
        for (index, block) in self.blocks.iter_mut().filter(|(_, b)| b.dirty) {
            (block.dirty, block.writing) = (false, true);
            if let Some(offset) = self.table.get(*index) {
                dirty.blocks.push((*index, *offset, block.data.clone()));
            }
        }
        dirty.blocks.sort_unstable_by_key(|(_, offset, _)| *offset);
        if self.moved {
            dirty.table = Some((self.offset, self.table.clone()));
        }
        dirty
    }

    /// The copies of blocks are durable (`ok`) or not.
    pub fn blocks_written(&mut self, blocks: &[usize], ok: bool) {
        for index in blocks {
            if let Some(block) = self.blocks.get_mut(index) {
                block.writing = false;
                block.dirty |= !ok;
            }
        }
    }

    /// Enters durable blocks into the image of the table on disk; the caller writes the sectors they are in.
    pub fn enter(&mut self, fresh: &[usize]) {
        for index in fresh {
            if let (Some(to), Some(from)) = (self.disk.get_mut(*index), self.table.get(*index)) {
                *to = *from;
            }
        }
    }

    /// The table on disk knows these blocks.
    pub fn entered(&mut self, fresh: &[usize]) {
        for index in fresh {
            self.pending.remove(index);
        }
    }

    /// The header names the table at `offset` with this content.
    pub fn table_moved(&mut self, offset: u64, content: Vec<u64>) {
        if self.offset == offset {
            self.moved = false;
        }
        self.disk = content;
    }
}
