// SPDX-License-Identifier: Apache-2.0
//! Persistent dirty bitmaps: listing, adding, removing, enabling, disabling, clearing and merging them, as `qemu-img bitmap`
//! does. Directory, tables and bits that change are written anew; the old ones go with the commit.

use super::super::format::bitmap::{self, AUTO, Bitmap, Bits, EXTRA_COMPATIBLE, IN_USE};
use super::super::format::header::{BitmapsRef, MAX_BITMAP_DIRECTORY, autoclear};
use super::edit::Edit;
use super::image::numbers;
use super::walk::Walk;
use super::{Error, Image};

/// The most bytes of bits of one bitmap that are held in memory.
const MAX_BITS: u64 = 64 << 20;
/// The most entries of bitmaps' tables that a walk reads, all bitmaps together.
const MAX_TABLE_ENTRIES: u64 = 64 << 20;

impl Image {
    /// Its bitmaps. None if the image has some that a writer didn't keep: they are worth nothing.
    ///
    /// # Errors
    /// The directory is damaged.
    pub fn bitmaps(&self) -> Result<Vec<Bitmap>, Error> {
        let Some(at) = self.header.extensions.bitmaps else { return Ok(Vec::new()) };
        let len = at.size.min(self.size()?.saturating_sub(at.offset));
        let bytes = self.read(at.offset, len)?;
        bitmap::parse(&bytes, at.count, self.header.cluster_bits).map_err(Error::format(&self.path))
    }

    /// Adds an empty bitmap. `granularity` is a power of two from 512 to 2 GiB; `None` is a cluster, 4 KiB to 64 KiB.
    ///
    /// # Errors
    /// A name that is taken, or see [`Error`].
    pub fn bitmap_add(&mut self, name: &str, granularity: Option<u64>, enabled: bool) -> Result<(), Error> {
        let granularity = granularity.unwrap_or_else(|| self.header.cluster_size().clamp(4096, 65_536));
        let bits = granularity.trailing_zeros() as u8;
        if !granularity.is_power_of_two() || !bitmap::GRANULARITY_BITS.contains(&bits) {
            return Error::refused(&self.path, format!("granularity {granularity} is no power of two from 512 to 2G"));
        }
        if self.header.version < 3 {
            return Error::refused(&self.path, "is of version 2 (compat=0.10), which has no bitmaps");
        }
        if name.is_empty() || name.len() > bitmap::MAX_NAME {
            return Error::refused(&self.path, "a bitmap needs a name of 1 to 1023 bytes");
        }
        if self.bitmaps()?.iter().any(|b| b.name == name) {
            return Error::refused(&self.path, format!("has a bitmap named {name:?} already"));
        }
        let bytes = self.header.size.div_ceil(granularity).div_ceil(8);
        if bytes == 0 || bytes > MAX_BITS {
            return Error::refused(
                &self.path,
                format!("a bitmap of {bytes} bytes is not possible; use another granularity"),
            );
        }
        let entries = bytes.div_ceil(self.header.cluster_size()) as u32;
        self.change_bitmaps(|edit, all| {
            let table = edit.store(&numbers(&vec![0; entries as usize]))?;
            let flags = if enabled { AUTO } else { 0 };
            all.push(Bitmap {
                table,
                entries,
                flags,
                granularity_bits: bits,
                name: name.to_owned(),
                extra: Vec::new(),
            });
            Ok(())
        })
    }

    /// Removes a bitmap, also one that is inconsistent.
    ///
    /// # Errors
    /// No such bitmap, or see [`Error`].
    pub fn bitmap_remove(&mut self, name: &str) -> Result<(), Error> {
        let index = self.find_bitmap(name)?;
        self.change_bitmaps(|edit, all| {
            let gone = all.remove(index);
            free_bits(edit, &gone, true)
        })
    }

    /// Makes writers keep a bitmap from now on, or not.
    ///
    /// # Errors
    /// No such bitmap, an inconsistent one, or see [`Error`].
    pub fn bitmap_enable(&mut self, name: &str, enabled: bool) -> Result<(), Error> {
        let index = self.usable_bitmap(name)?;
        self.change_bitmaps(|_, all| {
            let flags = &mut all[index].flags;
            *flags = if enabled { *flags | AUTO } else { *flags & !AUTO };
            Ok(())
        })
    }

