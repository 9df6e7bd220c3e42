// SPDX-License-Identifier: Apache-2.0
//! The same random history by tare and by QEMU, over every pair of image options. `TARE_LONG=SECONDS` goes on with new
//! seeds for so long; `TARE_SEED=N` plays one seed again.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::tools;
use common::twin::{Engine, Twin, style};
use common::watchdog::watch;
use testkit::qcow2::{History, Rng, Row, pairwise};

/// One at a time: a process just started holds, for a moment, every lock of the one that started it.
static ALONE: Mutex<()> = Mutex::new(());

fn seconds(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn play(row: Row, history: &History, seed: u64, engines: [Engine; 2]) -> Result<(), String> {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut twin = Twin::new(row, dir.path(), seed)?;
    twin.play(history, engines, &mut Rng::new(seed + 1))
}

/// With an end: an engine that hangs must not hang the tests.
fn play_watched(row: Row, history: &History, seed: u64, engines: [Engine; 2]) -> Result<(), String> {
    let history = history.clone();
    watch(move || play(row, &history, seed, engines)).and_then(|result| result)
}

fn try_row(row: Row, seed: u64, batches: usize, engines: [Engine; 2]) {
    let history = History::random(&mut Rng::new(seed), &style(&row, batches));
    if std::env::var("TARE_TRACE").is_ok() {
        eprintln!("seed {seed}: {row:?}");
    }
    let Err(why) = play_watched(row, &history, seed, engines) else { return };
    println!("seed {seed}, {row:?}: {why}\nlooking for a shorter history...");
    let shorter = history.shrink(row.size(), Duration::from_secs(30), |h| {
        !why.contains("hangs") && play_watched(row, h, seed, engines).is_err()
    });
    let then = play_watched(row, &shorter, seed, engines).err().unwrap_or_default();
    panic!(
        "TARE_SEED={seed} shows it again: {why}\n{row:#?}\n{:#?}\nshorter: {then}\n{shorter:?}",
        row.words("data".as_ref())
    );
}

/// Rows `part`, `part + 4`... of all; then, if asked, on with new seeds.
fn run(part: usize, engines: [Engine; 2], batches: usize) {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let rows = pairwise(1);
    if let Some(seed) = seconds("TARE_SEED") {
        if seed as usize % 4 == part {
            try_row(rows[seed as usize % 1000 % rows.len()], seed, batches, engines);
        }
        return;
    }
    let until = Instant::now() + Duration::from_secs(seconds("TARE_LONG").unwrap_or(0) / 4);
    for round in 0_u64.. {
        for n in (part..rows.len()).step_by(4) {
            if round > 0 && Instant::now() > until {
                return;
            }
            try_row(rows[n], round * 1000 + n as u64, batches, engines);
        }
    }
}

#[test]
fn the_judges_agree_on_qemu() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    for (n, row) in pairwise(1).into_iter().enumerate().step_by(seconds("TARE_STEP").unwrap_or(8) as usize) {
        try_row(row, n as u64, 6, [Engine::Qemu; 2]);
    }
}

#[test]
fn tare_and_qemu_agree_1() {
    run(0, [Engine::Tare, Engine::Qemu], 12);
}

#[test]
fn tare_and_qemu_agree_2() {
    run(1, [Engine::Tare, Engine::Qemu], 12);
}

#[test]
fn tare_and_qemu_agree_3() {
    run(2, [Engine::Tare, Engine::Qemu], 12);
}

#[test]
fn tare_and_qemu_agree_4() {
    run(3, [Engine::Tare, Engine::Qemu], 12);
}
