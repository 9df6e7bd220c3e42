// SPDX-License-Identifier: Apache-2.0
//! One open qcow2 image: what all threads share of it. Looking up is free of locks; whatever changes the image's metadata
//! holds [`Meta`]. A backing image is the same thing, never changed.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::options::Cow;
use crate::qcow2::format::crypto::Cipher;
use crate::qcow2::format::entry::{COPIED, Layout, Mapping, OFFSET_MASK};
use crate::qcow2::format::header::{Compression, Header, MAX_L1_BYTES, Table};
use crate::qcow2::format::{FormatError, be64};
use crate::storage::Storage;
use crate::storage::zeroing::Zeroing;

use super::cache::Cache;
use super::meta::Meta;
use super::refs::Refs;
use super::{mend, side};

/// Bytes of a slice of an L2 table, if clusters are not smaller.
const SLICE: u64 = 4096;
/// Default most bytes of the L2 cache.
const L2_CACHE: u64 = 32 << 20;
/// Entries of the L1 table read at a time.
const PART: usize = 128 << 10;
/// Bytes of the header that are patched: one sector.
pub const HEAD: usize = 512;

/// Entries in a page of the L1 table.
const PAGE: usize = 4096;

/// The L1 table, which only ever grows. Pages without an entry cost nothing.
#[derive(Debug)]
pub struct L1 {
    pages: Box<[OnceLock<Box<[AtomicU64]>>]>,
}

impl Default for L1 {
    fn default() -> Self {
        Self { pages: (0..MAX_L1_BYTES as usize / 8 / PAGE).map(|_| OnceLock::new()).collect() }
    }
}

impl L1 {
    /// The entry; 0 past the end.
    pub fn get(&self, index: usize) -> u64 {
        let page = self.pages.get(index / PAGE).and_then(OnceLock::get);
        page.and_then(|p| p.get(index % PAGE)).map_or(0, |e| e.load(Ordering::Acquire))
    }

    /// The first so many entries.
    fn entries(&self, count: u32) -> impl Iterator<Item = u64> {
        (0..count as usize).map(|index| self.get(index))
    }

    /// Sets the entry. For holders of the lock.
    pub fn set(&self, index: usize, value: u64) {
        let Some(page) = self.pages.get(index / PAGE) else { return };
        let entries = page.get_or_init(|| (0..PAGE).map(|_| AtomicU64::new(0)).collect());
        if let Some(entry) = entries.get(index % PAGE) {
            entry.store(value, Ordering::Release);
        }
    }
}

/// Requests in flight, by the epoch they began in: a freed cluster is not used again while someone may still be reading or
/// writing it under its old meaning.
#[derive(Debug, Default)]
pub struct Epochs {
    now: AtomicUsize,
    in_flight: [AtomicUsize; 2],
}

