// SPDX-License-Identifier: Apache-2.0
//! Each thread's own slot for `publish`: found in a thread-local cell, registered at the thread's first look, handed to
//! another thread once this one has ended.

use std::cell::Cell;
use std::sync::{Arc, Mutex, PoisonError};

use crate::publish::{Slot, register};

/// Slots of threads that have ended.
static IDLE: Mutex<Vec<&'static Arc<Slot>>> = Mutex::new(Vec::new());

/// Gives the thread's slot back when the thread ends.
struct Lease(Cell<Option<&'static Arc<Slot>>>);

impl Drop for Lease {
    fn drop(&mut self) {
        // From here on a destructor that looks gets a fresh slot.
        OWN.set(None);
        if let Some(slot) = self.0.take() {
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(slot);
        }
    }
}

thread_local! {
    /// Without a destructor, so that finding it costs one load.
    static OWN: Cell<Option<&'static Slot>> = const { Cell::new(None) };
    static LEASE: Lease = const { Lease(Cell::new(None)) };
}

/// Calls `act` with the slot of the calling thread.
#[inline]
pub(crate) fn with<R>(act: impl FnOnce(&Slot) -> R) -> R {
    act(match OWN.get() {
        Some(slot) => slot,
        None => first(),
    })
}

#[cold]
fn first() -> &'static Slot {
    let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
    // A slot is never freed: there are as many as there were threads at one time.
    let slot = idle.unwrap_or_else(|| Box::leak(Box::new(register())));
    OWN.set(Some(slot));
    // In a thread that is ending there is no lease any more; its slot stays idle for good.
    let _ = LEASE.try_with(|lease| lease.0.set(Some(slot)));
    slot
}
