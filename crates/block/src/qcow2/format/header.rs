// SPDX-License-Identifier: Apache-2.0
//! The header of an image: read with distrust, written as QEMU writes them. The engine reads it once at
//! open and patches single fields afterwards (the `patch_*` functions: a few bytes within the first sector, which a device
//! writes whole or not at all); the offline editor rewrites it.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;

use super::entry::Layout;
use super::extensions::{EXT_END, file_name};
use super::refcount::{MAX_TABLE_BYTES, Width};
use super::{FormatError, be16, be32, be64};

pub use super::extensions::{BitmapsRef, CryptRef, Extensions};

/// The first four bytes: `QFI\xfb`.
pub const MAGIC: u32 = 0x5146_49fb;
/// Smallest and largest log2 of a cluster's bytes.
pub const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Smallest log2 of a cluster's bytes with extended L2 entries.
pub const EXTENDED_CLUSTER_BITS: u32 = 14;
/// The most bytes that an L1 table may have (QEMU's limit).
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// The most snapshots.
pub const MAX_SNAPSHOTS: u32 = 65_536;
/// The longest backing file name in bytes.
pub const MAX_BACKING_NAME: usize = 1023;
/// The most bitmaps.
pub const MAX_BITMAPS: u32 = 65_535;
/// The most bytes of a LUKS header with its key slots.
pub const MAX_LUKS_HEADER: u64 = 32 << 20;
/// The most bytes of a bitmap directory.
pub const MAX_BITMAP_DIRECTORY: u64 = 65_535 * (24 + 1023);
/// Bytes of a version 2 header.
const V2_LENGTH: u32 = 72;
/// Least bytes of a version 3 header.
const V3_LENGTH: u32 = 104;
/// Bytes of a version 3 header as written here.
const OUR_LENGTH: u32 = 112;

/// Incompatible feature bits.
pub mod incompatible {
    /// Refcounts may be stale (lazy refcounts, not closed cleanly).
    pub const DIRTY: u64 = 1;
    /// Known to be damaged: read-only until repaired.
    pub const CORRUPT: u64 = 1 << 1;
    /// Guest data is in an external file.
    pub const DATA_FILE: u64 = 1 << 2;
    /// The compression type field says something else than deflate.
    pub const COMPRESSION: u64 = 1 << 3;
    /// Extended L2 entries.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// All that are known.
    pub const KNOWN: u64 = 0x1f;
}

/// Compatible feature bits.
pub mod compatible {
    /// Refcount updates may be postponed while the dirty bit is set.
    pub const LAZY_REFCOUNTS: u64 = 1;
}

/// Autoclear feature bits.
pub mod autoclear {
    /// The bitmaps extension is consistent.
    pub const BITMAPS: u64 = 1;
    /// The external data file is a raw image by itself.
    pub const RAW_DATA_FILE: u64 = 1 << 1;
    /// All that are known.
    pub const KNOWN: u64 = 3;
}

/// How guest data is encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crypt {
    /// Not at all.
    None,
    /// AES-CBC with the passphrase itself as key: read only, for rescue.
    Aes,
    /// As the LUKS header in the image says.
    Luks,
}

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate, which QEMU calls zlib.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// A table as the header names it: where it is and how many it has of what it counts (L1 entries; clusters of the refcount
/// table; snapshots).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Table {
    /// Offset in the file, at a cluster's start.
    pub offset: u64,
    /// Entries, clusters or snapshots.
    pub count: u32,
}

/// The three bit masks of version 3; all zero in version 2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Who doesn't know one of these must not open the image.
    pub incompatible: u64,
    /// May be ignored.
    pub compatible: u64,
    /// Who doesn't know one of these must clear it before writing.
    pub autoclear: u64,
}

/// The header of an image. What [`Header::parse`] returns is within the format's limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Log2 of the cluster size, see [`CLUSTER_BITS`].
    pub cluster_bits: u32,
    /// Bytes of the disk.
    pub size: u64,
    /// Encryption.
    pub crypt: Crypt,
    /// The active L1 table; counts entries.
    pub l1: Table,
    /// The refcount table; counts clusters.
    pub refcount_table: Table,
    /// The snapshot table; counts snapshots.
    pub snapshots: Table,
    /// Feature bits.
    pub features: Features,
    /// Width of refcounts.
    pub width: Width,
    /// Compression of compressed clusters.
    pub compression: Compression,
    /// Header fields beyond those known, kept as they are.
    pub unknown_fields: Vec<u8>,
    /// Name of the backing file, as written in the image.
    pub backing: Option<OsString>,
    /// Extensions.
    pub extensions: Extensions,
}

