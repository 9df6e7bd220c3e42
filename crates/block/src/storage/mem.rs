// SPDX-License-Identifier: Apache-2.0
//! A disk in memory, for tests and tools. Everything completes at once.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::disk::{Completion, Op, Request};

/// The bytes of a memory disk; clones share them, so that a test can look at what a device wrote.
#[derive(Clone, Debug)]
pub struct MemImage {
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl MemImage {
    /// An image with this content.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self { bytes: Arc::new(Mutex::new(bytes)) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.lock().len() as u64
    }

    /// Whether it holds no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Gives it another length; new bytes are zeroes.
    ///
    /// # Errors
    /// A length that no memory has.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        let len = usize::try_from(len).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        self.lock().resize(len, 0);
        Ok(())
    }

    /// A copy of the content.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.lock().clone()
    }
}

/// The storage on a [`MemImage`].
#[derive(Debug)]
pub struct MemStorage {
    image: MemImage,
    /// Completions nobody has reaped yet.
    pub ready: Vec<Completion>,
}

impl MemStorage {
    /// A storage on `image`.
    pub fn new(image: MemImage) -> Self {
        Self { image, ready: Vec::new() }
    }

    /// What it keeps its bytes in.
    pub fn image(&self) -> &MemImage {
        &self.image
    }

    /// Serves a request.
    pub fn submit(&mut self, request: &Request<'_>) {
        let result = self.serve(request).ok_or_else(|| io::Error::from_raw_os_error(libc::EIO));
        self.ready.push(Completion { id: request.id, result });
    }

    fn serve(&self, request: &Request<'_>) -> Option<()> {
        let mut bytes = self.image.lock();
        let at = usize::try_from(request.offset).ok()?;
        let len = usize::try_from(request.len).ok()?;
        match request.op {
            Op::Flush | Op::Discard => {}
            Op::WriteZeroes { .. } => bytes.get_mut(at..at.checked_add(len)?)?.fill(0),
            Op::Read | Op::Write => {
                let mut range = bytes.get_mut(at..at.checked_add(len)?)?;
                for seg in request.segs {
                    let (here, rest) = range.split_at_mut_checked(seg.len)?;
                    let (from, to) = match request.op {
                        Op::Read => (here.as_ptr(), seg.ptr),
                        _ => (seg.ptr.cast_const(), here.as_mut_ptr()),
                    };
                    // SAFETY: `here` is seg.len bytes long; the segment's bytes stay mapped by the promise of its maker;
                    // `copy` allows for the two overlapping.
                    unsafe { std::ptr::copy(from, to, seg.len) };
                    range = rest;
                }
            }
        }
        Some(())
    }
}
