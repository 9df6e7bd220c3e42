// SPDX-License-Identifier: Apache-2.0
//! Where samples run: directly on this host, or in clones of the lab machine.
//!
//! The scheduler knows only the trait. A place gives the paths that a command template needs and runs one script to its end;
//! it is shared by all worker threads.

pub mod direct;
pub mod lab;
#[cfg(test)]
pub mod mock;

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::scenario::init;

/// Paths and names on the machine where samples run.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    /// Guest kernel.
    pub kernel: String,
    /// Guest initrd.
    pub initrd: String,
    /// A small initrd with the modules of a virtio console; see `scenario::init`.
    pub console_initrd: String,
    /// The root disk image.
    pub disk: String,
    /// The image is shared and has to be copied for each sample.
    pub copy_disk: bool,
    /// `root=` for the guest's kernel.
    pub root: String,
    /// A directory for samples, on the file system that also holds the guests' disks.
    pub work: String,
    /// The tare binary.
    pub tare: String,
    /// The command that watches a sample's console; see `agent::watch`. No spaces within a word.
    pub watch: String,
}

/// What a report says about a place.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// "lab" or "direct".
    pub place: &'static str,
    /// What kind of time figures are in.
    pub time: &'static str,
    /// The method in a few sentences.
    pub statement: &'static str,
    /// What the method does not price.
    pub not_priced: &'static [&'static str],
    /// The machine samples run on, if it is not this host.
    pub machine: Option<String>,
    /// Kernel release of the guests.
    pub guest_kernel: Option<String>,
    /// Nothing else runs beside a sample there.
    pub alone: bool,
}

/// A file without a name, so that nothing stays behind however a run ends. It is reached by [`path_of`].
pub fn nameless(dir: &Path, content: &[u8]) -> Result<File> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let path = dir.join(format!("new-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let options = File::options().read(true).write(true).create_new(true).open(&path);
    let mut file = options.with_context(|| format!("can't make {}", path.display()))?;
    std::fs::remove_file(&path)?;
    file.write_all(content).with_context(|| format!("can't write to {}", dir.display()))?;
    Ok(file)
}

/// A path of a nameless file, good for this process and the ones it starts.
pub fn path_of(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// The small initrd with the modules of a virtio console. The modules are read out of the guests' root disk, an ext4
/// image, without mounting it; `dir` is for scratch.
pub fn console_initrd(disk: &Path, release: &str, dir: &Path) -> Result<Vec<u8>> {
    let dir = dir.join(format!("modules-{}", std::process::id()));
    std::fs::create_dir_all(&dir).with_context(|| format!("can't make {}", dir.display()))?;
    let mut modules = Vec::new();
    for (index, path) in init::CONSOLE_MODULES.iter().enumerate() {
        let out = dir.join(index.to_string());
        let request = format!("dump /usr/lib/modules/{release}/kernel/{path} {}", out.display());
        let run = Command::new("debugfs").args(["-R", &request]).arg(disk).stdin(Stdio::null()).output();
        let run = run.context("can't run debugfs (package e2fsprogs)")?;
        let module = std::fs::read(&out).unwrap_or_default();
        if module.is_empty() {
            let said = String::from_utf8_lossy(&run.stderr);
            bail!("the guests' disk has no module {path}: {}", said.lines().last().unwrap_or_default());
        }
        modules.push(module);
    }
    std::fs::remove_dir_all(&dir)?;
    Ok(init::initrd(&modules))
}

/// Where samples run.
pub trait Place: Sync {
    /// What a report says about it.
    fn facts(&self) -> Facts;
    /// Paths for command templates.
    fn paths(&self) -> &Paths;
    /// How many samples may run at once without disturbing each other's figures.
    fn lanes(&self) -> usize;
    /// Virtual CPUs of a guest: as many as the workloads' two threads find natively.
    fn cpus(&self) -> u32;
    /// Runs a bash script to its end and returns its standard output. `limit` is the time after which the script should
    /// have ended by itself, on the place's clock; a place may give up later than that, never earlier.
    fn run(&self, script: &str, limit: Duration) -> Result<String>;
}
