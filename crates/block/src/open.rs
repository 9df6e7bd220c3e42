// SPDX-License-Identifier: Apache-2.0
//! Opens an image: finds out what it is, checks that it can be used as asked, locks it. Called by `Disk::open`.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::time::Duration;

use crate::disk::Limits;
use crate::error::Error;
use crate::lock;
use crate::options::{Aio, Cache, Options};
use crate::storage::{sys, uring};

/// How often a taken lock is tried again.
const LOCK_TRIES: u32 = 10;
/// The pause between two tries.
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The file and what direct I/O on it wants.
#[derive(Debug)]
pub struct OpenFile {
    /// Open and locked.
    pub file: File,
    /// A block device, not a regular file.
    pub block_device: bool,
    /// Direct I/O wants multiples of so many bytes; a power of two from 512 to 4096.
    pub direct_align: u32,
}

/// An image ready for use.
pub struct Opened {
    /// The file.
    pub file: OpenFile,
    /// Its bytes.
    pub size: u64,
    /// Sizes that the host likes.
    pub limits: Limits,
    /// What the user should hear.
    pub warnings: Vec<String>,
}

/// Opens `options.path`.
///
/// # Errors
/// See [`Error`].
pub fn open(options: &Options) -> Result<Opened, Error> {
    let path = &options.path;
    let failed = |what: &'static str| move |source: io::Error| Error::Io { path: path.clone(), what, source };
    // Looked at before it is opened: opening a pipe would hang, opening a terminal or a tape does things.
    let meta = std::fs::metadata(path).map_err(|e| refused(options, e, false))?;
    let block_device = disk_kind(options, &meta)?;
    if options.aio == Aio::IoUring {
        uring::probe().map_err(|e| {
            Error::Unsupported(
                path.clone(),
                format!("aio=io_uring is not to be had on this host ({e}); use aio=threads or aio=auto"),
            )
        })?;
    }
    let file = open_file(options)?;
    let meta = file.metadata().map_err(failed("look at it"))?;
    if disk_kind(options, &meta)? != block_device {
        return Err(Error::NotADisk(path.clone(), "file that was just replaced"));
    }
    let mut warnings = Vec::new();
    match take_lock(&file, !options.readonly).map_err(failed("lock it"))? {
        lock::Outcome::Held => {}
        lock::Outcome::Conflict(how) => return Err(Error::Locked(path.clone(), how)),
        lock::Outcome::Unsupported => warnings.push(format!(
            "disk {}: its file system has no file locks, so nothing keeps others from opening it too",
            path.display()
        )),
    }
    let (size, limits) = if block_device {
        if !options.readonly && sys::device_readonly(&file).map_err(failed("ask for its state"))? {
            return Err(Error::ReadOnly(path.clone()));
        }
        let (logical, physical) = sys::device_blocks(&file).map_err(failed("ask for its block size"))?;
        let size = sys::device_size(&file).map_err(failed("ask for its size"))?;
        (size, Limits { block_size: logical.max(512), discard_granularity: physical.max(logical).max(512) })
    } else {
        let granularity =
            u32::try_from(meta.blksize()).ok().filter(|b| b.is_power_of_two() && *b >= 512).unwrap_or(4096);
        (meta.len(), Limits { block_size: 512, discard_granularity: granularity })
    };
    let mut opened = Opened { file: OpenFile { file, block_device, direct_align: 512 }, size, limits, warnings };
    if options.cache == Cache::None {
        fit_direct(options, &mut opened)?;
    }
    Ok(opened)
}

/// Takes the lock, giving a holder that just ended a moment: the kernel closes the files of a killed process's io_uring a
/// little after the process is gone.
fn take_lock(file: &File, writable: bool) -> io::Result<lock::Outcome> {
    let mut outcome = lock::acquire(file, writable)?;
    for _ in 0..LOCK_TRIES {
        if !matches!(outcome, lock::Outcome::Conflict(_)) {
            break;
        }
        std::thread::sleep(LOCK_PAUSE);
        outcome = lock::acquire(file, writable)?;
    }
    Ok(outcome)
}

