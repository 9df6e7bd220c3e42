// SPDX-License-Identifier: Apache-2.0
//! How a disk is opened: plain data filled by the command line, by tools and by tests, read by `open`.

use std::path::PathBuf;

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

/// A passphrase. Its `Debug` shows nothing of it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Vec<u8>);

impl Secret {
    /// Keeps these bytes.
    #[must_use]
    pub fn new(bytes: Vec<u8>) -> Self {
        Self(bytes)
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
    /// Which files the image may name.
    pub backing: BackingGate,
    /// Opens an encrypted image.
    pub key: Option<Secret>,
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
