// SPDX-License-Identifier: Apache-2.0
//! The live split virtqueue: what a device thread does for every request, a few instructions each.
//!
//! Ring addresses were translated once, when the driver said it was ready; they stay good because guest memory is never
//! unmapped while a `GuestRam` clone lives and the queue holds one. One thread owns a queue at a time; the other side of
//! every access is the guest, so everything is read once, by volatile or atomic loads, and checked after it was read.

use std::sync::atomic::{AtomicU16, Ordering, fence};

use base::{Gpa, Hva, Seg};
use mem::GuestRam;

use super::{Chain, MAX_SIZE};
use crate::fault::GuestFault;

/// `VIRTQ_DESC_F_NEXT`.
const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`.
const WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`.
const INDIRECT: u16 = 4;
/// `VIRTQ_AVAIL_F_NO_INTERRUPT`.
const NO_INTERRUPT: u16 = 1;
/// `VIRTQ_USED_F_NO_NOTIFY`.
const NO_NOTIFY: u16 = 1;

/// Host addresses of the three rings.
pub(super) struct Rings {
    /// 16 bytes a descriptor.
    pub desc: *mut u8,
    /// flags, idx, one u16 an entry, used_event.
    pub avail: *mut u16,
    /// flags and idx in the first word, two words an element, avail_event in half a word.
    pub used: *mut u32,
}

/// A queue as the host's kernel takes it over: where its rings are in this process, and where it goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPlaces {
    /// Descriptor table.
    pub desc: Hva,
    /// Available ring.
    pub avail: Hva,
    /// Used ring.
    pub used: Hva,
    /// Entries.
    pub size: u16,
    /// Next available entry to take.
    pub next: u16,
}

/// One descriptor, as read.
struct Desc {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// One run of guest memory; see [`mem::GuestRam::regions`].
#[derive(Clone, Copy)]
struct Region {
    start: u64,
    len: u64,
    host: *mut u8,
}

/// The device's half of a live split virtqueue.
pub struct Queue {
    rings: Rings,
    mask: u16,
    size: u16,
    chain_limit: u16,
    /// Next available entry to take.
    next_avail: u16,
    /// The available index as last read; entries up to here may be taken without asking again.
    seen_avail: u16,
    next_used: u16,
    /// `next_used` when the driver was last told, or decided not to be.
    told_used: u16,
    in_flight: u16,
    event_idx: bool,
    indirect: bool,
    broken: bool,
    /// Heads that were popped and not given back, one bit each.
    busy: [u64; MAX_SIZE as usize / 64],
    regions: Box<[Region]>,
    ram: GuestRam,
}

// SAFETY: the pointers lead into guest memory, which `ram` keeps mapped and which has no thread affinity.
unsafe impl Send for Queue {}

impl Queue {
    /// A queue over `rings`, of `sizes.0` entries, where the device offered `sizes.1`.
    ///
    /// # Safety
    /// Each ring must lie in the memory of `ram`, wholly and aligned, for the given size, a power of two up to
    /// [`MAX_SIZE`]. [`super::QueueConfig::activate`] is the only caller and checks all of it.
    pub(super) unsafe fn from_rings(
        ram: &GuestRam,
        rings: Rings,
        sizes: (u16, u16),
        event_idx: bool,
        indirect: bool,
    ) -> Self {
        let regions = ram.regions().map(|(at, len, hva)| Region { start: at.0, len, host: hva.0 as *mut u8 }).collect();
        Self {
            rings,
            mask: sizes.0 - 1,
            size: sizes.0,
            chain_limit: sizes.1,
            next_avail: 0,
            seen_avail: 0,
            next_used: 0,
            told_used: 0,
            in_flight: 0,
            event_idx,
            indirect,
            broken: false,
            busy: [0; MAX_SIZE as usize / 64],
            regions,
            ram: ram.clone(),
        }
    }

    /// Goes on where a queue with these rings was left: `index` is its available and its used index. For a queue that
    /// has nothing in flight.
    pub fn resume_at(&mut self, index: u16) {
        (self.next_avail, self.seen_avail) = (index, index);
        (self.next_used, self.told_used) = (index, index);
    }

