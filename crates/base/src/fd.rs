// SPDX-License-Identifier: Apache-2.0
//! What is set on an open file behind its descriptor, and what is to be had from it now. Called where devices take descriptors
//! over, on any thread.

use std::io;
use std::os::fd::AsRawFd;

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

fn poll(fd: &impl AsRawFd) -> libc::c_short {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd; with a timeout of zero the call does not wait.
    if unsafe { libc::poll(&mut poll, 1, 0) } < 0 { 0 } else { poll.revents }
}
