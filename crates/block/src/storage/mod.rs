// SPDX-License-Identifier: Apache-2.0
//! Where bytes are kept. A format talks to a [`Storage`]; one thread owns it while it is attached.

pub mod around;
pub mod bounce;
pub mod buffer;
pub mod faults;
pub mod file;
pub mod mem;
pub mod patience;
pub mod record;
pub mod sys;
pub mod threads;
pub mod uring;
pub mod zeroing;

use std::io;

use base::{EventFd, Seg};

use crate::disk::{Completion, Op, Request};

/// A place for bytes. An enum and no trait object: the calls on the way of each request are direct.
#[derive(Debug)]
pub enum Storage {
    /// A regular file or block device.
    File(Box<FileStorage>),
    /// Memory of this process.
    Mem(MemStorage),
    /// Another storage with staged faults.
    Faults(Box<FaultStorage>),
    /// Memory with a log of every change.
    Record(RecordStorage),
    /// Nothing: stands in while a storage is moved.
    Gone,
}

use faults::FaultStorage;
use file::FileStorage;
use mem::MemStorage;
use record::RecordStorage;

impl Storage {
    /// See [`crate::Disk::attach`].
    pub fn attach(&mut self, wake: &EventFd) -> io::Result<()> {
        match self {
            Self::File(s) => s.attach(wake),
            Self::Mem(_) | Self::Gone => Ok(()),
            Self::Faults(s) => s.attach(wake),
            Self::Record(s) => s.attach(wake),
        }
    }

    /// See [`crate::Disk::detach`].
    pub fn detach(&mut self) {
        match self {
            Self::File(s) => s.detach(),
            Self::Mem(_) | Self::Gone => {}
            Self::Faults(s) => s.detach(),
            Self::Record(s) => s.detach(),
        }
    }

    /// Takes a request whose range was checked.
    pub fn submit(&mut self, request: &Request<'_>) {
        match self {
            Self::File(s) => s.submit(request),
            Self::Mem(s) => s.submit(request),
            Self::Faults(s) => s.submit(request),
            Self::Record(s) => s.submit(request),
            Self::Gone => {}
        }
    }

    /// Fails a request without trying it.
    pub fn refuse(&mut self, id: u16, error: io::Error) {
        let done = Completion { id, result: Err(error) };
        match self {
            Self::File(s) => s.ready.push(done),
            Self::Mem(s) => s.ready.push(done),
            Self::Faults(s) => s.ready.push(done),
            Self::Record(s) => s.ready.push(done),
            Self::Gone => {}
        }
    }

    /// See [`crate::Disk::commit`].
    pub fn commit(&mut self) {
        match self {
            Self::File(s) => s.commit(),
            Self::Mem(_) | Self::Record(_) | Self::Gone => {}
            Self::Faults(s) => s.commit(),
        }
    }

    /// See [`crate::Disk::linger`].
    pub fn linger(&mut self) {
        match self {
            Self::File(s) => s.linger(),
            other => other.commit(),
        }
    }

    /// See [`crate::Disk::lend`].
    pub fn lend(&mut self, memory: &[Seg]) {
        if let Self::File(s) = self {
            s.lend(memory);
        }
    }

    /// Requests that wait for the host.
    pub fn in_flight(&self) -> usize {
        if let Self::File(s) = self { s.in_flight() } else { 0 }
    }

