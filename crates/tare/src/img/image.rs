// SPDX-License-Identifier: Apache-2.0
//! How `tare img` opens an image: the options that its commands share (`-f`, `-t`, `-i`, `-U`) and their meaning.

use std::path::Path;

use block::{Aio, Cache, Disk};

use super::args::{Options, Refusal};

/// Words of `-f`.
const FORMATS: &[(&str, Format)] = &[("raw", Format::Raw)];
/// Words of `-t`; qemu-img's that mean one of ours come with it.
const CACHES: &[(&str, Cache)] = &[("writeback", Cache::Writeback), ("none", Cache::None), ("unsafe", Cache::Unsafe)];
/// Words of `-i`.
const AIOS: &[(&str, Aio)] = &[("auto", Aio::Auto), ("io_uring", Aio::IoUring), ("threads", Aio::Threads)];

/// A format as `-f` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The bytes of the disk, one to one.
    Raw,
}

/// What the options said about one image.
#[derive(Clone, Copy, Debug, Default)]
pub struct How {
    /// `-f`; looked for in the file when absent.
    pub format: Option<Format>,
    /// `-t`
    pub cache: Cache,
    /// `-i`
    pub aio: Aio,
    /// Open for reading only.
    pub readonly: bool,
}

impl How {
    /// Takes the value of `-f` (or its like).
    pub fn take_format(&mut self, options: &mut Options<'_>) -> Result<(), Refusal> {
        self.format = Some(options.word("an image format that tare knows", FORMATS)?);
        Ok(())
    }

    /// Takes the value of `-t` (or its like).
    pub fn take_cache(&mut self, options: &mut Options<'_>) -> Result<(), Refusal> {
        self.cache = options.word("a cache mode", CACHES)?;
        Ok(())
    }

    /// Takes the value of `-i`.
    pub fn take_aio(&mut self, options: &mut Options<'_>) -> Result<(), Refusal> {
        self.aio = options.word("a way to the kernel", AIOS)?;
        Ok(())
    }

    /// Opens `path`.
    ///
    /// # Errors
    /// The engine's line, with exit code 1.
    pub fn open(&self, path: &Path) -> Result<Disk, Refusal> {
        let mut options = block::Options::new(path);
        options.readonly = self.readonly;
        options.cache = self.cache;
        options.aio = self.aio;
        let disk = Disk::open(&options).map_err(Refusal::new)?;
        if let Some(warning) = disk.warning() {
            crate::exit::complain(warning);
        }
        Ok(disk)
    }
}
