// SPDX-License-Identifier: Apache-2.0
//! What a disk is to its user: ask with [`Disk::submit`], send off a batch with [`Disk::commit`], collect with
//! [`Disk::reap`], sleep on the eventfd given to [`Disk::attach`].
//!
//! One thread owns a disk while it is attached. There is no order between requests in flight, flushes included: a flush
//! covers the writes whose completions were reaped before it was submitted, and no others.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::news::News;
use base::{EventFd, SECTOR_SIZE, Seg};

use crate::error::Error;
use crate::open;
use crate::options::{Format, Options};
use crate::qcow2::engine::chain::{self, Chain};
use crate::qcow2::engine::handle::Handle;
use crate::raw::Raw;
use crate::storage::Storage;
use crate::storage::faults::{FaultPlan, FaultStorage};
use crate::storage::file::FileStorage;
use crate::storage::mem::{MemImage, MemStorage};
use crate::storage::record::{RecordImage, RecordStorage};
use crate::voice::Voice;

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
    /// First byte on the disk; any alignment, but for writes of an encrypted disk ([`Disk::granule`]).
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

/// What the guest should know of the disk below, to ask for what is cheap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Smallest unit that is written without reading first, in bytes; a power of two, at least 512.
    pub block_size: u32,
    /// Unit in which space can be freed, in bytes; a multiple of `block_size`.
    pub discard_granularity: u32,
}

/// What a run of a disk's bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Bytes that are kept somewhere.
    Data,
    /// Reads as zeroes because an image of the chain says so.
    Zero,
    /// Reads as zeroes because no image of the chain says anything (qcow2), or the file has a hole there (raw).
    Hole,
}

/// A run of a disk's bytes that are kept in the same way; what `map` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// What they are.
    pub kind: ExtentKind,
    /// Which image of the chain says so: 0 is the one opened.
    pub depth: u32,
    /// Where the bytes lie in that image's file (or its external data file), if they lie there as they are.
    pub host_offset: Option<u64>,
    /// The bytes are compressed.
    pub compressed: bool,
}

/// What serves the requests. An enum and no trait object: the calls on the way of each request are direct.
#[derive(Debug)]
enum Body {
    Raw(Box<Raw>),
    Qcow2(Box<Handle>),
}

/// A disk: a format on a storage.
#[derive(Debug)]
pub struct Disk {
    body: Body,
    path: PathBuf,
    warning: Option<String>,
    voice: Option<Arc<Voice>>,
}

