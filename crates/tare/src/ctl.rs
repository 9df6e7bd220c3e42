// SPDX-License-Identifier: Apache-2.0
//! `tare ctl`: asks a machine that runs for something, through the socket of its `--api`. One command, one exit code.

use std::io::{self, Write};
use std::path::PathBuf;

use lexopt::{Arg, Parser};
use spec::{Command, Reply, ResizeDisk, ResizeMemory, parse_size};

use crate::exit::{Exit, Failure};
use crate::flags::{Asked, lexed, once, text_of};

/// `tare ctl --help`.
pub const HELP: &str = "usage: tare ctl --api SOCKET COMMAND

Asks a machine that was started with `tare run --api SOCKET`.

commands:
  info                                what the machine is, and its disks, as JSON
  resize-disk --disk ID --size SIZE   makes a disk larger, with K, M, G or T; ID is as in info
  resize-memory --size SIZE           tells the guest to have so much memory in all; it needs
                                      --memory SIZE,hotplug=SIZE; info says what it has

exit codes:
  0  it is done
  2  the command can't be used, or the machine refuses it
  3  no machine answers
";

/// What `tare ctl` is to do.
#[derive(Debug, PartialEq, Eq)]
pub struct Ctl {
    socket: PathBuf,
    command: Command,
}

/// Reads its flags and its command, in any order.
///
/// # Errors
/// [`Failure`] with exit code 2.
pub fn parse(args: &mut Parser) -> Result<Asked<Ctl>, Failure> {
    let (mut socket, mut disk, mut size, mut name) = (None, None, None, None);
    while let Some(arg) = args.next().map_err(lexed)? {
        match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(Asked::Help),
            Arg::Long("api") => once(&mut socket, "--api", PathBuf::from(args.value().map_err(lexed)?))?,
            Arg::Long("disk") => once(&mut disk, "--disk", text_of("--disk", "name", args)?)?,
            Arg::Long("size") => once(&mut size, "--size", parse_size("--size", &text_of("--size", "name", args)?)?)?,
            Arg::Value(value) => once(&mut name, "a command", value.to_string_lossy().into_owned())?,
            other => {
                let what = other.unexpected();
                return Err(Failure::usage(format!("{what}: command line; see `tare ctl --help`")));
            }
        }
    }
    let missing = |what: &str| Failure::usage(format!("{what}: command line; see `tare ctl --help`"));
    let command = match (name.as_deref(), disk, size) {
        (Some("info"), None, None) => Command::Info,
        (Some("resize-disk"), Some(id), Some(desired_size)) => Command::ResizeDisk(ResizeDisk { id, desired_size }),
        (Some("resize-memory"), None, Some(desired_size)) => Command::ResizeMemory(ResizeMemory { desired_size }),
        (Some("resize-memory"), ..) => return Err(missing("resize-memory needs --size SIZE and no --disk")),
        (Some("info"), ..) => return Err(missing("info takes no --disk and no --size")),
        (Some("resize-disk"), ..) => return Err(missing("resize-disk needs --disk ID and --size SIZE")),
        (Some(other), ..) => return Err(missing(&format!("unknown command `{other}`"))),
        (None, ..) => return Err(missing("no command")),
    };
    let socket = socket.ok_or_else(|| missing("no --api SOCKET"))?;
    Ok(Asked::Do(Ctl { socket, command }))
}

/// Asks, and prints what comes back.
///
/// # Errors
/// [`Failure`]: what the machine refuses has exit code 2, a machine that does not answer 3.
pub fn run(ctl: &Ctl) -> Result<Exit, Failure> {
    match api::call(&ctl.socket, &ctl.command).map_err(Failure::monitor)? {
        Reply::Done => Ok(Exit::Clean),
        Reply::Refused(line) => Err(Failure::usage(line)),
        Reply::Info(info) => {
            let mut json = serde_json::to_vec_pretty(&info)
                .map_err(|e| Failure::monitor(format!("info can't be written, {e}: JSON; please report this line")))?;
            json.push(b'\n');
            // A reader that left early is no error.
            let _ = io::stdout().write_all(&json);
            Ok(Exit::Clean)
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn asked(args: &[&str]) -> Result<Asked<Ctl>, Failure> {
        parse(&mut Parser::from_args(args))
    }

    #[test]
    fn flags_and_command_come_in_any_order() {
        let resize = Command::ResizeDisk(ResizeDisk { id: "disk0".into(), desired_size: 2 << 30 });
        for args in [
            ["--api", "s", "resize-disk", "--disk", "disk0", "--size", "2G"],
            ["resize-disk", "--size", "2048M", "--disk", "disk0", "--api", "s"],
        ] {
            assert_eq!(asked(&args), Ok(Asked::Do(Ctl { socket: "s".into(), command: resize.clone() })));
        }
        let memory = Command::ResizeMemory(ResizeMemory { desired_size: 3 << 30 });
        assert_eq!(
            asked(&["resize-memory", "--size=3G", "--api", "s"]),
            Ok(Asked::Do(Ctl { socket: "s".into(), command: memory }))
        );
        assert_eq!(asked(&["info", "--api=s"]), Ok(Asked::Do(Ctl { socket: "s".into(), command: Command::Info })));
        assert_eq!(asked(&["-h"]), Ok(Asked::Help));
    }

    #[test]
    fn complaints_say_what_and_where() {
        let says = |args: &[&str]| asked(args).unwrap_err().message;
        assert_eq!(says(&["info"]), "no --api SOCKET: command line; see `tare ctl --help`");
        assert_eq!(says(&["--api", "s"]), "no command: command line; see `tare ctl --help`");
        assert_eq!(says(&["--api", "s", "stop"]), "unknown command `stop`: command line; see `tare ctl --help`");
        assert!(says(&["--api", "s", "resize-disk", "--size", "1G"]).starts_with("resize-disk needs --disk ID"));
        assert!(says(&["--api", "s", "resize-memory"]).starts_with("resize-memory needs --size"));
        assert!(says(&["--api", "s", "info", "--size", "1G"]).starts_with("info takes no --disk"));
        assert!(
            says(&["--api", "s", "resize-disk", "--disk", "d", "--size", "big"])
                .contains("`big` is not a size: --size")
        );
        assert_eq!(says(&["info", "info"]), "a command is given twice: command line; give it once");
        assert!(says(&["--frob"]).ends_with("see `tare ctl --help`"));
    }
}