impl Header {
    /// How many bytes from the start of the file [`Header::parse`] needs (one cluster; a shorter file is taken whole), from
    /// at least the first 24 bytes of it.
    ///
    /// # Errors
    /// Not qcow2 or an impossible cluster size.
    pub fn needs(start: &[u8]) -> Result<usize, FormatError> {
        if start.len() < 24 || be32(start, 0) != MAGIC {
            return Err(FormatError::NotQcow2);
        }
        let version = be32(start, 4);
        if !(2..=3).contains(&version) {
            return FormatError::unsupported(format!("qcow2 version {version}; versions 2 and 3 are known"));
        }
        let bits = be32(start, 20);
        if !CLUSTER_BITS.contains(&bits) {
            return FormatError::unsupported(format!("clusters of 2^{bits} bytes; 512 bytes to 2 MiB are possible"));
        }
        Ok(1 << bits)
    }

    /// Reads the header from the first cluster of a file (or all of it, if it is shorter).
    ///
    /// # Errors
    /// Anything out of the format's limits, unknown incompatible features by their names. Whether tables lie in the file and
    /// apart from each other is [`Header::check_layout`]'s business, so that a damaged image can still be examined.
    pub fn parse(bytes: &[u8]) -> Result<Header, FormatError> {
        let cluster = Header::needs(bytes)?;
        let bytes = bytes.get(..cluster).unwrap_or(bytes);
        let version = be32(bytes, 4);
        let length = if version == 2 { V2_LENGTH } else { be32(bytes, 100) };
        let least = if version == 2 { V2_LENGTH } else { V3_LENGTH };
        if bytes.len() < least as usize {
            return FormatError::corrupt(format!("the file ends within the header, after {} bytes", bytes.len()));
        }
        if length < least || length as usize > bytes.len() || length % 8 != 0 {
            return FormatError::corrupt(format!("a header of {length} bytes, which does not fit its cluster"));
        }
        let mut header = Header {
            version,
            cluster_bits: be32(bytes, 20),
            size: be64(bytes, 24),
            crypt: crypt(be32(bytes, 32))?,
            l1: Table { count: be32(bytes, 36), offset: be64(bytes, 40) },
            refcount_table: Table { offset: be64(bytes, 48), count: be32(bytes, 56) },
            snapshots: Table { count: be32(bytes, 60), offset: be64(bytes, 64) },
            features: Features::default(),
            width: Width::DEFAULT,
            compression: Compression::Zlib,
            unknown_fields: Vec::new(),
            backing: None,
            extensions: Extensions::default(),
        };
        if version >= 3 {
            header.features =
                Features { incompatible: be64(bytes, 72), compatible: be64(bytes, 80), autoclear: be64(bytes, 88) };
        }
        let (name, end) = backing_name(bytes, length as usize)?;
        header.backing = name;
        header.extensions.read(&bytes[length as usize..end], header.features.autoclear)?;
        header.refuse_unknown()?;
        if version >= 3 {
            header.width = Width::from_order(be32(bytes, 96))?;
            header.compression = header.read_compression(if length > V3_LENGTH { bytes[104] } else { 0 })?;
            header.unknown_fields = bytes[OUR_LENGTH.min(length) as usize..length as usize].to_vec();
        }
        header.check_limits()?;
        Ok(header)
    }

    fn read_compression(&self, kind: u8) -> Result<Compression, FormatError> {
        let said = self.has(incompatible::COMPRESSION);
        match (kind, said) {
            (0, false) => Ok(Compression::Zlib),
            (1, true) => Ok(Compression::Zstd),
            (2.., true) => {
                FormatError::unsupported(format!("compression type {kind}; zlib (0) and zstd (1) are known"))
            }
            _ => {
                FormatError::corrupt(format!("compression type {kind} does not agree with the compression feature bit"))
            }
        }
    }

    fn refuse_unknown(&self) -> Result<(), FormatError> {
        let unknown = self.features.incompatible & !incompatible::KNOWN;
        if unknown == 0 {
            return Ok(());
        }
        let mut names = String::new();
        for bit in (0..64).filter(|b| unknown >> b & 1 != 0) {
            let name = self.extensions.feature_names.iter().find(|(kind, b, _)| (*kind, *b) == (0, bit));
            let separator = if names.is_empty() { "" } else { ", " };
            let _ = match name {
                Some((_, _, name)) => write!(names, "{separator}{name:?} (bit {bit})"),
                None => write!(names, "{separator}unnamed (bit {bit})"),
            };
        }
        FormatError::unsupported(format!("it needs features unknown to this version: {names}"))
    }

