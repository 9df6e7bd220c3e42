// SPDX-License-Identifier: Apache-2.0
//! Memory for I/O of our own: aligned for direct I/O, and copies between it and borrowed segments. Used by the formats for
//! tables and for the bytes around a write, by tools for the bytes of their requests.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;

use base::Seg;
use base::mmap::Mmap;

/// Every buffer starts at a multiple of this; no device wants more.
const ALIGN: usize = 4096;
/// A huge page, bytes.
const HUGE: usize = 2 << 20;

/// Zero-initialised memory that starts at a multiple of 4096.
///
/// Handing its [`AlignedBuf::seg`] to a storage lends it out: until that request is complete nobody may look at the bytes.
#[derive(Debug)]
pub struct AlignedBuf {
    ptr: NonNull<u8>,
    len: usize,
    /// Where a large one lies; otherwise it is on the heap.
    mapping: Option<Mmap>,
}

// SAFETY: the memory belongs to this value alone and has no thread affinity.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// `len` zero bytes, `len` not 0.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn zeroed(len: usize) -> io::Result<Self> {
        let layout = Self::layout(len)?;
        // SAFETY: the layout's size is not zero, `layout` sees to it.
        let ptr = unsafe { alloc_zeroed(layout) };
        let ptr = NonNull::new(ptr).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { ptr, len: len.max(1), mapping: None })
    }

    /// The same for the bytes of many requests: from half a huge page on it lies in huge pages where the host has them, so
    /// that a request is one run of the host's memory, and not one for each 4 KiB.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn large(len: usize) -> io::Result<Self> {
        if len < HUGE / 2 {
            return Self::zeroed(len);
        }
        let whole = len.checked_next_multiple_of(HUGE).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        let mapping = Mmap::anonymous_aligned(whole, HUGE)?;
        mapping.advise_huge_pages();
        let ptr = NonNull::new(mapping.as_ptr()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { ptr, len, mapping: Some(mapping) })
    }

    /// The bytes of `data`, followed by zeroes up to `len`.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub fn with(data: &[u8], len: usize) -> io::Result<Self> {
        let mut buf = Self::zeroed(len.max(data.len()))?;
        if let Some(start) = buf.bytes_mut().get_mut(..data.len()) {
            start.copy_from_slice(data);
        }
        Ok(buf)
    }

    fn layout(len: usize) -> io::Result<Layout> {
        Layout::from_size_align(len.max(1), ALIGN).map_err(io::Error::other)
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty; it never is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: ptr is valid for len initialised bytes that only this value owns; lenders promise to wait (see the type).
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes from `at` on as a segment to lend; cut off at the end.
    #[must_use]
    pub fn seg(&self, at: usize, len: usize) -> Seg {
        let at = at.min(self.len);
        Seg { ptr: self.ptr.as_ptr().wrapping_add(at), len: len.min(self.len - at) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.mapping.is_some() {
            return;
        }
        if let Ok(layout) = Self::layout(self.len) {
            // SAFETY: ptr came from alloc_zeroed with this layout; nobody else has it.
            unsafe { dealloc(self.ptr.as_ptr(), layout) };
        }
    }
}

/// Appends to `out` what of `segs` lies at `[at, at + len)`.
pub fn cut(segs: &[Seg], mut at: u64, mut len: u64, out: &mut Vec<Seg>) {
    for seg in segs {
        let have = seg.len as u64;
        if at >= have {
            at -= have;
            continue;
        }
        if len == 0 {
            break;
        }
        // The casts can't cut: both are at most seg.len.
        let n = len.min(have - at);
        out.push(Seg { ptr: seg.ptr.wrapping_add(at as usize), len: n as usize });
        (at, len) = (0, len - n);
    }
}

/// Fills the segments with zeroes.
pub fn fill_zero(segs: &[Seg]) {
    for seg in segs {
        // SAFETY: the segment's bytes stay mapped and writable by its maker's promise.
        unsafe { std::ptr::write_bytes(seg.ptr, 0, seg.len) };
    }
}

/// Copies `data` into the segments, as far as they go.
pub fn scatter(mut data: &[u8], segs: &[Seg]) {
    for seg in segs {
        let (here, rest) = data.split_at(seg.len.min(data.len()));
        // SAFETY: `here` is at most seg.len long; the segment's bytes stay mapped by its maker's promise.
        unsafe { std::ptr::copy(here.as_ptr(), seg.ptr, here.len()) };
        data = rest;
    }
}

/// Lets `change` work on the bytes of the segments, so many at a time as `scratch` has, in order; fewer at the end. They are
/// copied out and back, since the segments may be memory that others look at meanwhile.
pub fn transform(segs: &[Seg], scratch: &mut [u8], mut change: impl FnMut(&mut [u8])) {
    let total: u64 = segs.iter().map(|s| s.len as u64).sum();
    let (mut at, mut part) = (0, Vec::new());
    while at < total {
        let len = (total - at).min(scratch.len() as u64);
        part.clear();
        cut(segs, at, len, &mut part);
        let piece = scratch.get_mut(..len as usize).unwrap_or_default();
        gather_into(&part, piece);
        change(piece);
        scatter(piece, &part);
        at += len;
    }
}

/// Copies the bytes of the segments into `data`, as far as it goes.
pub fn gather_into(segs: &[Seg], data: &mut [u8]) {
    let mut rest = data;
    for seg in segs {
        let (here, after) = rest.split_at_mut(seg.len.min(rest.len()));
        // SAFETY: `here` is at most seg.len long; the segment's bytes are mapped by the promise of its maker.
        unsafe { std::ptr::copy(seg.ptr.cast_const(), here.as_mut_ptr(), here.len()) };
        rest = after;
    }
}

/// The bytes of the segments, copied.
pub fn gather(segs: &[Seg]) -> Vec<u8> {
    let mut data: Vec<u8> = Vec::with_capacity(segs.iter().map(|s| s.len).sum());
    for seg in segs {
        // SAFETY: the segment's bytes are mapped by the promise of its maker; `data` was just given room for all of them.
        unsafe {
            std::ptr::copy_nonoverlapping(seg.ptr.cast_const(), data.as_mut_ptr().wrapping_add(data.len()), seg.len);
            data.set_len(data.len() + seg.len);
        }
    }
    data
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn cuts_and_copies() {
        let mut buf = AlignedBuf::with(&[1, 2, 3, 4, 5, 6, 7, 8], 16).unwrap();
        assert_eq!((buf.bytes().as_ptr() as usize % ALIGN, buf.len()), (0, 16));
        let segs = [buf.seg(0, 3), buf.seg(3, 3), buf.seg(6, 100)];
        let mut part = Vec::new();
        cut(&segs, 2, 5, &mut part);
        assert_eq!(part.iter().map(|s| s.len).collect::<Vec<_>>(), [1, 3, 1]);
        scatter(&[9, 9], &part);
        fill_zero(&part[2..]);
        assert_eq!(buf.bytes_mut()[..8], [1, 2, 9, 9, 5, 6, 0, 8]);
        let (mut pieces, mut scratch) = (Vec::new(), [0; 3]);
        transform(&segs[..2], &mut scratch, |piece| {
            pieces.push(piece.to_vec());
            piece.iter_mut().for_each(|b| *b += 1);
        });
        assert_eq!(pieces, [[1, 2, 9], [9, 5, 6]]);
        transform(&segs, &mut [0; 5], |piece| pieces.push(piece.to_vec()));
        assert_eq!(pieces[2..4], [vec![2, 3, 10, 10, 6], vec![7, 0, 8, 0, 0]]);
        let mut copy = [0; 4];
        gather_into(&segs, &mut copy);
        assert_eq!(copy, [2, 3, 10, 10]);
    }
}
