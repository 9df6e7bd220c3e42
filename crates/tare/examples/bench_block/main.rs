// SPDX-License-Identifier: Apache-2.0
//! `make bench-block`: tare's disk engine beside QEMU's, in turn in one run, on one file system, as ratios.
//!
//! `bench_block [--dir DIR] [--pairs N] [--size MIB] [--scale X] [--aio io_uring|threads] [--json FILE] [--only TEXT] [--tare FILE]
//! [--imago FILE]`
//! runs each case as pairs (one run by QEMU, one by tare, the order changing from pair to pair) and prints medians: rate,
//! tare's rate over QEMU's, processor time of one operation, and its ratio; then which promised ratios were missed, and how allocated clusters compare
//! with the raw file. Cases through the page cache have a third run, by tare with `aio=auto`, its default. With `--imago` (the program in peers/imago) each turn has a third run, through the imago crate. A case that fails is a line that says so, and
//! exit code 1.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cases;
mod images;
mod measure;
mod serve;

use std::path::PathBuf;
use std::process::ExitCode;

use cases::Case;
use images::Folder;
use measure::{Cost, Figures, Side};

/// What the run was told.
pub struct Asked {
    dir: PathBuf,
    pairs: usize,
    /// Bytes of the images.
    pub size: u64,
    /// Multiplies the number of requests.
    pub scale: f64,
    /// `-i` of both programs.
    pub aio: String,
    json: Option<PathBuf>,
    only: Option<String>,
    /// The program under test.
    pub tare: PathBuf,
    /// The program that uses the imago crate.
    pub imago: Option<PathBuf>,
}

fn asked() -> Result<Asked, String> {
    let mut asked = Asked {
        dir: std::env::temp_dir(),
        pairs: 5,
        size: 1 << 30,
        scale: 1.0,
        aio: "io_uring".into(),
        json: None,
        only: None,
        tare: "target/release/tare".into(),
        imago: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or(format!("{name} has no value"))?;
        let number = || value.parse::<f64>().map_err(|_| format!("{name}: `{value}` is no number"));
        match name.as_str() {
            "--dir" => asked.dir = value.into(),
            "--pairs" => asked.pairs = (number()? as usize).max(1),
            "--size" => asked.size = ((number()? as u64) << 20).next_power_of_two(),
            "--scale" => asked.scale = number()?,
            "--aio" => asked.aio = value,
            "--json" => asked.json = Some(value.into()),
            "--only" => asked.only = Some(value),
            "--tare" => asked.tare = value.into(),
            "--imago" => asked.imago = Some(value.into()),
            _ => return Err(format!("{name} is no option of this benchmark")),
        }
    }
    Ok(asked)
}

/// One line of the result.
struct Row {
    case: Case,
    outcome: Result<Figures, String>,
}

/// Runs both sides in turn and keeps the pairs.
fn take(case: &Case, asked: &Asked, folder: &Folder) -> Result<Figures, String> {
    let (mut pairs, mut imago, mut auto) = (Vec::new(), Vec::new(), Vec::new());
    for pair in 0..asked.pairs {
        let mut costs: [Option<Cost>; 2] = [None, None];
        let order = if pair % 2 == 0 { [Side::Qemu, Side::Tare] } else { [Side::Tare, Side::Qemu] };
        for side in order {
            costs[side as usize] = Some(case.run(side, asked, folder)?);
        }
        if let [Some(qemu), Some(tare)] = costs {
            pairs.push((qemu, tare));
        }
        if let Some(cost) = case.run_auto(asked, folder) {
            auto.push(cost?);
        }
        if let Some(cost) = case.run_imago(asked, folder) {
            imago.push(cost?);
        }
    }
    Ok(Figures::of(&pairs, &imago, &auto))
}

