// SPDX-License-Identifier: Apache-2.0
//! How a disk is opened: plain data filled by the command line, by tools and by tests, read by `open`.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

use crate::error::Error;

/// How the host's page cache is used; QEMU's names and meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// Through the page cache; a flush reaches the medium.
    #[default]
    Writeback,
    /// Past the page cache (`O_DIRECT`); a flush reaches the medium.
    None,
    /// Through the page cache; flushes are answered and not passed on.
    Unsafe,
}

/// How requests reach the host kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aio {
    /// What the page cache can serve at once is served by a plain system call on the calling thread; what has to wait goes
    /// to io_uring, or to threads where the kernel has no io_uring.
    #[default]
    Auto,
    /// Everything through io_uring, as other monitors do; an error where the kernel has none.
    IoUring,
    /// Everything through a pool of threads.
    Threads,
}

/// What the bytes of an image mean. Said by the user, never probed: an image that may say what it is may also lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Format {
    /// The bytes of the disk, one to one.
    #[default]
    Raw,
    /// QEMU's copy-on-write format, versions 2 and 3.
    Qcow2,
}

/// What happens around the data when a write allocates a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cow {
    /// The rest of the cluster is always written, zeroes too.
    Explicit,
    /// Nothing is written where nothing was ever allocated, in this image or below it.
    Unallocated,
    /// Nothing is written, or zeroes cheaply, wherever the range reads as zeroes.
    #[default]
    ZeroAware,
}

/// How zeroes get into a cluster that is new to the disk and not to the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Zeros {
    /// What a short measurement of the file system says; with `cow=explicit` they are written.
    #[default]
    Auto,
    /// In one write with the data.
    Write,
    /// By `fallocate`, beside the write of the data.
    Fallocate,
}

/// Which other files an image may name (backing files, an external data file).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum BackingGate {
    /// None: an image that names one is refused.
    None,
    /// These, compared after symbolic links are followed.
    Listed(Vec<PathBuf>),
    /// Files in the folder of the first image and below it.
    #[default]
    SameFolder,
    /// Any file.
    Any,
}

/// The most bytes of a file with a passphrase.
const LONGEST_SECRET: usize = 64 << 10;

/// A passphrase. Its `Debug` shows nothing of it; its bytes are overwritten when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// Keeps these bytes.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(Zeroizing::new(bytes))
    }

    /// The content of the file at `path`, all of it: a line end at its end is part of the passphrase, as in QEMU's secret files.
    ///
    /// # Errors
    /// It can't be read, is empty, or is far too long for a passphrase.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let refused = |what: &str| Error::Unsupported(path.to_owned(), what.to_owned());
        // Room for all of it from the start: growing would leave copies behind.
        let mut bytes = Zeroizing::new(vec![0; LONGEST_SECRET + 1]);
        let read = File::open(path).and_then(|mut file| {
            let mut have = 0;
            while let Some(room) = bytes.get_mut(have..).filter(|room| !room.is_empty()) {
                match file.read(room)? {
                    0 => break,
                    n => have += n,
                }
            }
            Ok(have)
        });
        match read {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Err(refused("the key file is not there; check key=")),
            Err(source) => Err(Error::Io { path: path.to_owned(), what: "read the key in it", source }),
            Ok(0) => Err(refused("the key file is empty; put the passphrase into it, without a line end")),
            Ok(have) if have > LONGEST_SECRET => {
                Err(refused("the key file is longer than 64 KiB; put the passphrase into it, and nothing else"))
            }
            Ok(have) => {
                bytes.truncate(have);
                Ok(Self(bytes))
            }
        }
    }

    /// The bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What only qcow2 images have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Qcow2Options {
    /// Bytes for mapping tables, per image of the chain; `None` covers the disk, up to 32 MiB.
    pub l2_cache: Option<u64>,
    /// How writes allocate.
    pub cow: Cow,
    /// How they write zeroes.
    pub zeros: Zeros,
    /// Which files the image may name.
    pub backing: BackingGate,
    /// Open the encrypted images of the chain: the first key the first of them from the top down, and so on. The last one
    /// opens the rest.
    pub keys: Vec<Secret>,
    /// Shows this internal snapshot (an id or a name) in place of the present content; for reading only.
    pub snapshot: Option<String>,
}

/// How to open an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// A regular file or block device.
    pub path: PathBuf,
    /// Open for reading only; writes fail with `EROFS`.
    pub readonly: bool,
    /// Use of the page cache.
    pub cache: Cache,
    /// Way to the kernel.
    pub aio: Aio,
    /// What its bytes mean.
    pub format: Format,
    /// What only qcow2 images have.
    pub qcow2: Qcow2Options,
}

impl Options {
    /// Writable, raw, `cache=writeback`, `aio=auto`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            readonly: false,
            cache: Cache::default(),
            aio: Aio::default(),
            format: Format::default(),
            qcow2: Qcow2Options::default(),
        }
    }

    /// As [`Options::new`], for a qcow2 image.
    #[must_use]
    pub fn qcow2(path: impl Into<PathBuf>) -> Self {
        Self { format: Format::Qcow2, ..Self::new(path) }
    }
}
