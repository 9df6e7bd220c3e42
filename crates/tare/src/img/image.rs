// SPDX-License-Identifier: Apache-2.0
//! How `tare img` opens an image: the options that its commands share (`-f`, `-t`, `-i`, `-U`) and their meaning.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

pub use block::BackingGate as Gate;
use block::qcow2::offline;
use block::{Aio, Cache, Cow, Disk, Format, Secret, Zeros};
use spec::FromText as _;

use super::args::{Options, Refusal};

/// Words of `-f`.
pub const FORMATS: &[(&str, Format)] = &[("raw", Format::Raw), ("qcow2", Format::Qcow2)];
/// Words of `-t`; qemu-img's that mean one of ours come with it.
const CACHES: &[(&str, Cache)] = &[("writeback", Cache::Writeback), ("none", Cache::None), ("unsafe", Cache::Unsafe)];
/// Words of `-i`.
const AIOS: &[(&str, Aio)] = &[("auto", Aio::Auto), ("io_uring", Aio::IoUring), ("threads", Aio::Threads)];

/// What qcow2 images start with.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// The format's name, as `-f` takes it.
pub fn word(format: Format) -> &'static str {
    FORMATS.iter().find(|(_, f)| *f == format).map_or("raw", |(word, _)| word)
}

/// The format of the file at `path` by its first bytes, for users who said none. What can't be read is raw: opening it
/// says why.
pub fn looked_for(path: &Path) -> Format {
    let mut start = [0; 4];
    // Only of what can be an image: opening a pipe would hang.
    let regular = std::fs::metadata(path).is_ok_and(|m| m.is_file() || m.file_type().is_block_device());
    let read = regular && File::open(path).and_then(|mut f| f.read_exact(&mut start)).is_ok();
    if read && start == QCOW2_MAGIC { Format::Qcow2 } else { Format::Raw }
}

/// Words of `--cow`.
const COWS: &[(&str, Cow)] =
    &[("explicit", Cow::Explicit), ("unallocated", Cow::Unallocated), ("zero-aware", Cow::ZeroAware)];

/// Words of `--zeros`.
const ZEROS: &[(&str, Zeros)] = &[("auto", Zeros::Auto), ("write", Zeros::Write), ("fallocate", Zeros::Fallocate)];

/// What the options said about one image.
#[derive(Clone, Debug, Default)]
pub struct How {
    /// `-f`; looked for in the file when absent.
    pub format: Option<Format>,
    /// `-t`
    pub cache: Cache,
    /// `-i`
    pub aio: Aio,
    /// Open for reading only.
    pub readonly: bool,
    /// `--backing`
    pub gate: Gate,
    /// `--cow`
    pub cow: Cow,
    /// `--zeros`
    pub zeros: Zeros,
    /// `--l2-cache`
    pub l2_cache: Option<u64>,
    /// `--key`, given once for each encrypted image of the chain
    pub keys: Vec<Secret>,
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

    /// Takes the value of `--backing`.
    pub fn take_gate(&mut self, options: &mut Options<'_>) -> Result<(), Refusal> {
        let text = options.text()?;
        self.gate = match spec::Backing::from_text(&text) {
            Ok(spec::Backing::Folder) => Gate::SameFolder,
            Ok(spec::Backing::Any) => Gate::Any,
            Ok(spec::Backing::None) => Gate::None,
            Ok(spec::Backing::Listed(paths)) => Gate::Listed(paths.0),
            Err(e) => return Err(Refusal::new(e)),
        };
        Ok(())
    }

    /// Takes the value of `--key` (or its like): a file with a passphrase.
    pub fn take_key(&mut self, options: &mut Options<'_>) -> Result<(), Refusal> {
        self.keys.push(Secret::read(Path::new(&options.value()?)).map_err(Refusal::new)?);
        Ok(())
    }

    /// Takes the value of `--cow`.
    pub fn take_cow(&mut self, options: &mut Options<'_>) -> Result<(), Refusal> {
        self.cow = options.word("a way to allocate", COWS)?;
        Ok(())
    }

    /// Takes the value of `--zeros`.
    pub fn take_zeros(&mut self, options: &mut Options<'_>) -> Result<(), Refusal> {
        self.zeros = options.word("a way to write zeroes", ZEROS)?;
        Ok(())
    }

    /// The format: what was said, or what the file looks like.
    pub fn format_of(&self, path: &Path) -> Format {
        self.format.unwrap_or_else(|| looked_for(path))
    }

    /// Opens `path`.
    ///
    /// # Errors
    /// The engine's line, with exit code 1.
    pub fn open(&self, path: &Path) -> Result<Disk, Refusal> {
        self.open_at(path, None)
    }

    /// Opens `path` as it was when an internal snapshot was taken, if one is named by its id or name.
    ///
    /// # Errors
    /// As [`How::open`].
    pub fn open_at(&self, path: &Path, snapshot: Option<&str>) -> Result<Disk, Refusal> {
        let mut options = block::Options::new(path);
        options.qcow2.snapshot = snapshot.map(str::to_owned);
        options.format = self.format_of(path);
        options.qcow2.cow = self.cow;
        options.qcow2.zeros = self.zeros;
        options.qcow2.l2_cache = self.l2_cache;
        options.qcow2.backing = self.gate.clone();
        options.qcow2.keys = self.keys.clone();
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

/// The longest chain of backing files that is followed.
const LONGEST_CHAIN: usize = 200;

/// Where the file lies that the image at `path` calls `name`.
pub fn resolved(path: &Path, name: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("")).join(name)
}

/// The files of an image's chain with their formats, the topmost first. Opens each for its header only.
///
/// # Errors
/// One that can't be opened; a chain with no end.
pub fn chain(path: &Path, format: Format) -> Result<Vec<(PathBuf, Format)>, Refusal> {
    let mut files = vec![(path.to_owned(), format)];
    while let Some((path, Format::Qcow2)) = files.last() {
        let image = offline::Image::open(path, false).map_err(Refusal::new)?;
        let header = image.header();
        let Some(name) = &header.backing else { break };
        let below = resolved(path, Path::new(name));
        let said = header.extensions.backing_format.as_deref();
        let format = FORMATS.iter().find(|(word, _)| said == Some(word)).map(|(_, f)| *f);
        let format = format.unwrap_or_else(|| looked_for(&below));
        if files.len() == LONGEST_CHAIN || files.iter().any(|(seen, _)| *seen == below) {
            return Err(Refusal::new(format!(
                "the chain of backing files has no end: {}; see `tare img rebase`",
                below.display()
            )));
        }
        files.push((below, format));
    }
    Ok(files)
}
