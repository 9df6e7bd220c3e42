// SPDX-License-Identifier: Apache-2.0
//! The power is cut at every point of random histories, each time with other parts of what was not synced: what was flushed
//! must be there, and each sector holds what it held before, or something written since.
//! `TARE_LONG=SECONDS` goes on with new seeds; `TARE_SEED=N` plays one again.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::cell::Cell;
use std::time::{Duration, Instant};

use block::qcow2::format::compress::Decompressor;
use block::qcow2::format::header::Compression;
use block::{Cow, Disk, Event, Options, Qcow2Options, RecordImage};
use common::tools::{self, qemu_check, qemu_img, qemu_io};
use testkit::qcow2::cut::Luck;
use testkit::qcow2::history::{Style, THIN, fill};
use testkit::qcow2::{Cuts, History, Item, Layer, Ledger, Player, Rng};

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// The content of an image.
type Reading<'a> = dyn Fn(&[u8]) -> Result<Vec<u8>, String> + 'a;

/// How an image of one kind is opened and judged.
struct Kind<'a> {
    style: Style,
    start: Vec<u8>,
    open: &'a dyn Fn(&RecordImage) -> Result<Disk, String>,
    /// The content of an image, or what is wrong with it, without the engine.
    read: &'a Reading<'a>,
    /// Clusters that nothing uses.
    leaks: &'a dyn Fn(&[u8]) -> u64,
}

/// Plays a history; the log of the image, and what it may hold when.
fn record(kind: &Kind<'_>, seed: u64) -> Result<(RecordImage, Ledger), String> {
    let rng = &mut Rng::new(seed);
    let image = RecordImage::new(kind.start.clone(), seed);
    let mut ledger = Ledger::of(&(kind.read)(&kind.start)?)?;
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
    let leaks = (kind.leaks)(&image.to_vec());
    if leaks > (kind.leaks)(&kind.start) {
        return Err(format!("{leaks} clusters leaked with no power cut"));
    }
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
        open: &|image| Ok(Disk::recorded(image, false)),
        read: &|bytes| Ok(bytes.to_vec()),
        leaks: &|_| 0,
    };
    let made = run(&kind, 2000, 3);
    assert!(made >= 2000 || env("TARE_SEED").is_some(), "{made} cuts");
}

/// A cluster by the engine's own decompressor: the only code that it shares with the naive reader.
fn inflate(data: &[u8], zstd: bool, len: usize) -> Option<Vec<u8>> {
    let kind = if zstd { Compression::Zstd } else { Compression::Zlib };
    let mut cluster = vec![0; len];
    Decompressor::new(kind).ok()?.run(data, &mut cluster).ok()?;
    Some(cluster)
}

/// What a qcow2 image is at first.
struct Start {
    words: &'static str,
    cluster: u64,
    size: u64,
    /// Bytes written before, with `qemu-io`'s options.
    written: &'static [(u64, u64, &'static str)],
    snapshot: bool,
    backing: bool,
    cow: Cow,
}

const EMPTY: Start = Start {
    words: "cluster_size=512",
    cluster: 512,
    size: 96 << 10,
    written: &[],
    snapshot: false,
    backing: false,
    cow: Cow::ZeroAware,
};

