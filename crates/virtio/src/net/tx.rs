// SPDX-License-Identifier: Apache-2.0
//! The transmit queue: from chains of the guest to the wire. Runs on the worker's thread.

use std::io;

use super::HEADER;
use super::outbox::Outbox;
use super::stats::NetCounts;
use super::wire::Wire;
use crate::device::ActiveQueue;
use crate::fault::GuestFault;
use crate::queue::Chain;

/// How a round ended.
#[derive(Debug)]
pub enum Round {
    /// Nothing is left to do until somebody wakes the worker.
    Idle,
    /// There may be more at once.
    More,
    /// The wire is gone.
    Gone(io::Error),
}

/// The queue and what is on its way.
pub struct Transmit {
    queue: ActiveQueue,
    chain: Chain,
    /// Packets the wire has not taken yet.
    pub out: Outbox,
}

impl Transmit {
    /// Serves `queue` with packets as the wire wants them.
    pub fn new(queue: ActiveQueue, out: Outbox) -> Self {
        Self { queue, chain: Chain::new(), out }
    }

    /// One batch. Without a `wire` packets go nowhere, as with a cable that is out.
    ///
    /// # Errors
    /// What the guest did wrong.
    pub fn run(&mut self, wire: Option<&mut Box<dyn Wire>>, counts: &mut NetCounts) -> Result<Round, GuestFault> {
        self.queue.ring.disable_kicks();
        let mut drained = false;
        while !drained && self.out.has_room() {
            drained = !self.queue.ring.pop(&mut self.chain)?;
            if !drained {
                let len = self.chain.readable_len() as usize;
                if len < HEADER {
                    return Err(GuestFault::NetLayout);
                }
                self.out.push(self.chain.head(), self.chain.readable(), len);
            }
        }
        let sent = match wire {
            Some(wire) => wire.send(&mut self.out),
            None => {
                self.out.refuse_all();
                Ok(())
            }
        };
        self.give_back(counts);
        match sent {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => Ok(Round::Gone(e)),
            // The wire says when it has room again, and no kick is wanted before.
            Err(_) => Ok(Round::Idle),
            Ok(()) if drained && !self.queue.ring.enable_kicks() => Ok(Round::Idle),
            Ok(()) => Ok(Round::More),
        }
    }

    fn give_back(&mut self, counts: &mut NetCounts) {
        for done in self.out.done() {
            match done.sent {
                Some(bytes) => {
                    counts.sent += 1;
                    counts.sent_bytes += u64::from(bytes);
                }
                None => counts.sent_dropped += 1,
            }
            self.queue.ring.push_used(done.head, 0);
        }
        if self.queue.ring.needs_notification() {
            counts.interrupts += 1;
            self.queue.irq.notify();
        }
    }
}
