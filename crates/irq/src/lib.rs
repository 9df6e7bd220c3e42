// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! Interrupts as seen by devices: lines, messages, the I/O APIC and the paravirtual controller, with no ioctl and no thread.
//!
//! Devices in `pci` and `virtio` hold these traits; `machine` answers them with KVM's irqfds, `testkit` with recorders.

mod ioapic;
#[cfg(not(loom))]
mod sync;
#[cfg(loom)]
pub mod sync;
pub mod vioapic;

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

pub use ioapic::{IoApic, Written};
pub use vioapic::Vioapic;

/// A message-signalled interrupt as the guest programs it (PCI 3.0, 6.8.1): an upper and lower address and data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct MsiMessage {
    /// Destination address, 64 bits.
    pub address: u64,
    /// Payload; on x86 vector and delivery mode.
    pub data: u32,
}

/// One interrupt message that a device may send.
pub trait MsiVector: Send + Sync {
    /// Points the vector at `message`, or at nothing (masked or never set). Called on the vCPU thread that wrote the
    /// table; must not block on the device.
    ///
    /// # Errors
    /// When the interrupt routing can't be changed (routing table full).
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()>;

    /// Sends the message. Called from device threads; does nothing while the vector is unrouted.
    fn notify(&self);

    /// An eventfd whose writing sends the message too, for a device that the host's kernel serves; good while the vector
    /// lives. `None` where there is no such thing.
    fn fd(&self) -> Option<RawFd> {
        None
    }

    /// Whether what is written to [`MsiVector::fd`] stays there instead of being sent; what stayed is sent when it no longer
    /// has to. Called like [`MsiVector::route`].
    ///
    /// # Errors
    /// When the host refuses; nothing is sent then.
    fn hold(&self, _held: bool) -> io::Result<()> {
        Ok(())
    }

    /// Whether something stays in [`MsiVector::fd`].
    fn is_pending(&self) -> bool {
        false
    }
}

/// Hands out message vectors; one per device function.
pub trait MsiSink: Send + Sync {
    /// Makes `count` vectors, unrouted.
    ///
    /// # Errors
    /// When there are not enough interrupts or descriptors left.
    fn vectors(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiVector>>>;
}

/// A level-triggered input of the guest's interrupt controller, for a device whose level the host's kernel watches.
pub trait LevelPin: Send + Sync {
    /// Connects it, until what is returned is dropped; then it is released.
    ///
    /// # Errors
    /// When the host is out of descriptors, threads or interrupts.
    fn connect(&self) -> io::Result<Box<dyn Resampled>>;
}

/// A connected input.
pub trait Resampled: Send {
    /// The eventfd that asserts the input when it is written.
    fn trigger(&self) -> RawFd;

    /// The eventfd that is written when the guest ended the interrupt: the input is released by then, and asserted again by
    /// whoever finds the device's level still there.
    fn ended(&self) -> RawFd;
}

/// An interrupt input of the guest's interrupt controller. Where the guest made it level-triggered, the first event asserts
/// it, and it stays asserted until it is released.
pub trait IrqLine: Send + Sync {
    /// Something happened. Called from any thread, without waiting.
    fn pulse(&self);

    /// Nothing is outstanding any more, as far as the caller saw; `still` looks again, after the line has gone down, so that
    /// an event at the same moment is not lost. Nothing to do where only edges count.
    fn release(&self, _still: &dyn Fn() -> bool) {}
}
