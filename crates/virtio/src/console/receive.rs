// SPDX-License-Identifier: Apache-2.0
//! Host to guest: input on its way into the receive queue. Behind one lock, taken by the main thread that reads the input
//! and by the vCPU that adds buffers.

use std::collections::VecDeque;
use std::sync::Arc;

use base::EventFd;

use crate::device::{ActiveQueue, DeviceStatus};
use crate::fault::{Answer, GuestFault};
use crate::queue::Chain;
use crate::stats::Counters;

/// Input that waits for the guest at most; past it the reader is told to wait.
const MAX_PENDING: usize = 4096;
/// Looks at the queue that one call may make: each byte in a buffer of its own, and as many again in vain. A guest that
/// takes buffers back as fast as it offers them waits for its next kick.
const MAX_TURNS: usize = 2 * MAX_PENDING;

/// The receive side.
pub(super) struct Receive {
    live: Option<(ActiveQueue, Arc<DeviceStatus>)>,
    chain: Chain,
    pending: VecDeque<u8>,
    /// Input was refused; `room` is signalled once there is space again.
    refused: bool,
    room: EventFd,
    counters: Arc<Counters>,
}

impl Receive {
    pub(super) fn new(room: EventFd, counters: Arc<Counters>) -> Self {
        Self { live: None, chain: Chain::new(), pending: VecDeque::new(), refused: false, room, counters }
    }

    pub(super) fn activate(&mut self, queue: ActiveQueue, status: Arc<DeviceStatus>) {
        self.live = Some((queue, status));
        self.run();
    }

    /// Gives the queue back; input that waits stays for the next driver.
    pub(super) fn reset(&mut self) {
        self.live = None;
        self.chain = Chain::new();
    }

    /// Takes what fits of `bytes` and gives how many that were.
    pub(super) fn input(&mut self, bytes: &[u8]) -> usize {
        let mut taken = 0;
        // What the guest takes at once makes room for more.
        loop {
            let rest = bytes.get(taken..).unwrap_or_default();
            let fits = rest.len().min(MAX_PENDING - self.pending.len());
            self.pending.extend(rest.iter().take(fits));
            taken += fits;
            self.run();
            if fits == 0 || taken == bytes.len() {
                break;
            }
        }
        self.refused = taken < bytes.len();
        taken
    }

    /// Moves pending input into the guest's buffers. Kicks are asked for only while input waits for a buffer, so an idle
    /// console costs the guest no exits when it adds buffers.
    pub(super) fn run(&mut self) {
        let Some((queue, status)) = &mut self.live else { return };
        let before = self.pending.len();
        queue.ring.disable_kicks();
        for _ in 0..MAX_TURNS {
            if self.pending.is_empty() {
                break;
            }
            match queue.ring.pop(&mut self.chain) {
                Ok(true) => {}
                Ok(false) if queue.ring.enable_kicks() => continue,
                Ok(false) => break,
                Err(fault) => return status.needs_reset(fault),
            }
            let written = match deliver(&mut self.pending, &self.chain) {
                Ok(n) => n,
                Err(fault) if fault.answer() == Answer::GiveBack => 0,
                Err(fault) => return status.needs_reset(fault),
            };
            queue.ring.push_used(self.chain.head(), written);
            self.counters.request(0, written.into());
        }
        if queue.ring.needs_notification() {
            queue.irq.notify();
            self.counters.interrupt();
        }
        if self.refused && self.pending.len() < before {
            self.refused = false;
            // Only a counter at its limit refuses, and then the reader is being told anyway.
            let _ = self.room.write(1);
        }
    }
}

/// Moves the front of `pending` into `chain`; gives how many bytes.
fn deliver(pending: &mut VecDeque<u8>, chain: &Chain) -> Result<u32, GuestFault> {
    if chain.writable().is_empty() {
        return Err(GuestFault::NoRoom);
    }
    let (front, back) = pending.as_slices();
    let mut written = chain.write_at(0, front);
    if written == front.len() {
        // At most MAX_PENDING.
        written += chain.write_at(written as u32, back);
    }
    pending.drain(..written);
    Ok(written as u32)
}
