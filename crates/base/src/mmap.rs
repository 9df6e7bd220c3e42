// SPDX-License-Identifier: Apache-2.0
//! A private or shared mapping that unmaps itself. `mem` makes guest memory of it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

/// Advice that changes nothing of what memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Advice {
    /// Huge pages wherever they fit.
    HugePages = libc::MADV_HUGEPAGE,
    /// Small pages alone.
    NoHugePages = libc::MADV_NOHUGEPAGE,
    /// Pages that are alike may become one (KSM).
    Mergeable = libc::MADV_MERGEABLE,
}

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

    /// As [`Mmap::anonymous`], at an address that is a multiple of `align`, a power of two of at least a page. A guest's
    /// memory must lie like this for KVM to map it in huge pages: host and guest addresses have to agree below the page.
    ///
    /// # Errors
    /// What `mmap` says; `EINVAL` for lengths that overflow.
    pub fn anonymous_aligned(len: usize, align: usize) -> io::Result<Self> {
        let wide = len.checked_add(align).ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        let mut whole = Self::anonymous(wide)?;
        let start = whole.ptr as usize;
        let head = start.next_multiple_of(align) - start;
        // SAFETY: head <= align, so both cuts lie inside the mapping, which nobody has seen yet; what stays is exactly
        // [head, head + len), and `whole` is told so before it can unmap anything.
        unsafe {
            if head > 0 {
                libc::munmap(whole.ptr.cast(), head);
            }
            if align > head {
                libc::munmap(whole.ptr.add(head + len).cast(), align - head);
            }
            whole.ptr = whole.ptr.add(head);
        }
        whole.len = len;
        Ok(whole)
    }

    /// Takes `len` bytes of addresses, from a multiple of `align` (as in [`Mmap::anonymous_aligned`]) on, with nothing behind
    /// them: for [`Mmap::put`]. Until then an access is a fault.
    ///
    /// # Errors
    /// As [`Mmap::anonymous_aligned`].
    pub fn reserved(len: usize, align: usize) -> io::Result<Self> {
        let room = Self::anonymous_aligned(len, align)?;
        // SAFETY: the range is this mapping, which nobody has seen.
        let rc = unsafe { libc::mprotect(room.ptr.cast(), room.len, libc::PROT_NONE) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(room) }
    }

    /// Puts memory behind `len` bytes from `at` on, in place of what was there: anonymous, or `file` from an offset on, and
    /// with further flags of `mmap` (shared or private, huge pages). To who looks at it meanwhile it is as if it were written.
    ///
    /// # Errors
    /// What `mmap` says, `EINVAL` for what is not in this mapping. What was there may be gone.
    pub fn put(&self, at: usize, len: usize, file: Option<(RawFd, u64)>, flags: libc::c_int) -> io::Result<()> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(invalid());
        }
        let (fd, offset, kind) = match file {
            Some((fd, offset)) => (fd, libc::off_t::try_from(offset).map_err(|_| invalid())?, 0),
            None => (-1, 0, libc::MAP_ANONYMOUS),
        };
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is inside this mapping, into which nothing here hands out references: all access is through raw
        // pointers, by volatile reads and writes that suffer what changes beside them.
        let got = unsafe { libc::mmap(self.ptr.add(at).cast(), len, prot, flags | kind | libc::MAP_FIXED, fd, offset) };
        if got == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Gives the kernel advice on all of it, such as `MADV_MERGEABLE`.
    ///
    /// # Errors
    /// What `madvise` says.
    pub fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is this mapping; none of these changes its contents.
        let rc = unsafe { libc::madvise(self.ptr.cast(), self.len, advice as libc::c_int) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Has all of it come from one node of the host's memory; what exists already stays where it is.
    ///
    /// # Errors
    /// What `mbind` says, `EINVAL` for a node that is not there.
    pub fn bind_to_node(&self, node: u32) -> io::Result<()> {
        self.bind_part_to_node(0, self.len, node)
    }

    /// The same for `len` bytes from `at` on, whole pages.
    ///
    /// # Errors
    /// As there, and `EINVAL` for what is not in this mapping.
    pub fn bind_part_to_node(&self, at: usize, len: usize, node: u32) -> io::Result<()> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(invalid());
        }
        let mut mask = [0u64; 16];
        *mask.get_mut(node as usize / 64).ok_or_else(invalid)? = 1 << (node % 64);
        let bits = mask.len() * 64;
        // SAFETY: the range is inside this mapping; the mask is as long as said.
        let rc =
            unsafe { libc::syscall(libc::SYS_mbind, self.ptr.add(at), len, libc::MPOL_BIND, mask.as_ptr(), bits, 0) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Makes all of it exist, writable, without a change of contents.
    ///
    /// # Errors
    /// What `madvise` says, `EINVAL` before Linux 5.14.
    pub fn populate(&self) -> io::Result<()> {
        // SAFETY: the range is this mapping; populating does not change its contents.
        let rc = unsafe { libc::madvise(self.ptr.cast(), self.len, libc::MADV_POPULATE_WRITE) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Makes `len` bytes from `at` on exist, as [`Mmap::populate`] does.
    ///
    /// # Errors
    /// As there, and `EINVAL` for what is not in this mapping.
    pub fn populate_part(&self, at: usize, len: usize) -> io::Result<()> {
        self.on_part(at, len, libc::MADV_POPULATE_WRITE)
    }

    /// Gives `len` bytes from `at` on back to the host, and to its file where the mapping is `shared`: whoever touches them
    /// next finds what is new there, which is zeroes, or what the file holds where the mapping is private.
    ///
    /// # Errors
    /// What `madvise` says, for a file without holes too; `EINVAL` for what is not in this mapping.
    pub fn discard(&self, at: usize, len: usize, shared: bool) -> io::Result<()> {
        self.on_part(at, len, if shared { libc::MADV_REMOVE } else { libc::MADV_DONTNEED })
    }

    fn on_part(&self, at: usize, len: usize, advice: libc::c_int) -> io::Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // SAFETY: the range is inside this mapping. Nobody holds a reference into it: all access goes through raw pointers
        // to plain bytes, which may change at any time.
        let rc = unsafe { libc::madvise(self.ptr.add(at).cast(), len, advice) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Asks for transparent huge pages. A hint: a host without them leaves it at small pages.
    pub fn advise_huge_pages(&self) {
        // SAFETY: the range is this mapping; the advice does not change its contents.
        unsafe { libc::madvise(self.ptr.cast(), self.len, libc::MADV_HUGEPAGE) };
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
        let ptr =
            unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, offset) };
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn aligned_mappings_are_aligned_whole_and_given_back() {
        let align = 2 << 20;
        for len in [4096, align, 3 * align + 4096] {
            let map = Mmap::anonymous_aligned(len, align).unwrap();
            assert_eq!((map.as_ptr() as usize % align, map.len()), (0, len));
            // SAFETY: both bytes lie inside the mapping, which is readable and writable.
            unsafe {
                map.as_ptr().write(1);
                map.as_ptr().add(len - 1).write(2);
                assert_eq!((map.as_ptr().read(), map.as_ptr().add(len - 1).read()), (1, 2));
            }
        }
        assert!(Mmap::anonymous_aligned(usize::MAX, align).is_err());
    }

    #[test]
    fn what_is_discarded_is_zero_again_and_its_neighbours_stay() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x3000).unwrap();
        for (map, shared) in [(Mmap::anonymous(0x3000).unwrap(), false), (Mmap::shared(&file, 0x3000).unwrap(), true)] {
            // SAFETY: all of it lies inside the mapping, which is readable and writable.
            let bytes = || unsafe { [0, 0x1000, 0x1fff, 0x2000].map(|at| map.as_ptr().add(at).read()) };
            // SAFETY: as above.
            unsafe { map.as_ptr().write_bytes(7, 0x3000) };
            match map.discard(0x1000, 0x1000, shared) {
                Ok(()) => assert_eq!(bytes(), [7, 0, 0, 7]),
                Err(e) => eprintln!("skipped: the file system makes no holes, {e}"),
            }
            assert!(map.discard(0x2000, 0x2000, shared).is_err(), "past its end");
            match map.populate_part(0x1000, 0x2000) {
                Ok(()) => assert_eq!(bytes()[0], 7),
                Err(e) => eprintln!("skipped: {e}"),
            }
        }
    }
}
