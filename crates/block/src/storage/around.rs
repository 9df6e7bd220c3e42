// SPDX-License-Identifier: Apache-2.0
//! Writes and reads around the page cache: with `cache=writeback`, a large write that the guest is about to flush anyway goes
//! to the medium directly, and what it wrote is first read from there. Decides which; called by `file` on the worker thread.
//!
//! Why: the guest has just written these bytes from a page cache of its own. A second copy here costs a page, its zeroing and
//! the copy, and the write-back that a flush then waits for does the same transfer later. Why not always: without a flush the
//! page cache answers at the speed of memory and writes when there is time, and small writes are cheaper there. So the
//! habit decides: [`Around::now`] says yes while flushes come after little data. Cache and direct I/O on one file agree:
//! the kernel writes back and drops the pages of a range before a direct write to it. Nothing else of this disk is in flight
//! meanwhile. `aio=io_uring` and `aio=threads` are the way without this.
//!
//!
//! What was written so is not in the cache, and a read through the cache would copy it twice: once into a page, once out. So
//! its first large read goes around, too; a second one says that it is worth a page. Where a page turns out to be no quicker
//! than the medium (a disk in memory), nothing is.
//!
//! Only on file systems that keep no checksum of the data: a guest may change a page while it is being written, and a
//! checksum taken before would then condemn the whole block.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use base::Seg;

use super::patience::Patience;
use super::{bounce, sys};

/// The smallest write or read that goes around, bytes; also the pieces of the file of which is known whether they did.
const LARGE: u64 = 64 << 10;
/// So many pieces are remembered, 4 GiB; past that it starts anew.
const MOST_PIECES: usize = 1 << 16;
/// A page is worth its memory where the medium takes more than so many quarters of the time.
const QUARTERS: u64 = 6;
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
    /// How quick it is to read.
    pub reads: Patience,
    /// Writes that went around.
    pub taken: u64,
    /// Reads that went around.
    pub read: u64,
    /// Pieces that were written around the cache and not read since.
    uncached: HashSet<u64>,
    /// Nanoseconds that the cache took for a piece, the last time it had one.
    hit: Option<u64>,
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
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).ok()?;
        Some(Box::new(Self::through(file)))
    }

    fn through(file: File) -> Self {
        Self {
            file,
            patience: Patience::default(),
            reads: Patience::default(),
            taken: 0,
            read: 0,
            uncached: HashSet::new(),
            hit: None,
            since: 0,
            before: u64::MAX,
        }
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

    /// Books that `len` bytes from `offset` on were written around the cache, or through it.
    pub fn left(&mut self, offset: u64, len: u64, uncached: bool) {
        let end = offset.saturating_add(len);
        if uncached {
            let whole = offset.div_ceil(LARGE)..end / LARGE;
            if self.uncached.len() as u64 + (end / LARGE).saturating_sub(whole.start) > MOST_PIECES as u64 {
                self.uncached.clear();
            }
            self.uncached.extend(whole);
        } else if !self.uncached.is_empty() {
            for piece in offset / LARGE..end.div_ceil(LARGE) {
                self.uncached.remove(&piece);
            }
        }
    }

    /// Whether a read goes around the cache now.
    pub fn reads_now(&mut self, segs: &[Seg], offset: u64, len: u64) -> bool {
        len >= LARGE
            && !self.uncached.is_empty()
            && bounce::aligned(segs, offset, PAGE)
            && (offset / LARGE..offset.saturating_add(len).div_ceil(LARGE)).all(|piece| self.uncached.contains(&piece))
            && self.reads.try_now()
    }

    /// Books such a read.
    pub fn was_read(&mut self, offset: u64, len: u64, took: Duration) {
        self.read += 1;
        let slower = |hit: u64| per_piece(took, len) * 4 > hit * QUARTERS;
        if self.hit.is_none_or(slower) {
            self.left(offset, len, false);
        }
    }

    /// Books that the cache had all `len` bytes of a read.
    pub fn hit(&mut self, len: u64, took: Duration) {
        self.hit = Some(per_piece(took, len));
    }

    /// Whether how long the cache takes for `len` bytes is worth a look.
    pub fn asks(&self, len: u64) -> bool {
        len >= LARGE && !self.uncached.is_empty()
    }
}

fn per_piece(took: Duration, len: u64) -> u64 {
    (took.as_nanos() * u128::from(LARGE) / u128::from(len.max(1))) as u64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The policy alone, on a file that is never written.
    fn around() -> Around {
        Around::through(tempfile::tempfile().unwrap())
    }

    fn wants(around: &mut Around, offset: u64, len: u64) -> bool {
        let seg = Seg { ptr: PAGE as usize as *mut u8, len: len as usize };
        let now = around.now(&[seg], offset, len);
        around.wrote(len);
        now
    }

    fn reads(around: &mut Around, offset: u64, len: u64) -> bool {
        around.reads_now(&[Seg { ptr: PAGE as usize as *mut u8, len: len as usize }], offset, len)
    }

    #[test]
    fn what_went_around_is_read_around_once() {
        let mut a = around();
        let slow = Duration::from_millis(1);
        assert!(!reads(&mut a, 0, LARGE), "nothing is known of it");
        a.left(PAGE, 4 * LARGE, true);
        assert!(!reads(&mut a, 0, LARGE), "a part of it may be in the cache");
        assert!(reads(&mut a, LARGE, 3 * LARGE) && reads(&mut a, LARGE + PAGE, LARGE));
        assert!(!reads(&mut a, 3 * LARGE, 2 * LARGE), "half of it is not known");
        assert!(!reads(&mut a, LARGE, LARGE - PAGE), "too small");
        assert!(!reads(&mut a, LARGE + 512, LARGE), "half a page");
        a.was_read(LARGE, LARGE, slow);
        assert!(!reads(&mut a, LARGE, LARGE), "the second time it is worth a page");
        a.left(2 * LARGE, 512, false);
        assert!(!reads(&mut a, 2 * LARGE, LARGE), "the cache has a part of it");
        assert!(reads(&mut a, 3 * LARGE, LARGE));
        // A medium as quick as the cache is read as often as anyone likes.
        a.hit(2 * LARGE, slow);
        a.was_read(3 * LARGE, LARGE, slow / 2);
        assert!(reads(&mut a, 3 * LARGE, LARGE));
        a.was_read(3 * LARGE, LARGE, slow);
        assert!(!reads(&mut a, 3 * LARGE, LARGE));
        for n in 0..2 * MOST_PIECES as u64 {
            a.left(n * LARGE, LARGE, true);
            assert!(a.uncached.len() <= MOST_PIECES);
        }
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
