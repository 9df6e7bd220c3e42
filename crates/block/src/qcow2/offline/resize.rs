// SPDX-License-Identifier: Apache-2.0
//! Changes of a header's plain facts: the disk's size, what it stands on, its options.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use super::super::format::be64;
use super::super::format::compress::Decompressor;
use super::super::format::entry::{Mapping, OFFSET_MASK};
use super::super::format::header::{Crypt, MAX_BACKING_NAME, MAX_L1_BYTES, compatible};
use super::edit::Edit;
use super::{Error, Image};

/// What [`Image::amend`] can change; `None` leaves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amend {
    /// Postponed refcount updates.
    pub lazy_refcounts: Option<bool>,
}

impl Image {
    /// Makes the disk `size` bytes long, a multiple of 512. What is cut off is lost (and kept from coming back); what is
    /// added reads as zeroes, for which `backing_size` must say how long the backing file's disk is, if there is one. Where a
    /// cluster that is the backing file's would have to become partly zero, it is refused: that file is not read here.
    ///
    /// # Errors
    /// What can't be had on this image, see [`Error`].
    pub fn resize(&mut self, size: u64, backing_size: Option<u64>) -> Result<(), Error> {
        let old = self.header.size;
        if !size.is_multiple_of(512) || size > i64::MAX as u64 {
            return Error::refused(&self.path, format!("a disk can't have {size} bytes; use a multiple of 512"));
        }
        if size == old {
            return Ok(());
        }
        if self.header.version == 2 && !self.snapshots()?.is_empty() {
            return Error::refused(
                &self.path,
                "has snapshots and is of version 2, which can't note their size; remove them first",
            );
        }
        super::bitmap::refuse_any(self, "their size is the disk's")?;
        if self.header.raw_data_file() {
            return Error::refused(&self.path, "has a raw data file; resize is not possible");
        }
        let layout = self.layout();
        let entries = layout.l1_entries(size).max(1);
        if entries * 8 > MAX_L1_BYTES {
            return Error::refused(
                &self.path,
                format!("{size} bytes are too many for its clusters of {} bytes", layout.cluster_size()),
            );
        }
        let mut edit = Edit::begin(self)?;
        // What is mapped from here on goes: behind a shrunk disk, and left-overs behind one that grows.
        drop_from(&mut edit, old.min(size).next_multiple_of(layout.cluster_size()))?;
        if size > old {
            if edit.l1.len() < entries as usize {
                edit.l1.resize(entries as usize, 0);
            }
            zero_tail(&mut edit, old, backing_size.unwrap_or(0))?;
            let backed = backing_size.unwrap_or(0).min(size);
            zero_range(&mut edit, old.next_multiple_of(layout.cluster_size()), backed)?;
        } else {
            edit.l1.truncate(entries as usize);
        }
        edit.header.size = size;
        edit.commit()
    }

    /// Notes another backing file, or none, without looking at either (`rebase -u`): the disk's content changes where this
    /// image has nothing of its own.
    ///
    /// # Errors
    /// A name that doesn't fit, a raw data file, see [`Error`].
    pub fn set_backing(&mut self, backing: Option<(&OsStr, &str)>) -> Result<(), Error> {
        if let Some((name, format)) = backing {
            if name.is_empty() || name.len() > MAX_BACKING_NAME || name.as_bytes().contains(&0) {
                return Error::refused(&self.path, format!("the name {name:?} has no or more than 1023 bytes"));
            }
            if format.is_empty() || format.len() > 15 {
                return Error::refused(&self.path, format!("{format:?} is no format's name"));
            }
            if self.header.raw_data_file() {
                return Error::refused(&self.path, "has a raw data file, so it can't have a backing file");
            }
        }
        let mut edit = Edit::begin(self)?;
        edit.header.backing = backing.map(|(name, _)| name.to_owned());
        edit.header.extensions.backing_format = backing.map(|(_, format)| format.to_owned());
        edit.commit()
    }

    /// Changes options of the image.
    ///
    /// # Errors
    /// Options that its version has not, see [`Error`].
    pub fn amend(&mut self, what: Amend) -> Result<(), Error> {
        let Some(lazy) = what.lazy_refcounts else { return Ok(()) };
        if lazy && self.header.version < 3 {
            return Error::refused(&self.path, "is of version 2 (compat=0.10), which has no lazy refcounts");
        }
        let mut edit = Edit::begin(self)?;
        let bits = &mut edit.header.features.compatible;
        *bits = if lazy { *bits | compatible::LAZY_REFCOUNTS } else { *bits & !compatible::LAZY_REFCOUNTS };
        edit.commit()
    }
}

/// Unmaps everything from guest offset `from` (a cluster's start) on.
fn drop_from(edit: &mut Edit<'_>, from: u64) -> Result<(), Error> {
    let layout = edit.header.layout();
    let table_bits = layout.l2_bits() + layout.cluster_bits;
    let first = (from >> table_bits) as usize;
    for index in first..edit.l1.len() {
        let offset = edit.l1[index] & OFFSET_MASK;
        if offset == 0 {
            continue;
        }
        let keep = if index == first { from & ((1 << table_bits) - 1) } else { 0 } >> layout.cluster_bits;
        if keep == 0 {
            let entry = edit.l1[index];
            edit.count_tree(&[entry], false)?;
            edit.l1[index] = 0;
            continue;
        }
        let mut table = edit.image.read(offset, layout.cluster_size())?;
        let tail = table.split_off((keep * layout.entry_size()) as usize);
        for (raw, bitmap, _) in super::walk::entries(&layout, &tail) {
            edit.count_entry(raw, bitmap, false);
        }
        if tail.iter().any(|b| *b != 0) {
            table.resize(1 << layout.cluster_bits, 0);
            edit.replace_table(index, &table)?;
        }
    }
    Ok(())
}

