// SPDX-License-Identifier: Apache-2.0
//! Bytes of a kernel or initrd, read by position: from a file without keeping a copy, or from memory for tests and fuzzing.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use base::Gpa;
use mem::GuestRam;
use vm_memory::{Bytes, GuestAddress};

use crate::BootError;

/// The smallest piece that can be mapped.
const PAGE: u64 = 4096;

/// A file and the name the user knows it by.
#[derive(Debug)]
pub struct Source<'a> {
    role: &'static str,
    path: &'a Path,
    bytes: Held<'a>,
    len: u64,
    /// Whole pages of it may be mapped into the guest instead of read.
    map: bool,
    /// Bytes that were.
    mapped: AtomicU64,
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
        Ok(Self { role, path, bytes: Held::File(file), len, map: false, mapped: AtomicU64::new(0) })
    }

    /// Bytes in memory under the name `path`.
    #[must_use]
    pub fn memory(role: &'static str, path: &'a Path, bytes: &'a [u8]) -> Self {
        let len = bytes.len() as u64;
        Self { role, path, bytes: Held::Memory(bytes), len, map: false, mapped: AtomicU64::new(0) }
    }

    /// The same, whose whole pages are mapped into the guest where the file has them at page boundaries and the guest's memory
    /// allows it (`mem::GuestRam::map_file`), and read elsewhere.
    #[must_use]
    pub fn mapped(self) -> Self {
        Self { map: true, ..self }
    }

    /// What became of that, for the line on how a guest was loaded.
    pub(crate) fn how_much_is_mapped(&self) -> String {
        match self.mapped.load(Ordering::Relaxed) {
            0 => String::new(),
            bytes => format!("; {} KiB of the {} mapped", bytes >> 10, self.role),
        }
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
        if let (true, Held::File(file)) = (self.map, &self.bytes) {
            let head = (to.0.next_multiple_of(PAGE) - to.0).min(len);
            let pages = (len - head) & !(PAGE - 1);
            let first = Gpa(to.0 + head);
            if pages > 0 && ram.map_file(first, file, at + head, pages) {
                self.mapped.fetch_add(pages, Ordering::Relaxed);
                self.copy(at, head, ram, to)?;
                let end = head + pages;
                return self.copy(at + end, len - end, ram, Gpa(to.0 + end));
            }
        }
        self.copy(at, len, ram, to)
    }

    /// Reads what [`Source::within`] has allowed.
    fn copy(&self, at: u64, len: u64, ram: &GuestRam, to: Gpa) -> Result<(), BootError> {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    /// Memory of one backing, and in it `len` bytes of the file at `path` from byte `from` on, at `to`.
    fn loaded(backing: &str, path: &Path, map: bool, (from, len, to): (u64, u64, u64)) -> (GuestRam, String) {
        let memory = spec::FromText::from_text(backing).unwrap();
        let ram = mem::backing::back(&[(Gpa(0), 8 << 20)], None, &memory).unwrap().ram;
        let file = Source::open("kernel", path).unwrap();
        let file = if map { file.mapped() } else { file };
        file.read_to_guest(from, len, &ram, Gpa(to), "part").unwrap();
        (ram, file.how_much_is_mapped())
    }

    #[test]
    fn what_is_mapped_reads_as_what_is_copied_and_the_file_never_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernel");
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let cases = [
            // Whole pages, with a head and a tail; a head alone; pages that don't lie alike in file and memory.
            ("8M", (0, 100_000, 0x10_0000), "; 96 KiB of the kernel mapped"),
            ("8M,pages=4K", (100, 90_000, 0x20_0064), "; 80 KiB of the kernel mapped"),
            ("8M", (4100, 50, 0x10_0004), ""),
            ("8M", (1, 90_000, 0x10_0000), ""),
            ("8M,backing=memfd,shared=on", (0, 100_000, 0x10_0000), ""),
        ];
        for (backing, part, told) in cases {
            let (copied, none) = loaded(backing, &path, false, part);
            let (mapped, some) = loaded(backing, &path, true, part);
            assert_eq!((none.as_str(), some.as_str()), ("", told), "{backing} {part:?}");
            let (mut want, mut got) = (vec![0; 8 << 20], vec![0; 8 << 20]);
            copied.read_bytes(Gpa(0), &mut want).unwrap();
            mapped.read_bytes(Gpa(0), &mut got).unwrap();
            assert!(want == got, "{backing} {part:?}");
            assert!(want[part.2 as usize..][..part.1 as usize] == bytes[part.0 as usize..][..part.1 as usize]);
            // What the guest writes is its own.
            mapped.write_bytes(Gpa(part.2), &vec![0x5a; part.1 as usize]).unwrap();
            assert_eq!(mapped.read::<u8>(Gpa(part.2 + part.1 / 2)), Some(0x5a));
            assert!(fs::read(&path).unwrap() == bytes);
        }
    }
}
