// SPDX-License-Identifier: Apache-2.0
//! What is set on an open file behind its descriptor, and what is to be had from it now. Called where devices take descriptors
//! over, on any thread.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Makes reads and writes of `fd` return at once (`on`), or sleep. It belongs to the open file: all descriptors of it change.
///
/// # Errors
/// What `fcntl` says; an open descriptor gives none.
pub fn set_nonblocking(fd: &impl AsRawFd, on: bool) -> io::Result<()> {
    // SAFETY: no pointers; `fd` is borrowed from its owner, so the descriptor is open.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = if on { flags | libc::O_NONBLOCK } else { flags & !libc::O_NONBLOCK };
    // SAFETY: as above.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Whether `fd` has something to read now.
#[must_use]
pub fn is_readable(fd: &impl AsRawFd) -> bool {
    poll(fd) & libc::POLLIN != 0
}

/// Whether `fd` is in an error from which nothing brings it back, as a tap without its interface is.
#[must_use]
pub fn is_broken(fd: &impl AsRawFd) -> bool {
    poll(fd) & libc::POLLERR != 0
}

/// Makes the length of a file in memory final.
///
/// # Errors
/// What `fcntl` says: `EPERM` for files that were made without seals.
pub fn seal_length(fd: &impl AsRawFd) -> io::Result<()> {
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: no pointers; `fd` is borrowed from its owner, so the descriptor is open.
    if unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, seals) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The process that connected the other end of `socket`, as a descriptor that is readable once it has ended.
///
/// # Errors
/// `ESRCH` when it has ended already, and what else `getsockopt` and `pidfd_open` say.
pub fn peer_process(socket: &impl AsRawFd) -> io::Result<OwnedFd> {
    /// Since Linux 6.5; names the process even if its number is another's by now.
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut len = size_of_val(&fd) as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes, which is the size of `fd`.
    let rc = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_PEERPIDFD, (&raw mut fd).cast(), &raw mut len)
    };
    if rc < 0 {
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::ENOPROTOOPT) {
            return Err(error);
        }
        let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of_val(&peer) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes, which is the size of `peer`.
        let rc = unsafe {
            let option = libc::SO_PEERCRED;
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, option, (&raw mut peer).cast(), &raw mut len)
        };
        if rc < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call takes numbers.
        fd = unsafe { libc::syscall(libc::SYS_pidfd_open, peer.pid, 0) } as libc::c_int;
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: fresh from the kernel, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn poll(fd: &impl AsRawFd) -> libc::c_short {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd; with a timeout of zero the call does not wait.
    if unsafe { libc::poll(&mut poll, 1, 0) } < 0 { 0 } else { poll.revents }
}