fn qcow2_keeps(start: &Start, wanted: u64) {
    if !tools::there() {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("start.qcow2");
    let name = path.to_str().unwrap();
    let mut create = vec!["create", "-q", "-f", "qcow2", "-o", start.words];
    let mut backing = Vec::new();
    if start.backing {
        // Ends within a cluster, before the image does; with a hole.
        backing = fill(1, 0, start.size - 2560);
        backing[start.size as usize / 4..start.size as usize / 2].fill(0);
        std::fs::write(dir.path().join("base.raw"), &backing).unwrap();
        create.extend(["-b", "base.raw", "-F", "raw"]);
    }
    let size = start.size.to_string();
    create.extend([name, &size]);
    qemu_img(&create).unwrap();
    let mut commands = Vec::new();
    for (n, (at, len, options)) in start.written.iter().enumerate() {
        let source = dir.path().join(format!("source-{n}"));
        std::fs::write(&source, fill(if options.contains('c') { THIN | 1 } else { 1 }, *at, *len)).unwrap();
        commands.push(format!("write {options} -s {} {at} {len}", source.display()));
    }
    if !commands.is_empty() {
        qemu_io(&path, "qcow2", &commands).unwrap();
    }
    if start.snapshot {
        qemu_img(&["snapshot", "-q", "-c", "s", name]).unwrap();
    }
    let backing = &backing;
    let qcow2 = Qcow2Options { cow: start.cow, l2_cache: Some(4096), ..Qcow2Options::default() };
    let options = Options { qcow2, ..Options::qcow2(&path) };
    let kind = Kind {
        style: style(start.size, start.cluster),
        start: std::fs::read(&path).unwrap(),
        open: &|image| Disk::recorded_qcow2(image, &options).map_err(|e| e.to_string()),
        read: &|bytes| {
            let layer = Layer::open(bytes, None)?;
            let check = layer.check();
            match check.corruptions.first() {
                Some(first) => Err(format!("{} corruptions: {first}", check.corruptions.len())),
                None => layer.read(backing, &inflate),
            }
        },
        leaks: &|bytes| Layer::open(bytes, None).map_or(0, |l| l.check().leaks),
    };
    let made = run(&kind, wanted, 3);
    assert!(made >= wanted || env("TARE_SEED").is_some(), "{made} cuts");
    println!("{made} cuts");
    // The naive judge is judged by QEMU, on a few.
    let (image, _) = record(&kind, 99).unwrap();
    let log = image.log();
    let mut cuts = Cuts::new(kind.start.clone(), &log);
    let rng = &mut Rng::new(5);
    for _ in 0..6 {
        for _ in 0..log.len() / 6 {
            cuts.step();
        }
        std::fs::write(&path, cuts.image(Luck::Torn, rng)).unwrap();
        qemu_check(&path).unwrap();
    }
}

#[test]
fn many_small_tables() {
    qcow2_keeps(&EMPTY, 1500);
}

#[test]
fn data_in_place_and_new() {
    let written = &[(0, 40 << 10, ""), (64 << 10, 4096, ""), (100 << 10, 16384, "")];
    qcow2_keeps(&Start { words: "cluster_size=4096", cluster: 4096, size: 256 << 10, written, ..EMPTY }, 1500);
}

#[test]
fn subclusters() {
    let words = "cluster_size=16384,extended_l2=on";
    let written = &[(0, 5 << 10, ""), (64 << 10, 40 << 10, "")];
    qcow2_keeps(&Start { words, cluster: 16384, size: 256 << 10, written, ..EMPTY }, 1500);
}

#[test]
fn over_a_backing_file() {
    let words = "cluster_size=4096";
    qcow2_keeps(&Start { words, cluster: 4096, size: 192 << 10, backing: true, ..EMPTY }, 1000);
    let words = "cluster_size=16384,extended_l2=on";
    qcow2_keeps(&Start { words, cluster: 16384, size: 192 << 10, backing: true, ..EMPTY }, 700);
}

#[test]
fn clusters_that_a_snapshot_shares() {
    let written = &[(0, 30 << 10, ""), (40 << 10, 4096, "")];
    qcow2_keeps(&Start { words: "cluster_size=1024", cluster: 1024, written, snapshot: true, ..EMPTY }, 1500);
}

#[test]
fn lazy_refcounts() {
    let words = "cluster_size=1024,lazy_refcounts=on,refcount_bits=64";
    qcow2_keeps(&Start { words, cluster: 1024, written: &[(0, 20 << 10, "")], ..EMPTY }, 1000);
}

#[test]
fn narrow_refcounts_and_the_old_version() {
    let words = "cluster_size=1024,refcount_bits=1";
    qcow2_keeps(&Start { words, cluster: 1024, cow: Cow::Explicit, ..EMPTY }, 800);
    qcow2_keeps(&Start { words: "compat=0.10,cluster_size=2048", cluster: 2048, cow: Cow::Unallocated, ..EMPTY }, 800);
}

#[test]
fn over_compressed_clusters() {
    let written = &[(0, 4096, "-c"), (4096, 4096, "-c"), (16384, 4096, "-c"), (20480, 4096, "-c"), (32768, 4096, "")];
    qcow2_keeps(&Start { words: "cluster_size=4096", cluster: 4096, size: 96 << 10, written, ..EMPTY }, 1000);
}

#[test]
fn large_clusters() {
    let words = "cluster_size=65536";
    qcow2_keeps(&Start { words, cluster: 65536, size: 1 << 20, written: &[(0, 100 << 10, "")], ..EMPTY }, 700);
}
