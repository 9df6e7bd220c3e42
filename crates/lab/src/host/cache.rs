// SPDX-License-Identifier: Apache-2.0
//! Where built things are kept: one folder per thing, named by its kind and the hash of its recipe.
//!
//! A thing is built in a temporary folder and renamed when it is complete, under a lock per kind: a killed build leaves
//! nothing that is ever used, and the next builder sweeps it away. Two processes that want the same thing build it once.

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};

/// Things of one kind that are kept; the least recently used go first.
const KEEP: usize = 2;

/// A running hash (FNV-1a, 128 bits) over everything that decides what a build gives. Not for hostile input.
#[derive(Debug, Clone, Copy)]
pub struct Key(u128);

impl Default for Key {
    fn default() -> Self {
        Self(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d)
    }
}

impl Key {
    /// Adds one named ingredient. Names and lengths are hashed too, so that ingredients can't run into each other.
    #[must_use]
    pub fn with(mut self, name: &str, bytes: impl AsRef<[u8]>) -> Self {
        let bytes = bytes.as_ref();
        for part in [name.as_bytes(), &(bytes.len() as u64).to_le_bytes(), bytes] {
            for byte in part {
                self.0 = (self.0 ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
            }
        }
        self
    }

    /// As a name for a folder: 20 hexadecimal digits.
    #[must_use]
    pub fn name(self) -> String {
        format!("{:020x}", self.0 >> 48)
    }
}

/// The cache folder.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// `$TARE_CACHE`, else `$XDG_CACHE_HOME/tare`, else `~/.cache/tare`.
    ///
    /// # Errors
    /// When none of them is known or the folder can't be made.
    pub fn open() -> Result<Self> {
        let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = named("TARE_CACHE")
            .or_else(|| named("XDG_CACHE_HOME").map(|path| path.join("tare")))
            .or_else(|| named("HOME").map(|path| path.join(".cache/tare")))
            .context("no cache folder: set TARE_CACHE or HOME")?;
        Self::at(&root)
    }

    /// A cache in `root`, which is made if needed.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn at(root: &Path) -> Result<Self> {
        fs::create_dir_all(root).with_context(|| format!("make the cache folder {}", root.display()))?;
        Ok(Self { root: root.canonicalize()? })
    }

    /// The folder itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the thing is if it is there.
    #[must_use]
    pub fn find(&self, kind: &str, key: Key) -> Option<PathBuf> {
        Some(self.root.join(format!("{kind}-{}", key.name()))).filter(|path| path.is_dir())
    }

    /// The folder of a thing, built with `build` (given an empty folder to fill) unless it is there.
    ///
    /// # Errors
    /// Those of `build`, or of the file system.
    pub fn get(&self, kind: &str, key: Key, build: &mut dyn FnMut(&Path) -> Result<()>) -> Result<PathBuf> {
        let done = self.root.join(format!("{kind}-{}", key.name()));
        if done.is_dir() {
            touch(&done);
            return Ok(done);
        }
        let _lock = self.lock(kind)?;
        if done.is_dir() {
            return Ok(done);
        }
        self.sweep(kind)?;
        let building = self.root.join(format!("building-{kind}-{}", key.name()));
        fs::create_dir_all(&building).with_context(|| format!("make {}", building.display()))?;
        match build(&building) {
            Ok(()) => {}
            Err(error) => {
                let _ = fs::remove_dir_all(&building);
                return Err(error);
            }
        }
        fs::rename(&building, &done).with_context(|| format!("rename to {}", done.display()))?;
        Ok(done)
    }

    fn lock(&self, kind: &str) -> Result<File> {
        let path = self.root.join(format!("lock-{kind}"));
        let file = File::create(&path).with_context(|| format!("open {}", path.display()))?;
        // SAFETY: plain system call on a descriptor we own; the lock goes with it.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } < 0 {
            return Err(std::io::Error::last_os_error()).with_context(|| format!("lock {}", path.display()));
        }
        Ok(file)
    }

    /// Under the lock of `kind`: removes half-built things and the oldest finished ones.
    fn sweep(&self, kind: &str) -> Result<()> {
        let mut finished = Vec::new();
        for entry in fs::read_dir(&self.root)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if is_named(&name, &format!("building-{kind}-")) {
                fs::remove_dir_all(entry.path()).with_context(|| format!("remove {}", entry.path().display()))?;
            } else if is_named(&name, &format!("{kind}-")) {
                finished.push((used(&entry.path()), entry.path()));
            }
        }
        finished.sort();
        for (_, path) in finished.iter().take(finished.len().saturating_sub(KEEP - 1)) {
            fs::remove_dir_all(path).with_context(|| format!("remove {}", path.display()))?;
        }
        Ok(())
    }
}

