// SPDX-License-Identifier: Apache-2.0
//! Which pages a guest wrote: by a bitmap for each slot, which with manual protection is read and reset in two calls, and by
//! a ring for each vCPU, whose cost goes with the pages written and not with the size of memory.
//!
//! Slots are logged by their flag ([`crate::Slot::log`]). A VM has the one or the other: the ring is chosen before it has
//! vCPUs.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};

use kvm_bindings::{
    KVM_CAP_DIRTY_LOG_RING, KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2,
    KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE, KVM_DIRTY_LOG_PAGE_OFFSET, kvm_clear_dirty_log, kvm_dirty_gfn, kvm_dirty_log,
    kvm_enable_cap,
};
use vmm_sys_util::ioctl::{ioctl, ioctl_with_ref};
use vmm_sys_util::{ioctl_io_nr, ioctl_iow_nr, ioctl_iowr_nr};

use crate::{KvmError, Vm};

const KVMIO: u32 = 0xae;
ioctl_iow_nr!(KVM_GET_DIRTY_LOG, KVMIO, 0x42, kvm_dirty_log);
ioctl_iowr_nr!(KVM_CLEAR_DIRTY_LOG, KVMIO, 0xc0, kvm_clear_dirty_log);
ioctl_io_nr!(KVM_RESET_DIRTY_RINGS, KVMIO, 0xc7);

/// The page that an entry is about was written.
const DIRTY: u32 = 1;
/// The monitor has seen the entry.
const RESET: u32 = 2;
const PAGE: usize = 4096;

/// Words of the bitmap of a slot of `bytes`.
#[must_use]
pub const fn bitmap_words(bytes: u64) -> usize {
    bytes.div_ceil(PAGE as u64 * 64) as usize
}

fn failed(call: &'static str) -> KvmError {
    KvmError::Call { call, source: io::Error::last_os_error() }
}

impl Vm {
    /// From now on reading a bitmap resets nothing: [`Vm::clear_dirty`] does, for as few pages at a time as the monitor likes.
    /// `false` where KVM can't.
    pub fn manual_dirty_protect(&self) -> bool {
        let cap = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2;
        self.capability(cap) & KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE as i32 != 0
            && self.enable(cap, KVM_DIRTY_LOG_MANUAL_PROTECT_ENABLE.into())
    }

    /// Reads which pages of slot `number`, which has `bytes`, were written since they were last reset, one bit each; unless
    /// protection is manual it resets them, too.
    ///
    /// # Safety
    /// The slot has no more than `bytes`: the kernel writes a bit for each page that it has.
    ///
    /// # Errors
    /// [`KvmError::Call`]; `EINVAL` for a bitmap that is too short.
    pub unsafe fn dirty_bitmap(&self, number: u32, bytes: u64, bitmap: &mut [u64]) -> Result<(), KvmError> {
        if bitmap.len() < bitmap_words(bytes) {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(KvmError::Call { call: "KVM_GET_DIRTY_LOG", source });
        }
        let mut log = kvm_dirty_log { slot: number, ..Default::default() };
        log.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
        // SAFETY: the kernel writes a bit for each page of the slot, for which the bitmap has room, as checked above for
        // the size that the caller promises.
        if unsafe { ioctl_with_ref(self, KVM_GET_DIRTY_LOG(), &log) } < 0 {
            return Err(failed("KVM_GET_DIRTY_LOG"));
        }
        Ok(())
    }

    /// Resets the pages of slot `number` that are set in `bitmap`, which starts at its page `first`, a multiple of 64, and is
    /// about `pages`: a multiple of 64, or all up to the slot's end.
    ///
    /// # Errors
    /// [`KvmError::Call`]; `EINVAL` for pages that are not there or a bitmap that is too short.
    pub fn clear_dirty(&self, number: u32, first: u64, pages: u32, bitmap: &[u64]) -> Result<(), KvmError> {
        if bitmap.len() < pages.div_ceil(64) as usize {
            let source = io::Error::from_raw_os_error(libc::EINVAL);
            return Err(KvmError::Call { call: "KVM_CLEAR_DIRTY_LOG", source });
        }
        let mut log = kvm_clear_dirty_log { slot: number, num_pages: pages, first_page: first, ..Default::default() };
        log.__bindgen_anon_1.dirty_bitmap = bitmap.as_ptr().cast_mut().cast();
        // SAFETY: the kernel reads a bit for each of `pages`, and writes nothing.
        if unsafe { ioctl_with_ref(self, KVM_CLEAR_DIRTY_LOG(), &log) } < 0 {
            return Err(failed("KVM_CLEAR_DIRTY_LOG"));
        }
        Ok(())
    }