    /// Limits that concern the header alone.
    fn check_limits(&self) -> Result<(), FormatError> {
        let cluster = self.cluster_size();
        if self.has(incompatible::EXTENDED_L2) && self.cluster_bits < EXTENDED_CLUSTER_BITS {
            return FormatError::corrupt(format!(
                "extended L2 entries in clusters of {cluster} bytes, at least 16384 are needed"
            ));
        }
        if self.size > i64::MAX as u64 {
            return FormatError::unsupported(format!("a disk of {} bytes", self.size));
        }
        let l1_bytes = u64::from(self.l1.count) * 8;
        if l1_bytes > MAX_L1_BYTES {
            return FormatError::unsupported(format!("an L1 table of {l1_bytes} bytes; the limit is 32 MiB"));
        }
        let needed = self.layout().l1_entries(self.size);
        if needed > u64::from(self.l1.count) {
            return FormatError::corrupt(format!(
                "its L1 table has {} entries, its {} bytes need {needed}",
                self.l1.count, self.size
            ));
        }
        let table_bytes = u64::from(self.refcount_table.count) << self.cluster_bits;
        if table_bytes > MAX_TABLE_BYTES {
            return FormatError::unsupported(format!("a refcount table of {table_bytes} bytes; the limit is 8 MiB"));
        }
        if self.snapshots.count > MAX_SNAPSHOTS {
            return FormatError::unsupported(format!(
                "{} snapshots; the limit is {MAX_SNAPSHOTS}",
                self.snapshots.count
            ));
        }
        for (what, offset, bytes) in self.tables() {
            if offset % cluster != 0 {
                return FormatError::corrupt(format!("the {what} at {offset:#x}, not at a cluster's start"));
            }
            if offset.checked_add(bytes).is_none_or(|end| end > i64::MAX as u64) {
                return FormatError::corrupt(format!("the {what} at {offset:#x}, past any file's end"));
            }
        }
        match (self.crypt, self.extensions.encryption) {
            (Crypt::Luks, None) => return FormatError::corrupt("encrypted by LUKS, but without a LUKS header"),
            (Crypt::Luks, Some(at)) if at.len > MAX_LUKS_HEADER => {
                return FormatError::unsupported(format!("a LUKS header of {} bytes", at.len));
            }
            (Crypt::None | Crypt::Aes, Some(_)) => {
                return FormatError::corrupt("a LUKS header, but not encrypted by LUKS");
            }
            _ => {}
        }
        if self.raw_data_file() && self.backing.is_some() {
            return FormatError::corrupt("a raw data file and a backing file, which exclude each other");
        }
        if self.has(incompatible::DATA_FILE) && self.snapshots.count > 0 {
            return FormatError::corrupt("internal snapshots, which an image with a data file can't have");
        }
        Ok(())
    }

    /// The tables that the header names, with their bytes; empty ones left out.
    fn tables(&self) -> impl Iterator<Item = (&'static str, u64, u64)> {
        let bitmaps = self.extensions.bitmaps.map_or((0, 0), |b| (b.offset, b.size));
        let luks = self.extensions.encryption.map_or((0, 0), |c| (c.offset, c.len));
        [
            ("L1 table", self.l1.offset, u64::from(self.l1.count) * 8),
            ("refcount table", self.refcount_table.offset, u64::from(self.refcount_table.count) << self.cluster_bits),
            // 40 bytes is the least that a snapshot takes.
            ("snapshot table", self.snapshots.offset, u64::from(self.snapshots.count) * 40),
            ("bitmap directory", bitmaps.0, bitmaps.1),
            ("LUKS header", luks.0, luks.1),
        ]
        .into_iter()
        .filter(|(_, _, bytes)| *bytes > 0)
    }

    /// Checks that the tables named by the header begin within a file of `file_len` bytes, that none covers the header and
    /// that no two share a cluster. For every opening but that of a check.
    ///
    /// # Errors
    /// What overlaps what.
    pub fn check_layout(&self, file_len: u64) -> Result<(), FormatError> {
        if self.refcount_table.count == 0 {
            return FormatError::corrupt("it has no refcount table");
        }
        let mut tables: Vec<_> = self.tables().collect();
        tables.push(("header", 0, 1));
        tables.sort_by_key(|(_, offset, _)| *offset);
        let mask = self.cluster_size() - 1;
        for pair in tables.windows(2) {
            if let [(a, start, bytes), (b, next, _)] = pair
                && start + ((bytes + mask) & !mask) > *next
            {
                return FormatError::corrupt(format!("the {b} at {next:#x} overlaps the {a} at {start:#x}"));
            }
        }
        if let Some((what, offset, _)) = tables.into_iter().find(|(_, offset, _)| *offset >= file_len) {
            return FormatError::corrupt(format!("the {what} is at {offset:#x}, but the file ends at {file_len:#x}"));
        }
        Ok(())
    }

