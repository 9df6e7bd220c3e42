// SPDX-License-Identifier: Apache-2.0
//! Plain waiting I/O on a storage that nobody is attached to: for opening, for refcount blocks, for tools.

use std::io;

use crate::disk::{Op, Request};
use crate::storage::Storage;
use crate::storage::buffer::AlignedBuf;

fn wait(storage: &mut Storage, op: Op, offset: u64, len: u64, buf: Option<&AlignedBuf>) -> io::Result<()> {
    let segs = buf.map(|b| [b.seg(0, usize::try_from(len).unwrap_or(usize::MAX))]);
    storage.submit(&Request { id: 0, op, offset, len, segs: segs.as_ref().map_or(&[], |s| &s[..]) });
    storage.commit();
    let mut done = Vec::new();
    storage.reap(&mut done);
    done.pop().map_or_else(|| Err(io::Error::from_raw_os_error(libc::EIO)), |d| d.result)
}

/// Reads `len` bytes from `offset` on; zeroes past `file_len`.
///
/// # Errors
/// What the host says.
pub fn read(storage: &mut Storage, offset: u64, len: usize, file_len: u64) -> io::Result<Vec<u8>> {
    let have = file_len.saturating_sub(offset).min(len as u64) as usize;
    let mut out = vec![0; len];
    if have > 0 {
        let buf = AlignedBuf::zeroed(have)?;
        wait(storage, Op::Read, offset, have as u64, Some(&buf))?;
        if let Some(to) = out.get_mut(..have) {
            to.copy_from_slice(buf.bytes());
        }
    }
    Ok(out)
}

/// Writes `data` at `offset`.
///
/// # Errors
/// What the host says.
pub fn write(storage: &mut Storage, offset: u64, data: &[u8]) -> io::Result<()> {
    let buf = AlignedBuf::with(data, data.len())?;
    wait(storage, Op::Write, offset, data.len() as u64, Some(&buf))
}

/// Makes everything written durable.
///
/// # Errors
/// What the host says.
pub fn flush(storage: &mut Storage) -> io::Result<()> {
    wait(storage, Op::Flush, 0, 0, None)
}

/// Gives the space of a range back, where the host can.
///
/// # Errors
/// What the host says.
pub fn discard(storage: &mut Storage, offset: u64, len: u64) -> io::Result<()> {
    wait(storage, Op::Discard, offset, len, None)
}
