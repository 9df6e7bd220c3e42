// SPDX-License-Identifier: Apache-2.0
//! An allocator that counts, so that a test can say how much memory a hostile image may cost. A test or fuzz target makes it
//! its `#[global_allocator]`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, counting.
#[derive(Clone, Copy, Debug)]
pub struct Counting;

impl Counting {
    /// Begins anew: what is in use now.
    #[must_use]
    pub fn mark() -> usize {
        let now = NOW.load(Ordering::Relaxed);
        PEAK.store(now, Ordering::Relaxed);
        now
    }

    /// The most that was in use at once since then, beyond what [`Counting::mark`] said.
    #[must_use]
    pub fn peak_since(mark: usize) -> usize {
        PEAK.load(Ordering::Relaxed).saturating_sub(mark)
    }
}

// SAFETY: passes everything on to the system's allocator as it is, and only counts beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller promises of `layout` what the system's allocator asks.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `ptr` came from `alloc` above with this `layout`, by the caller's promise; so from the system's allocator.
        unsafe { System.dealloc(ptr, layout) }
    }
}