    /// What somebody else needs to serve this queue, who comes back with an index for [`Queue::resume_at`]. The memory stays
    /// mapped while this queue lives.
    #[must_use]
    pub fn places(&self) -> RingPlaces {
        RingPlaces {
            desc: Hva(self.rings.desc as u64),
            avail: Hva(self.rings.avail as u64),
            used: Hva(self.rings.used as u64),
            size: self.size,
            next: self.next_avail,
        }
    }

    /// Entries in the queue.
    #[must_use]
    pub const fn size(&self) -> u16 {
        self.size
    }

    /// Chains popped and not yet given back.
    #[must_use]
    pub const fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// Takes the next available chain into `chain`; `false` if there is none. A head is never given twice before it was
    /// given back. Work is bounded by the queue's size.
    ///
    /// # Errors
    /// What the guest did wrong. The queue is dead from then on: it reports the fault once and `false` ever after, until
    /// the device is reset.
    #[inline]
    pub fn pop(&mut self, chain: &mut Chain) -> Result<bool, GuestFault> {
        if self.next_avail == self.seen_avail && !self.look()? {
            return Ok(false);
        }
        let taken = self.take(chain);
        if taken.is_err() {
            self.break_down();
        }
        taken.map(|()| true)
    }

    /// Whether the driver offers more than was taken. A promise of nothing: what it is shows when it is taken.
    #[inline]
    #[must_use]
    pub fn has_more(&self) -> bool {
        !self.broken && (self.next_avail != self.seen_avail || self.avail_idx(Ordering::Relaxed) != self.next_avail)
    }

    /// Reads the available index; `false` if nothing came.
    #[inline]
    fn look(&mut self) -> Result<bool, GuestFault> {
        if self.broken {
            return Ok(false);
        }
        let avail = self.avail_idx(Ordering::Acquire);
        let fresh = avail.wrapping_sub(self.next_avail);
        if fresh == 0 {
            return Ok(false);
        }
        // in_flight is at most size, which is at most 1024.
        if fresh > self.size - self.in_flight {
            self.break_down();
            return Err(GuestFault::AvailJump);
        }
        self.seen_avail = avail;
        Ok(true)
    }

    #[cold]
    fn break_down(&mut self) {
        self.broken = true;
        self.seen_avail = self.next_avail;
    }

