// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C and SIGTERM: the first one asks the run to stop, so that everything it started is ended in order; the second
//! ends the program at once (children go with it, they are started with a parent-death signal).

use std::sync::atomic::{AtomicBool, Ordering};

static ASKED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(_: libc::c_int) {
    if ASKED.swap(true, Ordering::SeqCst) {
        // SAFETY: _exit is async-signal-safe and takes no pointers.
        unsafe { libc::_exit(130) };
    }
}

/// Installs the handlers. Called once, by `main`.
pub fn install() {
    let handler = on_signal as extern "C" fn(libc::c_int);
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only touches an atomic and calls _exit, both allowed in a signal handler.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
}

/// True after the first signal.
pub fn asked() -> bool {
    ASKED.load(Ordering::SeqCst)
}
