// SPDX-License-Identifier: Apache-2.0
//! The transmit queue: from chains of the guest to the wire. Runs on the worker's thread.

use std::io;
use std::time::Duration;

use super::HEADER;
use super::limit::Limit;
use super::outbox::Outbox;
use super::stats::NetCounts;
use super::wire::Wire;
use crate::coalesce::Coalescer;
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
    /// A rate limit lets nothing pass for so long.
    Wait(Duration),
    /// The wire is gone.
    Gone(io::Error),
}

/// The queue and what is on its way.
pub struct Transmit {
    queue: ActiveQueue,
    chain: Chain,
    limit: Limit,
    /// When the guest hears that packets left.
    pub coalescer: Coalescer,
    /// Packets the wire has not taken yet.
    pub out: Outbox,
}

impl Transmit {
    /// Serves `queue` with packets as the wire wants them, as fast as `limit` allows.
    pub fn new(queue: ActiveQueue, out: Outbox, limit: Limit, coalescer: Coalescer) -> Self {
        Self { queue, chain: Chain::new(), limit, coalescer, out }
    }

    /// One batch. Without a `wire` packets go nowhere, as with a cable that is out.
    ///
    /// # Errors
    /// What the guest did wrong.
    pub fn run(&mut self, wire: Option<&mut Box<dyn Wire>>, counts: &mut NetCounts) -> Result<Round, GuestFault> {
        self.queue.ring.disable_kicks();
        let (mut drained, mut wait) = (false, None);
        while !drained && self.out.has_room() {
            wait = if self.queue.ring.has_more() { self.limit.wait(counts) } else { None };
            if wait.is_some() {
                break;
            }
            drained = !self.queue.ring.pop(&mut self.chain)?;
            if !drained {
                let len = self.chain.readable_len() as usize;
                if len < HEADER {
                    return Err(GuestFault::NetLayout);
                }
                self.limit.charge(len - HEADER);
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
            Ok(()) if wait.is_some() => Ok(wait.map_or(Round::More, Round::Wait)),
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
            self.coalescer.finish();
        }
        if counts.put_off(&mut self.coalescer) && self.queue.ring.needs_notification() {
            counts.interrupts += 1;
            self.queue.irq.notify();
        }
    }
}
