// SPDX-License-Identifier: Apache-2.0
//! What is set on an open file behind its descriptor. Called where devices take descriptors over, on any thread.

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
