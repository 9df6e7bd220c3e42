// SPDX-License-Identifier: Apache-2.0
//! The lab machine that stays: `tare-lab host up`, `exec`, `put`, `get`, `down`, `info`.
//!
//! There is at most one per cache folder. It is a QEMU process of its own that several commands can use at once; who it is
//! stands in its pid file, and a pid that is not its own any more counts as "down".

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use agent::wire::Exec;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::cache::{Cache, Key};
use super::kernel::Kernel;
use super::process::start_of;
use super::qemu;
use super::session::{Exit, Session, Sink, Watch};
use super::snapshot::{Snapshot, inside};

/// Longest wait for a restored machine's agent.
const WAKE: Duration = Duration::from_secs(60);
/// A wait that has no natural limit still has one.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// The standing machine of one cache folder.
#[derive(Debug, Clone)]
pub struct Standing {
    folder: PathBuf,
}

impl Standing {
    /// The one of `cache`, whether it runs or not.
    #[must_use]
    pub fn of(cache: &Cache) -> Self {
        Self { folder: cache.root().join("host") }
    }

    /// Its process, if it runs.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        qemu::pid(&self.folder)
    }

    /// Starts it from `snapshot`; what is left of an earlier one is cleared away first.
    ///
    /// # Errors
    /// When it runs already or does not come up; a half-started one is ended.
    pub fn up(&self, snapshot: &Snapshot, stop: &dyn Fn() -> bool) -> Result<()> {
        if self.pid().is_some() {
            bail!("the lab machine is up already: `tare-lab host down` ends it");
        }
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder).with_context(|| format!("clear {}", self.folder.display()))?;
        }
        let done = self.wake(snapshot, stop);
        if done.is_err() {
            let _ = self.down();
        }
        done
    }

    fn wake(&self, snapshot: &Snapshot, stop: &dyn Fn() -> bool) -> Result<()> {
        let mut machine = snapshot.restore_standing(&self.folder)?;
        machine.go()?;
        machine.await_agent(WAKE, stop)?;
        fs::write(self.folder.join("mode"), snapshot.mode().name())?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs();
        let argv = vec!["date".into(), "--set".into(), format!("@{now}")];
        let exit = self.exec(&Exec { argv, ..Exec::default() }, &mut |_, _| Ok(()), &|| 0)?;
        if exit.code != 0 {
            bail!("the lab machine came up but does not work: setting its clock failed");
        }
        Ok(())
    }

    /// Runs a command in it. `signal` gives a signal to pass on, once each, or 0.
    ///
    /// # Errors
    /// When it is down, ends meanwhile, or the command can't be started.
    pub fn exec(&self, exec: &Exec, sink: Sink<'_>, signal: &dyn Fn() -> i32) -> Result<Exit> {
        self.with_session(|session, watch| {
            session.queue_exec(exec, watch)?;
            session.await_exit_with(sink, signal, watch)
        })
    }

    /// Copies a file into it.
    ///
    /// # Errors
    /// When it is down, or the file can't be read here or written there.
    pub fn put(&self, source: &Path, target: &str, mode: u32) -> Result<()> {
        self.with_session(|session, watch| {
            session.queue_put(source, target, mode, watch)?;
            session.await_put(watch)
        })
    }

    /// Copies a file out of it.
    ///
    /// # Errors
    /// When it is down, or the file can't be read there or written here.
    pub fn get(&self, source: &str, target: &Path) -> Result<()> {
        self.with_session(|session, watch| session.get(source, target, watch))
    }

    fn with_session<T>(&self, job: impl FnOnce(&mut Session, &mut Watch<'_>) -> Result<T>) -> Result<T> {
        let pid = self.pid().context("the lab machine is down: `tare-lab host up` starts it")?;
        let start = start_of(pid);
        let mut check = || {
            if start.is_some() && start_of(pid) == start {
                return Ok(());
            }
            bail!("the lab machine ended meanwhile; its last words are in {}", self.folder.join("console").display())
        };
        let mut watch = Watch { deadline: Instant::now() + LONG, check: &mut check };
        let mut session = Session::prepare(&self.folder.join("mailbox"), &mut watch)?;
        session.start();
        let result = job(&mut session, &mut watch)?;
        watch.deadline = Instant::now() + WAKE;
        session.close(&mut watch)?;
        Ok(result)
    }

    /// Ends it, if it runs, and clears its folder.
    ///
    /// # Errors
    /// When it can't be ended.
    pub fn down(&self) -> Result<()> {
        if let Some(pid) = self.pid() {
            let start = start_of(pid);
            let id = i32::try_from(pid).context("odd pid")?;
            let begin = Instant::now();
            // SAFETY: plain system call; the pid was just checked to be this machine's.
            unsafe { libc::kill(id, libc::SIGTERM) };
            while start.is_some() && start_of(pid) == start {
                if begin.elapsed() > Duration::from_secs(5) {
                    // SAFETY: as above; the start time says it is still the same process.
                    unsafe { libc::kill(id, libc::SIGKILL) };
                }
                if begin.elapsed() > Duration::from_secs(20) {
                    bail!("the lab machine (process {pid}) does not end");
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        if self.folder.exists() {
            fs::remove_dir_all(&self.folder).with_context(|| format!("clear {}", self.folder.display()))?;
        }
        Ok(())
    }

    /// What there is to know about it and what it is made of.
    ///
    /// # Errors
    /// When QEMU is not installed.
    pub fn info(&self, cache: &Cache) -> Result<Value> {
        use super::recipe;
        let place = |kind: &str, key: Key| cache.find(kind, key).map(|path| path.display().to_string());
        let mode = fs::read_to_string(self.folder.join("mode")).ok();
        let guest = cache.find("guest", recipe::guest_key());
        let kernel = guest.as_ref().and_then(|path| fs::read_to_string(path.join("release")).ok());
        Ok(json!({
            "state": if self.pid().is_some() { "up" } else { "down" },
            "pid": self.pid(),
            "mode": mode,
            "folder": self.folder.display().to_string(),
            "cache": cache.root().display().to_string(),
            "qemu": qemu::version()?,
            "qemu_mendable": qemu::is_mendable(),
            "kernel": kernel,
            "memory_bytes": recipe::MACHINE_MEMORY,
            "disk_bytes": recipe::MACHINE_DISK,
            "guest_image": place("guest", recipe::guest_key()),
            "machine_root": place("machine", recipe::machine_key()),
            "snapshots": {
                "counted": place("snapshot-counted", super::snapshot::key(qemu::Mode::Counted)?),
                "threaded": place("snapshot-threaded", super::snapshot::key(qemu::Mode::Threaded)?),
                "passthrough": place("snapshot-passthrough", super::snapshot::key(qemu::Mode::Passthrough)?),
            },
            "kernels": { "iommufd": Kernel::iommufd(cache).map(|kernel| kernel.folder().display().to_string()) },
            "inside": { "disk": inside::DISK, "kernel": inside::KERNEL, "initrd": inside::INITRD, "bin": inside::BIN },
        }))
    }
}
