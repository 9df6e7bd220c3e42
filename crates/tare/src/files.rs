// SPDX-License-Identifier: Apache-2.0
//! The files that the command line itself writes: the ledger and the process id. Called by `run` before the terminal is
//! touched, so that what can't be written is known before a guest has run.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::exit::{Failure, reason};

/// A place for the ledger, or for what else is written at the end of a run, that is known to take it.
pub struct LedgerFile {
    /// For what the user is told.
    what: &'static str,
    path: PathBuf,
    /// Written first, then renamed onto `path`; `None` writes in place (a pipe, a device).
    draft: Option<PathBuf>,
}

impl LedgerFile {
    /// Makes sure now that `path` can be written at the end, since a run can't be repeated for its ledger.
    ///
    /// # Errors
    /// [`Failure`] with exit code 2.
    pub fn reserve(path: &Path) -> Result<Self, Failure> {
        Self::reserve_as("ledger", path)
    }

    /// [`LedgerFile::reserve`] for something that is called `what`.
    ///
    /// # Errors
    /// As there.
    pub fn reserve_as(what: &'static str, path: &Path) -> Result<Self, Failure> {
        let refuse = |e: &io::Error| {
            Failure::usage(format!(
                "{what} can't be written, {}: {}; name a file in a folder that exists and that you may write",
                reason(e),
                path.display()
            ))
        };
        let in_place = match fs::metadata(path) {
            Ok(meta) if meta.is_dir() => return Err(refuse(&io::Error::other("it is a folder"))),
            Ok(meta) => !meta.is_file(),
            Err(_) => false,
        };
        if in_place {
            return Ok(Self { what, path: path.to_owned(), draft: None });
        }
        let name = path.file_name().ok_or_else(|| refuse(&io::Error::other("it names no file")))?;
        // A link keeps pointing where it points: the draft goes beside what it names.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let draft = path.with_file_name(format!(".{}.{}.draft", name.to_string_lossy(), std::process::id()));
        File::create(&draft).and_then(|_| fs::remove_file(&draft)).map_err(|e| refuse(&e))?;
        Ok(Self { what, path, draft: Some(draft) })
    }

    /// Writes `bytes` so that a reader sees the old file or the new one, never half of one.
    ///
    /// # Errors
    /// [`Failure`] with exit code 3.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Failure> {
        let first = self.draft.as_ref().unwrap_or(&self.path);
        let written = File::create(first).and_then(|mut f| f.write_all(bytes)).and_then(|()| match &self.draft {
            Some(draft) => fs::rename(draft, &self.path),
            None => Ok(()),
        });
        written.map_err(|e| {
            if let Some(draft) = &self.draft {
                // Best effort: the complaint below is about the same disk.
                let _ = fs::remove_file(draft);
            }
            let (what, why) = (self.what, reason(&e));
            Failure::monitor(format!("{what} lost, {why}: {}; make room and run again", self.path.display()))
        })
    }
}

/// A file with this process's id, gone when the value is.
pub struct PidFile(PathBuf);

impl PidFile {
    /// Writes it.
    ///
    /// # Errors
    /// [`Failure`] with exit code 2.
    pub fn create(path: &Path) -> Result<Self, Failure> {
        fs::write(path, format!("{}\n", std::process::id())).map_err(|e| {
            Failure::usage(format!("pidfile can't be written, {}: {}; name another place", reason(&e), path.display()))
        })?;
        Ok(Self(path.to_owned()))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // Somebody may have taken it away already.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::exit::Exit;

    #[test]
    fn a_ledger_is_replaced_whole_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.json");
        let ledger = LedgerFile::reserve(&path).unwrap();
        assert!(!path.exists(), "reserving makes no file");
        ledger.write(b"one").unwrap();
        ledger.write(b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        let link = dir.path().join("link.json");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        LedgerFile::reserve(&link).unwrap().write(b"three").unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(&path).unwrap(), b"three");
    }

    #[test]
    fn a_device_is_written_in_place() {
        LedgerFile::reserve(Path::new("/dev/null")).unwrap().write(b"x").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn a_ledger_that_has_no_place_is_refused_early() {
        for path in ["/nonexistent/out.json", "/tmp", "/"] {
            let refused = LedgerFile::reserve(Path::new(path)).err().unwrap();
            assert_eq!(refused.exit, Exit::Usage);
            assert!(refused.message.starts_with("ledger can't be written, "), "{}", refused.message);
        }
    }

    #[test]
    fn the_pid_file_goes_with_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        let pid = PidFile::create(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        drop(pid);
        assert!(!path.exists());
    }
}
