// SPDX-License-Identifier: Apache-2.0
//! Guest to host: the transmit queue and what of it the output has not taken yet. Behind one lock, taken by the vCPU that
//! kicked and by the main thread when a full output has room again.
//!
//! All chains that are there go out in one call. A chain is given back only after the output took its last byte, so a
//! guest that outruns its reader is held back by its own queue, and nothing is lost or reordered.

use std::io;
use std::sync::Arc;

use base::Seg;

use super::output::{MAX_SEGS, Output};
use crate::device::{ActiveQueue, DeviceStatus};
use crate::queue::Chain;
use crate::stats::Counters;

/// What a device reset keeps at most of output that was not taken yet.
const MAX_CARRY: usize = 64 * 1024;
/// Rounds of draining the queue that one kick may cause; a guest that still sends waits for its next kick.
const MAX_ROUNDS: usize = 64;

/// The transmit side.
pub(super) struct Transmit {
    output: Output,
    live: Option<(ActiveQueue, Arc<DeviceStatus>)>,
    chain: Chain,
    /// Popped chains, oldest first, with their lengths; `segs` from `done` on is what they still have to send.
    heads: Vec<(u16, u32)>,
    segs: Vec<Seg>,
    done: usize,
    /// Output of before a reset that was not taken yet; goes first.
    carry: Vec<u8>,
    stalled: bool,
    /// The output is gone; what the guest sends is dropped.
    closed: Option<io::Error>,
    counters: Arc<Counters>,
}

impl Transmit {
    pub(super) fn new(output: Output, counters: Arc<Counters>) -> Self {
        Self {
            output,
            live: None,
            chain: Chain::new(),
            heads: Vec::new(),
            segs: Vec::new(),
            done: 0,
            carry: Vec::new(),
            stalled: false,
            closed: None,
            counters,
        }
    }

    pub(super) fn output(&self) -> &Output {
        &self.output
    }

    pub(super) fn activate(&mut self, queue: ActiveQueue, status: Arc<DeviceStatus>) {
        self.live = Some((queue, status));
        self.run();
    }

    /// Gives the queue back. What the guest sent and the output did not take is kept, up to a bound.
    pub(super) fn reset(&mut self) {
        if !self.stalled {
            self.run();
        }
        for seg in self.segs.get(self.done..).unwrap_or_default() {
            let room = MAX_CARRY.saturating_sub(self.carry.len()).min(seg.len);
            let at = self.carry.len();
            self.carry.resize(at + room, 0);
            // SAFETY: the segment is guest memory that the live queue keeps mapped, `room` is within both it and what
            // was just added to `carry`, and the two never overlap.
            unsafe { std::ptr::copy_nonoverlapping(seg.ptr, self.carry.as_mut_ptr().add(at), room) };
        }
        self.heads.clear();
        self.segs.clear();
        self.done = 0;
        self.live = None;
        self.chain = Chain::new();
    }

    /// Why output is being dropped, if it is.
    pub(super) fn take_trouble(&mut self) -> Option<io::Error> {
        // The kind stays, so that dropping goes on.
        let why = self.closed.as_ref()?;
        let kind = why.kind();
        self.closed.replace(kind.into())
    }

    /// Whether anything waits for the output.
    pub(super) fn is_stalled(&self) -> bool {
        self.stalled
    }

    /// The output said that it has room again.
    pub(super) fn resume(&mut self) {
        self.output.ignore();
        self.stalled = false;
        self.run();
    }

    /// Sends what there is. Called on each kick; while the output is full it does nothing.
    pub(super) fn run(&mut self) {
        if self.stalled {
            return;
        }
        for _ in 0..MAX_ROUNDS {
            self.gather();
            if self.flush().is_err() {
                self.stalled = true;
                self.output.wait();
            }
            let Some((queue, _)) = &mut self.live else { return };
            if queue.ring.needs_notification() {
                queue.irq.notify();
                self.counters.interrupt();
            }
            if self.stalled || !queue.ring.enable_kicks() {
                return;
            }
        }
    }

    /// Takes chains off the queue until it is empty or one call's worth is there.
    fn gather(&mut self) {
        let Some((queue, status)) = &mut self.live else { return };
        while self.segs.len() < MAX_SEGS {
            match queue.ring.pop(&mut self.chain) {
                Ok(true) => {
                    self.heads.push((self.chain.head(), self.chain.readable_len()));
                    self.segs.extend_from_slice(self.chain.readable());
                }
                Ok(false) => return,
                Err(fault) => return status.needs_reset(fault),
            }
        }
    }

    /// Hands the output all that was gathered and gives the chains back. `Err`: it is full, the rest waits.
    fn flush(&mut self) -> Result<(), ()> {
        while !self.carry.is_empty() {
            let seg = Seg { ptr: self.carry.as_mut_ptr(), len: self.carry.len() };
            let took = self.write(&[seg])?;
            self.carry.drain(..took.min(self.carry.len()));
        }
        while self.done < self.segs.len() {
            let segs = std::mem::take(&mut self.segs);
            let took = self.write(segs.get(self.done..).unwrap_or_default());
            self.segs = segs;
            self.advance(took?);
        }
        self.segs.clear();
        self.done = 0;
        if let Some((queue, _)) = &mut self.live {
            for (head, len) in self.heads.drain(..) {
                queue.ring.push_used(head, 0);
                self.counters.request(len.into(), 0);
            }
        }
        Ok(())
    }

    /// One write; output that is gone takes everything.
    fn write(&mut self, segs: &[Seg]) -> Result<usize, ()> {
        let all = || usize::try_from(base::segs::total_len(segs)).unwrap_or(usize::MAX);
        if self.closed.is_some() {
            return Ok(all());
        }
        match self.output.write(segs) {
            Ok(took) => Ok(took),
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => Err(()),
            Err(why) => {
                self.closed = Some(why);
                Ok(all())
            }
        }
    }

    fn advance(&mut self, mut took: usize) {
        while let Some(seg) = self.segs.get_mut(self.done) {
            if took < seg.len {
                *seg = Seg { ptr: seg.ptr.wrapping_add(took), len: seg.len - took };
                return;
            }
            took -= seg.len;
            self.done += 1;
        }
    }
}
