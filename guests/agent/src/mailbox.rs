// SPDX-License-Identifier: Apache-2.0
//! The shared memory between the lab and its machine: a head page and eight channels of two byte rings each.
//!
//! Everything either side needs to know stands in the memory itself, and all zeros means "idle": a machine restored from
//! a snapshot gets a fresh zeroed file and goes on. Opening a channel: the lab waits until no session is served, empties
//! the rings, may already fill them, and writes a session number; the agent copies it and serves. Number 0 closes. So a
//! whole job can stand in the file before the machine runs its first instruction, which makes runs repeat exactly.
//! Each ring has one writer and one reader.

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use base::mmap::Mmap;

/// Bytes of the whole mailbox.
pub const SIZE: usize = 128 << 20;
/// Channels in a mailbox, each for one client at a time.
pub const CHANNELS: usize = 8;
/// Bytes of each ring.
pub const RING: usize = 4 << 20;
/// What the agent writes into the head page once it serves: the layout's name and version.
pub const MAGIC: u64 = 0x7461_7265_6d62_0001;

const PAGE: usize = 4096;
const RINGS_AT: usize = 1 << 20;
const _: () = assert!(RINGS_AT + CHANNELS * 2 * RING <= SIZE && RING.is_power_of_two());

/// Offsets of words in the head page and in a channel's page.
mod word {
    pub const MAGIC: usize = 0;
    pub const CLOCK: usize = 64;
    pub const WANT: usize = 0;
    pub const HAVE: usize = 64;
    /// Written and read positions of the ring towards the agent, then of the ring towards the lab.
    pub const DOWN: (usize, usize) = (128, 192);
    pub const UP: (usize, usize) = (256, 320);
}

/// A mapped mailbox.
#[derive(Debug)]
pub struct Mailbox {
    map: Mmap,
}

impl Mailbox {
    /// Maps the mailbox at `offset` in `file`: 0 in the lab's own file, its physical address in the machine's memory.
    ///
    /// # Errors
    /// What `mmap` says.
    pub fn map(file: &impl AsRawFd, offset: u64) -> io::Result<Self> {
        let offset = offset.try_into().map_err(io::Error::other)?;
        Ok(Self { map: Mmap::shared_at(file, offset, SIZE)? })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at.is_multiple_of(8) && at < RINGS_AT);
        // SAFETY: `at` is one of this module's constants, so it is 8-aligned and inside the page-aligned mapping, which
        // lives as long as `self`; the other side only ever touches these words atomically.
        unsafe { AtomicU64::from_ptr(self.map.as_ptr().add(at).cast()) }
    }

    /// Whether an agent has announced itself.
    #[must_use]
    pub fn is_served(&self) -> bool {
        self.word(word::MAGIC).load(Ordering::Acquire) == MAGIC
    }

    /// The machine's monotonic clock in ns when the agent last looked here.
    #[must_use]
    pub fn clock(&self) -> u64 {
        self.word(word::CLOCK).load(Ordering::Relaxed)
    }

    /// Agent: "I am here, and my clock says `now` ns".
    pub fn announce(&self, now: u64) {
        self.word(word::CLOCK).store(now, Ordering::Relaxed);
        self.word(word::MAGIC).store(MAGIC, Ordering::Release);
    }

    /// One of the [`CHANNELS`] channels; `index` wraps.
    #[must_use]
    pub fn channel(&self, index: usize) -> Channel<'_> {
        Channel { mailbox: self, index: index % CHANNELS }
    }
}

/// One client's pair of rings.
#[derive(Debug, Clone, Copy)]
pub struct Channel<'a> {
    mailbox: &'a Mailbox,
    index: usize,
}

impl<'a> Channel<'a> {
    fn word(&self, at: usize) -> &'a AtomicU64 {
        self.mailbox.word(PAGE * (1 + self.index) + at)
    }

    fn ring(&self, (written, read): (usize, usize), which: usize) -> Ring<'a> {
        Ring {
            mailbox: self.mailbox,
            written: self.word(written),
            read: self.word(read),
            base: RINGS_AT + (self.index * 2 + which) * RING,
        }
    }

    /// The ring that the lab writes and the agent reads.
    #[must_use]
    pub fn down(&self) -> Ring<'a> {
        self.ring(word::DOWN, 0)
    }

    /// The ring that the agent writes and the lab reads.
    #[must_use]
    pub fn up(&self) -> Ring<'a> {
        self.ring(word::UP, 1)
    }

    /// The session the lab wants; 0 for none.
    #[must_use]
    pub fn wanted(&self) -> u64 {
        self.word(word::WANT).load(Ordering::Acquire)
    }

    /// The session the agent serves; 0 for none.
    #[must_use]
    pub fn served(&self) -> u64 {
        self.word(word::HAVE).load(Ordering::Acquire)
    }

    /// Lab: ask for session `number`, or for none with 0.
    pub fn want(&self, number: u64) {
        self.word(word::WANT).store(number, Ordering::Release);
    }

    /// Lab: empty both rings; only while no session is served.
    pub fn clear(&self) {
        debug_assert_eq!(self.served(), 0);
        for at in [word::DOWN.0, word::DOWN.1, word::UP.0, word::UP.1] {
            self.word(at).store(0, Ordering::Release);
        }
    }

    /// Agent: session `number` is served from now on.
    pub fn serve(&self, number: u64) {
        self.word(word::HAVE).store(number, Ordering::Release);
    }
}

