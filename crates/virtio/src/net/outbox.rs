// SPDX-License-Identifier: Apache-2.0
//! Packets of the guest on their way out: popped from the queue, not yet wholly taken by the wire. Owned by the worker.
//!
//! A packet stays in guest memory; what is here are segments. A framed outbox, for stream sockets, puts the length of each
//! frame before it in place of the virtio header.

use std::collections::VecDeque;

use base::Seg;

use super::sys::MAX_SEGS;
use super::{FRAME_MIN, HEADER};
use crate::queue::{DEFAULT_SIZE, window};

/// The most packets that wait.
const PACKETS: usize = 32;
/// Bytes of a frame's length.
const PREFIX: usize = 4;
/// The longest frame that a peer takes.
pub const FRAME_MAX: usize = 65535;

/// One packet.
struct Packet {
    head: u16,
    /// Segments and bytes that have not gone yet.
    segs: usize,
    left: usize,
    /// Bytes of the frame.
    frame: u32,
}

/// A packet that may be given back to the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its chain.
    pub head: u16,
    /// Bytes of the frame; `None` if the host did not take it.
    pub sent: Option<u32>,
}

/// See above.
pub struct Outbox {
    segs: Vec<Seg>,
    packets: VecDeque<Packet>,
    done: Vec<Done>,
    /// Lengths before frames, a ring; empty for a wire that takes whole packets.
    prefixes: Box<[[u8; PREFIX]]>,
    next_prefix: usize,
}

impl Outbox {
    /// For a wire that takes packets one by one, virtio header included.
    #[must_use]
    pub fn packets() -> Self {
        Self { segs: Vec::new(), packets: VecDeque::new(), done: Vec::new(), prefixes: Box::default(), next_prefix: 0 }
    }

    /// For a stream of frames, each behind its length.
    #[must_use]
    pub fn framed() -> Self {
        Self { prefixes: vec![[0; PREFIX]; PACKETS].into_boxed_slice(), ..Self::packets() }
    }

    /// Whether nothing waits for the wire.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.packets.is_empty()
    }

    /// Whether another packet may come, however many segments it has.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.packets.len() < PACKETS && self.segs.len() + usize::from(DEFAULT_SIZE) < MAX_SEGS
    }

    /// Takes the packet of chain `head`, `len` bytes with its header, which lies in `segs`. One that is no frame is done at once.
    pub fn push(&mut self, head: u16, segs: &[Seg], len: usize) {
        let frame = len.saturating_sub(HEADER);
        if !(FRAME_MIN..=FRAME_MAX).contains(&frame) {
            self.done.push(Done { head, sent: None });
            return;
        }
        let before = self.segs.len();
        let mut left = len;
        if let Some(prefix) = self.prefixes.get_mut(self.next_prefix) {
            *prefix = (frame as u32).to_be_bytes();
            self.segs.push(Seg { ptr: prefix.as_mut_ptr(), len: PREFIX });
            window(segs, HEADER as u32, frame as u32, &mut self.segs);
            left = PREFIX + frame;
            self.next_prefix = (self.next_prefix + 1) % self.prefixes.len();
        } else {
            self.segs.extend_from_slice(segs);
        }
        self.packets.push_back(Packet { head, segs: self.segs.len() - before, left, frame: frame as u32 });
    }

    /// All that waits.
    #[must_use]
    pub fn all(&self) -> &[Seg] {
        &self.segs
    }

    /// The first packet.
    #[must_use]
    pub fn first(&self) -> Option<&[Seg]> {
        let packet = self.packets.front()?;
        self.segs.get(..packet.segs)
    }

    /// The wire took the first packet, or refused it for good.
    pub fn finish_first(&mut self, taken: bool) {
        if let Some(packet) = self.packets.pop_front() {
            self.segs.drain(..packet.segs.min(self.segs.len()));
            self.done.push(Done { head: packet.head, sent: taken.then_some(packet.frame) });
        }
    }

    /// The wire took `bytes` of what waits.
    pub fn advance(&mut self, mut bytes: usize) {
        while let Some(packet) = self.packets.front_mut() {
            if bytes >= packet.left {
                bytes -= packet.left;
                self.finish_first(true);
                continue;
            }
            packet.left -= bytes;
            let mut whole = 0;
            for seg in &mut self.segs {
                if bytes < seg.len {
                    seg.ptr = seg.ptr.wrapping_add(bytes);
                    seg.len -= bytes;
                    break;
                }
                bytes -= seg.len;
                whole += 1;
            }
            packet.segs -= whole;
            self.segs.drain(..whole);
            return;
        }
    }

    /// The segments of the first packet if it has gone in part.
    #[must_use]
    pub fn begun(&self) -> Option<&[Seg]> {
        let packet = self.packets.front()?;
        let whole = packet.frame as usize + if self.prefixes.is_empty() { HEADER } else { PREFIX };
        if packet.left < whole { self.first() } else { None }
    }

    /// Nobody will take what waits.
    pub fn refuse_all(&mut self) {
        while !self.packets.is_empty() {
            self.finish_first(false);
        }
    }

    /// Forgets everything without an answer.
    pub fn clear(&mut self) {
        self.segs.clear();
        self.packets.clear();
        self.done.clear();
    }

    /// What may be given back, oldest first.
    pub fn done(&mut self) -> std::vec::Drain<'_, Done> {
        self.done.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seg(bytes: &mut [u8]) -> Seg {
        Seg { ptr: bytes.as_mut_ptr(), len: bytes.len() }
    }

    /// Whatever pieces a stream takes, the packets are done in order and each when its last byte has gone.
    #[test]
    fn pieces_of_any_size_finish_packets_in_order() {
        for step in 1..90 {
            let mut bytes = [7u8; 64];
            let mut out = Outbox::framed();
            let lens = [26usize, 30, 64];
            for (head, len) in (0u16..).zip(lens) {
                let (a, b) = bytes.split_at_mut(len / 2);
                out.push(head, &[seg(a), seg(b)], len);
            }
            let ends: Vec<usize> = lens
                .iter()
                .scan(0, |sum, len| {
                    *sum += len - HEADER + PREFIX;
                    Some(*sum)
                })
                .collect();
            let mut gone = 0;
            let mut finished = 0;
            while !out.is_empty() {
                let left: usize = out.all().iter().map(|s| s.len).sum();
                assert_eq!(left, ends[2] - gone);
                let now = step.min(left);
                out.advance(now);
                gone += now;
                for done in out.done() {
                    assert_eq!((usize::from(done.head), done.sent), (finished, Some((lens[finished] - HEADER) as u32)));
                    assert!(gone >= ends[finished]);
                    finished += 1;
                }
                assert_eq!(finished, ends.iter().filter(|end| **end <= gone).count());
                assert_eq!(out.begun().is_some(), !ends.contains(&gone), "{gone}");
            }
            assert_eq!(finished, 3);
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let mut out = Outbox::packets();
        let mut bytes = vec![0u8; 70000];
        for (head, len, good) in [(1, 12, false), (2, 25, false), (3, 26, true), (4, 65547, true), (5, 65548, false)] {
            let segs = [seg(&mut bytes[..len])];
            out.push(head, &segs, len);
            let refused: Vec<_> = out.done().collect();
            assert_eq!(refused, if good { vec![] } else { vec![Done { head, sent: None }] });
        }
        out.refuse_all();
        assert_eq!(out.done().map(|d| d.head).collect::<Vec<_>>(), [3, 4]);
    }
}
