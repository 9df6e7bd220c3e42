// SPDX-License-Identifier: Apache-2.0
//! A naive reader and checker of qcow2, on bytes in memory: the whole image at once, each field looked up anew. It shares
//! nothing with the engine, so that both can't be wrong in the same way. Written for images of a few megabytes.

use std::collections::HashMap;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Turns a compressed cluster into its bytes: what it holds, whether by zstd, how long it becomes.
pub type Inflate<'a> = &'a dyn Fn(&[u8], bool, usize) -> Option<Vec<u8>>;

/// Turns bytes of an encrypted image into those of its disk, given where in the file they lie.
pub type Decrypt<'a> = &'a dyn Fn(u64, &mut [u8]);

/// One qcow2 image.
#[derive(Debug)]
pub struct Layer<'a> {
    bytes: &'a [u8],
    data: Option<&'a [u8]>,
    /// Its version, 2 or 3.
    pub version: u32,
    /// Bytes of a cluster.
    pub cluster: u64,
    /// Bytes of the disk.
    pub size: u64,
    /// Incompatible features.
    pub incompatible: u64,
    /// The active L1 table: offset, entries.
    l1: (u64, u64),
    /// The refcount table: offset, clusters.
    table: (u64, u64),
    snapshots: Vec<Snapshot>,
    snapshots_at: (u64, u64),
    refcount_bits: u64,
    zstd: bool,
    /// Name of the backing file.
    pub backing: Option<String>,
    bitmaps: Option<(u64, u64)>,
    luks: Option<(u64, u64)>,
}

/// A snapshot in an image.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Its name.
    pub name: String,
    /// Bytes of the disk then; 0 if it does not say.
    pub size: u64,
    l1_at: u64,
    l1_len: u64,
}

/// What a check found.
#[derive(Clone, Debug, Default)]
pub struct Check {
    /// What endangers data.
    pub corruptions: Vec<String>,
    /// Clusters that nothing uses.
    pub leaks: u64,
}

/// What an L2 entry says of one subcluster (or cluster).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Missing,
    Zero,
    At(u64),
    Compressed(u64),
}

impl<'a> Layer<'a> {
    /// Reads the header.
    ///
    /// # Errors
    /// Why it is no image.
    pub fn open(bytes: &'a [u8], data: Option<&'a [u8]>) -> Result<Self, String> {
        let word = |at: usize| be(bytes, at as u64, 4) as u32;
        let long = |at: usize| be(bytes, at as u64, 8);
        if word(0) != 0x5146_49fb {
            return Err("no magic".into());
        }
        let version = word(4);
        let bits = word(20);
        if !(2..=3).contains(&version) || !(9..=21).contains(&bits) {
            return Err(format!("version {version}, cluster bits {bits}"));
        }
        let v3 = version == 3;
        let header_len = if v3 { word(100) as usize } else { 72 };
        let (name_at, name_len) = (long(8) as usize, word(16) as usize);
        let name = bytes.get(name_at..name_at + name_len).ok_or("backing name past the end")?;
        let mut layer = Self {
            bytes,
            data,
            version,
            cluster: 1 << bits,
            size: long(24),
            incompatible: if v3 { long(72) } else { 0 },
            l1: (long(40), u64::from(word(36))),
            table: (long(48), u64::from(word(56))),
            snapshots: Vec::new(),
            snapshots_at: (long(64), 0),
            refcount_bits: if v3 { 1 << word(96).min(6) } else { 16 },
            zstd: v3 && header_len > 104 && bytes.get(104) == Some(&1),
            backing: (name_at != 0).then(|| String::from_utf8_lossy(name).into_owned()),
            bitmaps: None,
            luks: None,
        };
        layer.extensions(header_len as u64)?;
        layer.read_snapshots(u64::from(word(60)))?;
        Ok(layer)
    }

