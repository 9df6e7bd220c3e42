// SPDX-License-Identifier: Apache-2.0
//! Legacy LZ4 frames, decoded as a stream: a 64 KiB history and a fixed output window instead of whole 8 MiB blocks.
//!
//! Written here because block decoders want source and destination whole in memory: 16 MiB of fresh pages cost more
//! than the decoding. Checked against the `lz4` program and a naive decoder in the tests.

use super::image::Image;
use super::input::Input;
use crate::BootError;

/// Start of a frame.
pub const MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// Furthest a match may reach back.
const HISTORY: usize = 64 << 10;
/// History, plus what is decoded before it goes to the guest.
const WINDOW: usize = 512 << 10;
/// Largest compressed block: `LZ4_compressBound` of 8 MiB.
const MAX_BLOCK: usize = (8 << 20) + (8 << 20) / 255 + 16;
/// Room the short path wants in input and output, so that it may copy whole registers.
const SLACK: usize = 64;

/// Decodes all of `input` into `image`.
///
/// # Errors
/// [`BootError::Malformed`] naming the byte; what reading and `image` say.
pub fn decode(mut input: Input<'_>, image: &mut Image<'_>) -> Result<(), BootError> {
    let mut out = Window { bytes: vec![0; WINDOW], at: 0, flushed: 0 };
    while let Some(word) = input.take::<4>()? {
        if word == MAGIC {
            continue;
        }
        let len = u32::from_le_bytes(word) as usize;
        if len == 0 || len > MAX_BLOCK {
            return Err(input.damaged("lz4", "an absurd block length"));
        }
        block(&mut input, len, &mut out, image)?;
    }
    out.flush(image)
}

/// The last bytes decoded: history first, then what the guest has not got yet.
struct Window {
    bytes: Vec<u8>,
    at: usize,
    flushed: usize,
}

impl Window {
    fn flush(&mut self, image: &mut Image<'_>) -> Result<(), BootError> {
        image.push(&self.bytes[self.flushed..self.at])?;
        self.flushed = self.at;
        Ok(())
    }

    /// Makes room for at least [`SLACK`] bytes.
    fn room(&mut self, image: &mut Image<'_>) -> Result<(), BootError> {
        if WINDOW - self.at < SLACK {
            self.flush(image)?;
            // Small pieces keep the copy in plain vector loops.
            let from = self.at - HISTORY;
            for piece in (0..HISTORY).step_by(1024) {
                self.bytes.copy_within(from + piece..from + piece + 1024, piece);
            }
            self.at = HISTORY;
            self.flushed = HISTORY;
        }
        Ok(())
    }

    fn literals(&mut self, from: &[u8]) {
        self.bytes[self.at..self.at + from.len()].copy_from_slice(from);
        self.at += from.len();
    }

    /// Repeats what lies `back` bytes ago, as much of `len` as fits; returns how much did.
    fn repeat(&mut self, back: usize, len: usize) -> usize {
        let len = len.min(WINDOW - self.at);
        let (mut left, mut reach) = (len, back);
        while left > 0 {
            let piece = left.min(reach).min(2048);
            self.bytes.copy_within(self.at - reach..self.at - reach + piece, self.at);
            self.at += piece;
            left -= piece;
            if piece == reach {
                // What was just written repeats what was before it, so twice as far back is the same byte.
                reach *= 2;
            }
        }
        len
    }
}

/// One block of `left` compressed bytes.
fn block(input: &mut Input<'_>, mut left: usize, out: &mut Window, image: &mut Image<'_>) -> Result<(), BootError> {
    let ends = "a block that ends in the middle";
    loop {
        out.room(image)?;
        let have = input.peek(SLACK)?;
        let have = &have[..have.len().min(left)];
        let used = short_sequences(have, out);
        input.consume(used);
        left -= used;
        out.room(image)?;
        // One sequence of any shape.
        let token = byte(input, &mut left)?.ok_or_else(|| input.damaged("lz4", ends))?;
        let mut literals = extended(input, &mut left, usize::from(token >> 4))?;
        if literals > left {
            return Err(input.damaged("lz4", ends));
        }
        left -= literals;
        while literals > 0 {
            out.room(image)?;
            let have = input.peek(1)?;
            let n = literals.min(have.len()).min(WINDOW - out.at);
            if n == 0 {
                return Err(input.damaged("lz4", ends));
            }
            out.literals(&have[..n]);
            input.consume(n);
            literals -= n;
        }
        if left == 0 {
            return Ok(());
        }
        let low = byte(input, &mut left)?;
        let high = byte(input, &mut left)?;
        let (Some(low), Some(high)) = (low, high) else { return Err(input.damaged("lz4", ends)) };
        let back = usize::from(u16::from_le_bytes([low, high]));
        let mut len = extended(input, &mut left, usize::from(token & 15))? + 4;
        out.room(image)?;
        if back == 0 || back > out.at {
            return Err(input.damaged("lz4", "a match before the start"));
        }
        while len > 0 {
            out.room(image)?;
            len -= out.repeat(back, len);
        }
    }
}

/// Runs sequences of short literals and short matches for as long as both buffers have [`SLACK`]; returns the input used.
fn short_sequences(input: &[u8], out: &mut Window) -> usize {
    let bytes = out.bytes.as_mut_slice();
    let (mut at, mut used) = (out.at, 0);
    while let Some(source) = input.get(used..).and_then(|s| s.first_chunk::<SLACK>()) {
        let Some(room) = bytes.get_mut(at..).and_then(|b| b.first_chunk_mut::<SLACK>()) else { break };
        let token = source[0];
        let literals = usize::from(token >> 4);
        let len = usize::from(token & 15) + 4;
        if literals == 15 || len == 19 {
            break;
        }
        room[..16].copy_from_slice(&source[1..17]);
        let back = usize::from(u16::from_le_bytes([source[1 + literals], source[2 + literals]]));
        let to = at + literals;
        if back == 0 || back > to {
            break;
        }
        let from = to - back;
        if back >= len {
            // Copies more than asked; what is too much is overwritten by the next sequence.
            let mut piece = [0u8; 18];
            piece.copy_from_slice(&bytes[from..from + 18]);
            bytes[to..to + 18].copy_from_slice(&piece);
        } else {
            for i in 0..len {
                bytes[to + i] = bytes[from + i];
            }
        }
        at = to + len;
        used += literals + 3;
    }
    out.at = at;
    used
}

fn byte(input: &mut Input<'_>, left: &mut usize) -> Result<Option<u8>, BootError> {
    if *left == 0 {
        return Ok(None);
    }
    *left -= 1;
    Ok(input.take::<1>()?.map(|b| b[0]))
}

/// A length whose nibble was 15 goes on in bytes until one is not 255.
fn extended(input: &mut Input<'_>, left: &mut usize, nibble: usize) -> Result<usize, BootError> {
    let mut len = nibble;
    if nibble == 15 {
        loop {
            let more = byte(input, left)?.ok_or_else(|| input.damaged("lz4", "a length without end"))?;
            len += usize::from(more);
            if more != 255 {
                break;
            }
        }
    }
    Ok(len)
}
