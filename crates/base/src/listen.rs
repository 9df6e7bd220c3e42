// SPDX-License-Identifier: Apache-2.0
//! A listening Unix socket at a path: takes over one that a dead server left, removes its own at the end. Used by each
//! server once.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Why nothing listens at a path.
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

/// Bytes of a socket's path, without its end mark.
const LONGEST: usize = 107;

/// A listening socket and its path.
#[derive(Debug)]
pub struct Listening {
    listener: UnixListener,
    path: PathBuf,
}

impl Listening {
    /// Listens at `path`.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn at(path: &Path) -> Result<Self, Error> {
        let failed = |what| move |source| Error::Io { path: path.to_owned(), what, source };
        if path.as_os_str().len() > LONGEST {
            return Err(Error::TooLong(path.to_owned(), LONGEST));
        }
        match fs::symlink_metadata(path) {
            Err(_) => {}
            Ok(meta) if !meta.file_type().is_socket() => return Err(Error::NotASocket(path.to_owned())),
            Ok(_) => match UnixStream::connect(path) {
                Ok(_) => return Err(Error::Taken(path.to_owned())),
                // Nobody answers: a server that died left it.
                Err(_) => fs::remove_file(path).map_err(failed("remove the old one"))?,
            },
        }
        let listener = UnixListener::bind(path).map_err(failed("listen"))?;
        listener.set_nonblocking(true).map_err(failed("listen"))?;
        Ok(Self { listener, path: path.to_owned() })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next client, if one waits. Its socket blocks.
    ///
    /// # Errors
    /// What `accept` says (out of descriptors, for one).
    pub fn accept(&self) -> io::Result<Option<UnixStream>> {
        match self.listener.accept() {
            Ok((client, _)) => {
                client.set_nonblocking(false)?;
                Ok(Some(client))
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionAborted) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

impl AsRawFd for Listening {
    fn as_raw_fd(&self) -> RawFd {
        self.listener.as_raw_fd()
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_ours_or_dead_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let first = Listening::at(&path).unwrap();
        assert!(matches!(Listening::at(&path), Err(Error::Taken(_))));
        drop(first);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists(), "a dead server's socket stays");
        drop(Listening::at(&path).unwrap());
        fs::write(&path, "precious").unwrap();
        assert!(matches!(Listening::at(&path), Err(Error::NotASocket(_))));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let long = dir.path().join("x".repeat(120));
        assert!(matches!(Listening::at(&long), Err(Error::TooLong(..))));
        assert!(matches!(Listening::at(&dir.path().join("none/s")), Err(Error::Io { .. })));
    }
}
