// SPDX-License-Identifier: Apache-2.0
//! Reads what sysbench 1.0 prints. Each test has its own headline; latency figures are common to all. What fio prints is
//! read in `fio`, and what the network's tools print in `traffic`.
//!
//! Nothing here judges: a figure that is not in the text is an error, because a sample without its figure has failed.

use anyhow::{Context, Result, bail};

use crate::report::{Better, Figure};

/// The sysbench tests the lab knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Test {
    /// `sysbench cpu run`.
    Cpu,
    /// `sysbench memory run`.
    Memory,
    /// `sysbench fileio prepare`.
    Prepare,
    /// `sysbench fileio run`: what is read and written.
    FileIo,
    /// The same, for the operations in a second.
    FileIops,
    /// The same, for the time of one.
    FileLatency,
    /// `sysbench mutex run`.
    Mutex,
    /// `sysbench threads run`.
    Threads,
    /// One job of fio.
    Fio,
    /// One stream of iperf3.
    Iperf,
    /// coreutils' dd.
    Dd,
    /// Transactions of the agent.
    Transact,
    /// What a guest says of its memory; not by sysbench.
    Total,
    /// What a guest says of its own boot; not by sysbench.
    Phases,
}

impl Test {
    /// Whether its events are requests to a disk.
    pub fn makes_requests(self) -> bool {
        matches!(self, Self::FileIo | Self::FileIops | Self::FileLatency | Self::Fio | Self::Dd)
    }

    /// The figure to put first, where it is not the first that is printed.
    fn headline(self) -> Option<&'static str> {
        match self {
            Self::FileIops => Some("operations per second"),
            Self::FileLatency => Some("latency avg"),
            _ => None,
        }
    }
}

/// The figures of one test's output, the headline first.
pub fn figures(test: Test, text: &str) -> Result<Vec<Figure>> {
    match test {
        Test::Fio => return crate::fio::figures(text),
        Test::Dd => return crate::scenario::load::dd(text),
        Test::Total => return crate::scenario::passthrough::total(text),
        Test::Iperf => return crate::traffic::stream(text),
        Test::Transact => return crate::traffic::transactions(text),
        _ => {}
    }
    if let Some(line) = text.lines().find(|line| line.starts_with("FATAL:")) {
        bail!("sysbench failed: {line}");
    }
    let text = Text(text);
    let mut out = Vec::new();
    match test {
        Test::Prepare => {
            let (seconds, rate) = text.prepare()?;
            out.push(Figure::new("rate", "MiB/s", Better::Higher, rate));
            out.push(Figure::new("total time", "s", Better::Lower, seconds));
            return Ok(out);
        }
        Test::Cpu => {
            out.push(Figure::new("events per second", "1/s", Better::Higher, text.after("events per second:")?))
        }
        Test::Memory => {
            out.push(Figure::new("rate", "MiB/s", Better::Higher, text.in_parentheses("MiB transferred")?));
            out.push(Figure::new(
                "operations per second",
                "1/s",
                Better::Higher,
                text.in_parentheses("Total operations:")?,
            ));
        }
        Test::FileIo | Test::FileIops | Test::FileLatency => {
            let (reads, writes) = (text.after("reads/s:")?, text.after("writes/s:")?);
            // A test of one kind says nothing of the other.
            if reads > 0.0 {
                out.push(Figure::new("reads per second", "1/s", Better::Higher, reads));
            }
            if writes > 0.0 {
                out.push(Figure::new("writes per second", "1/s", Better::Higher, writes));
                out.push(Figure::new("fsyncs per second", "1/s", Better::Higher, text.after("fsyncs/s:")?));
            }
            out.push(Figure::new("operations per second", "1/s", Better::Higher, reads + writes));
            let (read, written) = (text.after("read, MiB/s:")?, text.after("written, MiB/s:")?);
            out.push(Figure::new("read and written", "MiB/s", Better::Higher, read + written));
        }
        Test::Fio | Test::Dd | Test::Total | Test::Iperf | Test::Transact | Test::Phases => {}
        Test::Mutex => out.push(Figure::new("total time", "s", Better::Lower, text.after("total time:")?)),
        Test::Threads => {
            let (events, seconds) = (text.after("total number of events:")?, text.after("total time:")?);
            out.push(Figure::new("events per second", "1/s", Better::Higher, events / seconds.max(1e-9)));
        }
    }
    let events = text.after("total number of events:")?;
    if test != Test::Mutex {
        out.push(Figure::new("total time", "s", Better::Lower, text.after("total time:")?));
    }
    out.push(Figure::new("events", "", Better::Higher, events));
    out.push(Figure::new("latency avg", "ms", Better::Lower, text.after("avg:")?));
    out.push(Figure::new("latency p95", "ms", Better::Lower, text.after("95th percentile:")?));
    out.push(Figure::new("latency max", "ms", Better::Lower, text.after("max:")?));
    if let Some(at) = test.headline().and_then(|name| out.iter().position(|figure| figure.metric == name)) {
        let first = out.remove(at);
        out.insert(0, first);
    }
    match out.iter().find(|figure| !figure.value.is_finite()) {
        Some(figure) => bail!("sysbench printed no finite '{}'", figure.metric),
        None => Ok(out),
    }
}

