// SPDX-License-Identifier: Apache-2.0
//! What may be asked of a machine that runs, and what it says. Plain data: `api` carries it, `machine` does it.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Say what the machine is.
    Info,
    /// Give a disk another size.
    ResizeDisk(ResizeDisk),
    /// Give the machine more or less memory.
    ResizeMemory(ResizeMemory),
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