    fn extensions(&mut self, mut at: u64) -> Result<(), String> {
        loop {
            let (kind, len) = (be(self.bytes, at, 4), be(self.bytes, at + 4, 4));
            match kind {
                0 => return Ok(()),
                0x2385_2875 => self.bitmaps = Some((be(self.bytes, at + 24, 8), be(self.bytes, at + 16, 8))),
                0x0537_be77 => self.luks = Some((be(self.bytes, at + 8, 8), be(self.bytes, at + 16, 8))),
                _ => {}
            }
            at += 8 + len.next_multiple_of(8);
            if at > self.cluster {
                return Err("header extensions past the first cluster".into());
            }
        }
    }

    fn read_snapshots(&mut self, count: u64) -> Result<(), String> {
        let mut at = self.snapshots_at.0;
        for _ in 0..count {
            let field = |o: u64, n: u64| be(self.bytes, at + o, n);
            let (id_len, name_len, extra) = (field(12, 2), field(14, 2), field(36, 4));
            let name_at = (at + 40 + extra + id_len) as usize;
            let name = self.bytes.get(name_at..name_at + name_len as usize).ok_or("snapshot table past the end")?;
            let name = String::from_utf8_lossy(name).into_owned();
            let size = if extra >= 16 { field(48, 8) } else { 0 };
            self.snapshots.push(Snapshot { name, size, l1_at: field(0, 8), l1_len: field(8, 4) });
            at += (40 + extra + id_len + name_len).next_multiple_of(8);
        }
        self.snapshots_at.1 = at - self.snapshots_at.0;
        Ok(())
    }