impl Epochs {
    /// A request begins: before it looks anything up. Gives what to hand to [`Epochs::leave`].
    pub fn enter(&self) -> usize {
        loop {
            let now = self.now.load(Ordering::SeqCst);
            let counter = &self.in_flight[now & 1];
            counter.fetch_add(1, Ordering::SeqCst);
            if self.now.load(Ordering::SeqCst) == now {
                return now & 1;
            }
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// A request ended.
    pub fn leave(&self, ticket: usize) {
        self.in_flight[ticket & 1].fetch_sub(1, Ordering::SeqCst);
    }

    /// Begins a new epoch, the one before the last being over; gives the ticket of the one that ends.
    pub fn turn(&self) -> usize {
        self.now.fetch_add(1, Ordering::SeqCst) & 1
    }

    /// Whether nobody of that ticket is left.
    pub fn over(&self, ticket: usize) -> bool {
        self.in_flight[ticket & 1].load(Ordering::SeqCst) == 0
    }
}

/// What a lookup without a lock found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The slice is not cached.
    Miss,
    /// There is no L2 table: everything up to the end of what it would cover is unallocated.
    NoTable,
    /// This.
    Is(Mapping),
    /// Something the format does not allow.
    Bad,
}

/// One open image.
#[derive(Debug)]
pub struct Image {
    /// How entries are read.
    pub layout: Layout,
    /// How compressed clusters are compressed.
    pub compression: Compression,
    /// Bytes of the disk.
    pub size: AtomicU64,
    /// The active L1 table as it is in memory.
    pub l1: L1,
    /// Cached slices of L2 tables.
    pub cache: Cache,
    /// Everything that changes.
    pub meta: Mutex<Meta>,
    /// Who may still use what was freed.
    pub epochs: Epochs,
    /// Zeroes around data.
    pub cow: Cow,
    /// How they get into its data's file.
    pub zeros: Zeroing,
    /// Writes are refused from now on: the image turned out to be damaged.
    pub broken: AtomicBool,
    /// The data file must stay a raw image of its own.
    pub raw_data_file: bool,
    /// It was opened to be written.
    pub writable: bool,
    /// There is an image below this one.
    pub has_backing: bool,
    /// Its data is encrypted. Compressed clusters are not, whatever the image: QEMU makes none in encrypted ones.
    pub cipher: Option<Cipher>,
}

/// How an image is opened.
#[derive(Debug)]
pub struct How {
    /// To be written.
    pub writable: bool,
    /// Byte budget of the L2 cache.
    pub l2_cache: Option<u64>,
    /// Zeroes around data.
    pub cow: Cow,
    /// Smallest unit of direct I/O.
    pub unit: usize,
    /// For its data.
    pub cipher: Option<Cipher>,
}

/// Reads the header of the image on `storage`.
///
/// # Errors
/// What is wrong with it, or what the host says.
pub fn read_header(storage: &mut Storage) -> io::Result<Result<(Header, u64), FormatError>> {
    let len = storage.len()?;
    if len < 72 {
        return Ok(Err(FormatError::NotQcow2));
    }
    let start = side::read(storage, 0, HEAD, len)?;
    let need = match Header::needs(&start) {
        Ok(need) => need,
        Err(e) => return Ok(Err(e)),
    };
    let cluster = side::read(storage, 0, need.min(usize::try_from(len).unwrap_or(need)), len)?;
    Ok(Header::parse(&cluster).and_then(|h| h.check_layout(len).map(|()| (h, len))))
}

fn refuse_writing(header: &Header) -> Result<(), FormatError> {
    if header.corrupt() {
        return FormatError::unsupported(
            "it is marked as damaged; repair it with `tare img check --repair`, or open it readonly=on",
        );
    }
    if header.dirty() {
        return FormatError::unsupported(
            "it was not closed and its refcounts are stale; run `tare img check --repair`, or open it readonly=on",
        );
    }
    if header.extensions.bitmaps.is_some() {
        return FormatError::unsupported(
            "writing would make its persistent bitmaps stale; remove them (`tare img bitmap --remove`), or open it readonly=on",
        );
    }
    Ok(())
}

impl Image {
    /// Opens the image on `storage`, whose header was read by [`read_header`].
    ///
    /// # Errors
    /// What it can't be used for, or what the host says.
    pub fn open(
        mut storage: Storage,
        header: &Header,
        file_len: u64,
        how: How,
    ) -> io::Result<Result<Self, FormatError>> {
        if how.writable
            && let Err(e) = refuse_writing(header)
        {
            return Ok(Err(e));
        }
        let layout = header.layout();
        let l1 = match load_l1(&mut storage, header, file_len)? {
            Ok(l1) => l1,
            Err(e) => return Ok(Err(e)),
        };
        let slice = SLICE.min(layout.cluster_size());
        let tables = layout.l1_entries(header.size);
        let slices = tables.saturating_mul(layout.cluster_size() / slice).max(1);
        let budget = how.l2_cache.unwrap_or(L2_CACHE);
        let cache = Cache::new(slices, (slice / 8) as usize, budget);
        let refs = if how.writable {
            match writable_refs(&mut storage, header, file_len, &l1)? {
                Ok(mut refs) => {
                    refs.keep(budget);
                    Some(refs)
                }
                Err(e) => return Ok(Err(e)),
            }
        } else {
            None
        };
        let head = side::read(&mut storage, 0, HEAD, file_len)?;
        let l1_disk = if how.writable { l1.entries(header.l1.count).collect() } else { Vec::new() };
        let meta = Meta::new(storage, refs, (header.clone(), head, l1_disk), cache.capacity(), how.unit);
        Ok(Ok(Self {
            layout,
            compression: header.compression,
            size: AtomicU64::new(header.size),
            l1,
            cache,
            meta: Mutex::new(meta),
            epochs: Epochs::default(),
            cow: how.cow,
            zeros: Zeroing::default(),
            broken: AtomicBool::new(false),
            raw_data_file: header.raw_data_file(),
            writable: how.writable,
            has_backing: header.backing.is_some(),
            cipher: how.cipher,
        }))
    }

    /// The lock on everything that changes.
    pub fn lock(&self) -> MutexGuard<'_, Meta> {
        self.meta.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Log2 of the entries in a slice.
    pub fn slice_bits(&self) -> u32 {
        let per_entry = if self.layout.extended { 1 } else { 0 };
        self.cache.words().ilog2() - per_entry
    }

    /// Whether the cache has room for all slices of the disk.
    pub fn cached_whole(&self) -> bool {
        let clusters = self.size().div_ceil(self.layout.cluster_size());
        clusters.div_ceil(1 << self.slice_bits()) <= self.cache.capacity() as u64
    }

