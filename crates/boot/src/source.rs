// SPDX-License-Identifier: Apache-2.0
//! Bytes of a kernel or initrd, read by position: from a file without keeping a copy, or from memory for tests and fuzzing.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use base::Gpa;
use mem::GuestRam;
use vm_memory::{Bytes, GuestAddress};

use crate::BootError;

/// A file and the name the user knows it by.
#[derive(Debug)]
pub struct Source<'a> {
    role: &'static str,
    path: &'a Path,
    bytes: Held<'a>,
    len: u64,
}

#[derive(Debug)]
enum Held<'a> {
    File(File),
    Memory(&'a [u8]),
}

impl<'a> Source<'a> {
    /// Opens `path`; `role` ("kernel", "initrd") is for messages.
    ///
    /// # Errors
    /// [`BootError::Read`] if it can't be opened or is neither a regular file nor a block device.
    pub fn open(role: &'static str, path: &'a Path) -> Result<Self, BootError> {
        let fail = |source| BootError::Read { role, path: path.into(), source };
        let mut file = File::open(path).map_err(fail)?;
        let kind = file.metadata().map_err(fail)?.file_type();
        if kind.is_dir() {
            return Err(fail(io::Error::from(io::ErrorKind::IsADirectory)));
        }
        if !kind.is_file() && !kind.is_block_device() {
            return Err(fail(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")));
        }
        let len = file.seek(SeekFrom::End(0)).map_err(fail)?;
        Ok(Self { role, path, bytes: Held::File(file), len })
    }

    /// Bytes in memory under the name `path`.
    #[must_use]
    pub fn memory(role: &'static str, path: &'a Path, bytes: &'a [u8]) -> Self {
        Self { role, path, bytes: Held::Memory(bytes), len: bytes.len() as u64 }
    }

    /// The name the user knows it by.
    #[must_use]
    pub fn path(&self) -> &'a Path {
        self.path
    }

    /// Length in bytes when it was opened.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Fills `buf` from byte `at` on; `what` names the part for the message.
    pub(crate) fn read(&self, at: u64, buf: &mut [u8], what: &'static str) -> Result<(), BootError> {
        self.within(at, buf.len() as u64, what)?;
        match &self.bytes {
            Held::File(file) => file.read_exact_at(buf, at).map_err(|e| self.failed(e)),
            Held::Memory(bytes) => {
                let start = usize::try_from(at).unwrap_or(usize::MAX);
                match bytes.get(start..).and_then(|b| b.get(..buf.len())) {
                    Some(from) => buf.copy_from_slice(from),
                    None => return Err(self.failed(io::ErrorKind::UnexpectedEof.into())),
                }
                Ok(())
            }
        }
    }

    /// Reads `len` bytes from byte `at` on straight into guest memory.
    pub(crate) fn read_to_guest(
        &self,
        at: u64,
        len: u64,
        ram: &GuestRam,
        to: Gpa,
        what: &'static str,
    ) -> Result<(), BootError> {
        self.within(at, len, what)?;
        let count = usize::try_from(len).map_err(|_| self.failed(io::ErrorKind::FileTooLarge.into()))?;
        if count == 0 {
            return Ok(());
        }
        let outside = || mem::MemError::Outside(to, count);
        let to = GuestAddress(to.0);
        match &self.bytes {
            Held::File(file) => {
                // Checked before, so that what fails below is the file's fault.
                ram.slice(Gpa(to.0), count).ok_or_else(outside)?;
                let mut file = file;
                file.seek(SeekFrom::Start(at)).map_err(|e| self.failed(e))?;
                ram.map().read_exact_volatile_from(to, &mut file, count).map_err(|e| self.failed(io::Error::other(e)))
            }
            Held::Memory(bytes) => {
                let start = usize::try_from(at).unwrap_or(usize::MAX);
                let from = bytes.get(start..).and_then(|b| b.get(..count));
                let from = from.ok_or_else(|| self.failed(io::ErrorKind::UnexpectedEof.into()))?;
                Ok(ram.write_bytes(Gpa(to.0), from)?)
            }
        }
    }

    /// Whether `len` bytes from `at` on are in the file.
    pub(crate) fn within(&self, at: u64, len: u64, what: &'static str) -> Result<(), BootError> {
        let need = at.saturating_add(len);
        if need > self.len {
            return Err(BootError::Truncated { role: self.role, path: self.path.into(), what, need, have: self.len });
        }
        Ok(())
    }

    fn failed(&self, source: io::Error) -> BootError {
        BootError::Read { role: self.role, path: self.path.into(), source }
    }

    /// A contradiction in this file.
    pub(crate) fn malformed(&self, what: impl Into<String>) -> BootError {
        BootError::Malformed { role: self.role, path: self.path.into(), what: what.into() }
    }
}
