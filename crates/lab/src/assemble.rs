// SPDX-License-Identifier: Apache-2.0
//! From what the scheduler brought home to the report: rows, exits, notes.
//!
//! Called once at the end of a run, by `main`.

use std::collections::BTreeMap;

use crate::place::Facts;
use crate::price::{Exits, KINDS};
use crate::report::{Better, Host, Method, Report, Row, Rows, SubjectInfo};
use crate::scenario::{Bundle, interrupts, load, passthrough, workloads};
use crate::schedule::{Ledger, TRIES};
use crate::subject::Subject;

/// What a run was asked to do, for the report's head.
pub struct Asked<'a> {
    /// The suite's name.
    pub suite: &'a str,
    /// Its bundles.
    pub bundles: &'a [Bundle],
    /// Who was measured.
    pub subjects: &'a [Subject],
    /// `--scale`.
    pub scale: f64,
    /// `--repeat`.
    pub repeat: u32,
    /// Seed of the mixed order.
    pub seed: u64,
    /// Workers.
    pub jobs: usize,
    /// Wall time of the run.
    pub wall_seconds: f64,
    /// Where.
    pub host: Host,
    /// Notes made before the run.
    pub notes: Vec<String>,
}

/// Builds the report.
pub fn report(asked: Asked, facts: Facts, ledger: &Ledger) -> Report {
    let name = |index: usize| asked.subjects[index].name.as_str();
    let mut rows = Rows::default();
    let mut counts: BTreeMap<(&str, &str), Vec<Exits>> = BTreeMap::new();
    for taken in &ledger.taken {
        let subject = name(taken.task.subject);
        for (workload, figure) in &taken.figures {
            rows.add(workload, subject, figure);
        }
        for (workload, exits) in &taken.exits {
            counts.entry((subject, workload)).or_default().push(exits.clone());
        }
    }
    let mut exits: BTreeMap<String, BTreeMap<String, Exits>> = BTreeMap::new();
    for ((subject, workload), samples) in &counts {
        if let Some(median) = Exits::median(samples) {
            exits.entry((*subject).to_owned()).or_default().insert((*workload).to_owned(), median);
        }
    }
    let mut notes = notes(&asked, ledger, !exits.is_empty());
    let results_order = workloads(asked.bundles);
    let native = asked.subjects.iter().find(|subject| subject.is_native()).map_or("native", |s| s.name.as_str());
    let results = rows.finish(&results_order, native);
    notes.extend(beside_qemu(&results));
    notes.extend(passthrough::beside_qemu(&results));
    notes.extend(interrupts::beside_study(&results));
    notes.extend(load::beside_study(&results));
    Report {
        suite: asked.suite.to_owned(),
        method: Method {
            place: facts.place.to_owned(),
            time: facts.time.to_owned(),
            statement: facts.statement.to_owned(),
            not_priced: facts.not_priced.iter().map(|&text| text.to_owned()).collect(),
            scale: asked.scale,
            repeat: asked.repeat,
            seed: asked.seed,
            jobs: asked.jobs,
            wall_seconds: asked.wall_seconds,
        },
        host: Host { lab: facts.machine, guest_kernel: facts.guest_kernel, ..asked.host.clone() },
        subjects: asked
            .subjects
            .iter()
            .enumerate()
            .map(|(index, subject)| SubjectInfo {
                name: subject.name.clone(),
                template: subject.template.clone(),
                version: ledger
                    .taken
                    .iter()
                    .find(|taken| taken.task.subject == index && !taken.version.is_empty())
                    .map(|taken| taken.version.clone()),
            })
            .collect(),
        results,
        exits,
        notes,
    }
}

