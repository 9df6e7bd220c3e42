// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C, SIGTERM and SIGHUP for `tare img`: the first asks the command to end in order, and wakes it where it sleeps on
//! an eventfd; a second ends the process at once.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::{io, mem, ptr};

use base::EventFd;

/// The process's exit code after a signal, as shells have it for SIGINT.
pub const CODE: u8 = 130;

static ASKED: AtomicBool = AtomicBool::new(false);
/// The eventfd to write to, or -1.
static WAKE: AtomicI32 = AtomicI32::new(-1);

extern "C" fn on_signal(_: libc::c_int) {
    let one = 1u64;
    // SAFETY: _exit and write are async-signal-safe; `one` is live, and WAKE is an open eventfd or -1, which write refuses.
    unsafe {
        if ASKED.swap(true, Ordering::SeqCst) {
            libc::_exit(CODE.into());
        }
        libc::write(WAKE.load(Ordering::SeqCst), ptr::from_ref(&one).cast(), mem::size_of::<u64>());
    }
}

/// Installs the handlers; once per process. The eventfd becomes readable on the first signal.
///
/// # Errors
/// When the host has no descriptor left.
pub fn install() -> io::Result<EventFd> {
    let wake = EventFd::new(base::EFD_NONBLOCK)?;
    let theirs = wake.try_clone()?;
    WAKE.store(theirs.as_raw_fd(), Ordering::SeqCst);
    // The handler may use it until the process ends.
    mem::forget(theirs);
    let handler = on_signal as extern "C" fn(libc::c_int);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only makes async-signal-safe calls and touches atomics.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    Ok(wake)
}

/// Whether a signal came.
pub fn asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}
