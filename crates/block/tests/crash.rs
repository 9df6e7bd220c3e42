// SPDX-License-Identifier: Apache-2.0
//! The power is cut at every point of random histories, each time with other parts of what was not synced: what was flushed
//! must be there, and each sector holds what it held before, or something written since.
//! `TARE_LONG=SECONDS` goes on with new seeds; `TARE_SEED=N` plays one again.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::cell::Cell;
use std::time::{Duration, Instant};

use block::{Disk, Event, RecordImage};
use testkit::qcow2::cut::Luck;
use testkit::qcow2::history::{Style, fill};
use testkit::qcow2::{Cuts, History, Item, Ledger, Player, Rng};

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The content of an image.
type Reading = dyn Fn(&[u8]) -> Result<Vec<u8>, String>;

/// How an image of one kind is opened and judged.
struct Kind<'a> {
    style: Style,
    start: Vec<u8>,
    /// The name of what each sector holds at first.
    initial: &'a dyn Fn(u64) -> u32,
    open: &'a dyn Fn(&RecordImage) -> Result<Disk, String>,
    /// The content of an image, or what is wrong with it, without the engine.
    read: &'a Reading,
}

/// Plays a history; the log of the image, and what it may hold when.
fn record(kind: &Kind<'_>, seed: u64) -> Result<(RecordImage, Ledger), String> {
    let rng = &mut Rng::new(seed);
    let image = RecordImage::new(kind.start.clone(), seed);
    let mut ledger = Ledger::new(kind.style.size, kind.initial);
    let clock = Cell::new(0);
    let history = History::random(rng, &kind.style);
    let mut player = Player::new((kind.open)(&image)?).unwrap();
    for item in &history.items {
        match item {
            Item::Batch(steps) => {
                for answer in player.play_noted(steps, rng, &image, &mut ledger, &clock) {
                    answer.result.map_err(|e| format!("{:?} failed: {e}", answer.step))?;
                }
            }
            _ => {
                drop(player.end());
                player = Player::new((kind.open)(&image)?).unwrap();
            }
        }
    }
    drop(player.end());
    Ok((image, ledger))
}

/// Whether an image that a cut left is sound, alone and to the engine, and goes on working.
fn judge(kind: &Kind<'_>, image: Vec<u8>, ledger: &Ledger, now: u64, turn: u64) -> Result<(), String> {
    let content = (kind.read)(&image)?;
    ledger.check(&content, now)?;
    if !turn.is_multiple_of(5) {
        return Ok(());
    }
    let image = RecordImage::new(image, turn);
    let mut player = Player::new((kind.open)(&image).map_err(|e| format!("it does not open: {e}"))?).unwrap();
    let seen = player.read(0, kind.style.size).map_err(|e| format!("it can't be read: {e}"))?;
    if seen != content {
        let at = seen.iter().zip(&content).position(|(a, b)| a != b);
        return Err(format!("the engine reads another byte {at:?} than the naive reader"));
    }
    drop(player.end());
    if turn.is_multiple_of(50) {
        let after = Kind { start: image.to_vec(), style: Style { batches: 4, ..kind.style.clone() }, ..*kind };
        // A guest goes on after the cut: what it writes now has names of its own.
        let (later, _) = record(&after, turn).map_err(|e| format!("it does not go on: {e}"))?;
        (kind.read)(&later.to_vec()).map_err(|e| format!("going on after the cut: {e}"))?;
    }
    Ok(())
}

/// Cuts at every line of a history's log; how many images that made.
fn cut_everywhere(kind: &Kind<'_>, seed: u64, shots: u64) -> u64 {
    let (image, ledger) = record(kind, seed).unwrap_or_else(|e| panic!("TARE_SEED={seed}: {e}"));
    let log = image.log();
    let mut cuts = Cuts::new(kind.start.clone(), &log);
    let (mut made, rng) = (0, &mut Rng::new(seed ^ 0xc07));
    loop {
        if !matches!(log.get(cuts.line().wrapping_sub(1)), Some(Event::Mark(_))) {
            for _ in 0..shots {
                let luck = *rng.pick(&Luck::ALL);
                let left = cuts.image(luck, rng);
                made += 1;
                if let Err(why) = judge(kind, left, &ledger, cuts.now(), made) {
                    let near = cuts.line().saturating_sub(12)..(cuts.line() + 2).min(log.len());
                    panic!(
                        "TARE_SEED={seed}, cut at line {} of {}, {luck:?}, {} changes at stake: {why}\nthe log near it:\n{}",
                        cuts.line(),
                        log.len(),
                        cuts.at_stake(),
                        log[near].iter().map(|e| format!("  {:.100}\n", format!("{e:?}"))).collect::<String>()
                    );
                }
            }
        }
        if !cuts.step() {
            return made;
        }
    }
}

/// Enough histories for `wanted` cuts, more if asked.
fn run(kind: &Kind<'_>, wanted: u64, shots: u64) -> u64 {
    if let Some(seed) = env("TARE_SEED") {
        return cut_everywhere(kind, seed, shots);
    }
    let until = Instant::now() + Duration::from_secs(env("TARE_LONG").unwrap_or(0));
    let (mut made, mut seed) = (0, 1);
    while made < wanted || Instant::now() < until {
        made += cut_everywhere(kind, seed, shots);
        seed += 1;
    }
    made
}

fn style(size: u64, cluster: u64) -> Style {
    Style {
        size,
        cluster,
        grain: 512,
        longest: (cluster * 3).max(4096).min(size),
        batches: 20,
        depth: 6,
        snapshots: 0,
        resize: false,
        reopen: true,
    }
}

#[test]
fn a_raw_disk_keeps_what_was_flushed() {
    let size = 64 << 10;
    let kind = Kind {
        style: style(size, 4096),
        start: fill(1, 0, size),
        initial: &|_| 1,
        open: &|image| Ok(Disk::recorded(image, false)),
        read: &|bytes| Ok(bytes.to_vec()),
    };
    let made = run(&kind, 2000, 3);
    assert!(made >= 2000 || env("TARE_SEED").is_some(), "{made} cuts");
}
