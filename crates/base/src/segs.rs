// SPDX-License-Identifier: Apache-2.0
//! Borrowed I/O segments: where the bytes of a request live in this process, without saying whose they are.
//!
//! `virtio` makes them from guest memory, `block` hands them to the kernel. A `Seg` has the layout of `iovec`.

/// One contiguous run of bytes in this process that outlives the request it belongs to.
///
/// A `Seg` is plain data: making one is safe, following `ptr` is not. Whoever makes it promises that the memory stays
/// mapped until the request is finished; nobody may make a Rust reference to it, since a guest may write it at any time.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seg {
    /// First byte.
    pub ptr: *mut u8,
    /// Length in bytes.
    pub len: usize,
}

// SAFETY: a Seg is an address and a length; the maker's promise (memory mapped until the request ends) holds on every
// thread, and nobody forms references to the bytes.
unsafe impl Send for Seg {}
// SAFETY: as above: shared access only reads the address and the length.
unsafe impl Sync for Seg {}

/// Bytes in all of `segs`; saturates instead of wrapping.
#[must_use]
pub fn total_len(segs: &[Seg]) -> u64 {
    segs.iter().fold(0u64, |sum, s| sum.saturating_add(s.len as u64))
}
