// SPDX-License-Identifier: Apache-2.0
//! The receive queue: from the wire into buffers of the guest. Runs on the worker's thread.
//!
//! Buffers are taken from the ring ahead of the packet and kept until one fills them; a packet larger than one buffer is
//! merged over several where the driver can (`MRG_RXBUF`), and all of them are shown to it at once.

use std::collections::VecDeque;
use std::io;

use base::Seg;

use super::limit::Limit;
use super::stats::NetCounts;
use super::sys::MAX_SEGS;
use super::tx::Round;
use super::wire::Wire;
use super::{HEADER, NUM_BUFFERS};
use crate::coalesce::Coalescer;
use crate::device::ActiveQueue;
use crate::fault::GuestFault;
use crate::queue::{Chain, DEFAULT_SIZE, copy_in};

/// Packets before the guest hears of them and the other direction has its turn.
const BATCH: usize = 64;

/// One buffer of the guest.
struct Buffer {
    head: u16,
    segs: usize,
    len: usize,
}

/// The queue and the buffers taken from it.
pub struct Receive {
    queue: ActiveQueue,
    chain: Chain,
    limit: Limit,
    /// When the guest hears of packets.
    pub coalescer: Coalescer,
    merged: bool,
    buffers: VecDeque<Buffer>,
    segs: Vec<Seg>,
    room: usize,
    /// The wire may have something: it has not said otherwise since it was last ready.
    pub ready: bool,
    /// A packet waits for buffers.
    pub starved: bool,
}

impl Receive {
    /// Serves `queue` as fast as `limit` allows; `merged`: the driver takes packets in several buffers.
    pub fn new(queue: ActiveQueue, merged: bool, limit: Limit, coalescer: Coalescer) -> Self {
        Self {
            queue,
            chain: Chain::new(),
            limit,
            coalescer,
            merged,
            buffers: VecDeque::new(),
            segs: Vec::new(),
            room: 0,
            ready: true,
            starved: false,
        }
    }

    /// One batch.
    ///
    /// # Errors
    /// What the guest did wrong.
    pub fn run(&mut self, wire: &mut dyn Wire, counts: &mut NetCounts) -> Result<Round, GuestFault> {
        let mut round = Round::More;
        self.queue.ring.disable_kicks();
        for _ in 0..BATCH {
            if !self.ready {
                round = Round::Idle;
                break;
            }
            if let Some(wait) = self.limit.wait(counts) {
                round = Round::Wait(wait);
                break;
            }
            match self.packet(wire, counts)? {
                Ok(true) => {}
                Ok(false) => {
                    round = Round::Idle;
                    break;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => self.ready = false,
                Err(e) => {
                    round = Round::Gone(e);
                    break;
                }
            }
        }
        Ok(round)
    }

    /// Interrupts the guest, if it is time and it wants to hear of what it got.
    pub fn interrupt(&mut self, counts: &mut NetCounts) {
        if counts.put_off(&mut self.coalescer) && self.queue.ring.needs_notification() {
            counts.interrupts += 1;
            self.queue.irq.notify();
        }
    }

    /// One packet; `Ok(Ok(false))`: the guest has no buffers for it.
    fn packet(&mut self, wire: &mut dyn Wire, counts: &mut NetCounts) -> Result<io::Result<bool>, GuestFault> {
        self.starved = false;
        self.gather(wire.longest())?;
        // Asked even without any room, since a wire that is gone says so here.
        let want = match wire.want(self.room) {
            Ok(want) => want,
            Err(e) => return Ok(Err(e)),
        };
        if want > self.room {
            if self.is_all() {
                wire.skip();
                counts.received_dropped += 1;
                return Ok(Ok(true));
            }
            // A kick wakes us, unless buffers came while we asked for it.
            self.starved = !self.queue.ring.enable_kicks();
            return Ok(Ok(!self.starved));
        }
        Ok(wire.receive(&self.segs).map(|len| {
            self.deliver(len, counts);
            true
        }))
    }

    /// Takes buffers until there is room for `most` bytes, or none are left.
    fn gather(&mut self, most: usize) -> Result<(), GuestFault> {
        while self.room < most && (self.merged || self.buffers.is_empty()) {
            if self.segs.len() + usize::from(DEFAULT_SIZE) >= MAX_SEGS || !self.queue.ring.pop(&mut self.chain)? {
                break;
            }
            let len = self.chain.writable_len() as usize;
            if len < HEADER {
                // `GuestFault::NoRoom`: given back as it came.
                self.queue.ring.push_used(self.chain.head(), 0);
                self.coalescer.finish();
                continue;
            }
            let segs = self.chain.writable();
            self.segs.extend_from_slice(segs);
            self.buffers.push_back(Buffer { head: self.chain.head(), segs: segs.len(), len });
            self.room += len;
        }
        Ok(())
    }

    /// Whether the guest can add no buffers before it gets some back.
    fn is_all(&self) -> bool {
        !self.buffers.is_empty() && (!self.merged || self.segs.len() >= usize::from(self.queue.ring.size()))
    }

    /// Gives the guest the packet of `len` bytes that was received into the first buffers.
    fn deliver(&mut self, len: usize, counts: &mut NetCounts) {
        let (mut used, mut covered, mut segs) = (0, 0, 0);
        for buffer in &self.buffers {
            if covered >= len {
                break;
            }
            covered += buffer.len;
            used += 1;
            segs += buffer.segs;
        }
        // At most one buffer a queue entry.
        copy_in(&self.segs, NUM_BUFFERS, &(used as u16).to_le_bytes());
        let mut left = len;
        self.queue.ring.push_used_together(self.buffers.drain(..used).map(|buffer| {
            let written = left.min(buffer.len);
            left -= written;
            (buffer.head, written as u32)
        }));
        self.coalescer.finish();
        self.segs.drain(..segs);
        self.room -= covered;
        self.limit.charge(len.saturating_sub(HEADER));
        counts.received += 1;
        counts.received_bytes += len.saturating_sub(HEADER) as u64;
    }
}
