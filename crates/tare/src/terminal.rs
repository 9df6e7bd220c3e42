// SPDX-License-Identifier: Apache-2.0
//! The user's terminal in raw mode while a guest owns it, and as it was on every way out.
//!
//! Ways out: the guard is dropped; a panic (the hook calls [`restore`]); a deadly signal (the handler restores, then dies
//! of the same signal); a stop (restored while stopped, raw again on continue). Signals that `machine` reads through a
//! signalfd are blocked by then and never get here. Also puts back `O_NONBLOCK`, which the shell would inherit.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// How standard input, output and error were found.
struct Found {
    /// Terminal settings of standard input, where it is a terminal in whose foreground this process is.
    cooked: Option<libc::termios>,
    /// The same, raw.
    raw: Option<libc::termios>,
    /// File status flags of descriptors 0 to 2; `None` for closed ones.
    flags: [Option<libc::c_int>; 3],
}

/// What to restore; null when there is nothing. Read by signal handlers, so what it points to is never freed.
static FOUND: AtomicPtr<Found> = AtomicPtr::new(ptr::null_mut());

/// Deadly signals that end the process by default and that a terminal must survive.
const DEADLY: [libc::c_int; 9] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGILL,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGTERM,
];

/// The terminal is raw while this lives.
pub struct RawTerminal {
    raw: bool,
}

impl RawTerminal {
    /// Remembers how descriptors 0 to 2 are and, when standard input is a terminal that this process may set, makes it
    /// raw: each key goes to the guest at once and unchanged, Ctrl-C included. Once per process at a time.
    ///
    /// # Errors
    /// What the terminal says.
    pub fn enter() -> io::Result<Self> {
        let mut found = Found { cooked: None, raw: None, flags: [0, 1, 2].map(status_flags) };
        if in_foreground() {
            let cooked = settings()?;
            let mut raw = cooked;
            // SAFETY: raw is a valid termios, borrowed for the call.
            unsafe { libc::cfmakeraw(&mut raw) };
            // Output keeps its line ends translated: the monitor's own lines share this terminal.
            raw.c_oflag = cooked.c_oflag;
            (found.cooked, found.raw) = (Some(cooked), Some(raw));
        }
        let raw = found.raw;
        // Leaked on purpose, some 150 bytes a process: a handler may look at it at any time.
        FOUND.store(Box::leak(Box::new(found)), Ordering::Release);
        let guard = Self { raw: raw.is_some() };
        if let Some(raw) = raw {
            for signal in DEADLY {
                handle(signal, on_deadly, libc::SA_RESETHAND)?;
            }
            handle(libc::SIGTSTP, on_stop, libc::SA_RESTART)?;
            handle(libc::SIGCONT, on_continue, libc::SA_RESTART)?;
            set(&raw)?;
        }
        Ok(guard)
    }

    /// Whether standard input is a terminal and raw.
    pub fn is_raw(&self) -> bool {
        self.raw
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts everything back as it was found; does nothing the second time. Async-signal-safe.
pub fn restore() {
    let found = FOUND.swap(ptr::null_mut(), Ordering::AcqRel);
    put_back(found);
}

fn put_back(found: *const Found) {
    // SAFETY: the pointer is null or came from Box::leak in `enter`, is never freed and never written again.
    let Some(found) = (unsafe { found.as_ref() }) else { return };
    if let Some(cooked) = &found.cooked {
        // The terminal may be gone; then there is nothing to put back.
        let _ = set(cooked);
    }
    for (fd, flags) in found.flags.iter().enumerate() {
        if let Some(flags) = *flags {
            // SAFETY: F_SETFL takes an int; a closed descriptor is an error, ignored like a terminal that is gone.
            unsafe { libc::fcntl(fd as libc::c_int, libc::F_SETFL, flags) };
        }
    }
}

fn status_flags(fd: libc::c_int) -> Option<libc::c_int> {
    // SAFETY: F_GETFL takes no argument.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    (flags >= 0).then_some(flags)
}

/// Standard input is a terminal and setting it will not stop this process as a background job.
fn in_foreground() -> bool {
    // SAFETY: no pointers; tcgetpgrp gives -1 for what is no terminal of this session.
    unsafe { libc::isatty(0) == 1 && libc::tcgetpgrp(0) == libc::getpgrp() }
}

fn settings() -> io::Result<libc::termios> {
    let mut found = MaybeUninit::uninit();
    // SAFETY: tcgetattr fills the termios it is given, or fails.
    if unsafe { libc::tcgetattr(0, found.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: tcgetattr succeeded and so filled it.
    Ok(unsafe { found.assume_init() })
}

fn set(to: &libc::termios) -> io::Result<()> {
    // SAFETY: `to` is a valid termios for the length of the call.
    if unsafe { libc::tcsetattr(0, libc::TCSANOW, to) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn handle(signal: libc::c_int, handler: extern "C" fn(libc::c_int), flags: libc::c_int) -> io::Result<()> {
    // SAFETY: all-zero is a valid sigaction: default action, empty mask, no flags.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler as *const () as usize;
    action.sa_flags = flags;
    // SAFETY: the handlers of this file only make async-signal-safe calls; action outlives the call.
    if unsafe { libc::sigaction(signal, &action, ptr::null_mut()) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Restores and dies of the same signal, whose handling SA_RESETHAND has put back to the default.
extern "C" fn on_deadly(signal: libc::c_int) {
    restore();
    // SAFETY: raise is async-signal-safe; the signal is delivered when this handler returns.
    unsafe { libc::raise(signal) };
}

extern "C" fn on_stop(_: libc::c_int) {
    put_back(FOUND.load(Ordering::Acquire));
    // SAFETY: raise is async-signal-safe.
    unsafe { libc::raise(libc::SIGSTOP) };
}

extern "C" fn on_continue(_: libc::c_int) {
    // SAFETY: as in `put_back`.
    let Some(found) = (unsafe { FOUND.load(Ordering::Acquire).as_ref() }) else { return };
    if let Some(raw) = found.raw.as_ref().filter(|_| in_foreground()) {
        // In the background the terminal belongs to somebody else.
        let _ = set(raw);
    }
}
