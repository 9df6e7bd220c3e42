// SPDX-License-Identifier: Apache-2.0
//! `tare img`: disk images on the command line, with the words, the output and the exit codes of `qemu-img`.
//!
//! Each command is one file: it reads its options from [`args::Options`], does its work on the calling thread (and
//! those it starts), and gives back an exit code. Called by `main`; nothing here knows a VM.

mod args;
mod bench;
mod bitmap;
mod check;
mod commit;
mod compare;
mod convert;
mod copy;
mod create;
mod image;
mod info;
mod interrupt;
mod map;
mod pack;
mod progress;
mod pump;
mod rebase;
mod resize;
mod serve;
mod snapshot;

use std::io::{self, Write};
use std::process::ExitCode;

use lexopt::{Arg, Parser};

use crate::exit::complain;
use args::{Options, Refusal};

/// One command.
struct Command {
    name: &'static str,
    /// One line for the overview.
    what: &'static str,
    /// What `--help` prints.
    help: &'static str,
    /// Does it. The code is the process's.
    run: fn(&mut Options<'_>) -> Result<u8, Refusal>,
}

const fn command_of(
    name: &'static str,
    what: &'static str,
    help: &'static str,
    run: fn(&mut Options<'_>) -> Result<u8, Refusal>,
) -> Command {
    Command { name, what, help, run }
}

const COMMANDS: &[Command] = &[
    command_of("bench", "time requests on an image", bench::HELP, bench::run),
    command_of("bitmap", "make, change and remove persistent dirty bitmaps", bitmap::HELP, bitmap::run),
    command_of("check", "check an image, repair it", check::HELP, check::run),
    command_of("commit", "write an image into its backing file", commit::HELP, commit::run),
    command_of("compare", "say whether two images hold the same", compare::HELP, compare::run),
    command_of("convert", "copy an image into a new one", convert::HELP, convert::run),
    command_of("create", "make an image", create::HELP, create::run),
    command_of("info", "say what an image is", info::HELP, info::run),
    command_of("map", "list where an image's data lies", map::HELP, map::run),
    command_of("rebase", "put an image on another backing file", rebase::HELP, rebase::run),
    command_of("resize", "make an image longer or shorter", resize::HELP, resize::run),
    command_of("serve", "give an image to other programs: NBD, vhost-user-blk", serve::HELP, serve::run),
    command_of("snapshot", "take, list, apply and delete internal snapshots", snapshot::HELP, snapshot::run),
];

/// Runs `tare img` with what follows on the command line.
pub fn command(args: &mut Parser) -> ExitCode {
    match dispatch(args) {
        Ok(code) => code.into(),
        Err(refusal) => {
            complain(&refusal.message);
            refusal.code.into()
        }
    }
}

fn dispatch(args: &mut Parser) -> Result<u8, Refusal> {
    let name = match args.next().map_err(args::lexed)? {
        None => return Err(Refusal::new("no command: tare img; `tare img --help` lists them")),
        Some(Arg::Long("help") | Arg::Short('h')) => return Ok(show(&overview())),
        Some(Arg::Value(name)) => name,
        Some(other) => {
            return Err(Refusal::new(format!("unknown flag {}: tare img; a command comes first", args::name(&other))));
        }
    };
    let Some(command) = COMMANDS.iter().find(|c| name == c.name) else {
        let names: Vec<_> = COMMANDS.iter().map(|c| c.name).collect();
        return Err(Refusal::new(format!(
            "unknown command `{}`: tare img; the commands are {}",
            name.to_string_lossy(),
            names.join(", ")
        )));
    };
    let mut options = Options::new(args, command.name);
    match (command.run)(&mut options) {
        Err(refusal) if refusal.help => Ok(show(command.help)),
        other => other,
    }
}

/// Prints on standard output; a reader that left early is no error.
fn show(text: &str) -> u8 {
    let _ = io::stdout().write_all(text.as_bytes());
    0
}

fn overview() -> String {
    let list: String = COMMANDS.iter().map(|c| format!("  {:<10}{}\n", c.name, c.what)).collect();
    format!(
        "usage: tare img COMMAND [options] FILE...\n\n{list}\n\
         `tare img COMMAND --help` says more. Options and output are those of qemu-img.\n\
         --backing=GATE, where a command has it: which other files an image may name: those in\n\
         its own folder and below (folder, what happens without it), any, none, or these:\n\
         PATH:PATH..., with a slash in each.\n\
         --key=FILE, where a command has it: a file with the passphrase of an encrypted image and\n\
         nothing else. For images below it give it again, from the top down; the last one opens\n\
         the rest.\n\n\
         exit codes: 0 done; 1 failed, with one line that says why; what else a command\n\
         has to say is in its --help\n"
    )
}