/// Makes what follows guest offset `old` in its cluster read as zeroes.
fn zero_tail(edit: &mut Edit<'_>, old: u64, backing_size: u64) -> Result<(), Error> {
    let layout = edit.header.layout();
    let within = old & (layout.cluster_size() - 1);
    let guest = old - within;
    let index = (guest >> (layout.l2_bits() + layout.cluster_bits)) as usize;
    let table = edit.l1[index] & OFFSET_MASK;
    if within == 0 || (table == 0 && backing_size <= old) {
        return Ok(());
    }
    let at = (((guest >> layout.cluster_bits) & ((1 << layout.l2_bits()) - 1)) * layout.entry_size()) as usize;
    let mut bytes = match table {
        0 => vec![0; 1 << layout.cluster_bits],
        table => edit.image.read(table, layout.cluster_size())?,
    };
    let (raw, bitmap) = (be64(&bytes, at), if layout.extended { be64(&bytes, at + 8) } else { 0 });
    let mapping = layout.classify(raw, bitmap, guest).map_err(Error::format(edit.image.path()))?;
    match mapping {
        Mapping::Zero { .. } => return Ok(()),
        Mapping::Unallocated if backing_size <= old => return Ok(()),
        _ if layout.data_file || edit.header.crypt != Crypt::None => return cannot_extend(edit),
        Mapping::Data { host, copied: true } => {
            // Behind the disk's end nobody looks, so this is written in place.
            let zeroes = vec![0; (layout.cluster_size() - within) as usize];
            return edit.image.write(host + within, &zeroes);
        }
        _ => {}
    }
    let mut data = content(edit, &mapping, guest, old, backing_size)?;
    data[within as usize..].fill(0);
    let host = edit.store(&data)?;
    edit.count_entry(raw, bitmap, false);
    let (raw, bitmap) = layout.encode(&Mapping::Data { host, copied: true }).unwrap_or_default();
    bytes[at..at + 8].copy_from_slice(&raw.to_be_bytes());
    if layout.extended {
        bytes[at + 8..at + 16].copy_from_slice(&bitmap.to_be_bytes());
    }
    edit.replace_table(index, &bytes)
}

fn cannot_extend<T>(edit: &Edit<'_>) -> Result<T, Error> {
    Error::refused(edit.image.path(), "ends within a cluster that can't be extended offline; resize it online")
}

/// The cluster at `guest`, of which nothing from `old` on matters. Backing files can't be read here.
fn content(edit: &Edit<'_>, mapping: &Mapping, guest: u64, old: u64, backing_size: u64) -> Result<Vec<u8>, Error> {
    let layout = edit.header.layout();
    let image = &*edit.image;
    match mapping {
        Mapping::Data { host, .. } => image.read(*host, layout.cluster_size()),
        Mapping::Compressed(c) => {
            let mut data = vec![0; 1 << layout.cluster_bits];
            let packed = image.read(c.host, c.len)?;
            let unpack = Decompressor::new(edit.header.compression).and_then(|mut d| d.run(&packed, &mut data));
            unpack.map_err(Error::format(image.path())).map(|()| data)
        }
        Mapping::Partial(p) => {
            let mut data = vec![0; 1 << layout.cluster_bits];
            let bits = layout.subcluster_bits();
            for (i, part) in data.chunks_mut(1 << bits).enumerate() {
                let at = (i as u64) << bits;
                match p.host {
                    Some(host) if p.allocated >> i & 1 != 0 => part.copy_from_slice(&image.read(host + at, 1 << bits)?),
                    _ if p.zero >> i & 1 != 0 || guest + at >= backing_size.min(old) => {}
                    _ => return cannot_extend(edit),
                }
            }
            Ok(data)
        }
        Mapping::Unallocated | Mapping::Zero { .. } => cannot_extend(edit),
    }
}

/// Marks the clusters from guest offset `from` (a cluster's start) to `end` as zeroes, so that the backing file's content does
/// not show there.
fn zero_range(edit: &mut Edit<'_>, from: u64, end: u64) -> Result<(), Error> {
    let layout = edit.header.layout();
    if from >= end {
        return Ok(());
    }
    if !layout.zero_flag {
        return Error::refused(
            edit.image.path(),
            "is of version 2, which can't hide the longer backing file behind its end; convert it to version 3",
        );
    }
    let (first, last) = (from >> layout.cluster_bits, (end - 1) >> layout.cluster_bits);
    let per_table = 1u64 << layout.l2_bits();
    let zero = layout.encode(&Mapping::Zero { host: None, copied: false }).unwrap_or_default();
    for index in first / per_table..=last / per_table {
        let offset = edit.l1[index as usize] & OFFSET_MASK;
        let mut table = if offset == 0 {
            vec![0; 1 << layout.cluster_bits]
        } else {
            edit.image.read(offset, layout.cluster_size())?
        };
        for cluster in first.max(index * per_table)..=last.min((index + 1) * per_table - 1) {
            let at = (cluster % per_table * layout.entry_size()) as usize;
            table[at..at + 8].copy_from_slice(&zero.0.to_be_bytes());
            if layout.extended {
                table[at + 8..at + 16].copy_from_slice(&zero.1.to_be_bytes());
            }
        }
        edit.replace_table(index as usize, &table)?;
    }
    Ok(())
}
