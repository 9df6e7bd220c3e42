// SPDX-License-Identifier: Apache-2.0
//! Reads fio's terse output, version 3: one line of fields divided by semicolons for each job.
//!
//! As with sysbench, nothing here judges: a figure that is not in the text is an error, because a sample without its
//! figure has failed. Called by `scenario`.

use anyhow::{Context, Result, bail};

use crate::report::{Better, Figure};

/// Where reads begin in a line, and where writes do. Both have the same fields in the same order.
const READS: usize = 5;
const WRITES: usize = 46;
/// From there: operations a second, run time in ms, mean time of a request in microseconds.
const RATE: usize = 2;
const RUNTIME: usize = 3;
const MEAN: usize = 34;

/// One direction of a job.
struct Side {
    rate: f64,
    seconds: f64,
    mean_ms: f64,
}

/// The figures of a job's output, the headline first: of writes if it wrote, and of reads if it read.
pub fn figures(text: &str) -> Result<Vec<Figure>> {
    let line = text.lines().find(|line| line.starts_with("3;fio-"));
    let line = line.with_context(|| match text.lines().find(|line| line.starts_with("fio:")) {
        Some(said) => format!("fio failed: {said}"),
        None => "no line of results in fio's output".to_owned(),
    })?;
    let fields: Vec<&str> = line.trim_end().split(';').collect();
    if fields.get(4) != Some(&"0") {
        bail!("fio failed with error {}", fields.get(4).unwrap_or(&"unknown"));
    }
    let (reads, writes) = (side(&fields, READS)?, side(&fields, WRITES)?);
    let mut out = Vec::new();
    for (name, side) in [("writes", &writes), ("reads", &reads)] {
        if side.seconds > 0.0 {
            out.push(Figure::new(&format!("{name} per second"), "1/s", Better::Higher, side.rate));
        }
    }
    if out.is_empty() {
        bail!("fio moved nothing");
    }
    for (name, side) in [("a write", &writes), ("a read", &reads)] {
        if side.seconds > 0.0 {
            out.push(Figure::new(&format!("mean time of {name}"), "ms", Better::Lower, side.mean_ms));
        }
    }
    let events = [reads, writes].iter().map(|side| side.rate * side.seconds).sum::<f64>().round();
    out.push(Figure::new("events", "", Better::Higher, events));
    Ok(out)
}

fn side(fields: &[&str], at: usize) -> Result<Side> {
    let number = |index: usize| -> Result<f64> {
        let text = fields.get(at + index).context("fio's line of results is cut short")?;
        let value: f64 = text.parse().with_context(|| format!("'{text}' in fio's line of results is no number"))?;
        if value.is_finite() { Ok(value) } else { bail!("'{text}' in fio's line of results is no number") }
    };
    Ok(Side { rate: number(RATE)?, seconds: number(RUNTIME)? / 1000.0, mean_ms: number(MEAN)? / 1000.0 })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn get(text: &str, metric: &str) -> f64 {
        figures(text).unwrap().into_iter().find(|f| f.metric == metric).unwrap().value
    }

    #[test]
    fn a_job_that_reads_and_writes_has_figures_of_both() {
        let text = include_str!("testdata/fio-randrw.txt");
        assert_eq!(figures(text).unwrap()[0].metric, "writes per second");
        assert_eq!(get(text, "writes per second"), 4747.0);
        assert_eq!(get(text, "reads per second"), 4477.0);
        assert_eq!(get(text, "mean time of a write"), 1.636_927_343);
        assert_eq!(get(text, "mean time of a read"), 0.047_238_961);
        // 4747 and 4477 a second for 222 ms.
        assert_eq!(get(text, "events"), 2048.0);
    }

    #[test]
    fn a_job_that_only_writes_has_none_of_reads() {
        let text = include_str!("testdata/fio-write.txt");
        assert_eq!(get(text, "writes per second"), 11_377.0);
        assert!(figures(text).unwrap().iter().all(|figure| !figure.metric.contains("read")));
        assert_eq!(get(&format!("{}\r\n", text.trim_end()), "events"), 2048.0);
    }

    #[test]
    fn output_without_results_is_an_error() {
        let says = |text: &str| figures(text).unwrap_err().to_string();
        let text = include_str!("testdata/fio-write.txt");
        assert!(says("fio: failed opening /dev/vdb\n").contains("failed opening"));
        assert!(says("").contains("no line of results"));
        assert!(says(&text[..200]).contains("cut short"));
        assert!(says(&text.replacen(";0;0;", ";0;5;", 1)).contains("error 5"));
        assert!(says(&text.replacen(";45511;11377;", ";45511;nan;", 1)).contains("no number"));
    }
}