struct Text<'a>(&'a str);

impl Text<'_> {
    /// The number after `label` on the line that starts with it (blanks aside).
    fn after(&self, label: &str) -> Result<f64> {
        let rest = self
            .0
            .lines()
            .find_map(|line| line.trim_start().strip_prefix(label))
            .with_context(|| format!("no '{label}' in sysbench's output"))?;
        number(rest).with_context(|| format!("no number after '{label}' in sysbench's output"))
    }

    /// The number that follows the parenthesis on the line that holds `label`.
    fn in_parentheses(&self, label: &str) -> Result<f64> {
        let line = self
            .0
            .lines()
            .find(|line| line.contains(label))
            .with_context(|| format!("no '{label}' in sysbench's output"))?;
        let (_, inner) = line.split_once('(').with_context(|| format!("no rate on the line '{label}'"))?;
        number(inner).with_context(|| format!("no rate on the line '{label}'"))
    }

    /// Seconds and MiB/s of `fileio prepare`.
    fn prepare(&self) -> Result<(f64, f64)> {
        let line = self
            .0
            .lines()
            .find(|line| line.contains("bytes written in"))
            .context("no 'bytes written in' in the output of sysbench fileio prepare")?;
        let (_, rest) = line.split_once("bytes written in").unwrap_or_default();
        let seconds = number(rest).context("no time in the output of sysbench fileio prepare")?;
        Ok((seconds, self.in_parentheses("bytes written in")?))
    }
}

/// The number at the start of `text`, its unit cut off.
fn number(text: &str) -> Option<f64> {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    text[..end].parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn get(test: Test, text: &str, metric: &str) -> f64 {
        figures(test, text).unwrap().into_iter().find(|f| f.metric == metric).unwrap().value
    }

    #[test]
    fn cpu() {
        let text = include_str!("testdata/cpu.txt");
        assert_eq!(get(Test::Cpu, text, "events per second"), 866.90);
        assert_eq!(get(Test::Cpu, text, "events"), 869.0);
        assert_eq!(get(Test::Cpu, text, "latency avg"), 1.15);
        assert_eq!(get(Test::Cpu, text, "latency max"), 5.14);
        assert_eq!(get(Test::Cpu, text, "latency p95"), 1.18);
        assert_eq!(get(Test::Cpu, text, "total time"), 1.0007);
    }

    #[test]
    fn memory() {
        let text = include_str!("testdata/memory.txt");
        assert_eq!(get(Test::Memory, text, "rate"), 9752.55);
        assert_eq!(get(Test::Memory, text, "operations per second"), 1_248_326.07);
    }

    #[test]
    fn file_io() {
        let text = include_str!("testdata/rndrw.txt");
        assert_eq!(get(Test::FileIo, text, "reads per second"), 17079.87);
        assert_eq!(get(Test::FileIo, text, "writes per second"), 11385.92);
        assert_eq!(get(Test::FileIo, text, "fsyncs per second"), 36587.39);
        assert_eq!(get(Test::FileIo, text, "read and written"), 266.87 + 177.90);
        let text = include_str!("testdata/prepare.txt");
        assert_eq!(get(Test::Prepare, text, "rate"), 745.28);
        assert_eq!(get(Test::Prepare, text, "total time"), 0.09);
    }

    #[test]
    fn mutex_and_threads() {
        assert_eq!(get(Test::Mutex, include_str!("testdata/mutex.txt"), "total time"), 0.5679);
        assert_eq!(get(Test::Threads, include_str!("testdata/threads.txt"), "events per second"), 9996.0 / 1.0001);
    }

    #[test]
    fn the_headline_comes_first_and_text_cut_short_is_an_error() {
        let text = include_str!("testdata/rndrw.txt");
        assert_eq!(figures(Test::FileIo, text).unwrap()[0].metric, "reads per second");
        let cut = &text[..text.find("Latency").unwrap()];
        let error = figures(Test::FileIo, cut).unwrap_err().to_string();
        assert!(error.contains("avg:"), "{error}");
        let fatal = "FATAL: Cannot open file 'test_file.0' errno = 2 (No such file or directory)\n";
        assert!(figures(Test::FileIo, fatal).unwrap_err().to_string().contains("test_file.0"));
    }

    #[test]
    fn a_serial_console_may_end_lines_with_carriage_returns() {
        let text = include_str!("testdata/cpu.txt").replace('\n', "\r\n");
        assert_eq!(get(Test::Cpu, &text, "events per second"), 866.90);
    }
}