/// Whether it is a block device; an error if it can't be a disk at all.
fn disk_kind(options: &Options, meta: &std::fs::Metadata) -> Result<bool, Error> {
    let kind = meta.file_type();
    let what = if kind.is_file() {
        return Ok(false);
    } else if kind.is_block_device() {
        return Ok(true);
    } else if kind.is_dir() {
        "directory"
    } else if kind.is_fifo() {
        "pipe"
    } else if kind.is_socket() {
        "socket"
    } else {
        "character device"
    };
    Err(Error::NotADisk(options.path.clone(), what))
}

fn open_file(options: &Options) -> Result<File, Error> {
    let direct = if options.cache == Cache::None { libc::O_DIRECT } else { 0 };
    let attempt = |flags: libc::c_int| {
        OpenOptions::new().read(true).write(!options.readonly).custom_flags(flags | direct).open(&options.path)
    };
    // Reading leaves no trace in the access time where that is ours to say: saves a journal entry now and then.
    let result = match attempt(libc::O_NOATIME) {
        Err(e) if e.raw_os_error() == Some(libc::EPERM) => attempt(0),
        other => other,
    };
    result.map_err(|e| {
        if direct != 0 && e.raw_os_error() == Some(libc::EINVAL) {
            return no_direct(options);
        }
        let readable = !options.readonly && File::open(&options.path).is_ok();
        refused(options, e, readable)
    })
}

fn no_direct(options: &Options) -> Error {
    Error::Unsupported(
        options.path.clone(),
        "cache=none needs O_DIRECT, which its file system has not; use cache=writeback".into(),
    )
}

/// Turns the host's refusal into what the user can do about it; `readable` if opening for reading alone works.
fn refused(options: &Options, source: io::Error, readable: bool) -> Error {
    let path = options.path.clone();
    match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => Error::Missing(path),
        Some(libc::EROFS) => Error::ReadOnly(path),
        Some(libc::EACCES | libc::EPERM) if readable => Error::ReadOnly(path),
        Some(libc::EACCES | libc::EPERM) => {
            Error::Permission(path, if options.readonly { "reading" } else { "reading and writing" })
        }
        Some(libc::ENXIO | libc::ENODEV) => Error::Missing(path),
        _ => Error::Io { path, what: "open it", source },
    }
}

/// Finds out what direct I/O wants by trying it, and refuses sizes that it could not serve to the end.
fn fit_direct(options: &Options, opened: &mut Opened) -> Result<(), Error> {
    let smallest = opened.limits.block_size.clamp(512, 4096);
    let mut align = smallest;
    loop {
        match direct_read(&opened.file.file, align, opened.size) {
            Ok(()) => break,
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) && align < 4096 => align *= 2,
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => return Err(no_direct(options)),
            Err(source) => return Err(Error::Io { path: options.path.clone(), what: "read it", source }),
        }
    }
    let tail = opened.size % u64::from(align);
    if tail != 0 && align > 512 {
        let message = format!(
            "cache=none needs a size that is a multiple of {align} on this device; `truncate -s {} {}`, or use cache=writeback",
            opened.size - tail + u64::from(align),
            options.path.display()
        );
        return Err(Error::Unsupported(options.path.clone(), message));
    }
    opened.file.direct_align = align;
    opened.limits.block_size = opened.limits.block_size.max(align);
    opened.limits.discard_granularity = opened.limits.discard_granularity.max(align);
    Ok(())
}

/// Reads `align` bytes with that alignment and no more; a short file is as good as a full one.
fn direct_read(file: &File, align: u32, size: u64) -> io::Result<()> {
    let len = align as usize;
    let area = base::mmap::Mmap::anonymous(3 * 4096)?;
    // Aligned to `align` and no better, so that a device that wants more says so.
    let ptr = area.as_ptr().wrapping_add(4096 + len);
    let offset = if size >= 2 * u64::from(align) { u64::from(align) } else { 0 };
    let seg = base::Seg { ptr, len: len.min(4096) };
    match sys::read_all(file, &[seg], offset) {
        // The end of a file shorter than this.
        Err(e) if e.raw_os_error() == Some(libc::EIO) && size < u64::from(align) => Ok(()),
        other => other,
    }
}
