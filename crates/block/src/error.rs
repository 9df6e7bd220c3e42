// SPDX-License-Identifier: Apache-2.0
//! What can go wrong when a disk is opened, by what the caller can do about it. Each message is one line: what, where, what
//! to do. Errors of single requests are plain `io::Error`s in a [`crate::Completion`]; the user hears of them through `voice`.

use std::io;
use std::path::PathBuf;

/// Why a disk can't be opened.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is nothing at that path.
    #[error("disk {path}: no such file; check the path, or make one with `truncate -s 4G {path}`", path = .0.display())]
    Missing(PathBuf),
    /// A directory, a pipe, a terminal: nothing that can be a disk.
    #[error("disk {path}: is a {1}, not a regular file or block device; give the path of an image", path = .0.display())]
    NotADisk(PathBuf, &'static str),
    /// The host denies access.
    #[error("disk {path}: permission denied for {1}; change its mode or owner, or run as a user who may", path = .0.display())]
    Permission(PathBuf, &'static str),
    /// Writing was asked for and the medium or the file's mode allows reading only.
    #[error("disk {path}: read-only on the host, but opened for writing; use readonly=on or make it writable", path = .0.display())]
    ReadOnly(PathBuf),
    /// Another process has the image open in a way that excludes this one.
    #[error("disk {path}: in use by another process, {1}; stop that first (`lsof {path}` names it) or use a copy", path = .0.display())]
    Locked(PathBuf, &'static str),
    /// No whole sector in it.
    #[error("disk {path}: {1} bytes hold no 512-byte sector; make it larger, for instance `truncate -s 4G {path}`", path = .0.display())]
    Empty(PathBuf, u64),
    /// An option that this host or file system can't honour.
    #[error("disk {path}: {1}", path = .0.display())]
    Unsupported(PathBuf, String),
    /// Anything else the host says.
    #[error("disk {}: cannot {what}: {source}", .path.display())]
    Io {
        /// The image.
        path: PathBuf,
        /// What was tried, as the rest of "cannot …".
        what: &'static str,
        /// The host's reason.
        source: io::Error,
    },
}
