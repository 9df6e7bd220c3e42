// SPDX-License-Identifier: Apache-2.0
//! The memory of one request between socket and disk: aligned for direct I/O, kept from request to request while it is
//! small. Owned by one connection's thread.

use base::Seg;

/// Direct I/O wants no more than this on any device.
const ALIGN: usize = 4096;
/// A buffer above this goes back to the host after its request.
const KEEP: usize = 1 << 20;

/// A buffer that grows on demand.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Makes it `len` bytes long; `false` when the host has no memory. The content is whatever it was.
    #[must_use]
    pub fn fit(&mut self, len: usize) -> bool {
        let needed = len + ALIGN;
        if self.bytes.len() < needed {
            self.bytes = Vec::new();
            if self.bytes.try_reserve_exact(needed).is_err() {
                self.len = 0;
                return false;
            }
            self.bytes.resize(needed, 0);
            self.start = self.bytes.as_ptr().align_offset(ALIGN);
        }
        self.len = len;
        true
    }

    /// The request is over.
    pub fn release(&mut self) {
        if self.bytes.len() > KEEP + ALIGN {
            self.bytes = Vec::new();
        }
        self.len = 0;
    }

    /// The bytes; only meaningful while no request uses them.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(self.start..self.start + self.len).unwrap_or_default()
    }

    /// The bytes, to fill them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.get_mut(self.start..self.start + self.len).unwrap_or_default()
    }

    /// The bytes as a segment for the disk. They stay where they are until [`Buffer::fit`] or [`Buffer::release`].
    pub fn seg(&mut self) -> Seg {
        Seg { ptr: self.bytes_mut().as_mut_ptr(), len: self.len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_large_ones_go_back() {
        let mut b = Buffer::default();
        assert!(b.bytes().is_empty());
        for len in [0, 1, 4096, 3 << 20] {
            assert!(b.fit(len));
            assert_eq!((b.bytes().len(), b.seg().ptr as usize % ALIGN), (len, 0));
        }
        b.release();
        assert!(b.bytes.is_empty());
        assert!(!b.fit(isize::MAX as usize - 2 * ALIGN));
    }
}
