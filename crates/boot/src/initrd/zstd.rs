// SPDX-License-Identifier: Apache-2.0
//! One zstd frame (RFC 8878): its limits from its headers, and its bytes in order, decoded by libzstd.
//!
//! The decoder takes the frame's window and two small buffers, and gives all back before `decode` returns.

use zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer};

use crate::BootError;
use crate::source::Source;

/// Starts each frame.
pub const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Longest frame header, in bytes.
pub const HEAD: usize = 18;
/// Largest window decoded, 128 MiB, as a power of two. The kernel's own decoder has the same limit.
const MAX_WINDOW_LOG: u32 = 27;
/// Most bytes a block unpacks to; a compressed block is never longer.
const BLOCK: u64 = 128 << 10;
/// Bytes handed on at a time. Small, so that they are still in the first-level cache when they are copied out, and are
/// copied by plain vector moves.
const PIECE: usize = 2 << 10;
/// libzstd's code for "the content does not have the checksum that the frame says".
const CHECKSUM_WRONG: usize = 22usize.wrapping_neg();

/// What a frame's header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Length of the header in bytes.
    head: u64,
    /// Bytes the frame unpacks to, if it says.
    content: Option<u64>,
    /// Bytes the decoder must be able to look back.
    window: u64,
}

impl Frame {
    /// Reads the header in `head`, the first [`HEAD`] bytes or all there are. `None` if it is no frame.
    #[must_use]
    pub fn parse(head: &[u8]) -> Option<Self> {
        let rest = head.strip_prefix(&MAGIC)?;
        let flags = *rest.first()?;
        let single = flags & 0x20 != 0;
        let dictionary = [0, 1, 2, 4][usize::from(flags & 3)];
        let at = 1 + usize::from(!single);
        let wide = [usize::from(single), 2, 4, 8][usize::from(flags >> 6)];
        let field = rest.get(at + dictionary..at + dictionary + wide)?;
        let value = field.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
        let content = match wide {
            0 => None,
            2 => Some(value + 256),
            _ => Some(value),
        };
        let window = match content {
            Some(content) if single => content,
            _ => {
                let byte = *rest.get(1)?;
                let base = 1u64 << (10 + (byte >> 3));
                base + base / 8 * u64::from(byte & 7)
            }
        };
        Some(Self { head: (MAGIC.len() + at + dictionary + wide) as u64, content, window })
    }

    /// Whether its window is no larger than this decoder takes.
    #[must_use]
    pub fn is_decodable(&self) -> bool {
        self.window <= 1 << MAX_WINDOW_LOG
    }

    /// Most bytes it can unpack to, the frame starting at byte `at` of `source`: what it says, or else what its blocks
    /// can hold. `None` if that is past `limit` or the blocks don't lie in the file.
    ///
    /// # Errors
    /// What reading says.
    pub fn bound(&self, source: &Source<'_>, at: u64, limit: u64) -> Result<Option<u64>, BootError> {
        if let Some(content) = self.content {
            return Ok((content <= limit).then_some(content));
        }
        let (mut at, mut sum) = (at + self.head, 0);
        while at + 3 <= source.len() && sum <= limit {
            let mut header = [0; 4];
            source.read(at, &mut header[..3], "block")?;
            let header = u32::from_le_bytes(header);
            let (last, kind, size) = (header & 1 != 0, header >> 1 & 3, u64::from(header >> 3));
            // Raw, repeated byte, compressed.
            let (inside, unpacked) = match kind {
                0 => (size, size),
                1 => (1, size),
                2 => (size, BLOCK),
                _ => return Ok(None),
            };
            sum += unpacked;
            at += 3 + inside;
            if last {
                return Ok((sum <= limit).then_some(sum));
            }
        }
        Ok(None)
    }
}

/// How decoding ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// All of it is out; the file offset of the first byte past the frame.
    Done(u64),
    /// It can't be decoded, or the taker wants no more.
    Failed,
    /// Decoded, and certainly not what was packed.
    WrongChecksum,
}

