// SPDX-License-Identifier: Apache-2.0
//! The network device (virtio 1.2, 5.1): pairs of queues, each with a worker thread and a [`Wire`] to the host: `user` (passt's
//! stream socket) or `tap`; and a control queue, which the first worker serves. With vhost-net the host's kernel serves the
//! pairs ([`vhost`]), and the workers only look after it.
//!
//! A packet's walk out: kick → `Worker::turn` → `Transmit::run` pops chains into the [`Outbox`] → `Wire::send` hands guest
//! memory to the kernel. And in: the wire is readable → `Receive::run` gathers buffers → `Wire::receive` reads straight into
//! them → all buffers of a packet are shown at once → one interrupt for the batch.

mod ctrl;
mod device;
mod limit;
mod mac;
mod outbox;
mod pairs;
mod reach;
mod rx;
mod shared;
mod stats;
mod sys;
mod tap;
mod tx;
mod user;
mod vhost;
mod watch;
mod wire;
mod worker;

pub use device::Net;
pub use outbox::Outbox;
pub use reach::VhostMemory;
pub use stats::{NetCounts, NetStats};
pub use wire::{NetError, Wire};

/// Feature bits (virtio 1.2, 5.1.3).
pub mod feature {
    /// The device completes checksums of packets that the guest sends.
    pub const CSUM: u64 = 1 << 0;
    /// The guest takes packets whose checksum is not complete.
    pub const GUEST_CSUM: u64 = 1 << 1;
    /// The guest may change its offloads while it runs.
    pub const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
    /// The configuration holds the largest MTU.
    pub const MTU: u64 = 1 << 3;
    /// The configuration holds the address.
    pub const MAC: u64 = 1 << 5;
    /// The guest takes large TCP segments over IPv4.
    pub const GUEST_TSO4: u64 = 1 << 7;
    /// The same over IPv6.
    pub const GUEST_TSO6: u64 = 1 << 8;
    /// The guest takes large TCP segments with ECN.
    pub const GUEST_ECN: u64 = 1 << 9;
    /// The guest takes large UDP datagrams, to be cut as fragments.
    pub const GUEST_UFO: u64 = 1 << 10;
    /// The device takes large TCP segments over IPv4.
    pub const HOST_TSO4: u64 = 1 << 11;
    /// The same over IPv6.
    pub const HOST_TSO6: u64 = 1 << 12;
    /// The device takes large TCP segments with ECN.
    pub const HOST_ECN: u64 = 1 << 13;
    /// The device takes large UDP datagrams, to be cut as fragments.
    pub const HOST_UFO: u64 = 1 << 14;
    /// A packet may fill several receive buffers.
    pub const MRG_RXBUF: u64 = 1 << 15;
    /// The configuration holds the link's state.
    pub const STATUS: u64 = 1 << 16;
    /// There is a control queue.
    pub const CTRL_VQ: u64 = 1 << 17;
    /// It takes receive modes.
    pub const CTRL_RX: u64 = 1 << 18;
    /// There are several pairs of queues, and it takes how many are used.
    pub const MQ: u64 = 1 << 22;
    /// It takes an address.
    pub const CTRL_MAC_ADDR: u64 = 1 << 23;
    /// The guest takes runs of UDP datagrams over IPv4.
    pub const GUEST_USO4: u64 = 1 << 54;
    /// The same over IPv6.
    pub const GUEST_USO6: u64 = 1 << 55;
    /// The device takes runs of UDP datagrams.
    pub const HOST_USO: u64 = 1 << 56;
    /// What a guest may switch while it runs.
    pub const GUEST_OFFLOADS: u64 =
        GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ECN | GUEST_UFO | GUEST_USO4 | GUEST_USO6;
}

/// Bytes of `struct virtio_net_hdr` of a device with `VERSION_1`.
pub const HEADER: usize = 12;
/// Where `num_buffers` is in it.
const NUM_BUFFERS: u32 = 10;
/// Bytes of an Ethernet header: less is no frame.
const FRAME_MIN: usize = 14;
