// SPDX-License-Identifier: Apache-2.0
//! Opens an image and everything below it: backing files and an external data file, each with its format said, each let
//! through by the gate, each locked.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::disk::Limits;
use crate::error::Error;
use crate::open::{self, OpenFile};
use crate::options::{BackingGate, Format, Options, Secret};
use crate::qcow2::format::FormatError;
use crate::qcow2::format::crypto::{self, Cipher};
use crate::qcow2::format::header::{Crypt, Header, incompatible};
use crate::storage::Storage;
use crate::storage::file::FileStorage;
use crate::storage::zeroing::Zeroing;

use super::image::{How, Image, read_header};
use super::{mend, past, side};

/// Most images in a chain.
const DEEPEST: usize = 200;

/// One image of a chain.
#[derive(Debug)]
pub enum Layer {
    /// The bytes of the disk, one to one, so many of them.
    Raw(u64),
    /// A qcow2 image.
    Qcow2(Box<Image>),
}

/// An image of a chain and the places of its files among the files of the chain.
#[derive(Debug)]
pub struct Place {
    /// What it is.
    pub layer: Layer,
    /// Where its own file is.
    pub file: usize,
    /// Where its data is.
    pub data: usize,
}

/// All that one disk consists of; the image opened comes first.
#[derive(Debug)]
pub struct Chain {
    /// From the top down.
    pub places: Vec<Place>,
    /// From which each handle makes its own.
    pub files: Vec<Storage>,
    /// How many bytes each file had when it was opened; no end for those that are written, which grow.
    pub ends: Vec<u64>,
    /// Sizes that the host of the first file likes.
    pub limits: Limits,
}

impl Chain {
    /// The image that is written. A chain begins with a qcow2 image, always.
    pub fn top(&self) -> Option<&Image> {
        match self.places.first().map(|p| &p.layer) {
            Some(Layer::Qcow2(image)) => Some(image),
            _ => None,
        }
    }
}

fn io_error(path: &Path, what: &'static str) -> impl Fn(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::Io { path: path.clone(), what, source }
}

fn format_error(path: &Path) -> impl Fn(FormatError) -> Error {
    let path = path.to_owned();
    move |e| Error::Unsupported(path.clone(), e.to_string())
}

/// Opens the chain of which `options` describes the top.
///
/// # Errors
/// Whatever is wrong with any file of it, each named.
pub fn open(options: &Options) -> Result<(Chain, Vec<String>), Error> {
    let mut builder = Builder::new(options);
    let mut next = Some((options.path.clone(), Format::Qcow2));
    while let Some((path, format)) = next {
        next = builder.add(&path, format)?;
    }
    builder.keys.all_used(&options.path)?;
    let chain = builder.chain.ok_or_else(|| Error::Empty(options.path.clone(), 0))?;
    Ok((chain, builder.warnings))
}

/// The chain of an image that is on `storage`, and its data on `data` if it has a data file, for tests: all below it are
/// files.
///
/// # Errors
/// What is wrong with the image.
pub fn open_alone(mut storage: Storage, data: Option<Storage>, options: &Options) -> Result<Chain, Error> {
    let path = &options.path;
    let (header, len, _) = ready(&mut storage, path, !options.readonly)?;
    if header.has(incompatible::DATA_FILE) != data.is_some() {
        return Err(Error::Unsupported(path.clone(), "an image in memory has its data file beside it, or none".into()));
    }
    let limits = Limits { block_size: 512, discard_granularity: 512 };
    let mut builder = Builder::new(options);
    let cipher = builder.keys.unlock(path, &header, &mut storage, !options.readonly)?;
    let mut image = image(storage.share(), path, &header, len, how(options, !options.readonly, 512, cipher))?;
    let files: Vec<Storage> = std::iter::once(storage).chain(data).collect();
    image.zeros = files.last().map_or_else(Zeroing::default, |data| Zeroing::new(options.qcow2.zeros, data));
    let place = Place { layer: Layer::Qcow2(Box::new(image)), file: 0, data: files.len() - 1 };
    let ends = files.iter().map(|f| if options.readonly { f.len().unwrap_or(0) } else { u64::MAX }).collect();
    builder.chain = Some(Chain { places: vec![place], files, ends, limits });
    let mut next = builder.below(path, &header)?;
    while let Some((path, format)) = next {
        next = builder.add(&path, format)?;
    }
    builder.keys.all_used(path)?;
    builder.chain.ok_or_else(|| Error::Empty(options.path.clone(), 0))
}

fn how(options: &Options, writable: bool, unit: u32, cipher: Option<Cipher>) -> How {
    How { writable, l2_cache: options.qcow2.l2_cache, cow: options.qcow2.cow, unit: unit.max(512) as usize, cipher }
}

fn image(storage: Option<Storage>, path: &Path, header: &Header, len: u64, how: How) -> Result<Image, Error> {
    let storage = storage.ok_or_else(|| Error::Unsupported(path.to_owned(), "its storage can't be shared".into()))?;
    Image::open(storage, header, len, how).map_err(io_error(path, "read it"))?.map_err(format_error(path))
}

