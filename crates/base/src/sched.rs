// SPDX-License-Identifier: Apache-2.0
//! When a thread runs: for threads whose work can wait for everybody else's. Called by such a thread for itself.

use std::io;

/// The calling thread runs from now on only where no other thread wants the CPU (`SCHED_IDLE`).
///
/// # Errors
/// What the kernel says.
pub fn yield_to_all() -> io::Result<()> {
    // SAFETY: the parameters are read for the call alone; 0 is the calling thread.
    let rc = unsafe {
        let param: libc::sched_param = std::mem::zeroed();
        libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const param)
    };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_thread_steps_back_and_others_do_not() {
        // SAFETY: the call takes a number; 0 is the calling thread.
        let policy = || unsafe { libc::sched_getscheduler(0) };
        let before = policy();
        let inside = std::thread::spawn(move || super::yield_to_all().map(|()| policy()));
        assert_eq!(inside.join().ok().and_then(Result::ok), Some(libc::SCHED_IDLE));
        assert_eq!(policy(), before);
    }
}
