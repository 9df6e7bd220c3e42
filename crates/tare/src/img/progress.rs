// SPDX-License-Identifier: Apache-2.0
//! How far a long command is: a bar where a person watches, qemu-img's percentages under `-p` where a program reads. Told
//! by any thread.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};

use indicatif::{ProgressBar, ProgressStyle};

/// The display.
pub struct Progress {
    total: u64,
    done: AtomicU64,
    /// Hundredths of a percent printed last.
    printed: AtomicU64,
    bar: Option<ProgressBar>,
    lines: bool,
}

impl Progress {
    /// For `total` bytes; `asked` is `-p`, `quiet` is `-q`.
    pub fn new(total: u64, asked: bool, quiet: bool) -> Self {
        let terminal = io::stderr().is_terminal();
        let bar = (terminal && !quiet).then(|| {
            let bar = ProgressBar::new(total);
            let template = "{bar:28} {percent}%  {bytes}/{total_bytes}  {bytes_per_sec}, {eta} left";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style.progress_chars("=> "));
            }
            bar
        });
        Self {
            total: total.max(1),
            done: AtomicU64::new(0),
            printed: AtomicU64::new(u64::MAX),
            bar,
            lines: asked && !quiet && !terminal,
        }
    }

    /// `bytes` more are done.
    pub fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some(bar) = &self.bar {
            bar.set_position(done);
        }
        if self.lines {
            let hundredths = (u128::from(done.min(self.total)) * 10_000 / u128::from(self.total)) as u64;
            // As qemu-img: no more than a line for each hundredth of the way.
            if hundredths / 100 != self.printed.swap(hundredths, Ordering::Relaxed) / 100 {
                self.line(hundredths);
            }
        }
    }

    /// All is done: takes the bar off, ends the line.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if self.lines {
            self.line(10_000);
            let _ = writeln!(io::stdout());
        }
    }

    fn line(&self, hundredths: u64) {
        let mut out = io::stdout().lock();
        let _ = write!(out, "    ({}.{:02}/100%)\r", hundredths / 100, hundredths % 100);
        let _ = out.flush();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // A command that failed leaves no bar behind its message.
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
