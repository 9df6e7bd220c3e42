// SPDX-License-Identifier: Apache-2.0
//! Makes new images, with the options of `qemu-img create`. The header is written last: a file whose making was interrupted is
//! no image.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::super::format::crypto::{self, NewKey};
use super::super::format::entry::{COPIED, Mapping};
use super::super::format::header::{
    CLUSTER_BITS, Compression, Crypt, CryptRef, EXTENDED_CLUSTER_BITS, Extensions, Features, Header, MAX_BACKING_NAME,
    MAX_L1_BYTES, Table, autoclear, compatible, incompatible,
};
use super::super::format::refcount::Width;
use super::edit::Edit;
use super::image::take_lock;
use super::{Error, Image, Medium};
use crate::Secret;

/// Rounds of key derivation of a new LUKS slot: about a second.
const ROUNDS: u32 = 1_000_000;

/// How much of a new image is allocated from the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// Tables and host clusters, the latter as holes of the file.
    Metadata,
    /// As `Metadata`, with the file's blocks reserved.
    Falloc,
    /// As `Metadata`, with zeroes written everywhere.
    Full,
}

/// What a new image is to be; the options of `qemu-img create -f qcow2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Bytes of the disk; rounded up to a multiple of 512.
    pub size: u64,
    /// Bytes of a cluster, a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// Bits of a refcount: 1, 2, 4 … 64.
    pub refcount_bits: u32,
    /// 3, or 2 for `compat=0.10`.
    pub version: u32,
    /// Extended L2 entries (32 subclusters).
    pub extended_l2: bool,
    /// Refcount updates may be postponed.
    pub lazy_refcounts: bool,
    /// For compressed clusters.
    pub compression: Compression,
    /// Name of an external data file, as it is to be in the image; relative names are taken from the image's folder.
    pub data_file: Option<OsString>,
    /// The data file is to be usable as a raw image of its own.
    pub data_file_raw: bool,
    /// Name of the backing file, as it is to be in the image.
    pub backing: Option<OsString>,
    /// Its format: needed with it.
    pub backing_format: Option<String>,
    /// What to allocate.
    pub preallocation: Preallocation,
    /// Encrypt by LUKS (aes-256 in xts-plain64, sha256) with this passphrase.
    pub encryption: Option<Secret>,
    /// Rounds of key derivation for it; fewer make guessing the passphrase cheaper.
    pub rounds: u32,
}

impl Default for CreateOptions {
    fn default() -> Self {
        CreateOptions {
            size: 0,
            cluster_size: 65_536,
            refcount_bits: 16,
            version: 3,
            extended_l2: false,
            lazy_refcounts: false,
            compression: Compression::Zlib,
            data_file: None,
            data_file_raw: false,
            backing: None,
            backing_format: None,
            preallocation: Preallocation::Off,
            encryption: None,
            rounds: ROUNDS,
        }
    }
}

/// Makes an image at `path`; one that is there already is overwritten, unless someone has it open. An external data file is
/// made as well.
///
/// # Errors
/// Options that exclude each other, or what the host says.
pub fn create(path: &Path, options: &CreateOptions) -> Result<(), Error> {
    header(path, options)?;
    let data = match &options.data_file {
        Some(name) => Some(make_data_file(path, name)?),
        None => None,
    };
    let file = open_new(path)?;
    take_lock(&file, path, true)?;
    Medium::set_size(&file, 0).map_err(Error::io(path, "empty it"))?;
    create_on(Box::new(file), data.as_ref().map(|f| f as &dyn Medium), path, options)
}

