// SPDX-License-Identifier: Apache-2.0
//! The order of samples, and the loop that takes them.
//!
//! Subjects are interleaved in mixed order with a fixed seed, so that a slow drift of the host meets all alike. A sample that
//! fails is tried again and counted, never skipped in silence. Workers are scoped threads that share a queue under one lock.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::interrupt;
use crate::place::Place;
use crate::price::Exits;
use crate::report::Figure;
use crate::sample::{Order, Sample};
use crate::scenario::{Bundle, Kind, fileio, init, interrupts, load, net, passthrough};
use crate::subject::{Console, Subject};

/// Tries of one sample before it counts as missing.
pub const TRIES: u32 = 3;

/// One sample to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    /// Index into the bundles.
    pub bundle: usize,
    /// Index into the subjects.
    pub subject: usize,
    /// Round, from 0.
    pub round: u32,
    /// Earlier failed tries.
    pub tries: u32,
}

/// What is to be measured.
pub struct Plan<'a> {
    /// The bundles of the suite.
    pub bundles: &'a [Bundle],
    /// Who is measured.
    pub subjects: &'a [Subject],
    /// Samples of each.
    pub repeat: u32,
    /// Seed of the mixed order.
    pub seed: u64,
    /// Worker threads.
    pub jobs: usize,
    /// No new sample is started after this time, except those of the first round.
    pub budget: Option<Duration>,
    /// Where to keep what each sample reported, for a closer look.
    pub keep: Option<&'a Path>,
}

/// A sample that was taken.
#[derive(Clone, Debug)]
pub struct Taken {
    /// Which.
    pub task: Task,
    /// Its figures by workload.
    pub figures: Vec<(&'static str, Figure)>,
    /// Its exits by workload.
    pub exits: Vec<(&'static str, Exits)>,
    /// What the monitor said of its version.
    pub version: String,
}

/// What came of a try that did not fail.
enum Outcome {
    Taken(Taken),
    /// The place has not what the sample takes, and says so.
    Skipped(String),
}

/// A try that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Which.
    pub task: Task,
    /// Why.
    pub error: String,
}

/// Everything a run brought home.
#[derive(Debug, Default)]
pub struct Ledger {
    /// In the order of the plan.
    pub taken: Vec<Taken>,
    /// In the order they happened.
    pub failures: Vec<Failure>,
    /// Samples left out because the time budget was spent.
    pub left_out: usize,
    /// What the place has not enough for, each once, with the bundle's index.
    pub skipped: Vec<(usize, String)>,
}

/// News for the progress display.
pub enum News<'a> {
    /// A worker starts a sample.
    Started(Task),
    /// A sample is there.
    Taken(Task, Duration),
    /// A try failed; the flag says whether it is tried again.
    Failed(Task, &'a str, bool),
    /// The place has not what a sample takes, for this reason.
    Skipped(Task, &'a str),
    /// A sample is left out because the time budget is spent.
    LeftOut,
}

impl Plan<'_> {
    /// All tasks in mixed order: each round holds every bundle and subject once, shuffled.
    pub fn tasks(&self) -> Vec<Task> {
        let mut random = self.seed | 1;
        let mut out = Vec::new();
        for round in 0..self.repeat {
            let start = out.len();
            for (bundle, what) in self.bundles.iter().enumerate() {
                for (subject, who) in self.subjects.iter().enumerate() {
                    if what.fits(who) {
                        out.push(Task { bundle, subject, round, tries: 0 });
                    }
                }
            }
            for i in (start + 1..out.len()).rev() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let span = (i - start + 1) as u64;
                out.swap(i, start + (random % span) as usize);
            }
        }
        out
    }

    /// Takes all samples. Stops early, with an error, when the user asked to.
    pub fn run(&self, place: &dyn Place, tell: &(dyn Fn(News) + Sync)) -> Result<Ledger> {
        let deadline = self.budget.map(|budget| Instant::now() + budget);
        let queue: Mutex<VecDeque<Task>> = Mutex::new(self.tasks().into());
        let ledger: Mutex<Ledger> = Mutex::default();
        std::thread::scope(|scope| {
            for _ in 0..self.jobs.max(1) {
                scope.spawn(|| self.work(place, tell, deadline, &queue, &ledger));
            }
        });
        if interrupt::asked() {
            bail!("interrupted; everything that was started has been ended");
        }
        let mut ledger = ledger.into_inner().unwrap_or_else(PoisonError::into_inner);
        ledger.taken.sort_by_key(|taken| (taken.task.bundle, taken.task.subject, taken.task.round));
        Ok(ledger)
    }

