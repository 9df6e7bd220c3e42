// SPDX-License-Identifier: Apache-2.0
//! What may be asked of a machine that runs, and what it says. Plain data: `api` carries it, `machine` does it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::{PciAddress, Vfio};

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Say what the machine is.
    Info,
    /// Give a disk another size.
    ResizeDisk(ResizeDisk),
    /// Give the machine more or less memory.
    ResizeMemory(ResizeMemory),
    /// Give the guest a device of the host.
    AddDevice(Vfio),
    /// Take one back.
    RemoveDevice(RemoveDevice),
}

/// A device of the host that is to be the host's again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveDevice {
    /// Where it is on the host.
    pub host: PciAddress,
    /// Seconds that the guest has to let go of it.
    #[serde(default = "RemoveDevice::patience")]
    pub timeout: u8,
    /// Take it away then, if it did not.
    #[serde(default)]
    pub force: bool,
}

impl RemoveDevice {
    /// Seconds that a guest has where nobody says.
    #[must_use]
    pub const fn patience() -> u8 {
        10
    }
}

/// A machine's new size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeMemory {
    /// Bytes that the guest is to have, those that it started with among them.
    pub desired_size: u64,
}

/// A disk's new size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeDisk {
    /// Which disk, as [`DiskInfo::id`].
    pub id: String,
    /// Bytes; at least what the disk has.
    pub desired_size: u64,
}

/// What came of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It is done.
    Done,
    /// What was asked.
    Info(Info),
    /// It is not done, in one line: why, and what to do.
    Refused(String),
}

/// A machine that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// The monitor's version.
    pub version: String,
    /// `Running`.
    pub state: String,
    /// Virtual CPUs.
    pub cpus: u8,
    /// Bytes of guest memory that are wanted.
    pub memory: u64,
    /// Bytes that the guest has now: less or more than wanted while it is about to plug or unplug.
    pub memory_actual: u64,
    /// Bytes that it can be given.
    pub memory_most: u64,
    /// Its disks, in the order the guest sees them.
    pub disks: Vec<DiskInfo>,
    /// The devices of the host that it has now, by where they are there.
    pub vfio: Vec<PciAddress>,
}

/// A disk of a machine that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskInfo {
    /// Its name in commands and in the ledger, as `disk0`.
    pub id: String,
    /// The image.
    pub path: PathBuf,
    /// Bytes.
    pub size: u64,
    /// Queues.
    pub queues: u16,
    /// The guest may not write.
    pub readonly: bool,
}
