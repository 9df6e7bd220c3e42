// SPDX-License-Identifier: Apache-2.0
//! An image opened by the editor: its header, snapshots and L1 table in memory, everything else read as needed.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::super::format::entry::Layout;
use super::super::format::header::{Header, Table};
use super::super::format::snapshot::{self, Snapshot};
use super::super::format::{FormatError, be64};
use super::{Error, Medium};
use crate::lock;

/// Reads of tables that may be large go in parts of so many bytes at most.
const PART: u64 = 4 << 20;
/// How often a lock that someone holds is tried again, and how long is waited in between.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A qcow2 image, locked for as long as this lives.
pub struct Image {
    pub(super) medium: Box<dyn Medium>,
    pub(super) path: PathBuf,
    pub(super) header: Header,
    pub(super) snapshots: Result<Vec<Snapshot>, FormatError>,
    pub(super) l1: Vec<u64>,
    pub(super) writable: bool,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("path", &self.path).field("header", &self.header).finish_non_exhaustive()
    }
}

impl Image {
    /// Opens and locks the image at `path`, for reading only or also for changing. A damaged image can be opened, so that
    /// it can be checked; changes to it are refused until it is repaired.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn open(path: &Path, writable: bool) -> Result<Image, Error> {
        let file = open_file(path, writable)?;
        take_lock(&file, path, writable)?;
        Image::on(Box::new(file), path, writable)
    }

    /// Opens the image on `medium`; `path` is what messages call it. No lock is taken.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn on(medium: Box<dyn Medium>, path: &Path, writable: bool) -> Result<Image, Error> {
        let mut start = vec![0; 512];
        let got = medium.read_at(&mut start, 0).map_err(Error::io(path, "read it"))?;
        let needs = Header::needs(&start[..got]).map_err(Error::format(path))?;
        start.resize(needs, 0);
        let got = medium.read_at(&mut start, 0).map_err(Error::io(path, "read it"))?;
        let header = Header::parse(&start[..got]).map_err(Error::format(path))?;
        let mut image =
            Image { medium, path: path.to_owned(), header, snapshots: Ok(Vec::new()), l1: Vec::new(), writable };
        let l1 = image.header.l1;
        // A table that the file does not hold costs memory for nothing; there is nothing in it to check or repair.
        let room = image.size()?.next_multiple_of(image.header.cluster_size());
        if l1.offset.saturating_add(u64::from(l1.count) * 8) > room {
            return Error::refused(
                path,
                "has its L1 table past the end of the file, so it is cut short; restore it from a copy",
            );
        }
        image.l1 = image.read_numbers(image.header.l1.offset, u64::from(image.header.l1.count))?;
        image.snapshots = image.read_snapshots()?;
        Ok(image)
    }

    fn read_snapshots(&self) -> Result<Result<Vec<Snapshot>, FormatError>, Error> {
        let Table { offset, count } = self.header.snapshots;
        if count == 0 {
            return Ok(Ok(Vec::new()));
        }
        let size = self.size()?.saturating_sub(offset).min(snapshot::MAX_TABLE_BYTES);
        // Most tables are small: the first cluster will do, or else as much as there may be.
        for len in [size.min(self.header.cluster_size().max(65_536)), size] {
            let bytes = self.read(offset, len)?;
            match snapshot::parse(&bytes, count, self.header.cluster_bits) {
                Err(_) if len < size => {}
                outcome => return Ok(outcome.map(|(found, _)| found)),
            }
        }
        Ok(Ok(Vec::new()))
    }

    /// What its header says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its internal snapshots, oldest first.
    ///
    /// # Errors
    /// The snapshot table is damaged.
    pub fn snapshots(&self) -> Result<&[Snapshot], Error> {
        self.snapshots.as_deref().map_err(|e| Error::Format { path: self.path.clone(), source: e.clone() })
    }

    pub(super) fn layout(&self) -> Layout {
        self.header.layout()
    }

    pub(super) fn size(&self) -> Result<u64, Error> {
        self.medium.size().map_err(Error::io(&self.path, "ask for its size"))
    }

    /// `len` bytes from `offset`; what lies past the file's end reads as zeroes.
    pub(super) fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = vec![0; len as usize];
        self.medium.read_at(&mut bytes, offset).map_err(Error::io(&self.path, "read it"))?;
        Ok(bytes)
    }

    /// A table of big-endian numbers.
    pub(super) fn read_numbers(&self, offset: u64, count: u64) -> Result<Vec<u64>, Error> {
        // All at once: one that grows is there twice while it does.
        let mut numbers = Vec::with_capacity(count as usize);
        let end = (count * 8).min(self.size()?.saturating_sub(offset).next_multiple_of(8));
        let mut at = 0;
        while at < end {
            let part = self.read(offset + at, (end - at).min(PART))?;
            numbers.extend((0..part.len()).step_by(8).map(|i| be64(&part, i)));
            at += part.len() as u64;
        }
        numbers.resize(count as usize, 0);
        Ok(numbers)
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.medium.write_at(bytes, offset).map_err(Error::io(&self.path, "write to it"))
    }

    pub(super) fn sync(&self) -> Result<(), Error> {
        self.medium.sync().map_err(Error::io(&self.path, "make it durable"))
    }
}

/// The bytes of a table of big-endian numbers.
pub(super) fn numbers(table: &[u64]) -> Vec<u8> {
    table.iter().flat_map(|n| n.to_be_bytes()).collect()
}

fn open_file(path: &Path, writable: bool) -> Result<File, Error> {
    let meta = std::fs::metadata(path).map_err(|source| match source.kind() {
        std::io::ErrorKind::NotFound => crate::Error::Missing(path.to_owned()),
        _ => crate::Error::Io { path: path.to_owned(), what: "look at it", source },
    })?;
    if meta.is_dir() {
        return Err(crate::Error::NotADisk(path.to_owned(), "directory").into());
    }
    OpenOptions::new().read(true).write(writable).open(path).map_err(|source| {
        match source.kind() {
            std::io::ErrorKind::PermissionDenied => {
                crate::Error::Permission(path.to_owned(), if writable { "writing" } else { "reading" })
            }
            std::io::ErrorKind::ReadOnlyFilesystem => crate::Error::ReadOnly(path.to_owned()),
            _ => crate::Error::Io { path: path.to_owned(), what: "open it", source },
        }
        .into()
    })
}

/// Takes QEMU's locks, giving a holder that just ended a moment.
pub(super) fn take_lock(file: &File, path: &Path, writable: bool) -> Result<(), Error> {
    for attempt in 0..=LOCK_TRIES {
        match lock::acquire(file, writable).map_err(Error::io(path, "lock it"))? {
            lock::Outcome::Conflict(how) if attempt == LOCK_TRIES => {
                return Err(crate::Error::Locked(path.to_owned(), how).into());
            }
            lock::Outcome::Conflict(_) => std::thread::sleep(LOCK_PAUSE),
            lock::Outcome::Held | lock::Outcome::Unsupported => break,
        }
    }
    Ok(())
}
