// SPDX-License-Identifier: Apache-2.0
//! `make bench-block`: tare's disk engine beside QEMU's, in turn in one run, on one file system, as ratios.
//!
//! Each case is run in turns, once by each side, another side first in each turn, and the medians are printed: rate, tare's
//! rate over QEMU's, processor time of one operation, and its ratio. Cases through the page cache have a run by tare with
//! `aio=auto`, its default, too; served ones one by `qemu-storage-daemon`; with `--imago` those that the crate has one by
//! it. Then: which promised ratios were missed, and how allocated clusters compare with the raw file. A case that fails is a
//! line that says so, and exit code 1. The options are those of [`HELP`].
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cases;
mod images;
mod measure;
mod report;
mod serve;
mod sides;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cases::Case;
use images::Folder;
use measure::{Figures, SIDES, Turn};
use report::Row;

const HELP: &str = "\
usage: bench_block [--quick] [--dir DIR] [--pairs N] [--size MIB] [--whole MIB] [--scale X] [--budget SECONDS]
                   [--aio io_uring|threads] [--json FILE] [--only TEXT] [--tare FILE] [--imago FILE]

  --quick           the whole table in five minutes: --size 256 --whole 512 --scale 0.25 --pairs 3 --budget 270
  --dir DIR         where the images are [the folder for temporary files]
  --pairs N         turns of each case [5]
  --size MIB        of the images, made a power of two [1024]
  --whole MIB       of those that are converted and checked [4096]
  --scale X         multiplies the number of requests [1]
  --budget SECONDS  fewer turns where these are not enough, but one of each case
  --aio AIO         -i of both programs [io_uring]
  --json FILE       all figures
  --only TEXT       cases with TEXT in their names
  --tare FILE       the program under test [target/release/tare]
  --imago FILE      the program in peers/imago, built there by `cargo build --release`
";

/// What the run was told.
pub struct Asked {
    dir: PathBuf,
    pairs: usize,
    /// Bytes of the images.
    pub size: u64,
    /// Bytes of those that are converted and checked.
    pub whole: u64,
    /// Multiplies the number of requests.
    pub scale: f64,
    budget: Option<Duration>,
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
        whole: 4 << 30,
        scale: 1.0,
        budget: None,
        aio: "io_uring".into(),
        json: None,
        only: None,
        tare: "target/release/tare".into(),
        imago: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        if name == "--quick" {
            (asked.size, asked.whole, asked.scale, asked.pairs) = (256 << 20, 512 << 20, 0.25, 3);
            asked.budget = Some(Duration::from_secs(270));
            continue;
        }
        let value = arguments.next().ok_or(format!("{name} is no option, or has no value\n{HELP}"))?;
        let number = || value.parse::<f64>().map_err(|_| format!("{name}: `{value}` is no number"));
        match name.as_str() {
            "--dir" => asked.dir = value.into(),
            "--pairs" => asked.pairs = (number()? as usize).max(1),
            "--size" => asked.size = ((number()? as u64).max(16) << 20).next_power_of_two(),
            "--whole" => asked.whole = (number()? as u64).max(16) << 20,
            "--scale" => asked.scale = number()?,
            "--budget" => asked.budget = Some(Duration::from_secs(number()? as u64)),
            "--aio" => asked.aio = value,
            "--json" => asked.json = Some(value.into()),
            "--only" => asked.only = Some(value),
            "--tare" => asked.tare = value.into(),
            "--imago" => asked.imago = Some(value.into()),
            _ => return Err(format!("{name} is no option of this benchmark\n{HELP}")),
        }
    }
    Ok(asked)
}

/// Runs all sides in turn, until there are enough turns or `enough` says that there is no time for another.
fn take(case: &Case, asked: &Asked, folder: &Folder, enough: impl Fn() -> bool) -> Result<Figures, String> {
    let mut sides = case.sides(asked);
    let mut turns: Vec<Turn> = Vec::new();
    while turns.len() < asked.pairs && (turns.is_empty() || !enough()) {
        let mut turn: Turn = [None; SIDES];
        for side in &sides {
            turn[*side as usize] = Some(case.run(*side, asked, folder)?);
        }
        turns.push(turn);
        sides.rotate_left(1);
    }
    Figures::of(&turns).ok_or_else(|| "no run of both sides".into())
}

fn run(asked: &Asked) -> Result<Vec<Row>, String> {
    let start = Instant::now();
    let mut folder = Folder::new(&asked.dir, asked.size)?;
    let cases: Vec<Case> = cases::all(asked)
        .into_iter()
        .filter(|case| asked.only.as_ref().is_none_or(|text| case.name().contains(text.as_str())))
        .collect();
    println!("{}", report::head());
    let mut rows = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        if case.whole() && folder.size != asked.whole {
            drop(folder);
            folder = Folder::new(&asked.dir, asked.whole)?;
        }
        let share = asked.budget.map(|all| all.mul_f64((i + 1) as f64 / cases.len() as f64));
        let outcome = take(case, asked, &folder, || share.is_some_and(|until| start.elapsed() > until));
        let row = Row { case: *case, outcome };
        println!("{}", row.line());
        rows.push(row);
    }
    Ok(rows)
}

fn main() -> ExitCode {
    let rows = match asked().and_then(|asked| run(&asked).map(|rows| (asked, rows))) {
        Ok((asked, rows)) => {
            println!("\n{}", report::legend(asked.pairs, &asked.aio));
            report::judge(&rows);
            if let Some(path) = &asked.json {
                let all: Vec<_> = rows.iter().map(Row::json).collect();
                let text = serde_json::json!({
                    "aio": asked.aio, "pairs": asked.pairs, "size": asked.size, "whole": asked.whole, "cases": all,
                });
                if let Err(e) = std::fs::write(path, format!("{text:#}\n")) {
                    eprintln!("bench-block: cannot write {}: {e}", path.display());
                    return ExitCode::FAILURE;
                }
            }
            rows
        }
        Err(message) => {
            eprintln!("bench-block: {message}");
            return ExitCode::from(2);
        }
    };
    if rows.iter().any(|row| row.outcome.is_err()) { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
