// SPDX-License-Identifier: Apache-2.0
//! Which of a NIC's pairs of queues are in use (5.1.6.5.5). The worker of the first pair, which has the control queue, changes
//! it; each worker looks before it touches its wire. The host's kernel spreads what it sends over the queues of the tap that are
//! attached, so those that nobody looks after are detached.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU16, Ordering};

use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::sys;

/// A pair past the first.
struct Further {
    /// A descriptor of its queue of the tap.
    queue: OwnedFd,
    /// Its worker looks again.
    wake: EventFd,
}

/// See above.
pub struct Pairs {
    active: AtomicU16,
    further: Vec<Further>,
}

impl Pairs {
    /// One pair, and one more for each of `queues`, which are attached to their tap; only the first is in use.
    ///
    /// # Errors
    /// When the host is out of descriptors.
    pub fn new<'a>(queues: impl Iterator<Item = BorrowedFd<'a>>) -> io::Result<Self> {
        let further = queues.map(|queue| {
            let wake = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
            Ok(Further { queue: queue.try_clone_to_owned()?, wake })
        });
        let further: Vec<Further> = further.collect::<io::Result<_>>()?;
        let pairs = Self { active: AtomicU16::new(further.len() as u16 + 1), further };
        pairs.select(1)?;
        Ok(pairs)
    }

    /// All there are.
    pub fn count(&self) -> u16 {
        self.further.len() as u16 + 1
    }

    /// Whether pair `index` is in use.
    pub fn is_active(&self, index: u16) -> bool {
        index < self.active.load(Ordering::Acquire)
    }

    /// What wakes the worker of pair `index` when it comes into use.
    pub fn wake(&self, index: u16) -> Option<&EventFd> {
        let further = usize::from(index).checked_sub(1)?;
        self.further.get(further).map(|further| &further.wake)
    }

    /// Uses the first `count` pairs and no other.
    ///
    /// # Errors
    /// When there are not so many, or the tap is gone.
    pub fn select(&self, count: u16) -> io::Result<()> {
        if count == 0 || count > self.count() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let now = self.active.load(Ordering::Acquire);
        let changed = |from: u16, to: u16| self.further.iter().take(usize::from(to) - 1).skip(usize::from(from) - 1);
        if count < now {
            // Their workers stop looking before the queues are gone.
            self.active.store(count, Ordering::Release);
            changed(count, now).try_for_each(|further| sys::attach_queue(&further.queue, false))
        } else {
            changed(now, count).try_for_each(|further| sys::attach_queue(&further.queue, true))?;
            self.active.store(count, Ordering::Release);
            for further in changed(now, count) {
                // Only a full counter refuses, and then the worker is awake.
                let _ = further.wake.write(1);
            }
            Ok(())
        }
    }
}