    /// Clears all bits of a bitmap.
    ///
    /// # Errors
    /// No such bitmap, an inconsistent one, or see [`Error`].
    pub fn bitmap_clear(&mut self, name: &str) -> Result<(), Error> {
        let index = self.usable_bitmap(name)?;
        self.change_bitmaps(|edit, all| {
            free_bits(edit, &all[index], true)?;
            all[index].table = edit.store(&numbers(&vec![0; all[index].entries as usize]))?;
            Ok(())
        })
    }

    /// Sets in bitmap `target` what is set in bitmap `source` of this image.
    ///
    /// # Errors
    /// No such bitmap, an inconsistent one, or see [`Error`].
    pub fn bitmap_merge(&mut self, source: &str, target: &str) -> Result<(), Error> {
        let bits = self.bitmap_bits(source)?;
        let granularity = 1u64 << self.bitmaps()?[self.usable_bitmap(source)?].granularity_bits;
        self.bitmap_merge_bits(&bits, granularity, target)
    }

    /// Sets in bitmap `target` the ranges that `bits` (bit 0 of byte 0 first, each standing for `granularity` bytes) has set;
    /// for merging a bitmap of another image.
    ///
    /// # Errors
    /// No such bitmap, an inconsistent one, or see [`Error`].
    pub fn bitmap_merge_bits(&mut self, bits: &[u8], granularity: u64, target: &str) -> Result<(), Error> {
        let index = self.usable_bitmap(target)?;
        let size = self.header.size;
        let mut merged = self.bitmap_bits(target)?;
        let to = self.bitmaps()?[index].granularity_bits;
        for (i, byte) in bits.iter().enumerate().filter(|(_, b)| **b != 0) {
            for bit in (0..8).filter(|b| byte >> b & 1 != 0) {
                let from = (i as u64 * 8 + bit).saturating_mul(granularity);
                let end = from.saturating_add(granularity).min(size);
                if from >= end {
                    continue;
                }
                for n in from >> to..=(end - 1) >> to {
                    if let Some(b) = merged.get_mut((n / 8) as usize) {
                        *b |= 1 << (n % 8);
                    }
                }
            }
        }
        self.change_bitmaps(|edit, all| {
            free_bits(edit, &all[index], true)?;
            let cluster = edit.header.cluster_size() as usize;
            let mut table = Vec::new();
            for part in merged.chunks(cluster) {
                table.push(if part.iter().all(|b| *b == 0) { 0 } else { edit.store(part)? });
            }
            table.resize(all[index].entries as usize, 0);
            all[index].table = edit.store(&numbers(&table))?;
            Ok(())
        })
    }

    /// The bits of a bitmap: bit 0 of byte 0 is the disk's first `1 << granularity_bits` bytes.
    ///
    /// # Errors
    /// No such bitmap, an inconsistent one, or see [`Error`].
    pub fn bitmap_bits(&self, name: &str) -> Result<Vec<u8>, Error> {
        let bitmap = &self.bitmaps()?[self.usable_bitmap(name)?];
        let bits = self.header.size.div_ceil(1 << bitmap.granularity_bits);
        let (bytes, cluster) = (bits.div_ceil(8), self.header.cluster_size());
        if bytes > MAX_BITS || bytes.div_ceil(cluster) > u64::from(bitmap.entries) {
            return Error::refused(&self.path, format!("bitmap {name:?} is not of the disk's size"));
        }
        let mut out = vec![0; bytes as usize];
        let table = self.read_numbers(bitmap.table, u64::from(bitmap.entries))?;
        for (part, raw) in out.chunks_mut(cluster as usize).zip(table) {
            match bitmap::table_entry(raw, self.header.cluster_bits).map_err(Error::format(&self.path))? {
                Bits::Clear => {}
                Bits::Set => part.fill(0xff),
                Bits::At(offset) => part.copy_from_slice(&self.read(offset, part.len() as u64)?),
            }
        }
        if let Some(last) = out.last_mut().filter(|_| !bits.is_multiple_of(8)) {
            *last &= (1 << (bits % 8)) - 1;
        }
        Ok(out)
    }

    fn find_bitmap(&self, name: &str) -> Result<usize, Error> {
        let found = self.bitmaps()?.iter().position(|b| b.name == name);
        found.map_or_else(|| Error::refused(&self.path, format!("has no bitmap {name:?}")), Ok)
    }