    #[inline]
    fn take(&mut self, chain: &mut Chain) -> Result<(), GuestFault> {
        let slot = usize::from(self.next_avail & self.mask);
        // SAFETY: slot < size, so entry `slot` is inside the available ring.
        let head = u16::from_le(unsafe { self.rings.avail.add(2 + slot).read_volatile() });
        if head >= self.size {
            return Err(GuestFault::HeadRange);
        }
        let (word, bit) = (usize::from(head / 64), 1u64 << (head % 64));
        if self.busy.get(word).is_none_or(|w| w & bit != 0) {
            return Err(GuestFault::HeadReused);
        }
        self.walk(head, chain)?;
        if let Some(w) = self.busy.get_mut(word) {
            *w |= bit;
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        self.in_flight += 1;
        Ok(())
    }

    /// Collects the chain that starts at `head`, which is inside the table.
    #[inline]
    fn walk(&self, head: u16, chain: &mut Chain) -> Result<(), GuestFault> {
        if !chain.ram.as_ref().is_some_and(|ram| std::ptr::eq(ram.map(), self.ram.map())) {
            chain.ram = Some(self.ram.clone());
        }
        chain.head = head;
        chain.segs.clear();
        let (mut table, mut entries, mut inside) = (self.rings.desc, u32::from(self.size), false);
        let mut index = u32::from(head);
        let (mut readable, mut readable_len, mut writable_len) = (0, 0u64, 0u64);
        let mut left = self.chain_limit;
        loop {
            // SAFETY: index < entries, and the table was found in guest memory for `entries` descriptors.
            let desc = unsafe { load_desc(table, index) };
            if desc.flags & INDIRECT != 0 {
                (table, entries) = self.indirect_table(&desc, inside)?;
                (index, inside) = (0, true);
                continue;
            }
            if left == 0 {
                return Err(GuestFault::ChainTooLong);
            }
            left -= 1;
            if desc.len == 0 {
                return Err(GuestFault::ZeroLength);
            }
            let seg = self.find(desc.addr, desc.len).ok_or(GuestFault::BufferAddress)?;
            if desc.flags & WRITE != 0 {
                writable_len += u64::from(desc.len);
            } else if writable_len != 0 {
                return Err(GuestFault::ReadableAfterWritable);
            } else {
                readable_len += u64::from(desc.len);
                readable += 1;
            }
            chain.segs.push(seg);
            if desc.flags & NEXT == 0 {
                break;
            }
            index = u32::from(desc.next);
            if index >= entries {
                return Err(GuestFault::NextRange);
            }
        }
        if readable_len + writable_len > u64::from(u32::MAX) {
            return Err(GuestFault::TotalLength);
        }
        chain.readable = readable;
        chain.readable_len = readable_len as u32;
        chain.writable_len = writable_len as u32;
        Ok(())
    }

    /// The table that an indirect descriptor names, and how many descriptors it holds.
    fn indirect_table(&self, desc: &Desc, inside: bool) -> Result<(*mut u8, u32), GuestFault> {
        if !self.indirect {
            return Err(GuestFault::IndirectRefused);
        }
        if inside {
            return Err(GuestFault::IndirectNested);
        }
        if desc.flags & NEXT != 0 {
            return Err(GuestFault::IndirectWithNext);
        }
        if desc.len == 0 || !desc.len.is_multiple_of(16) {
            return Err(GuestFault::IndirectTable);
        }
        let seg = self.find(desc.addr, desc.len).ok_or(GuestFault::IndirectTable)?;
        Ok((seg.ptr, desc.len / 16))
    }

    /// Where `len` bytes at guest address `at` are in this process.
    #[inline]
    fn find(&self, at: u64, len: u32) -> Option<Seg> {
        for region in &self.regions {
            let offset = at.wrapping_sub(region.start);
            if offset < region.len && u64::from(len) <= region.len - offset {
                return Some(Seg { ptr: region.host.wrapping_add(offset as usize), len: len as usize });
            }
        }
        // Memory that comes and goes knows itself what of it is there.
        self.ram.hot()?;
        self.ram.seg(Gpa(at), len as usize)
    }

    /// Gives the chain of `head` back with `written` bytes written; the driver may see it at once. A head that is not
    /// out is ignored.
    #[inline]
    pub fn push_used(&mut self, head: u16, written: u32) {
        if self.put_used(head, written) {
            self.show_used();
        }
    }

    /// Gives several chains back, each with the bytes written to it, so that the driver sees all of them or none: one packet
    /// in merged buffers.
    #[inline]
    pub fn push_used_together(&mut self, chains: impl Iterator<Item = (u16, u32)>) {
        for (head, written) in chains {
            self.put_used(head, written);
        }
        self.show_used();
    }

    /// Writes the next used element without showing it; `false` for a head that is not out.
    #[inline]
    fn put_used(&mut self, head: u16, written: u32) -> bool {
        let (word, bit) = (usize::from(head / 64), 1u64 << (head % 64));
        match self.busy.get_mut(word) {
            Some(w) if *w & bit != 0 => *w &= !bit,
            _ => return false,
        }
        self.in_flight -= 1;
        let slot = usize::from(self.next_used & self.mask);
        self.next_used = self.next_used.wrapping_add(1);
        // SAFETY: slot < size, so both words of element `slot` are inside the used ring.
        unsafe {
            let element = self.rings.used.add(1 + 2 * slot);
            element.write_volatile(u32::from(head).to_le());
            element.add(1).write_volatile(written.to_le());
        }
        true
    }

    /// Shows the driver all elements that were put.
    #[inline]
    fn show_used(&mut self) {
        // Release: what the device wrote for the requests, and the elements, come before the index.
        self.used_idx().store(self.next_used.to_le(), Ordering::Release);
    }

    /// Whether the driver wants an interrupt for what was given back since the last call. Call once per batch, after the
    /// last `push_used`.
    #[inline]
    pub fn needs_notification(&mut self) -> bool {
        let (new, old) = (self.next_used, self.told_used);
        if new == old {
            return false;
        }
        self.told_used = new;
        // Pairs with the driver's barrier between asking for an interrupt and looking at the used index again: either it
        // sees our index or we see its wish.
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.load_avail(usize::from(self.size) + 2);
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            self.load_avail(0) & NO_INTERRUPT == 0
        }
    }

