// SPDX-License-Identifier: Apache-2.0
//! Guest memory: how it is described and found (`space`), where it lies in ours, and bounded access to it.
//!
//! `machine` makes one [`GuestRam`] and the address spaces of each VM; `boot` and `virtio` read and write through it.

pub mod backing;
mod hot;
mod layout;
pub mod pool;
pub mod prealloc;
mod publish;
mod ram;
#[cfg(not(loom))]
mod readers;
#[cfg(not(loom))]
pub mod space;
mod zero;

pub use hot::Hot;
pub use layout::{HIGH_START, LEAST_PIECE, LOW_END, nodes, piece_to_plug, ranges, room_to_plug};
#[cfg(not(loom))]
pub use publish::Published;
pub use ram::{GuestRam, MemError, SharedRange};
pub use vm_memory;
pub use zero::Zeroing;
