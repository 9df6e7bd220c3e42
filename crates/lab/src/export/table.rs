// SPDX-License-Identifier: Apache-2.0
//! The report as plain text for a terminal or a log.

use std::fmt::Write as _;

use super::{count, number, summary, tax};
use crate::price::KINDS;
use crate::report::Report;

/// The whole text.
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    let method = &report.method;
    let _ =
        writeln!(out, "suite {} in {} ({}), {} samples each", report.suite, method.place, method.time, method.repeat);
    out.push('\n');
    figures(report, &mut out);
    exits(report, &mut out);
    let _ = writeln!(out, "Method: {}", method.statement);
    for item in &method.not_priced {
        let _ = writeln!(out, "Not priced: {item}.");
    }
    for note in &report.notes {
        let _ = writeln!(out, "Note: {note}");
    }
    out
}

fn figures(report: &Report, out: &mut String) {
    let mut lines: Vec<Vec<String>> = Vec::new();
    let mut head = vec!["workload".to_owned(), "figure".to_owned(), "unit".to_owned()];
    for subject in &report.subjects {
        head.push(subject.name.clone());
        if !subject.template.is_empty() && report.results.iter().any(|row| row.tax.contains_key(&subject.name)) {
            head.push("tax".to_owned());
        }
    }
    lines.push(head.clone());
    let mut last = "";
    for row in summary(report) {
        let workload = if row.workload == last { "" } else { row.workload.as_str() };
        let mut line = vec![workload.to_owned(), row.metric.clone(), row.unit.clone()];
        last = &row.workload;
        for subject in &report.subjects {
            line.push(row.median.get(&subject.name).map_or("-".to_owned(), |value| number(*value)));
            if head.get(line.len()).is_some_and(|name| name == "tax") {
                line.push(tax(row, &subject.name));
            }
        }
        lines.push(line);
    }
    aligned(&lines, 3, out);
}

fn exits(report: &Report, out: &mut String) {
    if report.exits.is_empty() {
        return;
    }
    let mut head = vec!["exits in".to_owned(), "subject".to_owned(), "total".to_owned()];
    head.extend(KINDS.iter().map(|kind| kind.name.to_owned()));
    head.push("on hardware, ms".to_owned());
    let mut lines = vec![head];
    for workload in report.workloads() {
        for subject in &report.subjects {
            let Some(exits) = report.exits.get(&subject.name).and_then(|by| by.get(workload)) else { continue };
            let mut line = vec![workload.to_owned(), subject.name.clone(), count(exits.total)];
            line.extend(KINDS.iter().map(|kind| count(exits.by_kind.get(kind.name).copied().unwrap_or(0))));
            line.push(number(exits.priced_ms));
            lines.push(line);
        }
    }
    aligned(&lines, 2, out);
}

/// Pads columns: the first `left` ones to the left, the rest to the right.
fn aligned(lines: &[Vec<String>], left: usize, out: &mut String) {
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    for (i, line) in lines.iter().enumerate() {
        let mut text = String::new();
        for (column, cell) in line.iter().enumerate() {
            let width = widths[column];
            let _ = if column < left { write!(text, "{cell:<width$}  ") } else { write!(text, "{cell:>width$}  ") };
        }
        out.push_str(text.trim_end());
        out.push('\n');
        if i == 0 {
            let rule: usize = widths.iter().map(|width| width + 2).sum::<usize>().saturating_sub(2);
            out.push_str(&"-".repeat(rule));
            out.push('\n');
        }
    }
    out.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assemble::tests::made_up;

    #[test]
    fn the_table_has_a_row_for_each_workload_with_taxes() {
        let text = text(&made_up());
        let cpu = text.lines().find(|line| line.starts_with("cpu")).unwrap_or_default();
        let cells: Vec<&str> = cpu.split_whitespace().collect();
        assert_eq!(cells, ["cpu", "rate", "1/s", "12,358", "4,943", "60.0", "%", "12,111", "2.0", "%"]);
        let boot = text.lines().find(|line| line.starts_with("boot quiet")).unwrap_or_default();
        assert!(boot.contains(" - "), "no native, no tax: {boot}");
        assert!(text.contains("Not priced: cache misses."));
        assert!(text.contains("Note: qemu: 1 failed sample"));
    }

    #[test]
    fn columns_line_up() {
        let mut out = String::new();
        aligned(&[vec!["a".into(), "bb".into()], vec!["ccc".into(), "d".into()]], 1, &mut out);
        assert_eq!(out, "a    bb\n-------\nccc   d\n\n");
    }
}
