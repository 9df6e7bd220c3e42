// SPDX-License-Identifier: Apache-2.0
//! The lab machine, booted once and saved: memory in one sparse file, devices in a small one.
//!
//! Any number of machines can be restored from a snapshot at the same time, each with its own copy-on-write view of the
//! memory, in the time it takes to start QEMU. The snapshot itself is never written again.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use agent::wire::Exec;
use anyhow::{Context, Result, bail};

use super::cache::{Cache, Key};
use super::image::{self, Guest};
use super::kernel::Kernel;
use super::process::output;
use super::qemu::{self, Machine, Mode};
use super::session::{Session, Stream, Watch};
use super::{Progress, recipe};

/// Longest boot of the machine.
const BOOT: Duration = Duration::from_secs(300);
/// Longest time to fill its disk.
const FILL: Duration = Duration::from_secs(300);

/// Where things are inside the machine; all on its disk in memory.
pub mod inside {
    /// The guests' root disk, raw.
    pub const DISK: &str = "/lab/root.ext4";
    /// The guests' kernel.
    pub const KERNEL: &str = "/lab/vmlinuz";
    /// The guests' initrd.
    pub const INITRD: &str = "/lab/initrd.img";
    /// Programs the lab brings; first in `PATH`.
    pub const BIN: &str = "/lab/bin";
}

/// A saved machine.
#[derive(Debug, Clone)]
pub struct Snapshot {
    mode: Mode,
    folder: PathBuf,
    guest: Guest,
    /// What the machine was booted with.
    kernel: PathBuf,
}

impl Snapshot {
    /// The snapshot of a machine in `mode`, made (with all it needs) unless it is there. It runs `kernel`, or that of the
    /// guests.
    ///
    /// # Errors
    /// When a tool is missing or fails, or the machine does not come up.
    pub fn get(
        cache: &Cache,
        (mode, kernel): (Mode, Option<&Kernel>),
        stop: &dyn Fn() -> bool,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let agent = find_agent()?;
        let (guest, root) = image::both(cache, progress)?;
        let (kind, key) = match kernel {
            None => (format!("snapshot-{}", mode.name()), key(mode)?),
            Some(kernel) => (format!("snapshot-{}-kernel", mode.name()), kernel.keyed(key(mode)?)?),
        };
        let folder = cache.get(&kind, key, &mut |folder| {
            build(mode, folder, &Parts { guest: &guest, root: &root, agent: &agent, kernel }, stop, progress)
                .with_context(|| format!("making the {} lab machine", mode.name()))
        })?;
        let kernel = kernel.map_or_else(|| guest.kernel(), Kernel::image);
        Ok(Self { mode, folder, guest, kernel })
    }

    /// Its mode.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// The guests' Debian that is in it.
    #[must_use]
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// A paused machine in `folder` that dies with the calling thread.
    ///
    /// # Errors
    /// When QEMU can't start or refuses the state.
    pub fn restore(&self, folder: &Path) -> Result<Machine> {
        Machine::restore(self.mode, folder, &self.memory(), &self.kernel, &self.state())
    }

    /// A paused machine in `folder` that outlives this process.
    ///
    /// # Errors
    /// When QEMU can't start or refuses the state.
    pub fn restore_standing(&self, folder: &Path) -> Result<Machine> {
        Machine::restore_standing(self.mode, folder, &self.memory(), &self.kernel, &self.state())
    }

    fn memory(&self) -> PathBuf {
        self.folder.join("memory")
    }

    fn state(&self) -> PathBuf {
        self.folder.join("devices")
    }
}

/// Everything a saved machine depends on, but for a kernel of its own.
pub(super) fn key(mode: Mode) -> Result<Key> {
    Ok(recipe::machine_key()
        .with("mode", mode.name())
        .with("arguments", mode.arguments().join(" "))
        .with("common", qemu::COMMON.join(" "))
        .with("command line", qemu::command_line(mode))
        .with("memory", mode.memory().to_string())
        .with("agent", agent::FINGERPRINT.to_le_bytes())
        .with("qemu", qemu::version()?))
}

