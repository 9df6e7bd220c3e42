// SPDX-License-Identifier: Apache-2.0
//! What a disk is to its user: ask with [`Disk::submit`], send off a batch with [`Disk::commit`], collect with
//! [`Disk::reap`], sleep on the eventfd given to [`Disk::attach`].
//!
//! One thread owns a disk while it is attached. There is no order between requests in flight, flushes included: a flush
//! covers the writes whose completions were reaped before it was submitted, and no others.

use std::io;
use std::path::{Path, PathBuf};

use base::{EventFd, SECTOR_SIZE, Seg};

use crate::error::Error;
use crate::open;
use crate::raw::Raw;
use crate::storage::Storage;
use crate::storage::faults::{FaultPlan, FaultStorage};
use crate::storage::file::FileStorage;
use crate::storage::mem::{MemImage, MemStorage};

/// How the host's page cache is used; QEMU's names and meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Through the page cache; a flush reaches the medium.
    #[default]
    Writeback,
    /// Past the page cache (`O_DIRECT`); a flush reaches the medium.
    None,
    /// Through the page cache; flushes are answered and not passed on.
    Unsafe,
}

/// How requests reach the host kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aio {
    /// What the page cache can serve at once is served by a plain system call on the calling thread; what has to wait goes
    /// to io_uring, or to threads where the kernel has no io_uring.
    #[default]
    Auto,
    /// Everything through io_uring, as other monitors do; an error where the kernel has none.
    IoUring,
    /// Everything through a pool of threads.
    Threads,
}

/// What to do with a byte range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Disk to segments.
    Read,
    /// Segments to disk.
    Write,
    /// Make every write reaped so far durable; the range is not looked at.
    Flush,
    /// The content of the range is no longer needed. A hint: the range may keep its bytes or read as anything.
    Discard,
    /// The range reads as zeroes afterwards; with `unmap` the space may be given back.
    WriteZeroes {
        /// The host's space may be freed.
        unmap: bool,
    },
}

/// One request; borrowed only for the length of [`Disk::submit`], but the bytes that `segs` point at must stay mapped until
/// the completion with the same `id` was reaped.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Comes back in the completion; unique among the requests in flight. Tables are indexed by it: keep it small.
    pub id: u16,
    /// What to do.
    pub op: Op,
    /// First byte on the disk; any alignment.
    pub offset: u64,
    /// Length in bytes; for reads and writes the total length of `segs`.
    pub len: u64,
    /// Where the bytes are; empty but for reads and writes.
    pub segs: &'a [Seg],
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The request's.
    pub id: u16,
    /// `Ok` if all of it was done. A failed write may have changed any part of its range, and no other.
    pub result: io::Result<()>,
}

/// How to open an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// A regular file or block device.
    pub path: PathBuf,
    /// Open for reading only; writes fail with `EROFS`.
    pub readonly: bool,
    /// Use of the page cache.
    pub cache: Cache,
    /// Way to the kernel.
    pub aio: Aio,
}

impl Options {
    /// Writable, `cache=writeback`, `aio=auto`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), readonly: false, cache: Cache::default(), aio: Aio::default() }
    }
}

/// What the guest should know of the disk below, to ask for what is cheap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Smallest unit that is written without reading first, in bytes; a power of two, at least 512.
    pub block_size: u32,
    /// Unit in which space can be freed, in bytes; a multiple of `block_size`.
    pub discard_granularity: u32,
}

/// A disk: a format on a storage.
#[derive(Debug)]
pub struct Disk {
    raw: Raw,
    path: PathBuf,
    warning: Option<String>,
}

impl Disk {
    /// Opens a raw image, locks it and finds out what its host can do. No thread is started and no ring is kept yet.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn open(options: &Options) -> Result<Self, Error> {
        let opened = open::open(options)?;
        let size = opened.size;
        let mut warnings = opened.warnings;
        let whole = size - size % SECTOR_SIZE;
        if whole == 0 {
            return Err(Error::Empty(options.path.clone(), size));
        }
        if whole != size {
            warnings.push(format!(
                "disk {0}: {size} bytes is no multiple of 512, so the last {1} are hidden from the guest; `truncate -s {2} {0}` shows them",
                options.path.display(),
                size - whole,
                whole + SECTOR_SIZE
            ));
        }
        let storage = Storage::File(Box::new(FileStorage::new(opened.file, options)));
        let raw = Raw::new(storage, whole, options.readonly, opened.limits);
        let warning = (!warnings.is_empty()).then(|| warnings.join("; "));
        Ok(Self { raw, path: options.path.clone(), warning })
    }

    /// A disk in memory, for tests and tools.
    #[must_use]
    pub fn in_memory(image: &MemImage, readonly: bool) -> Self {
        let limits = Limits { block_size: 512, discard_granularity: 512 };
        let size = image.len() - image.len() % SECTOR_SIZE;
        let raw = Raw::new(Storage::Mem(MemStorage::new(image.clone())), size, readonly, limits);
        Self { raw, path: PathBuf::from("memory"), warning: None }
    }

    /// The same disk with faults staged by `plan`, for tests.
    #[must_use]
    pub fn with_faults(mut self, plan: &FaultPlan) -> Self {
        self.raw.wrap(|inner| Storage::Faults(Box::new(FaultStorage::new(inner, plan.clone()))));
        self
    }

    /// Where the image is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Something the user should hear about an image that opened all the same.
    #[must_use]
    pub fn warning(&self) -> Option<&str> {
        self.warning.as_deref()
    }

    /// Bytes of the disk; a multiple of 512, at least 512.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.raw.size()
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn readonly(&self) -> bool {
        self.raw.readonly()
    }

    /// Sizes that the host likes.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.raw.limits()
    }

    /// The way requests that must wait take now: `io_uring`, `threads` or `memory`. Says `detached` before [`Disk::attach`].
    #[must_use]
    pub fn engine(&self) -> &'static str {
        self.raw.storage().engine()
    }

    /// Makes the calling thread the disk's user: starts the ring or the threads. `wake` is written to when a completion
    /// appears that was not there when [`Disk::commit`] returned.
    ///
    /// # Errors
    /// When the host has no descriptors, threads or locked memory left.
    pub fn attach(&mut self, wake: &EventFd) -> io::Result<()> {
        self.raw.storage_mut().attach(wake)
    }

    /// Gives the ring and the threads back. Waits for what is in flight; its completions can still be reaped.
    pub fn detach(&mut self) {
        self.raw.storage_mut().detach();
    }

    /// Takes a request. It may be served before this returns, or wait for [`Disk::commit`].
    pub fn submit(&mut self, request: &Request<'_>) {
        self.raw.submit(request);
    }

    /// Sends off everything submitted since the last call, in one system call where there is one to make.
    pub fn commit(&mut self) {
        self.raw.storage_mut().commit();
    }

    /// Appends the completions there are to `done`; makes no system call unless a request has to be continued.
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        self.raw.storage_mut().reap(done);
    }

    /// Says that the caller is about to sleep on its eventfd, or woke from it. Between `true` and `false` completions write
    /// to the eventfd; else they may or may not. After `true`, [`Disk::reap`] once more before sleeping.
    pub fn want_wake(&mut self, on: bool) {
        self.raw.storage_mut().want_wake(on);
    }
}
