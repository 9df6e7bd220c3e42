// SPDX-License-Identifier: Apache-2.0
//! Legacy LZ4 frames, decoded as a stream: a 64 KiB history and a fixed output window instead of whole 8 MiB blocks.
//!
//! Written here because block decoders want source and destination whole in memory: 16 MiB of fresh pages cost more
//! than the decoding. Checked against the `lz4` program and a naive decoder in the tests.

use super::Sink;
use super::input::Input;
use crate::BootError;

/// Start of a frame.
pub const MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];
/// Furthest a match may reach back.
const HISTORY: usize = 64 << 10;
/// History, plus what is decoded before it goes to the guest.
const WINDOW: usize = 512 << 10;
/// Bytes copied at a time: small pieces stay in plain vector loops, long ones start `rep movsb`.
const PIECE: usize = 1024;
/// Largest compressed block: `LZ4_compressBound` of 8 MiB.
const MAX_BLOCK: usize = (8 << 20) + (8 << 20) / 255 + 16;
/// Room the quick path wants in input and output, so that it may copy whole registers.
const SLACK: usize = 64;

/// Decodes all of `input` into `sink`.
///
/// # Errors
/// [`BootError::Malformed`] naming the byte; what reading and `sink` say.
pub fn decode(mut input: Input<'_>, sink: Sink<'_>) -> Result<(), BootError> {
    let bytes = vec![0; WINDOW].into_boxed_slice();
    let bytes = bytes.try_into().map_err(|_| input.damaged("lz4", "no window"))?;
    let mut out = Window { bytes, at: 0, flushed: 0 };
    while let Some(word) = input.take::<4>()? {
        if word == MAGIC {
            continue;
        }
        let len = u32::from_le_bytes(word) as usize;
        if len == 0 || len > MAX_BLOCK {
            return Err(input.damaged("lz4", "an absurd block length"));
        }
        block(&mut input, len, &mut out, sink)?;
    }
    out.flush(sink)
}

/// The last bytes decoded: history first, then what the guest has not got yet.
struct Window {
    bytes: Box<[u8; WINDOW]>,
    at: usize,
    flushed: usize,
}

impl Window {
    fn flush(&mut self, sink: Sink<'_>) -> Result<(), BootError> {
        sink(&self.bytes[self.flushed..self.at])?;
        self.flushed = self.at;
        Ok(())
    }

