// SPDX-License-Identifier: Apache-2.0
//! One job in one fresh copy of the lab machine: restore, hand over, run, take the output, end.
//!
//! The job stands in the mailbox before the machine runs its first instruction, so in counted time two runs of the same
//! job do the same. Several clones may run at once, each on a thread of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use agent::wire::Exec;
use anyhow::{Context, Result, bail};

use super::cache::Cache;
use super::process::start_of;
use super::session::{Exit, Session, Stream, Watch};
use super::snapshot::Snapshot;

/// A file to bring along.
#[derive(Debug, Clone)]
pub struct Bring {
    /// Where it is here.
    pub source: PathBuf,
    /// Where it shall be in the machine.
    pub target: String,
    /// Its mode there.
    pub mode: u32,
}

/// What to do in a clone.
#[derive(Debug, Clone, Default)]
pub struct Job {
    /// Files to bring along.
    pub files: Vec<Bring>,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables for it.
    pub env: Vec<(String, String)>,
    /// Longest time on the machine's clock; zero for none.
    pub clock_limit: Duration,
    /// Longest time here: a machine that locks up is ended by this alone.
    pub real_limit: Duration,
    /// The agent keeps still while the command runs: for figures.
    pub quiet: bool,
}

/// What a job gave.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// How the command ended.
    pub exit: Exit,
    /// What it wrote to standard output.
    pub stdout: Vec<u8>,
    /// What it wrote to standard error.
    pub stderr: Vec<u8>,
    /// Time here, restoring included.
    pub real: Duration,
}

/// Runs `job` in a clone of `snapshot`. An error means that the *machine* failed (or `stop` said so); a command that
/// failed or ran out of time is an outcome.
///
/// # Errors
/// When the machine can't be restored, ends by itself, or does not answer in time.
pub fn run(cache: &Cache, snapshot: &Snapshot, job: &Job, stop: &dyn Fn() -> bool) -> Result<Outcome> {
    let begin = Instant::now();
    let folder = Folder::new(cache)?;
    let mut machine = snapshot.restore(&folder.0)?;
    let mailbox = machine.mailbox();
    let deadline = begin + job.real_limit;
    let mut idle = || if stop() { bail!("interrupted") } else { Ok(()) };
    let mut session = Session::prepare(&mailbox, &mut Watch { deadline, check: &mut idle })?;
    let exec = Exec {
        limit_ns: u64::try_from(job.clock_limit.as_nanos()).unwrap_or(u64::MAX),
        quiet: job.quiet,
        argv: job.argv.clone(),
        env: job.env.clone(),
        cwd: "/lab".into(),
    };
    // The machine goes on only when the mailbox is full or holds the whole job.
    let mut going = false;
    let mut check = || {
        if stop() {
            bail!("interrupted");
        }
        if !going {
            going = true;
            machine.go()?;
        }
        machine.check()
    };
    let mut watch = Watch { deadline, check: &mut check };
    for file in &job.files {
        session.queue_put(&file.source, &file.target, file.mode, &mut watch)?;
    }
    session.queue_exec(&exec, &mut watch)?;
    session.start();
    (watch.check)()?;
    for file in &job.files {
        session.await_put(&mut watch).with_context(|| format!("bringing {}", file.source.display()))?;
    }
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let exit = session.await_exit(
        &mut |stream, bytes| {
            if stream == Stream::Out { &mut stdout } else { &mut stderr }.extend_from_slice(bytes);
            Ok(())
        },
        &mut watch,
    )?;
    drop(session);
    drop(machine);
    Ok(Outcome { exit, stdout, stderr, real: begin.elapsed() })
}

/// A clone's folder, removed with it. Its name tells whose it is, so that leftovers of a killed run can be told apart.
#[derive(Debug)]
struct Folder(PathBuf);

impl Folder {
    fn new(cache: &Cache) -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let clones = cache.root().join("clones");
        fs::create_dir_all(&clones).with_context(|| format!("make {}", clones.display()))?;
        sweep(&clones)?;
        let me = std::process::id();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Self(clones.join(format!("{me}-{}-{number}", start_of(me).unwrap_or(0)))))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes the folders of processes that are gone; their machines went with them.
fn sweep(clones: &Path) -> Result<()> {
    for entry in fs::read_dir(clones)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let mut parts = name.split('-').map(str::parse::<u64>);
        let (Some(Ok(pid)), Some(Ok(start))) = (parts.next(), parts.next()) else { continue };
        if u32::try_from(pid).ok().and_then(start_of) != Some(start) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_dead_runs_are_swept_and_live_ones_stay() {
        let root = std::env::temp_dir().join(format!("tare-lab-clones-{}", std::process::id()));
        let cache = Cache::at(&root).unwrap();
        let mine = Folder::new(&cache).unwrap();
        fs::create_dir_all(&mine.0).unwrap();
        let clones = mine.0.parent().unwrap().to_owned();
        let dead = clones.join("4294967290-7-0");
        let reused = clones.join(format!("{}-1-0", std::process::id()));
        for folder in [&dead, &reused] {
            fs::create_dir_all(folder.join("x")).unwrap();
        }
        let other = Folder::new(&cache).unwrap();
        assert_ne!(mine.0, other.0);
        assert!(mine.0.exists() && !dead.exists() && !reused.exists());
        let path = mine.0.clone();
        drop(mine);
        assert!(!path.exists());
        fs::remove_dir_all(root).unwrap();
    }
}
