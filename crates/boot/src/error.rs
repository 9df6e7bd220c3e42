// SPDX-License-Identifier: Apache-2.0
//! What can go wrong before the first guest instruction: one line each, saying what, where and what to do.

use std::io;
use std::path::PathBuf;

/// Why a guest can't be started.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// The host would not give the bytes.
    #[error("cannot read {role} {}: {source}; check that it is a file you may read", path.display())]
    Read {
        /// "kernel" or "initrd".
        role: &'static str,
        /// The file.
        path: PathBuf,
        /// The host's reason.
        source: io::Error,
    },
    /// The file is of another kind.
    #[error("{} is not a Linux kernel: {found}; give --kernel a bzImage (vmlinuz) or an ELF vmlinux", path.display())]
    NotAKernel {
        /// The file.
        path: PathBuf,
        /// What it looks like instead.
        found: String,
    },
    /// The file ends before its own headers say.
    #[error("{role} {} is cut short: {what} ends at byte {need}, the file at {have}; copy it again", path.display())]
    Truncated {
        /// "kernel" or "initrd".
        role: &'static str,
        /// The file.
        path: PathBuf,
        /// The part that is missing.
        what: &'static str,
        /// First byte past that part.
        need: u64,
        /// Length of the file.
        have: u64,
    },
    /// The file contradicts itself.
    #[error("{role} {} is damaged: {what}; copy or build it again", path.display())]
    Malformed {
        /// "kernel" or "initrd".
        role: &'static str,
        /// The file.
        path: PathBuf,
        /// The contradiction.
        what: String,
    },
    /// A kernel that tare can't start.
    #[error("kernel {} cannot be started: {what}; {hint}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: String,
        /// What would work.
        hint: &'static str,
    },
    /// The guest has not enough memory, or not where it is needed.
    #[error(
        "{what} needs {need} bytes of guest memory at {at:#x} and does not fit in {have} bytes; give more with --memory"
    )]
    NoRoom {
        /// "kernel" or "initrd", with its path.
        what: String,
        /// Bytes needed.
        need: u64,
        /// Lowest address it may start at.
        at: u64,
        /// Bytes of low guest memory.
        have: u64,
    },
    /// The command line can't be passed on.
    #[error("kernel command line {0}")]
    Cmdline(String),
    /// The machine can't be described to the guest. A fault of the caller, not of the user.
    #[error("the machine's tables cannot be made: {0}")]
    Platform(String),
    /// Guest memory is not where the loader needs it.
    #[error(transparent)]
    Memory(#[from] mem::MemError),
}
