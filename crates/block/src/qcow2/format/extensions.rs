// SPDX-License-Identifier: Apache-2.0
//! The header extensions: what follows the header's fixed fields, each with its type and length. Called by `header`.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use super::header::{MAX_BITMAP_DIRECTORY, MAX_BITMAPS, autoclear};
use super::{FormatError, be32, be64};

/// The mark of the end.
pub(super) const EXT_END: u32 = 0;
const EXT_BACKING_FORMAT: u32 = 0xe279_2aca;
const EXT_FEATURE_NAMES: u32 = 0x6803_f857;
const EXT_BITMAPS: u32 = 0x2385_2875;
const EXT_ENCRYPTION: u32 = 0x0537_be77;
const EXT_DATA_FILE: u32 = 0x4441_5441;

/// The names written into the feature name table: kind, bit, name.
pub(super) const FEATURE_NAMES: [(u8, u8, &str); 8] = [
    (0, 0, "dirty bit"),
    (0, 1, "corrupt bit"),
    (0, 2, "external data file"),
    (0, 3, "compression type"),
    (0, 4, "extended L2 entries"),
    (1, 0, "lazy refcounts"),
    (2, 0, "bitmaps"),
    (2, 1, "raw external data"),
];

/// The bitmaps extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsRef {
    /// How many bitmaps there are.
    pub count: u32,
    /// Bytes of the directory.
    pub size: u64,
    /// Its offset in the file.
    pub offset: u64,
}

/// Where the LUKS header is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CryptRef {
    /// Offset in the file, at a cluster's start.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The header extensions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extensions {
    /// Format of the backing file.
    pub backing_format: Option<String>,
    /// Name of the external data file.
    pub data_file: Option<OsString>,
    /// The bitmaps, if the autoclear bit vouches for them.
    pub bitmaps: Option<BitmapsRef>,
    /// The bitmaps extension is there but the autoclear bit is not: some writer didn't keep them. Kept out of what is written.
    pub stale_bitmaps: bool,
    /// The LUKS header.
    pub encryption: Option<CryptRef>,
    /// Feature names: kind (0 incompatible, 1 compatible, 2 autoclear), bit, name.
    pub feature_names: Vec<(u8, u8, String)>,
    /// Unknown ones, kept as they are: type and data.
    pub other: Vec<(u32, Vec<u8>)>,
}

impl Extensions {
    /// Reads all that are in `area`, of an image with these autoclear `features`.
    ///
    /// # Errors
    /// Any that is damaged.
    pub(super) fn read(&mut self, mut area: &[u8], features: u64) -> Result<(), FormatError> {
        while area.len() >= 8 {
            let (kind, len) = (be32(area, 0), be32(area, 4) as usize);
            if kind == EXT_END {
                break;
            }
            let Some(data) = area.get(8..).and_then(|rest| rest.get(..len)) else {
                return FormatError::corrupt(format!("header extension {kind:#010x} of {len} bytes is cut off"));
            };
            self.read_one(kind, data, features)?;
            area = area.get(8 + len.next_multiple_of(8)..).unwrap_or_default();
        }
        Ok(())
    }

    fn read_one(&mut self, kind: u32, data: &[u8], features: u64) -> Result<(), FormatError> {
        let exact = |len: usize| match data.len() == len {
            true => Ok(()),
            false => FormatError::corrupt(format!("header extension {kind:#010x} has {} bytes, not {len}", data.len())),
        };
        match kind {
            EXT_BACKING_FORMAT => {
                let name = std::str::from_utf8(data).ok().filter(|n| n.len() < 16 && !n.contains('\0'));
                let Some(name) = name else {
                    return FormatError::corrupt("the backing file's format has no proper name");
                };
                self.backing_format = (!name.is_empty()).then(|| name.to_owned());
            }
            EXT_DATA_FILE => self.data_file = Some(file_name(data, "data file")?),
            EXT_FEATURE_NAMES => {
                self.feature_names = data.chunks_exact(48).map(|e| (e[0], e[1], feature_name(&e[2..]))).collect();
            }
            EXT_ENCRYPTION => {
                exact(16)?;
                self.encryption = Some(CryptRef { offset: be64(data, 0), len: be64(data, 8) });
            }
            EXT_BITMAPS if features & autoclear::BITMAPS == 0 => self.stale_bitmaps = true,
            EXT_BITMAPS => {
                exact(24)?;
                let found = BitmapsRef { count: be32(data, 0), size: be64(data, 8), offset: be64(data, 16) };
                if !(1..=MAX_BITMAPS).contains(&found.count) || be32(data, 4) != 0 {
                    return FormatError::corrupt(format!("a bitmaps extension with {} bitmaps", found.count));
                }
                // The least that a directory entry takes is 24 bytes and a name of one, padded to 8.
                if !(u64::from(found.count) * 32..=MAX_BITMAP_DIRECTORY).contains(&found.size) {
                    return FormatError::corrupt(format!("a bitmap directory of {} bytes", found.size));
                }
                self.bitmaps = Some(found);
            }
            _ => self.other.push((kind, data.to_vec())),
        }
        Ok(())
    }

    /// Appends them to a header, the table of feature names if asked for, and the end mark.
    pub(super) fn write(&self, out: &mut Vec<u8>, with_names: bool) {
        let mut put = |kind: u32, data: &[u8]| {
            out.extend(kind.to_be_bytes());
            out.extend((data.len() as u32).to_be_bytes());
            out.extend(data);
            out.resize(out.len().next_multiple_of(8), 0);
        };
        if let Some(name) = &self.backing_format {
            put(EXT_BACKING_FORMAT, name.as_bytes());
        }
        if let Some(name) = &self.data_file {
            put(EXT_DATA_FILE, name.as_bytes());
        }
        if let Some(at) = &self.encryption {
            put(EXT_ENCRYPTION, &[at.offset.to_be_bytes(), at.len.to_be_bytes()].concat());
        }
        if with_names {
            let table: Vec<u8> =
                FEATURE_NAMES.iter().flat_map(|(kind, bit, name)| feature_entry(*kind, *bit, name)).collect();
            put(EXT_FEATURE_NAMES, &table);
        }
        if let Some(b) = &self.bitmaps {
            let count = u64::from(b.count) << 32;
            put(EXT_BITMAPS, &[count.to_be_bytes(), b.size.to_be_bytes(), b.offset.to_be_bytes()].concat());
        }
        for (kind, data) in &self.other {
            put(*kind, data);
        }
        put(EXT_END, &[]);
    }
}

/// A name of a file, which is neither empty nor has a zero byte; `what` says whose.
pub(super) fn file_name(bytes: &[u8], what: &str) -> Result<OsString, FormatError> {
    if bytes.is_empty() || bytes.contains(&0) {
        return FormatError::corrupt(format!("its {what} has no proper name"));
    }
    Ok(OsString::from_vec(bytes.to_vec()))
}

/// A name from the feature name table, fit to be printed.
fn feature_name(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).chars().filter(|c| !c.is_control()).collect()
}

fn feature_entry(kind: u8, bit: u8, name: &str) -> [u8; 48] {
    let mut entry = [0; 48];
    entry[..2].copy_from_slice(&[kind, bit]);
    entry[2..2 + name.len()].copy_from_slice(name.as_bytes());
    entry
}