fn main() -> ExitCode {
    let asked = match asked() {
        Ok(asked) => asked,
        Err(message) => {
            eprintln!("bench-block: {message}");
            return ExitCode::from(2);
        }
    };
    let folder = match Folder::new(&asked) {
        Ok(folder) => folder,
        Err(message) => {
            eprintln!("bench-block: {message}");
            return ExitCode::from(2);
        }
    };
    println!(
        "{:<44}{:>12}{:>12}{:>8}{:>10}{:>10}{:>8}",
        "case", "QEMU /s", "tare /s", "ratio", "QEMU us", "tare us", "ratio"
    );
    let mut rows = Vec::new();
    for case in cases::all(&asked) {
        if asked.only.as_ref().is_some_and(|text| !case.name().contains(text.as_str())) {
            continue;
        }
        let row = Row { outcome: take(&case, &asked, &folder), case };
        println!("{}", row.line());
        rows.push(row);
    }
    println!(
        "\nMedians of {} pairs, aio={}; a ratio is tare over QEMU (rate: more is better, processor time of one \
         operation: less is better).\nauto: tare with aio=auto, which serves the page cache with plain calls, over QEMU with aio={}.\nConvert and check count bytes of the image by the MiB.",
        asked.pairs, asked.aio, asked.aio
    );
    judge(&rows);
    if let Some(path) = &asked.json {
        let all: Vec<_> = rows.iter().map(Row::json).collect();
        let text = serde_json::json!({ "aio": asked.aio, "pairs": asked.pairs, "size": asked.size, "cases": all });
        if let Err(e) = std::fs::write(path, format!("{text:#}\n")) {
            eprintln!("bench-block: cannot write {}: {e}", path.display());
            return ExitCode::FAILURE;
        }
    }
    if rows.iter().any(|row| row.outcome.is_err()) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Says which promised ratios were missed.
fn judge(rows: &[Row]) {
    let rate = |row: &Row| row.outcome.as_ref().map(|f| f.rate_ratio).unwrap_or(0.0);
    for row in rows.iter().filter(|row| rate(row) < row.case.target()) {
        let auto = row.outcome.as_ref().ok().and_then(|f| f.auto);
        let auto = auto.map(|rate| format!(" (aio=auto: {rate:.2})")).unwrap_or_default();
        println!("missed: {:<44} {:.2}{auto}, promised {:.1}", row.case.name(), rate(row), row.case.target());
    }
    let tare = |row: &Row| row.outcome.as_ref().map(|f| f.tare.rate).unwrap_or(0.0);
    for row in rows {
        let raw = row.case.on_raw().and_then(|name| rows.iter().find(|r| r.case.name() == name));
        if let Some(raw) = raw.filter(|raw| tare(raw) > 0.0) {
            let (ratio, name) = (tare(row) / tare(raw), row.case.name());
            println!(
                "{}: {name:<44} {ratio:.2} of the raw file, promised 0.9",
                if ratio < 0.9 { "missed" } else { "kept" }
            );
        }
    }
}

impl Row {
    fn line(&self) -> String {
        let name = self.case.name();
        match &self.outcome {
            Ok(f) => {
                let auto = f.auto.map(|rate| format!("   auto {rate:.2}")).unwrap_or_default();
                let beside = f.imago.map(|(rate, cpu)| format!("   over imago {rate:.2}, time {cpu:.2}"));
                format!(
                    "{name:<44}{:>12.0}{:>12.0}{:>8.2}{:>10.1}{:>10.1}{:>8.2}{auto}{}",
                    f.qemu.rate,
                    f.tare.rate,
                    f.rate_ratio,
                    f.qemu.cpu,
                    f.tare.cpu,
                    f.cpu_ratio,
                    beside.unwrap_or_default()
                )
            }
            Err(why) => format!("{name:<44}  failed: {why}"),
        }
    }

    fn json(&self) -> serde_json::Value {
        let name = self.case.name();
        match &self.outcome {
            Ok(f) => serde_json::json!({
                "case": name,
                "qemu": { "per-second": f.qemu.rate, "cpu-us": f.qemu.cpu },
                "tare": { "per-second": f.tare.rate, "cpu-us": f.tare.cpu },
                "ratio": f.rate_ratio,
                "ratios": f.ratios,
                "ratio-with-auto": f.auto,
                "cpu-ratio": f.cpu_ratio,
                "promised": self.case.target(),
                "over-imago": f.imago.map(|(rate, cpu)| serde_json::json!({ "ratio": rate, "cpu-ratio": cpu })),
            }),
            Err(why) => serde_json::json!({ "case": name, "failed": why }),
        }
    }
}