    /// The snapshots, in the order of their table.
    #[must_use]
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots
    }

    /// Whether refcounts may be behind (lazy refcounts, not closed).
    #[must_use]
    pub fn dirty(&self) -> bool {
        self.incompatible & 1 != 0
    }

    fn extended(&self) -> bool {
        self.incompatible & 16 != 0
    }

    fn external(&self) -> bool {
        self.incompatible & 4 != 0
    }

    fn entry_len(&self) -> u64 {
        if self.extended() { 16 } else { 8 }
    }

    fn l2_entries(&self) -> u64 {
        self.cluster / self.entry_len()
    }

    /// The L2 entry of a guest cluster: both words.
    fn entry(&self, l1_at: u64, l1_len: u64, guest: u64) -> (u64, u64) {
        let (l1, l2) = (guest / self.l2_entries(), guest % self.l2_entries());
        if l1 >= l1_len {
            return (0, 0);
        }
        let table = be(self.bytes, l1_at + 8 * l1, 8) & OFFSET;
        if table == 0 {
            return (0, 0);
        }
        let at = table + l2 * self.entry_len();
        (be(self.bytes, at, 8), if self.extended() { be(self.bytes, at + 8, 8) } else { 0 })
    }

    fn part(&self, entry: (u64, u64), sub: u64) -> Part {
        let (word, bitmap) = entry;
        if word & COMPRESSED != 0 {
            return Part::Compressed(word);
        }
        let host = word & OFFSET;
        if self.extended() {
            return match (bitmap >> sub & 1, bitmap >> (32 + sub) & 1) {
                (_, 1) => Part::Zero,
                (1, _) => Part::At(host + sub * self.cluster / 32),
                _ => Part::Missing,
            };
        }
        match word {
            _ if self.version == 3 && word & 1 != 0 => Part::Zero,
            // In an external data file, cluster 0 is as good as any other: COPIED says that there is one.
            _ if host == 0 && !(self.external() && word & COPIED != 0) => Part::Missing,
            _ => Part::At(host),
        }
    }

    /// Sectors that a compressed entry names: first byte and length.
    fn compressed(&self, word: u64) -> (u64, u64) {
        let shift = 62 - (self.cluster.trailing_zeros() - 8);
        let offset = word & ((1 << shift) - 1);
        let sectors = (word & !(COPIED | COMPRESSED)) >> shift;
        (offset, (sectors + 1) * 512 - offset % 512)
    }

    /// The whole content of the disk, over `backing` (what is past its end is zero).
    ///
    /// # Errors
    /// A compressed cluster that can't be read.
    pub fn read(&self, backing: &[u8], inflate: Inflate<'_>) -> Result<Vec<u8>, String> {
        self.read_at(self.l1, self.size, backing, inflate, None)
    }

    /// As [`Layer::read`], of an encrypted image.
    ///
    /// # Errors
    /// As there.
    pub fn read_encrypted(&self, backing: &[u8], decrypt: Decrypt<'_>) -> Result<Vec<u8>, String> {
        self.read_at(self.l1, self.size, backing, &no_inflate, Some(decrypt))
    }

    /// The LUKS header of an encrypted image: what its key is kept in.
    #[must_use]
    pub fn luks_header(&self) -> Option<&[u8]> {
        let (at, len) = self.luks?;
        self.bytes.get(at as usize..(at + len) as usize)
    }

    /// The whole content of the disk at a snapshot.
    ///
    /// # Errors
    /// A compressed cluster that can't be read.
    pub fn read_snapshot(&self, of: &Snapshot, backing: &[u8], inflate: Inflate<'_>) -> Result<Vec<u8>, String> {
        let size = if of.size == 0 { self.size } else { of.size };
        self.read_at((of.l1_at, of.l1_len), size, backing, inflate, None)
    }

    fn read_at(
        &self,
        l1: (u64, u64),
        size: u64,
        backing: &[u8],
        inflate: Inflate<'_>,
        decrypt: Option<Decrypt<'_>>,
    ) -> Result<Vec<u8>, String> {
        let parts = if self.extended() { 32 } else { 1 };
        let step = self.cluster / parts;
        let mut out = vec![0; size as usize];
        let file = self.data.filter(|_| self.external()).unwrap_or(self.bytes);
        for guest in 0..size.div_ceil(self.cluster) {
            let entry = self.entry(l1.0, l1.1, guest);
            for sub in 0..parts {
                let at = guest * self.cluster + sub * step;
                let Some(room) = out.get_mut(at as usize..) else { break };
                let room_len = room.len().min(step as usize);
                let room = &mut room[..room_len];
                match self.part(entry, sub) {
                    Part::Zero => {}
                    Part::Missing => copy(room, backing, at),
                    Part::At(host) => {
                        copy(room, file, host);
                        if let Some(decrypt) = decrypt {
                            decrypt(host, room);
                        }
                    }
                    Part::Compressed(word) => {
                        let (offset, len) = self.compressed(word);
                        let end = (offset + len).min(self.bytes.len() as u64);
                        let packed = self.bytes.get(offset as usize..end as usize).unwrap_or_default();
                        let whole = inflate(packed, self.zstd, self.cluster as usize)
                            .ok_or_else(|| format!("guest cluster {guest} can't be inflated"))?;
                        copy(room, &whole, at % self.cluster);
                    }
                }
            }
        }
        Ok(out)
    }

    /// The refcount that the image keeps of a host cluster.
    fn refcount(&self, host: u64) -> u64 {
        let per_block = self.cluster * 8 / self.refcount_bits;
        let (block, index) = (host / per_block, host % per_block);
        if block >= self.table.1 * self.cluster / 8 {
            return 0;
        }
        let at = be(self.bytes, self.table.0 + 8 * block, 8) & !511;
        if at == 0 {
            return 0;
        }
        if self.refcount_bits >= 8 {
            let width = self.refcount_bits / 8;
            return be(self.bytes, at + index * width, width);
        }
        let bit = index * self.refcount_bits;
        be(self.bytes, at + bit / 8, 1) >> (bit % 8) & ((1 << self.refcount_bits) - 1)
    }

    /// Whether every reference is counted, and nothing else is.
    #[must_use]
    pub fn check(&self) -> Check {
        let mut uses = Uses { cluster: self.cluster, end: self.bytes.len() as u64, ..Uses::default() };
        uses.add("header", 0, self.cluster);
        uses.add("refcount table", self.table.0, self.table.1 * self.cluster);
        for i in 0..self.table.1 * self.cluster / 8 {
            let block = be(self.bytes, self.table.0 + 8 * i, 8) & !511;
            if block != 0 {
                uses.add("refcount block", block, self.cluster);
            }
        }
        uses.add("snapshot table", self.snapshots_at.0, self.snapshots_at.1);
        if let Some((at, len)) = self.luks {
            uses.add("LUKS header", at, len);
        }
        self.count_bitmaps(&mut uses);
        self.count_tree(&mut uses, self.l1.0, self.l1.1);
        for s in &self.snapshots {
            self.count_tree(&mut uses, s.l1_at, s.l1_len);
        }
        let mut check = Check { corruptions: std::mem::take(&mut uses.bad), leaks: 0 };
        let end = (self.bytes.len() as u64).div_ceil(self.cluster);
        let last = uses.clusters.keys().max().map_or(0, |c| c + 1).max(end);
        for host in 0..last.min(1 << 20) {
            let (have, want) = (self.refcount(host), uses.clusters.get(&host).map_or(0, |u| u.0));
            if have < want && !self.dirty() {
                let what = uses.clusters.get(&host).map_or("", |u| u.1);
                check.corruptions.push(format!("cluster {host} ({what}) is used {want} times, counted {have}"));
            } else if have > want {
                check.leaks += 1;
            }
        }
        self.check_copied(&uses, &mut check);
        check
    }

    /// COPIED in the active tables exactly where the refcount is one; clusters used twice only where snapshots share them.
    fn check_copied(&self, uses: &Uses, check: &mut Check) {
        let wrong = |copied: bool, host: u64| !self.dirty() && copied != (self.refcount(host / self.cluster) == 1);
        for l1 in 0..self.l1.1 {
            let word = be(self.bytes, self.l1.0 + 8 * l1, 8);
            let table = word & OFFSET;
            if table == 0 {
                continue;
            }
            if wrong(word & COPIED != 0, table) {
                check.corruptions.push(format!("COPIED of L1 entry {l1} ({word:#x}) is wrong"));
            }
            for l2 in 0..self.l2_entries() {
                let word = be(self.bytes, table + l2 * self.entry_len(), 8);
                let host = word & OFFSET;
                if word & COMPRESSED != 0 {
                    if word & COPIED != 0 {
                        check.corruptions.push(format!("L2 entry {l1}/{l2}: compressed and COPIED"));
                    }
                } else if host != 0 && !self.external() && wrong(word & COPIED != 0, host) {
                    check.corruptions.push(format!("COPIED of L2 entry {l1}/{l2} ({word:#x}) is wrong"));
                }
            }
        }
        for (host, (count, what, plain)) in &uses.clusters {
            if *count > 1 && *plain && (self.snapshots.is_empty() || *what == "metadata") {
                check.corruptions.push(format!("cluster {host} is used {count} times, last as {what}"));
            }
        }
    }

    fn count_tree(&self, uses: &mut Uses, l1_at: u64, l1_len: u64) {
        uses.add("L1 table", l1_at, 8 * l1_len);
        for l1 in 0..l1_len {
            let table = be(self.bytes, l1_at + 8 * l1, 8) & OFFSET;
            if table == 0 {
                continue;
            }
            uses.add("L2 table", table, self.cluster);
            for l2 in 0..self.l2_entries() {
                let word = be(self.bytes, table + l2 * self.entry_len(), 8);
                if word & COMPRESSED != 0 {
                    let (at, len) = self.compressed(word);
                    uses.add("compressed data", at, len);
                } else if word & OFFSET != 0 && !self.external() {
                    uses.add("data", word & OFFSET, self.cluster);
                }
                let bitmap = if self.extended() { be(self.bytes, table + l2 * 16 + 8, 8) } else { 0 };
                if bitmap & (bitmap >> 32) & 0xffff_ffff != 0 {
                    uses.bad.push(format!("L2 entry {l1}/{l2}: subclusters both zero and allocated ({bitmap:#x})"));
                }
                if bitmap & 0xffff_ffff != 0 && word & (OFFSET | COPIED) == 0 {
                    uses.bad.push(format!("L2 entry {l1}/{l2}: subclusters of no cluster ({bitmap:#x})"));
                }
            }
        }
    }

    fn count_bitmaps(&self, uses: &mut Uses) {
        let Some((mut at, len)) = self.bitmaps else { return };
        let end = at + len;
        uses.add("bitmap directory", at, len);
        while at + 24 <= end {
            let (table, entries) = (be(self.bytes, at, 8), be(self.bytes, at + 8, 4));
            let (name_len, extra) = (be(self.bytes, at + 18, 2), be(self.bytes, at + 20, 4));
            uses.add("bitmap table", table, 8 * entries);
            for i in 0..entries {
                let data = be(self.bytes, table + 8 * i, 8) & OFFSET;
                if data != 0 {
                    uses.add("bitmap data", data, self.cluster);
                }
            }
            at += (24 + extra + name_len).next_multiple_of(8);
        }
    }
}

