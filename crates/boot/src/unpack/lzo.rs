// SPDX-License-Identifier: Apache-2.0
//! Files of lzop, as `unpack` finds them in a bzImage: a header, then blocks, each of which `lzo` unpacks by itself.
//!
//! Checksums are passed over, as the kernel's own unpacker does: what is wrong with a block is found in it, or in the kernel.

use super::Sink;
use super::input::Input;
use crate::BootError;

/// Start of a file.
pub const MAGIC: [u8; 4] = [0x89, b'L', b'Z', b'O'];
/// What follows it.
const REST_OF_MAGIC: [u8; 5] = [0, b'\r', b'\n', 0x1a, b'\n'];
/// The first version whose header has a level, the version needed to unpack, and 64-bit times.
const NEWER: u16 = 0x0940;
/// Largest block, packed or not: what the kernel's own unpacker takes.
const MAX_BLOCK: usize = 256 << 10;

/// Bits of the header's flags.
mod flag {
    pub const ADLER32_UNPACKED: u32 = 1;
    pub const ADLER32_PACKED: u32 = 1 << 1;
    pub const EXTRA_FIELD: u32 = 1 << 6;
    pub const CRC32_UNPACKED: u32 = 1 << 8;
    pub const CRC32_PACKED: u32 = 1 << 9;
    pub const FILTER: u32 = 1 << 11;
}

/// Decodes all of `input` into `sink`.
///
/// # Errors
/// [`BootError::Malformed`] naming the byte; what reading and `sink` say.
pub fn decode(mut input: Input<'_>, sink: Sink<'_>) -> Result<(), BootError> {
    let flags = header(&mut input)?;
    let (mut packed, mut unpacked) = (Vec::new(), vec![0; MAX_BLOCK]);
    loop {
        let len = be32(&mut input)? as usize;
        if len == 0 {
            return Ok(());
        }
        let from = be32(&mut input)? as usize;
        if len > MAX_BLOCK || from == 0 || from > len {
            return Err(input.damaged("lzo", "an absurd block length"));
        }
        let sums = |of: [u32; 2]| of.iter().filter(|&&f| flags & f != 0).count();
        let always = sums([flag::ADLER32_UNPACKED, flag::CRC32_UNPACKED]);
        let if_packed = if from < len { sums([flag::ADLER32_PACKED, flag::CRC32_PACKED]) } else { 0 };
        skip(&mut input, 4 * (always + if_packed))?;
        packed.clear();
        while packed.len() < from {
            let have = input.peek(1)?;
            let n = have.len().min(from - packed.len());
            if n == 0 {
                return Err(ends(&input));
            }
            packed.extend_from_slice(&have[..n]);
            input.consume(n);
        }
        if from == len {
            sink(&packed)?;
            continue;
        }
        match lzo::decompress_into(&packed, &mut unpacked[..len]) {
            Ok(n) if n == len => sink(&unpacked[..len])?,
            Ok(_) => return Err(input.damaged("lzo", "a block of another length than it says")),
            Err(e) => return Err(input.damaged("lzo", &format!("a damaged block ({e})"))),
        }
    }
}

/// Reads the header; its flags.
fn header(input: &mut Input<'_>) -> Result<u32, BootError> {
    let magic = take::<4>(input)? == MAGIC && take::<5>(input)? == REST_OF_MAGIC;
    let version = u16::from_be_bytes(take(input)?);
    if !magic || version < 0x0900 {
        return Err(input.damaged("lzo", "no header of lzop"));
    }
    let newer = version >= NEWER;
    // The library's version; the version needed.
    skip(input, if newer { 4 } else { 2 })?;
    let [method] = take(input)?;
    if !(1..=3).contains(&method) {
        return Err(input.damaged("lzo", "a method other than LZO1X"));
    }
    skip(input, usize::from(newer))?;
    let flags = be32(input)?;
    if flags & (flag::FILTER | flag::EXTRA_FIELD) != 0 {
        return Err(input.damaged("lzo", "a filter or a field that no kernel has"));
    }
    // Mode and time.
    skip(input, if newer { 12 } else { 8 })?;
    let [name] = take(input)?;
    // The name and the header's checksum.
    skip(input, usize::from(name) + 4)?;
    Ok(flags)
}

fn take<const N: usize>(input: &mut Input<'_>) -> Result<[u8; N], BootError> {
    input.take()?.ok_or_else(|| ends(input))
}

fn be32(input: &mut Input<'_>) -> Result<u32, BootError> {
    Ok(u32::from_be_bytes(take(input)?))
}

fn skip(input: &mut Input<'_>, n: usize) -> Result<(), BootError> {
    if input.peek(n)?.len() < n {
        return Err(ends(input));
    }
    input.consume(n);
    Ok(())
}

fn ends(input: &Input<'_>) -> BootError {
    input.damaged("lzo", "its end too early,")
}