/// One direction of a channel: bytes, one writer, one reader, neither ever waits here.
#[derive(Debug)]
pub struct Ring<'a> {
    mailbox: &'a Mailbox,
    written: &'a AtomicU64,
    read: &'a AtomicU64,
    base: usize,
}

impl Ring<'_> {
    /// Copies as much of `bytes` as fits and returns how much that was.
    pub fn write(&self, bytes: &[u8]) -> usize {
        let written = self.written.load(Ordering::Relaxed);
        let used = self.used(written, self.read.load(Ordering::Acquire));
        let count = bytes.len().min(RING - used);
        let (at, first) = split(written, count);
        let ring = self.start();
        // SAFETY: `ring` has RING bytes of which [at, at + first) and [0, count - first) are free: the reader does not
        // look at them before `written` moves; `bytes` is a borrowed slice, so it can't be the mapping.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), ring.add(at), first);
            ptr::copy_nonoverlapping(bytes.as_ptr().add(first), ring, count - first);
        }
        self.written.store(written.wrapping_add(count as u64), Ordering::Release);
        count
    }

    /// Takes up to `into.len()` bytes and returns how many there were.
    pub fn read(&self, into: &mut [u8]) -> usize {
        let read = self.read.load(Ordering::Relaxed);
        let count = into.len().min(self.used(self.written.load(Ordering::Acquire), read));
        let (at, first) = split(read, count);
        let ring = self.start();
        // SAFETY: `ring` has RING bytes; [at, at + first) and [0, count - first) were written before `written` moved and
        // stay as they are until `read` moves; `into` is a borrowed slice, so it can't be the mapping.
        unsafe {
            ptr::copy_nonoverlapping(ring.add(at), into.as_mut_ptr(), first);
            ptr::copy_nonoverlapping(ring, into.as_mut_ptr().add(first), count - first);
        }
        self.read.store(read.wrapping_add(count as u64), Ordering::Release);
        count
    }

    /// Whether there is nothing to read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.read.load(Ordering::Relaxed) == self.written.load(Ordering::Acquire)
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: `base` is a ring's start, checked against SIZE at compile time for the last ring.
        unsafe { self.mailbox.map.as_ptr().add(self.base) }
    }

    /// Bytes between the positions; a torn or foreign pair counts as a full ring, never as more.
    fn used(&self, written: u64, read: u64) -> usize {
        usize::try_from(written.wrapping_sub(read)).unwrap_or(RING).min(RING)
    }
}

/// Where position `at` falls in a ring, and how many of `count` bytes lie before its end.
#[allow(clippy::cast_possible_truncation)]
fn split(at: u64, count: usize) -> (usize, usize) {
    let at = (at % RING as u64) as usize;
    (at, count.min(RING - at))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn mailbox() -> (Mailbox, std::fs::File) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(SIZE as u64).unwrap();
        (Mailbox::map(&file, 0).unwrap(), file)
    }

    #[test]
    fn bytes_come_out_in_order_across_the_wrap() {
        let (mailbox, _file) = mailbox();
        let ring = mailbox.channel(3).down();
        let (mut sent, mut got) = (0u64, 0u64);
        let mut buffer = vec![0; 700_001];
        while got < 5 * RING as u64 {
            let out: Vec<u8> = (0..600_011u64).map(|i| ((sent + i) % 251) as u8).collect();
            sent += ring.write(&out) as u64;
            let count = ring.read(&mut buffer);
            for byte in &buffer[..count] {
                assert_eq!(u64::from(*byte), got % 251);
                got += 1;
            }
        }
        assert!(sent >= got);
    }

    #[test]
    fn a_full_ring_takes_nothing_and_channels_do_not_touch_each_other() {
        let (mailbox, _file) = mailbox();
        let fill = vec![7u8; RING + 5];
        for index in 0..CHANNELS {
            let channel = mailbox.channel(index);
            for ring in [channel.down(), channel.up()] {
                assert!(ring.is_empty());
                let fill = vec![u8::try_from(index).unwrap(); RING + 5];
                assert_eq!(ring.write(&fill), RING);
                assert_eq!(ring.write(&fill), 0);
            }
        }
        let mut buffer = vec![0; RING];
        for index in 0..CHANNELS {
            assert_eq!(mailbox.channel(index).up().read(&mut buffer), RING);
            assert!(buffer.iter().all(|b| usize::from(*b) == index));
        }
        assert_eq!(fill.len(), RING + 5);
    }

    #[test]
    fn a_cleared_channel_is_empty_and_zero_means_idle() {
        let (mailbox, _file) = mailbox();
        assert!(!mailbox.is_served());
        mailbox.announce(42);
        assert!(mailbox.is_served());
        assert_eq!(mailbox.clock(), 42);
        let channel = mailbox.channel(0);
        assert_eq!((channel.wanted(), channel.served()), (0, 0));
        channel.down().write(b"left over");
        channel.clear();
        assert!(channel.down().is_empty());
        channel.want(9);
        channel.serve(channel.wanted());
        assert_eq!(channel.served(), 9);
    }

    #[test]
    fn nonsense_positions_never_reach_outside_the_ring() {
        let (mailbox, _file) = mailbox();
        let channel = mailbox.channel(7);
        channel.word(word::UP.0).store(u64::MAX - 3, Ordering::Relaxed);
        let mut buffer = vec![0; RING * 2];
        assert_eq!(channel.up().read(&mut buffer), RING);
    }
}