/// How often each host cluster is used, what for, and whether by something that must be alone in it.
#[derive(Debug, Default)]
struct Uses {
    cluster: u64,
    end: u64,
    clusters: HashMap<u64, (u64, &'static str, bool)>,
    bad: Vec<String>,
}

impl Uses {
    fn add(&mut self, what: &'static str, at: u64, len: u64) {
        if len == 0 {
            return;
        }
        // QEMU's rule: what is used may reach past the end of the file by less than a cluster.
        if (at + len).saturating_sub(self.end) >= self.cluster {
            self.bad.push(format!("{what} at {at:#x}, {len} bytes, lies past the end of the file ({:#x})", self.end));
        }
        let packed = what == "compressed data";
        if !packed && !at.is_multiple_of(self.cluster) {
            self.bad.push(format!("{what} at {at:#x} is not aligned"));
        }
        let shared = packed || what == "data" || what == "L2 table";
        for host in at / self.cluster..(at + len).div_ceil(self.cluster).min(at / self.cluster + (1 << 20)) {
            let entry = self.clusters.entry(host).or_insert((0, what, false));
            if entry.0 > 0 && entry.1 != what {
                self.bad.push(format!("cluster {host} is both {} and {what}", entry.1));
            }
            entry.0 += 1;
            entry.1 = if shared { what } else { "metadata" };
            entry.2 |= !packed;
            if !shared && entry.0 > 1 {
                self.bad.push(format!("cluster {host} ({what}) is used twice"));
            }
            if !shared {
                entry.1 = what;
            }
        }
    }
}

/// `n` bytes at `at` as a big-endian number; zero past the end.
fn be(bytes: &[u8], at: u64, n: u64) -> u64 {
    let at = usize::try_from(at).unwrap_or(usize::MAX);
    bytes.get(at..at.saturating_add(n as usize)).map_or(0, |b| b.iter().fold(0, |v, b| v << 8 | u64::from(*b)))
}

/// Bytes from `at` on; zero past the end.
fn copy(to: &mut [u8], from: &[u8], at: u64) {
    let from = usize::try_from(at).ok().and_then(|at| from.get(at..)).unwrap_or_default();
    let len = to.len().min(from.len());
    to[..len].copy_from_slice(&from[..len]);
    to[len..].fill(0);
}

/// For images without compressed clusters.
#[must_use]
pub fn no_inflate(_: &[u8], _: bool, _: usize) -> Option<Vec<u8>> {
    None
}
