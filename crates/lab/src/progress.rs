// SPDX-License-Identifier: Apache-2.0
//! What the user sees while the lab is made and samples are taken: a bar with what runs and how long is left on a terminal, plain lines in a log.
//!
//! Told by the scheduler's workers, from any thread; all state is under one lock.

use std::io::IsTerminal;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::scenario::Bundle;
use crate::schedule::{News, Task};
use crate::subject::Subject;

/// The display.
pub struct Progress<'a> {
    bundles: &'a [Bundle],
    subjects: &'a [Subject],
    start: Instant,
    state: Mutex<State>,
    bar: Option<ProgressBar>,
}

struct State {
    total: usize,
    done: usize,
    running: Vec<(usize, usize)>,
}

impl<'a> Progress<'a> {
    /// A display for `total` samples.
    pub fn new(total: usize, bundles: &'a [Bundle], subjects: &'a [Subject]) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total as u64);
            if let Ok(style) = ProgressStyle::with_template("{bar:28} {pos}/{len}  {msg}") {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.enable_steady_tick(Duration::from_millis(500));
            bar
        });
        let state = Mutex::new(State { total, done: 0, running: Vec::new() });
        Self { bundles, subjects, start: Instant::now(), state, bar }
    }

    /// Takes in what the scheduler says.
    pub fn tell(&self, news: &News) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        match news {
            News::Started(task) => state.running.push(pair(task)),
            News::Taken(task, took) => {
                state.end(task);
                state.done += 1;
                let left = self.left(&state);
                self.line(&format!(
                    "[{:>3}/{}] {} took {:.0} s{left}",
                    state.done,
                    state.total,
                    self.name(pair(task)),
                    took.as_secs_f64()
                ));
            }
            News::Skipped(task, why) => {
                state.end(task);
                state.total -= 1;
                self.line(&format!("{} is left out: {why}", self.name(pair(task))));
            }
            News::LeftOut => state.total -= 1,
            News::Failed(task, why, again) => {
                state.end(task);
                state.done += usize::from(!again);
                let then = if *again { "will be tried again" } else { "given up" };
                let text = format!("{} failed, {then}: {why}", self.name(pair(task)));
                match &self.bar {
                    Some(bar) => bar.println(text),
                    None => self.line(&text),
                }
            }
        }
        if let Some(bar) = &self.bar {
            let running: Vec<String> = state.running.iter().map(|pair| self.name(*pair)).collect();
            bar.set_length(state.total as u64);
            bar.set_position(state.done as u64);
            bar.set_message(format!("{}{}", running.join(" + "), self.left(&state)));
        }
    }

    /// Takes the bar off the terminal.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    fn name(&self, (bundle, subject): (usize, usize)) -> String {
        format!("{} {}", self.subjects[subject].name, self.bundles[bundle].name)
    }

    fn left(&self, state: &State) -> String {
        match left(self.start.elapsed(), state.done, state.total) {
            Some(left) => format!(", about {} left", duration(left)),
            None => String::new(),
        }
    }

    fn line(&self, text: &str) {
        if self.bar.is_none() {
            eprintln!("{text}");
        }
    }
}

impl State {
    fn end(&mut self, task: &Task) {
        if let Some(at) = self.running.iter().position(|running| *running == pair(task)) {
            self.running.remove(at);
        }
    }
}

fn pair(task: &Task) -> (usize, usize) {
    (task.bundle, task.subject)
}

/// What all steps of making the lab take together on two cores with a quick network: the first guess, until the pace is known.
const MAKING: Duration = Duration::from_secs(240);

/// The display while the lab's images and machine are made.
pub struct Making {
    start: Instant,
    /// How far it was when the first step began: some may be in the cache.
    first: Mutex<Option<f64>>,
    bar: Option<ProgressBar>,
}

impl Making {
    /// Nothing is shown until the first step.
    pub fn new() -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::hidden();
            bar.set_length(100);
            if let Ok(style) = ProgressStyle::with_template("{bar:28} {pos:>3} %  {msg}, {elapsed} so far") {
                bar.set_style(style.progress_chars("=> "));
            }
            bar
        });
        Self { start: Instant::now(), first: Mutex::new(None), bar }
    }

    /// A step begins; `done` is the share of all work that lies behind it, 0 to 1.
    pub fn tell(&self, step: &str, done: Option<f64>) {
        let done = done.unwrap_or_default();
        let first = *self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(done);
        let left = duration(making_left(self.start.elapsed(), first, done));
        match &self.bar {
            Some(bar) => {
                if bar.is_hidden() {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                    bar.enable_steady_tick(Duration::from_millis(500));
                }
                bar.set_position((done * 100.0) as u64);
                bar.set_message(format!("{step}, about {left} left"));
            }
            None => eprintln!("tare-lab: {step}, about {left} left"),
        }
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// The time left when `done` is behind and `first` was when it began.
fn making_left(elapsed: Duration, first: f64, done: f64) -> Duration {
    let behind = done - first;
    if behind > 0.0 { elapsed.mul_f64((1.0 - done) / behind) } else { MAKING.mul_f64(1.0 - done) }
}

/// The time left at the pace so far; `None` before the first sample and after the last.
fn left(elapsed: Duration, done: usize, total: usize) -> Option<Duration> {
    let remaining = total.checked_sub(done).filter(|n| *n > 0)?;
    (done > 0).then(|| elapsed.mul_f64(remaining as f64 / done as f64))
}

/// "40 s", "3 min".
fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    if seconds < 90 { format!("{seconds} s") } else { format!("{} min", (seconds + 30) / 60) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_follows_the_pace() {
        let secs = Duration::from_secs;
        assert_eq!(left(secs(10), 0, 4), None);
        assert_eq!(left(secs(10), 1, 4), Some(secs(30)));
        assert_eq!(left(secs(40), 4, 4), None);
        assert_eq!(making_left(secs(0), 0.0, 0.0), MAKING);
        assert_eq!(making_left(secs(30), 0.5, 0.75), secs(30));
        assert_eq!(duration(secs(89)), "89 s");
        assert_eq!(duration(secs(170)), "3 min");
    }
}