impl Disk {
    /// Opens an image and all files below it, locks them and finds out what their host can do. No thread is started and no
    /// ring is kept yet.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn open(options: &Options) -> Result<Self, Error> {
        if options.format == Format::Qcow2 {
            let (chain, warnings) = chain::open(options)?;
            return Self::on_chain(chain, &options.path, warnings);
        }
        if !options.qcow2.keys.is_empty() {
            let what = "a raw image is not encrypted, and a key is given; leave it out, or say format=qcow2";
            return Err(Error::Unsupported(options.path.clone(), what.into()));
        }
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
        Ok(Self {
            body: Body::Raw(Box::new(raw)),
            path: options.path.clone(),
            warning: one_line(&warnings),
            voice: None,
        })
    }

    fn on_chain(chain: Chain, path: &Path, warnings: Vec<String>) -> Result<Self, Error> {
        let failed = |source| Error::Io { path: path.to_owned(), what: "make a handle on it", source };
        let handle = Handle::new(chain).map_err(failed)?;
        Ok(Self {
            body: Body::Qcow2(Box::new(handle)),
            path: path.to_owned(),
            warning: one_line(&warnings),
            voice: None,
        })
    }

    /// A disk on a qcow2 image in memory that logs each change, for tests of power cuts; `data` is its data file, if it says
    /// that it has one. Of `options`, the path is only a name and the place from which backing files are looked for.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn recorded_qcow2(image: &RecordImage, data: Option<&RecordImage>, options: &Options) -> Result<Self, Error> {
        let storage = |image: &RecordImage| Storage::Record(RecordStorage::new(image.clone()));
        Self::on_chain(chain::open_alone(storage(image), data.map(storage), options)?, &options.path, Vec::new())
    }

    /// As [`Disk::recorded_qcow2`], with faults staged by `plan` from the opening on.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn faulty_qcow2(image: &MemImage, options: &Options, plan: &FaultPlan) -> Result<Self, Error> {
        let storage = Storage::Mem(MemStorage::new(image.clone()));
        let storage = Storage::Faults(Box::new(FaultStorage::new(storage, plan.clone())));
        Self::on_chain(chain::open_alone(storage, None, options)?, &options.path, Vec::new())
    }

    /// A disk in memory, for tests and tools.
    #[must_use]
    pub fn in_memory(image: &MemImage, readonly: bool) -> Self {
        let limits = Limits { block_size: 512, discard_granularity: 512 };
        let size = image.len() - image.len() % SECTOR_SIZE;
        let raw = Raw::new(Storage::Mem(MemStorage::new(image.clone())), size, readonly, limits);
        Self { body: Body::Raw(Box::new(raw)), path: PathBuf::from("memory"), warning: None, voice: None }
    }

    /// A disk in memory that logs each change, for tests of power cuts.
    #[must_use]
    pub fn recorded(image: &RecordImage, readonly: bool) -> Self {
        let limits = Limits { block_size: 512, discard_granularity: 512 };
        let size = image.len() - image.len() % SECTOR_SIZE;
        let raw = Raw::new(Storage::Record(RecordStorage::new(image.clone())), size, readonly, limits);
        Self { body: Body::Raw(Box::new(raw)), path: PathBuf::from("memory"), warning: None, voice: None }
    }

    /// The same disk with faults staged by `plan`, for tests.
    #[must_use]
    pub fn with_faults(mut self, plan: &FaultPlan) -> Self {
        let around = |inner| Storage::Faults(Box::new(FaultStorage::new(inner, plan.clone())));
        match &mut self.body {
            Body::Raw(raw) => raw.wrap(around),
            Body::Qcow2(handle) => handle.wrap(around),
        }
        self
    }

    /// Says through `news` what goes wrong while the disk is in use: the first request that the host fails, then the tenth,
    /// the hundredth, and damage in the image. Handles made of this one from now on ([`Disk::share`]) do the same.
    pub fn report_to(&mut self, news: &Arc<News>) {
        self.voice = Some(Arc::new(Voice::new(Arc::clone(news))));
    }

    /// Writes are refused because the image turned out to contradict itself.
    #[must_use]
    pub fn damaged(&self) -> bool {
        match &self.body {
            Body::Raw(_) => false,
            Body::Qcow2(handle) => handle.top().is_some_and(|top| top.broken.load(Ordering::Acquire)),
        }
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
        match &self.body {
            Body::Raw(raw) => raw.size(),
            Body::Qcow2(handle) => handle.top().map_or(0, |top| top.size()),
        }
    }

    /// Whether writes are refused.
    #[must_use]
    pub fn readonly(&self) -> bool {
        match &self.body {
            Body::Raw(raw) => raw.readonly(),
            Body::Qcow2(handle) => handle.top().is_none_or(|top| !top.writable),
        }
    }

    /// Sizes that the host likes.
    #[must_use]
    pub fn limits(&self) -> Limits {
        match &self.body {
            Body::Raw(raw) => raw.limits(),
            Body::Qcow2(handle) => handle.limits(),
        }
    }

    /// Writes have to be in multiples of so many bytes: 1, or 512 where sectors are encrypted.
    #[must_use]
    pub fn granule(&self) -> u64 {
        match &self.body {
            Body::Raw(_) => 1,
            Body::Qcow2(handle) => handle.granule(),
        }
    }

    /// The way requests that must wait take now: `io_uring`, `threads` or `memory`. Says `detached` before [`Disk::attach`].
    #[must_use]
    pub fn engine(&self) -> &'static str {
        match &self.body {
            Body::Raw(raw) => raw.storage().engine(),
            Body::Qcow2(handle) => handle.engine(),
        }
    }

    /// Another handle on the same image for another thread: same bytes, requests and completions of its own. A flush on any of
    /// them covers what was reaped from all of them.
    ///
    /// # Errors
    /// When the host has no descriptors left, or the disk is one for tests (faults).
    pub fn share(&self) -> io::Result<Self> {
        let body = match &self.body {
            Body::Raw(raw) => {
                Body::Raw(Box::new(raw.share().ok_or_else(|| io::Error::from_raw_os_error(libc::EOPNOTSUPP))?))
            }
            Body::Qcow2(handle) => Body::Qcow2(Box::new(handle.share()?)),
        };
        Ok(Self { body, path: self.path.clone(), warning: None, voice: self.voice.clone() })
    }

    /// How `len` bytes from `offset` on are kept, in order, without gaps. Waits for what it has to read; for tools.
    ///
    /// # Errors
    /// A range past the end, or what the host says.
    pub fn extents(&mut self, offset: u64, len: u64) -> io::Result<Vec<Extent>> {
        match &mut self.body {
            Body::Raw(raw) => raw.extents(offset, len),
            Body::Qcow2(handle) => handle.extents(offset, len),
        }
    }

    /// Makes the disk `bytes` long (a multiple of 512) and waits until that is durable. New bytes read as zeroes.
    ///
    /// # Errors
    /// What can't be had on this image, in one line; or what the host says.
    pub fn resize(&mut self, bytes: u64) -> io::Result<()> {
        match &mut self.body {
            Body::Raw(raw) => raw.resize(bytes),
            Body::Qcow2(handle) => handle.resize(bytes),
        }
    }

    /// Makes the calling thread the disk's user: starts the ring or the threads. `wake` is written to when a completion
    /// appears that was not there when [`Disk::commit`] returned.
    ///
    /// # Errors
    /// When the host has no descriptors, threads or locked memory left.
    pub fn attach(&mut self, wake: &EventFd) -> io::Result<()> {
        match &mut self.body {
            Body::Raw(raw) => raw.storage_mut().attach(wake),
            Body::Qcow2(handle) => handle.attach(wake),
        }
    }

    /// Gives the ring and the threads back. Waits for what is in flight; its completions can still be reaped.
    pub fn detach(&mut self) {
        match &mut self.body {
            Body::Raw(raw) => raw.storage_mut().detach(),
            Body::Qcow2(handle) => handle.detach(),
        }
    }

    /// Takes a request. It may be served before this returns, or wait for [`Disk::commit`].
    pub fn submit(&mut self, request: &Request<'_>) {
        match &mut self.body {
            Body::Raw(raw) => raw.submit(request),
            Body::Qcow2(handle) => handle.submit(request),
        }
    }

    /// Sends off everything submitted since the last call, in one system call where there is one to make.
    pub fn commit(&mut self) {
        match &mut self.body {
            Body::Raw(raw) => raw.storage_mut().commit(),
            Body::Qcow2(handle) => handle.commit(),
        }
    }

    /// As [`Disk::commit`], for a caller with nothing else to do: where much is in flight it may sleep some tens of
    /// microseconds, until a good part of it is done, since answers taken together cost less than one by one.
    pub fn linger(&mut self) {
        match &mut self.body {
            Body::Raw(raw) => raw.storage_mut().linger(),
            Body::Qcow2(handle) => handle.linger(),
        }
    }

    /// Says in which memory most requests will have their bytes, so that the host has to look it up only once (io_uring's
    /// registered buffers). To be called after [`Disk::attach`] with nothing in flight. The memory has to stay mapped, at
    /// its place, until [`Disk::detach`]. A host that refuses serves requests as before.
    pub fn lend(&mut self, memory: &[Seg]) {
        match &mut self.body {
            Body::Raw(raw) => raw.storage_mut().lend(memory),
            Body::Qcow2(handle) => handle.lend(memory),
        }
    }

    /// Appends the completions there are to `done`; makes no system call unless a request has to be continued.
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        match &mut self.body {
            Body::Raw(raw) => raw.storage_mut().reap(done),
            Body::Qcow2(handle) => handle.reap(done),
        }
        let Some(voice) = &self.voice else { return };
        for error in done.iter().skip(before).filter_map(|c| c.result.as_ref().err()) {
            voice.failed(&self.path, error, self.damaged());
        }
    }

    /// Says that the caller is about to sleep on its eventfd, or woke from it. Between `true` and `false` completions write
    /// to the eventfd; else they may or may not. After `true`, [`Disk::reap`] once more before sleeping.
    pub fn want_wake(&mut self, on: bool) {
        match &mut self.body {
            Body::Raw(raw) => raw.storage_mut().want_wake(on),
            Body::Qcow2(handle) => handle.want_wake(on),
        }
    }
}

fn one_line(warnings: &[String]) -> Option<String> {
    (!warnings.is_empty()).then(|| warnings.join("; "))
}
