// SPDX-License-Identifier: Apache-2.0
//! Guest memory: where it lies in the guest's address space and in ours, and bounded access to it.
//!
//! `machine` makes one [`GuestRam`] per VM and registers its slots with KVM; `boot` and `virtio` read and write through it.

mod layout;
mod ram;

pub use layout::{HIGH_START, LOW_END, ranges};
pub use ram::{GuestRam, MemError, SharedRange};
pub use vm_memory;
