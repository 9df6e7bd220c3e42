// SPDX-License-Identifier: Apache-2.0
//! The entropy device (virtio 1.2, 5.4): the kernel's random bytes straight into guest memory.
//!
//! Its one queue is kicked inline: filling a request takes less time than waking a thread, and the guest waits for it.

use std::io;
use std::sync::Arc;

use base::Seg;

use crate::device::{Activation, ActiveQueue, DeviceStatus, VirtioDevice};
use crate::fault::{Answer, GuestFault};
use crate::queue::Chain;
use crate::stats::Counters;

/// The most random bytes one request gets. The used length tells the driver how many there are.
pub const MAX_BYTES: usize = 64 * 1024;
/// Rounds of draining the queue that one kick may cause; a guest that still adds requests waits for its next kick.
const MAX_ROUNDS: usize = 16;

/// The device.
pub struct Rng {
    live: Option<(ActiveQueue, Arc<DeviceStatus>)>,
    chain: Chain,
    counters: Arc<Counters>,
}

impl Rng {
    /// An entropy device.
    #[must_use]
    pub fn new() -> Self {
        Self { live: None, chain: Chain::new(), counters: Arc::default() }
    }

    /// What it counts.
    #[must_use]
    pub const fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    fn run(&mut self) {
        let Some((queue, status)) = &mut self.live else { return };
        for _ in 0..MAX_ROUNDS {
            loop {
                match queue.ring.pop(&mut self.chain) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(fault) => {
                        status.needs_reset(fault);
                        return;
                    }
                }
                let written = match fill(self.chain.writable()) {
                    Ok(n) => n,
                    // Each fault has its answer in one place; for a request without room it is an empty reply.
                    Err(fault) if fault.answer() == Answer::GiveBack => 0,
                    Err(fault) => {
                        status.needs_reset(fault);
                        return;
                    }
                };
                queue.ring.push_used(self.chain.head(), written);
                self.counters.request(0, written.into());
            }
            if queue.ring.needs_notification() {
                queue.irq.notify();
                self.counters.interrupt();
            }
            if !queue.ring.enable_kicks() {
                return;
            }
        }
    }
}

impl Default for Rng {
    fn default() -> Self {
        Self::new()
    }
}

/// Fills `segs` with random bytes, at most [`MAX_BYTES`] of them; gives how many.
fn fill(segs: &[Seg]) -> Result<u32, GuestFault> {
    if segs.is_empty() {
        return Err(GuestFault::NoRoom);
    }
    let mut done = 0;
    for seg in segs {
        let want = seg.len.min(MAX_BYTES - done);
        if want == 0 {
            break;
        }
        // SAFETY: the segment is guest memory that the chain keeps mapped, and the kernel writes at most `want` bytes.
        let got = unsafe { libc::getrandom(seg.ptr.cast(), want, 0) };
        // A signal may cut a long read short: what there is, is good.
        let Ok(got) = usize::try_from(got) else { break };
        done += got;
        if got < want {
            break;
        }
    }
    // At most MAX_BYTES.
    Ok(done as u32)
}

impl VirtioDevice for Rng {
    fn kind(&self) -> u16 {
        4
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &[u16] {
        &[64]
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn write_config(&mut self, _offset: u64, _data: &[u8]) {}

    fn activate(&mut self, activation: Activation) -> io::Result<()> {
        let status = activation.status;
        self.live = activation.queues.into_iter().next().map(|queue| (queue, status));
        self.run();
        Ok(())
    }

    fn reset(&mut self) {
        self.live = None;
        self.chain = Chain::new();
    }

    fn inline_queues(&self) -> u64 {
        1
    }

    fn on_kick(&mut self, _queue: u16) {
        self.counters.kick();
        self.run();
    }
}
