// SPDX-License-Identifier: Apache-2.0
//! Interrupts that are written down instead of sent. Shared between the device under test and the test.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use irq::{IrqLine, MsiMessage, MsiSink, MsiVector};
use virtio::Interrupt;

/// A vector that counts.
#[derive(Debug, Default)]
pub struct RecordingVector {
    sent: AtomicUsize,
    routed: Mutex<Vec<Option<MsiMessage>>>,
    refuse: AtomicBool,
}

impl RecordingVector {
    /// Messages sent so far.
    #[must_use]
    pub fn sent(&self) -> usize {
        self.sent.load(Ordering::SeqCst)
    }

    /// Every route it was given, oldest first.
    #[must_use]
    pub fn routes(&self) -> Vec<Option<MsiMessage>> {
        self.routed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// From now on, refuse (or take) routes.
    pub fn refuse_routes(&self, refuse: bool) {
        self.refuse.store(refuse, Ordering::SeqCst);
    }
}

impl MsiVector for RecordingVector {
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        if self.refuse.load(Ordering::SeqCst) {
            return Err(io::Error::other("the routing table is full"));
        }
        self.routed.lock().unwrap_or_else(PoisonError::into_inner).push(message);
        Ok(())
    }

    fn notify(&self) {
        self.sent.fetch_add(1, Ordering::SeqCst);
    }
}

/// Hands out [`RecordingVector`]s and keeps them.
#[derive(Debug, Default)]
pub struct RecordingSink {
    made: Mutex<Vec<Arc<RecordingVector>>>,
}

impl RecordingSink {
    /// All vectors handed out, oldest first.
    #[must_use]
    pub fn made(&self) -> Vec<Arc<RecordingVector>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl MsiSink for RecordingSink {
    fn vectors(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiVector>>> {
        let fresh: Vec<_> = (0..count).map(|_| Arc::new(RecordingVector::default())).collect();
        self.made.lock().unwrap_or_else(PoisonError::into_inner).extend(fresh.iter().cloned());
        Ok(fresh.into_iter().map(|v| v as Arc<dyn MsiVector>).collect())
    }
}

/// A line, or the interrupts of a whole device, that counts. As a device's face it counts all queues together.
#[derive(Debug, Default)]
pub struct RecordingLine {
    pulses: AtomicUsize,
    config: AtomicUsize,
}

impl RecordingLine {
    /// Edges, or queue interrupts, so far.
    #[must_use]
    pub fn pulses(&self) -> usize {
        self.pulses.load(Ordering::SeqCst)
    }

    /// Configuration interrupts so far.
    #[must_use]
    pub fn configs(&self) -> usize {
        self.config.load(Ordering::SeqCst)
    }
}

impl IrqLine for RecordingLine {
    fn pulse(&self) {
        self.pulses.fetch_add(1, Ordering::SeqCst);
    }
}

impl Interrupt for RecordingLine {
    fn queue(&self, _index: u16) {
        self.pulse();
    }

    fn config(&self) {
        self.config.fetch_add(1, Ordering::SeqCst);
    }
}
