// SPDX-License-Identifier: Apache-2.0
//! Direct I/O for requests whose address, offset or length the host can't take as they are: the bytes go through one aligned
//! buffer, on the calling thread, one request at a time.
//!
//! A write that covers part of a block reads the block first. All such writes of a file take turns, whatever thread they
//! come from; a block-aligned write in flight at the same time could only overlap in a sector that the guest itself writes
//! twice at once.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use base::Seg;

use super::buffer::AlignedBuf;
use super::sys;

/// Bytes moved at a time; a multiple of every block size.
const BUFFER: usize = 256 << 10;

/// The aligned buffer, made on first use.
#[derive(Debug)]
pub struct Bounce {
    align: u64,
    buffer: Option<AlignedBuf>,
    /// Held from reading a block to writing it back.
    turn: Arc<Mutex<()>>,
}

/// Whether the offset and every segment's address and length are multiples of `align`, a power of two.
pub fn aligned(segs: &[Seg], offset: u64, align: u64) -> bool {
    let bits = segs.iter().fold(offset, |bits, s| bits | s.ptr as u64 | s.len as u64);
    bits & (align - 1) == 0
}

impl Bounce {
    /// A bounce for a file whose direct I/O wants multiples of `align` bytes, a power of two up to 4096.
    pub fn new(align: u32) -> Self {
        Self { align: u64::from(align.clamp(512, 4096)), buffer: None, turn: Arc::default() }
    }

    /// Another one for the same file.
    pub fn share(&self) -> Self {
        Self { align: self.align, buffer: None, turn: Arc::clone(&self.turn) }
    }

    /// Whether the host takes the request as it is.
    pub fn fits(&self, segs: &[Seg], offset: u64) -> bool {
        aligned(segs, offset, self.align)
    }

    /// Reads into `segs` through the buffer.
    ///
    /// # Errors
    /// What the host says; `EIO` at the end of the file.
    pub fn read(&mut self, file: &File, segs: &[Seg], offset: u64) -> io::Result<()> {
        self.pieces(segs, offset, |ptr, span, inner, piece| {
            let got = sys::read_most(file, Seg { ptr, len: span.len }, span.start)?;
            if (got as u64) < inner as u64 + base::segs::total_len(piece) {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            copy(ptr.wrapping_add(inner), piece, Way::OutOfBuffer);
            Ok(())
        })
    }

    /// Writes `segs` through the buffer.
    ///
    /// # Errors
    /// What the host says.
    pub fn write(&mut self, file: &File, segs: &[Seg], offset: u64) -> io::Result<()> {
        let turn = Arc::clone(&self.turn);
        let _mine = turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.pieces(segs, offset, |ptr, span, inner, piece| {
            let whole = base::segs::total_len(piece) == span.len as u64;
            if !whole {
                // What the file has not yet is zeroes, whatever the buffer held.
                let got = sys::read_most(file, Seg { ptr, len: span.len }, span.start)?;
                super::buffer::fill_zero(&[Seg { ptr: ptr.wrapping_add(got), len: span.len - got }]);
            }
            copy(ptr.wrapping_add(inner), piece, Way::IntoBuffer);
            sys::write_all(file, &[Seg { ptr, len: span.len }], span.start)
        })
    }

    /// Cuts the request into pieces whose aligned spans fit the buffer: buffer, span, where the piece starts in it, piece.
    fn pieces(
        &mut self,
        segs: &[Seg],
        offset: u64,
        mut each: impl FnMut(*mut u8, Span, usize, &[Seg]) -> io::Result<()>,
    ) -> io::Result<()> {
        let ptr = self.buffer()?;
        let total = base::segs::total_len(segs);
        let mut done = 0u64;
        let (mut rest, mut piece) = (Vec::new(), Vec::new());
        while done < total {
            let at = offset + done;
            let start = at & !(self.align - 1);
            let end = (offset + total).min(start + BUFFER as u64);
            let len = (end - start).next_multiple_of(self.align) as usize;
            sys::skip(segs, done, &mut rest);
            take(&rest, end - at, &mut piece);
            each(ptr, Span { start, len }, (at - start) as usize, &piece)?;
            done = end - offset;
        }
        Ok(())
    }

    fn buffer(&mut self) -> io::Result<*mut u8> {
        if self.buffer.is_none() {
            self.buffer = Some(AlignedBuf::zeroed(BUFFER)?);
        }
        Ok(self.buffer.as_ref().map_or(std::ptr::null_mut(), |b| b.seg(0, BUFFER).ptr))
    }
}

/// An aligned range of the file.
struct Span {
    start: u64,
    len: usize,
}

#[derive(Clone, Copy)]
enum Way {
    IntoBuffer,
    OutOfBuffer,
}

/// Puts the first `len` bytes of `segs` into `piece`.
fn take(segs: &[Seg], mut len: u64, piece: &mut Vec<Seg>) {
    piece.clear();
    for seg in segs {
        if len == 0 {
            break;
        }
        let n = len.min(seg.len as u64);
        piece.push(Seg { ptr: seg.ptr, len: n as usize });
        len -= n;
    }
}

/// Copies between the buffer from `ptr` on and `segs`.
fn copy(mut ptr: *mut u8, segs: &[Seg], way: Way) {
    for seg in segs {
        let (from, to) = match way {
            Way::IntoBuffer => (seg.ptr, ptr),
            Way::OutOfBuffer => (ptr, seg.ptr),
        };
        // SAFETY: `pieces` cut the segments so that they fit between `ptr` and the end of the buffer; the segment's bytes
        // stay mapped by its maker's promise; a private buffer and guest memory can't overlap, but `copy` would allow it.
        unsafe { std::ptr::copy(from, to, seg.len) };
        ptr = ptr.wrapping_add(seg.len);
    }
}
