// SPDX-License-Identifier: Apache-2.0
//! A tap on the guest's console: passes its output on and notes the lines by which a Linux kernel says how far it is.
//!
//! Only for a run whose timeline was asked for; one thread, `tap`, which ends when every writer of the pipe is gone.

use std::fs::File;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use crate::console::ConsoleIo;
use crate::timeline::{FIRST_LINE, Timeline, UNPACKED, UNPACKING, USER_LINE, USER_SPACE};

/// Stack of the thread.
const STACK: usize = 64 << 10;
/// A longer line is looked at in pieces.
const LINE: usize = 1024;

/// The running tap.
pub struct Tap(JoinHandle<()>);

/// Puts a tap between the machine's console and `io`'s output. The console of the machine is the value that comes back.
///
/// # Errors
/// When the host is out of descriptors or threads.
pub fn open(io: &ConsoleIo, timeline: Arc<Timeline>) -> io::Result<(ConsoleIo, Tap)> {
    let (reader, writer) = io::pipe()?;
    let output = io.output.clone();
    let input = io.input.as_ref().map(File::try_clone).transpose()?;
    let run = move || pass_on(reader, &output, Lines::new(timeline));
    let thread = std::thread::Builder::new().name("tap".to_owned()).stack_size(STACK).spawn(run)?;
    let output = Arc::new(File::from(OwnedFd::from(writer)));
    Ok((ConsoleIo { input, output, terminal: io.terminal }, Tap(thread)))
}

impl Tap {
    /// Waits until all output has been passed on. The machine's console must be gone.
    pub fn finish(self) {
        // A tap that panicked has lost output, and its panic has been printed.
        let _ = self.0.join();
    }
}

fn pass_on(mut from: PipeReader, to: &File, mut lines: Lines) {
    let mut buffer = [0u8; 4096];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => {
                lines.feed(&buffer[..n]);
                // Output that nobody reads any more is dropped.
                let _ = (&mut &*to).write_all(&buffer[..n]);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// Takes bytes apart into lines.
struct Lines {
    timeline: Arc<Timeline>,
    line: Vec<u8>,
    /// Which of the lines that are waited for have come.
    seen: Vec<&'static str>,
}

impl Lines {
    fn new(timeline: Arc<Timeline>) -> Self {
        Self { timeline, line: Vec::new(), seen: Vec::new() }
    }

    fn feed(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' || self.line.len() == LINE {
                let line = std::mem::take(&mut self.line);
                self.look(&String::from_utf8_lossy(&line));
            } else {
                self.line.push(byte);
            }
        }
    }

    fn look(&mut self, line: &str) {
        let (stamp, text) = stamped(line);
        let Some(what) = meaning(stamp.is_some(), text) else { return };
        if !self.seen.contains(&what) && (what != USER_LINE || !line.trim().is_empty()) {
            self.seen.push(what);
            self.timeline.note_line(what, stamp);
        }
    }
}

/// What a line says of how far the guest is. Lines without a stamp are not the kernel's.
fn meaning(stamped: bool, text: &str) -> Option<&'static str> {
    if !stamped {
        return Some(USER_LINE);
    }
    let known = [
        ("Linux version ", FIRST_LINE),
        ("Unpacking initramfs", UNPACKING),
        ("Trying to unpack rootfs image as initramfs", UNPACKING),
        ("Freeing initrd memory", UNPACKED),
    ];
    if let Some((_, what)) = known.iter().find(|(start, _)| text.starts_with(start)) {
        return Some(what);
    }
    (text.starts_with("Run ") && text.contains(" as init process")).then_some(USER_SPACE)
}

/// A line of the kernel's log: its stamp in nanoseconds, and what follows.
fn stamped(line: &str) -> (Option<u64>, &str) {
    let parse = || -> Option<(u64, &str)> {
        let (stamp, text) = line.trim_start().strip_prefix('[')?.split_once(']')?;
        let (seconds, micros) = stamp.trim_start().split_once('.')?;
        let micros: u64 = micros.parse().ok().filter(|m| *m < 1_000_000)?;
        Some((seconds.parse::<u64>().ok()?.checked_mul(1_000_000)?.checked_add(micros)?.checked_mul(1000)?, text))
    };
    parse().map_or((None, line), |(ns, text)| (Some(ns), text.trim_start()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::time::Instant;

    #[test]
    fn a_kernels_log_becomes_moments() {
        let timeline = Arc::new(Timeline::new(Instant::now()));
        let mut lines = Lines::new(timeline.clone());
        let log = b"[    0.000000] Linux version 6.1.0\r\n[    0.000000] Command line: quiet\r\n\
            [    0.700000] Unpacking initramfs...\r\n[    0.731234] Freeing initrd memory: 136K\r\n\
            [    1.200000] Run /init as init process\r\n\r\nhello\r\nhello again\r\n";
        for piece in log.chunks(7) {
            lines.feed(piece);
        }
        let got: Vec<(String, Option<u64>)> = timeline.take().into_iter().map(|m| (m.what, m.guest_ns)).collect();
        let want = [
            (FIRST_LINE, Some(0)),
            (UNPACKING, Some(700_000_000)),
            (UNPACKED, Some(731_234_000)),
            (USER_SPACE, Some(1_200_000_000)),
            (USER_LINE, None),
        ];
        assert_eq!(got, want.map(|(what, ns)| (what.to_owned(), ns)));
    }

    #[test]
    fn odd_stamps_are_no_stamps() {
        for line in ["[x.1] Linux version", "[1] Run x", "[1.1000000] x", "[18446744073709551615.0] x", "[", "[]", ""] {
            assert_eq!(stamped(line).0, None, "{line}");
        }
        assert_eq!(stamped("[12.000001][ T1] x"), (Some(12_000_001_000), "[ T1] x"));
    }

    #[test]
    fn output_is_passed_on_whole() {
        let (mut rx, tx) = io::pipe().unwrap();
        let io = ConsoleIo { input: None, output: Arc::new(File::from(OwnedFd::from(tx))), terminal: false };
        let timeline = Arc::new(Timeline::new(Instant::now()));
        let (tapped, tap) = open(&io, timeline.clone()).unwrap();
        (&*tapped.output).write_all(b"one\ntwo").unwrap();
        drop((tapped, io));
        tap.finish();
        let mut got = String::new();
        rx.read_to_string(&mut got).unwrap();
        assert_eq!(got, "one\ntwo");
        assert_eq!(timeline.take().len(), 1);
    }
}