    fn usable_bitmap(&self, name: &str) -> Result<usize, Error> {
        let index = self.find_bitmap(name)?;
        let bitmap = &self.bitmaps()?[index];
        if bitmap.flags & IN_USE != 0 {
            return Error::refused(
                &self.path,
                format!("bitmap {name:?} was not closed cleanly and can only be removed"),
            );
        }
        if !bitmap.extra.is_empty() && bitmap.flags & EXTRA_COMPATIBLE == 0 {
            return Error::refused(&self.path, format!("bitmap {name:?} has data of a kind unknown to this version"));
        }
        Ok(index)
    }

    /// Writes a new directory after `change`.
    fn change_bitmaps(
        &mut self,
        change: impl FnOnce(&mut Edit<'_>, &mut Vec<Bitmap>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut all = self.bitmaps()?;
        let mut edit = Edit::begin(self)?;
        change(&mut edit, &mut all)?;
        if let Some(old) = edit.header.extensions.bitmaps.take() {
            edit.release(old.offset, old.size);
        }
        let directory = bitmap::serialize(&all);
        if directory.len() as u64 > MAX_BITMAP_DIRECTORY || all.len() > 65_535 {
            return Error::refused(edit.image.path(), "has as many bitmaps as an image can have");
        }
        let features = &mut edit.header.features;
        if all.is_empty() {
            features.autoclear &= !autoclear::BITMAPS;
        } else {
            features.autoclear |= autoclear::BITMAPS;
            let offset = edit.store(&directory)?;
            let size = directory.len() as u64;
            edit.header.extensions.bitmaps = Some(BitmapsRef { count: all.len() as u32, size, offset });
        }
        edit.commit()
    }
}

/// Releases a bitmap's bits and, if `table`, its table.
fn free_bits(edit: &mut Edit<'_>, bitmap: &Bitmap, table: bool) -> Result<(), Error> {
    for raw in edit.image.read_numbers(bitmap.table, u64::from(bitmap.entries))? {
        if let Ok(Bits::At(offset)) = bitmap::table_entry(raw, edit.header.cluster_bits) {
            edit.release(offset, 1);
        }
    }
    if table {
        edit.release(bitmap.table, u64::from(bitmap.entries) * 8);
    }
    Ok(())
}

/// Counts what the bitmaps use.
pub fn walk(image: &Image, walk: &mut Walk) -> Result<(), Error> {
    let Some(at) = image.header.extensions.bitmaps else { return Ok(()) };
    let bits = image.header.cluster_bits;
    walk.area(bits, at.offset, at.size, "the bitmap directory");
    let bitmaps = match image.bitmaps() {
        Ok(bitmaps) => bitmaps,
        Err(Error::Format { source, .. }) => {
            walk.report.corruption(1, || format!("the bitmap directory {source}"));
            return Ok(());
        }
        Err(e) => return Err(e),
    };
    let mut budget = MAX_TABLE_ENTRIES;
    for bitmap in bitmaps {
        let len = u64::from(bitmap.entries) * 8;
        walk.area(bits, bitmap.table, len, "a bitmap's table");
        let there = len.min(image.size()?.saturating_sub(bitmap.table)) / 8;
        let Some(left) = budget.checked_sub(there) else {
            walk.report.check_error("its bitmaps have more table entries than can be looked at".into());
            break;
        };
        budget = left;
        for raw in image.read_numbers(bitmap.table, there)? {
            match bitmap::table_entry(raw, bits) {
                Ok(Bits::At(offset)) => walk.area(bits, offset, 1 << bits, "a bitmap's data"),
                Ok(Bits::Clear | Bits::Set) => {}
                Err(e) => walk.report.corruption(1, || format!("bitmap {:?} {e}", bitmap.name)),
            }
        }
    }
    Ok(())
}

/// Refuses what would make the image's bitmaps wrong if any is enabled.
pub fn refuse_enabled(image: &Image, why: &str) -> Result<(), Error> {
    match image.bitmaps()?.into_iter().find(|b| b.flags & AUTO != 0) {
        Some(b) => Error::refused(
            &image.path,
            format!("has bitmap {:?} enabled, and {why}; disable or remove it first", b.name),
        ),
        None => Ok(()),
    }
}

/// Refuses what can't be done to images with bitmaps.
pub fn refuse_any(image: &Image, why: &str) -> Result<(), Error> {
    match image.bitmaps()?.first() {
        Some(b) => Error::refused(&image.path, format!("has bitmap {:?}, and {why}; remove it first", b.name)),
        None => Ok(()),
    }
}