    fn work(
        &self,
        place: &dyn Place,
        tell: &(dyn Fn(News) + Sync),
        deadline: Option<Instant>,
        queue: &Mutex<VecDeque<Task>>,
        ledger: &Mutex<Ledger>,
    ) {
        while !interrupt::asked() {
            let Some(task) = lock(queue).pop_front() else { return };
            if task.round > 0 && deadline.is_some_and(|deadline| Instant::now() > deadline) {
                lock(ledger).left_out += 1;
                tell(News::LeftOut);
                continue;
            }
            tell(News::Started(task));
            let start = Instant::now();
            match self.take(place, task) {
                Ok(Outcome::Skipped(why)) => {
                    let mut ledger = lock(ledger);
                    if !ledger.skipped.iter().any(|(bundle, _)| *bundle == task.bundle) {
                        ledger.skipped.push((task.bundle, why.clone()));
                    }
                    drop(ledger);
                    tell(News::Skipped(task, &why));
                }
                Ok(Outcome::Taken(taken)) => {
                    lock(ledger).taken.push(taken);
                    tell(News::Taken(task, start.elapsed()));
                }
                Err(_) if interrupt::asked() => return,
                Err(error) => {
                    let error = format!("{error:#}");
                    let again = task.tries + 1 < TRIES;
                    tell(News::Failed(task, &error, again));
                    lock(ledger).failures.push(Failure { task, error });
                    if again {
                        lock(queue).push_back(Task { tries: task.tries + 1, ..task });
                    }
                }
            }
        }
    }

    fn take(&self, place: &dyn Place, task: Task) -> Result<Outcome> {
        let bundle = &self.bundles[task.bundle];
        let order = order(bundle, &self.subjects[task.subject], place, task)?;
        let text = place.run(&order.script(), order.limit)?;
        if let Some(dir) = self.keep {
            let name =
                format!("{}-{}-{}-{}.txt", bundle.name, self.subjects[task.subject].name, task.round, task.tries);
            let path = dir.join(name.replace(' ', "-"));
            std::fs::write(&path, &text).with_context(|| format!("can't write {}", path.display()))?;
        }
        if let Some(why) = text.lines().find_map(|line| line.strip_prefix("%% skip ")) {
            return Ok(Outcome::Skipped(why.to_owned()));
        }
        let sample = Sample::parse(&text)?;
        let (figures, exits) = (bundle.figures(&sample)?, bundle.exits(&sample));
        Ok(Outcome::Taken(Taken { task, figures, exits, version: sample.version }))
    }
}

