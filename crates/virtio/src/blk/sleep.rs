// SPDX-License-Identifier: Apache-2.0
//! How a worker thread sleeps: in a read of its one eventfd, or, where it has several or must not sleep for ever, in a poll
//! of them. Owned by the worker.

use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use base::EventFd;
use base::fd::set_nonblocking;

/// What a worker waits for.
pub struct Sleeper {
    kicks: Vec<EventFd>,
    polled: Vec<libc::pollfd>,
}

impl Sleeper {
    /// Waits for any of `kicks`, which nobody else reads meanwhile.
    ///
    /// # Errors
    /// What `fcntl` says.
    pub fn new(kicks: Vec<EventFd>) -> io::Result<Self> {
        // Eventfds come non-blocking, for users of epoll; one alone is slept on in the read itself.
        if let [kick] = kicks.as_slice() {
            set_nonblocking(kick, false)?;
        }
        let polled =
            kicks.iter().map(|k| libc::pollfd { fd: k.as_raw_fd(), events: libc::POLLIN, revents: 0 }).collect();
        Ok(Self { kicks, polled })
    }

    /// Sleeps until one of the eventfds is written, at most for `limit`; gives how often they were.
    pub fn sleep(&mut self, limit: Option<Duration>) -> u64 {
        match (self.kicks.as_slice(), limit) {
            ([kick], None) => match kick.read() {
                Ok(signals) => signals,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    // Someone else changed the mode of the shared eventfd; without this the thread would spin.
                    let _ = set_nonblocking(kick, false);
                    0
                }
                // A signal: one more round finds nothing and sleeps again.
                Err(_) => 0,
            },
            _ => self.poll(limit),
        }
    }

    fn poll(&mut self, limit: Option<Duration>) -> u64 {
        let limit = limit.map(|limit| libc::timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });
        let at = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let count = self.polled.len() as libc::nfds_t;
        // SAFETY: `polled` is live and exclusively borrowed for `count` entries; `at` is null or points at `limit`, which
        // lives past the call; no signal mask.
        let ready = unsafe { libc::ppoll(self.polled.as_mut_ptr(), count, at, std::ptr::null()) };
        if ready <= 0 {
            // The time is over, or a signal came.
            return 0;
        }
        let readable = self.kicks.iter().zip(&self.polled).filter(|(_, p)| p.revents & libc::POLLIN != 0);
        readable.map(|(kick, _)| kick.read().unwrap_or(0)).sum()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        if let [kick] = self.kicks.as_slice() {
            // Whoever reads it next expects it as it came. It can't fail: it is open and the first change worked.
            let _ = set_nonblocking(kick, true);
        }
    }
}

/// How much a worker goes before the vCPUs of its own machine, where both want one CPU: enough to preempt a vCPU whenever it
/// wakes up, so that the answer is there before the guest has gone idle, which would cost it a halt and the way back.
const NICE: libc::c_int = -5;

/// How the scheduler treats the calling thread; the one place to change it. What a worker takes first its guest has asked
/// for; between machines that each have a control group, nothing changes. Without the right to do so the worker runs like
/// any other thread.
pub fn schedule() {
    // SAFETY: no pointers; 0 is the calling thread.
    let _ = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}