/// Decodes the frame at byte `at` of `source`. `take` gets the bytes in order and says whether it wants more; each piece
/// but the last has 2 KiB.
///
/// # Errors
/// What reading and `take` say. A bad frame is no error but an [`End`].
pub fn decode(
    source: &Source<'_>,
    mut at: u64,
    take: &mut dyn FnMut(&[u8]) -> Result<bool, BootError>,
) -> Result<End, BootError> {
    let Some(mut decoder) = DCtx::try_create() else { return Ok(End::Failed) };
    if decoder.set_parameter(DParameter::WindowLogMax(MAX_WINDOW_LOG)).is_err() {
        return Ok(End::Failed);
    }
    // libzstd says how much it wants to see next: exactly one block, which it then decodes where it is.
    let mut window = vec![0; BLOCK as usize + 64];
    let mut piece = [0; PIECE];
    let (mut pos, mut len, mut want, mut pending) = (0, 0, MAGIC.len() + 1, false);
    loop {
        let mut to = OutBuffer::around(&mut piece[..]);
        let done = loop {
            if pos == len && !pending {
                let left = usize::try_from(source.len().saturating_sub(at)).unwrap_or(usize::MAX);
                (pos, len) = (0, want.clamp(1, window.len()).min(left));
                if len == 0 {
                    return Ok(End::Failed);
                }
                source.read(at, &mut window[..len], "frame")?;
                at += len as u64;
            }
            let mut from = InBuffer { src: &window[..len], pos };
            match decoder.decompress_stream(&mut to, &mut from) {
                Ok(hint) => want = hint,
                Err(CHECKSUM_WRONG) => return Ok(End::WrongChecksum),
                Err(_) => return Ok(End::Failed),
            }
            pos = from.pos;
            pending = to.pos() == PIECE;
            if want == 0 || pending {
                break want == 0;
            }
        };
        if !take(to.as_slice())? {
            return Ok(End::Failed);
        }
        if done {
            return Ok(End::Done(at - (len - pos) as u64));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;

    fn frame(head: &[u8]) -> Option<Frame> {
        Frame::parse(&[&MAGIC[..], head].concat())
    }

    #[test]
    fn headers_say_what_the_standard_says() {
        let is = |head: &[u8], len: u64, content, window| {
            assert_eq!(frame(head), Some(Frame { head: len, content, window }), "{head:x?}");
            assert_eq!(frame(&head[..head.len() - 1]), None, "{head:x?} cut short");
        };
        is(&[0x84, 0x60, 0, 0x68, 0x16, 3], 10, Some(51_800_064), 4 << 20);
        is(&[0x00, 0x58], 6, None, 2 << 20);
        is(&[0x00, 0x5c], 6, None, 3 << 20);
        is(&[0x20, 200], 6, Some(200), 200);
        is(&[0x60, 1, 2], 7, Some(0x201 + 256), 0x301);
        is(&[0x41, 0x58, 7, 1, 0], 9, Some(257), 2 << 20);
        is(&[0xe3, 1, 2, 3, 4, 5, 0, 0, 0, 0, 0, 0, 1], 17, Some(1 << 56 | 5), 1 << 56 | 5);
        assert_eq!(Frame::parse(b"0707"), None);
        assert!(frame(&[0, 0x88]).unwrap().is_decodable() && !frame(&[0, 0x89]).unwrap().is_decodable());
        assert_eq!(frame(&[0, 0xff]).unwrap().window, 15 << 38);
    }

    #[test]
    fn without_a_content_size_the_blocks_bound_it() {
        let bound = |blocks: &[(u32, u32, u32)], file: usize, limit: u64| {
            let mut bytes = [&MAGIC[..], &[0, 0x58]].concat();
            for (last, kind, size) in blocks {
                bytes.extend_from_slice(&(last | kind << 1 | size << 3).to_le_bytes()[..3]);
                bytes.resize(bytes.len() + if *kind == 1 { 1 } else { *size as usize }, 7);
            }
            bytes.truncate(bytes.len() - file);
            let source = Source::memory("initrd", Path::new("i"), &bytes);
            Frame::parse(&bytes).unwrap().bound(&source, 0, limit).unwrap()
        };
        let blocks = [(0, 0, 100), (0, 1, 1000), (1, 2, 300)];
        assert_eq!(bound(&blocks, 0, 1 << 20), Some(1100 + (128 << 10)));
        assert_eq!(bound(&blocks, 0, 1100 + (128 << 10)), Some(1100 + (128 << 10)));
        assert_eq!(bound(&blocks, 0, 1099 + (128 << 10)), None);
        assert_eq!(bound(&blocks[..2], 0, 1 << 20), None, "no last block");
        assert_eq!(bound(&blocks, 301, 1 << 20), None, "a header cut short");
        assert_eq!(bound(&[(1, 3, 5)], 0, 1 << 20), None, "the reserved kind");
    }
}
