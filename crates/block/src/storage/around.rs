// SPDX-License-Identifier: Apache-2.0
//! Writes around the page cache: with `cache=writeback`, a large write that the guest is about to flush anyway goes to the
//! medium directly. Decides which; called by `file` on the worker thread.
//!
//! Why: the guest has just written these bytes from a page cache of its own. A second copy here costs a page, its zeroing and
//! the copy, and the write-back that a flush then waits for does the same transfer later. Why not always: without a flush the
//! page cache answers at the speed of memory and writes when there is time, and small writes are cheaper there. So the
//! habit decides: [`Around::now`] says yes while flushes come after little data. Cache and direct I/O on one file agree:
//! the kernel writes back and drops the pages of a range before a direct write to it. Nothing else of this disk is in flight
//! meanwhile. `aio=io_uring` and `aio=threads` are the way without this.
//!
//! Only on file systems that keep no checksum of the data: a guest may change a page while it is being written, and a
//! checksum taken before would then condemn the whole block.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

use base::Seg;

use super::patience::Patience;
use super::{bounce, sys};

/// The smallest write that goes around, bytes.
const LARGE: u64 = 64 << 10;
/// Address, offset and length of such a write are multiples of a page: no page is half in the cache.
const PAGE: u64 = 4096;
/// So many bytes between two flushes are a habit of flushing, and no burst for the cache to take.
const LITTLE: u64 = 32 << 20;

/// When to write around the page cache, and through what.
#[derive(Debug)]
pub struct Around {
    /// The same file, opened with `O_DIRECT`.
    pub file: File,
    /// How quick the medium is.
    pub patience: Patience,
    /// Writes that went around.
    pub taken: u64,
    /// Bytes written since the last flush.
    since: u64,
    /// What `since` was at the last flush; starts too big, so that the first flush has to come before the first such write.
    before: u64,
}

impl Around {
    /// For a regular file that is open as `file`; `None` where its file system has no direct I/O or is not known to bear it.
    pub fn new(file: &File) -> Option<Box<Self>> {
        if !sys::keeps_no_checksums(file) {
            return None;
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let file = OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
        Some(Box::new(Self { file, patience: Patience::default(), taken: 0, since: 0, before: u64::MAX }))
    }

    /// Books a write of `len` bytes.
    pub fn wrote(&mut self, len: u64) {
        self.since = self.since.saturating_add(len);
    }

    /// Books a flush.
    pub fn flushed(&mut self) {
        // Two flushes in a row are one: file systems flush before and after the record that commits a transaction.
        if self.since > 0 {
            self.before = std::mem::take(&mut self.since);
        }
    }

    /// Whether a write goes around the cache now.
    pub fn now(&mut self, segs: &[Seg], offset: u64, len: u64) -> bool {
        len >= LARGE
            && bounce::aligned(segs, offset, PAGE)
            && self.before <= LITTLE
            && self.since <= LITTLE
            && self.patience.try_now()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The policy alone, on a file that is never written.
    fn around() -> Around {
        let file = tempfile::tempfile().unwrap();
        Around { file, patience: Patience::default(), taken: 0, since: 0, before: u64::MAX }
    }

    fn wants(around: &mut Around, offset: u64, len: u64) -> bool {
        let seg = Seg { ptr: PAGE as usize as *mut u8, len: len as usize };
        let now = around.now(&[seg], offset, len);
        around.wrote(len);
        now
    }

    #[test]
    fn only_what_a_flush_will_wait_for_goes_around() {
        let mut a = around();
        assert!(!wants(&mut a, 0, LARGE), "nobody has flushed yet");
        a.flushed();
        a.flushed();
        assert!(wants(&mut a, 0, LARGE));
        assert!(!wants(&mut a, 0, LARGE - PAGE), "too small");
        assert!(!wants(&mut a, 512, LARGE), "half a page");
        assert!(!wants(&mut a, 0, LARGE + 512), "half a page at the end");
        a.wrote(LITTLE);
        assert!(!wants(&mut a, 0, LARGE), "a burst is the cache's to take");
        a.flushed();
        assert!(!wants(&mut a, 0, LARGE), "and so may the next one be");
        a.flushed();
        assert!(wants(&mut a, 0, LARGE));
    }
}
