// SPDX-License-Identifier: Apache-2.0
//! The driver's half of a split virtqueue (virtio 1.2, 2.7), for tests: well-behaved calls on top, raw ring access below.
//!
//! One test thread owns a [`GuestQueue`]; the device under test sees it through guest memory only.

use std::sync::atomic::{Ordering, fence};

use base::Gpa;
use mem::GuestRam;
use virtio::QueueConfig;

/// `VIRTQ_DESC_F_NEXT`.
pub const NEXT: u16 = 1;
/// `VIRTQ_DESC_F_WRITE`.
pub const WRITE: u16 = 2;
/// `VIRTQ_DESC_F_INDIRECT`.
pub const INDIRECT: u16 = 4;

/// One buffer of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buf {
    /// Where it is.
    pub at: Gpa,
    /// Its bytes.
    pub len: u32,
    /// The device writes it (else: reads it).
    pub write: bool,
}

impl Buf {
    /// A buffer for the device to read.
    #[must_use]
    pub const fn read(at: u64, len: u32) -> Self {
        Self { at: Gpa(at), len, write: false }
    }

    /// A buffer for the device to write.
    #[must_use]
    pub const fn write(at: u64, len: u32) -> Self {
        Self { at: Gpa(at), len, write: true }
    }

    const fn flags(self) -> u16 {
        if self.write { WRITE } else { 0 }
    }
}

/// The driver's view of one queue.
pub struct GuestQueue {
    ram: GuestRam,
    size: u16,
    desc: Gpa,
    avail: Gpa,
    used: Gpa,
    free: Vec<u16>,
    /// Descriptors of the chain of each head, to free when it comes back.
    chains: Vec<Vec<u16>>,
    avail_idx: u16,
    used_idx: u16,
}

impl GuestQueue {
    /// Rings of `size` entries at `at`, which is a multiple of 16, all zero.
    ///
    /// # Panics
    /// When they do not fit into `ram`.
    #[must_use]
    pub fn new(ram: &GuestRam, at: u64, size: u16) -> Self {
        let desc = Gpa(at);
        let avail = Gpa(at + 16 * u64::from(size));
        let used = Gpa((avail.0 + 6 + 2 * u64::from(size)).next_multiple_of(4));
        let queue = Self {
            ram: ram.clone(),
            size,
            desc,
            avail,
            used,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
            avail_idx: 0,
            used_idx: 0,
        };
        let zeroes = vec![0; Self::bytes(size) as usize];
        assert!(ram.write_bytes(desc, &zeroes).is_ok(), "rings are in memory");
        queue
    }

    /// Bytes that the rings of a queue of `size` take.
    #[must_use]
    pub fn bytes(size: u16) -> u64 {
        let size = u64::from(size);
        (16 * size + 6 + 2 * size).next_multiple_of(4) + 6 + 8 * size
    }

    /// The queue as the transport would be told of it.
    #[must_use]
    pub const fn config(&self) -> QueueConfig {
        QueueConfig {
            max_size: self.size,
            size: self.size,
            enabled: true,
            desc: self.desc,
            avail: self.avail,
            used: self.used,
        }
    }

    /// Writes descriptor `index` as it is given.
    pub fn set_desc(&self, index: u16, at: u64, len: u32, flags: u16, next: u16) {
        self.set_desc_at(Gpa(self.desc.0 + 16 * u64::from(index)), at, len, flags, next);
    }

    /// Writes a descriptor anywhere, as for an indirect table.
    ///
    /// # Panics
    /// When `place` is not in memory.
    pub fn set_desc_at(&self, place: Gpa, at: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&at.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        assert!(self.ram.write_bytes(place, &bytes).is_ok(), "descriptor is in memory");
    }

    /// Descriptors not in use.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Makes a chain of `bufs` and gives its head; `None` if there are not enough descriptors, or no buffers.
    pub fn add(&mut self, bufs: &[Buf]) -> Option<u16> {
        if bufs.is_empty() || self.free.len() < bufs.len() {
            return None;
        }
        let chain: Vec<u16> = self.free.split_off(self.free.len() - bufs.len());
        for (i, (buf, &index)) in bufs.iter().zip(&chain).enumerate() {
            let (flags, next) = chain.get(i + 1).map_or((0, 0), |&next| (NEXT, next));
            self.set_desc(index, buf.at.0, buf.len, buf.flags() | flags, next);
        }
        let head = *chain.first()?;
        if let Some(slot) = self.chains.get_mut(usize::from(head)) {
            *slot = chain;
        }
        Some(head)
    }

