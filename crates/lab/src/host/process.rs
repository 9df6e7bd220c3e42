// SPDX-License-Identifier: Apache-2.0
//! Child processes that can't outlive their purpose: killed with this process, killed on drop, never waited for forever.
//!
//! Used by the builders (tools that make images) and by `qemu`. The kernel's parent-death signal is tied to the *thread*
//! that spawned the child, so whoever spawns a mortal child keeps that thread alive as long as the child.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};

/// A child in a process group of its own, killed as a group when dropped.
#[derive(Debug)]
pub struct Mortal {
    child: Child,
}

impl Mortal {
    /// Starts `command`; the kernel kills the child when the calling thread ends.
    ///
    /// # Errors
    /// What starting says, with the program's name.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        let parent = std::process::id();
        // SAFETY: between fork and exec only async-signal-safe system calls without memory arguments are made.
        unsafe {
            command.process_group(0).pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
                    return Err(io::Error::last_os_error());
                }
                if u32::try_from(libc::getppid()) != Ok(parent) {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                Ok(())
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}: is it installed?", command.get_program().display()))?;
        Ok(Self { child })
    }

    /// Process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The status, if it has ended.
    ///
    /// # Errors
    /// What `waitpid` says.
    pub fn ended(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits at most `limit`; `None` when that was not enough.
    ///
    /// # Errors
    /// What `waitpid` says.
    pub fn wait_for(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.ended()? {
                return Ok(Some(status));
            }
            if begin.elapsed() > limit {
                return Ok(None);
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Mortal {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // SAFETY: plain system call; the child leads its group and is not reaped yet, so the id is its own.
            unsafe { libc::kill(-pid, libc::SIGKILL) };
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a tool to its end, at most `limit`; its output goes to `log`, whose last lines are in the error.
///
/// # Errors
/// When the tool can't start, takes too long or fails.
pub fn run(command: &mut Command, limit: Duration, log: &Path) -> Result<()> {
    let what = command.get_program().display().to_string();
    let out = File::options().create(true).append(true).open(log).with_context(|| format!("open {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
    let mut child = Mortal::spawn(command)?;
    match child.wait_for(limit)? {
        Some(status) if status.success() => Ok(()),
        Some(status) => bail!("{what} failed ({status}); it said:\n{}", tail(log, 12)),
        None => bail!("{what} took longer than {} s and was ended; it said:\n{}", limit.as_secs(), tail(log, 12)),
    }
}

/// Runs a quick tool and gives its standard output as text.
///
/// # Errors
/// When it can't start or fails.
pub fn output(command: &mut Command) -> Result<String> {
    let what = command.get_program().display().to_string();
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot start {what}: is it installed?"))?;
    if !output.status.success() {
        return Err(anyhow!("{what} failed ({}): {}", output.status, String::from_utf8_lossy(&output.stderr).trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The last `lines` lines of a text file, or a word about why there are none.
#[must_use]
pub fn tail(path: &Path, lines: usize) -> String {
    match fs::read(path) {
        Err(error) => format!("({}: {error})", path.display()),
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let all: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
            all[all.len().saturating_sub(lines)..].join("\n")
        }
    }
}

/// When process `pid` started, in the kernel's ticks since boot; `None` when there is no such process (or a dead one).
/// With the pid it names a process for good, where a pid alone may have been given to another.
#[must_use]
pub fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_child_is_dead_and_so_is_what_it_started() {
        let mut child =
            Mortal::spawn(Command::new("sh").args(["-c", "sleep 1000 & echo $!; wait"]).stdout(Stdio::piped()))
                .unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(child.child.stdout.take().unwrap()), &mut line).unwrap();
        let grandchild: u32 = line.trim().parse().unwrap();
        let pid = child.id();
        assert!(start_of(pid).is_some() && start_of(grandchild).is_some());
        drop(child);
        assert_eq!(start_of(pid), None);
        let begin = Instant::now();
        while start_of(grandchild).is_some() {
            assert!(begin.elapsed() < Duration::from_secs(60), "the grandchild lives on");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn a_failing_tool_is_quoted_and_a_slow_one_is_ended() {
        let log = std::env::temp_dir().join(format!("tare-lab-test-{}.log", std::process::id()));
        let failed =
            run(Command::new("sh").args(["-c", "echo broken pipe organ >&2; exit 3"]), Duration::from_secs(20), &log);
        let text = format!("{:#}", failed.unwrap_err());
        assert!(text.contains("broken pipe organ") && text.contains("exit status: 3"), "{text}");
        let slow = run(Command::new("sleep").arg("1000"), Duration::from_millis(50), &log);
        assert!(format!("{:#}", slow.unwrap_err()).contains("took longer"));
        fs::remove_file(log).unwrap();
    }

    #[test]
    fn a_process_is_named_by_its_start() {
        let me = std::process::id();
        assert!(start_of(me).is_some());
        assert_eq!(start_of(me), start_of(me));
        assert_eq!(start_of(u32::MAX), None);
    }
}
