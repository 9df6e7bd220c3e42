// SPDX-License-Identifier: Apache-2.0
//! The editor of qcow2 images that nobody else has open: creating, checking and repairing, snapshots, bitmaps, resizing,
//! renaming what an image stands on. Called by `tare img` and by tests, on the calling thread, synchronously.
//!
//! Every change is one step for whoever looks at the file afterwards: what is new (tables, and a whole new set of refcounts) is
//! written where nothing was, then synced, then one write to the header's first sector takes it all into use. A crash
//! before that leaves the old image, a crash after it the new one; neither has errors nor even leaks.

mod bitmap;
mod check;
mod counts;
mod create;
mod edit;
mod image;
mod medium;
mod pack;
mod resize;
mod snapshot;
mod walk;

use std::io;
use std::path::{Path, PathBuf};

pub use check::{Repair, Report};
pub use create::{CreateOptions, Preallocation, create, create_on};
pub use image::Image;
pub use medium::Medium;
pub use pack::{Packer, create_packed};
pub use resize::Amend;

use super::format::FormatError;

/// Why an image could not be examined or changed. One line each.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file can't be opened.
    #[error(transparent)]
    Open(#[from] crate::Error),
    /// It is no qcow2 image, or one that is damaged or too new.
    #[error("disk {}: {source}", .path.display())]
    Format {
        /// The image.
        path: PathBuf,
        /// What is wrong with it.
        source: FormatError,
    },
    /// This can't be done to this image.
    #[error("disk {path}: {1}", path = .0.display())]
    Refused(PathBuf, String),
    /// The host says no.
    #[error("disk {}: cannot {what}: {source}", .path.display())]
    Io {
        /// The image.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// The host's reason.
        source: io::Error,
    },
}

impl Error {
    fn refused<T>(path: &Path, why: impl Into<String>) -> Result<T, Error> {
        Err(Error::Refused(path.to_owned(), why.into()))
    }

    fn format(path: &Path) -> impl FnOnce(FormatError) -> Error + '_ {
        |source| Error::Format { path: path.to_owned(), source }
    }

    fn io<'a>(path: &'a Path, what: &'static str) -> impl FnOnce(io::Error) -> Error + 'a {
        move |source| Error::Io { path: path.to_owned(), what, source }
    }
}

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod tests;
