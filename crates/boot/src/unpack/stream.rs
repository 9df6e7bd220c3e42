// SPDX-License-Identifier: Apache-2.0
//! Payloads in formats that a library unpacks as a stream: gzip, xz, lzma, bzip2 and zstd. Called by `unpack`.

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

use bzip2::bufread::BzDecoder;
use flate2::bufread::GzDecoder;
use lzma_rust2::{LzmaReader, XzReader};

use super::input::Input;
use super::{Format, Sink};
use crate::BootError;
use crate::initrd::zstd::{self, End};
use crate::source::Source;

/// Bytes handed on at a time.
const PIECE: usize = 16 << 10;

/// The largest window that a payload may ask for, in KiB: the kernel's own build asks for 128 MiB at most, and what is not
/// written to costs nothing.
const MOST_WINDOW_KIB: u32 = 160 << 10;

/// What a reader can't carry through a library: what reading the file said, and how far it came.
#[derive(Default)]
struct Aside {
    failed: Cell<Option<BootError>>,
    offset: Cell<u64>,
}

/// A payload as the libraries want it.
struct Reader<'a> {
    input: Input<'a>,
    aside: Rc<Aside>,
}

impl Read for Reader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self.input.peek(1) {
            Ok(bytes) => {
                let n = bytes.len().min(buf.len());
                buf[..n].copy_from_slice(&bytes[..n]);
                self.input.consume(n);
                self.aside.offset.set(self.input.offset());
                Ok(n)
            }
            Err(e) => {
                self.aside.failed.set(Some(e));
                Err(io::ErrorKind::Other.into())
            }
        }
    }
}

/// Decodes a payload that is one gzip member, xz stream, LZMA file or bzip2 stream, as `format` says.
///
/// # Errors
/// [`BootError::Malformed`]; what reading and `sink` say.
pub fn decode(format: Format, input: Input<'_>, sink: Sink<'_>) -> Result<(), BootError> {
    let (source, aside) = (input.source(), Rc::new(Aside::default()));
    let explain = |e: io::Error| match (aside.failed.take(), e.kind()) {
        (Some(reading), _) => reading,
        (None, io::ErrorKind::OutOfMemory) => source.malformed(format!(
            "its {} payload asks for a window of more than {} MiB; let the guest unpack it",
            format.name(),
            MOST_WINDOW_KIB >> 10
        )),
        (None, _) => {
            source.malformed(format!("its {} payload has damage near byte {}", format.name(), aside.offset.get()))
        }
    };
    let reader = io::BufReader::with_capacity(PIECE, Reader { input, aside: Rc::clone(&aside) });
    let mut decoder: Box<dyn Read + '_> = match format {
        Format::Xz => Box::new(XzReader::new_mem_limit(reader, false, MOST_WINDOW_KIB)),
        Format::Lzma => Box::new(LzmaReader::new_mem_limit(reader, MOST_WINDOW_KIB, None).map_err(explain)?),
        Format::Bzip2 => Box::new(BzDecoder::new(reader)),
        _ => Box::new(GzDecoder::new(reader)),
    };
    let mut piece = vec![0; PIECE];
    loop {
        match decoder.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(n) => sink(&piece[..n])?,
            Err(e) => return Err(explain(e)),
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
