// SPDX-License-Identifier: Apache-2.0
//! Plays a history, cuts the power everywhere, judges what is left. Used by the cases in `main.rs`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::cell::Cell;
use std::time::{Duration, Instant};

use block::{Change, Disk, Event, Fault, FaultPlan, Op, RecordImage};
use testkit::qcow2::cut::{Host, Luck};
use testkit::qcow2::history::Style;
use testkit::qcow2::player::tick;
use testkit::qcow2::{Bytes, Crew, Cuts, History, Item, Ledger, Rng, Step};

pub fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// What goes wrong beside the power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    Nothing,
    /// Now and then the medium is full for a while.
    Full,
    /// Now and then a write or a sync fails.
    Errors,
}

/// The files of an image.
pub type Files = Vec<Vec<u8>>;

/// The content of an image, or what is wrong with it.
type Reading<'a> = dyn Fn(&Files) -> Result<Vec<u8>, String> + 'a;

/// Opens an image and its data file.
type Opening<'a> = dyn Fn(&RecordImage, Option<&RecordImage>) -> Result<Disk, String> + 'a;

/// How an image of one kind is opened and judged.
#[derive(Clone)]
pub struct Kind<'a> {
    pub style: Style,
    pub start: Files,
    pub handles: usize,
    pub trouble: Trouble,
    pub open: &'a Opening<'a>,
    /// Reads without the engine.
    pub read: &'a Reading<'a>,
    /// Clusters that nothing uses.
    pub leaks: &'a dyn Fn(&Files) -> u64,
    /// The second file is a raw image of the disk.
    pub raw_data: bool,
    /// Nothing has leaked in it yet, not even past the end of the file.
    pub whole: bool,
}

/// An image in memory, its data file, and the faults staged for it.
struct Medium {
    image: RecordImage,
    data: Option<RecordImage>,
    plan: FaultPlan,
}

impl Medium {
    fn new(start: &Files, seed: u64) -> Self {
        let image = RecordImage::new(start[0].clone(), seed);
        let data = start.get(1).map(|bytes| image.beside(bytes.clone()));
        Self { image, data, plan: FaultPlan::new() }
    }

    fn files(&self) -> Files {
        std::iter::once(&self.image).chain(&self.data).map(RecordImage::to_vec).collect()
    }

    fn open(&self, kind: &Kind<'_>) -> Result<Disk, String> {
        let disk = (kind.open)(&self.image, self.data.as_ref())?;
        Ok(if kind.trouble == Trouble::Errors { disk.with_faults(&self.plan) } else { disk })
    }

    fn crew(&self, kind: &Kind<'_>, rng: &mut Rng) -> Result<Crew, String> {
        let mut crew = Crew::new(self.open(kind)?, kind.handles).unwrap();
        crew.serve_idle = rng.one_in(2);
        Ok(crew)
    }

    /// Stages trouble, sometimes; the error that it gives.
    fn trouble(&self, kind: &Kind<'_>, rng: &mut Rng) -> Option<i32> {
        match kind.trouble {
            Trouble::Full if rng.one_in(3) => {
                self.image.limit(self.image.len() + rng.below(6) * kind.style.cluster);
                Some(libc::ENOSPC)
            }
            Trouble::Errors if rng.one_in(3) => {
                let op = if rng.one_in(2) { Op::Flush } else { Op::Write };
                let (after, times) = (rng.below(4) as u32, 1 + rng.below(2) as u32);
                self.plan.add(Fault { op, range: 0..u64::MAX, after, times, errno: Some(libc::EIO) });
                Some(libc::EIO)
            }
            _ => None,
        }
    }

    fn calm(&self) {
        self.image.limit(u64::MAX);
        self.plan.clear();
    }
}

/// A history as it was played: the log of the image, and what it may hold when.
pub struct Played {
    pub log: Vec<Event>,
    pub end: Files,
    pub ledger: Ledger,
}

/// Plays a history.
pub fn record(kind: &Kind<'_>, seed: u64) -> Result<Played, String> {
    let rng = &mut Rng::new(seed);
    let medium = Medium::new(&kind.start, seed);
    let content = (kind.read)(&kind.start)?;
    let mut ledger = Ledger::of(&content)?;
    let mut model = Bytes::new(content);
    let clock = Cell::new(0);
    let history = History::random(rng, &kind.style);
    let mut crew = medium.crew(kind, rng)?;
    for item in &history.items {
        match item {
            Item::Batch(steps) => {
                let errno = medium.trouble(kind, rng);
                let mut again = Vec::new();
                for answer in crew.play(steps, rng, &medium.image, &mut ledger, &clock)? {
                    match answer.result {
                        Ok(()) => looks_right(&answer.step, &answer.data, &model)?,
                        Err(e) if e.raw_os_error() == errno && !matches!(answer.step, Step::Read { .. }) => {
                            again.push(answer.step);
                        }
                        Err(e) => return Err(format!("{:?} failed: {e}", answer.step)),
                    }
                }
                medium.calm();
                // With the trouble over, the same requests succeed.
                for answer in crew.play(&again, rng, &medium.image, &mut ledger, &clock)? {
                    answer.result.map_err(|e| format!("{:?} failed again: {e}", answer.step))?;
                }
                steps.iter().for_each(|s| model.apply(s));
            }
            Item::Resize(size) => {
                ledger.begin_resize(*size, tick(&medium.image, &clock));
                crew.resize(*size).map_err(|e| format!("resize to {size}: {e}"))?;
                ledger.end_resize(tick(&medium.image, &clock), true);
                model.resize(*size);
            }
            _ => {
                crew.end();
                crew = medium.crew(kind, rng)?;
            }
        }
    }
    crew.end();
    let played = Played { log: medium.image.log(), end: medium.files(), ledger };
    let leaks = (kind.leaks)(&played.end);
    if leaks > 0 && kind.whole && kind.trouble == Trouble::Nothing {
        return Err(format!("{leaks} clusters leaked with no power cut"));
    }
    let content = (kind.read)(&played.end)?;
    match model.differs(0, &content) {
        Some(at) => Err(format!("byte {at} is wrong at the end, with no power cut")),
        None => Ok(played),
    }
}

