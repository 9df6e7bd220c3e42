// SPDX-License-Identifier: Apache-2.0
//! Samples in clones of the lab machine: for hosts without hardware KVM. Native is the lab machine itself.
//!
//! Each sample gets a fresh clone with instruction-counted time, so samples can run side by side without touching each
//! other's figures, and the guests' disk needs no copy. A machine that locks up is ended by a limit on CPU time.

use std::cell::{Cell, OnceCell};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::{Facts, Paths, Place, console_initrd, nameless, path_of};
use crate::host::Progress;
use crate::host::cache::Cache;
use crate::host::clone::{self, Bring, Job};
use crate::host::qemu::{self, Mode};
use crate::host::snapshot::{Snapshot, inside};
use crate::interrupt;

/// Where the runner's script is put.
const SCRIPT: &str = "/lab/sample.sh";
/// Where the small initrd is put.
const CONSOLE_INITRD: &str = "/lab/console-initrd.img";
/// Seconds of this host's CPU that a second of the machine's clock may take, at worst.
const SLOWDOWN: u32 = 7;
/// The longest any sample may take here, whatever its clock says.
const LONGEST: Duration = Duration::from_secs(3600);
/// So long without any CPU time a machine has gone to sleep for good: its own timers take some, and the busiest host
/// gives some.
const STILL: Duration = Duration::from_secs(240);

/// How samples are taken in a machine that counts instructions.
const COUNTED: &str = "This host has no hardware KVM, so every subject ran in the lab machine: a Linux with a real KVM under \
    QEMU's software CPU, which emulates AMD SVM with nested paging. Its clock counts instructions, so figures repeat and do not \
    move with the load of the host. Each sample is one fresh clone of one saved machine; native is the lab machine itself, and \
    all disks live in its memory (ext4 on a RAM disk).";
/// And in one that has devices to hand on.
const FREE: &str = "Every subject ran in the lab machine that has an IOMMU, an NVMe disk and a network card: a Linux with a real \
    KVM under QEMU's software CPU, which emulates AMD SVM with nested paging. Its two CPUs run freely, so times are this host's \
    and move with its load: what counts is the ratio of subjects in one run. Each sample is one fresh clone of one saved \
    machine, one at a time; the disk that is handed on is a file of this host, the card's wire ends in the machine.";

/// The lab.
pub struct Lab {
    cache: Cache,
    snapshot: Snapshot,
    paths: Paths,
    tare: Option<PathBuf>,
    release: String,
    console_initrd: File,
}

impl Lab {
    /// Makes the lab machine, or finds it in the cache.
    pub fn open(mode: Mode, tare: Option<&Path>, progress: Progress<'_>) -> Result<Self> {
        let cache = Cache::open()?;
        let snapshot = Snapshot::get(&cache, (mode, None), &interrupt::asked, progress)?;
        let release = snapshot.guest().release()?;
        let paths = Paths {
            kernel: inside::KERNEL.to_owned(),
            initrd: inside::INITRD.to_owned(),
            console_initrd: CONSOLE_INITRD.to_owned(),
            disk: inside::DISK.to_owned(),
            copy_disk: false,
            root: "/dev/vda".to_owned(),
            work: "/lab/work".to_owned(),
            tare: format!("{}/tare", inside::BIN),
            watch: "/usr/sbin/tare-agent watch".to_owned(),
        };
        let small = nameless(cache.root(), &console_initrd(&snapshot.guest().disk(), &release, cache.root())?)?;
        Ok(Self { cache, snapshot, paths, tare: tare.map(Path::to_owned), release, console_initrd: small })
    }
}

impl Place for Lab {
    fn facts(&self) -> Facts {
        let mode = self.snapshot.mode();
        let (gib, counted) = (mode.memory() >> 30, mode == Mode::Counted);
        Facts {
            place: "lab",
            time: if counted {
                "counted: one instruction is one nanosecond"
            } else {
                "this host's, under a software CPU"
            },
            statement: if counted { COUNTED } else { FREE },
            not_priced: &[
                "what a world switch costs in hardware (see the exits, which are counted and priced with assumed constants)",
                "cache, TLB and branch misses, and nested page walks: every instruction costs the same",
                "a disk's own latency: the disk is memory",
            ],
            machine: Some(format!(
                "{} CPU, {gib} GiB, Linux {}, under {}",
                self.cpus(),
                self.release,
                qemu::version().unwrap_or_else(|_| "QEMU".to_owned())
            )),
            guest_kernel: Some(self.release.clone()),
            alone: true,
        }
    }

    fn paths(&self) -> &Paths {
        &self.paths
    }

    fn lanes(&self) -> usize {
        // Where time is the host's samples would take each other's.
        if self.snapshot.mode() == Mode::Counted { 64 } else { 1 }
    }

    fn cpus(&self) -> u32 {
        if self.snapshot.mode() == Mode::Counted { 1 } else { 2 }
    }

