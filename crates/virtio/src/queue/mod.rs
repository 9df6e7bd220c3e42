// SPDX-License-Identifier: Apache-2.0
//! Split virtqueues (virtio 1.2, 2.7), the device's half.
//!
//! [`QueueConfig`] is what the driver set up through the transport and is never trusted; [`QueueConfig::activate`] turns it
//! into a [`Queue`], whose rings are known to lie in guest memory. Packed rings and `IN_ORDER` are not offered.

mod chain;
mod config;
mod split;

pub use chain::{Chain, window};
pub(crate) use chain::{copy_in, copy_out};
pub use config::QueueConfig;
pub use split::{Queue, RingPlaces};

/// The largest queue that a device may offer. It bounds the work one chain can cause.
pub const MAX_SIZE: u16 = 1024;
/// What a device offers unless it has a reason.
pub const DEFAULT_SIZE: u16 = 256;
