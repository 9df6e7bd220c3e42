// SPDX-License-Identifier: Apache-2.0
//! What a guest can do wrong, and the one answer each wrong gets. Used by the queue, the transport core and the devices.
//!
//! Guest misbehaviour is not an error of the monitor: it is met here, answered and counted, and the VM goes on.

use std::fmt;

/// One way in which a guest broke the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum GuestFault {
    /// The available index runs ahead of what the queue can hold (virtio 1.2, 2.7.13.3).
    AvailJump = 1,
    /// The available ring names a descriptor past the table.
    HeadRange,
    /// The available ring names a chain that is still being worked on.
    HeadReused,
    /// A descriptor's `next` is past its table.
    NextRange,
    /// A chain has more descriptors than the queue; a loop looks like this too (2.7.5.3.1).
    ChainTooLong,
    /// A buffer is not, or not wholly, in guest memory; wrapped addresses look like this too.
    BufferAddress,
    /// A buffer of no bytes.
    ZeroLength,
    /// The buffers of one chain add up to 2^32 bytes or more (2.7.5).
    TotalLength,
    /// A buffer for the device to read follows one for it to write (2.7.4.2).
    ReadableAfterWritable,
    /// An indirect table without the feature negotiated (2.7.5.3.1).
    IndirectRefused,
    /// An indirect table inside an indirect table.
    IndirectNested,
    /// A descriptor that is indirect and yet goes on.
    IndirectWithNext,
    /// An indirect table that is empty, not whole descriptors, or outside guest memory.
    IndirectTable,
    /// A ring that is misaligned or not wholly in guest memory when the driver says it is ready.
    RingAddress,
    /// A set of features that was not offered, or lacks `VERSION_1`.
    Features,
    /// A status bit set before the ones it needs (3.1.1).
    StatusOrder,
    /// A queue size of zero, not a power of two, or more than offered (4.1.4.3.2).
    QueueSize,
    /// A write to a queue's settings after it was enabled, or to features after they were agreed.
    LateSetting,
    /// A request with nowhere to put its answer, where an answer is all there is to it.
    NoRoom,
    /// A block request without a whole header or without a status byte (5.2.6).
    BlkLayout,
    /// A block request of a type the device does not know.
    BlkUnknown,
    /// A block request whose range is not whole blocks of the disk, or runs past it.
    BlkRange,
    /// A write, discard or write-zeroes to a read-only disk.
    BlkReadOnly,
    /// A discard or write-zeroes segment with flags that are not defined for it (5.2.6.2).
    BlkFlags,
    /// A packet to send, or a command, without a whole header, or a command without room for its answer (5.1.6).
    NetLayout,
    /// The host's kernel, which serves the queue, met one of the faults of queues and chains and does not say which.
    KernelRefused,
}

/// What the guest gets for a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The device stops, sets `DEVICE_NEEDS_RESET` and sends a configuration interrupt (2.1.2).
    NeedsReset,
    /// The write is ignored; the driver sees it by reading the register back.
    Ignore,
    /// The chain is given back with nothing written.
    GiveBack,
    /// The request is finished with this status byte.
    Status(u8),
}

/// `VIRTIO_BLK_S_IOERR`.
const BLK_IOERR: u8 = 1;
/// `VIRTIO_BLK_S_UNSUPP`.
const BLK_UNSUPP: u8 = 2;

impl GuestFault {
    /// The one answer for this fault.
    #[must_use]
    pub const fn answer(self) -> Answer {
        match self {
            Self::AvailJump
            | Self::HeadRange
            | Self::HeadReused
            | Self::NextRange
            | Self::ChainTooLong
            | Self::BufferAddress
            | Self::ZeroLength
            | Self::TotalLength
            | Self::ReadableAfterWritable
            | Self::IndirectRefused
            | Self::IndirectNested
            | Self::IndirectWithNext
            | Self::IndirectTable
            | Self::RingAddress
            | Self::BlkLayout
            | Self::NetLayout
            | Self::KernelRefused => Answer::NeedsReset,
            Self::Features | Self::StatusOrder | Self::QueueSize | Self::LateSetting => Answer::Ignore,
            Self::NoRoom => Answer::GiveBack,
            Self::BlkRange | Self::BlkReadOnly => Answer::Status(BLK_IOERR),
            Self::BlkUnknown | Self::BlkFlags => Answer::Status(BLK_UNSUPP),
        }
    }

    /// What the guest did, in words for a log line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::AvailJump => "available index ran ahead of the queue",
            Self::HeadRange => "available ring names a descriptor past the table",
            Self::HeadReused => "available ring names a chain still in use",
            Self::NextRange => "descriptor's next is past its table",
            Self::ChainTooLong => "descriptor chain is longer than the queue or loops",
            Self::BufferAddress => "buffer is outside guest memory",
            Self::ZeroLength => "buffer has no bytes",
            Self::TotalLength => "chain describes 4 GiB or more",
            Self::ReadableAfterWritable => "readable buffer after a writable one",
            Self::IndirectRefused => "indirect descriptors were not negotiated",
            Self::IndirectNested => "indirect table inside an indirect table",
            Self::IndirectWithNext => "indirect descriptor with a next",
            Self::IndirectTable => "indirect table is empty, ragged or outside guest memory",
            Self::RingAddress => "ring is misaligned or outside guest memory",
            Self::Features => "features were not offered or lack VERSION_1",
            Self::StatusOrder => "status bits set out of order",
            Self::QueueSize => "queue size is zero, not a power of two or too big",
            Self::LateSetting => "queue or feature setting written too late",
            Self::NoRoom => "request has no room for an answer",
            Self::BlkLayout => "block request lacks a header or a status byte",
            Self::BlkUnknown => "block request of an unknown type",
            Self::BlkRange => "block request is not whole blocks or runs past the disk",
            Self::BlkReadOnly => "write to a read-only disk",
            Self::BlkFlags => "discard or write-zeroes with undefined flags",
            Self::NetLayout => "packet or command without a whole header",
            Self::KernelRefused => "the host's kernel refused a ring or a chain",
        }
    }
}

impl fmt::Display for GuestFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
