// SPDX-License-Identifier: Apache-2.0
//! One request as the guest described it: segments of guest memory to read, then segments to write.
//!
//! A `Chain` belongs to one device thread, which hands the same one to each `Queue::pop`, so that nothing is allocated per
//! request once the longest chain was seen. Segments were checked against guest memory; the bytes in them may change at any
//! time, so they are only ever copied.

use base::Seg;
use mem::GuestRam;

/// A popped descriptor chain. Its segments stay mapped while the chain lives or is not popped into again.
#[derive(Debug, Default)]
pub struct Chain {
    pub(super) head: u16,
    pub(super) segs: Vec<Seg>,
    pub(super) readable: usize,
    pub(super) readable_len: u32,
    pub(super) writable_len: u32,
    /// Keeps the memory behind `segs` mapped.
    pub(super) ram: Option<GuestRam>,
}

impl Chain {
    /// An empty chain to pop into.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The head descriptor's index, by which the chain is given back.
    #[must_use]
    pub const fn head(&self) -> u16 {
        self.head
    }

    /// Segments for the device to read, in order.
    #[must_use]
    pub fn readable(&self) -> &[Seg] {
        self.segs.get(..self.readable).unwrap_or_default()
    }

    /// Segments for the device to write, in order.
    #[must_use]
    pub fn writable(&self) -> &[Seg] {
        self.segs.get(self.readable..).unwrap_or_default()
    }

    /// Bytes in all readable segments.
    #[must_use]
    pub const fn readable_len(&self) -> u32 {
        self.readable_len
    }

    /// Bytes in all writable segments.
    #[must_use]
    pub const fn writable_len(&self) -> u32 {
        self.writable_len
    }

    /// Copies readable bytes from byte `offset` on into `out`; gives the number copied, less at the end of the chain.
    pub fn read_at(&self, offset: u32, out: &mut [u8]) -> usize {
        copy_out(self.readable(), offset, out)
    }

    /// Copies `data` into the writable bytes from byte `offset` on; gives the number copied, less at the end of the chain.
    pub fn write_at(&self, offset: u32, data: &[u8]) -> usize {
        copy_in(self.writable(), offset, data)
    }
}

/// Copies bytes of `segs` from byte `offset` on into `out`; gives the number copied, less at the end. The segments come
/// from a popped chain whose memory is still mapped.
pub(crate) fn copy_out(segs: &[Seg], offset: u32, out: &mut [u8]) -> usize {
    let mut done = 0;
    for_each_run(segs, offset, out.len(), |run| {
        // SAFETY: the run lies in a segment of guest memory, which its chain or queue keeps mapped, and is no longer than
        // what is left of `out`. Guest memory and `out` never overlap. The guest may race; the bytes are plain.
        unsafe { std::ptr::copy_nonoverlapping(run.ptr, out.as_mut_ptr().add(done), run.len) };
        done += run.len;
    });
    done
}

/// Copies `data` into the bytes of `segs` from byte `offset` on; otherwise as [`copy_out`].
pub(crate) fn copy_in(segs: &[Seg], offset: u32, data: &[u8]) -> usize {
    let mut done = 0;
    for_each_run(segs, offset, data.len(), |run| {
        // SAFETY: as in `copy_out`, with the roles of source and destination swapped; the segment came from RAM, which is
        // mapped writable.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr().add(done), run.ptr, run.len) };
        done += run.len;
    });
    done
}

/// Calls `each` with the runs that make up bytes `offset..offset + len` of `segs`, clipped to what is there.
fn for_each_run(segs: &[Seg], offset: u32, len: usize, mut each: impl FnMut(Seg)) {
    let (mut skip, mut left) = (offset as usize, len);
    for seg in segs {
        if left == 0 {
            return;
        }
        if skip >= seg.len {
            skip -= seg.len;
            continue;
        }
        let run = Seg { ptr: seg.ptr.wrapping_add(skip), len: (seg.len - skip).min(left) };
        skip = 0;
        left -= run.len;
        each(run);
    }
}

/// Appends to `out` the part of `segs` from byte `skip` on, `take` bytes long; gives the bytes appended, less at the end.
pub fn window(segs: &[Seg], skip: u32, take: u32, out: &mut Vec<Seg>) -> u32 {
    let mut got = 0;
    for_each_run(segs, skip, take as usize, |run| {
        got += run.len;
        out.push(run);
    });
    // A chain is shorter than 2^32 bytes, and `take` is a u32 in any case.
    got as u32
}
