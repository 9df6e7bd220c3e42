// SPDX-License-Identifier: Apache-2.0
//! How much more memory this process may have: what the host has free, and the limits of its cgroups. Asked by `ready` before
//! anything is touched, and by the threads that make memory ready before each piece: past a limit the kernel ends the
//! process without a word.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::Error;

const MIB: u64 = 20;

/// Why there is not enough.
#[derive(Debug, PartialEq, Eq)]
struct Short {
    /// Bytes there are.
    free: u64,
    /// The cgroup whose limit it is; the host has no more where there is none.
    cgroup: Option<PathBuf>,
}

/// Who wants all memory at once, and what may be taken out to do without.
pub type Wish = (&'static str, &'static str);
/// The user does.
pub const ASKED: Wish = ("--memory prealloc", ", or take prealloc= out");
/// Devices do that are passed through.
pub const PINNED: Wish = ("--vfio", "");

/// Refuses more than is free, or than the limit of a cgroup.
///
/// # Errors
/// [`Error::TooMuch`].
pub fn check(size: u64, (place, or): Wish) -> Result<(), Error> {
    let Some(short) = short_of(size) else { return Ok(()) };
    let (want, free) = (size >> MIB, short.free >> MIB);
    Err(Error::TooMuch(match short.cgroup {
        None => format!(
            "{want} MiB of guest memory can't be made ready, {free} MiB are free on this host: {place}; ask for less{or}"
        ),
        Some(folder) => format!(
            "{want} MiB of guest memory can't be made ready, this cgroup may have {free} MiB more: {place}; raise \
             {}/memory.max, or ask for less",
            folder.display()
        ),
    }))
}

/// Whether there is room for `size` bytes more, halfway.
///
/// # Errors
/// Who has no more.
pub fn left(size: u64) -> io::Result<()> {
    match short_of(size) {
        None => Ok(()),
        Some(Short { free, cgroup: None }) => {
            Err(io::Error::other(format!("{} MiB are free on this host", free >> MIB)))
        }
        Some(Short { free, cgroup: Some(folder) }) => {
            let (free, folder) = (free >> MIB, folder.display());
            Err(io::Error::other(format!("this cgroup may have {free} MiB more by {folder}/memory.max")))
        }
    }
}

fn short_of(size: u64) -> Option<Short> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = field(&text, "MemAvailable:").map(|free| (free + field(&text, "SwapFree:").unwrap_or(0)) << 10);
    if let Some(free) = free.filter(|free| *free < size) {
        return Some(Short { free, cgroup: None });
    }
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    in_cgroups(Path::new("/sys/fs/cgroup"), own, size)
}

/// The innermost cgroup from `root` down to `own` that has less than `size` bytes left.
fn in_cgroups(root: &Path, own: &str, size: u64) -> Option<Short> {
    let folders = root.join(own);
    let folders = folders.ancestors().take_while(|folder| folder.starts_with(root));
    folders.map(|folder| (folder, room(folder))).find_map(|(folder, free)| {
        let free = free.filter(|free| *free < size)?;
        Some(Short { free, cgroup: Some(folder.to_owned()) })
    })
}

/// Bytes that a cgroup may still have; what the kernel can take back from its files counts as free. `None` without a limit.
fn room(folder: &Path) -> Option<u64> {
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
    let (max, now) = (number("memory.max")?, number("memory.current")?);
    let stat = read("memory.stat").unwrap_or_default();
    let names = ["inactive_file", "active_file", "slab_reclaimable"];
    let back: u64 = names.into_iter().filter_map(|name| field(&stat, name)).sum();
    Some(max.saturating_sub(now.saturating_sub(back)))
}

/// A number of a file that has a name and a number in each line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next() == Some(name)).then(|| words.next()?.parse().ok())?
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_limit_that_is_too_small_is_named() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("vms/one");
        fs::create_dir_all(&inner).unwrap();
        let write = |folder: &Path, max: &str, now: u64, cache: u64| {
            fs::write(folder.join("memory.max"), format!("{max}\n")).unwrap();
            fs::write(folder.join("memory.current"), format!("{now}\n")).unwrap();
            fs::write(folder.join("memory.stat"), format!("anon 1\ninactive_file {cache}\nactive_file 50\n")).unwrap();
        };
        write(&inner, "max", 7, 0);
        write(&root.path().join("vms"), "1000", 900, 250);
        let short = |size| in_cgroups(root.path(), "vms/one", size);
        assert_eq!(short(400), None, "what is cached can go");
        assert_eq!(short(401), Some(Short { free: 400, cgroup: Some(root.path().join("vms")) }));
        write(&inner, "300", 100, 0);
        assert_eq!(short(401), Some(Short { free: 250, cgroup: Some(inner) }));
        assert_eq!(in_cgroups(root.path(), "elsewhere", u64::MAX), None);
    }

    #[test]
    fn what_nobody_has_is_said_in_a_line() {
        assert!(left(1 << 10).is_ok() || short_of(1 << 10).is_some());
        let said = left(u64::MAX).unwrap_err().to_string();
        assert!(said.contains("MiB") && !said.contains('\n'), "{said}");
        let said = check(8 << 40, ASKED).unwrap_err().to_string();
        assert!(said.starts_with("8388608 MiB of guest memory can't be made ready"), "{said}");
    }
}
