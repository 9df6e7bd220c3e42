// SPDX-License-Identifier: Apache-2.0
//! The client: one command, one connection. `tare ctl` calls it, and tests do.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use spec::{Command, Reply};

use crate::{http, routes};

/// How long a command may take: growing a disk over a backing file writes what hides it.
const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes of a response.
const MAX_RESPONSE: u64 = 1 << 20;

/// Why no answer came.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No machine listens there.
    #[error("no machine answers: {}: {source}; start one with `tare run --api {}`", .path.display(), .path.display())]
    Unreachable {
        /// The socket.
        path: PathBuf,
        /// The host's reason.
        source: io::Error,
    },
    /// The connection ended without a whole answer.
    #[error("the machine gave no answer: {}: {source}; look whether it still runs", .path.display())]
    Lost {
        /// The socket.
        path: PathBuf,
        /// The host's reason.
        source: io::Error,
    },
    /// Something else listens there.
    #[error("what answers is no tare: {}; name the socket of `tare run --api`", .0.display())]
    Foreign(PathBuf),
}

/// Sends `command` to the machine whose socket is at `path`, and waits for its reply.
///
/// # Errors
/// See [`ClientError`]; what the machine refuses is a reply.
pub fn call(path: &Path, command: &Command) -> Result<Reply, ClientError> {
    let mut socket =
        UnixStream::connect(path).map_err(|source| ClientError::Unreachable { path: path.to_owned(), source })?;
    let bytes = exchange(&mut socket, command).map_err(|source| ClientError::Lost { path: path.to_owned(), source })?;
    if bytes.is_empty() {
        let source = io::ErrorKind::UnexpectedEof.into();
        return Err(ClientError::Lost { path: path.to_owned(), source });
    }
    let response = http::parse_response(&bytes);
    response.and_then(|r| routes::reply(&r)).ok_or_else(|| ClientError::Foreign(path.to_owned()))
}

fn exchange(socket: &mut UnixStream, command: &Command) -> io::Result<Vec<u8>> {
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    let (method, path, body) = routes::request(command);
    let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
    socket.write_all(&[head.as_bytes(), &body].concat())?;
    let mut bytes = Vec::new();
    socket.take(MAX_RESPONSE).read_to_end(&mut bytes)?;
    Ok(bytes)
}
