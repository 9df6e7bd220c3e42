// SPDX-License-Identifier: Apache-2.0
//! Where bytes are kept. A format talks to a [`Storage`]; one thread owns it while it is attached.

pub mod around;
pub mod bounce;
pub mod faults;
pub mod file;
pub mod mem;
pub mod patience;
pub mod sys;
pub mod threads;
pub mod uring;

use std::io;

use base::EventFd;

use crate::disk::{Completion, Request};

/// A place for bytes. An enum and no trait object: the calls on the way of each request are direct.
#[derive(Debug)]
pub enum Storage {
    /// A regular file or block device.
    File(Box<FileStorage>),
    /// Memory of this process.
    Mem(MemStorage),
    /// Another storage with staged faults.
    Faults(Box<FaultStorage>),
    /// Nothing: stands in while a storage is moved.
    Gone,
}

use faults::FaultStorage;
use file::FileStorage;
use mem::MemStorage;

impl Storage {
    /// See [`crate::Disk::attach`].
    pub fn attach(&mut self, wake: &EventFd) -> io::Result<()> {
        match self {
            Self::File(s) => s.attach(wake),
            Self::Mem(_) | Self::Gone => Ok(()),
            Self::Faults(s) => s.attach(wake),
        }
    }

    /// See [`crate::Disk::detach`].
    pub fn detach(&mut self) {
        match self {
            Self::File(s) => s.detach(),
            Self::Mem(_) | Self::Gone => {}
            Self::Faults(s) => s.detach(),
        }
    }

    /// Takes a request whose range was checked.
    pub fn submit(&mut self, request: &Request<'_>) {
        match self {
            Self::File(s) => s.submit(request),
            Self::Mem(s) => s.submit(request),
            Self::Faults(s) => s.submit(request),
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
            Self::Gone => {}
        }
    }

    /// See [`crate::Disk::commit`].
    pub fn commit(&mut self) {
        match self {
            Self::File(s) => s.commit(),
            Self::Mem(_) | Self::Gone => {}
            Self::Faults(s) => s.commit(),
        }
    }

    /// See [`crate::Disk::reap`].
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        match self {
            Self::File(s) => s.reap(done),
            Self::Mem(s) => done.append(&mut s.ready),
            Self::Faults(s) => s.reap(done),
            Self::Gone => {}
        }
    }

    /// See [`crate::Disk::want_wake`].
    pub fn want_wake(&mut self, on: bool) {
        match self {
            Self::File(s) => s.want_wake(on),
            Self::Mem(_) | Self::Gone => {}
            Self::Faults(s) => s.want_wake(on),
        }
    }

    /// See [`crate::Disk::engine`].
    pub fn engine(&self) -> &'static str {
        match self {
            Self::File(s) => s.engine(),
            Self::Mem(_) => "memory",
            Self::Faults(s) => s.engine(),
            Self::Gone => "none",
        }
    }
}
