// SPDX-License-Identifier: Apache-2.0
//! Requests of the memory device's driver and their answers, as bytes (virtio 1.2, 5.15.6). Used by `device` on a vCPU's
//! thread; bytes in, values out.

/// Bytes of a request.
pub const REQUEST_LEN: usize = 24;
/// Bytes of an answer.
pub const RESPONSE_LEN: usize = 10;

/// What the driver asks for. Addresses and counts are as it wrote them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Plug blocks from an address on.
    Plug(u64, u16),
    /// Unplug blocks from an address on.
    Unplug(u64, u16),
    /// Unplug all there are.
    UnplugAll,
    /// Say which blocks from an address on are plugged.
    State(u64, u16),
    /// No request that exists.
    Unknown,
}

impl Request {
    /// Reads one.
    #[must_use]
    pub fn parse(bytes: &[u8; REQUEST_LEN]) -> Self {
        let [t0, t1, _, _, _, _, _, _, a0, a1, a2, a3, a4, a5, a6, a7, n0, n1, ..] = *bytes;
        let (at, blocks) = (u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]), u16::from_le_bytes([n0, n1]));
        match u16::from_le_bytes([t0, t1]) {
            0 => Self::Plug(at, blocks),
            1 => Self::Unplug(at, blocks),
            2 => Self::UnplugAll,
            3 => Self::State(at, blocks),
            _ => Self::Unknown,
        }
    }
}

/// What it is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response {
    /// Done.
    Ack,
    /// Not now: more than is requested, or more than the host has.
    Nack,
    /// Nothing that can be asked for.
    Error,
    /// All blocks are plugged.
    Plugged,
    /// No block is.
    Unplugged,
    /// Some are.
    Mixed,
}

impl Response {
    /// As the driver reads it.
    #[must_use]
    pub const fn bytes(self) -> [u8; RESPONSE_LEN] {
        let (kind, state) = match self {
            Self::Ack | Self::Plugged => (0, 0),
            Self::Nack => (1, 0),
            Self::Error => (3, 0),
            Self::Unplugged => (0, 1),
            Self::Mixed => (0, 2),
        };
        [kind, 0, 0, 0, 0, 0, 0, 0, state, 0]
    }
}
