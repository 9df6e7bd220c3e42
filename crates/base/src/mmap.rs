// SPDX-License-Identifier: Apache-2.0
//! A private or shared mapping that unmaps itself. Called by `kvm` (vCPU run pages live in kvm-ioctls) and by tests.

use std::io;
use std::os::fd::AsRawFd;

/// A mapping owned by this value.
#[derive(Debug)]
pub struct Mmap {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and has no thread affinity.
unsafe impl Send for Mmap {}
// SAFETY: all access goes through raw pointers; nothing here hands out references.
unsafe impl Sync for Mmap {}

impl Mmap {
    /// Maps `len` bytes of anonymous, private, zero memory.
    ///
    /// # Errors
    /// What `mmap` says, `EINVAL` for length 0 included.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1, 0)
    }

    /// Maps the first `len` bytes of `file`, shared, readable and writable.
    ///
    /// # Errors
    /// What `mmap` says.
    pub fn shared(file: &impl AsRawFd, len: usize) -> io::Result<Self> {
        Self::shared_at(file, 0, len)
    }

    /// Maps `len` bytes of `file` from `offset` (a multiple of the page size) on, shared, readable and writable.
    ///
    /// # Errors
    /// What `mmap` says.
    pub fn shared_at(file: &impl AsRawFd, offset: libc::off_t, len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_SHARED, file.as_raw_fd(), offset)
    }

    fn map(len: usize, flags: libc::c_int, fd: libc::c_int, offset: libc::off_t) -> io::Result<Self> {
        // SAFETY: no address hint is given, so the kernel picks free space and no existing mapping is touched.
        let ptr = unsafe {
            libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, offset)
        };
        if ptr == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { ptr: ptr.cast(), len })
    }

    /// First byte of the mapping; valid for `len()` bytes while this value lives.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the mapping is empty; it never is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mmap {
    fn drop(&mut self) {
        // SAFETY: ptr and len came from mmap in `map` and this value is the only owner.
        unsafe { libc::munmap(self.ptr.cast(), self.len) };
    }
}
