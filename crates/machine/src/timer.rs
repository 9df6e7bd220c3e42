// SPDX-License-Identifier: Apache-2.0
//! A one-shot timer for the main loop: armed by vCPU threads, read when it fires.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::time::Duration;

/// A timerfd on the monotonic clock.
pub struct Timer(File);

impl Timer {
    /// Makes an unarmed timer.
    ///
    /// # Errors
    /// When the host is out of descriptors.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC | libc::TFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fd is fresh and owned by nobody else.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    /// Fires once, `after` from now.
    pub fn arm(&self, after: Duration) {
        let value = libc::timespec { tv_sec: after.as_secs() as i64, tv_nsec: i64::from(after.subsec_nanos()) };
        let spec = libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // SAFETY: spec lives for the call; a valid descriptor and a valid time can't fail.
        unsafe { libc::timerfd_settime(self.0.as_raw_fd(), 0, &raw const spec, std::ptr::null_mut()) };
    }

    /// Takes note that it fired.
    pub fn clear(&self) {
        let mut count = [0u8; 8];
        // Nothing to read is fine: the timer was armed again in between.
        let _ = (&self.0).read(&mut count);
    }
}

impl AsRawFd for Timer {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
