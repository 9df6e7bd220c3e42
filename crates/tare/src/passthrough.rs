// SPDX-License-Identifier: Apache-2.0
//! `tare passthrough`: which PCI devices the host has, in which groups, what stands in the way of handing them on; and who
//! their driver is. The walk: `parse` → `run` → `vfio::Sysfs`.

use std::fmt::Write as _;
use std::io::{self, Write as _};

use lexopt::{Arg, Parser};
use spec::{Iommu, PciAddress};
use vfio::{Described, Sysfs, VFIO_DRIVER};

use crate::exit::{Exit, Failure};
use crate::flags::{Asked, lexed};

/// `tare passthrough --help`.
pub const HELP: &str = "usage: tare passthrough COMMAND

Finds PCI devices of this host and makes them ready for `tare run --vfio ADDRESS`.

commands:
  list                       all devices, their groups, their drivers, and what stands in the way
  bind [--force] ADDRESS...  hands them to vfio-pci; --force: whatever uses them
  unbind ADDRESS...          gives them back to the host's own driver

bind and unbind take root. A device that can't be bound keeps the driver it had.

exit codes:
  0  it is done
  2  something stands in the way: it is named
";

/// What `tare passthrough` is to do.
#[derive(Debug, PartialEq, Eq)]
pub enum Passthrough {
    /// Show devices.
    List,
    /// Hand some to vfio-pci.
    Bind {
        /// Which.
        devices: Vec<PciAddress>,
        /// Whatever uses them.
        force: bool,
    },
    /// Give some back.
    Unbind(Vec<PciAddress>),
}

/// Reads its command, flags and addresses.
///
/// # Errors
/// [`Failure`] with exit code 2.
pub fn parse(args: &mut Parser) -> Result<Asked<Passthrough>, Failure> {
    let (mut name, mut devices, mut force) = (None, Vec::new(), false);
    while let Some(arg) = args.next().map_err(lexed)? {
        match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(Asked::Help),
            Arg::Long("force") => force = true,
            Arg::Value(value) if name.is_none() => name = Some(value.to_string_lossy().into_owned()),
            Arg::Value(value) => devices.push(value.to_string_lossy().parse::<PciAddress>()?),
            other => {
                let what = other.unexpected();
                return Err(Failure::usage(format!("{what}: command line; see `tare passthrough --help`")));
            }
        }
    }
    let wrong = |what: &str| Err(Failure::usage(format!("{what}: command line; see `tare passthrough --help`")));
    Ok(Asked::Do(match (name.as_deref(), devices.is_empty(), force) {
        (Some("list"), true, false) => Passthrough::List,
        (Some("list"), ..) => return wrong("list takes nothing more"),
        (Some("bind"), false, _) => Passthrough::Bind { devices, force },
        (Some("unbind"), false, false) => Passthrough::Unbind(devices),
        (Some("unbind"), _, true) => return wrong("unbind takes no --force"),
        (Some("bind" | "unbind"), true, _) => return wrong("no device is named"),
        (Some(other), ..) => return wrong(&format!("unknown command `{other}`")),
        (None, ..) => return wrong("no command"),
    }))
}

/// Does it.
///
/// # Errors
/// [`Failure`] with exit code 2: what stands in the way. Devices before the one that failed are done.
pub fn run(asked: &Passthrough) -> Result<Exit, Failure> {
    let sysfs = Sysfs::host();
    let mut text = String::new();
    let done = match asked {
        Passthrough::List => {
            text = table(&sysfs);
            Ok(())
        }
        Passthrough::Bind { devices, force } => devices.iter().try_for_each(|at| bind(&sysfs, *at, *force, &mut text)),
        Passthrough::Unbind(devices) => devices.iter().try_for_each(|at| unbind(&sysfs, *at, &mut text)),
    };
    // A reader that left early is no error.
    let _ = io::stdout().write_all(text.as_bytes());
    done.map(|()| Exit::Clean)
}