/// Whether `name` is `prefix` and a key's name; kinds may be prefixes of each other.
fn is_named(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|key| key.len() == 20 && key.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

fn used(path: &Path) -> SystemTime {
    fs::metadata(path).and_then(|data| data.modified()).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn touch(path: &Path) {
    if let Ok(folder) = File::open(path) {
        let _ = folder.set_modified(SystemTime::now());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::cell::Cell;

    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("tare-lab-cache-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn every_ingredient_counts_and_none_runs_into_the_next() {
        let key = |pairs: &[(&str, &str)]| pairs.iter().fold(Key::default(), |key, (n, v)| key.with(n, v)).name();
        let all = [
            key(&[("a", "bc"), ("d", "e")]),
            key(&[("a", "bcd"), ("", "e")]),
            key(&[("ab", "c"), ("d", "e")]),
            key(&[("d", "e"), ("a", "bc")]),
            key(&[("a", "bc")]),
            key(&[]),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(key(&[("a", "bc"), ("d", "e")]), all[0]);
        assert!(all.iter().all(|name| is_named(&format!("x-{name}"), "x-")));
    }

    #[test]
    fn a_thing_is_built_once_and_a_failed_build_leaves_nothing() {
        let scratch = Scratch::new("once");
        let cache = Cache::at(&scratch.0).unwrap();
        let key = Key::default().with("v", "1");
        let failed = cache.get("root", key, &mut |path| {
            fs::write(path.join("half"), "x")?;
            anyhow::bail!("no more disk")
        });
        assert_eq!(failed.unwrap_err().to_string(), "no more disk");
        assert!(cache.find("root", key).is_none());
        let built = Cell::new(0);
        for _ in 0..3 {
            let path = cache
                .get("root", key, &mut |path| {
                    assert_eq!(fs::read_dir(path)?.count(), 0, "the leftovers of the failed build are gone");
                    built.set(built.get() + 1);
                    Ok(fs::write(path.join("whole"), "y")?)
                })
                .unwrap();
            assert_eq!(fs::read_to_string(path.join("whole")).unwrap(), "y");
        }
        assert_eq!(built.get(), 1);
    }

    #[test]
    fn what_a_killed_build_left_is_swept_and_old_things_go() {
        let scratch = Scratch::new("sweep");
        let cache = Cache::at(&scratch.0).unwrap();
        let key = |n: usize| Key::default().with("n", n.to_string());
        let dead = cache.root().join(format!("building-l1-{}", key(99).name()));
        fs::create_dir_all(dead.join("deep")).unwrap();
        let other = cache.root().join(format!("l1-root-{}", key(1).name()));
        fs::create_dir_all(&other).unwrap();
        for n in 0..KEEP + 2 {
            let path = cache.get("l1", key(n), &mut |_| Ok(())).unwrap();
            let past = SystemTime::now() - std::time::Duration::from_secs(1000 - n as u64);
            File::open(path).unwrap().set_modified(past).unwrap();
        }
        assert!(!dead.exists());
        assert!(other.exists(), "another kind is not touched");
        let left: Vec<bool> = (0..KEEP + 2).map(|n| cache.find("l1", key(n)).is_some()).collect();
        assert_eq!(left, [false, false, true, true]);
    }
}