/// A line for each backend of suite `net` that both monitors were measured with: how many times QEMU's rates.
fn beside_qemu(rows: &[Row]) -> Vec<String> {
    let line = |backend: &str| {
        let (ours, theirs) = (format!("tare-{backend}"), format!("qemu-{backend}"));
        let parts: Vec<String> = rows
            .iter()
            .filter(|row| row.better == Better::Higher && row.metric != "events")
            .filter_map(|row| {
                let ratio = row.median.get(&ours)? / row.median.get(&theirs)?;
                Some(format!("{} {ratio:.2}", row.workload))
            })
            .collect();
        (!parts.is_empty()).then(|| format!("{ours} over {theirs}: {}.", parts.join(", ")))
    };
    ["user", "tap", "vhost"].into_iter().filter_map(line).collect()
}

fn notes(asked: &Asked, ledger: &Ledger, counted: bool) -> Vec<String> {
    let mut notes = asked.notes.clone();
    let scaled = (asked.scale - 1.0).abs() > f64::EPSILON;
    if scaled && asked.suite.starts_with("fileio") {
        notes.push(format!(
            "Scale {}: each region of the disk is {0} of the full 512 MiB, and what is written in proportion.",
            asked.scale
        ));
    } else if scaled && asked.suite.starts_with("net") {
        notes.push(format!("Scale {}: of the full 2 GiB each way, 20,000 and 4,000 transactions.", asked.scale));
    } else if scaled && asked.suite.starts_with("irq-load") {
        notes.push(format!("Scale {}: of the full 40,000 small blocks, 40,000 and 8,000 transactions.", asked.scale));
    } else if scaled && asked.suite.starts_with("passthrough") {
        notes.push(format!(
            "Scale {}: of the full 256 MiB that are written and verified, and go each way.",
            asked.scale
        ));
    } else if scaled && asked.suite.starts_with("interrupts") {
        notes.push(format!("Scale {}: of the full 20,000 interrupts.", asked.scale));
    } else if scaled && asked.suite != "boot" {
        notes.push(format!(
            "Scale {}: times and sizes of the tax suite are {} of the full ones (10 s, 2 GiB, 1 GiB of files, 50,000 locks), \
             and a run that is limited by time also ends after a number of events in proportion.",
            asked.scale, asked.scale
        ));
    }
    if asked.repeat == 1 {
        notes.push("One sample of each: there is no spread to judge a difference by.".to_owned());
    }
    for (index, subject) in asked.subjects.iter().enumerate() {
        let failed: Vec<_> = ledger.failures.iter().filter(|failure| failure.task.subject == index).collect();
        if let Some(last) = failed.last() {
            let lost = failed.iter().filter(|failure| failure.task.tries + 1 >= TRIES).count();
            let outcome = match lost {
                0 => "all were repeated with success".to_owned(),
                n => format!("{n} of its samples are missing after {TRIES} tries"),
            };
            notes.push(format!(
                "{}: {} failed sample{}, {outcome}. The last: {} ({}).",
                subject.name,
                failed.len(),
                if failed.len() == 1 { "" } else { "s" },
                last.error,
                asked.bundles[last.task.bundle].name,
            ));
        }
    }
    for (bundle, why) in &ledger.skipped {
        notes.push(format!("'{}' was left out: {why}.", asked.bundles[*bundle].name));
    }
    if ledger.left_out > 0 {
        notes.push(format!(
            "{} samples were left out because the time budget was spent; each figure has at least one.",
            ledger.left_out
        ));
    }
    if ledger.failures.is_empty() {
        notes.push("No sample failed.".to_owned());
    }
    if counted {
        let list: Vec<String> = KINDS.iter().map(|kind| format!("{} {} ns", kind.name, kind.ns)).collect();
        notes.push(format!("Exits are priced with assumed costs on a 3 GHz server core: {}.", list.join(", ")));
    }
    notes
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use crate::report::Figure;
    use crate::scenario;
    use crate::schedule::{Failure, Taken, Task};
    use crate::subject::parse_list;

    /// A report with figures of the size the real ones have; also what the exporters are tested with.
    pub(crate) fn made_up() -> Report {
        let bundles = scenario::suite("all", 0.1).unwrap();
        let subjects = parse_list(&["native,qemu,tare"]).unwrap();
        let mut ledger = Ledger::default();
        for (subject, factor, exit_factor) in [(0, 1.0, 0), (1, 0.4, 10), (2, 0.98, 1)] {
            for round in 0..3 {
                let wobble = 1.0 + f64::from(round) * 0.001;
                for (bundle, what) in bundles.iter().enumerate() {
                    if !what.fits(&subjects[subject]) {
                        continue;
                    }
                    let task = Task { bundle, subject, round, tries: 0 };
                    let rate = |value: f64| Figure::new("rate", "1/s", Better::Higher, value * factor * wobble);
                    let time =
                        |value: f64| Figure::new("time to user space", "s", Better::Lower, value / factor * wobble);
                    let names = workloads(std::slice::from_ref(what));
                    let figures = names.iter().map(|name| {
                        let name: &'static str = Box::leak(name.clone().into_boxed_str());
                        (
                            name,
                            if name.contains("mutex") || name.contains("boot") { time(1.95) } else { rate(12_345.6) },
                        )
                    });
                    let exits = names.iter().filter(|_| exit_factor > 0).map(|name| {
                        let name: &'static str = Box::leak(name.clone().into_boxed_str());
                        let kinds =
                            [("pio", 3900 * exit_factor), ("page fault", 600), ("other", 700), ("interrupt", 650)];
                        let by_kind: BTreeMap<String, u64> = kinds.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect();
                        (name, Exits::priced(by_kind.values().sum(), by_kind))
                    });
                    let version = if subject == 1 { "QEMU emulator version 7.2.22" } else { "" }.to_owned();
                    ledger.taken.push(Taken { task, figures: figures.collect(), exits: exits.collect(), version });
                }
            }
        }
        let task = Task { bundle: 1, subject: 1, round: 0, tries: 0 };
        ledger
            .failures
            .push(Failure { task, error: "the guest never said 'end rndrw' (stopped by the watchdog)".into() });
        let asked = Asked {
            suite: "all",
            bundles: &bundles,
            subjects: &subjects,
            scale: 0.1,
            repeat: 3,
            seed: 7,
            jobs: 2,
            wall_seconds: 432.1,
            host: Host {
                cpu: "Some CPU <5>".into(),
                cpus: 2,
                memory_mib: 8192,
                kernel: "6.1".into(),
                ..Host::default()
            },
            notes: Vec::new(),
        };
        let facts = Facts {
            place: "lab",
            time: "virtual nanoseconds, one per instruction",
            statement: "Made up for tests.",
            not_priced: &["cache misses", "TLB misses"],
            machine: Some("L1: Linux 6.1, 1 CPU".into()),
            guest_kernel: Some("6.1.0-cloud".into()),
            alone: true,
        };
        report(asked, facts, &ledger)
    }

    #[test]
    fn the_report_follows_the_suite_and_counts_failures() {
        let report = made_up();
        assert_eq!(
            report.workloads(),
            [
                "cpu",
                "memory",
                "mutex",
                "threads",
                "fileio prepare",
                "fileio rndrw",
                "fileio rndrw direct",
                "boot",
                "boot quiet",
                "boot untested"
            ]
        );
        let cpu = report.row("cpu", "rate").unwrap();
        assert!((cpu.tax["qemu"] - 0.6).abs() < 1e-9 && (cpu.tax["tare"] - 0.02).abs() < 1e-9);
        assert!(report.headline("boot").unwrap().tax.is_empty());
        assert_eq!(report.exits["qemu"]["cpu"].by_kind["pio"], 39_000);
        assert!(!report.exits.contains_key("native"));
        assert_eq!(report.subjects[1].version.as_deref(), Some("QEMU emulator version 7.2.22"));
        assert_eq!(report.subjects[0].version, None);
        let notes = report.notes.join("\n");
        assert!(notes.contains("qemu: 1 failed sample, all were repeated with success"), "{notes}");
        assert!(notes.contains("Scale 0.1") && notes.contains("pio 2300 ns"), "{notes}");
    }
}