/// The passphrases of a chain's encrypted images, from the top down.
struct Keys<'a> {
    given: &'a [Secret],
    used: usize,
}

impl Keys<'_> {
    /// What decrypts the image on `storage`, if it is encrypted.
    fn unlock(
        &mut self,
        path: &Path,
        header: &Header,
        storage: &mut Storage,
        writable: bool,
    ) -> Result<Option<Cipher>, Error> {
        if header.crypt == Crypt::None {
            return Ok(None);
        }
        let refused = |what: &str| Err(Error::Unsupported(path.to_owned(), what.to_owned()));
        let Some(key) = self.given.get(self.used).or(self.given.last()) else {
            return refused(
                "it is encrypted; name the file with its passphrase: key=FILE of a disk, --key FILE of `tare img`",
            );
        };
        self.used += 1;
        let cipher = match header.extensions.encryption {
            None if writable => {
                return refused(
                    "it is encrypted by QEMU's old AES, which is read only; `tare img convert` makes a copy with LUKS",
                );
            }
            None => Cipher::old(key.bytes()),
            Some(at) => {
                let len = storage.len().map_err(io_error(path, "ask for its size"))?;
                // The header's parser keeps this below 32 MiB.
                let have = at.len.min(len.saturating_sub(at.offset)) as usize;
                let area = side::read(storage, at.offset, have, len).map_err(io_error(path, "read its LUKS header"))?;
                crypto::unlock(&area, key.bytes())
            }
        };
        cipher.map(Some).map_err(format_error(path))
    }

    /// Refuses keys that nothing was to be opened with: the image is not the one that its user thinks it is.
    fn all_used(&self, path: &Path) -> Result<(), Error> {
        let left = self.given.len().saturating_sub(self.used);
        if left == 0 {
            return Ok(());
        }
        let what = format!(
            "{} of the {} keys given have nothing to open: so many images of its chain are not encrypted; leave them out",
            left,
            self.given.len()
        );
        Err(Error::Unsupported(path.to_owned(), what))
    }
}

/// The header of the image on `storage`, which can be served, the file's length, and what was mended for that.
fn ready(storage: &mut Storage, path: &Path, writable: bool) -> Result<(Header, u64, Option<String>), Error> {
    let read = |storage: &mut Storage| -> Result<(Header, u64), Error> {
        read_header(storage).map_err(io_error(path, "read it"))?.map_err(format_error(path))
    };
    let (header, len) = read(storage)?;
    serveable(path, &header)?;
    let mended = if writable { mend::recount(storage, path, &header)? } else { None };
    if mended.is_none() {
        return Ok((header, len, None));
    }
    let (header, len) = read(storage)?;
    Ok((header, len, mended))
}

fn serveable(path: &Path, header: &Header) -> Result<(), Error> {
    if header.size == 0 {
        return Err(Error::Empty(path.to_owned(), 0));
    }
    if !header.size.is_multiple_of(512) {
        let what = format!("its {} bytes are no multiple of 512; resize it", header.size);
        return Err(Error::Unsupported(path.to_owned(), what));
    }
    Ok(())
}

struct Builder<'a> {
    options: &'a Options,
    seen: HashSet<(u64, u64)>,
    keys: Keys<'a>,
    chain: Option<Chain>,
    warnings: Vec<String>,
}

impl<'a> Builder<'a> {
    fn new(options: &'a Options) -> Self {
        let keys = Keys { given: &options.qcow2.keys, used: 0 };
        Self { options, seen: HashSet::new(), keys, chain: None, warnings: Vec::new() }
    }

    /// Opens the file at `path` as the next image of the chain; gives the one below it.
    fn add(&mut self, path: &Path, format: Format) -> Result<Option<(PathBuf, Format)>, Error> {
        let top = self.chain.is_none();
        let writable = top && !self.options.readonly;
        let (mut storage, limits, unit) = self.file(path, writable)?;
        let file = self.chain.as_ref().map_or(0, |c| c.files.len());
        if format == Format::Raw {
            let size = storage.len().map_err(io_error(path, "ask for its size"))?;
            self.push(Place { layer: Layer::Raw(size), file, data: file }, vec![storage], limits);
            return Ok(None);
        }
        let (mut header, len, mended) = ready(&mut storage, path, writable)?;
        self.warnings.extend(mended);
        if let Some(name) = self.options.qcow2.snapshot.as_deref().filter(|_| top) {
            past::look_back(&mut storage, &mut header, len, (path, name, writable))?;
            serveable(path, &header)?;
        }
        let cipher = self.keys.unlock(path, &header, &mut storage, writable)?;
        let mut image = image(storage.share(), path, &header, len, how(self.options, writable, unit, cipher))?;
        let mut files = vec![storage];
        let mut data = file;
        if header.has(incompatible::DATA_FILE) {
            let Some(name) = &header.extensions.data_file else {
                let what = "its data is in an external file that it does not name";
                return Err(Error::Unsupported(path.to_owned(), what.into()));
            };
            let named = self.named(path, name)?;
            let (storage, _, _) = self.file(&named, writable)?;
            if writable && storage.len().is_ok_and(|len| len < header.size) {
                storage.set_len(header.size).map_err(io_error(&named, "make it as long as the disk"))?;
            }
            files.push(storage);
            data += 1;
        }
        if let Some(data) = files.last().filter(|_| writable) {
            image.zeros = Zeroing::new(self.options.qcow2.zeros, data);
        }
        self.push(Place { layer: Layer::Qcow2(Box::new(image)), file, data }, files, limits);
        self.below(path, &header)
    }

