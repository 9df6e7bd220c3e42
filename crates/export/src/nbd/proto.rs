// SPDX-License-Identifier: Apache-2.0
//! NBD's numbers and the shapes of its messages, big-endian, as in the protocol's own document ("The NBD protocol",
//! sections *Option types*, *Transmission phase*). Pure; used by `handshake` and `session`.

/// Opens the handshake.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Opens each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Opens each answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Opens a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Opens a simple reply.
pub const SIMPLE_MAGIC: u32 = 0x6744_6698;
/// Opens a structured reply's chunk.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags, of both sides.
pub mod handshake_flag {
    pub const FIXED_NEWSTYLE: u16 = 1;
    pub const NO_ZEROES: u16 = 2;
}

/// Options.
pub mod option {
    pub const EXPORT_NAME: u32 = 1;
    pub const ABORT: u32 = 2;
    pub const LIST: u32 = 3;
    pub const STARTTLS: u32 = 5;
    pub const INFO: u32 = 6;
    pub const GO: u32 = 7;
    pub const STRUCTURED_REPLY: u32 = 8;
    pub const LIST_META_CONTEXT: u32 = 9;
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Kinds of answers to options.
pub mod answer {
    pub const ACK: u32 = 1;
    pub const SERVER: u32 = 2;
    pub const INFO: u32 = 3;
    pub const META_CONTEXT: u32 = 4;
    pub const UNSUPPORTED: u32 = (1 << 31) + 1;
    pub const POLICY: u32 = (1 << 31) + 2;
    pub const INVALID: u32 = (1 << 31) + 3;
    pub const UNKNOWN: u32 = (1 << 31) + 6;
    pub const TOO_BIG: u32 = (1 << 31) + 9;
}

/// Kinds of information in [`answer::INFO`].
pub mod info {
    pub const EXPORT: u16 = 0;
    pub const NAME: u16 = 1;
    pub const DESCRIPTION: u16 = 2;
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod export_flag {
    pub const HAS_FLAGS: u16 = 1;
    pub const READ_ONLY: u16 = 1 << 1;
    pub const SEND_FLUSH: u16 = 1 << 2;
    pub const SEND_FUA: u16 = 1 << 3;
    pub const SEND_TRIM: u16 = 1 << 5;
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub const SEND_DF: u16 = 1 << 7;
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
}

/// Commands.
pub mod command {
    pub const READ: u16 = 0;
    pub const WRITE: u16 = 1;
    pub const DISCONNECT: u16 = 2;
    pub const FLUSH: u16 = 3;
    pub const TRIM: u16 = 4;
    pub const WRITE_ZEROES: u16 = 6;
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a request.
pub mod command_flag {
    pub const FUA: u16 = 1;
    pub const NO_HOLE: u16 = 1 << 1;
    pub const DF: u16 = 1 << 2;
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Kinds of chunks.
pub mod chunk {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const BLOCK_STATUS: u16 = 5;
    pub const ERROR: u16 = (1 << 15) + 1;
    /// Flag: the last one of its reply.
    pub const DONE: u16 = 1;
}

/// Errors on the wire, which are numbers of NBD's own.
pub mod error {
    pub const EPERM: u32 = 1;
    pub const EIO: u32 = 5;
    pub const ENOMEM: u32 = 12;
    pub const EINVAL: u32 = 22;
    pub const ENOSPC: u32 = 28;
    pub const EOVERFLOW: u32 = 75;
    pub const ENOTSUP: u32 = 95;
}

/// States of `base:allocation`.
pub mod state {
    pub const HOLE: u32 = 1;
    pub const ZERO: u32 = 2;
}

/// The one metadata context there is.
pub const ALLOCATION: &str = "base:allocation";
/// Its number on every connection.
pub const ALLOCATION_ID: u32 = 1;

/// The largest payload of one request, in bytes; what clients assume where nobody tells them.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// Bytes of a request's header.
pub const REQUEST_LEN: usize = 28;

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// [`command_flag`]s.
    pub flags: u16,
    /// One of [`command`], or anything.
    pub command: u16,
    /// Comes back in the reply.
    pub cookie: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u32,
}

impl Request {
    /// From the wire; `None` if it does not open as a request does.
    pub fn parse(bytes: &[u8; REQUEST_LEN]) -> Option<Self> {
        let [m0, m1, m2, m3, f0, f1, c0, c1, rest @ ..] = *bytes;
        let [k0, k1, k2, k3, k4, k5, k6, k7, o0, o1, o2, o3, o4, o5, o6, o7, l0, l1, l2, l3] = rest;
        (u32::from_be_bytes([m0, m1, m2, m3]) == REQUEST_MAGIC).then_some(Self {
            flags: u16::from_be_bytes([f0, f1]),
            command: u16::from_be_bytes([c0, c1]),
            cookie: u64::from_be_bytes([k0, k1, k2, k3, k4, k5, k6, k7]),
            offset: u64::from_be_bytes([o0, o1, o2, o3, o4, o5, o6, o7]),
            len: u32::from_be_bytes([l0, l1, l2, l3]),
        })
    }
}

/// The host's error as NBD's.
pub fn wire_error(error: &std::io::Error) -> u32 {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::EROFS) => error::EPERM,
        Some(libc::ENOMEM) => error::ENOMEM,
        Some(libc::EINVAL) => error::EINVAL,
        Some(libc::ENOSPC | libc::EDQUOT | libc::EFBIG) => error::ENOSPC,
        Some(libc::EOPNOTSUPP) => error::ENOTSUP,
        _ => error::EIO,
    }
}

/// A message's head under construction.
#[derive(Clone, Copy, Debug, Default)]
pub struct Head {
    bytes: [u8; 32],
    len: usize,
}

impl Head {
    /// Appends; heads are never longer than 32 bytes.
    pub fn put(mut self, bytes: &[u8]) -> Self {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + bytes.len()) {
            room.copy_from_slice(bytes);
            self.len += bytes.len();
        }
        self
    }

    /// What was put.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// A simple reply.
    pub fn simple(error: u32, cookie: u64) -> Self {
        Self::default().put(&SIMPLE_MAGIC.to_be_bytes()).put(&error.to_be_bytes()).put(&cookie.to_be_bytes())
    }

    /// The only chunk of a structured reply, before `len` bytes of content.
    pub fn chunk(kind: u16, cookie: u64, len: u32) -> Self {
        Self::default()
            .put(&CHUNK_MAGIC.to_be_bytes())
            .put(&chunk::DONE.to_be_bytes())
            .put(&kind.to_be_bytes())
            .put(&cookie.to_be_bytes())
            .put(&len.to_be_bytes())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_read_field_by_field() {
        let mut bytes = [0; REQUEST_LEN];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..8].copy_from_slice(&[0, 1, 0, 6]);
        bytes[8..16].copy_from_slice(&7u64.to_be_bytes());
        bytes[16..24].copy_from_slice(&(1u64 << 40).to_be_bytes());
        bytes[24..].copy_from_slice(&u32::MAX.to_be_bytes());
        let request = Request { flags: 1, command: 6, cookie: 7, offset: 1 << 40, len: u32::MAX };
        assert_eq!(Request::parse(&bytes), Some(request));
        bytes[0] ^= 1;
        assert_eq!(Request::parse(&bytes), None);
    }

    #[test]
    fn heads_have_the_protocols_lengths() {
        assert_eq!(Head::simple(0, 1).bytes().len(), 16);
        assert_eq!(Head::chunk(1, 2, 3).bytes().len(), 20);
        assert_eq!(Head::chunk(1, 2, 3).put(&9u64.to_be_bytes()).bytes().len(), 28);
    }
}