    /// See [`crate::Disk::reap`].
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        match self {
            Self::File(s) => s.reap(done),
            Self::Mem(s) => done.append(&mut s.ready),
            Self::Faults(s) => s.reap(done),
            Self::Record(s) => s.reap(done),
            Self::Gone => {}
        }
    }

    /// See [`crate::Disk::want_wake`].
    pub fn want_wake(&mut self, on: bool) {
        match self {
            Self::File(s) => s.want_wake(on),
            Self::Mem(_) | Self::Gone => {}
            Self::Faults(s) => s.want_wake(on),
            Self::Record(s) => s.want_wake(on),
        }
    }

    /// See [`crate::Disk::engine`].
    pub fn engine(&self) -> &'static str {
        match self {
            Self::File(s) => s.engine(),
            Self::Mem(_) | Self::Record(_) => "memory",
            Self::Faults(s) => s.engine(),
            Self::Gone => "none",
        }
    }

    /// Another storage on the same bytes for another thread, not attached; `None` if there is none to be had.
    pub fn share(&self) -> Option<Self> {
        Some(match self {
            Self::File(s) => Self::File(Box::new(s.share())),
            Self::Mem(s) => Self::Mem(MemStorage::new(s.image().clone())),
            Self::Faults(s) => Self::Faults(Box::new(s.share()?)),
            Self::Record(s) => Self::Record(RecordStorage::new(s.image().clone())),
            Self::Gone => return None,
        })
    }

    /// Bytes in it now.
    pub fn len(&self) -> io::Result<u64> {
        match self {
            Self::File(s) => s.len(),
            Self::Mem(s) => Ok(s.image().len()),
            Self::Faults(s) => s.inner().len(),
            Self::Record(s) => Ok(s.image().len()),
            Self::Gone => Err(io::Error::from_raw_os_error(libc::ENODEV)),
        }
    }

    /// Gives it another length; new bytes are zeroes.
    pub fn set_len(&self, len: u64) -> io::Result<()> {
        match self {
            Self::File(s) => s.set_len(len),
            Self::Mem(s) => s.image().set_len(len),
            Self::Faults(s) => s.inner().set_len(len),
            Self::Record(s) => s.image().set_len(len),
            Self::Gone => Err(io::Error::from_raw_os_error(libc::ENODEV)),
        }
    }

    /// Whether a write that makes the file longer costs less than one into space that was set aside: where the page cache
    /// does not stand between, file systems turn such space into data with each write.
    pub fn extends_cheaply(&self) -> bool {
        match self {
            Self::File(s) => s.plain().is_some_and(|(_, direct)| direct),
            Self::Faults(s) => s.inner().extends_cheaply(),
            Self::Record(_) => true,
            Self::Mem(_) | Self::Gone => false,
        }
    }

    /// Makes everything that is done durable, its length too, and waits for that, whoever is attached.
    pub fn sync_now(&self) -> io::Result<()> {
        let mut own = self.share().ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))?;
        own.submit(&Request { id: 0, op: Op::Flush, offset: 0, len: 0, segs: &[] });
        let mut done = Vec::new();
        own.reap(&mut done);
        done.pop().map_or_else(|| Err(io::Error::from_raw_os_error(libc::EIO)), |d| d.result)
    }

    /// Makes it `len` bytes long, from `old` bytes, with the host's promise of space where it gives one. New bytes are zeroes.
    pub fn reserve(&self, old: u64, len: u64) -> io::Result<()> {
        match self {
            Self::File(s) => s.reserve(old, len),
            Self::Faults(s) => s.inner().reserve(old, len),
            other => other.set_len(len),
        }
    }

    /// The end of the hole that `offset` lies in: all bytes from `offset` to there are zeroes. `offset` itself if it lies in
    /// none, or if nobody knows.
    pub fn hole_end(&self, offset: u64) -> u64 {
        match self {
            Self::File(s) => s.hole_end(offset),
            Self::Faults(s) => s.inner().hole_end(offset),
            _ => offset,
        }
    }

    /// The end of the data that `offset` lies in, at least the next byte; `u64::MAX` if nobody knows of holes.
    pub fn data_end(&self, offset: u64) -> u64 {
        match self {
            Self::File(s) => s.data_end(offset),
            Self::Faults(s) => s.inner().data_end(offset),
            _ => u64::MAX,
        }
    }

    /// Whether bytes past the end can be had, and read as zeroes.
    pub fn grows(&self) -> bool {
        match self {
            Self::File(s) => s.grows(),
            Self::Faults(s) => s.inner().grows(),
            _ => true,
        }
    }
}
