// SPDX-License-Identifier: Apache-2.0
//! The command line of the monitor: `tare run` starts a machine, `tare ctl` asks one that runs, `tare img` works on disk
//! images, `tare doctor` looks at the host.
//!
//! The walk: `flags` (what was typed) → `meaning` (what it means) → `run` → `machine`. Failures come back as one line and
//! an exit code, see `exit`.

mod ctl;
mod doctor;
mod exit;
mod files;
mod flags;
mod img;
mod meaning;
mod memory_pool;
mod passthrough;
mod profile;
mod run;
mod terminal;
mod vmm;

use std::io::{self, Write};
use std::process::ExitCode;

use exit::{Exit, Failure, complain};
use flags::Asked;
use lexopt::{Arg, Parser};
use meaning::Meant;

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(die_of_panic));
    let mut args = Parser::from_env();
    let exit = match command(&mut args) {
        Ok(Done::Exit(exit)) => exit,
        Ok(Done::Images) => return img::command(&mut args),
        Err(failure) => {
            complain(&failure.message);
            failure.exit
        }
    };
    exit.into()
}

/// How far `command` came.
enum Done {
    /// To the end.
    Exit(Exit),
    /// To `tare img`, which has commands and exit codes of its own.
    Images,
}

fn command(args: &mut Parser) -> Result<Done, Failure> {
    let first = args.next().map_err(flags::lexed)?;
    let name = match first {
        None => return Err(Failure::usage("no command: command line; try `tare run --kernel FILE`, or `tare --help`")),
        Some(Arg::Long("help") | Arg::Short('h')) => return Ok(Done::Exit(show(&overview()))),
        Some(Arg::Long("version") | Arg::Short('V')) => {
            return Ok(Done::Exit(show(&format!("tare v{}\n", env!("CARGO_PKG_VERSION")))));
        }
        Some(Arg::Value(name)) => name,
        Some(other) => {
            let flag = match other {
                Arg::Long(name) => format!("--{name}"),
                Arg::Short(c) => format!("-{c}"),
                Arg::Value(_) => String::new(),
            };
            return Err(Failure::usage(format!("unknown flag {flag}: command line; did you mean `tare run {flag}`?")));
        }
    };
    let exit = match name.to_str() {
        Some("run") => match flags::parse_run(args)? {
            Asked::Help => show(&run_help()),
            Asked::Do(typed) => run::run(&Meant::new(typed)?)?,
        },
        Some("boot") => match flags::parse_run(args)? {
            Asked::Help => show(&run_help()),
            Asked::Do(mut typed) => {
                typed.on_reset.get_or_insert(flags::OnReset::Exit);
                run::run(&Meant::new(typed)?)?
            }
        },
        Some("img") => return Ok(Done::Images),
        Some("memory-pool") => match memory_pool::parse(args)? {
            Asked::Help => show(memory_pool::HELP),
            Asked::Do(asked) => memory_pool::run(&asked)?,
        },
        Some("ctl") => match ctl::parse(args)? {
            Asked::Help => show(ctl::HELP),
            Asked::Do(asked) => ctl::run(&asked)?,
        },
        Some("doctor") => match doctor::parse(args)? {
            Asked::Help => show(doctor::HELP),
            Asked::Do(asked) => doctor::run(&asked)?,
        },
        Some("passthrough") => match passthrough::parse(args)? {
            Asked::Help => show(passthrough::HELP),
            Asked::Do(asked) => passthrough::run(&asked)?,
        },
        Some("profile") => match profile::parse(args)? {
            Asked::Help => show(profile::HELP),
            Asked::Do(asked) => profile::run(asked)?,
        },
        Some("help") => show(&overview()),
        _ => {
            let what = format!("unknown command `{}`: command line", name.to_string_lossy());
            return Err(Failure::usage(format!(
                "{what}; the commands are run, boot, ctl, img, memory-pool, passthrough, profile and doctor"
            )));
        }
    };
    Ok(Done::Exit(exit))
}

/// Prints on standard output; a reader that left early is no error.
fn show(text: &str) -> Exit {
    let _ = io::stdout().write_all(text.as_bytes());
    Exit::Clean
}

fn overview() -> String {
    format!(
        "tare v{}: a microVM monitor that shows what virtualization weighs\n\n\
         usage:\n\
         \x20 tare run --kernel FILE [--disk FILE] [--cpus N] [--memory SIZE] ...   run a machine\n\
         \x20 tare boot --explain --kernel FILE ...                               the same, once; the boot as a timeline\n\
         \x20 tare profile --out FILE -- run ...                                    where its time goes, as a flame graph\n\
         \x20 tare ctl --api SOCKET COMMAND ...                                   ask a machine that runs\n\
         \x20 tare img COMMAND [options] FILE...                                  work on disk images\n\
         \x20 tare memory-pool --socket SOCKET --size SIZE                          keep memory ready for machines\n\
         \x20 tare passthrough list|bind|unbind                                   devices of this host for --vfio\n\
         \x20 tare doctor [--json]                                                look at this host\n\
         \x20 tare --version\n\n\
         `tare run --help`, `tare ctl --help`, `tare img --help` and `tare doctor --help` say more.\n\n{}",
        env!("CARGO_PKG_VERSION"),
        exit_help()
    )
}

fn run_help() -> String {
    format!(
        "usage: tare run --kernel FILE [flags]\n\n\
         Boots a Linux kernel and connects it to this terminal until it powers off.\n\n{}\n\
         keys in a terminal: Ctrl-A x quits, Ctrl-A Ctrl-A sends one Ctrl-A, Ctrl-A h helps\n\
         signals: SIGTERM asks the guest to power off, a second one kills it\n\
         resets: the machine starts again; three resets, each within 30 s of a start, end it\n\n{}",
        flags::help(),
        exit_help()
    )
}

fn exit_help() -> String {
    let codes = Exit::ALL.iter().map(|(exit, what)| format!("  {}  {what}\n", exit.code()));
    format!(
        "exit codes:\n{}with --debug-exit the guest's own: twice what it writes to the port, plus 1\n",
        codes.collect::<String>()
    )
}

/// A panic is a bug of ours. It still gives the terminal back, says one line and has its code.
fn die_of_panic(info: &std::panic::PanicHookInfo<'_>) {
    terminal::restore();
    let payload = info.payload();
    let text = payload.downcast_ref::<&str>().copied();
    let what = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic");
    let place = info.location().map_or_else(|| "unknown place".to_owned(), ToString::to_string);
    complain(&format!("internal error, {what}: {place}; please report this line"));
    std::process::exit(Exit::Monitor.code().into());
}