/// What a place has to run for one task.
fn order(bundle: &Bundle, subject: &Subject, place: &dyn Place, task: Task) -> Result<Order> {
    let paths = place.paths();
    let scratch =
        format!("{}/{}-{}-{}-{}-{}", paths.work, std::process::id(), task.bundle, task.subject, task.round, task.tries);
    let private = format!("{scratch}/root.raw");
    let copy = bundle.needs_disk() && paths.copy_disk && !subject.is_native();
    let console = bundle.console(subject);
    // A boot brings its own initrd: a tiny one in the script, or the place's with the modules of a virtio console.
    let boots = !bundle.needs_disk();
    let bare = matches!(bundle.kind, Kind::Guest { .. });
    let file = match console {
        _ if subject.wants("load_initrd") && !boots => Some((load::ARCHIVE.to_owned(), load::archive()?)),
        _ if bare => Some(("guest".to_owned(), interrupts::guest()?)),
        Console::Serial if boots => Some(("initrd".to_owned(), init::initrd(&[]))),
        _ => None,
    };
    let kernel = if bare { format!("{scratch}/guest") } else { paths.kernel.clone() };
    let initrd = match (&file, boots) {
        (Some(_), false) => paths.initrd.clone(),
        (Some(_), true) => format!("{scratch}/initrd"),
        (None, true) => paths.console_initrd.clone(),
        (None, false) => paths.initrd.clone(),
    };
    let command = if subject.is_native() {
        bundle.native(&format!("{scratch}/data"))
    } else {
        let cmdline = bundle.cmdline(console, &paths.root);
        let json = serde_json::to_string(&cmdline)?;
        let mut values: BTreeMap<&str, String> = BTreeMap::from([
            ("kernel", kernel),
            ("cmdline_json", json.trim_matches('"').to_owned()),
            ("cmdline", cmdline),
            ("memory_mib", bundle.memory_mib.to_string()),
            ("cpus", place.cpus().to_string()),
            ("console", console.word().to_owned()),
            ("scratch", scratch.clone()),
            ("tare", paths.tare.clone()),
        ]);
        if !bare {
            values.insert("initrd", initrd);
        }
        if !boots {
            values.insert("load_initrd", format!("{scratch}/{}", load::INITRD));
        }
        if bundle.needs_disk() {
            values.insert("disk", if copy { private.clone() } else { paths.disk.clone() });
        }
        if bundle.disk.is_some() {
            values.insert("qcow2", format!("{scratch}/{}", fileio::QCOW2));
            values.insert("raw", format!("{scratch}/{}", fileio::RAW));
        }
        if bundle.net.is_some() {
            values.insert("mac", net::MAC.to_owned());
            values.insert("tap", net::TAP.to_owned());
            values.insert("passt", format!("{scratch}/{}", net::PASST));
        }
        if let Kind::Handed(handed) = &bundle.kind {
            values.insert("initrd", format!("{scratch}/{}", passthrough::INITRD));
            values.insert("handed_disk", passthrough::DISK.to_owned());
            values.insert("pages", handed.pages.to_owned());
            values.insert("qemu_memory", handed.qemu_memory());
            if handed.card {
                values.insert("handed_card", passthrough::CARD.to_owned());
            }
        }
        subject.command(&values)?
    };
    let mut prepare = bundle.disk.map(|disk| disk.prepare(&scratch, subject.wants("qcow2"))).unwrap_or_default();
    if let Some(way) = bundle.net {
        let agent = paths.watch.split(' ').next().unwrap_or_default();
        let disk = if copy { &private } else { &paths.disk };
        let (tap, passt) = (subject.wants("tap"), subject.wants("passt"));
        prepare = net::Wire { scratch: &scratch, agent, disk, tap, passt, way }.prepare();
    }
    if let Kind::Handed(handed) = &bundle.kind {
        prepare = handed.prepare(&scratch, &paths.disk, bundle.memory_mib);
    }
    if subject.wants("load_initrd") && !boots {
        prepare = format!(
            "{}{}{}",
            load::prepare(&paths.initrd, &scratch),
            if prepare.is_empty() { "" } else { " && " },
            prepare
        );
    }
    let program = match subject.program() {
        Some("{tare}") => paths.tare.clone(),
        program => program.unwrap_or_default().to_owned(),
    };
    Ok(Order {
        command,
        program,
        scratch,
        file,
        copy: copy.then(|| (paths.disk.clone(), private.clone())),
        prepare,
        watch: paths.watch.clone(),
        guest_mib: if subject.is_native() { 0 } else { bundle.memory_mib },
        poll: Duration::from_millis(bundle.poll_millis()),
        limit: Duration::from_secs(bundle.limit_seconds),
        apart: bundle.net.is_some(),
        alone: place.facts().alone,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::place::mock::Mock;
    use crate::scenario;
    use crate::subject::parse_list;

    const BOOT: &str = "%% mark 2000000 ready exits=4000 io_exits=3000\n%% memory 4096 4000 1 1\n%% end 3000000 exit 0\n\
        %% console\nx\n%% stderr\n\n%% stop\n";

    fn plan<'a>(bundles: &'a [Bundle], subjects: &'a [Subject]) -> Plan<'a> {
        Plan { bundles, subjects, repeat: 3, seed: 7, jobs: 1, budget: None, keep: None }
    }

    #[test]
    fn every_round_holds_every_pair_once_in_an_order_that_repeats() {
        let (bundles, subjects) = (scenario::suite("all", 0.1).unwrap(), parse_list(&["native,qemu,tare"]).unwrap());
        let plan = plan(&bundles, &subjects);
        let tasks = plan.tasks();
        assert_eq!(tasks.len(), 3 * (3 + 3 + 2 + 2 + 2));
        for (round, chunk) in tasks.chunks(12).enumerate() {
            assert!(chunk.iter().all(|task| task.round as usize == round));
            let mut pairs: Vec<_> = chunk.iter().map(|task| (task.bundle, task.subject)).collect();
            pairs.sort_unstable();
            pairs.dedup();
            assert_eq!(pairs.len(), 12);
        }
        assert_eq!(tasks, plan.tasks(), "the same seed gives the same order");
        assert_ne!(tasks, Plan { seed: 8, ..plan }.tasks());
        let order = |chunk: &[Task]| chunk.iter().map(|task| (task.bundle, task.subject)).collect::<Vec<_>>();
        assert_ne!(order(&tasks[..12]), order(&tasks[12..24]), "rounds are shuffled anew");
    }

    #[test]
    fn samples_come_home_in_the_order_of_the_plan() {
        let (bundles, subjects) = (scenario::suite("boot", 1.0).unwrap(), parse_list(&["qemu,tare"]).unwrap());
        let place = Mock::new(|_, _| Ok(BOOT.to_owned()));
        let ledger = plan(&bundles, &subjects).run(&place, &|_| {}).unwrap();
        assert_eq!(ledger.taken.len(), 18);
        assert!(ledger.failures.is_empty());
        assert!(ledger.taken.is_sorted_by_key(|taken| (taken.task.bundle, taken.task.subject, taken.task.round)));
        assert_eq!(ledger.taken[0].figures[0].1.value, 2.0);
        assert_eq!(ledger.taken[0].exits[0].1.total, 4000);
        let asked = place.asked.lock().unwrap();
        assert_eq!(asked.iter().filter(|script| script.contains("'/bin/tare' 'run'")).count(), 9);
        assert!(asked.iter().all(|script| (script.contains("/initrd'") || script.contains("'/ci'")) && !script.contains("root.raw")));
    }

    #[test]
    fn a_failed_sample_is_tried_again_and_counted() {
        let (bundles, subjects) = (scenario::suite("boot", 1.0).unwrap(), parse_list(&["qemu"]).unwrap());
        let place = Mock::new(|call, _| if call == 0 { bail!("the clone died") } else { Ok(BOOT.to_owned()) });
        let ledger = plan(&bundles, &subjects).run(&place, &|_| {}).unwrap();
        assert_eq!((ledger.taken.len(), ledger.failures.len()), (9, 1));
        assert_eq!(ledger.failures[0].error, "the clone died");
        assert!(ledger.taken.iter().any(|taken| taken.task.tries == 1));
    }

    #[test]
    fn a_sample_that_always_fails_is_given_up_after_three_tries() {
        let (bundles, subjects) = (scenario::suite("boot", 1.0).unwrap(), parse_list(&["qemu,tare"]).unwrap());
        let place = Mock::new(|_, script| {
            Ok(if script.contains("'/bin/tare'") { BOOT.replace(" ready ", " never ") } else { BOOT.to_owned() })
        });
        let retried = Mutex::new(0);
        let ledger = plan(&bundles, &subjects)
            .run(&place, &|news| {
                if let News::Failed(_, error, again) = news {
                    assert!(error.contains("never said 'ready'"), "{error}");
                    *retried.lock().unwrap() += u32::from(again);
                }
            })
            .unwrap();
        assert_eq!(ledger.taken.len(), 9, "the other subject's samples are all there");
        assert_eq!(ledger.failures.len(), 9 * TRIES as usize);
        assert_eq!(*retried.lock().unwrap(), 9 * (TRIES - 1));
    }

    #[test]
    fn a_spent_budget_still_gives_one_sample_of_each_and_reports_are_kept() {
        let (bundles, subjects) = (scenario::suite("boot", 1.0).unwrap(), parse_list(&["qemu,tare"]).unwrap());
        let place = Mock::new(|_, _| Ok(BOOT.to_owned()));
        let dir = tempfile::tempdir().unwrap();
        let plan = Plan { budget: Some(Duration::ZERO), keep: Some(dir.path()), ..plan(&bundles, &subjects) };
        let ledger = plan.run(&place, &|_| {}).unwrap();
        assert_eq!((ledger.taken.len(), ledger.left_out), (6, 12));
        assert!(ledger.taken.iter().all(|taken| taken.task.round == 0));
        assert_eq!(std::fs::read_to_string(dir.path().join("boot-quiet-tare-0-0.txt")).unwrap(), BOOT);
    }

    #[test]
    fn a_shared_image_is_copied_for_each_guest_but_not_for_native() {
        let bundles = scenario::suite("tax", 0.1).unwrap();
        let task = Task { bundle: 1, subject: 0, round: 2, tries: 0 };
        struct Copies(Mock, crate::place::Paths);
        impl Place for Copies {
            fn facts(&self) -> crate::place::Facts {
                self.0.facts()
            }
            fn paths(&self) -> &crate::place::Paths {
                &self.1
            }
            fn lanes(&self) -> usize {
                1
            }
            fn cpus(&self) -> u32 {
                1
            }
            fn run(&self, script: &str, limit: Duration) -> Result<String> {
                self.0.run(script, limit)
            }
        }
        let mock = Mock::new(|_, _| Ok(String::new()));
        let paths = crate::place::Paths { copy_disk: true, ..mock.paths().clone() };
        let place = Copies(mock, paths);
        let made = order(&bundles[1], &Subject::parse("tare").unwrap(), &place, task).unwrap();
        let private = format!("{}/root.raw", made.scratch);
        assert_eq!(made.copy, Some(("/d".to_owned(), private.clone())));
        assert!(made.command.contains(&format!("path={private},cache=writeback")));
        assert_eq!(order(&bundles[1], &Subject::parse("native").unwrap(), &place, task).unwrap().copy, None);
    }
}
