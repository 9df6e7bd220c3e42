// SPDX-License-Identifier: Apache-2.0
//! What the editor needs of a file: five calls, so that tests can put something between that records or fails.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The bytes of an image.
pub trait Medium: Send {
    /// Reads into `buf` from `offset`; returns how many bytes there were, fewer than asked only at the end.
    ///
    /// # Errors
    /// What the host says.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes all of `buf` at `offset`, growing the file where needed.
    ///
    /// # Errors
    /// What the host says.
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()>;
    /// Makes everything written durable before anything written later.
    ///
    /// # Errors
    /// What the host says.
    fn sync(&self) -> io::Result<()>;
    /// Bytes in the file.
    ///
    /// # Errors
    /// What the host says.
    fn size(&self) -> io::Result<u64>;
    /// Cuts the file off or extends it by a hole. A block device stays as it is.
    ///
    /// # Errors
    /// What the host says.
    fn set_size(&self, size: u64) -> io::Result<()>;
    /// Makes sure that there is room for the `len` bytes at `offset`, which read as zeroes so far and will afterwards.
    ///
    /// # Errors
    /// What the host says.
    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        super::create::write_zeroes(self.as_medium(), offset, len)
    }
    /// Itself.
    fn as_medium(&self) -> &dyn Medium;
}

impl Medium for File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match FileExt::read_at(self, &mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.write_all_at(buf, offset)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn size(&self) -> io::Result<u64> {
        let meta = self.metadata()?;
        if meta.is_file() { Ok(meta.len()) } else { crate::storage::sys::device_size(self) }
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        if self.metadata()?.is_file() { self.set_len(size) } else { Ok(()) }
    }

    fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        match crate::storage::sys::allocate(self, offset, offset + len) {
            Err(e) if matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)) => {
                super::create::write_zeroes(self, offset, len)
            }
            outcome => outcome,
        }
    }

    fn as_medium(&self) -> &dyn Medium {
        self
    }
}
