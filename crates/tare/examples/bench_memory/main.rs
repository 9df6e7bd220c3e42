// SPDX-License-Identifier: Apache-2.0
//! `make bench-memory`: making guest memory ready and finding it, beside QEMU and beside what this machine's memory allows,
//! as ratios of one run. Needs no KVM. Sides alternate; of each the best of some rounds counts, since what is best is least
//! disturbed. Flags: `--max SIZE` (16G), `--rounds N` (3), `--only prealloc|pool|zero|phases|lookups`,
//! `--pages 4K|thp|2M` (all; pages of 2 MiB have to be set aside before, in `/proc/sys/vm/nr_hugepages`).

mod lookups;
mod phases;
mod pool;
mod prealloc;
mod steps;
mod zeroing;

use std::time::{Duration, Instant};

use spec::{Pages, Word};

/// What `--only` can name.
const PARTS: [&str; 5] = ["zero", "prealloc", "phases", "pool", "lookups"];

/// What a run is told.
pub struct Options {
    /// No guest is larger.
    pub max: u64,
    /// How often each thing is measured.
    pub rounds: usize,
    only: Option<String>,
    /// No other kind of page is prepared.
    pub pages: Option<Pages>,
}

impl Options {
    /// Ends the program, with a line, at what it does not know.
    fn parse() -> Self {
        let mut out = Self { max: 16 << 30, rounds: 3, only: None, pages: None };
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            let value = args.next().unwrap_or_default();
            let known = match flag.as_str() {
                "--max" => spec::parse_size("--max", &value).map(|size| out.max = size).is_ok(),
                "--rounds" => value.parse().map(|rounds: usize| out.rounds = rounds.max(1)).is_ok(),
                "--only" => {
                    let known = PARTS.contains(&value.as_str());
                    out.only = Some(value.clone());
                    known
                }
                "--pages" => {
                    out.pages = Pages::from_word(&flag, &value).ok();
                    out.pages.is_some()
                }
                _ => false,
            };
            if !known {
                let parts = PARTS.join("|");
                eprintln!(
                    "bench-memory: `{flag} {value}` is none of --max SIZE, --rounds NUMBER, --only {parts}, --pages 4K|thp|2M"
                );
                std::process::exit(2);
            }
        }
        out
    }

    fn wants(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == part)
    }
}

/// Bytes that programs may have now.
pub fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("MemAvailable:")).unwrap_or_default();
    line.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// How long `act` takes.
pub fn timed<R>(act: impl FnOnce() -> R) -> (R, Duration) {
    let begun = Instant::now();
    let result = act();
    (result, begun.elapsed())
}

/// Bytes as GiB.
pub fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

/// A promise and whether this run kept it.
pub fn promise(what: &str, value: f64, at_least: f64) {
    let kept = if value >= at_least { "kept" } else { "NOT KEPT" };
    println!("  promise: {what} at least {at_least}: {value:.2}, {kept}");
}

fn main() {
    let options = Options::parse();
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    println!("memory: {:.1} GiB available, {cpus} CPUs, best of {} rounds", gib(available()), options.rounds);
    if options.wants("zero") {
        zeroing::run(&options);
    }
    if options.wants("prealloc") {
        prealloc::run(&options);
    }
    if options.wants("phases") {
        phases::run(&options);
    }
    if options.wants("pool") {
        pool::run(&options);
    }
    if options.wants("lookups") {
        lookups::run(&options);
    }
}