    /// Asks the driver to kick for the next chain. `true`: one came meanwhile, look again before sleeping.
    #[inline]
    pub fn enable_kicks(&mut self) -> bool {
        if self.broken {
            return false;
        }
        if self.event_idx {
            self.store_used(usize::from(self.size) * 4 + 2, self.next_avail);
        } else {
            self.store_used(0, 0);
        }
        // Pairs with the driver's barrier between publishing a chain and reading our wish.
        fence(Ordering::SeqCst);
        self.avail_idx(Ordering::Acquire) != self.next_avail
    }

    /// Tells the driver that kicks are not needed for now: the device is looking anyway.
    #[inline]
    pub fn disable_kicks(&mut self) {
        // With EVENT_IDX the wish is an index, already behind us; nothing to write.
        if !self.event_idx {
            self.store_used(0, NO_NOTIFY);
        }
    }

    #[inline]
    fn avail_idx(&self, order: Ordering) -> u16 {
        // SAFETY: the second u16 of the available ring; only ever accessed atomically here.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.rings.avail.add(1)) }.load(order))
    }

    #[inline]
    fn used_idx(&self) -> &AtomicU16 {
        // SAFETY: the second u16 of the used ring; `self` keeps the memory mapped.
        unsafe { AtomicU16::from_ptr(self.rings.used.cast::<u16>().add(1)) }
    }

    /// Reads a u16 of the available ring at one of its two other fixed places: 0 (flags) or size + 2 (used_event).
    #[inline]
    fn load_avail(&self, at: usize) -> u16 {
        // SAFETY: the available ring has size + 3 u16, and callers pass only the two places named above.
        u16::from_le(unsafe { AtomicU16::from_ptr(self.rings.avail.add(at)) }.load(Ordering::Relaxed))
    }

    /// Writes a u16 of the used ring at one of its two other fixed places: 0 (flags) or 4 * size + 2 (avail_event).
    #[inline]
    fn store_used(&self, at: usize, value: u16) {
        // SAFETY: the used ring has 4 * size + 3 u16, and callers pass only the two places named above.
        unsafe { AtomicU16::from_ptr(self.rings.used.cast::<u16>().add(at)) }.store(value.to_le(), Ordering::Relaxed);
    }
}

/// Reads descriptor `index` of `table` once.
///
/// # Safety
/// `table` must be mapped for at least `index + 1` descriptors of 16 bytes.
#[inline]
unsafe fn load_desc(table: *mut u8, index: u32) -> Desc {
    // SAFETY: the caller's promise; an indirect table may have any alignment, so wide loads are used only when they fit.
    let (addr, rest) = unsafe {
        let at = table.add(index as usize * 16);
        if at.addr().is_multiple_of(8) {
            #[allow(clippy::cast_ptr_alignment)] // checked in the line above
            let words = at.cast::<u64>();
            (words.read_volatile(), words.add(1).read_volatile())
        } else {
            (load_bytes(at), load_bytes(at.add(8)))
        }
    };
    let (addr, rest) = (u64::from_le(addr), u64::from_le(rest));
    Desc { addr, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
}

/// Reads 8 bytes of any alignment, each once.
///
/// # Safety
/// `at` must be mapped for 8 bytes.
#[cold]
unsafe fn load_bytes(at: *const u8) -> u64 {
    let mut bytes = [0u8; 8];
    for (i, byte) in bytes.iter_mut().enumerate() {
        // SAFETY: i < 8, within the caller's promise.
        *byte = unsafe { at.add(i).read_volatile() };
    }
    u64::from_ne_bytes(bytes)
}
