// SPDX-License-Identifier: Apache-2.0
//! Unpacks a bzImage's payload straight into guest memory, in the monitor, so that the guest doesn't have to.
//!
//! `load` calls it. The decoders keep a window of at most a few hundred KiB; the kernel is never whole in our memory.

mod image;
mod input;
mod lz4;
mod relocs;

use base::Gpa;
use mem::GuestRam;

use crate::BootError;
use crate::bzimage::{BzImage, MAX_KERNEL};
use crate::source::Source;
use image::Image;
use input::Input;

/// Compressions a bzImage may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Legacy LZ4 frames (`lz4 -l`).
    Lz4,
    /// A format only the guest unpacks; its name.
    Other(&'static str),
}

impl Format {
    /// Tells it from the first bytes of the payload.
    #[must_use]
    pub fn of(start: &[u8]) -> Self {
        let magics: [(&[u8], Self); 8] = [
            (&lz4::MAGIC, Self::Lz4),
            (&[0x1f, 0x8b], Self::Other("gzip")),
            (&[0xfd, b'7', b'z', b'X', b'Z', 0], Self::Other("xz")),
            (&[0x28, 0xb5, 0x2f, 0xfd], Self::Other("zstd")),
            (&[0x5d, 0, 0], Self::Other("lzma")),
            (b"BZh", Self::Other("bzip2")),
            (&[0x89, b'L', b'Z', b'O'], Self::Other("lzo")),
            (b"\x7fELF", Self::Other("no compression")),
        ];
        magics.iter().find(|(magic, _)| start.starts_with(magic)).map_or(Self::Other("unknown compression"), |m| m.1)
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Other(name) => name,
        }
    }
}

/// Where an unpacked kernel shall lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Physical address of its first byte.
    pub at: u64,
    /// What to add to its virtual addresses; 0 leaves them and needs no relocation table.
    pub shift: u64,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The kernel is in guest memory; its first instruction.
    Done(Gpa),
    /// It can't be moved as asked, so the guest has to unpack it; why.
    LeaveToGuest(&'static str),
}

/// Unpacks the payload of `kernel` to `to`. RAM there must be `init_size` bytes long and zero.
///
/// # Errors
/// [`BootError::Malformed`] for a damaged payload, what reading says.
pub fn unpack(ram: &GuestRam, kernel: &Source<'_>, bz: &BzImage, to: Placement) -> Result<Outcome, BootError> {
    let mut magic = [0; 6];
    if bz.payload_len < 16 {
        return Ok(Outcome::LeaveToGuest("its header names no payload"));
    }
    kernel.read(bz.payload, &mut magic, "payload")?;
    let format = Format::of(&magic);
    let end = bz.payload + bz.payload_len - 4;
    let mut size = [0; 4];
    kernel.read(end, &mut size, "payload size")?;
    let size = u64::from(u32::from_le_bytes(size));
    if size > MAX_KERNEL {
        return Err(kernel.malformed(format!("its payload claims to be {size} bytes unpacked")));
    }
    let mut image = Image::new(ram, kernel, bz, to, size);
    let input = Input::new(kernel, bz.payload, end);
    match format {
        Format::Lz4 => lz4::decode(input, &mut image)?,
        Format::Other(_) => return Ok(Outcome::LeaveToGuest("tare does not unpack this compression")),
    }
    image.finish()
}
