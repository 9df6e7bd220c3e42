// SPDX-License-Identifier: Apache-2.0
//! Lines for the user. Threads that must not wait for a terminal (devices, disks) say them; the main loop of `machine` or of a
//! server prints them when the descriptor is readable.

use std::io::{self, Write as _};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// Lines that wait; more are only counted.
const MOST: usize = 64;

#[derive(Debug, Default)]
struct Lines {
    waiting: Vec<String>,
    lost: u64,
}

/// Lines on their way to the user, oldest first.
#[derive(Debug)]
pub struct News {
    lines: Mutex<Lines>,
    event: EventFd,
}

impl News {
    /// Nothing to say yet.
    ///
    /// # Errors
    /// When the host has no descriptors left.
    pub fn new() -> io::Result<Self> {
        Ok(Self { lines: Mutex::default(), event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? })
    }

    fn lock(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says a line: what, where, what to do; without a newline. Never waits for whoever prints it.
    pub fn say(&self, line: String) {
        let mut lines = self.lock();
        if lines.waiting.len() < MOST {
            lines.waiting.push(line);
        } else {
            lines.lost += 1;
        }
        drop(lines);
        // Only a full counter refuses, and then it is readable anyway.
        let _ = self.event.write(1);
    }

    /// The lines since the last call; the last of them says how many there was no room for.
    pub fn take(&self) -> Vec<String> {
        // Empty already if nothing came.
        let _ = self.event.read();
        let Lines { mut waiting, lost } = std::mem::take(&mut *self.lock());
        if lost > 0 {
            waiting.push(format!("{lost} more lines like these were dropped"));
        }
        waiting
    }
}

impl AsRawFd for News {
    /// Readable when there are lines.
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

/// Prints a line for the user on standard error. That may be closed: then there is nobody left to tell, and all goes on.
pub fn print(line: &str) {
    let _ = io::stderr().write_all(format!("tare: {line}\n").as_bytes());
}

/// As [`print`], beside what a guest prints: the terminal may be raw, so the line starts at its left edge all the same, and so
/// does what follows.
pub fn print_beside_guest(line: &str) {
    let _ = io::stderr().write_all(format!("\rtare: {line}\r\n").as_bytes());
}

/// Counts something that may come again and again, and says when it is worth a line: the first time, the tenth, the
/// hundredth, so that nobody floods the user's terminal.
#[derive(Debug, Default)]
pub struct Tally(AtomicU64);

impl Tally {
    /// One more: how many there are now, if that is worth a line.
    pub fn count(&self) -> Option<u64> {
        let now = self.0.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let power = 10u64.checked_pow(now.checked_ilog10()?)?;
        (now == power).then_some(now)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn lines_come_in_order_and_a_flood_is_counted() {
        let news = News::new().unwrap();
        assert!(news.take().is_empty());
        (0..MOST + 3).for_each(|i| news.say(i.to_string()));
        let lines = news.take();
        assert_eq!((lines.len(), lines[0].as_str(), lines[MOST - 1].as_str()), (MOST + 1, "0", "63"));
        assert_eq!(lines[MOST], "3 more lines like these were dropped");
        assert!(news.take().is_empty());
    }

    #[test]
    fn powers_of_ten_are_worth_a_line() {
        let tally = Tally::default();
        let worth: Vec<u64> = (0..2000).filter_map(|_| tally.count()).collect();
        assert_eq!(worth, [1, 10, 100, 1000]);
    }
}