/// What a machine is made from.
struct Parts<'a> {
    guest: &'a Guest,
    /// The archive of its root.
    root: &'a Path,
    /// The agent's program.
    agent: &'a Path,
    /// Its kernel, if that is not the guests'.
    kernel: Option<&'a Kernel>,
}

fn build(mode: Mode, folder: &Path, parts: &Parts<'_>, stop: &dyn Fn() -> bool, progress: Progress<'_>) -> Result<()> {
    let Parts { guest, root, agent, kernel } = *parts;
    progress("lab machine: booting it for the first time", Some(0.65));
    let initrd = folder.join("initrd");
    let mut joined = File::create(&initrd)?;
    let parts = [root.to_owned(), image::agent_archive(agent, folder)?];
    for part in parts.into_iter().chain(kernel.map(Kernel::modules)) {
        std::io::copy(&mut File::open(&part)?, &mut joined).with_context(|| format!("append {}", part.display()))?;
    }
    let run = folder.join("run");
    let image = kernel.map_or_else(|| guest.kernel(), Kernel::image);
    let mut machine = Machine::boot(mode, &run, &folder.join("memory"), &image, &initrd)?;
    machine.await_agent(BOOT, stop)?;
    progress("lab machine: filling its disk", Some(0.8));
    let mailbox = machine.mailbox();
    let mut check = || if stop() { bail!("interrupted") } else { machine.check() };
    let mut watch = Watch { deadline: Instant::now() + FILL, check: &mut check };
    fill(&mailbox, guest, &mut watch)?;
    progress("lab machine: saving it", Some(0.95));
    machine.save(&folder.join("devices"))?;
    fs::remove_dir_all(&run)?;
    fs::remove_file(folder.join("agent.cpio"))?;
    Ok(fs::remove_file(initrd)?)
}

fn fill(mailbox: &Path, guest: &Guest, watch: &mut Watch<'_>) -> Result<()> {
    let mut session = Session::prepare(mailbox, watch)?;
    session.start();
    let files = [(guest.disk(), inside::DISK), (guest.kernel(), inside::KERNEL), (guest.initrd(), inside::INITRD)];
    for (source, target) in &files {
        session.queue_put(source, target, 0o644, watch)?;
        session.await_put(watch)?;
    }
    // Everything on the disk and nothing in the page cache: each clone starts from the same cold state.
    let settle = "sync && echo 3 > /proc/sys/vm/drop_caches && test -c /dev/kvm && df -k /lab";
    let exec = Exec { argv: vec!["bash".into(), "-c".into(), settle.into()], ..Exec::default() };
    session.queue_exec(&exec, watch)?;
    let mut text = Vec::new();
    let exit = session.await_exit(
        &mut |_: Stream, bytes| {
            text.extend_from_slice(bytes);
            Ok(())
        },
        watch,
    )?;
    if exit.code != 0 {
        bail!("settling the machine's disk failed ({}): {}", exit.code, String::from_utf8_lossy(&text).trim());
    }
    session.close(watch)
}

/// The agent's binary, beside this program, built from the sources this program knows.
///
/// # Errors
/// When there is none, or one from other sources.
pub fn find_agent() -> Result<PathBuf> {
    let me = std::env::current_exe().context("where this program is")?;
    let mut looked = Vec::new();
    // A test or an example lives one folder deeper than the programs.
    for folder in me.ancestors().skip(1).take(2) {
        let path = folder.join("tare-agent");
        if path.is_file() {
            let print = output(Command::new(&path).arg("--fingerprint"))?;
            if print.trim() == format!("{:016x}", agent::FINGERPRINT) {
                return Ok(path);
            }
            bail!("{} was built from other sources than tare-lab: build both again", path.display());
        }
        looked.push(path.display().to_string());
    }
    bail!("tare-agent is not beside tare-lab (looked for {}): build it with `cargo build -p agent`", looked.join(", "))
}
