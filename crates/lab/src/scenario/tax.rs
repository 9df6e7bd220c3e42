// SPDX-License-Identifier: Apache-2.0
//! Suite `tax`: sysbench's five workloads. cpu, memory, mutex and threads share one start, their order cannot matter;
//! fileio has its own.
//!
//! `--scale` shortens times and sizes in proportion. sysbench takes whole seconds only, so a shortened run also ends after a
//! number of events, about what a guest does in that part of ten seconds; rates are events by time either way.

use std::fmt::Write as _;

use anyhow::Result;

use super::{Bundle, Kind, Step, microvm};
use crate::report::{Better, Figure};
use crate::sample::Sample;
use crate::sysbench::{self, Test};

/// The sizes of the suite at some scale.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sizes {
    seconds: u64,
    memory_mib: u64,
    file_mib: u64,
    mutex_locks: u64,
    /// Of cpu, threads and fileio; `None` at full scale, where only the time counts.
    events: Option<[u64; 3]>,
}

impl Sizes {
    fn at(scale: f64) -> Self {
        let part = |full: f64, least: f64| (full * scale).round().max(least) as u64;
        Self {
            seconds: part(10.0, 1.0),
            memory_mib: part(2048.0, 8.0),
            file_mib: part(1024.0, 8.0),
            mutex_locks: part(50_000.0, 100.0),
            events: (scale < 1.0).then(|| [part(1_500.0, 20.0), part(20_000.0, 100.0), part(50_000.0, 200.0)]),
        }
    }
}

/// The bundles of the suite.
pub fn bundles(scale: f64) -> Vec<Bundle> {
    let Sizes { seconds, memory_mib, file_mib, mutex_locks, events } = Sizes::at(scale);
    let length = |which: usize| match events {
        Some(events) => format!("--time={seconds} --events={}", events[which]),
        None => format!("--time={seconds}"),
    };
    let step = |workload, mark, test, command| Step { workload, mark, test, command, after: "" };
    let file = |rest: &str| format!("sysbench fileio --file-num=128 --file-total-size={file_mib}M {rest}");
    let rndrw = format!("--file-test-mode=rndrw --threads=2 {}", length(2));
    let compute = vec![
        step("cpu", "cpu", Test::Cpu, format!("sysbench cpu --cpu-max-prime=20000 {} run", length(0))),
        step(
            "memory",
            "memory",
            Test::Memory,
            format!("sysbench memory --memory-block-size=8k --memory-total-size={memory_mib}M run"),
        ),
        step(
            "mutex",
            "mutex",
            Test::Mutex,
            format!("sysbench mutex --threads=2 --mutex-num=4096 --mutex-locks={mutex_locks} --mutex-loops=10000 run"),
        ),
        step(
            "threads",
            "threads",
            Test::Threads,
            format!("sysbench threads --threads=2 --thread-yields=100 --thread-locks=4 {} run", length(1)),
        ),
    ];
    let mut prepare = step("fileio prepare", "prepare", Test::Prepare, file("prepare"));
    prepare.after = "sync";
    let fileio = vec![
        prepare,
        step("fileio rndrw", "rndrw", Test::FileIo, file(&format!("{rndrw} run"))),
        step("fileio rndrw direct", "direct", Test::FileIo, file(&format!("{rndrw} --file-extra-flags=direct run"))),
    ];
    let room = if file_mib <= 128 { 512 } else { 512 + 2 * file_mib };
    let limit_seconds = 20 + 18 * seconds;
    vec![
        Bundle { name: "compute", kind: Kind::Work(compute), memory_mib: room, limit_seconds, disk: None, net: None },
        Bundle { name: "fileio", kind: Kind::Work(fileio), memory_mib: room, limit_seconds, disk: None, net: None },
    ]
}

/// What the guest's first process runs, after `setup`. One line, no double quotes (the kernel knows no escapes), and no mark as plain
/// text (the kernel prints its command line).
pub fn init(setup: &str, steps: &[Step]) -> String {
    let logs = steps.iter().any(|step| step.test == Test::Phases);
    let note = |what: &str| if logs { format!("echo {what} >/dev/kmsg;") } else { String::new() };
    let mut out = note(microvm::SHELL);
    out += "mount -t proc p /proc;mount -t sysfs s /sys;mount -t tmpfs t /tmp;mount -o remount,rw /;\
         mkdir -p /var/tmp/w;cd /var/tmp/w;";
    out += &note(microvm::USER);
    out += setup;
    out += &work(steps);
    out += "sync;echo o >/proc/sysrq-trigger;sleep 9";
    out
}

