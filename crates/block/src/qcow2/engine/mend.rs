// SPDX-License-Identifier: Apache-2.0
//! What is put right when an image is opened for writing: refcounts that a writer left stale (the dirty bit), and a tail of
//! the file that nobody uses. Called by `chain` and `image` while the image is locked and before anything else uses it.

use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::Error;
use crate::qcow2::format::header::Header;
use crate::qcow2::format::refcount::table_entry;
use crate::qcow2::offline::{self, Medium, Repair};
use crate::storage::Storage;

use super::side;

/// How far back from its end a file is looked at: more than is ever reserved ahead of need.
const TAIL: u64 = 32 << 20;
/// Pieces of data that are looked for in a tail; one with more of them is left alone.
const MOST_PIECES: usize = 64;

/// A storage as the offline editor wants it.
struct StorageMedium(Mutex<Storage>);

impl StorageMedium {
    fn lock(&self) -> MutexGuard<'_, Storage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// The lock is held across I/O: the editor is one thread, and the lock only stands for `&mut`.
impl Medium for StorageMedium {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut storage = self.lock();
        let len = storage.len()?;
        buf.copy_from_slice(&side::read(&mut storage, offset, buf.len(), len)?);
        Ok(len.saturating_sub(offset).min(buf.len() as u64) as usize)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let mut storage = self.lock();
        let end = offset + buf.len() as u64;
        if storage.len()? < end {
            storage.set_len(end)?;
        }
        side::write(&mut storage, offset, buf)
    }

    fn sync(&self) -> io::Result<()> {
        side::flush(&mut self.lock())
    }

    fn size(&self) -> io::Result<u64> {
        self.lock().len()
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        let storage = self.lock();
        if storage.grows() { storage.set_len(size) } else { Ok(()) }
    }

    fn as_medium(&self) -> &dyn Medium {
        self
    }
}

/// Counts anew what the image at `path` refers to, and says so; `None` where nothing was stale.
///
/// # Errors
/// An image that counting does not mend, or what the host says.
pub fn recount(storage: &Storage, path: &Path, header: &Header) -> Result<Option<String>, Error> {
    if !header.dirty() || header.corrupt() {
        return Ok(None);
    }
    let refused = |what: &str| Error::Unsupported(path.to_owned(), what.to_owned());
    let own = storage.share().ok_or_else(|| refused("its storage can't be shared"))?;
    let failed = |e: offline::Error| match e {
        offline::Error::Open(e) => e,
        offline::Error::Io { what, source, .. } => Error::Io { path: path.to_owned(), what, source },
        offline::Error::Format { source, .. } => refused(&source.to_string()),
        offline::Error::Refused(_, what) => refused(&what),
    };
    let mut image = offline::Image::on(Box::new(StorageMedium(Mutex::new(own))), path, true).map_err(failed)?;
    let report = image.repair(Repair::All).map_err(failed)?;
    if !report.clean() || image.header().dirty() {
        return Err(refused(
            "it was not closed, and counting its clusters anew does not mend it; see `tare img check --repair`, or open it readonly=on",
        ));
    }
    Ok(Some(format!(
        "disk {}: was not closed by its last writer; its refcounts are repaired ({} wrong, {} leaked clusters)",
        path.display(),
        report.corruptions_fixed,
        report.leaks_fixed
    )))
}

/// Where the file of `file_len` bytes, whose refcount table this is, could end: past the last cluster that is counted and
/// past the last byte that was ever written. What a crash left of space reserved ahead of need lies behind it.
///
/// # Errors
/// What the host says.
pub fn end_of_use(storage: &mut Storage, header: &Header, table: &[u64], file_len: u64) -> io::Result<u64> {
    let (bits, width) = (header.cluster_bits, header.width);
    let block_bits = width.block_bits(bits);
    let mut end = file_len.div_ceil(1 << bits);
    if !storage.grows() {
        return Ok(file_len);
    }
    // A look at the file comes first: without a hole at its end there is nothing to gain. More than this is never reserved.
    let mut used = file_len.saturating_sub(TAIL);
    for _ in 0..MOST_PIECES {
        let data = storage.hole_end(used);
        if data >= file_len {
            break;
        }
        used = storage.data_end(data).max(data + 1);
        if used >= file_len {
            return Ok(file_len);
        }
    }
    if storage.hole_end(used) < file_len {
        return Ok(file_len);
    }
    while end << bits > used {
        let index = (end - 1) >> block_bits;
        let first = index << block_bits;
        let block = table.get(index as usize).copied().unwrap_or(0);
        match table_entry(block, bits) {
            Ok(None) => {}
            Ok(Some(offset)) if offset < file_len => {
                let bytes = side::read(storage, offset, 1 << bits, file_len)?;
                let counted = (first..end).rev().find(|c| width.get(&bytes, (c - first) as usize) != 0);
                if let Some(last) = counted {
                    return Ok(((last + 1) << bits).max(used).min(file_len));
                }
            }
            // A damaged table proves nothing.
            _ => return Ok(file_len),
        }
        end = first;
    }
    Ok(used.next_multiple_of(1 << bits).min(file_len))
}