/// Makes an image on `medium`, which has to be empty or zeroed, and its data on `data` if the options name a data file.
///
/// # Errors
/// As [`create`].
pub fn create_on(
    medium: Box<dyn Medium>,
    data: Option<&dyn Medium>,
    path: &Path,
    options: &CreateOptions,
) -> Result<(), Error> {
    let header = header(path, options)?;
    let l1 = vec![0; header.l1.count as usize];
    let size = header.size;
    let mut image = Image { medium, path: path.to_owned(), header, snapshots: Ok(Vec::new()), l1, writable: true };
    let mut edit = Edit::blank(&mut image);
    if let Some(data) = data {
        data.set_size(size).map_err(Error::io(path, "size its data file"))?;
    }
    let mut mode = options.preallocation;
    if options.data_file_raw && mode == Preallocation::Off {
        mode = Preallocation::Metadata;
    }
    if let Some(secret) = &options.encryption {
        let area = new_luks(path, secret, options.rounds)?;
        let offset = edit.store(&area)?;
        edit.header.crypt = Crypt::Luks;
        edit.header.extensions.encryption = Some(CryptRef { offset, len: area.len() as u64 });
    }
    if mode != Preallocation::Off {
        preallocate(&mut edit, data, mode)?;
    }
    edit.commit()?;
    // QEMU's own images are at least so long that the last cluster is whole; holes do.
    let end = image.size()?.next_multiple_of(image.header.cluster_size());
    image.medium.set_size(end).map_err(Error::io(path, "size it"))?;
    image.sync()
}

fn new_luks(path: &Path, secret: &Secret, rounds: u32) -> Result<Vec<u8>, Error> {
    let failed = |source| Error::Io { path: path.to_owned(), what: "make a key for it", source };
    let mut source = File::open("/dev/urandom").map_err(failed)?;
    let mut random = |bytes: &mut [u8]| source.read_exact(bytes);
    crypto::create(&mut NewKey { passphrase: secret.bytes(), rounds, random: &mut random }).map_err(failed)
}

/// The header that these options ask for; its tables have sizes but no places yet.
pub(super) fn header(path: &Path, options: &CreateOptions) -> Result<Header, Error> {
    let refuse = |why: String| Error::refused(path, why);
    let size = match options.size.checked_next_multiple_of(512) {
        Some(size) if size <= i64::MAX as u64 => size,
        _ => return refuse(format!("a disk of {} bytes is too large", options.size)),
    };
    let cluster_bits = options.cluster_size.trailing_zeros();
    if !options.cluster_size.is_power_of_two() || !CLUSTER_BITS.contains(&cluster_bits) {
        return refuse(format!("cluster_size={} is no power of two from 512 to 2097152 (2M)", options.cluster_size));
    }
    let Some(width) = Width::from_bits(options.refcount_bits) else {
        return refuse(format!("refcount_bits={} is none of 1, 2, 4, 8, 16, 32 and 64", options.refcount_bits));
    };
    let v3_only = [
        (width != Width::DEFAULT, "refcount_bits other than 16"),
        (options.extended_l2, "extended_l2=on"),
        (options.lazy_refcounts, "lazy_refcounts=on"),
        (options.compression != Compression::Zlib, "compression_type=zstd"),
        (options.data_file.is_some(), "data_file"),
    ];
    match (options.version, v3_only.into_iter().find(|(set, _)| *set)) {
        (3, _) | (2, None) => {}
        (2, Some((_, what))) => return refuse(format!("compat=0.10 has no {what}; use compat=1.1")),
        (other, _) => return refuse(format!("version {other} is neither 2 (compat=0.10) nor 3 (compat=1.1)")),
    }
    if options.extended_l2 && cluster_bits < EXTENDED_CLUSTER_BITS {
        return refuse("extended_l2=on needs cluster_size=16k or more".into());
    }
    if options.data_file_raw && options.data_file.is_none() {
        return refuse("data_file_raw=on needs data_file".into());
    }
    if options.backing.is_some() && options.data_file_raw {
        return refuse("a backing file and data_file_raw=on exclude each other".into());
    }
    if options.backing.is_some() != options.backing_format.is_some() {
        return refuse("a backing file and its format have to be given together (-b FILE -F FORMAT)".into());
    }
    if options.backing.is_some() && options.preallocation != Preallocation::Off && !options.extended_l2 {
        return refuse("a backing file and preallocation go together only with extended_l2=on".into());
    }
    if options.encryption.is_some() && (options.data_file.is_some() || options.preallocation != Preallocation::Off) {
        return refuse("encryption goes together with neither a data file nor preallocation".into());
    }
    let names = [&options.backing, &options.data_file];
    for name in names.into_iter().flatten() {
        if name.is_empty() || name.len() > MAX_BACKING_NAME || name.as_bytes().contains(&0) {
            return refuse(format!("the name {name:?} has no or more than 1023 bytes"));
        }
    }
    let on = |set: bool, bit: u64| if set { bit } else { 0 };
    let mut header = Header {
        version: options.version,
        cluster_bits,
        size,
        crypt: Crypt::None,
        l1: Table::default(),
        refcount_table: Table::default(),
        snapshots: Table::default(),
        features: Features {
            incompatible: on(options.extended_l2, incompatible::EXTENDED_L2)
                | on(options.data_file.is_some(), incompatible::DATA_FILE)
                | on(options.compression != Compression::Zlib, incompatible::COMPRESSION),
            compatible: on(options.lazy_refcounts, compatible::LAZY_REFCOUNTS),
            autoclear: on(options.data_file_raw, autoclear::RAW_DATA_FILE),
        },
        width,
        compression: options.compression,
        unknown_fields: Vec::new(),
        backing: options.backing.clone(),
        extensions: Extensions {
            backing_format: options.backing_format.clone(),
            data_file: options.data_file.clone(),
            ..Extensions::default()
        },
    };
    let entries = header.layout().l1_entries(size).max(1);
    if entries * 8 > MAX_L1_BYTES {
        return refuse(format!("a disk of {size} bytes is too large for clusters of {} bytes", options.cluster_size));
    }
    header.l1.count = entries as u32;
    header.to_cluster().map_err(Error::format(path))?;
    Ok(header)
}

