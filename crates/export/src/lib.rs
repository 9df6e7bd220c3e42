// SPDX-License-Identifier: Apache-2.0
//! Disks for other programs: servers that put a [`block::Disk`] on a Unix socket. `tare img serve` runs them.
//!
//! A client is as hostile as a guest: what it sends wrong ends its own connection or gets an error reply, and nothing else.

mod buffer;
mod listen;
pub mod nbd;
mod socket;
pub mod vhost_user;

use std::io;
use std::path::PathBuf;

/// Why a server can't start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A server answers on that socket.
    #[error("socket {path}: another server listens there; stop it or choose another path", path = .0.display())]
    Taken(PathBuf),
    /// Something else lies at that path.
    #[error("socket {path}: there is a file that is no socket; remove it or choose another path", path = .0.display())]
    NotASocket(PathBuf),
    /// The path does not fit the host's socket addresses.
    #[error("socket {path}: longer than the {1} bytes a socket's path may have; choose a shorter one", path = .0.display())]
    TooLong(PathBuf, usize),
    /// Anything else the host says.
    #[error("socket {}: cannot {what}: {source}", .path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// What was tried, as the rest of "cannot …".
        what: &'static str,
        /// The host's reason.
        source: io::Error,
    },
}