    /// How many bytes of the first cluster the header in it uses: fields, extensions and the backing file's name.
    pub fn used_bytes(cluster: &[u8]) -> usize {
        let mut at = if be32(cluster, 4) == 2 { V2_LENGTH as usize } else { be32(cluster, 100) as usize };
        let name = be64(cluster, 8) as usize;
        let end = if name == 0 { cluster.len() } else { name };
        while at.saturating_add(8) <= end.min(cluster.len()) {
            let (kind, len) = (be32(cluster, at), be32(cluster, at + 4) as usize);
            at = at.saturating_add(8);
            if kind == EXT_END {
                break;
            }
            at = at.saturating_add(len.next_multiple_of(8));
        }
        let named = if name == 0 { 0 } else { name.saturating_add(be32(cluster, 16) as usize) };
        at.max(named).min(cluster.len())
    }

    /// Like [`Header::to_cluster`], but with all but the backing file's name in the first sector and that name at `place`
    /// (`None`: in the first sector, too), so that it can be put in place of another header without a moment of neither.
    /// Without feature names. Returns where the name is.
    ///
    /// # Errors
    /// It doesn't fit.
    pub fn to_cluster_at(&self, place: Option<u64>) -> Result<(u64, Vec<u8>), FormatError> {
        let mut out = Header { backing: None, ..self.clone() }.serialize(false)?;
        let name = self.backing.as_ref().map_or(&[][..], |n| n.as_bytes());
        let (place, limit) = place.map_or((out.len() as u64, 512), |place| (place, self.cluster_size()));
        let end = place + name.len() as u64;
        if out.len() > 512 || name.len() > MAX_BACKING_NAME || (!name.is_empty() && end > limit) {
            return FormatError::unsupported("names and extensions don't fit into its header; use shorter names");
        }
        out.resize(self.cluster_size() as usize, 0);
        if !name.is_empty() {
            out[place as usize..end as usize].copy_from_slice(name);
            out[8..16].copy_from_slice(&place.to_be_bytes());
            out[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        }
        Ok((place, out))
    }

    /// The first cluster as it is to be in the file: header, extensions, backing file name, zeros to the cluster's end. The
    /// feature name table, a courtesy, is left out where there is no room for it.
    ///
    /// # Errors
    /// Names and extensions don't fit into one cluster.
    pub fn to_cluster(&self) -> Result<Vec<u8>, FormatError> {
        let full = self.serialize(true)?;
        let out = if full.len() as u64 > self.cluster_size() { self.serialize(false)? } else { full };
        let mut out = out;
        if out.len() as u64 > self.cluster_size() {
            return FormatError::unsupported(format!(
                "header, extensions and backing file name take {} bytes, clusters have {}; use larger clusters or shorter names",
                out.len(),
                self.cluster_size()
            ));
        }
        out.resize(self.cluster_size() as usize, 0);
        Ok(out)
    }

    fn serialize(&self, with_names: bool) -> Result<Vec<u8>, FormatError> {
        let mut out = Vec::with_capacity(1024);
        out.extend(MAGIC.to_be_bytes());
        out.extend(self.version.to_be_bytes());
        out.extend([0; 12]); // backing file: filled in below
        out.extend(self.cluster_bits.to_be_bytes());
        out.extend(self.size.to_be_bytes());
        out.extend((self.crypt as u32).to_be_bytes());
        out.extend(self.patch_l1().1);
        out.extend(self.patch_refcount_table().1);
        out.extend(self.patch_snapshots().1);
        if self.version >= 3 {
            out.extend(self.patch_features().1);
            out.extend(self.width.order().to_be_bytes());
            out.extend((OUR_LENGTH + self.unknown_fields.len() as u32).to_be_bytes());
            out.push(self.compression as u8);
            out.extend([0; 7]);
            out.extend(&self.unknown_fields);
        }
        self.extensions.write(&mut out, self.version >= 3 && with_names);
        if let Some(name) = &self.backing {
            if name.is_empty() || name.len() > MAX_BACKING_NAME {
                return FormatError::unsupported(format!(
                    "a backing file name of {} bytes; 1 to 1023 are possible",
                    name.len()
                ));
            }
            let offset = out.len() as u64;
            out.extend(name.as_bytes());
            out[8..16].copy_from_slice(&offset.to_be_bytes());
            out[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
        }
        Ok(out)
    }

    /// The header's bytes that say where the active L1 table is: offset in the file and content.
    pub fn patch_l1(&self) -> (u64, [u8; 12]) {
        let mut out = [0; 12];
        out[..4].copy_from_slice(&self.l1.count.to_be_bytes());
        out[4..].copy_from_slice(&self.l1.offset.to_be_bytes());
        (36, out)
    }

    /// The header's bytes that say where the refcount table is.
    pub fn patch_refcount_table(&self) -> (u64, [u8; 12]) {
        let mut out = [0; 12];
        out[..8].copy_from_slice(&self.refcount_table.offset.to_be_bytes());
        out[8..].copy_from_slice(&self.refcount_table.count.to_be_bytes());
        (48, out)
    }

    /// The header's bytes that say where the snapshots are.
    pub fn patch_snapshots(&self) -> (u64, [u8; 12]) {
        let mut out = [0; 12];
        out[..4].copy_from_slice(&self.snapshots.count.to_be_bytes());
        out[4..].copy_from_slice(&self.snapshots.offset.to_be_bytes());
        (60, out)
    }

    /// The header's bytes with the three feature masks; version 3 only.
    pub fn patch_features(&self) -> (u64, [u8; 24]) {
        let mut out = [0; 24];
        out[..8].copy_from_slice(&self.features.incompatible.to_be_bytes());
        out[8..16].copy_from_slice(&self.features.compatible.to_be_bytes());
        out[16..].copy_from_slice(&self.features.autoclear.to_be_bytes());
        (72, out)
    }

    /// The header's bytes with the disk's size.
    pub fn patch_size(&self) -> (u64, [u8; 8]) {
        (24, self.size.to_be_bytes())
    }

    /// Bytes in a cluster.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// How this image's L1 and L2 entries are read.
    pub fn layout(&self) -> Layout {
        Layout {
            cluster_bits: self.cluster_bits,
            extended: self.has(incompatible::EXTENDED_L2),
            data_file: self.has(incompatible::DATA_FILE),
            zero_flag: self.version >= 3,
        }
    }

    /// Whether the incompatible feature `bit` is set.
    pub fn has(&self, bit: u64) -> bool {
        self.features.incompatible & bit != 0
    }

    /// Refcounts may be stale: they must be rebuilt before anything is written.
    pub fn dirty(&self) -> bool {
        self.has(incompatible::DIRTY)
    }

    /// Marked as damaged: no writing.
    pub fn corrupt(&self) -> bool {
        self.has(incompatible::CORRUPT)
    }

    /// Lazy refcounts are allowed.
    pub fn lazy_refcounts(&self) -> bool {
        self.features.compatible & compatible::LAZY_REFCOUNTS != 0
    }

    /// The external data file must stay a raw image of its own.
    pub fn raw_data_file(&self) -> bool {
        self.has(incompatible::DATA_FILE) && self.features.autoclear & autoclear::RAW_DATA_FILE != 0
    }
}

fn crypt(method: u32) -> Result<Crypt, FormatError> {
    match method {
        0 => Ok(Crypt::None),
        1 => Ok(Crypt::Aes),
        2 => Ok(Crypt::Luks),
        other => FormatError::unsupported(format!("encryption method {other}; AES (1) and LUKS (2) are known")),
    }
}

/// The backing file's name, and where the extensions end: at the name if there is one, else at the cluster's end.
fn backing_name(bytes: &[u8], length: usize) -> Result<(Option<OsString>, usize), FormatError> {
    let (offset, len) = (be64(bytes, 8), be32(bytes, 16) as usize);
    if offset == 0 {
        return Ok((None, bytes.len()));
    }
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let Some(name) = bytes.get(start..).and_then(|rest| rest.get(..len)).filter(|_| start >= length) else {
        return FormatError::corrupt(format!(
            "a backing file name of {len} bytes at {offset:#x}, outside the header's cluster"
        ));
    };
    if len > MAX_BACKING_NAME {
        return FormatError::corrupt(format!("a backing file name of {len} bytes; 1023 at most are possible"));
    }
    let name = if name.is_empty() { None } else { Some(file_name(name, "backing file")?) };
    Ok((name, start))
}

/// Whether the first bytes of a file are those of a qcow2 image. For telling a user what an image seems to be, never for
/// deciding how to open it.
pub fn looks_like_qcow2(start: &[u8]) -> bool {
    be32(start, 0) == MAGIC && be16(start, 4) == 0 && matches!(be16(start, 6), 2 | 3)
}

#[cfg(test)]
#[path = "header_tests.rs"]
mod tests;
