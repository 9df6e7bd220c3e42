// SPDX-License-Identifier: Apache-2.0
//! Encryption of guest data: LUKS1 (header, key slots, AES-XTS and AES-CBC) and QEMU's old AES. A [`Cipher`] works on whole
//! 512-byte sectors in place, is shared by all threads of an image, and knows which sector number to use for a cluster.
//! The block cipher, hashes and key derivation are RustCrypto's; here is only what ties them together.

mod cipher;
mod luks;

pub use cipher::{Cipher, SECTOR};
pub use luks::{HEADER_BYTES, NewKey, create, unlock};