    /// The file below the image at `path`, and its format.
    fn below(&self, path: &Path, header: &Header) -> Result<Option<(PathBuf, Format)>, Error> {
        let Some(name) = &header.backing else { return Ok(None) };
        if self.chain.as_ref().is_some_and(|c| c.places.len() >= DEEPEST) {
            return Err(Error::Unsupported(path.to_owned(), format!("more than {DEEPEST} backing files in a chain")));
        }
        let format = match header.extensions.backing_format.as_deref() {
            Some("raw") => Format::Raw,
            Some("qcow2") => Format::Qcow2,
            Some(other) => {
                let what = format!(
                    "its backing file's format is {}, and only raw and qcow2 are served",
                    other.escape_default()
                );
                return Err(Error::Unsupported(path.to_owned(), what));
            }
            None => {
                let what = format!(
                    "it does not say its backing file's format; say it with `tare img rebase -u -F raw|qcow2 -b {} {}`",
                    name.display(),
                    path.display()
                );
                return Err(Error::Unsupported(path.to_owned(), what));
            }
        };
        Ok(Some((self.named(path, name)?, format)))
    }

    fn push(&mut self, place: Place, files: Vec<Storage>, limits: Limits) {
        let writable = self.chain.is_none() && !self.options.readonly;
        let empty = || Chain { places: Vec::new(), files: Vec::new(), ends: Vec::new(), limits };
        let chain = self.chain.get_or_insert_with(empty);
        chain.places.push(place);
        // A file that can't tell its length has nothing to read either.
        chain.ends.extend(files.iter().map(|f| if writable { u64::MAX } else { f.len().unwrap_or(0) }));
        chain.files.extend(files);
    }

    fn file(&mut self, path: &Path, writable: bool) -> Result<(Storage, Limits, u32), Error> {
        let options = Options { path: path.to_owned(), readonly: !writable, ..self.options.clone() };
        // Before it is opened: an image that is its own backing file would only be said to be locked.
        if let Ok(meta) = std::fs::metadata(path)
            && !self.seen.insert((meta.dev(), meta.ino()))
        {
            let what = "it is named twice in one chain of backing files, which would never end";
            return Err(Error::Unsupported(path.to_owned(), what.into()));
        }
        let opened = open::open(&options)?;
        self.warnings.extend(opened.warnings);
        let OpenFile { direct_align, .. } = &opened.file;
        let unit = *direct_align;
        Ok((Storage::File(Box::new(FileStorage::new(opened.file, &options))), opened.limits, unit))
    }

    /// The file that the image at `path` calls `name`, if the gate lets it through.
    fn named(&self, path: &Path, name: &OsStr) -> Result<PathBuf, Error> {
        let bytes = name.as_bytes();
        let name = bytes.strip_prefix(b"file:").unwrap_or(bytes);
        let shown = String::from_utf8_lossy(name).escape_default().to_string();
        let protocol = name.iter().position(|b| *b == b':').is_some_and(|at| !name[..at].contains(&b'/'));
        if protocol {
            let what = format!("it names {shown}, which is no plain file name");
            return Err(Error::Unsupported(path.to_owned(), what));
        }
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let named = folder.join(OsStr::from_bytes(name));
        let refused = |hint: &str| {
            let what = format!("it names another file, {shown}, which backing={hint}");
            Err(Error::Unsupported(path.to_owned(), what))
        };
        let real = |p: &Path| p.canonicalize().map_err(|_| Error::Missing(p.to_owned()));
        match &self.options.qcow2.backing {
            BackingGate::Any => {}
            BackingGate::None => return refused("none forbids"),
            BackingGate::Listed(list) => {
                let target = real(&named)?;
                if !list.iter().any(|p| p.canonicalize().is_ok_and(|p| p == target)) {
                    return refused("LIST does not list; add it if the image may read it");
                }
            }
            BackingGate::SameFolder => {
                let first = real(&self.options.path)?;
                if !first.parent().is_some_and(|folder| real(&named).is_ok_and(|p| p.starts_with(folder))) {
                    real(&named)?;
                    return refused(
                        "folder does not allow outside the image's own folder; use backing=any if you trust the image",
                    );
                }
            }
        }
        Ok(named)
    }
}
