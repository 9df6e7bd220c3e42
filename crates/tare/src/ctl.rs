// SPDX-License-Identifier: Apache-2.0
//! `tare ctl`: asks a machine that runs for something, through the socket of its `--api`. One command, one exit code.

use std::io::{self, Write};
use std::path::PathBuf;

use lexopt::{Arg, Parser};
use spec::{Command, FromText, Iommu, RemoveDevice, Reply, ResizeDisk, ResizeMemory, Vfio, parse_size};

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
  add-device --vfio ADDRESS[,iommu=WAY]
                                      gives the guest a device of the host, bound to vfio-pci
  remove-device --vfio ADDRESS [--timeout SECONDS] [--force]
                                      asks the guest to let go of it (10 s, at most 100); with
                                      --force takes it away then, whatever its driver does

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

/// What was typed beside the socket.
#[derive(Default)]
struct Typed {
    name: Option<String>,
    disk: Option<String>,
    size: Option<u64>,
    vfio: Option<Vfio>,
    timeout: Option<u8>,
    force: bool,
}

/// Reads its flags and its command, in any order.
///
/// # Errors
/// [`Failure`] with exit code 2.
pub fn parse(args: &mut Parser) -> Result<Asked<Ctl>, Failure> {
    let (mut socket, mut typed) = (None, Typed::default());
    while let Some(arg) = args.next().map_err(lexed)? {
        match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(Asked::Help),
            Arg::Long("api") => once(&mut socket, "--api", PathBuf::from(args.value().map_err(lexed)?))?,
            Arg::Long("disk") => once(&mut typed.disk, "--disk", text_of("--disk", "name", args)?)?,
            Arg::Long("size") => {
                once(&mut typed.size, "--size", parse_size("--size", &text_of("--size", "name", args)?)?)?;
            }
            Arg::Long("vfio") => {
                once(&mut typed.vfio, "--vfio", Vfio::from_text(&text_of("--vfio", "address", args)?)?)?;
            }
            Arg::Long("timeout") => {
                let text = text_of("--timeout", "number", args)?;
                let seconds = text.parse().ok().filter(|seconds| (1..=100).contains(seconds));
                let bad = || Failure::usage(format!("`{text}` is no number of seconds: --timeout; give 1 to 100"));
                once(&mut typed.timeout, "--timeout", seconds.ok_or_else(bad)?)?;
            }
            Arg::Long("force") => typed.force = true,
            Arg::Value(value) => once(&mut typed.name, "a command", value.to_string_lossy().into_owned())?,
            other => {
                let what = other.unexpected();
                return Err(Failure::usage(format!("{what}: command line; see `tare ctl --help`")));
            }
        }
    }
    let command = command(typed)?;
    let socket = socket.ok_or_else(|| missing("no --api SOCKET"))?;
    Ok(Asked::Do(Ctl { socket, command }))
}

fn missing(what: &str) -> Failure {
    Failure::usage(format!("{what}: command line; see `tare ctl --help`"))
}

/// The command that was typed, with what it takes and nothing else.
fn command(typed: Typed) -> Result<Command, Failure> {
    let Typed { name, disk, size, vfio, timeout, force } = typed;
    let patience = timeout.unwrap_or(RemoveDevice::patience());
    let plain = timeout.is_none() && !force;
    Ok(match (name.as_deref(), disk, size, vfio) {
        (Some("info"), None, None, None) if plain => Command::Info,
        (Some("resize-disk"), Some(id), Some(desired_size), None) if plain => {
            Command::ResizeDisk(ResizeDisk { id, desired_size })
        }
        (Some("resize-memory"), None, Some(desired_size), None) if plain => {
            Command::ResizeMemory(ResizeMemory { desired_size })
        }
        (Some("add-device"), None, None, Some(vfio)) if plain => Command::AddDevice(vfio),
        (Some("remove-device"), None, None, Some(Vfio { host, iommu: Iommu::Auto })) => {
            Command::RemoveDevice(RemoveDevice { host, timeout: patience, force })
        }
        (Some("resize-memory"), ..) => return Err(missing("resize-memory needs --size SIZE and no --disk")),
        (Some("info"), ..) => return Err(missing("info takes no --disk and no --size")),
        (Some("resize-disk"), ..) => return Err(missing("resize-disk needs --disk ID and --size SIZE")),
        (Some("add-device"), ..) => return Err(missing("add-device needs --vfio ADDRESS and nothing else")),
        (Some("remove-device"), ..) => return Err(missing("remove-device needs --vfio ADDRESS")),
        (Some(other), ..) => return Err(missing(&format!("unknown command `{other}`"))),
        (None, ..) => return Err(missing("no command")),
    })
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
        let host = "0000:01:00.0".parse().unwrap();
        let does = |args: &[&str]| match asked(args) {
            Ok(Asked::Do(ctl)) => ctl.command,
            other => panic!("{other:?}"),
        };
        assert_eq!(
            does(&["add-device", "--vfio", "01:00.0", "--api=s"]),
            Command::AddDevice(Vfio { host, iommu: Iommu::Auto })
        );
        let container = Command::AddDevice(Vfio { host, iommu: Iommu::Container });
        assert_eq!(does(&["add-device", "--vfio", "01:00.0,iommu=container", "--api=s"]), container);
        let remove = |timeout, force| Command::RemoveDevice(RemoveDevice { host, timeout, force });
        assert_eq!(does(&["--api=s", "remove-device", "--vfio", "01:00.0"]), remove(10, false));
        assert_eq!(does(&["--api=s", "remove-device", "--force", "--timeout=3", "--vfio=01:00.0"]), remove(3, true));
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
        assert!(says(&["--api", "s", "add-device"]).starts_with("add-device needs --vfio ADDRESS"));
        assert!(says(&["add-device", "--vfio", "1:0.0", "--force"]).starts_with("add-device needs --vfio ADDRESS"));
        assert!(says(&["remove-device", "--force"]).starts_with("remove-device needs --vfio ADDRESS"));
        let way = ["remove-device", "--vfio", "1:0.0,iommu=iommufd"];
        assert!(says(&way).starts_with("remove-device needs --vfio ADDRESS"));
        assert_eq!(says(&["--timeout", "0"]), "`0` is no number of seconds: --timeout; give 1 to 100");
        assert!(says(&["add-device", "--vfio", "nvme0"]).starts_with("`nvme0` is not a PCI address: vfio; "));
        assert!(
            says(&["--api", "s", "resize-disk", "--disk", "d", "--size", "big"])
                .contains("`big` is not a size: --size")
        );
        assert_eq!(says(&["info", "info"]), "a command is given twice: command line; give it once");
        assert!(says(&["--frob"]).ends_with("see `tare ctl --help`"));
    }
}