    /// Makes a chain of one indirect descriptor, whose table is written at `table`.
    pub fn add_indirect(&mut self, table: u64, bufs: &[Buf]) -> Option<u16> {
        let head = self.free.pop()?;
        for (i, buf) in bufs.iter().enumerate() {
            let flags = if i + 1 < bufs.len() { NEXT } else { 0 };
            self.set_desc_at(Gpa(table + 16 * i as u64), buf.at.0, buf.len, buf.flags() | flags, i as u16 + 1);
        }
        self.set_desc(head, table, 16 * bufs.len() as u32, INDIRECT, 0);
        if let Some(slot) = self.chains.get_mut(usize::from(head)) {
            *slot = vec![head];
        }
        Some(head)
    }

    /// Puts `head` into the available ring and moves the index.
    pub fn publish(&mut self, head: u16) {
        self.set_avail_entry(self.avail_idx, head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        self.set_avail_idx(self.avail_idx);
    }

    /// `add` and `publish`.
    ///
    /// # Panics
    /// When there are not enough descriptors.
    #[allow(clippy::expect_used)] // a test that asks for too much has a bug
    pub fn send(&mut self, bufs: &[Buf]) -> u16 {
        let head = self.add(bufs).expect("free descriptors");
        self.publish(head);
        head
    }

    /// Writes the available entry for index `at`, which wraps at the queue's size.
    pub fn set_avail_entry(&self, at: u16, head: u16) {
        self.put16(self.avail.0 + 4 + 2 * u64::from(at % self.size), head);
    }

    /// Writes the available index.
    pub fn set_avail_idx(&self, idx: u16) {
        self.ram.store(Gpa(self.avail.0 + 2), idx, Ordering::Release);
    }

    /// Asks for no interrupts, or for them again (without `EVENT_IDX`).
    pub fn suppress_interrupts(&self, suppress: bool) {
        self.put16(self.avail.0, suppress.into());
    }

    /// Asks for an interrupt once the used index moves past `idx` (with `EVENT_IDX`).
    pub fn set_used_event(&self, idx: u16) {
        self.put16(self.avail.0 + 4 + 2 * u64::from(self.size), idx);
    }

    /// Where the device wants to be kicked (with `EVENT_IDX`).
    #[must_use]
    pub fn avail_event(&self) -> u16 {
        self.get16(self.used.0 + 4 + 8 * u64::from(self.size))
    }

    /// The device wants no kicks (without `EVENT_IDX`).
    #[must_use]
    pub fn kicks_suppressed(&self) -> bool {
        self.get16(self.used.0) & 1 != 0
    }

    /// The used index as the device left it.
    #[must_use]
    pub fn used_index(&self) -> u16 {
        self.ram.load(Gpa(self.used.0 + 2), Ordering::Acquire).unwrap_or_default()
    }

    /// Takes the next used element: head and bytes written. Its descriptors are free again.
    pub fn used(&mut self) -> Option<(u16, u32)> {
        fence(Ordering::SeqCst);
        if self.used_index() == self.used_idx {
            return None;
        }
        let at = self.used.0 + 4 + 8 * u64::from(self.used_idx % self.size);
        let head = self.ram.read::<u32>(Gpa(at)).unwrap_or(u32::MAX) as u16;
        let len = self.ram.read::<u32>(Gpa(at + 4)).unwrap_or(u32::MAX);
        self.used_idx = self.used_idx.wrapping_add(1);
        if let Some(chain) = self.chains.get_mut(usize::from(head)) {
            self.free.append(chain);
        }
        Some((head, len))
    }

    fn put16(&self, at: u64, value: u16) {
        self.ram.store(Gpa(at), value, Ordering::SeqCst);
    }

    fn get16(&self, at: u64) -> u16 {
        self.ram.load(Gpa(at), Ordering::SeqCst).unwrap_or_default()
    }
}
