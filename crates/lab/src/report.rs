// SPDX-License-Identifier: Apache-2.0
//! What a run of the scale has found: the structs behind `report.json`, and how they are made from samples.
//!
//! Filled by `main` from the scheduler's ledger, read by everything in `export/`. Plain data, no judging of good or bad:
//! the arithmetic is in `stats` and `price`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::price::Exits;
use crate::stats::{self, Spread};

/// Which direction is good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// A rate.
    Higher,
    /// A time or an amount.
    Lower,
}

/// One number of one sample.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// What it is: "events per second".
    pub metric: String,
    /// Unit, empty for a plain count.
    pub unit: &'static str,
    /// Which direction is good.
    pub better: Better,
    /// The value in `unit`.
    pub value: f64,
}

impl Figure {
    /// A figure.
    pub fn new(metric: &str, unit: &'static str, better: Better, value: f64) -> Self {
        Self { metric: metric.to_owned(), unit, better, value }
    }
}

/// One figure across all subjects.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// "cpu", "fileio rndrw", "boot".
    pub workload: String,
    /// See [`Figure::metric`].
    pub metric: String,
    /// See [`Figure::unit`].
    pub unit: String,
    /// See [`Figure::better`].
    pub better: Better,
    /// Raw values in the order they were taken, by subject.
    pub samples: BTreeMap<String, Vec<f64>>,
    /// Median by subject.
    pub median: BTreeMap<String, f64>,
    /// Spread by subject.
    pub spread: BTreeMap<String, Spread>,
    /// Against native: `1 - rate/native` or `time/native - 1`; absent where there is no native.
    pub tax: BTreeMap<String, f64>,
    /// Subjects whose samples can't be told from native's.
    pub no_difference: Vec<String>,
}

/// How the figures were taken.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Method {
    /// "lab" or "direct".
    pub place: String,
    /// What kind of time the figures are in.
    pub time: String,
    /// The method in a few sentences.
    pub statement: String,
    /// What the method does not price.
    pub not_priced: Vec<String>,
    /// `--scale`.
    pub scale: f64,
    /// `--repeat`.
    pub repeat: u32,
    /// Seed of the mixed order.
    pub seed: u64,
    /// Samples run at the same time.
    pub jobs: usize,
    /// Wall time of the run, seconds.
    pub wall_seconds: f64,
}

/// Where the figures were taken.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// CPU model.
    pub cpu: String,
    /// CPUs.
    pub cpus: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Kernel release of the outer host.
    pub kernel: String,
    /// The machine the subjects ran on, when it is not the host itself.
    pub lab: Option<String>,
    /// Kernel release of the guests.
    pub guest_kernel: Option<String>,
}

/// A subject as it was run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SubjectInfo {
    /// The key in all tables.
    pub name: String,
    /// The command template; empty for native.
    pub template: String,
    /// What the program says of its version.
    pub version: Option<String>,
}

/// Everything a run has found; the layout of `report.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The suite's name.
    pub suite: String,
    /// How.
    pub method: Method,
    /// Where.
    pub host: Host,
    /// Who, in table order.
    pub subjects: Vec<SubjectInfo>,
    /// What.
    pub results: Vec<Row>,
    /// VM exits by subject and workload, one sample's worth (median), and their price on hardware.
    pub exits: BTreeMap<String, BTreeMap<String, Exits>>,
    /// What a reader must know: scale, failed samples, missing subjects.
    pub notes: Vec<String>,
}

impl Report {
    /// The row of one figure.
    #[cfg(test)]
    pub fn row(&self, workload: &str, metric: &str) -> Option<&Row> {
        self.results.iter().find(|row| row.workload == workload && row.metric == metric)
    }

    /// Workloads in the order of their first row.
    pub fn workloads(&self) -> Vec<&str> {
        let mut out: Vec<&str> = Vec::new();
        for row in &self.results {
            if !out.contains(&row.workload.as_str()) {
                out.push(&row.workload);
            }
        }
        out
    }

    /// The first row of a workload: the figure it is known by.
    pub fn headline(&self, workload: &str) -> Option<&Row> {
        self.results.iter().find(|row| row.workload == workload)
    }
}

/// Collects figures into rows, keeping the order in which figures were first seen.
#[derive(Debug, Default)]
pub struct Rows {
    rows: Vec<Row>,
}

impl Rows {
    /// Adds one figure of one sample.
    pub fn add(&mut self, workload: &str, subject: &str, figure: &Figure) {
        let at = self.rows.iter().position(|row| row.workload == workload && row.metric == figure.metric);
        let at = at.unwrap_or_else(|| {
            self.rows.push(Row {
                workload: workload.to_owned(),
                metric: figure.metric.clone(),
                unit: figure.unit.to_owned(),
                better: figure.better,
                samples: BTreeMap::new(),
                median: BTreeMap::new(),
                spread: BTreeMap::new(),
                tax: BTreeMap::new(),
                no_difference: Vec::new(),
            });
            self.rows.len() - 1
        });
        self.rows[at].samples.entry(subject.to_owned()).or_default().push(figure.value);
    }

    /// Computes medians, spreads and taxes. `order` names the workloads in table order.
    pub fn finish(mut self, order: &[String], native: &str) -> Vec<Row> {
        for row in &mut self.rows {
            for (subject, samples) in &row.samples {
                row.median.insert(subject.clone(), stats::median(samples));
                row.spread.insert(subject.clone(), Spread::of(samples));
            }
            let Some(base) = row.samples.get(native) else { continue };
            for (subject, samples) in row.samples.iter().filter(|(subject, _)| *subject != native) {
                if let Some(tax) = stats::tax(base, samples, row.better) {
                    row.tax.insert(subject.clone(), tax);
                }
                if stats::no_difference(base, samples) {
                    row.no_difference.push(subject.clone());
                }
            }
        }
        self.rows.sort_by_key(|row| order.iter().position(|name| *name == row.workload).unwrap_or(usize::MAX));
        self.rows
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn rows_keep_raw_samples_and_compute_the_tax() {
        let mut rows = Rows::default();
        for value in [100.0, 102.0, 98.0] {
            rows.add("cpu", "native", &Figure::new("rate", "1/s", Better::Higher, value));
        }
        for value in [50.0, 51.0] {
            rows.add("cpu", "qemu", &Figure::new("rate", "1/s", Better::Higher, value));
        }
        rows.add("cpu", "tare", &Figure::new("rate", "1/s", Better::Higher, 99.0));
        rows.add("boot", "tare", &Figure::new("time", "s", Better::Lower, 2.0));
        let rows = rows.finish(&["boot".into(), "cpu".into()], "native");
        assert_eq!(rows[0].workload, "boot");
        assert!(rows[0].tax.is_empty(), "no native, no tax");
        let cpu = &rows[1];
        assert_eq!(cpu.samples["native"], [100.0, 102.0, 98.0]);
        assert_eq!(cpu.median["qemu"], 50.5);
        assert!((cpu.tax["qemu"] - 0.495).abs() < 1e-12);
        assert_eq!(cpu.no_difference, ["tare"]);
    }
}
