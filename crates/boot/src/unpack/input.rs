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
    window: Vec<u8>,
    pos: usize,
}

impl<'a> Input<'a> {
    /// The bytes of `source` from `start` to `end`, both inside the file.
    #[must_use]
    pub fn new(source: &'a Source<'a>, start: u64, end: u64) -> Self {
        Self { source, next: start, end, window: Vec::with_capacity(WINDOW), pos: 0 }
    }

    /// Bytes at hand; at least `want` of them unless the payload ends before.
    pub fn peek(&mut self, want: usize) -> Result<&[u8], BootError> {
        if self.window.len() - self.pos < want.min(WINDOW) && self.next < self.end {
            self.window.drain(..self.pos);
            self.pos = 0;
            let kept = self.window.len();
            let more = (WINDOW - kept).min(usize::try_from(self.end - self.next).unwrap_or(WINDOW));
            self.window.resize(kept + more, 0);
            self.source.read(self.next, &mut self.window[kept..], "payload")?;
            self.next += more as u64;
        }
        Ok(&self.window[self.pos..])
    }

    /// Takes `n` bytes that [`Input::peek`] has shown.
    pub fn consume(&mut self, n: usize) {
        self.pos = (self.pos + n).min(self.window.len());
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
        self.next - (self.window.len() - self.pos) as u64
    }

    /// The payload is damaged here.
    #[must_use]
    pub fn damaged(&self, format: &str, what: &str) -> BootError {
        self.source.malformed(format!("its {format} payload has {what} near byte {}", self.offset()))
    }
}
