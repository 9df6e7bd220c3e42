// SPDX-License-Identifier: Apache-2.0
//! The control queue (5.1.6.5): receive modes, the address, pairs of queues, offloads. Runs on the worker's thread.

use super::feature;
use super::pairs::Pairs;
use super::shared::Shared;
use super::stats::NetCounts;
use super::wire::Wire;
use crate::device::ActiveQueue;
use crate::fault::GuestFault;
use crate::queue::Chain;

const OK: u8 = 0;
const ERR: u8 = 1;

/// Classes and commands.
const RX: u8 = 0;
const RX_LAST: u8 = 1;
const MAC: u8 = 1;
const MAC_TABLE: u8 = 0;
const MAC_ADDR: u8 = 1;
const MQ: u8 = 4;
const MQ_PAIRS: u8 = 0;
const OFFLOADS: u8 = 5;
const OFFLOADS_SET: u8 = 0;

/// Commands before the packets have their turn.
const BATCH: usize = 16;

/// The queue.
pub struct Control {
    queue: ActiveQueue,
    chain: Chain,
    /// Offloads that were agreed on, which are those that may be switched.
    agreed: u64,
}

impl Control {
    /// Serves `queue` for a driver that agreed on `features`.
    pub fn new(queue: ActiveQueue, features: u64) -> Self {
        Self { queue, chain: Chain::new(), agreed: features }
    }

    /// One batch; whether there may be more.
    ///
    /// # Errors
    /// What the guest did wrong.
    pub fn run(
        &mut self,
        mut wire: Option<&mut Box<dyn Wire>>,
        shared: &Shared,
        pairs: &Pairs,
        counts: &mut NetCounts,
    ) -> Result<bool, GuestFault> {
        self.queue.ring.disable_kicks();
        let mut more = true;
        for _ in 0..BATCH {
            if !self.queue.ring.pop(&mut self.chain)? {
                more = self.queue.ring.enable_kicks();
                break;
            }
            let mut head = [0; 2];
            if self.chain.read_at(0, &mut head) < head.len() || self.chain.writable_len() == 0 {
                return Err(GuestFault::NetLayout);
            }
            let ack = if self.obey(head, &mut wire, shared, pairs) { OK } else { ERR };
            // Drivers give one byte; the answer is the first.
            self.chain.write_at(0, &[ack]);
            self.queue.ring.push_used(self.chain.head(), 1);
            counts.commands += 1;
        }
        if self.queue.ring.needs_notification() {
            counts.interrupts += 1;
            self.queue.irq.notify();
        }
        Ok(more)
    }

    /// Carries the command in the chain out; `false` if it can't be.
    fn obey(&self, head: [u8; 2], wire: &mut Option<&mut Box<dyn Wire>>, shared: &Shared, pairs: &Pairs) -> bool {
        match head {
            // Everything that the wire brings is for this guest: promiscuous or not, it gets it.
            [RX, 0..=RX_LAST] => self.chain.readable_len() == 3,
            [MAC, MAC_TABLE] => self.agreed & feature::CTRL_RX != 0,
            [MAC, MAC_ADDR] if self.agreed & feature::CTRL_MAC_ADDR != 0 => {
                let mut mac = [0; 6];
                let whole = self.chain.read_at(2, &mut mac) == mac.len();
                // A group address is nobody's.
                let good = whole && mac[0] & 1 == 0;
                if good {
                    shared.set_mac(mac);
                }
                good
            }
            [MQ, MQ_PAIRS] if self.agreed & feature::MQ != 0 => {
                let mut count = [0; 2];
                let whole = self.chain.read_at(2, &mut count) == count.len();
                // Of a tap that is gone nothing can be attached; the guest learns that from its link.
                whole && pairs.select(u16::from_le_bytes(count)).is_ok()
            }
            [OFFLOADS, OFFLOADS_SET] if self.agreed & feature::CTRL_GUEST_OFFLOADS != 0 => {
                let mut offloads = [0; 8];
                let whole = self.chain.read_at(2, &mut offloads) == offloads.len();
                let wanted = u64::from_le_bytes(offloads);
                let allowed = wanted & !(self.agreed & feature::GUEST_OFFLOADS) == 0;
                whole && allowed && wire.as_mut().is_none_or(|wire| wire.accept_offloads(wanted).is_ok())
            }
            _ => false,
        }
    }
}
