// SPDX-License-Identifier: Apache-2.0
//! Samples directly on this host: for hosts with hardware KVM, where native is the host itself.
//!
//! One bash per sample, in its own process group and with a parent-death signal, so that nothing outlives the run. One lane:
//! samples side by side would take each other's time.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{Facts, Paths, Place, console_initrd, nameless, path_of};
use crate::host::cache::Cache;
use crate::host::snapshot::find_agent;
use crate::host::{Progress, image};
use crate::interrupt;

/// This host.
pub struct Direct {
    paths: Paths,
    guest_kernel: Option<String>,
    _console_initrd: Option<File>,
}

impl Direct {
    /// Makes the guests' images, or finds them in the cache.
    pub fn open(tare: Option<&Path>, progress: Progress<'_>) -> Result<Self> {
        let cache = Cache::open()?;
        let guest = image::guest(&cache, progress)?;
        let release = guest.release()?;
        let small = nameless(cache.root(), &console_initrd(&guest.disk(), &release, cache.root())?)?;
        let text = |path: &Path| path.to_str().map(str::to_owned).context("the cache folder's path is not UTF-8");
        let paths = Paths {
            kernel: text(&guest.kernel())?,
            initrd: text(&guest.initrd())?,
            console_initrd: path_of(&small),
            disk: text(&guest.disk())?,
            copy_disk: true,
            root: "/dev/vda".to_owned(),
            work: text(&cache.root().join("work"))?,
            tare: tare.map(text).transpose()?.unwrap_or_default(),
            watch: watcher(&find_agent()?)?,
        };
        Ok(Self { guest_kernel: Some(release), _console_initrd: Some(small), ..Self::at(paths)? })
    }

    /// A place that works in `paths.work`.
    fn at(paths: Paths) -> Result<Self> {
        std::fs::create_dir_all(&paths.work)
            .with_context(|| format!("can't make the work directory {}", paths.work))?;
        Ok(Self { paths, guest_kernel: None, _console_initrd: None })
    }
}

/// The words that start the watcher. The runner splits them at spaces, so its path may have none.
fn watcher(agent: &Path) -> Result<String> {
    match agent.to_str() {
        Some(path) if !path.contains(char::is_whitespace) => Ok(format!("{path} watch")),
        _ => bail!("{} has a space in its path, which samples can't use: move the programs", agent.display()),
    }
}

impl Place for Direct {
    fn facts(&self) -> Facts {
        Facts {
            place: "direct",
            time: "wall time",
            statement: "Every subject ran directly on this host under hardware KVM, one sample at a time, in mixed order; native \
                is the host itself. Times are wall times and move with whatever else the host does.",
            not_priced: &["other load on the host: compare medians, and look at the spread"],
            machine: None,
            guest_kernel: self.guest_kernel.clone(),
            alone: false,
        }
    }

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn lanes(&self) -> usize {
        1
    }

    fn cpus(&self) -> u32 {
        if std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1) { 2 } else { 1 }
    }

    fn run(&self, script: &str, limit: Duration) -> Result<String> {
        let mut command = Command::new("bash");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
        // SAFETY: prctl with PR_SET_PDEATHSIG takes no pointers and is async-signal-safe; nothing else runs before exec.
        unsafe {
            command.pre_exec(|| {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
                Ok(())
            });
        }
        let mut group = Group(command.spawn().context("can't start bash")?);
        if let Some(mut stdin) = group.0.stdin.take() {
            stdin.write_all(script.as_bytes()).context("bash ended early")?;
        }
        let mut stdout = group.0.stdout.take().context("bash has no output")?;
        let reader = std::thread::spawn(move || {
            let mut bytes = Vec::new();
            stdout.read_to_end(&mut bytes).map(|_| bytes)
        });
        let deadline = Instant::now() + limit + Duration::from_secs(60);
        loop {
            if group.0.try_wait()?.is_some() {
                break;
            }
            if interrupt::asked() {
                bail!("interrupted");
            }
            if Instant::now() > deadline {
                bail!("the sample took longer than {} s", limit.as_secs() + 60);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let bytes = match reader.join() {
            Ok(bytes) => bytes?,
            Err(_) => bail!("reading the sample's report failed"),
        };
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// A child that leads a process group; dropping it ends the whole group.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if !matches!(self.0.try_wait(), Ok(Some(_))) {
            let pid = i32::try_from(self.0.id()).unwrap_or(i32::MAX);
            // SAFETY: kill takes no pointers; the group is led by our own child, which has not been waited for.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
            let _ = self.0.wait();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::scenario;
    use crate::schedule::Plan;
    use crate::subject::parse_list;

    fn place(dir: &std::path::Path) -> Direct {
        let work = dir.join("it's here").display().to_string();
        let watch = crate::sample::tests::STAND_IN.to_owned();
        Direct::at(Paths { work, watch, ..Paths::default() }).unwrap()
    }

    #[test]
    fn a_script_runs_and_its_output_comes_back() {
        let dir = tempfile::tempdir().unwrap();
        let text = place(dir.path()).run("echo one; echo two >&2; exit 4", Duration::from_secs(5)).unwrap();
        assert_eq!(text, "one\n");
    }

    /// The whole path with a stand-in monitor: a shell that speaks like a guest.
    #[test]
    fn a_command_template_is_all_a_subject_needs() {
        let dir = tempfile::tempdir().unwrap();
        // It stays until its memory was read, however busy the host is.
        let subjects = parse_list(&["fake=sh -c \"echo booting {kernel}; echo @@lab ready; \
            until grep -q memory report.txt; do sleep 0.05; done; echo {memory_mib}\""])
        .unwrap();
        let bundles = scenario::suite("boot", 1.0).unwrap();
        let plan =
            Plan { bundles: &bundles[..1], subjects: &subjects, repeat: 2, seed: 1, jobs: 1, budget: None, keep: None };
        let ledger = plan.run(&place(dir.path()), &|_| {}).unwrap();
        assert!(ledger.failures.is_empty(), "{:?}", ledger.failures);
        assert_eq!(ledger.taken.len(), 2);
        let figures = &ledger.taken[0].figures;
        assert_eq!(figures[0].1.metric, "time to user space");
        assert!(figures.iter().any(|(_, figure)| figure.metric == "RSS beside guest memory" && figure.value > 0.0));
    }
}
