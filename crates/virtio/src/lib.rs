// SPDX-License-Identifier: Apache-2.0
//! Virtio 1.2: split virtqueues, one transport core with a PCI and an MMIO face, and the devices.
//!
//! A guest is hostile: whatever it writes into rings, registers or requests ends in a [`GuestFault`] with one exact answer,
//! never in a panic, an endless loop or an access outside its own memory. `machine` builds devices and places them on the
//! bus; devices run on their own threads (disks, NICs) or on the thread of the vCPU that kicked them (console, entropy, memory).

pub mod blk;
pub mod coalesce;
pub mod console;
pub mod device;
pub mod fault;
mod inline;
pub mod mem;
pub mod net;
pub mod queue;
pub mod rng;
pub mod stats;
pub mod throttle;
pub mod transport;

pub use self::mem::MemDevice;
pub use console::{Console, ConsolePort};
pub use device::{Activation, ActiveQueue, DeviceStatus, Interrupt, QueueIrq, VirtioDevice};
pub use fault::{Answer, GuestFault};
pub use net::Net;
pub use queue::{Chain, Queue, QueueConfig};
pub use rng::Rng;
pub use transport::mmio::VirtioMmio;
pub use transport::pci::VirtioPci;

/// Transport feature bits that the core offers for every device (virtio 1.2, 6).
pub mod features {
    /// `VIRTIO_F_INDIRECT_DESC`: descriptors may name a table of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// `VIRTIO_F_EVENT_IDX`: each side says at which index it wants to be told.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// `VIRTIO_F_VERSION_1`: not a legacy device. A driver that does not take it is refused.
    pub const VERSION_1: u64 = 1 << 32;
    /// What the transport core offers for every device.
    pub const TRANSPORT: u64 = INDIRECT_DESC | EVENT_IDX | VERSION_1;
}
