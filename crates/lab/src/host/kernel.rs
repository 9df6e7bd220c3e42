// SPDX-License-Identifier: Apache-2.0
//! A kernel of the lab machine that is not the guests' own, for what none of Debian's kernels has.
//!
//! A script builds it into a folder: `vmlinuz`, and its modules as an archive to lay over the machine's root. `snapshot` boots
//! a machine with it, whose snapshots have a kind and keys of their own.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::cache::{Cache, Key};

/// What `scripts/kernel-iommufd` builds, in the cache.
const IOMMUFD: &str = "kernel-iommufd";
/// The parts of a kernel's folder.
const IMAGE: &str = "vmlinuz";
const MODULES: &str = "modules.cpio";

/// A kernel's folder.
#[derive(Debug, Clone)]
pub struct Kernel {
    folder: PathBuf,
}

impl Kernel {
    /// The kernel in `folder`.
    ///
    /// # Errors
    /// When a part of it is missing.
    pub fn at(folder: &Path) -> Result<Self> {
        for part in [IMAGE, MODULES] {
            if !folder.join(part).is_file() {
                bail!("{} is no kernel of the lab machine: it has no {part}", folder.display());
            }
        }
        Ok(Self { folder: folder.canonicalize()? })
    }

    /// The one with iommufd, if it was built.
    #[must_use]
    pub fn iommufd(cache: &Cache) -> Option<Self> {
        Self::at(&cache.root().join(IOMMUFD)).ok()
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The image to boot.
    #[must_use]
    pub fn image(&self) -> PathBuf {
        self.folder.join(IMAGE)
    }

    /// Its modules, an archive for an initramfs.
    #[must_use]
    pub fn modules(&self) -> PathBuf {
        self.folder.join(MODULES)
    }

    /// Adds what it is to the key of a machine.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn keyed(&self, key: Key) -> Result<Key> {
        let read = |path: PathBuf| fs::read(&path).with_context(|| format!("read {}", path.display()));
        Ok(key.with("kernel", read(self.image())?).with("kernel's modules", read(self.modules())?))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_has_an_image_and_modules_and_each_has_a_key_of_its_own() {
        let root = std::env::temp_dir().join(format!("tare-lab-kernel-{}", std::process::id()));
        let cache = Cache::at(&root).unwrap();
        assert!(Kernel::iommufd(&cache).is_none());
        let folder = root.join(IOMMUFD);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(IMAGE), "one").unwrap();
        let said = Kernel::at(&folder).unwrap_err().to_string();
        assert!(said.ends_with("is no kernel of the lab machine: it has no modules.cpio"), "{said}");
        fs::write(folder.join(MODULES), "few").unwrap();
        let kernel = Kernel::iommufd(&cache).unwrap();
        let key = || kernel.keyed(Key::default()).unwrap().name();
        let before = key();
        assert_ne!(before, Key::default().name());
        fs::write(kernel.modules(), "more").unwrap();
        assert_ne!(before, key());
        fs::remove_dir_all(root).unwrap();
    }
}
