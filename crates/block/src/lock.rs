// SPDX-License-Identifier: Apache-2.0
//! Locks on image files, on the bytes QEMU uses, so that tare and QEMU (and any other that follows it) keep off each
//! other's images. Called once by `open`; the locks live as long as the open file.
//!
//! The locks are open-file-description locks: they belong to the open file, not to the process, so a second open in the
//! same process is refused too, and closing some other descriptor of the file does not drop them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// First byte of the permissions in use.
const USED_BASE: i64 = 100;
/// First byte of the permissions not shared.
const UNSHARED_BASE: i64 = 200;

const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// What a lock attempt came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Held until the file is closed.
    Held,
    /// Someone excludes us; the text says how they hold the image.
    Conflict(&'static str),
    /// The file system knows no such locks; nothing is held.
    Unsupported,
}

/// Takes the locks of a reader (`writable` false) or of the only writer. After a conflict none is held.
///
/// The scheme, as seen in `/proc/locks` under QEMU 2.10 and later: an opener has *permissions* it uses and permissions it
/// does not share with others. For each used permission `p` it holds a **read** lock on byte `100 + p`, for each unshared
/// one a read lock on byte `200 + p`. Having taken its own, it asks for each used `p` whether anyone holds `200 + p`, and for
/// each unshared `p` whether anyone holds `100 + p` (`F_OFD_GETLK` for a write lock, which takes nothing). Since everyone locks
/// before asking, two openers that exclude each other may both fail but never both succeed. Permissions: 0 consistent read,
/// 1 write, 2 write unchanged, 3 resize.
///
/// # Errors
/// What `fcntl` says, "no such locks here" excepted.
pub fn acquire(file: &File, writable: bool) -> io::Result<Outcome> {
    let outcome = try_acquire(file, writable)?;
    if matches!(outcome, Outcome::Conflict(_)) {
        for byte in [CONSISTENT_READ, WRITE, RESIZE].into_iter().flat_map(|p| [USED_BASE + p, UNSHARED_BASE + p]) {
            call(file, libc::F_OFD_SETLK, libc::F_UNLCK, byte)?;
        }
    }
    Ok(outcome)
}

fn try_acquire(file: &File, writable: bool) -> io::Result<Outcome> {
    let used: &[i64] = if writable { &[CONSISTENT_READ, WRITE] } else { &[CONSISTENT_READ] };
    let unshared = [WRITE, RESIZE];
    let take = used.iter().map(|p| USED_BASE + p).chain(unshared.iter().map(|p| UNSHARED_BASE + p));
    for byte in take {
        match call(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte) {
            Ok(_) => {}
            Err(e) if e.raw_os_error().is_some_and(unsupported) => return Ok(Outcome::Unsupported),
            // Someone write-locked the byte: not QEMU's way, but clearly meant to exclude.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                return Ok(Outcome::Conflict("which locks it whole"));
            }
            Err(e) => return Err(e),
        }
    }
    for p in used {
        if call(file, libc::F_OFD_GETLK, libc::F_WRLCK, UNSHARED_BASE + p)? {
            return Ok(Outcome::Conflict(if *p == WRITE {
                "which allows no writer beside it"
            } else {
                "which allows no other"
            }));
        }
    }
    for p in unshared {
        if call(file, libc::F_OFD_GETLK, libc::F_WRLCK, USED_BASE + p)? {
            return Ok(Outcome::Conflict("which writes to it"));
        }
    }
    Ok(Outcome::Held)
}

fn unsupported(errno: i32) -> bool {
    matches!(errno, libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)
}

/// One lock call on one byte; for `F_OFD_GETLK` says whether someone else's lock is in the way.
fn call(file: &File, command: libc::c_int, kind: libc::c_int, byte: i64) -> io::Result<bool> {
    let mut lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: lock is a live flock for the length of the call; the descriptor is open since `file` is borrowed.
    let rc = unsafe { libc::fcntl(file.as_raw_fd(), command, &mut lock) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(lock.l_type != libc::F_UNLCK as libc::c_short) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn pair() -> (tempfile::NamedTempFile, impl Fn() -> File) {
        let image = tempfile::NamedTempFile::new().unwrap();
        let path = image.path().to_owned();
        (image, move || File::options().read(true).write(true).open(&path).unwrap())
    }

    #[test]
    fn one_writer_or_many_readers() {
        let (_image, open) = pair();
        let writer = open();
        assert_eq!(acquire(&writer, true).unwrap(), Outcome::Held);
        assert!(matches!(acquire(&open(), true).unwrap(), Outcome::Conflict(_)));
        let loser = open();
        assert!(matches!(acquire(&loser, false).unwrap(), Outcome::Conflict(_)));
        drop(writer);
        assert_eq!(acquire(&open(), true).unwrap(), Outcome::Held, "who lost holds nothing");
        let (a, b) = (open(), open());
        assert_eq!(acquire(&a, false).unwrap(), Outcome::Held);
        assert_eq!(acquire(&b, false).unwrap(), Outcome::Held);
        assert_eq!(acquire(&open(), true).unwrap(), Outcome::Conflict("which allows no writer beside it"));
        drop((a, b));
        assert_eq!(acquire(&open(), true).unwrap(), Outcome::Held);
    }

    #[test]
    fn the_locks_belong_to_the_open_file() {
        let (_image, open) = pair();
        let writer = open();
        assert_eq!(acquire(&writer, true).unwrap(), Outcome::Held);
        drop(open());
        assert!(
            matches!(acquire(&open(), true).unwrap(), Outcome::Conflict(_)),
            "closing another descriptor drops nothing"
        );
        let twin = writer.try_clone().unwrap();
        drop(writer);
        assert!(matches!(acquire(&open(), true).unwrap(), Outcome::Conflict(_)), "a duplicate keeps them");
        drop(twin);
        assert_eq!(acquire(&open(), true).unwrap(), Outcome::Held);
    }
}