/// Gives every guest cluster a host cluster, in order.
fn preallocate(edit: &mut Edit<'_>, data: Option<&dyn Medium>, mode: Preallocation) -> Result<(), Error> {
    let layout = edit.header.layout();
    let (bits, size) = (layout.cluster_bits, edit.header.size);
    let path = edit.image.path().to_owned();
    let per_table = 1u64 << layout.l2_bits();
    for index in 0..edit.l1.len() {
        let first = (index as u64 * per_table) << bits;
        if first >= size {
            break;
        }
        let clusters = per_table.min((size - first).div_ceil(1 << bits));
        let mut table = vec![0; 1 << bits];
        let start = if layout.data_file { first } else { edit.allocate(clusters)? };
        for i in 0..clusters {
            let (raw, bitmap) =
                layout.encode(&Mapping::Data { host: start + (i << bits), copied: true }).unwrap_or_default();
            let at = (i * layout.entry_size()) as usize;
            table[at..at + 8].copy_from_slice(&raw.to_be_bytes());
            if layout.extended && edit.header.backing.is_none() {
                table[at + 8..at + 16].copy_from_slice(&bitmap.to_be_bytes());
            }
        }
        edit.l1[index] = edit.store(&table)? | COPIED;
        let (medium, len) = match data {
            Some(data) => (data, (clusters << bits).min(size - first)),
            None => (&*edit.image.medium, clusters << bits),
        };
        let end = start + len;
        let outcome = match mode {
            Preallocation::Off | Preallocation::Metadata if medium.size().is_ok_and(|now| now >= end) => Ok(()),
            Preallocation::Off | Preallocation::Metadata => medium.set_size(end),
            Preallocation::Falloc => medium.reserve(start, len),
            Preallocation::Full => write_zeroes(medium, start, len),
        };
        outcome.map_err(Error::io(&path, "allocate its clusters"))?;
    }
    Ok(())
}

/// Writes zeroes.
pub(super) fn write_zeroes(medium: &dyn Medium, offset: u64, len: u64) -> std::io::Result<()> {
    let zeroes = vec![0; len.min(1 << 20) as usize];
    let mut at = 0;
    while at < len {
        let part = (len - at).min(zeroes.len() as u64);
        medium.write_at(&zeroes[..part as usize], offset + at)?;
        at += part;
    }
    Ok(())
}

pub(super) fn open_new(path: &Path) -> Result<File, Error> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(Error::io(path, "create it"))
}

/// Makes the data file, empty, as `qemu-img create` does.
fn make_data_file(image: &Path, name: &OsString) -> Result<File, Error> {
    let path: PathBuf = image.parent().unwrap_or(Path::new("")).join(name);
    if path == image {
        return Error::refused(image, "can't be its own data file");
    }
    let file = open_new(&path)?;
    take_lock(&file, &path, true)?;
    Medium::set_size(&file, 0).map_err(Error::io(&path, "empty it"))?;
    Ok(file)
}
