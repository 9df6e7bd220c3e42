// SPDX-License-Identifier: Apache-2.0
//! `report.json`: `{suite, method, host, subjects, results, exits, notes}`, with every raw sample.

use std::path::Path;

use anyhow::{Context, Result};

use crate::report::Report;

/// The text of the file.
pub fn text(report: &Report) -> Result<String> {
    Ok(serde_json::to_string_pretty(report)? + "\n")
}

/// Writes the file, and its directory when there is none.
pub fn write(report: &Report, path: &Path) -> Result<()> {
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent).with_context(|| format!("can't make {}", parent.display()))?;
    }
    std::fs::write(path, text(report)?).with_context(|| format!("can't write {}", path.display()))
}

/// Reads a file back.
pub fn read(path: &Path) -> Result<Report> {
    let text = std::fs::read_to_string(path).with_context(|| format!("can't read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is not a report of tare-lab", path.display()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::assemble::tests::made_up;

    #[test]
    fn the_layout_is_the_promised_one() {
        let json: serde_json::Value = serde_json::from_str(&text(&made_up()).unwrap()).unwrap();
        let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&json), ["exits", "host", "method", "notes", "results", "subjects", "suite"]);
        let cpu = &json["results"][0];
        for key in ["workload", "metric", "unit", "better", "samples", "median", "spread", "tax"] {
            assert!(cpu.get(key).is_some(), "{key}");
        }
        assert_eq!(cpu["workload"], "cpu");
        assert_eq!(cpu["better"], "higher");
        assert_eq!(cpu["samples"]["native"].as_array().unwrap().len(), 3);
        assert!((cpu["tax"]["tare"].as_f64().unwrap() - 0.02).abs() < 1e-9);
        assert_eq!(json["exits"]["tare"]["boot"]["by_kind"]["pio"], 3900);
    }

    #[test]
    fn a_report_reads_back_as_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/report.json");
        let report = made_up();
        write(&report, &path).unwrap();
        assert_eq!(read(&path).unwrap(), report);
    }
}