fn looks_right(step: &Step, data: &[u8], model: &Bytes) -> Result<(), String> {
    let Step::Read { at, .. } = *step else { return Ok(()) };
    model.differs(at, data).map_or(Ok(()), |byte| Err(format!("{step:?}: byte {byte} is wrong")))
}

/// Whether an image that a cut left is sound, alone and to the engine, and goes on working.
fn judge(kind: &Kind<'_>, files: Files, ledger: &Ledger, now: u64, turn: u64) -> Result<(), String> {
    let content = (kind.read)(&files)?;
    ledger.check(&content, now)?;
    // A cut in the middle of a resize may leave the raw file longer than the disk, or shorter.
    if let (true, Some(raw)) = (kind.raw_data, files.get(1))
        && raw.len() == content.len()
    {
        ledger.check(raw, now).map_err(|e| format!("the data file as a raw image: {e}"))?;
    }
    if !turn.is_multiple_of(5) {
        return Ok(());
    }
    let medium = Medium::new(&files, turn);
    let disk = medium.open(kind).map_err(|e| format!("it does not open: {e}"))?;
    let mut player = testkit::qcow2::Player::new(disk).unwrap();
    let seen = player.read(0, content.len() as u64).map_err(|e| format!("it can't be read: {e}"))?;
    if seen != content {
        let at = seen.iter().zip(&content).position(|(a, b)| a != b);
        return Err(format!("the engine reads another byte {at:?} than the naive reader"));
    }
    drop(player.end());
    if turn.is_multiple_of(50) {
        let style = Style { batches: 4, size: content.len() as u64, ..kind.style.clone() };
        // A guest goes on after the cut: what it writes now has names of its own.
        let after = Kind { start: medium.files(), style, whole: false, ..kind.clone() };
        record(&after, turn).map_err(|e| format!("it does not go on: {e}"))?;
    }
    Ok(())
}

/// Cuts at every line of a history's log; how many images that made.
pub fn cut_everywhere(kind: &Kind<'_>, seed: u64, shots: u64, host: Host) -> Result<u64, String> {
    let played = record(kind, seed).map_err(|e| format!("TARE_SEED={seed}: {e}"))?;
    cut(kind, (seed, shots, host), &played, |_| true)
}

/// Cuts only where the first write of a header that names another refcount table may be on the medium or not, up to the
/// second sync after it.
pub fn cut_where_a_table_moves(kind: &Kind<'_>, seed: u64, shots: u64) -> Result<u64, String> {
    let played = record(kind, seed).map_err(|e| format!("TARE_SEED={seed}: {e}"))?;
    let named = |data: &[u8]| data.get(48..60).map(<[u8]>::to_vec);
    let old = named(&kind.start[0]);
    let moves = |e: &Event| matches!(e, Event::Begin { file: 0, change: Change::Write { offset: 0, data }, .. } if named(data) != old);
    let Some(first) = played.log.iter().position(moves) else { return Ok(0) };
    let syncs = |e: &Event| matches!(e, Event::Begin { change: Change::Sync, .. });
    let rest = played.log.iter().enumerate().skip(first).filter(|(_, e)| syncs(e));
    let last = rest.map(|(at, _)| at).nth(1).unwrap_or(played.log.len());
    cut(kind, (seed, shots, Host::Honest), &played, |line| (first..=last + 1).contains(&line))
}

fn cut(
    kind: &Kind<'_>,
    (seed, shots, host): (u64, u64, Host),
    Played { log, ledger, .. }: &Played,
    here: impl Fn(usize) -> bool,
) -> Result<u64, String> {
    let mut cuts = Cuts::on(host, kind.start.clone(), log);
    let (mut made, rng) = (0, &mut Rng::new(seed ^ 0xc07));
    loop {
        let mark = matches!(log.get(cuts.line().wrapping_sub(1)), Some(Event::Mark(_)));
        if !mark && here(cuts.line()) {
            for _ in 0..shots {
                let luck = *rng.pick(&Luck::ALL);
                let left = cuts.files(luck, rng);
                made += 1;
                if let Err(why) = judge(kind, left, ledger, cuts.now(), made) {
                    let near = cuts.line().saturating_sub(12)..(cuts.line() + 2).min(log.len());
                    return Err(format!(
                        "TARE_SEED={seed}, cut at line {} of {}, {luck:?}, {} changes at stake: {why}\nthe log near it:\n{}",
                        cuts.line(),
                        log.len(),
                        cuts.at_stake(),
                        log[near].iter().map(|e| format!("  {:.100}\n", format!("{e:?}"))).collect::<String>()
                    ));
                }
            }
        }
        if !cuts.step() {
            return Ok(made);
        }
    }
}

/// Enough histories for `wanted` cuts, more if asked; how many there were.
pub fn run(kind: &Kind<'_>, wanted: u64) -> u64 {
    let played = |seed| cut_everywhere(kind, seed, 3, Host::Honest).unwrap_or_else(|e| panic!("{e}"));
    if let Some(seed) = env("TARE_SEED") {
        return played(seed).max(wanted);
    }
    let until = Instant::now() + Duration::from_secs(env("TARE_LONG").unwrap_or(0));
    let (mut made, mut seed) = (0, 1);
    while made < wanted || Instant::now() < until {
        made += played(seed);
        seed += 1;
    }
    made
}
