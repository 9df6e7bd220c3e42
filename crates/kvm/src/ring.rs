// SPDX-License-Identifier: Apache-2.0
//! KVM's ring of coalesced writes: byte writes to chosen ports that the kernel queues instead of leaving to the monitor.
//!
//! One ring per VM. The serial port drains it, under its own lock, before it looks at any register.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use kvm_bindings::{kvm_coalesced_mmio, kvm_coalesced_mmio_ring};

/// `KVM_COALESCED_MMIO_PAGE_OFFSET` on x86, in pages of the vCPU's mapping.
const RING_PAGE: libc::off_t = 2;
const PAGE: usize = 4096;
/// Entries that fit in the page after the two indices (`KVM_COALESCED_MMIO_MAX`).
const ENTRIES: u32 =
    ((PAGE - std::mem::size_of::<kvm_coalesced_mmio_ring>()) / std::mem::size_of::<kvm_coalesced_mmio>()) as u32;

/// The mapped ring. Not `Sync`: whoever drains it holds the lock of the device it feeds.
pub struct CoalescedRing {
    page: *mut kvm_coalesced_mmio_ring,
}

// SAFETY: the mapping has no thread affinity; exclusive access is the &mut self of `pop`.
unsafe impl Send for CoalescedRing {}

impl CoalescedRing {
    pub(crate) fn map(vcpu: &impl AsRawFd) -> Option<Self> {
        // SAFETY: a fresh shared mapping of one page at an address the kernel picks.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                vcpu.as_raw_fd(),
                RING_PAGE * PAGE as libc::off_t,
            )
        };
        (page != libc::MAP_FAILED).then(|| Self { page: page.cast() })
    }

    /// Takes the oldest queued write: its port (or address) and the byte.
    pub fn pop(&mut self) -> Option<(u64, u8)> {
        // SAFETY: page is mapped while self lives; the kernel writes `last` with release order after the entry, only we
        // write `first`; both are aligned u32 shared with the kernel, so they are read as atomics.
        let (first, last) = unsafe {
            (
                &*(&raw const (*self.page).first).cast::<AtomicU32>(),
                &*(&raw const (*self.page).last).cast::<AtomicU32>(),
            )
        };
        let at = first.load(Ordering::Relaxed);
        if at == last.load(Ordering::Acquire) || at >= ENTRIES {
            return None;
        }
        // SAFETY: at < ENTRIES, so the entry lies inside the page; the kernel does not touch it until `first` moves on.
        let entry = unsafe { (*self.page).coalesced_mmio.as_ptr().add(at as usize).read_volatile() };
        first.store((at + 1) % ENTRIES, Ordering::Release);
        Some((entry.phys_addr, entry.data[0]))
    }
}

impl Drop for CoalescedRing {
    fn drop(&mut self) {
        // SAFETY: page came from mmap in `map` and this value is its only owner.
        unsafe { libc::munmap(self.page.cast(), PAGE) };
    }
}
