// SPDX-License-Identifier: Apache-2.0
//! The table: a line and a JSON object for each case, and what was promised and missed.

use serde_json::{Value, json};

use crate::cases::Case;
use crate::measure::{Figures, Ratio};

/// Clusters that are all allocated are promised this much of the raw file's rate.
const OF_RAW: f64 = 0.9;

/// One line of the result.
pub struct Row {
    pub case: Case,
    pub outcome: Result<Figures, String>,
}

/// The columns' names.
pub fn head() -> String {
    format!(
        "{:<50}{:>10}{:>10}{:>7}{:>9}{:>9}{:>7}",
        "case", "QEMU /s", "tare /s", "ratio", "QEMU us", "tare us", "ratio"
    )
}

/// What the columns mean.
pub fn legend(pairs: usize, aio: &str) -> String {
    format!(
        "Medians of at most {pairs} turns, aio={aio}; a ratio is tare over QEMU (rate: more is better; us, the processor time of\n\
         one operation, user and system, all threads, of a server the server's: less is better). Convert and check count bytes\n\
         of the image by the MiB. auto: tare with aio=auto, which serves the page cache with plain calls, over QEMU with\n\
         aio={aio}. imago, daemon: tare over the imago crate, over qemu-storage-daemon. cow=: tare over tare with cow=explicit."
    )
}

/// Says which promised ratios were missed.
pub fn judge(rows: &[Row]) {
    for row in rows {
        let Some(promised) = row.case.target() else { continue };
        let Ok(f) = &row.outcome else { continue };
        let all = [("", Some(&f.ratio)), (" over the daemon", f.daemon.as_ref())];
        for (beside, ratio) in all.into_iter().filter_map(|(name, r)| Some((name, r.filter(|r| r.rate < promised)?))) {
            let auto = f.auto.as_ref().map(|r| format!(" (aio=auto: {:.2})", r.rate)).unwrap_or_default();
            println!("missed: {:<50} {:.2}{beside}{auto}, promised {promised:.1}", row.case.name(), ratio.rate);
        }
    }
    let tare = |row: &Row| row.outcome.as_ref().map(|f| f.tare.rate).unwrap_or(0.0);
    for row in rows {
        let raw = row.case.on_raw().and_then(|name| rows.iter().find(|r| r.case.name() == name));
        if let Some(raw) = raw.filter(|raw| tare(raw) > 0.0) {
            let (ratio, name) = (tare(row) / tare(raw), row.case.name());
            let verdict = if ratio < OF_RAW { "missed" } else { "kept" };
            println!("{verdict}: {name:<50} {ratio:.2} of the raw file, promised {OF_RAW}");
        }
    }
}

fn shown(name: &str, ratio: Option<&Ratio>) -> String {
    ratio.map(|r| format!("  {name} {:.2}, us {:.2}", r.rate, r.cpu)).unwrap_or_default()
}

fn pair(ratio: Option<&Ratio>) -> Value {
    ratio.map_or(Value::Null, |r| json!({ "ratio": r.rate, "cpu-ratio": r.cpu, "ratios": r.all }))
}

impl Row {
    /// For the terminal.
    pub fn line(&self) -> String {
        let name = self.case.name();
        let f = match &self.outcome {
            Ok(f) => f,
            Err(why) => return format!("{name:<50}  failed: {why}"),
        };
        let beside = [
            shown("auto", f.auto.as_ref()),
            shown("imago", f.imago.as_ref()),
            shown("auto/imago", f.auto_imago.as_ref()),
            shown("daemon", f.daemon.as_ref()),
        ];
        format!(
            "{name:<50}{:>10.0}{:>10.0}{:>7.2}{:>9.1}{:>9.1}{:>7.2}{}",
            f.qemu.rate,
            f.tare.rate,
            f.ratio.rate,
            f.qemu.cpu,
            f.tare.cpu,
            f.ratio.cpu,
            beside.concat()
        )
    }

    /// For programs.
    pub fn json(&self) -> Value {
        let name = self.case.name();
        match &self.outcome {
            Ok(f) => json!({
                "case": name,
                "qemu": { "per-second": f.qemu.rate, "cpu-us": f.qemu.cpu },
                "tare": { "per-second": f.tare.rate, "cpu-us": f.tare.cpu },
                "ratio": f.ratio.rate,
                "ratios": f.ratio.all,
                "cpu-ratio": f.ratio.cpu,
                "promised": self.case.target(),
                "auto-over-qemu": pair(f.auto.as_ref()),
                "over-imago": pair(f.imago.as_ref()),
                "auto-over-imago": pair(f.auto_imago.as_ref()),
                "over-daemon": pair(f.daemon.as_ref()),
            }),
            Err(why) => json!({ "case": name, "failed": why }),
        }
    }
}
