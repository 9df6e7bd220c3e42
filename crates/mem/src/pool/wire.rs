// SPDX-License-Identifier: Apache-2.0
//! What a monitor and a pool say to each other: one request, one answer, then a byte with a file for each piece of memory;
//! at the end of the loan one byte more. Both run on one host, in one version's byte order.

use std::io;

/// What both sides say first.
const MAGIC: u64 = u64::from_le_bytes(*b"tarepool");
/// Of the protocol.
const VERSION: u64 = 1;

/// Bytes of a request.
pub(super) const ASK: usize = 24;
/// Bytes of an answer.
pub(super) const ANSWER: usize = 48;
/// The byte that comes with each file.
pub(super) const PIECE: u8 = b'p';
/// The byte by which a monitor says that it has unmapped everything.
pub(super) const RETURNED: u8 = b'r';

/// A request for so many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask {
    pub(super) size: u64,
}

/// What a pool has to say to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// Files that follow; 0 is a refusal.
    pub(super) pieces: u64,
    /// Bytes of each.
    pub(super) piece: u64,
    /// Bytes of a page.
    pub(super) page: u64,
    /// Bytes that are ready, or are being made so, the lent ones not counted.
    pub(super) free: u64,
}

fn words<const N: usize>(values: [u64; N]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn word(bytes: &[u8], index: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(index * 8..index * 8 + 8)?.try_into().ok()?))
}

fn known(bytes: &[u8]) -> io::Result<()> {
    if word(bytes, 0) == Some(MAGIC) && word(bytes, 1) == Some(VERSION) {
        Ok(())
    } else {
        Err(io::Error::other("what answers there is no memory pool of this version"))
    }
}

impl Ask {
    pub(super) fn write(self) -> Vec<u8> {
        words([MAGIC, VERSION, self.size])
    }

    pub(super) fn read(bytes: &[u8]) -> io::Result<Self> {
        known(bytes)?;
        Ok(Self { size: word(bytes, 2).unwrap_or(0) })
    }
}

impl Answer {
    pub(super) fn write(self) -> Vec<u8> {
        words([MAGIC, VERSION, self.pieces, self.piece, self.page, self.free])
    }

    pub(super) fn read(bytes: &[u8]) -> io::Result<Self> {
        known(bytes)?;
        let at = |index| word(bytes, index).unwrap_or(0);
        Ok(Self { pieces: at(2), piece: at(3), page: at(4), free: at(5) })
    }
}
