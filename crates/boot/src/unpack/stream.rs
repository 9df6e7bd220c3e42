// SPDX-License-Identifier: Apache-2.0
//! Payloads in formats that a library unpacks as a stream: gzip and zstd. Called by `unpack`.

use std::io::{self, Read};

use flate2::bufread::GzDecoder;

use super::Sink;
use super::input::Input;
use crate::BootError;
use crate::initrd::zstd::{self, End};
use crate::source::Source;

/// Bytes handed on at a time.
const PIECE: usize = 16 << 10;

/// A payload as the libraries want it. What reading the file says is kept aside: `io::Error` can't carry it back.
struct Reader<'a> {
    input: Input<'a>,
    failed: Option<BootError>,
}

impl Read for Reader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self.input.peek(1) {
            Ok(bytes) => {
                let n = bytes.len().min(buf.len());
                buf[..n].copy_from_slice(&bytes[..n]);
                self.input.consume(n);
                Ok(n)
            }
            Err(e) => {
                self.failed = Some(e);
                Err(io::ErrorKind::Other.into())
            }
        }
    }
}

/// Decodes a gzip member.
///
/// # Errors
/// [`BootError::Malformed`]; what reading and `sink` say.
pub fn gzip(input: Input<'_>, sink: Sink<'_>) -> Result<(), BootError> {
    let mut decoder = GzDecoder::new(io::BufReader::with_capacity(PIECE, Reader { input, failed: None }));
    let mut piece = vec![0; PIECE];
    loop {
        match decoder.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(n) => sink(&piece[..n])?,
            Err(_) => {
                let reader = decoder.get_mut().get_mut();
                return Err(reader.failed.take().unwrap_or_else(|| reader.input.damaged("gzip", "damage")));
            }
        }
    }
}

/// Decodes the zstd frame at byte `at` of `kernel`.
///
/// # Errors
/// [`BootError::Malformed`]; what reading and `sink` say.
pub fn zstd(kernel: &Source<'_>, at: u64, sink: Sink<'_>) -> Result<(), BootError> {
    match zstd::decode(kernel, at, &mut |bytes| sink(bytes).map(|()| true))? {
        End::Done(_) => Ok(()),
        End::Failed | End::WrongChecksum => Err(kernel.malformed("its zstd payload is damaged")),
    }
}