fn bind(sysfs: &Sysfs, at: PciAddress, force: bool, text: &mut String) -> Result<(), Failure> {
    let before = sysfs.bind(at, force).map_err(Failure::usage)?;
    let from = match before.as_deref() {
        Some(VFIO_DRIVER) => "already".to_owned(),
        Some(driver) => format!("was {driver}"),
        None => "had no driver".to_owned(),
    };
    // Writing to a string can't fail.
    let _ = writeln!(text, "{at} {VFIO_DRIVER} ({from})");
    if let Ok(device) = sysfs.describe(at) {
        for other in others(sysfs, &device) {
            let _ = writeln!(text, "  its group has {} ({}) too: bind or unbind that", other.address, other.owner());
        }
    }
    Ok(())
}

fn unbind(sysfs: &Sysfs, at: PciAddress, text: &mut String) -> Result<(), Failure> {
    let now = sysfs.unbind(at).map_err(Failure::usage)?;
    let _ = writeln!(text, "{at} {}", now.as_deref().unwrap_or("no driver"));
    Ok(())
}

/// The others of its group that don't let go.
fn others(sysfs: &Sysfs, device: &Described) -> Vec<Described> {
    let in_the_way = device.group.map(|group| sysfs.in_the_way(group)).unwrap_or_default();
    in_the_way.into_iter().filter(|other| other.address != device.address).collect()
}

/// What stands in the way of giving `device` to a guest.
fn obstacle(sysfs: &Sysfs, device: &Described) -> String {
    if device.is_bridge() {
        return "a bridge: stays with the host".to_owned();
    }
    if device.group.is_none() {
        return "no IOMMU: switch it on (intel_iommu=on)".to_owned();
    }
    let others = others(sysfs, device).iter().map(|o| format!("{} ({})", o.address, o.owner())).collect::<Vec<_>>();
    if !others.is_empty() {
        return format!("shares its group with {}", others.join(", "));
    }
    if device.driver.as_deref() == Some(VFIO_DRIVER) {
        // Asked first: the way is found out by opening what a machine may have.
        if sysfs.is_taken(device) {
            return "a machine has it".to_owned();
        }
        let by = if sysfs.way(device.address) == Iommu::Iommufd { ", by iommufd" } else { "" };
        return format!("nothing: ready{by}");
    }
    sysfs.uses(device.address).into_iter().next().unwrap_or_else(|| "bind it".to_owned())
}

fn table(sysfs: &Sysfs) -> String {
    let mut text =
        format!("{:<13} {:<9} {:>5}  {:<12} {:<12} {}\n", "address", "id", "group", "kind", "driver", "in the way");
    for device in sysfs.devices() {
        let (vendor, id) = device.ids;
        let group = device.group.map_or_else(|| "-".to_owned(), |group| group.to_string());
        let driver = device.driver.as_deref().unwrap_or("-");
        let (address, kind, why) = (device.address.to_string(), device.kind(), obstacle(sysfs, &device));
        let _ = writeln!(text, "{address:<13} {vendor:04x}:{id:04x} {group:>5}  {kind:<12} {driver:<12} {why}");
    }
    text
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn asked(args: &[&str]) -> Result<Asked<Passthrough>, Failure> {
        parse(&mut Parser::from_args(args))
    }

    #[test]
    fn commands_are_read_and_complaints_say_what_and_where() {
        let at = |text: &str| text.parse::<PciAddress>().unwrap();
        assert_eq!(asked(&["list"]), Ok(Asked::Do(Passthrough::List)));
        let both = vec![at("01:00.0"), at("0001:02:00.1")];
        let bind = Passthrough::Bind { devices: both.clone(), force: true };
        assert_eq!(asked(&["bind", "01:00.0", "--force", "0001:02:00.1"]), Ok(Asked::Do(bind)));
        assert_eq!(asked(&["unbind", "01:00.0", "0001:02:00.1"]), Ok(Asked::Do(Passthrough::Unbind(both))));
        assert_eq!(asked(&["-h"]), Ok(Asked::Help));
        let says = |args: &[&str]| asked(args).unwrap_err().message;
        assert_eq!(says(&[]), "no command: command line; see `tare passthrough --help`");
        assert_eq!(says(&["bind"]), "no device is named: command line; see `tare passthrough --help`");
        assert!(says(&["list", "01:00.0"]).starts_with("list takes nothing more"));
        assert!(says(&["steal", "01:00.0"]).starts_with("unknown command `steal`"));
        assert!(says(&["bind", "nvme0"]).starts_with("`nvme0` is not a PCI address"));
    }
}