    /// Has each vCPU that is made from now on note its writes in a ring of `bytes`, a power of two; there are no bitmaps
    /// then. `false` where KVM can't.
    pub fn dirty_ring(&self, bytes: u32) -> bool {
        [KVM_CAP_DIRTY_LOG_RING_ACQ_REL, KVM_CAP_DIRTY_LOG_RING].into_iter().any(|cap| {
            let most = u32::try_from(self.capability(cap)).unwrap_or(0);
            bytes <= most && self.enable(cap, bytes.into())
        })
    }

    /// Write-protects again what [`DirtyRing::harvest`] took, of all vCPUs; gives how many pages.
    ///
    /// # Errors
    /// [`KvmError::Call`] when there are no rings.
    pub fn reset_dirty_rings(&self) -> Result<u32, KvmError> {
        // SAFETY: the call takes no argument.
        let count = unsafe { ioctl(self, KVM_RESET_DIRTY_RINGS()) };
        u32::try_from(count).map_err(|_| failed("KVM_RESET_DIRTY_RINGS"))
    }

    fn enable(&self, cap: u32, argument: u64) -> bool {
        let mut request = kvm_enable_cap { cap, ..Default::default() };
        request.args[0] = argument;
        self.enable_cap(&request)
    }
}

/// The ring of one vCPU. Whoever has it is the only one to take from it.
pub struct DirtyRing {
    entries: *mut kvm_dirty_gfn,
    count: usize,
    next: usize,
}

// SAFETY: the mapping has no thread affinity; exclusive access is the &mut self of `harvest`.
unsafe impl Send for DirtyRing {}

impl DirtyRing {
    /// The ring of `vcpu`, whose VM was told of `bytes`.
    pub(crate) fn map(vcpu: &impl AsRawFd, bytes: u32) -> io::Result<Self> {
        let offset = libc::off_t::from(KVM_DIRTY_LOG_PAGE_OFFSET) * PAGE as libc::off_t;
        let (prot, len) = (libc::PROT_READ | libc::PROT_WRITE, bytes as usize);
        // SAFETY: a fresh shared mapping at an address the kernel picks.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, vcpu.as_raw_fd(), offset) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { entries: at.cast(), count: len / size_of::<kvm_dirty_gfn>(), next: 0 })
    }

    /// Takes all entries there are, each the number of a slot (and of its address space, from bit 16 on) and of a page in it;
    /// gives how many. A page is reported again only after [`Vm::reset_dirty_rings`].
    pub fn harvest(&mut self, mut each: impl FnMut(u32, u64)) -> usize {
        let mut taken = 0;
        while taken < self.count {
            // SAFETY: next < count, so the entry is inside the mapping, which lives as long as self; flags are shared with
            // the kernel, so they are read and written as an atomic.
            let (flags, entry) = unsafe {
                let entry = self.entries.add(self.next);
                (&*(&raw const (*entry).flags).cast::<AtomicU32>(), entry)
            };
            // The kernel sets the flag with release order once the rest is there.
            if flags.load(Ordering::Acquire) & (DIRTY | RESET) != DIRTY {
                break;
            }
            // SAFETY: as above; the kernel leaves a dirty entry alone until it is reset.
            let (slot, page) = unsafe { ((*entry).slot, (*entry).offset) };
            each(slot, page);
            flags.store(RESET, Ordering::Release);
            self.next = (self.next + 1) % self.count;
            taken += 1;
        }
        taken
    }
}

impl Drop for DirtyRing {
    fn drop(&mut self) {
        // SAFETY: from `mmap` in `map`, of that length, and this value is its only owner.
        unsafe { libc::munmap(self.entries.cast(), self.count * size_of::<kvm_dirty_gfn>()) };
    }
}
