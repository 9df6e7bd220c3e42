// SPDX-License-Identifier: Apache-2.0
//! A storage in memory that writes down every change and every sync, so that a test can work out what a power cut at any
//! point would have left. While a disk is attached its requests complete late and in a random order: an engine that takes
//! "submitted" for "written", or one order for another, is found out.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{EventFd, Seg};

use crate::disk::{Completion, Op, Request};

use super::buffer::{fill_zero, gather, scatter};

/// What a request changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// These bytes from `offset` on.
    Write {
        /// First byte.
        offset: u64,
        /// The bytes.
        data: Vec<u8>,
    },
    /// So many zeroes from `offset` on, written or punched out.
    Zeroes {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Everything that ended before this began is durable once this has ended.
    Sync,
    /// The file gets this length.
    Resize(u64),
}

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request was taken; from here on its change may reach the medium, whole or in part.
    Begin {
        /// Of which file: 0 is the first of those that share a log.
        file: usize,
        /// Ties the two ends together.
        serial: u64,
        /// What it is about to do.
        change: Change,
    },
    /// The request completed.
    End {
        /// Of its beginning.
        serial: u64,
    },
    /// A mark of the test's own.
    Mark(u64),
}

#[derive(Debug)]
struct Content {
    bytes: Vec<u8>,
    limit: u64,
}

#[derive(Debug, Default)]
struct Tape {
    files: Vec<Content>,
    log: Vec<Event>,
    serial: u64,
    dice: u64,
}

impl Content {
    fn new(bytes: Vec<u8>) -> Self {
        Self { bytes, limit: u64::MAX }
    }

    /// Makes room up to `end`, as writing to a file does.
    fn reach(&mut self, end: u64) -> io::Result<usize> {
        // What is past the limit already can still be written to.
        if end > self.limit.max(self.bytes.len() as u64) {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let end = usize::try_from(end).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        if end > self.bytes.len() {
            self.bytes.resize(end, 0);
        }
        Ok(end)
    }

    fn apply(&mut self, change: &Change) -> io::Result<()> {
        match change {
            Change::Write { offset, data } => {
                let end = self.reach(offset.saturating_add(data.len() as u64))?;
                self.bytes[end - data.len()..end].copy_from_slice(data);
            }
            Change::Zeroes { offset, len } => {
                let end = self.reach(offset.saturating_add(*len))?;
                self.bytes[*offset as usize..end].fill(0);
            }
            Change::Resize(len) => {
                self.reach(*len)?;
                self.bytes.truncate(*len as usize);
            }
            Change::Sync => {}
        }
        Ok(())
    }
}

impl Tape {
    fn roll(&mut self, sides: usize) -> usize {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        (self.dice.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % sides.max(1)
    }

    fn begin(&mut self, file: usize, change: Change) -> u64 {
        self.serial += 1;
        self.log.push(Event::Begin { file, serial: self.serial, change });
        self.serial
    }

    fn bytes(&self, file: usize) -> &[u8] {
        self.files.get(file).map_or(&[], |f| &f.bytes)
    }

    fn apply(&mut self, file: usize, change: &Change) -> io::Result<()> {
        self.files.get_mut(file).map_or(Ok(()), |f| f.apply(change))
    }
}

/// The bytes of a recorded file and the log of their changes; clones share them.
#[derive(Clone, Debug)]
pub struct RecordImage {
    tape: Arc<Mutex<Tape>>,
    file: usize,
}

impl RecordImage {
    /// An image with this content, all of it durable; `seed` decides the order of completions.
    #[must_use]
    pub fn new(bytes: Vec<u8>, seed: u64) -> Self {
        let tape = Tape { files: vec![Content::new(bytes)], dice: seed | 1, ..Tape::default() };
        Self { tape: Arc::new(Mutex::new(tape)), file: 0 }
    }

    /// Another file on the same medium: the power goes off for both at once, so they share one log.
    #[must_use]
    pub fn beside(&self, bytes: Vec<u8>) -> Self {
        let mut tape = self.lock();
        tape.files.push(Content::new(bytes));
        Self { tape: Arc::clone(&self.tape), file: tape.files.len() - 1 }
    }

    fn lock(&self) -> MutexGuard<'_, Tape> {
        self.tape.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes in it.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.lock().bytes(self.file).len() as u64
    }

    /// Whether it holds no byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A copy of the content as it is now.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.lock().bytes(self.file).to_vec()
    }

