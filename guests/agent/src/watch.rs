// SPDX-License-Identifier: Apache-2.0
//! `tare-agent watch CONSOLE PERIOD`: tells the script of a sample what its subject says, without taking its time.
//!
//! The script is a shell; a shell that looks every two milliseconds takes a tenth of the one CPU that a measured subject
//! runs on. This sleeps in one `poll` until the console file grows, and looks at most once in PERIOD microseconds.
//! It reads the subject's process number from standard input and prints one line per event: microseconds since the epoch,
//! then `ready` (it watches), `mark` and what followed `@@lab ` on a line of the console, or `gone` (the process ended;
//! everything it wrote has been told).

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::session;

/// What a line has before a mark.
const SIGN: &[u8] = b"@@lab ";
/// A console line longer than this has no mark in its first part.
const LONGEST: usize = 1 << 16;

/// Watches until the process whose number `orders` brings is gone.
///
/// # Errors
/// When the console can't be read or watched, or `orders` brings no number.
pub fn watch(console: &Path, period: Duration, mut orders: File, out: &mut dyn Write) -> io::Result<()> {
    let mut lines = Lines { file: File::open(console)?, part: Vec::new() };
    let mut growth = inotify(console)?;
    tell(out, "ready")?;
    let mut process: Option<OwnedFd> = None;
    loop {
        let third = process.as_ref().map_or(orders.as_raw_fd(), AsRawFd::as_raw_fd);
        let [grown, other] = poll([growth.as_raw_fd(), third])?;
        if grown {
            // One buffer holds many events; what they say is known: the file has changed.
            let _ = growth.read(&mut [0; 4096])?;
        }
        for mark in lines.marks()? {
            tell(out, &format!("mark {mark}"))?;
        }
        if other && process.is_some() {
            return tell(out, "gone");
        }
        if other {
            process = Some(process_named_by(&mut orders)?);
            continue;
        }
        std::thread::sleep(period);
    }
}

/// The console, line by line.
struct Lines {
    file: File,
    part: Vec<u8>,
}

impl Lines {
    /// The marks of the lines that were completed since the last call.
    fn marks(&mut self) -> io::Result<Vec<String>> {
        let mut marks = Vec::new();
        let mut piece = [0; 16 << 10];
        loop {
            let n = self.file.read(&mut piece)?;
            if n == 0 {
                return Ok(marks);
            }
            self.part.extend_from_slice(piece.get(..n).unwrap_or_default());
            while let Some(end) = self.part.iter().position(|byte| *byte == b'\n') {
                let rest = self.part.split_off(end + 1);
                let line = std::mem::replace(&mut self.part, rest);
                marks.extend(mark_of(&line));
            }
            if self.part.len() > LONGEST {
                self.part.clear();
            }
        }
    }
}

/// What follows the last sign on a line.
fn mark_of(line: &[u8]) -> Option<String> {
    let at = line.windows(SIGN.len()).rposition(|window| window == SIGN)?;
    let mark = String::from_utf8_lossy(line.get(at + SIGN.len()..)?);
    Some(mark.trim_end().to_owned())
}

fn tell(out: &mut dyn Write, what: &str) -> io::Result<()> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // One write a line, so that a reader never sees half of one.
    out.write_all(format!("{} {what}\n", now.as_micros()).as_bytes())?;
    out.flush()
}

/// Which of two descriptors can be read.
fn poll(fds: [i32; 2]) -> io::Result<[bool; 2]> {
    let mut fds = fds.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    loop {
        // SAFETY: `fds` is an array of two on the stack, alive for the call.
        if unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) } >= 0 {
            return Ok(fds.map(|fd| fd.revents != 0));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A descriptor with an event for each change of the file.
fn inotify(path: &Path) -> io::Result<File> {
    let name = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: no memory is involved.
    let fd = unsafe { libc::inotify_init1(libc::IN_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just made and is nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    // SAFETY: `name` is a terminated string, alive for the call.
    if unsafe { libc::inotify_add_watch(fd, name.as_ptr(), libc::IN_MODIFY) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// A descriptor that can be read when the process whose number comes next has ended.
fn process_named_by(orders: &mut File) -> io::Result<OwnedFd> {
    let mut text = [0; 32];
    let n = orders.read(&mut text)?;
    let text = String::from_utf8_lossy(text.get(..n).unwrap_or_default());
    let number = text.trim().parse().map_err(|_| {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("standard input should name a process, not '{}'", text.trim()),
        )
    })?;
    session::pidfd(number)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::fd::IntoRawFd;
    use std::process::{Command, Stdio};

    use super::*;

    /// A pipe: what is written to the second is read from the first.
    fn pipe() -> (File, File) {
        let (reader, writer) = io::pipe().unwrap();
        // SAFETY: both descriptors were just given up by their owners.
        unsafe { (File::from_raw_fd(reader.into_raw_fd()), File::from_raw_fd(writer.into_raw_fd())) }
    }

    #[test]
    fn marks_come_as_they_are_written_and_the_end_comes_last() {
        let dir = tempfile::tempdir().unwrap();
        let console = dir.path().join("console");
        let mut writer = File::create(&console).unwrap();
        let (orders, mut order) = pipe();
        let (told, mut teller) = pipe();
        let path = console.clone();
        let watcher = std::thread::spawn(move || watch(&path, Duration::from_millis(1), orders, &mut teller).unwrap());
        let mut told = BufReader::new(told).lines().map(|line| {
            let line = line.unwrap();
            let (micros, what) = line.split_once(' ').unwrap();
            assert!(micros.parse::<u64>().unwrap() > 1_600_000_000_000_000);
            what.to_owned()
        });
        assert_eq!(told.next().unwrap(), "ready");
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        writeln!(order, "{}", child.id()).unwrap();
        writer.write_all(b"[    0.1] boot\r\n[    0.2] x@@lab ready\r\n@@lab be").unwrap();
        assert_eq!(told.next().unwrap(), "mark ready");
        writer.write_all(b"gin cpu\nnothing\n").unwrap();
        assert_eq!(told.next().unwrap(), "mark begin cpu");
        writer.write_all(b"@@lab done\n@@lab cut").unwrap();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(told.next().unwrap(), "mark done");
        assert_eq!(told.next().unwrap(), "gone");
        watcher.join().unwrap();
        assert_eq!(told.next(), None);
    }

    #[test]
    fn what_is_no_process_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let console = dir.path().join("console");
        File::create(&console).unwrap();
        let (orders, mut order) = pipe();
        order.write_all(b"nobody\n").unwrap();
        let error = watch(&console, Duration::ZERO, orders, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("nobody"), "{error}");
    }
}
