// SPDX-License-Identifier: Apache-2.0
//! The system calls that move bytes, each doing all of its range or failing. Called by `file` on the worker thread and by
//! the pool's threads; no state.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use base::Seg;

use crate::disk::Op;

/// Most segments one system call takes (`UIO_MAXIOV`).
pub const MAX_SEGS: usize = 1024;
/// Written over and over where the file system has no cheaper zeroes.
static ZEROES: [u8; 128 << 10] = [0; 128 << 10];

/// Reads what the page cache has at once, without waiting for a device: how many bytes, possibly fewer than asked.
///
/// # Errors
/// `EAGAIN` when it would wait, `EOPNOTSUPP` when the file system can't tell.
pub fn read_nowait(file: &File, segs: &[Seg], offset: u64) -> io::Result<usize> {
    vectored(Direction::Read, file, segs, offset, libc::RWF_NOWAIT)
}

/// Fills all of `segs` from `offset` on.
///
/// # Errors
/// What `preadv` says; `EIO` at the end of the file.
pub fn read_all(file: &File, segs: &[Seg], offset: u64) -> io::Result<()> {
    all(Direction::Read, file, segs, offset)
}

/// Reads up to the end of `seg` or of the file: how many bytes.
///
/// # Errors
/// What `pread` says.
pub fn read_most(file: &File, seg: Seg, offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < seg.len {
        let rest = [Seg { ptr: seg.ptr.wrapping_add(done), len: seg.len - done }];
        match vectored(Direction::Read, file, &rest, offset + done as u64, 0) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // Past an end that is no multiple of the block: nothing more to read.
            Err(e) if done > 0 && e.raw_os_error() == Some(libc::EINVAL) => break,
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

/// Makes the file at least `len` bytes long with space behind them, from `old` on.
///
/// # Errors
/// What `fallocate` says; `EOPNOTSUPP` where the file system can't.
pub fn allocate(file: &File, old: u64, len: u64) -> io::Result<()> {
    fallocate(file, 0, old, len.saturating_sub(old))
}

/// Where the next data at or after `offset` begins; `None` if there is none up to the end.
///
/// # Errors
/// What `lseek` says.
pub fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    match seek(file, offset, libc::SEEK_DATA) {
        Err(e) if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        other => other.map(Some),
    }
}

/// Where the next hole at or after `offset` begins; the file's end is one.
///
/// # Errors
/// What `lseek` says.
pub fn next_hole(file: &File, offset: u64) -> io::Result<u64> {
    seek(file, offset, libc::SEEK_HOLE)
}

fn seek(file: &File, offset: u64, whence: libc::c_int) -> io::Result<u64> {
    let offset = i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: no pointers; the descriptor is open since `file` is borrowed. Nobody uses the file's position.
    let at = unsafe { libc::lseek64(file.as_raw_fd(), offset, whence) };
    u64::try_from(at).map_err(|_| io::Error::last_os_error())
}

/// Writes all of `segs` at `offset`.
///
/// # Errors
/// What `pwritev` says.
pub fn write_all(file: &File, segs: &[Seg], offset: u64) -> io::Result<()> {
    all(Direction::Write, file, segs, offset)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

fn all(direction: Direction, file: &File, segs: &[Seg], offset: u64) -> io::Result<()> {
    let want = base::segs::total_len(segs);
    let mut rest: Vec<Seg> = Vec::new();
    let mut done = 0u64;
    while done < want {
        let now = if done == 0 { segs } else { &rest };
        match vectored(direction, file, now, offset + done, 0) {
            // A file that shrank behind our back, or a device that takes nothing.
            Ok(0) => return Err(io::Error::from_raw_os_error(libc::EIO)),
            Ok(n) => done += n as u64,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        }
        if done < want {
            skip(segs, done, &mut rest);
        }
    }
    Ok(())
}

/// Puts into `rest` what is left of `segs` after `done` bytes.
pub fn skip(segs: &[Seg], mut done: u64, rest: &mut Vec<Seg>) {
    rest.clear();
    for seg in segs {
        let len = seg.len as u64;
        if done >= len {
            done -= len;
            continue;
        }
        // The cast can't cut: done < seg.len, a usize.
        let at = done as usize;
        rest.push(Seg { ptr: seg.ptr.wrapping_add(at), len: seg.len - at });
        done = 0;
    }
}

fn vectored(direction: Direction, file: &File, segs: &[Seg], offset: u64, flags: libc::c_int) -> io::Result<usize> {
    let fd = file.as_raw_fd();
    let offset = i64::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    let n = match (segs, flags, direction) {
        // SAFETY: whoever made the Seg promised that its bytes stay mapped until the request ends, and it has not ended.
        ([one], 0, Direction::Read) => unsafe { libc::pread64(fd, one.ptr.cast(), one.len, offset) },
        // SAFETY: as above.
        ([one], 0, Direction::Write) => unsafe { libc::pwrite64(fd, one.ptr.cast(), one.len, offset) },
        _ => {
            let iov = segs.as_ptr().cast::<libc::iovec>();
            let count = segs.len().min(MAX_SEGS) as libc::c_int;
            // SAFETY: a Seg has the layout of an iovec (repr(C), same two fields) and `segs` holds at least `count` of
            // them; their bytes stay mapped as above.
            unsafe {
                match (direction, flags) {
                    (Direction::Read, 0) => libc::preadv64(fd, iov, count, offset),
                    (Direction::Read, _) => libc::preadv64v2(fd, iov, count, offset, flags),
                    (Direction::Write, _) => libc::pwritev64(fd, iov, count, offset),
                }
            }
        }
    };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Makes the file's data durable, and of its metadata what is needed to read it back.
///
/// # Errors
/// What `fdatasync` says. The page cache may have dropped what it could not write.
pub fn flush(file: &File) -> io::Result<()> {
    loop {
        // SAFETY: no pointers; the descriptor is open since `file` is borrowed.
        if unsafe { libc::fdatasync(file.as_raw_fd()) } == 0 {
            return Ok(());
        }
        let err = io::Error::last_os_error();
        if err.kind() != io::ErrorKind::Interrupted {
            return Err(err);
        }
    }
}

/// Whether `errno` means "this file system or device can't", so that another way is worth trying.
pub fn cannot(err: &io::Error) -> bool {
    matches!(err.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV | libc::ENOTTY))
}

/// Whether the file lies on a file system that keeps no checksum of its data: ext2 to ext4 and XFS are known not to.
pub fn keeps_no_checksums(file: &File) -> bool {
    file_system(file).is_some_and(|kind| kind == libc::EXT4_SUPER_MAGIC || kind == libc::XFS_SUPER_MAGIC)
}

/// The kind of file system that the file lies on: its magic number.
pub fn file_system(file: &File) -> Option<i64> {
    let mut found = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: `found` is room for a statfs, and the descriptor is open since `file` is borrowed.
    if unsafe { libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: the call succeeded, so the kernel has filled it.
    Some(unsafe { found.assume_init() }.f_type)
}

fn fallocate(file: &File, mode: libc::c_int, offset: u64, len: u64) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    let einval = |_| io::Error::from_raw_os_error(libc::EINVAL);
    let (offset, len) = (i64::try_from(offset).map_err(einval)?, i64::try_from(len).map_err(einval)?);
    loop {
        // SAFETY: no pointers; the descriptor is open since `file` is borrowed.
        if unsafe { libc::fallocate64(file.as_raw_fd(), mode, offset, len) } == 0 {
            return Ok(());
        }
        let err = io::Error::last_os_error();
        if err.kind() != io::ErrorKind::Interrupted {
            return Err(err);
        }
    }
}

/// Frees the space of the range where the host can; where it can't, that is no error.
///
/// # Errors
/// What `fallocate` or `BLKDISCARD` say, "can't" excepted.
pub fn discard(file: &File, block_device: bool, offset: u64, len: u64) -> io::Result<()> {
    let result = if block_device {
        let range = [offset, len];
        // SAFETY: BLKDISCARD reads two u64s from the pointer, which `range` holds for the length of the call.
        let rc = unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    } else {
        fallocate(file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
    };
    match result {
        Err(e) if cannot(&e) => Ok(()),
        other => other,
    }
}

/// `fallocate`'s way to make a range read as zeroes and keep its space.
pub const ZERO_RANGE: libc::c_int = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// Makes the range read as zeroes without writing them.
///
/// # Errors
/// What `fallocate` says; `EOPNOTSUPP` where the file system can't.
pub fn zero_range(file: &File, offset: u64, len: u64) -> io::Result<()> {
    fallocate(file, ZERO_RANGE, offset, len)
}

/// Makes the range read as zeroes: by a hole if `unmap` and the host has holes, else by zero extents, else by writing zeroes.
///
/// # Errors
/// What the last way tried says.
pub fn write_zeroes(file: &File, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
    if unmap {
        match fallocate(file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len) {
            Err(e) if cannot(&e) => {}
            other => return other,
        }
    }
    match zero_range(file, offset, len) {
        Err(e) if cannot(&e) => {}
        other => return other,
    }
    let mut at = offset;
    let end = offset + len;
    while at < end {
        let n = (end - at).min(ZEROES.len() as u64) as usize;
        // The kernel only reads through this pointer.
        write_all(file, &[Seg { ptr: ZEROES.as_ptr().cast_mut(), len: n }], at)?;
        at += n as u64;
    }
    Ok(())
}

/// Does any operation, waiting for it.
///
/// # Errors
/// The operation's.
pub fn execute(file: &File, block_device: bool, op: Op, offset: u64, len: u64, segs: &[Seg]) -> io::Result<()> {
    match op {
        Op::Read => read_all(file, segs, offset),
        Op::Write => write_all(file, segs, offset),
        Op::Flush => flush(file),
        Op::Discard => discard(file, block_device, offset, len),
        Op::WriteZeroes { unmap } => write_zeroes(file, offset, len, unmap),
    }
}

/// `_IO(0x12, 119)` of `linux/fs.h`.
const BLKDISCARD: libc::c_ulong = 0x1277;
/// `_IO(0x12, 104)`.
const BLKSSZGET: libc::c_ulong = 0x1268;
/// `_IO(0x12, 123)`.
const BLKPBSZGET: libc::c_ulong = 0x127b;
/// `_IO(0x12, 94)`.
const BLKROGET: libc::c_ulong = 0x125e;
/// `_IOR(0x12, 114, size_t)`.
const BLKGETSIZE64: libc::c_ulong = 0x8008_1272;

fn ask<T: Default>(file: &File, request: libc::c_ulong) -> io::Result<T> {
    let mut value = T::default();
    // SAFETY: each caller below pairs the request with the integer type that the kernel writes for it.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), request, &raw mut value) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(value) }
}

/// Bytes of a block device.
///
/// # Errors
/// What the ioctl says.
pub fn device_size(file: &File) -> io::Result<u64> {
    ask::<u64>(file, BLKGETSIZE64)
}

/// Logical and physical block size of a block device, in bytes.
///
/// # Errors
/// What the ioctls say.
pub fn device_blocks(file: &File) -> io::Result<(u32, u32)> {
    let logical = ask::<libc::c_int>(file, BLKSSZGET)?;
    let physical = ask::<libc::c_uint>(file, BLKPBSZGET)?;
    Ok((u32::try_from(logical).unwrap_or(512), physical))
}

/// Whether a block device is set read-only.
///
/// # Errors
/// What the ioctl says.
pub fn device_readonly(file: &File) -> io::Result<bool> {
    Ok(ask::<libc::c_int>(file, BLKROGET)? != 0)
}
