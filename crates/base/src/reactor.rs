// SPDX-License-Identifier: Apache-2.0
//! A small epoll loop. The monitor's main thread and each disk worker own one; it is never shared.
//!
//! Level-triggered: a source that is not drained reports again on the next turn.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// What the caller attached to a source.
pub type Token = u64;

/// How many events one turn hands over at most.
const EVENTS_PER_TURN: usize = 16;

/// One readiness report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ready {
    /// The token given to [`Reactor::add`].
    pub token: Token,
    /// The source hung up or failed (`EPOLLHUP` or `EPOLLERR`).
    pub hangup: bool,
}

/// An epoll instance and its event buffer.
pub struct Reactor {
    epoll: OwnedFd,
    events: [libc::epoll_event; EVENTS_PER_TURN],
}

impl Reactor {
    /// Makes an empty reactor.
    ///
    /// # Errors
    /// What `epoll_create1` says (out of descriptors or memory).
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers are passed.
        let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: fd is a fresh descriptor that nobody else owns.
        let epoll = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { epoll, events: [libc::epoll_event { events: 0, u64: 0 }; EVENTS_PER_TURN] })
    }

    /// Watches `fd` for input; `token` comes back with each report. The caller keeps `fd` open while it is watched.
    ///
    /// # Errors
    /// What `epoll_ctl` says: `EPERM` for regular files, `EEXIST` for a second `add` of the same descriptor.
    pub fn add(&self, fd: &impl AsRawFd, token: Token) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: token };
        self.ctl(libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event)
    }

    /// Watches `fd` for input, room for output and hang-ups, and reports each change once: whoever uses this reads or writes
    /// until the descriptor refuses. An eventfd watched so need never be read.
    ///
    /// # Errors
    /// As [`Reactor::add`].
    pub fn add_edge(&self, fd: &impl AsRawFd, token: Token) -> io::Result<()> {
        let events = (libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET) as u32;
        let mut event = libc::epoll_event { events, u64: token };
        self.ctl(libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &mut event)
    }

    /// Stops watching `fd`.
    ///
    /// # Errors
    /// `ENOENT` if it was not watched.
    pub fn remove(&self, fd: &impl AsRawFd) -> io::Result<()> {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        self.ctl(libc::EPOLL_CTL_DEL, fd.as_raw_fd(), &mut event)
    }

    fn ctl(&self, op: libc::c_int, fd: RawFd, event: &mut libc::epoll_event) -> io::Result<()> {
        // SAFETY: event points to a live epoll_event for the length of the call.
        let rc = unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), op, fd, event) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Waits for events, at most `timeout_ms` milliseconds (`None`: for ever), and gives what is ready. A signal ends the
    /// wait early with nothing ready.
    ///
    /// # Errors
    /// What `epoll_wait` says, `EINTR` excepted.
    pub fn turn(&mut self, timeout_ms: Option<u32>) -> io::Result<impl Iterator<Item = Ready> + '_> {
        let timeout = timeout_ms.map_or(-1, |ms| i32::try_from(ms).unwrap_or(i32::MAX));
        // SAFETY: events is valid for EVENTS_PER_TURN entries and borrowed mutably for the call.
        let n = unsafe {
            libc::epoll_wait(self.epoll.as_raw_fd(), self.events.as_mut_ptr(), EVENTS_PER_TURN as i32, timeout)
        };
        let n = match usize::try_from(n) {
            Ok(n) => n,
            Err(_) => {
                let err = io::Error::last_os_error();
                if err.kind() != io::ErrorKind::Interrupted {
                    return Err(err);
                }
                0
            }
        };
        Ok(self
            .events
            .iter()
            .take(n)
            .map(|e| Ready { token: e.u64, hangup: e.events & (libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0 }))
    }
}

impl Reactor {
    /// Waits until something is ready, or a signal comes, at most `limit`: for waits shorter than the milliseconds of
    /// [`Reactor::turn`], which says then what it was.
    pub fn wait(&self, limit: Duration) {
        let mut epoll = libc::pollfd { fd: self.epoll.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let seconds = libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX);
        let limit = libc::timespec { tv_sec: seconds, tv_nsec: limit.subsec_nanos().into() };
        // SAFETY: one pollfd and one timespec, both live for the call; no signal mask.
        unsafe { libc::ppoll(&raw mut epoll, 1, &raw const limit, std::ptr::null()) };
    }
}

impl AsRawFd for Reactor {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::{EFD_NONBLOCK, EventFd};

    #[test]
    fn reports_tokens_until_drained() {
        let mut r = Reactor::new().unwrap();
        let (a, b) = (EventFd::new(EFD_NONBLOCK).unwrap(), EventFd::new(EFD_NONBLOCK).unwrap());
        r.add(&a, 7).unwrap();
        r.add(&b, 9).unwrap();
        assert_eq!(r.turn(Some(0)).unwrap().count(), 0);
        r.wait(Duration::from_nanos(1));
        b.write(1).unwrap();
        r.wait(Duration::from_secs(3600));
        let seen: Vec<_> = r.turn(Some(0)).unwrap().map(|e| e.token).collect();
        assert_eq!(seen, [9]);
        assert_eq!(r.turn(Some(0)).unwrap().count(), 1, "level-triggered: not drained yet");
        b.read().unwrap();
        assert_eq!(r.turn(Some(0)).unwrap().count(), 0);
        r.remove(&b).unwrap();
        b.write(1).unwrap();
        assert_eq!(r.turn(Some(0)).unwrap().count(), 0);
    }

    #[test]
    fn an_edge_is_reported_once() {
        let mut r = Reactor::new().unwrap();
        let a = EventFd::new(EFD_NONBLOCK).unwrap();
        r.add_edge(&a, 3).unwrap();
        assert_eq!(r.turn(Some(0)).unwrap().count(), 1, "it can be written");
        assert_eq!(r.turn(Some(0)).unwrap().count(), 0);
        for _ in 0..2 {
            a.write(1).unwrap();
            assert_eq!(r.turn(Some(0)).unwrap().count(), 1);
            assert_eq!(r.turn(Some(0)).unwrap().count(), 0, "though nobody read it");
        }
    }
}