    /// Makes room for at least [`SLACK`] bytes.
    fn room(&mut self, sink: Sink<'_>) -> Result<(), BootError> {
        if WINDOW - self.at < SLACK {
            self.flush(sink)?;
            let from = self.at - HISTORY;
            for piece in (0..HISTORY).step_by(PIECE) {
                self.bytes.copy_within(from + piece..from + piece + PIECE, piece);
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
        repeat(&mut self.bytes, self.at, back, len);
        self.at += len;
        len
    }
}

/// One block of `left` compressed bytes.
fn block(input: &mut Input<'_>, mut left: usize, out: &mut Window, sink: Sink<'_>) -> Result<(), BootError> {
    let ends = "a block that ends in the middle";
    loop {
        out.room(sink)?;
        let have = input.peek(SLACK)?;
        let have = &have[..have.len().min(left)];
        let used = whole_sequences(have, out);
        input.consume(used);
        left -= used;
        out.room(sink)?;
        // One sequence of any shape.
        let token = byte(input, &mut left)?.ok_or_else(|| input.damaged("lz4", ends))?;
        let mut literals = extended(input, &mut left, usize::from(token >> 4))?;
        if literals > left {
            return Err(input.damaged("lz4", ends));
        }
        left -= literals;
        while literals > 0 {
            out.room(sink)?;
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
        out.room(sink)?;
        if back == 0 || back > out.at {
            return Err(input.damaged("lz4", "a match before the start"));
        }
        while len > 0 {
            out.room(sink)?;
            len -= out.repeat(back, len);
        }
    }
}

/// Runs whole sequences for as long as both buffers have room for them with [`SLACK`]; returns the input used.
/// What it can't do it leaves untouched: the caller does one sequence of any shape and comes back.
fn whole_sequences(input: &[u8], out: &mut Window) -> usize {
    let bytes: &mut [u8; WINDOW] = &mut out.bytes;
    let (mut used, mut at) = (0, out.at);
    loop {
        (used, at) = short_sequences(input, bytes, used, at);
        let Some(token) = input.get(used).copied().filter(|_| at <= WINDOW - SLACK) else { break };
        let (mut literals, mut len) = (usize::from(token >> 4), usize::from(token & 15) + 4);
        let mut next = used + 1;
        if literals == 15 {
            let Some((more, after)) = length(input, next) else { break };
            literals += more;
            next = after;
        }
        let Some(offset) = input.get(next + literals..).and_then(|s| s.first_chunk::<2>()) else { break };
        if literals <= 16
            && let Some(from) = input.get(next..).and_then(|s| s.first_chunk::<16>())
        {
            bytes[at..at + 16].copy_from_slice(from);
        } else {
            let Some(room) = bytes.get_mut(at..at + literals) else { break };
            room.copy_from_slice(&input[next..next + literals]);
        }
        let to = at + literals;
        let back = usize::from(u16::from_le_bytes(*offset));
        next += literals + 2;
        if len == 19 {
            let Some((more, after)) = length(input, next) else { break };
            len += more;
            next = after;
        }
        if back.wrapping_sub(1) >= to || to + len > WINDOW - SLACK {
            break;
        }
        if back >= 16 && len <= 64 {
            copy::<16>(bytes, to - back, to, len);
        } else if back >= 8 && len <= 64 {
            copy::<8>(bytes, to - back, to, len);
        } else {
            repeat(bytes, to, back, len);
        }
        at = to + len;
        used = next;
    }
    out.at = at;
    used
}

/// The commonest sequences, in a loop tight enough to stay in registers: under 15 literals, then a match of at most 18
/// bytes that starts eight or more bytes back. Returns the new ends of input and output.
#[inline(never)]
fn short_sequences(input: &[u8], bytes: &mut [u8; WINDOW], mut used: usize, mut at: usize) -> (usize, usize) {
    while at <= WINDOW - SLACK
        && let Some(source) = input.get(used..).and_then(|s| s.first_chunk::<32>())
    {
        let (literals, len) = (usize::from(source[0] >> 4), usize::from(source[0] & 15));
        if literals == 15 || len == 15 {
            break;
        }
        // Copies more than asked, here and below; what is too much is overwritten by the next sequence.
        bytes[at..at + 16].copy_from_slice(&source[1..17]);
        let to = at + literals;
        let back = usize::from(u16::from_le_bytes([source[1 + literals], source[2 + literals]]));
        let from = to.wrapping_sub(back);
        if back < 8 || from > to {
            break;
        }
        // Eight bytes at a time, since the match may reach into what it is writing.
        step::<8>(bytes, from, to);
        step::<8>(bytes, from + 8, to + 8);
        step::<2>(bytes, from + 16, to + 16);
        at = to + len + 4;
        used += literals + 3;
    }
    (used, at)
}

/// Copies `N` bytes inside the window.
#[inline(always)]
fn step<const N: usize>(bytes: &mut [u8; WINDOW], from: usize, to: usize) {
    let mut piece = [0; N];
    piece.copy_from_slice(&bytes[from..from + N]);
    bytes[to..to + N].copy_from_slice(&piece);
}

/// Copies `len` bytes from `from` up to `to`, at least `N` apart, in steps of `N`: up to `N - 1` more than asked.
#[inline(always)]
fn copy<const N: usize>(bytes: &mut [u8; WINDOW], from: usize, to: usize, len: usize) {
    let mut done = 0;
    while done < len {
        step::<N>(bytes, from + done, to + done);
        done += N;
    }
}

/// Writes `len` bytes at `to`, each the same as the one `back` before it.
fn repeat(bytes: &mut [u8; WINDOW], to: usize, back: usize, len: usize) {
    let (mut at, mut left, mut reach) = (to, len, back);
    while left > 0 {
        let piece = left.min(reach).min(PIECE);
        bytes.copy_within(at - reach..at - reach + piece, at);
        at += piece;
        left -= piece;
        if piece == reach {
            // What was just written repeats what was before it, so twice as far back is the same byte.
            reach *= 2;
        }
    }
}

/// The rest of a length whose nibble was 15, from `at` on, and where it ends; `None` if it doesn't end in `input`.
fn length(input: &[u8], mut at: usize) -> Option<(usize, usize)> {
    let mut sum = 0;
    loop {
        let more = *input.get(at)?;
        at += 1;
        sum += usize::from(more);
        if more != 255 {
            return Some((sum, at));
        }
    }
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
    if nibble < 15 {
        return Ok(len);
    }
    loop {
        let have = input.peek(1)?;
        let have = &have[..have.len().min(*left)];
        // Runs of zeros have hundreds of these.
        let full = have.iter().take_while(|b| **b == 255).count();
        let end = have.get(full).copied();
        let used = full + usize::from(end.is_some());
        if used == 0 {
            return Err(input.damaged("lz4", "a length without end"));
        }
        len += full * 255 + usize::from(end.unwrap_or(0));
        input.consume(used);
        *left -= used;
        if end.is_some() {
            return Ok(len);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use std::path::Path;

    use super::*;
    use crate::source::Source;

    /// Numbers that look random and are the same in each run.
    pub(crate) struct Dice(pub u64);

    impl Dice {
        /// One number below `n`.
        pub(crate) fn below(&mut self, n: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((self.0 >> 33) as usize) % n
        }
    }

    fn put_length(to: &mut Vec<u8>, mut rest: usize) {
        while rest >= 255 {
            to.push(255);
            rest -= 255;
        }
        to.push(rest as u8);
    }

    /// One sequence; `back` 0 ends the block with literals alone.
    fn put_sequence(to: &mut Vec<u8>, literals: &[u8], back: usize, len: usize) {
        let high = literals.len().min(15);
        let low = if back == 0 { 0 } else { (len - 4).min(15) };
        to.push((high << 4 | low) as u8);
        if high == 15 {
            put_length(to, literals.len() - 15);
        }
        to.extend_from_slice(literals);
        if back > 0 {
            to.extend_from_slice(&(back as u16).to_le_bytes());
            if low == 15 {
                put_length(to, len - 4 - 15);
            }
        }
    }

    fn frame(blocks: &[Vec<u8>]) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        for b in blocks {
            out.extend_from_slice(&(b.len() as u32).to_le_bytes());
            out.extend_from_slice(b);
        }
        out
    }

    /// `data` as one frame of literals.
    pub(crate) fn store(data: &[u8]) -> Vec<u8> {
        let blocks: Vec<_> = data
            .chunks(1 << 20)
            .map(|chunk| {
                let mut block = Vec::new();
                put_sequence(&mut block, chunk, 0, 0);
                block
            })
            .collect();
        frame(&blocks)
    }

    fn decoded(frame: &[u8]) -> Result<Vec<u8>, BootError> {
        let source = Source::memory("kernel", Path::new("k"), frame);
        let mut out = Vec::new();
        decode(Input::new(&source, 0, frame.len() as u64), &mut |bytes| {
            out.extend_from_slice(bytes);
            Ok(())
        })?;
        Ok(out)
    }

    #[test]
    fn any_sequence_decodes_as_a_byte_loop_would() {
        let mut dice = Dice(1);
        for round in 0..60 {
            let (mut blocks, mut want) = (Vec::new(), Vec::<u8>::new());
            for _ in 0..1 + dice.below(3) {
                let (mut block, start) = (Vec::new(), want.len());
                let sequences = if round % 10 == 0 { 4000 } else { dice.below(200) };
                for _ in 0..sequences {
                    let n = [dice.below(16), dice.below(40), dice.below(300), dice.below(2000)][dice.below(4)];
                    let n = if want.len() == start { n + 1 } else { n };
                    let literals: Vec<u8> = (0..n).map(|_| dice.below(256) as u8).collect();
                    want.extend_from_slice(&literals);
                    let reach = (want.len() - start).min(65535);
                    let back = 1 + [dice.below(reach), dice.below(reach.min(40))][dice.below(2)];
                    let len = 4 + [dice.below(15), dice.below(60), dice.below(5000)][dice.below(3)];
                    put_sequence(&mut block, &literals, back, len);
                    for _ in 0..len {
                        want.push(want[want.len() - back]);
                    }
                }
                let last: Vec<u8> = (0..dice.below(30)).map(|_| dice.below(256) as u8).collect();
                want.extend_from_slice(&last);
                put_sequence(&mut block, &last, 0, 0);
                blocks.push(block);
            }
            assert!(decoded(&frame(&blocks)).unwrap() == want, "round {round}");
        }
    }

    #[test]
    fn zeros_past_every_window_stay_zeros() {
        let mut block = Vec::new();
        put_sequence(&mut block, &[0], 1, 3 << 20);
        put_sequence(&mut block, &[], 65535, 1 << 20);
        put_sequence(&mut block, b"end", 0, 0);
        let out = decoded(&frame(&[block])).unwrap();
        assert_eq!(out.len(), 1 + (4 << 20) + 3);
        assert!(out.ends_with(b"\0end") && out[..4 << 20].iter().all(|b| *b == 0));
    }

    #[test]
    fn damage_is_named() {
        let fails = |frame: &[u8], word: &str| {
            let text = decoded(frame).unwrap_err().to_string();
            assert!(text.contains(word) && text.contains("near byte"), "{text}");
        };
        let block = |b: &[u8]| frame(&[b.to_vec()]);
        fails(&block(&[0x10, 7, 2, 0]), "before the start");
        fails(&block(&[0x10, 7, 0, 0]), "before the start");
        fails(&block(&[0xf0, 255, 255]), "length without end");
        fails(&block(&[0x20, 7]), "ends in the middle");
        fails(&block(&[0x10, 7, 1]), "ends in the middle");
        fails(&[MAGIC.as_slice(), &[0, 0, 0, 0]].concat(), "block length");
        fails(&[MAGIC.as_slice(), &[0xff; 4]].concat(), "block length");
        fails(&[MAGIC.as_slice(), &[9, 0, 0, 0, 0x20, 1]].concat(), "ends in the middle");
    }
}
