// SPDX-License-Identifier: Apache-2.0
//! `tare-lab`, the scale: what was typed becomes a plan, the plan is run in a place, and what comes home becomes a report.
//!
//! Measuring (`schedule`, `sample`, `place`), arithmetic (`stats`, `price`) and printing (`export`) never mix.

mod assemble;
mod export;
mod facts;
mod fio;
mod flags;
// Some of it serves other callers than this program, such as tests.
#[allow(dead_code)]
mod host;
mod interrupt;
mod place;
mod price;
mod progress;
mod report;
mod sample;
mod scenario;
mod schedule;
mod stats;
mod subject;
mod sysbench;
mod traffic;

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;

use flags::{Command, Flags, PlaceFlag};
use host::qemu::Mode;
use place::Place;
use subject::Subject;

fn main() -> ExitCode {
    let flags = Flags::parse();
    let outcome = match flags.command {
        Command::Run(flags) => {
            interrupt::install();
            run(&flags)
        }
        Command::Host(verb) => host::cli::run(verb).map(ExitCode::from),
        Command::List => {
            list();
            Ok(ExitCode::SUCCESS)
        }
        Command::Show(flags) => show(&flags),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("tare-lab: {error:#}");
            ExitCode::from(if interrupt::asked() { 130 } else { 1 })
        }
    }
}

/// `tare-lab run`.
fn run(flags: &flags::Run) -> Result<ExitCode> {
    let bundles = scenario::suite(&flags.suite, flags.scale)?;
    let subjects = match &flags.subjects[..] {
        [] => subject::parse_list(&[scenario::subjects(&flags.suite)])?,
        said => subject::parse_list(said)?,
    };
    if let Some(bundle) = bundles.iter().find(|bundle| !subjects.iter().any(|subject| bundle.fits(subject))) {
        anyhow::bail!("none of the subjects can run '{}': --subjects; see 'tare-lab list'", bundle.name);
    }
    let tare = if subjects.iter().any(|subject| subject.wants("tare")) {
        Some(facts::tare(flags.tare.as_deref())?)
    } else {
        facts::tare(flags.tare.as_deref()).ok()
    };
    let place = choose(flags.place, scenario::machine(&flags.suite), tare.as_deref())?;
    let jobs = place.lanes().min(flags.jobs as usize);
    if let Some(dir) = &flags.keep {
        std::fs::create_dir_all(dir).with_context(|| format!("can't make {}", dir.display()))?;
    }
    let budget = flags.budget.map(|minutes| Duration::try_from_secs_f64(minutes * 60.0)).transpose();
    let plan = schedule::Plan {
        bundles: &bundles,
        subjects: &subjects,
        repeat: flags.repeat,
        seed: flags.seed,
        jobs,
        budget: budget.context("--budget takes minutes, 0 or more")?,
        keep: flags.keep.as_deref(),
    };
    let start = Instant::now();
    let progress = progress::Progress::new(plan.tasks().len(), &bundles, &subjects);
    let ledger = plan.run(place.as_ref(), &|news| progress.tell(&news));
    progress.finish();
    let ledger = ledger?;
    let asked = assemble::Asked {
        suite: &flags.suite,
        bundles: &bundles,
        subjects: &subjects,
        scale: flags.scale,
        repeat: flags.repeat,
        seed: flags.seed,
        jobs,
        wall_seconds: start.elapsed().as_secs_f64(),
        host: facts::host(),
        notes: Vec::new(),
    };
    let report = assemble::report(asked, place.facts(), &ledger);
    print!("{}", export::table::text(&report));
    if let Some(path) = &flags.json {
        export::json::write(&report, path)?;
        println!("JSON: {}", path.display());
    }
    if let Some(dir) = &flags.html {
        export::html::write(&report, dir)?;
        println!("Page: {}", dir.join("index.html").display());
    }
    let missing = ledger.failures.iter().any(|failure| failure.task.tries + 1 >= schedule::TRIES);
    Ok(if missing { ExitCode::from(2) } else { ExitCode::SUCCESS })
}

/// The place that was asked for, or the one that fits this host.
fn choose(flag: PlaceFlag, mode: Mode, tare: Option<&Path>) -> Result<Box<dyn Place>> {
    let making = progress::Making::new();
    let say = |step: &str, done: Option<f64>| making.tell(step, done);
    let direct = match flag {
        // Nobody's own devices are taken from them to be measured.
        PlaceFlag::Direct if mode == Mode::Passthrough => {
            anyhow::bail!("suite passthrough runs in the lab machine, which has devices to hand on: --place lab")
        }
        _ if mode == Mode::Passthrough => false,
        PlaceFlag::Direct => true,
        PlaceFlag::Lab => false,
        PlaceFlag::Auto => tare.is_some_and(facts::hardware_kvm),
    };
    if !direct {
        return Ok(Box::new(place::lab::Lab::open(mode, tare, &say)?));
    }
    Ok(Box::new(place::direct::Direct::open(tare, &say)?))
}

/// `tare-lab list`.
fn list() {
    println!("Suites:");
    for (name, about) in scenario::SUITES {
        println!("  {name:<18}{about}");
    }
    println!("\nSubjects:");
    for (name, about, template) in subject::BUILT_IN {
        let program = Subject::parse(name).ok().and_then(|subject| subject.program().map(str::to_owned));
        let there = match program.as_deref() {
            None => "",
            Some("{tare}") if facts::tare(None).is_ok() => "",
            Some(program) if facts::installed(program) => "",
            Some(_) => "  [not installed here]",
        };
        println!("  {name:<18}{about}{there}");
        if !template.is_empty() {
            println!("  {:<18}  {}", "", template.replace('\n', "\\n"));
        }
    }
    println!(
        "\nAny other monitor: NAME=COMMAND TEMPLATE, with these variables; a [group] without its value is left out:"
    );
    for (name, about) in subject::VARIABLES {
        println!("  {:<18}{about}", format!("{{{name}}}"));
    }
}

/// `tare-lab show`.
fn show(flags: &flags::Show) -> Result<ExitCode> {
    let report = export::json::read(&flags.json)?;
    match &flags.html {
        Some(dir) => {
            export::html::write(&report, dir)?;
            println!("Page: {}", dir.join("index.html").display());
        }
        None => print!("{}", export::table::text(&report)),
    }
    Ok(ExitCode::SUCCESS)
}
