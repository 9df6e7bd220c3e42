// SPDX-License-Identifier: Apache-2.0
//! Where console output goes: a terminal, pipe, socket or file that may be slow, full or gone, written to without ever
//! blocking. Used under the transmit side's lock, on vCPU threads and the main thread.
//!
//! The non-blocking flag belongs to an open file, and a terminal's is shared with the user's shell; so a terminal or pipe
//! is opened anew through /proc, where that is allowed, and otherwise asked by `poll` and written in small pieces.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};

use base::Seg;

/// The most segments one call hands to the kernel (`UIO_MAXIOV`).
pub(super) const MAX_SEGS: usize = 1024;
/// What fits a pipe that `poll` calls writable (`PIPE_BUF`), and a terminal nearly always.
const SMALL_PIECE: usize = 4096;
const SMALL_TERMINAL_PIECE: usize = 256;

/// How to write without blocking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    /// Writes return at once: a regular file, or a descriptor that is non-blocking and ours alone.
    Plain,
    /// A socket, asked not to wait for each call.
    Socket,
    /// Ask `poll` first, write at most this much.
    Pieces(usize),
}

/// An output that never blocks.
pub(super) struct Output {
    file: File,
    how: How,
    /// Readable while `file` is writable and somebody waits for that, so that a loop which watches for input only can
    /// watch this.
    waiter: OwnedFd,
}

impl Output {
    pub(super) fn new(file: &File) -> io::Result<Self> {
        let kind = file.metadata()?.file_type();
        let reopen = || {
            let mut options = OpenOptions::new();
            options.write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC);
            options.open(format!("/proc/self/fd/{}", file.as_raw_fd()))
        };
        let (file, how) = if kind.is_socket() {
            (file.try_clone()?, How::Socket)
        } else if kind.is_char_device() || kind.is_fifo() {
            match reopen() {
                Ok(own) => (own, How::Plain),
                Err(_) if kind.is_fifo() => (file.try_clone()?, How::Pieces(SMALL_PIECE)),
                Err(_) => (file.try_clone()?, How::Pieces(SMALL_TERMINAL_PIECE)),
            }
        } else {
            (file.try_clone()?, How::Plain)
        };
        // SAFETY: no pointers are passed.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let waiter = unsafe { OwnedFd::from_raw_fd(epoll) };
        Ok(Self { file, how, waiter })
    }

    /// The descriptor that becomes readable once the output can be written again after [`Output::wait`].
    pub(super) fn waiter(&self) -> RawFd {
        self.waiter.as_raw_fd()
    }

    /// Asks to be told through the waiter while the output is writable.
    pub(super) fn wait(&self) {
        self.watch(libc::EPOLL_CTL_ADD);
    }

    /// Stops asking. A hang-up is reported even to those who did not ask, so nothing may be watched in between.
    pub(super) fn ignore(&self) {
        self.watch(libc::EPOLL_CTL_DEL);
    }

    fn watch(&self, op: libc::c_int) {
        let mut event = libc::epoll_event { events: libc::EPOLLOUT as u32, u64: 0 };
        // SAFETY: event is live for the call. A regular file can't be watched, and need not be: it never refuses. Asking
        // twice, or to stop twice, changes nothing.
        unsafe { libc::epoll_ctl(self.waiter.as_raw_fd(), op, self.file.as_raw_fd(), &mut event) };
    }

    /// Waits until the output is writable, at most `ms` milliseconds; whether it is.
    pub(super) fn poll(&self, ms: i32) -> bool {
        let mut fd = libc::pollfd { fd: self.file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: one live pollfd.
        unsafe { libc::poll(&mut fd, 1, ms) > 0 }
    }

    /// Writes as much of `segs` as goes at once; `WouldBlock` if nothing goes now.
    pub(super) fn write(&self, segs: &[Seg]) -> io::Result<usize> {
        let first = match self.how {
            How::Pieces(most) => {
                if !self.poll(0) {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                segs.first().map(|seg| Seg { ptr: seg.ptr, len: seg.len.min(most) })
            }
            How::Plain | How::Socket => None,
        };
        let segs = first.as_ref().map_or(segs, std::slice::from_ref);
        let count = segs.len().min(MAX_SEGS);
        loop {
            let wrote = if self.how == How::Socket {
                // SAFETY: all-zero is a valid msghdr: no name, no control data, no flags.
                let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
                message.msg_iov = segs.as_ptr() as *mut libc::iovec;
                message.msg_iovlen = count;
                // SAFETY: a Seg has the layout of an iovec; each leads to memory that its maker keeps mapped for the call.
                // The kernel only reads the array and the bytes.
                unsafe { libc::sendmsg(self.file.as_raw_fd(), &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
            } else {
                // SAFETY: as above.
                unsafe { libc::writev(self.file.as_raw_fd(), segs.as_ptr().cast(), count as libc::c_int) }
            };
            if let Ok(wrote) = usize::try_from(wrote) {
                return Ok(wrote);
            }
            let why = io::Error::last_os_error();
            if why.kind() != io::ErrorKind::Interrupted {
                return Err(why);
            }
        }
    }
}