    fn run(&self, script: &str, limit: Duration) -> Result<String> {
        let file = nameless(self.cache.root(), script.as_bytes())?;
        self.run_file(Path::new(&path_of(&file)), limit)
    }
}

impl Lab {
    fn run_file(&self, script: &Path, limit: Duration) -> Result<String> {
        let bring =
            |source: &Path, target: &str| Bring { source: source.to_owned(), target: target.to_owned(), mode: 0o755 };
        let mut files = vec![bring(script, SCRIPT), bring(Path::new(&path_of(&self.console_initrd)), CONSOLE_INITRD)];
        if let Some(tare) = &self.tare {
            files.push(bring(tare, &self.paths.tare));
        }
        let job = Job {
            files,
            argv: vec!["bash".to_owned(), SCRIPT.to_owned()],
            env: Vec::new(),
            clock_limit: limit + Duration::from_secs(30),
            real_limit: LONGEST,
            quiet: true,
        };
        // A machine that locks up burns its CPU, or never wakes again; one on a busy host just waits, but gets a little now and
        // then. So the watchdog looks at CPU time.
        let watchdog = Watchdog::new(limit * SLOWDOWN, STILL);
        let outcome = clone::run(&self.cache, &self.snapshot, &job, &|| interrupt::asked() || watchdog.barks());
        if let Some(why) = watchdog.barked.get() {
            bail!("the lab machine {why}");
        }
        let outcome = outcome?;
        if outcome.exit.timed_out {
            bail!("the sample was ended by the lab machine's watchdog");
        }
        let text = String::from_utf8_lossy(&outcome.stdout).into_owned();
        if outcome.exit.code != 0 && !text.contains("%% stop") {
            let error = String::from_utf8_lossy(&outcome.stderr);
            let last = error.lines().last().unwrap_or("it said nothing");
            bail!("the sample's script ended with status {}: {last}", outcome.exit.code);
        }
        Ok(text)
    }
}

/// Ends a machine that has used too much CPU time, or none for long. Serves the machine that the current thread starts.
struct Watchdog {
    limit: Duration,
    still: Duration,
    looked: Cell<Instant>,
    used: Cell<Duration>,
    /// When `used` last grew.
    moved: Cell<Instant>,
    /// Why it was ended.
    barked: OnceCell<String>,
}

impl Watchdog {
    fn new(limit: Duration, still: Duration) -> Self {
        let now = Instant::now();
        let (looked, moved) = (Cell::new(now), Cell::new(now));
        Self { limit, still, looked, used: Cell::new(Duration::ZERO), moved, barked: OnceCell::new() }
    }

    /// Looks once a second.
    fn barks(&self) -> bool {
        if self.looked.get().elapsed() >= Duration::from_secs(1) {
            self.looked.set(Instant::now());
            let used = cpu_time_of_children();
            if used != self.used.replace(used) {
                self.moved.set(Instant::now());
            }
            let ended =
                |why, after: Duration, of| format!("{why}: it was ended after {} s {of} CPU time", after.as_secs());
            if used > self.limit {
                self.barked.get_or_init(|| ended("locked up", self.limit, "of"));
            } else if self.moved.get().elapsed() > self.still {
                self.barked.get_or_init(|| ended("stood still", self.still, "without"));
            }
        }
        self.barked.get().is_some()
    }
}

/// CPU time of the running processes that the current thread has started.
fn cpu_time_of_children() -> Duration {
    let children = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    children
        .split_whitespace()
        .filter_map(|pid| cpu_time(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?))
        .sum()
}

/// User and system time from the text of `/proc/PID/stat`, whose second field is a name in parentheses.
fn cpu_time(stat: &str) -> Option<Duration> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let ticks: u64 = fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?;
    // USER_HZ is 100 on every Linux.
    Some(Duration::from_millis(ticks * 10))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn cpu_time_is_read_behind_an_odd_name() {
        let stat = "12 (a) b) S 1 1 1 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 100 1 1";
        assert_eq!(cpu_time(stat), Some(Duration::from_secs(3)));
        assert_eq!(cpu_time("junk"), None);
    }

    #[test]
    fn a_child_that_burns_cpu_is_noticed_and_one_that_waits_is_not() {
        let mut waits = Command::new("sleep").arg("60").spawn().unwrap();
        let watchdog = Watchdog::new(Duration::from_millis(50), Duration::from_secs(600));
        std::thread::sleep(Duration::from_millis(1100));
        assert!(!watchdog.barks());
        let asleep = Watchdog::new(Duration::from_secs(600), Duration::from_millis(500));
        std::thread::sleep(Duration::from_millis(1100));
        assert!(asleep.barks(), "nothing for longer than it may");
        assert_eq!(asleep.barked.get().unwrap(), "stood still: it was ended after 0 s without CPU time");
        let mut burns = Command::new("sh").args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn().unwrap();
        while !watchdog.barks() {
            std::thread::sleep(Duration::from_millis(50));
        }
        for child in [&mut waits, &mut burns] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
