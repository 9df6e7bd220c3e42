// SPDX-License-Identifier: Apache-2.0
//! Termination signals as a descriptor for the main loop: blocked for the length of a run, read through signalfd.
//!
//! Made before any thread, so that every thread inherits the mask and only the main loop sees the signals.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

/// Signals taken away from their default action.
const TAKEN: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The signals while they are blocked; dropping it puts the old mask back.
pub struct Signals {
    file: File,
    old: libc::sigset_t,
}

impl Signals {
    /// Blocks the signals in the calling thread.
    ///
    /// # Errors
    /// When the host is out of descriptors.
    pub fn block() -> io::Result<Self> {
        // SAFETY: sigset_t is plain data; sigemptyset makes it valid before use and the pointers live for the calls.
        let (fd, old) = unsafe {
            let mut set: libc::sigset_t = std::mem::zeroed();
            let mut old: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in TAKEN {
                libc::sigaddset(&raw mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut old);
            (libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK), old)
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fd is fresh and owned by nobody else.
        Ok(Self { file: unsafe { File::from_raw_fd(fd) }, old })
    }

    /// The next pending signal.
    pub fn next(&mut self) -> Option<libc::c_int> {
        let mut info = [0u8; std::mem::size_of::<libc::signalfd_siginfo>()];
        self.file.read_exact(&mut info).ok()?;
        // ssi_signo is the first field, a u32.
        Some(i32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
    }
}

impl AsRawFd for Signals {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: old was filled by pthread_sigmask in `block`.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.old, std::ptr::null_mut()) };
    }
}
