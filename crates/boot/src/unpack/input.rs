// SPDX-License-Identifier: Apache-2.0
//! A window over the compressed payload, read from the file piece by piece. Used by the decoders.

use crate::BootError;
use crate::source::Source;

/// Bytes read at a time.
const WINDOW: usize = 64 << 10;

/// Compressed bytes in order.
#[derive(Debug)]
pub struct Input<'a> {
    source: &'a Source<'a>,
    /// File offset of the first byte not yet in `window`.
    next: u64,
    end: u64,
    window: Box<[u8]>,
    pos: usize,
    /// Bytes of `window` that are filled.
    len: usize,
}

impl<'a> Input<'a> {
    /// The bytes of `source` from `start` to `end`, both inside the file.
    #[must_use]
    pub fn new(source: &'a Source<'a>, start: u64, end: u64) -> Self {
        Self { source, next: start, end, window: vec![0; WINDOW].into(), pos: 0, len: 0 }
    }

    /// The file.
    #[must_use]
    pub const fn source(&self) -> &'a Source<'a> {
        self.source
    }

    /// Bytes at hand; at least `want` of them unless the payload ends before.
    pub fn peek(&mut self, want: usize) -> Result<&[u8], BootError> {
        if self.len - self.pos < want {
            self.fill(want)?;
        }
        Ok(&self.window[self.pos..self.len])
    }

    #[cold]
    fn fill(&mut self, want: usize) -> Result<(), BootError> {
        while self.len - self.pos < want.min(WINDOW) && self.next < self.end {
            self.window.copy_within(self.pos..self.len, 0);
            self.len -= self.pos;
            self.pos = 0;
            let more = (WINDOW - self.len).min(usize::try_from(self.end - self.next).unwrap_or(WINDOW));
            self.source.read(self.next, &mut self.window[self.len..self.len + more], "payload")?;
            self.next += more as u64;
            self.len += more;
        }
        Ok(())
    }

    /// Takes `n` bytes that [`Input::peek`] has shown.
    pub fn consume(&mut self, n: usize) {
        self.pos = (self.pos + n).min(self.len);
    }

    /// The next `N` bytes, or `None` if the payload ends before.
    pub fn take<const N: usize>(&mut self) -> Result<Option<[u8; N]>, BootError> {
        let got = self.peek(N)?.first_chunk::<N>().copied();
        if got.is_some() {
            self.consume(N);
        }
        Ok(got)
    }

    /// File offset of the next byte.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.next - (self.len - self.pos) as u64
    }

    /// The payload is damaged here.
    #[must_use]
    pub fn damaged(&self, format: &str, what: &str) -> BootError {
        self.source.malformed(format!("its {format} payload has {what} near byte {}", self.offset()))
    }
}