/// The same work for a shell on the host.
pub fn native(steps: &[Step], data: &str) -> String {
    let data = crate::sample::quote(data);
    format!("mkdir -p {data} && cd {data} || exit 1;{}cd /;rm -rf {data}", work(steps))
}

/// The steps with their marks. A step's output is kept until it has ended, so that the console is no part of the measured
/// work; the pauses let counters be read outside it. No word is split or expanded but where it is written.
fn work(steps: &[Step]) -> String {
    let mut out = String::from(
        "set -f;IFS=;m=@@;b(){ echo ${m}lab begin $1;sleep .1;};e(){ echo ${m}lab end $1;sleep .1;echo $o;echo ${m}lab out $1;};",
    );
    for step in steps {
        let _ = write!(out, "b {0};o=$({1} 2>&1);e {0};", step.mark, step.command);
        if !step.after.is_empty() {
            let _ = write!(out, "{};", step.after);
        }
    }
    out += "echo ${m}lab done;sleep .2;";
    out
}

/// The figures of one sample; every step must be there.
pub fn figures(steps: &[Step], sample: &Sample) -> Result<Vec<(&'static str, Figure)>> {
    let mut out = Vec::new();
    for step in steps {
        let text = sample.section(step.mark)?;
        let figures =
            if step.test == Test::Phases { microvm::phases(text, sample) } else { sysbench::figures(step.test, text) };
        let figures =
            figures.map_err(|error| error.context(format!("workload '{}' ({})", step.workload, sample.ending())))?;
        let events = figures.iter().find(|figure| figure.metric == "events").map(|figure| figure.value);
        let exits = sample.exits(Some(&format!("begin {}", step.mark)), &format!("end {}", step.mark));
        out.extend(figures.into_iter().map(|figure| (step.workload, figure)));
        let unit = match step.test {
            test if test.makes_requests() => "exits per request",
            Test::Iperf => "exits per MiB",
            Test::Transact => "exits per transaction",
            _ => continue,
        };
        if let (Some(events), Some(exits)) = (events, exits) {
            let each = exits.total as f64 / events.max(1.0);
            out.push((step.workload, Figure::new(unit, "", Better::Lower, each)));
        }
    }
    sample.need("done")?;
    Ok(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn full_scale_is_what_the_suite_promises() {
        let all = bundles(1.0);
        let text = format!("{all:?}");
        for part in [
            "--cpu-max-prime=20000 --time=10",
            "--memory-block-size=8k --memory-total-size=2048M",
            "--file-num=128 --file-total-size=1024M --file-test-mode=rndrw --threads=2",
            "--threads=2 --mutex-num=4096 --mutex-locks=50000 --mutex-loops=10000",
            "--threads=2 --thread-yields=100 --thread-locks=4",
        ] {
            assert!(text.contains(part), "{part}");
        }
        let small = Sizes::at(0.1);
        assert_eq!(
            small,
            Sizes { seconds: 1, memory_mib: 205, file_mib: 102, mutex_locks: 5000, events: Some([150, 2000, 5000]) }
        );
        assert!(!text.contains("--events"), "full scale ends by time alone");
        assert!(format!("{:?}", bundles(0.1)).contains("--threads=2 --time=1 --events=5000 run"));
        assert!(Sizes::at(0.000_1).seconds == 1);
    }

    fn sample(part: &str) -> Sample {
        let text = format!(
            "%% mark 10 begin rndrw exits=1000\n%% mark 20 end rndrw exits=66289\n%% mark 25 out rndrw\n%% mark 30 done\n%% end 40 exit 0\n\
             %% console\n@@lab begin rndrw\n@@lab end rndrw\n{part}\n@@lab out rndrw\n%% stderr\n\n%% stop\n"
        );
        Sample::parse(&text).unwrap()
    }

    #[test]
    fn figures_of_a_section_with_exits_per_request() {
        let Kind::Work(steps) = &bundles(0.1)[1].kind else { unreachable!() };
        let rndrw = &steps[1..2];
        let figures = figures(rndrw, &sample(include_str!("../testdata/rndrw.txt"))).unwrap();
        assert_eq!(figures[0], ("fileio rndrw", Figure::new("reads per second", "1/s", Better::Higher, 17079.87)));
        let each = figures.iter().find(|(_, f)| f.metric == "exits per request").unwrap();
        assert_eq!(each.1.value, 1.0);
        assert!(super::figures(rndrw, &sample("FATAL: no space")).is_err());
        assert!(super::figures(steps, &sample("")).is_err(), "a missing step fails the sample");
    }
}
