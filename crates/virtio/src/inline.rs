// SPDX-License-Identifier: Apache-2.0
//! A queue that is answered where it is kicked, on the vCPU's thread: what the entropy and the memory device have in common.
//! Requests take less time than waking a thread would, and the guest waits for them anyway.

use std::sync::Arc;

use crate::device::{Activation, ActiveQueue, DeviceStatus};
use crate::fault::{Answer, GuestFault};
use crate::queue::Chain;
use crate::stats::Counters;

/// Rounds of draining the queue that one kick may cause; a guest that still adds requests waits for its next kick.
const MAX_ROUNDS: usize = 16;

/// The one queue of such a device, between activation and reset, and what is counted of it.
pub(crate) struct InlineQueue {
    live: Option<(ActiveQueue, Arc<DeviceStatus>)>,
    chain: Chain,
    counters: Arc<Counters>,
}

impl InlineQueue {
    /// A queue that the driver has not set up.
    pub(crate) fn new() -> Self {
        Self { live: None, chain: Chain::new(), counters: Arc::default() }
    }

    /// What it counts.
    pub(crate) const fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// The driver has set it up.
    pub(crate) fn activate(&mut self, activation: Activation) {
        let status = activation.status;
        self.live = activation.queues.into_iter().next().map(|queue| (queue, status));
    }

    /// The driver has given it up.
    pub(crate) fn reset(&mut self) {
        self.live = None;
        self.chain = Chain::new();
    }

    /// Answers what is in the queue: `answer` gives the bytes that it wrote into a chain. A driver that breaks the rules is
    /// not listened to again before it resets the device.
    pub(crate) fn run(&mut self, mut answer: impl FnMut(&mut Chain) -> Result<u32, GuestFault>) {
        let Some((queue, status)) = &mut self.live else { return };
        if let Err(fault) = drain(queue, &mut self.chain, &self.counters, &mut answer) {
            status.needs_reset(fault);
            self.live = None;
        }
    }
}

fn drain(
    queue: &mut ActiveQueue,
    chain: &mut Chain,
    counters: &Counters,
    answer: &mut impl FnMut(&mut Chain) -> Result<u32, GuestFault>,
) -> Result<(), GuestFault> {
    for _ in 0..MAX_ROUNDS {
        while queue.ring.pop(chain)? {
            let written = match answer(chain) {
                Ok(written) => written,
                // Each fault has its answer in one place; for a request without room it is an empty reply.
                Err(fault) if fault.answer() == Answer::GiveBack => 0,
                Err(fault) => return Err(fault),
            };
            counters.request(chain.readable_len().into(), written.into());
            queue.ring.push_used(chain.head(), written);
        }
        if queue.ring.needs_notification() {
            queue.irq.notify();
            counters.interrupt();
        }
        if !queue.ring.enable_kicks() {
            break;
        }
    }
    Ok(())
}
