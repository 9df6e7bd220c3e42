// SPDX-License-Identifier: Apache-2.0
//! The qcow2 format on paper: what the bytes of an image mean, and how they are written. Pure functions of byte slices, no
//! files and no threads; the engine and the offline editor stand on these. Nothing read from an image is believed: every
//! field is checked before it is used as a size, an offset or a shift.
//!
//! The layout is that of QEMU's published description of the format (interop/qcow2); its limits are QEMU's too, so that
//! neither refuses an image of the other.

pub mod bitmap;
pub mod compress;
pub mod crypto;
pub mod entry;
mod extensions;
pub mod header;
pub mod refcount;
pub mod snapshot;

/// Why bytes can't be used as what they claim to be. Each message is the rest of a line that begins with the image's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The magic is not there.
    #[error("is not a qcow2 image: its first four bytes are not QFI\\xfb; give the right format=")]
    NotQcow2,
    /// A well-formed image that asks for what this engine has not.
    #[error("cannot be used: {0}")]
    Unsupported(String),
    /// The image contradicts itself or the format.
    #[error("is damaged: {0}; `tare img check` tells more")]
    Corrupt(String),
}

impl FormatError {
    pub(crate) fn corrupt<T>(what: impl Into<String>) -> Result<T, FormatError> {
        Err(FormatError::Corrupt(what.into()))
    }

    pub(crate) fn unsupported<T>(what: impl Into<String>) -> Result<T, FormatError> {
        Err(FormatError::Unsupported(what.into()))
    }
}

/// A big-endian number of four bytes at `at`, or zero past the end (all callers check the length first).
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|b| b.first_chunk::<4>()).map_or(0, |b| u32::from_be_bytes(*b))
}

/// A big-endian number of eight bytes at `at`, or zero past the end.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|b| b.first_chunk::<8>()).map_or(0, |b| u64::from_be_bytes(*b))
}

/// A big-endian number of two bytes at `at`, or zero past the end.
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(|b| b.first_chunk::<2>()).map_or(0, |b| u16::from_be_bytes(*b))
}
