// SPDX-License-Identifier: Apache-2.0
//! The guest's side of things, played without a guest: a virtqueue driver, drivers for both faces of a device, and recording
//! interrupts; and tiny guests that do run.
//!
//! Used by tests and fuzz targets only. What it does wrong it does on purpose: raw access to rings and registers is offered
//! beside the well-behaved calls.

pub mod code;
pub mod conformance;
pub mod device_ops;
pub mod driver;
pub mod faces;
pub mod guest;
pub mod irq_ops;
pub mod ops;
pub mod qcow2;
pub mod sink;

pub use code::Code;
pub use device_ops::{HOT, Places, blk_ops, console_ops, hot_ram, mem_ops, net_ops, rng_ops};
pub use driver::{Buf, GuestQueue};
pub use faces::{MmioFace, PciFace};
pub use guest::{Face, Guest, Register};
pub use irq_ops::{ioapic_ops, vioapic_ops};
pub use ops::virtqueue_ops;
pub use qcow2::Rng;
pub use sink::{RecordingSink, RecordingVector};

use base::Gpa;
use mem::GuestRam;

/// `size` bytes of guest memory from address 0.
///
/// # Panics
/// When the host has none.
#[must_use]
#[allow(clippy::expect_used)] // a test without memory can only stop
pub fn ram(size: u64) -> GuestRam {
    GuestRam::anonymous(&[(Gpa(0), size)]).expect("memory for a test guest")
}
