// SPDX-License-Identifier: Apache-2.0
//! Ways out for a report: a table for the terminal, JSON, a self-contained HTML page. They only print, they compute nothing
//! that `stats` and `price` have not.

pub mod html;
pub mod json;
pub mod plot;
pub mod table;

use crate::report::{Report, Row};

/// A number with about four significant digits and thousands separators.
pub fn number(value: f64) -> String {
    let size = value.abs();
    let decimals = match size {
        s if s >= 1000.0 || s == 0.0 => 0,
        s if s >= 100.0 => 1,
        s if s >= 10.0 => 2,
        s if s >= 0.1 => 3,
        _ => 4,
    };
    let text = format!("{size:.decimals$}");
    let (whole, fraction) = text.split_once('.').map_or((text.as_str(), ""), |(whole, fraction)| (whole, fraction));
    let whole = whole.parse().map_or(whole.to_owned(), count);
    let sign = if value < 0.0 { "-" } else { "" };
    if fraction.is_empty() || value.fract() == 0.0 {
        format!("{sign}{whole}")
    } else {
        format!("{sign}{whole}.{fraction}")
    }
}

/// A count with thousands separators.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The tax of a subject in words: "12.3 %", "no difference", or "-" where there is none.
pub fn tax(row: &Row, subject: &str) -> String {
    match row.tax.get(subject) {
        None => "-".to_owned(),
        Some(_) if row.no_difference.iter().any(|name| name == subject) => "no difference".to_owned(),
        Some(tax) => format!("{:.1} %", tax * 100.0),
    }
}

/// The rows of the summary: the headline of each workload and the figures that explain it.
pub fn summary(report: &Report) -> Vec<&Row> {
    const TOO_MUCH: &[&str] = &["events", "total time", "latency p95", "operations per second", "guest memory touched"];
    let wanted = |row: &&Row| {
        report.headline(&row.workload) == Some(*row)
            || !(TOO_MUCH.contains(&row.metric.as_str()) || row.metric.starts_with("exits: "))
    };
    report.results.iter().filter(wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assemble::tests::made_up;

    #[test]
    fn numbers_read_well() {
        for (value, text) in [
            (0.0, "0"),
            (1234.5, "1,234"),
            (1_234_567.0, "1,234,567"),
            (123.45, "123.5"),
            (12.345, "12.35"),
            (1.954, "1.954"),
            (0.0123, "0.0123"),
            (-45678.0, "-45,678"),
            (999.99, "1,000.0"),
            (100.0, "100"),
        ] {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn a_difference_that_is_none_is_not_printed_as_one() {
        let mut report = made_up();
        assert_eq!(tax(&report.results[0], "qemu"), "60.0 %");
        assert_eq!(tax(&report.results[0], "native"), "-");
        report.results[0].no_difference.push("qemu".into());
        assert_eq!(tax(&report.results[0], "qemu"), "no difference");
    }
}