    /// The log so far.
    #[must_use]
    pub fn log(&self) -> Vec<Event> {
        self.lock().log.clone()
    }

    /// Puts a mark into the log.
    pub fn mark(&self, mark: u64) {
        self.lock().log.push(Event::Mark(mark));
    }

    /// The medium has so many bytes: what would make the file longer than that fails with `ENOSPC` and changes nothing.
    pub fn limit(&self, bytes: u64) {
        if let Some(file) = self.lock().files.get_mut(self.file) {
            file.limit = bytes;
        }
    }

    /// Gives the file another length, at once and in the log.
    ///
    /// # Errors
    /// `ENOSPC` past the limit.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        let mut tape = self.lock();
        let serial = tape.begin(self.file, Change::Resize(len));
        let result = tape.apply(self.file, &Change::Resize(len));
        tape.log.push(Event::End { serial });
        result
    }
}

#[derive(Debug)]
enum Waiting {
    Read { offset: u64, segs: Vec<Seg> },
    Change { serial: u64, change: Change },
}

/// The storage on a [`RecordImage`].
#[derive(Debug)]
pub struct RecordStorage {
    image: RecordImage,
    wake: Option<EventFd>,
    waiting: Vec<(u16, Waiting)>,
    /// Completions nobody has reaped yet.
    pub ready: Vec<Completion>,
}

impl RecordStorage {
    /// A storage on `image`.
    pub fn new(image: RecordImage) -> Self {
        Self { image, wake: None, waiting: Vec::new(), ready: Vec::new() }
    }

    /// What it keeps its bytes in.
    pub fn image(&self) -> &RecordImage {
        &self.image
    }

    /// See [`crate::Disk::attach`].
    pub fn attach(&mut self, wake: &EventFd) -> io::Result<()> {
        self.wake = Some(wake.try_clone()?);
        Ok(())
    }

    /// See [`crate::Disk::detach`].
    pub fn detach(&mut self) {
        while !self.waiting.is_empty() {
            self.finish_one();
        }
        self.wake = None;
    }

    /// Takes a request; served here and now only while nobody is attached.
    pub fn submit(&mut self, request: &Request<'_>) {
        let (offset, len) = (request.offset, request.len);
        let change = match request.op {
            Op::Read => {
                self.waiting.push((request.id, Waiting::Read { offset, segs: request.segs.to_vec() }));
                return self.settle();
            }
            Op::Write => Change::Write { offset, data: gather(request.segs) },
            Op::Flush => Change::Sync,
            Op::Discard | Op::WriteZeroes { .. } => Change::Zeroes { offset, len },
        };
        let serial = self.image.lock().begin(self.image.file, change.clone());
        self.waiting.push((request.id, Waiting::Change { serial, change }));
        self.settle();
    }

    fn settle(&mut self) {
        if self.wake.is_none() {
            while !self.waiting.is_empty() {
                self.finish_one();
            }
        }
    }

    /// Completes one of the waiting requests, any of them.
    fn finish_one(&mut self) {
        let mut tape = self.image.lock();
        let chosen = tape.roll(self.waiting.len());
        let (id, waiting) = self.waiting.swap_remove(chosen);
        let result = match waiting {
            Waiting::Read { offset, segs } => {
                // Past the end of the image there are zeroes.
                fill_zero(&segs);
                let bytes = tape.bytes(self.image.file);
                scatter(usize::try_from(offset).ok().and_then(|at| bytes.get(at..)).unwrap_or_default(), &segs);
                Ok(())
            }
            Waiting::Change { serial, change } => {
                let result = tape.apply(self.image.file, &change);
                tape.log.push(Event::End { serial });
                result
            }
        };
        drop(tape);
        self.ready.push(Completion { id, result });
    }

    /// See [`crate::Disk::reap`]: some of what waits completes now, or nothing.
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        // Some of them, or none: whoever asks again and again at once must not see all of them end before anything else happens.
        let mut tape = self.image.lock();
        let some = !self.waiting.is_empty() && tape.roll(3) > 0;
        let count = if some { 1 + tape.roll(self.waiting.len()) } else { 0 };
        drop(tape);
        for _ in 0..count {
            self.finish_one();
        }
        done.append(&mut self.ready);
    }

    /// See [`crate::Disk::want_wake`].
    pub fn want_wake(&mut self, on: bool) {
        if let (true, false, Some(wake)) = (on, self.waiting.is_empty(), &self.wake) {
            // The only failure is a full counter, and then the user is awake anyway.
            let _ = wake.write(1);
        }
    }
}
