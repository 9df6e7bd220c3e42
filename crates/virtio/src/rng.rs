// SPDX-License-Identifier: Apache-2.0
//! The entropy device (virtio 1.2, 5.4): the kernel's random bytes straight into guest memory.
//!
//! `machine` gives each guest one. It has no thread: see `inline`.

use std::io;
use std::sync::Arc;

use base::Seg;

use crate::device::{Activation, VirtioDevice};
use crate::fault::GuestFault;
use crate::inline::InlineQueue;
use crate::queue::Chain;
use crate::stats::Counters;

/// The most random bytes one request gets. The used length tells the driver how many there are.
pub const MAX_BYTES: usize = 64 * 1024;

/// The device.
pub struct Rng {
    queue: InlineQueue,
}

impl Rng {
    /// An entropy device.
    #[must_use]
    pub fn new() -> Self {
        Self { queue: InlineQueue::new() }
    }

    /// What it counts.
    #[must_use]
    pub const fn counters(&self) -> &Arc<Counters> {
        self.queue.counters()
    }
}

impl Default for Rng {
    fn default() -> Self {
        Self::new()
    }
}

fn answer(chain: &mut Chain) -> Result<u32, GuestFault> {
    fill(chain.writable())
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
        self.queue.activate(activation);
        self.queue.run(answer);
        Ok(())
    }

    fn reset(&mut self) {
        self.queue.reset();
    }

    fn inline_queues(&self) -> u64 {
        1
    }

    fn on_kick(&mut self, _queue: u16) {
        self.counters().kick();
        self.queue.run(answer);
    }
}
