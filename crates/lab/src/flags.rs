// SPDX-License-Identifier: Apache-2.0
//! The command line of `tare-lab`. What was typed, nothing more; `main` says what it means.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::host::cli::Verb;

/// The scale: runs one workload natively and under several monitors, side by side, and shows what is lost where.
#[derive(Debug, Parser)]
#[command(name = "tare-lab", version, arg_required_else_help = true)]
pub struct Flags {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Measure a suite: tax, boot, fileio, net, microvm or all
    Run(Run),
    /// The lab machine: the host that samples run on where there is no hardware KVM
    #[command(subcommand)]
    Host(Verb),
    /// Suites, built-in subjects and the variables of command templates
    List,
    /// Print the table, or write the page, of an earlier run's report.json
    Show(Show),
}

/// `tare-lab run`.
#[derive(Args, Debug)]
pub struct Run {
    /// Suite to run, or one part of it as SUITE/PART; see 'tare-lab list'
    pub suite: String,
    /// Who is measured: names from 'tare-lab list', or NAME=COMMAND TEMPLATE for any other monitor; may be given again
    /// [default: native,qemu,tare; for fileio and net every way to have its disk or wire]
    #[arg(long, value_name = "LIST")]
    pub subjects: Vec<String>,
    /// Shorten times and sizes in proportion, 0 < F <= 1
    #[arg(long, default_value_t = 1.0, value_name = "F", value_parser = scale)]
    pub scale: f64,
    /// Samples of each figure
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeat: u32,
    /// Write the report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the report as a web page, DIR/index.html
    #[arg(long, value_name = "DIR")]
    pub html: Option<PathBuf>,
    /// Samples at a time; only the lab, whose time is counted in instructions, runs more than one
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub jobs: u32,
    /// Start no further samples after this many minutes, once there is one of each
    #[arg(long, value_name = "MIN")]
    pub budget: Option<f64>,
    /// Keep what each sample reported, its console included
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,
    /// The tare binary [default: the one beside tare-lab]
    #[arg(long, value_name = "PATH")]
    pub tare: Option<PathBuf>,
    /// Where samples run
    #[arg(long, default_value = "auto", value_name = "PLACE")]
    pub place: PlaceFlag,
    /// Seed of the mixed order of samples
    #[arg(long, default_value_t = 20_260, value_name = "N")]
    pub seed: u64,
}

/// `--place`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum PlaceFlag {
    /// Directly where there is hardware KVM, else in the lab
    Auto,
    /// On this host
    Direct,
    /// In the lab machine
    Lab,
}

/// `tare-lab show`.
#[derive(Args, Debug)]
pub struct Show {
    /// A report.json
    pub json: PathBuf,
    /// Write the web page instead of printing the table
    #[arg(long, value_name = "DIR")]
    pub html: Option<PathBuf>,
}

fn scale(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value <= 1.0 => Ok(value),
        _ => Err("a scale is a number above 0, at most 1".to_owned()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn run(args: &[&str]) -> Result<Run, clap::Error> {
        let all = ["tare-lab", "run"].iter().chain(args);
        Flags::try_parse_from(all).map(|flags| match flags.command {
            Command::Run(run) => run,
            other => unreachable!("{other:?}"),
        })
    }

    #[test]
    fn defaults_and_limits() {
        let flags = run(&["tax"]).unwrap();
        assert_eq!((flags.suite.as_str(), flags.subjects.len()), ("tax", 0));
        assert_eq!((flags.scale, flags.repeat, flags.jobs), (1.0, 3, 2));
        for bad in [&["tax", "--scale", "0"][..], &["tax", "--scale", "2"], &["tax", "--repeat", "0"], &[]] {
            assert!(run(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn exec_takes_a_command_with_its_own_flags() {
        let flags = Flags::try_parse_from(["tare-lab", "host", "exec", "uname", "-a"]).unwrap();
        let Command::Host(Verb::Exec { command }) = flags.command else { unreachable!() };
        assert_eq!(command, ["uname", "-a"]);
    }

    #[test]
    fn the_parser_is_sound() {
        use clap::CommandFactory;
        Flags::command().debug_assert();
    }
}
