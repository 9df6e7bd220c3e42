// SPDX-License-Identifier: Apache-2.0
//! How threads tell the main thread that the guest is over. The first outcome wins.
//!
//! Set by vCPU threads (power-off, reset, faults) and by the main thread itself (signals, the user's quit).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Why a run ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The guest powered itself off.
    PowerOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest's kernel panicked and said so through pvpanic.
    Panic,
    /// The guest ended the machine with this exit status, through the debug exit.
    Exit(u8),
    /// The user quit, or asked a second time for the end.
    Killed,
    /// The guest can't go on: a triple fault, or something KVM can't emulate.
    GuestFault(String),
}

/// Shared by the main thread and the vCPU threads.
pub struct Control {
    outcome: Mutex<Option<Outcome>>,
    stop: AtomicBool,
    event: EventFd,
}

impl Control {
    /// Makes one.
    ///
    /// # Errors
    /// When the host is out of descriptors.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            outcome: Mutex::new(None),
            stop: AtomicBool::new(false),
            event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    /// Ends the run with `outcome`, unless it ended before.
    pub fn finish(&self, outcome: Outcome) {
        let mut slot = self.outcome.lock().unwrap_or_else(PoisonError::into_inner);
        slot.get_or_insert(outcome);
        self.stop.store(true, Ordering::Release);
        // A full eventfd is readable too, so a failed write loses nothing.
        let _ = self.event.write(1);
    }

    /// Whether vCPU threads should leave.
    #[inline]
    pub fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// What ended the run, once something did.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Readable once the run is over.
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}