    /// The slice of a guest cluster, and the place of its entry in it.
    pub fn place(&self, cluster: u64) -> (u64, usize) {
        let bits = self.slice_bits();
        let entry = (cluster & ((1 << bits) - 1)) as usize;
        (cluster >> bits, if self.layout.extended { entry * 2 } else { entry })
    }

    /// Number of the L2 table of a guest cluster.
    pub fn table_of(&self, cluster: u64) -> usize {
        (cluster >> self.layout.l2_bits()) as usize
    }

    /// What the image says of a guest cluster. Takes no lock.
    #[inline]
    pub fn look(&self, cluster: u64) -> Look {
        let (slice, word) = self.place(cluster);
        match self.cache.get(slice, word, self.layout.extended) {
            Some((raw, bitmap)) => match self.layout.classify(raw, bitmap, cluster << self.layout.cluster_bits) {
                Ok(mapping) => Look::Is(mapping),
                Err(_) => Look::Bad,
            },
            None if self.l1.get(self.table_of(cluster)) & OFFSET_MASK == 0 => Look::NoTable,
            None => Look::Miss,
        }
    }

    /// Where a slice lies on disk.
    ///
    /// # Errors
    /// `EIO` for an L1 entry that the format does not allow.
    pub fn slice_offset(&self, slice: u64) -> io::Result<u64> {
        let first = slice << self.slice_bits();
        let table = self.layout.l1_entry(self.l1.get(self.table_of(first)));
        let table = table.ok().flatten().ok_or_else(|| io::Error::from_raw_os_error(libc::EIO))?;
        let within = first & ((1 << self.layout.l2_bits()) - 1);
        Ok(table.offset + within * self.layout.entry_size())
    }

    /// Bytes of a slice.
    pub fn slice_bytes(&self) -> usize {
        self.cache.words() * 8
    }
}

fn load_l1(storage: &mut Storage, header: &Header, file_len: u64) -> io::Result<Result<L1, FormatError>> {
    let Table { offset, count } = header.l1;
    let layout = header.layout();
    let needed = layout.l1_entries(header.size) as usize;
    let l1 = L1::default();
    // In parts: an image that claims petabytes has a large table, and one copy of it is enough.
    for first in (0..count as usize).step_by(PART) {
        let len = PART.min(count as usize - first) * 8;
        let bytes = side::read(storage, offset + first as u64 * 8, len, file_len)?;
        for (index, entry) in (first..).zip(bytes.chunks_exact(8).map(|b| be64(b, 0))).filter(|(_, e)| *e != 0) {
            match layout.l1_entry(entry) {
                Ok(Some(table)) if index < needed && table.offset >= file_len => {
                    return Ok(FormatError::corrupt(format!("L2 table at {:#x}, past the file's end", table.offset)));
                }
                Err(e) if index < needed => return Ok(Err(e)),
                _ => l1.set(index, entry),
            }
        }
    }
    Ok(Ok(l1))
}

/// The refcounts of an image that is to be written, its tables known.
fn writable_refs(
    storage: &mut Storage,
    header: &Header,
    file_len: u64,
    l1: &L1,
) -> io::Result<Result<Refs, FormatError>> {
    let cluster = header.cluster_size();
    let Table { offset, count } = header.refcount_table;
    let len = (u64::from(count) << header.cluster_bits) as usize;
    let bytes = side::read(storage, offset, len, file_len)?;
    let table: Vec<u64> = bytes.chunks_exact(8).map(|b| be64(b, 0)).collect();
    // Every cluster is there in whole from now on, so that nothing is ever read past the end; what a crash left behind the
    // last one is cut off.
    let whole = mend::end_of_use(storage, header, &table, file_len)?.next_multiple_of(cluster);
    if whole != file_len {
        storage.set_len(whole)?;
    }
    let mut refs = Refs::new(header.width, header.cluster_bits, offset, table, whole, storage.grows());
    let mut tables = vec![
        (0, 1),
        (offset, len as u64),
        (header.l1.offset, u64::from(header.l1.count) * 8),
        (header.snapshots.offset, u64::from(header.snapshots.count) * 40),
    ];
    tables.extend(header.extensions.encryption.map(|c| (c.offset, c.len)));
    for (offset, len) in tables {
        refs.reserved.extend(offset / cluster..(offset + len).div_ceil(cluster));
    }
    for entry in l1.entries(header.l1.count).map(|e| e & OFFSET_MASK).filter(|e| *e != 0) {
        let table = entry >> header.cluster_bits;
        if !refs.reserved.insert(table) {
            return Ok(FormatError::corrupt(format!("two tables share the cluster at {entry:#x}")));
        }
    }
    Ok(Ok(refs))
}

/// The entry of an L1 table for a table of ours.
pub fn l1_raw(offset: u64) -> u64 {
    offset | COPIED
}
