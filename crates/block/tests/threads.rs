// SPDX-License-Identifier: Apache-2.0
//! Several threads on handles of one image with hardly any cache: they meet in every cluster, wait for each other's tables,
//! clusters and cycles, and sleep whenever they can. None may sleep for ever, none may see or undo what another wrote.
//! `TARE_LONG=SECONDS` goes on; `TARE_SEED=N` plays one seed again.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use block::{Aio, Cache, Disk, Options, Qcow2Options, RecordImage};
use common::tools::{self, qemu_check, qemu_img};
use common::watchdog::watch;
use testkit::qcow2::history::fill;
use testkit::qcow2::reader::no_inflate;
use testkit::qcow2::{Bytes, Layer, Player, Rng, Step};

const SIZE: u64 = 512 << 10;
const THREADS: u64 = 4;
/// Sectors in turn belong to the threads, so that all have some in each cluster.
const UNIT: u64 = 512;

fn env(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Requests of one thread at the same time.
fn steps(rng: &mut Rng, thread: u64, id: &mut u32) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    for _ in 0..1 + rng.below(12) {
        // Some tables are met more often than others.
        let reach = if rng.one_in(2) { SIZE } else { SIZE / 16 };
        let at = (rng.below(reach / UNIT / THREADS) * THREADS + thread) * UNIT;
        if steps.iter().any(|s| *s != Step::Flush && s.range().0 == at) {
            continue;
        }
        steps.push(match rng.below(12) {
            0 => Step::Flush,
            1 => Step::Zero { at, len: UNIT, unmap: true },
            2 => Step::Discard { at, len: UNIT },
            3..6 => Step::Read { at, len: UNIT },
            _ => {
                *id += 1;
                Step::Write { at, len: UNIT, id: *id }
            }
        });
    }
    steps
}

/// What one thread does, and what its sectors hold afterwards. Between its parts it waits for the others and serves nobody.
fn live(disk: Disk, thread: u64, seed: u64, start: &[u8], meet: &Barrier) -> Bytes {
    let rng = &mut Rng::new(seed * 16 + thread);
    let mut model = Bytes::new(start.to_vec());
    let mut id = thread as u32 * 100_000 + 1;
    let mut player = Player::new(disk).unwrap();
    for part in 0..4 {
        for _ in 0..6 + rng.below(20) {
            let steps = steps(rng, thread, &mut id);
            for answer in player.play(&steps, rng) {
                answer.result.unwrap_or_else(|e| panic!("{:?}: {e}", answer.step));
                if let Step::Read { at, .. } = answer.step {
                    assert_eq!(
                        model.differs(at, &answer.data),
                        None,
                        "part {part}, thread {thread}, {:?}",
                        answer.step
                    );
                }
            }
            steps.iter().for_each(|s| model.apply(s));
        }
        meet.wait();
    }
    drop(player.end());
    model
}

fn crowd(disk: Disk, seed: u64, start: &[u8]) -> Bytes {
    let mut disks: Vec<Disk> = (1..THREADS).map(|_| disk.share().unwrap()).collect();
    disks.push(disk);
    let meet = Barrier::new(THREADS as usize);
    let mut whole = Bytes::new(start.to_vec());
    std::thread::scope(|scope| {
        let live = |(thread, disk)| {
            let meet = &meet;
            scope.spawn(move || live(disk, thread, seed, start, meet))
        };
        let threads: Vec<_> = (0..THREADS).zip(disks).map(live).collect();
        for (thread, model) in threads.into_iter().enumerate() {
            let model = model.join().unwrap();
            for sector in (thread..(SIZE / UNIT) as usize).step_by(THREADS as usize) {
                let range = sector * UNIT as usize..(sector + 1) * UNIT as usize;
                whole.content[range.clone()].copy_from_slice(&model.content[range.clone()]);
                whole.loose[range.clone()].copy_from_slice(&model.loose[range]);
            }
        }
    });
    whole
}

/// Plays seeds; each of them on all the ways to keep bytes.
fn run(words: &'static str, backing: bool) {
    if !tools::there() {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let start = if backing { fill(1, 0, SIZE) } else { vec![0; SIZE as usize] };
    std::fs::write(dir.path().join("base.raw"), &start).unwrap();
    let path = dir.path().join("image.qcow2");
    let name = path.to_str().unwrap();
    let below: &[&str] = if backing { &["-b", "base.raw", "-F", "raw"] } else { &[] };
    qemu_img(&[&["create", "-q", "-f", "qcow2", "-o", words][..], below, &[name, "512k"]].concat()).unwrap();
    let empty = std::fs::read(&path).unwrap();
    let until = Instant::now() + Duration::from_secs(env("TARE_LONG").unwrap_or(0));
    let first = env("TARE_SEED").unwrap_or(1);
    for seed in first.. {
        for way in [None, Some(Aio::Threads), Some(Aio::IoUring), Some(Aio::Auto)] {
            std::fs::write(&path, &empty).unwrap();
            let (given, start) = (path.clone(), start.clone());
            let played = watch(move || one(way, seed, &given, &start));
            played.unwrap_or_else(|e| panic!("TARE_SEED={seed}, {words}, {way:?}: {e}"));
        }
        if Instant::now() >= until || env("TARE_SEED").is_some() {
            return;
        }
    }
}

fn one(way: Option<Aio>, seed: u64, path: &Path, start: &[u8]) {
    let qcow2 = Qcow2Options { l2_cache: Some(0), ..Qcow2Options::default() };
    // The order of things is the point, not the medium.
    let options = Options { qcow2, cache: Cache::Unsafe, ..Options::qcow2(path) };
    let (model, bytes) = match way {
        None => {
            let image = RecordImage::new(std::fs::read(path).unwrap(), seed);
            (crowd(Disk::recorded_qcow2(&image, None, &options).unwrap(), seed, start), image.to_vec())
        }
        Some(aio) => {
            let disk = match Disk::open(&Options { aio, ..options }) {
                Err(block::Error::Unsupported(_, why)) => return println!("skipped: {why}"),
                other => other.unwrap(),
            };
            let model = crowd(disk, seed, start);
            assert_eq!(qemu_check(path).unwrap(), 0, "leaks");
            (model, std::fs::read(path).unwrap())
        }
    };
    let layer = Layer::open(&bytes, None).unwrap();
    let check = layer.check();
    assert_eq!((check.corruptions.first(), check.leaks), (None, 0));
    assert_eq!(model.differs(0, &layer.read(start, &no_inflate).unwrap()), None);
}

#[test]
fn in_many_small_tables() {
    run("cluster_size=512", false);
}

#[test]
fn over_a_backing_file() {
    run("cluster_size=4096", true);
}

#[test]
fn in_subclusters() {
    run("cluster_size=16384,extended_l2=on", true);
}

#[test]
fn the_watchdog_tells_a_panic_from_an_answer() {
    assert_eq!(watch(|| 7), Ok(7));
    let why = watch(|| -> u32 { panic!("on purpose") });
    assert!(why.is_err_and(|why| why.contains("panicked")));
}
