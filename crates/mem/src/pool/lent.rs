// SPDX-License-Identifier: Apache-2.0
//! The monitor's side of a loan: asks for memory, and gives it back when the last user of it is gone.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::wire::{ANSWER, Answer, Ask, PIECE, RETURNED};
use crate::ram::MemError;

/// How long a pool may take to answer: it has the memory or it has not.
const PATIENCE: Duration = Duration::from_secs(5);

/// Memory on loan. Kept behind the mappings it is in, so that it goes after them.
#[derive(Debug)]
pub struct Lent {
    pool: UnixStream,
    files: Vec<OwnedFd>,
    piece: u64,
    page: u64,
}

impl Lent {
    /// Asks the pool that listens on `socket` for `size` bytes.
    ///
    /// # Errors
    /// [`MemError::Pool`]: nobody there, not enough memory, or a pool that ended meanwhile.
    pub fn ask(socket: &Path, size: u64) -> Result<Self, MemError> {
        let error = |what: String, hint| MemError::Pool { what, socket: socket.display().to_string(), hint };
        let pool = UnixStream::connect(socket).map_err(|e| {
            error(format!("no memory pool answers, {e}"), "start one with `tare memory-pool`, or add fallback=on")
        })?;
        let broken = |e: io::Error| {
            let why = match e.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
                    "it ended".to_owned()
                }
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it said nothing for 5 s".to_owned(),
                _ => e.to_string(),
            };
            error(format!("the memory pool did not lend the memory, {why}"), "look at the pool, or add fallback=on")
        };
        let (answer, files) = Self::talk(&pool, size).map_err(broken)?;
        if files.is_empty() {
            let what =
                format!("the memory pool has {} MiB free, the guest needs {} MiB", answer.free >> 20, size >> 20);
            return Err(error(what, "wait until a machine ends, give the pool more with --size, or add fallback=on"));
        }
        Ok(Self { pool, files, piece: answer.piece, page: answer.page })
    }

    fn talk(mut pool: &UnixStream, size: u64) -> io::Result<(Answer, Vec<OwnedFd>)> {
        pool.set_read_timeout(Some(PATIENCE))?;
        pool.set_write_timeout(Some(PATIENCE))?;
        pool.write_all(&Ask { size }.write())?;
        let mut bytes = [0; ANSWER];
        pool.read_exact(&mut bytes)?;
        let answer = Answer::read(&bytes)?;
        if answer.pieces == 0 {
            return Ok((answer, Vec::new()));
        }
        if answer.pieces != size.div_ceil(answer.piece.max(1)) || !answer.piece.is_multiple_of(answer.page.max(1)) {
            return Err(io::Error::other("it offers something else than it was asked for"));
        }
        let mut files = Vec::new();
        for _ in 0..answer.pieces {
            let mut byte = [0];
            let got = pool.recv_with_fd(&mut byte).map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
            match got {
                (0, _) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // A copy, because it is closed in programs that this one starts.
                (_, Some(file)) if byte == [PIECE] && file.metadata()?.len() >= answer.piece => {
                    files.push(file.try_clone()?.into());
                }
                _ => return Err(io::Error::other("it sent something that is no piece of memory")),
            }
        }
        Ok((answer, files))
    }

    /// The files, in order; they need not stay open once they are mapped.
    pub(crate) fn take_files(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.files)
    }

    /// Bytes of each file.
    #[must_use]
    pub const fn piece(&self) -> u64 {
        self.piece
    }

    /// Bytes of a page.
    #[must_use]
    pub const fn page(&self) -> u64 {
        self.page
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // A pool that has ended needs nothing back.
        let _ = (&self.pool).write_all(&[RETURNED]);
    }
}
