// SPDX-License-Identifier: Apache-2.0
//! The memory device (virtio 1.2, 5.15): a region of guest addresses of which the driver plugs and unplugs blocks, up to
//! what the host requests.
//!
//! `machine` makes it over [`mem::Hot`] with a [`Place`] that has KVM follow; `device` is what the transport sees, `request`
//! what the driver may say and what it is answered, `control` how much the host wants plugged.

mod control;
mod device;
mod request;

pub use control::MemControl;
pub use device::{CONFIG_LEN, MemDevice, Place, feature};
pub use request::{REQUEST_LEN, RESPONSE_LEN, Request, Response};
