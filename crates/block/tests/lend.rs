// SPDX-License-Identifier: Apache-2.0
//! Registered memory and lingering: requests whose bytes lie in lent memory, across its edge or elsewhere, sent off with
//! `linger` or `commit`, leave what a model says, on raw files past and through the page cache.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::Path;

use base::{EventFd, Seg};
use block::{Aio, AlignedBuf, Cache, Completion, Disk, Op, Options, Request};

use common::Rng;

const SIZE: usize = 4 << 20;
const SLOTS: u16 = 48;
const SLOT: usize = 32 << 10;

/// Waits for all `wanted` completions, as a tool does.
fn collect(disk: &mut Disk, wake: &EventFd, wanted: usize, rng: &mut Rng) -> Vec<Completion> {
    let (mut all, mut done) = (Vec::new(), Vec::new());
    while all.len() < wanted {
        if rng.below(4) > 0 {
            disk.linger()
        } else {
            disk.commit()
        }
        disk.reap(&mut done);
        if done.is_empty() {
            disk.want_wake(true);
            disk.reap(&mut done);
            if done.is_empty() {
                wake.read().unwrap();
            }
            disk.want_wake(false);
        }
        all.append(&mut done);
    }
    all
}

fn play(path: &Path, cache: Cache, aio: Aio, seed: u64) {
    let mut disk = Disk::open(&Options { cache, aio, ..Options::new(path) }).unwrap();
    let mut rng = Rng(seed);
    let mut model = std::fs::read(path).unwrap();
    // The lent memory ends in the middle of the slots: requests lie in it, past it and across its end.
    let mut memory = AlignedBuf::large(usize::from(SLOTS) * SLOT).unwrap();
    for round in 0..3 {
        let wake = EventFd::new(0).unwrap();
        disk.attach(&wake).unwrap();
        disk.want_wake(false);
        if round != 1 {
            let half = memory.len() / 2 + 512;
            disk.lend(&[memory.seg(0, 4096), memory.seg(4096, half - 4096)]);
        }
        for batch in 0..12 {
            let write = batch % 2 == 0;
            if write {
                let noise = rng.bytes(memory.len());
                memory.bytes_mut().copy_from_slice(&noise);
            } else {
                memory.bytes_mut().fill(0xee);
            }
            // Ranges of one batch of writes do not overlap: each slot has a part of the disk for itself.
            let part = SIZE / usize::from(SLOTS) / 512 * 512;
            let mut asked: Vec<(usize, usize, usize)> = Vec::new();
            for slot in 0..SLOTS {
                let step = if rng.below(3) == 0 { 512 } else { 4096 };
                let len = (1 + rng.below((SLOT / step) as u64) as usize) * step;
                let room = (SLOT - len) / 512 + 1;
                let at = usize::from(slot) * SLOT + rng.below(room as u64) as usize * 512;
                let offset = usize::from(slot) * part + rng.below(((part - len) / 512 + 1) as u64) as usize * 512;
                asked.push((at, offset, len));
                let cut = rng.below((len / 512) as u64) as usize * 512;
                let segs: Vec<Seg> = if cut > 0 && rng.below(4) == 0 {
                    vec![memory.seg(at, cut), memory.seg(at + cut, len - cut)]
                } else {
                    vec![memory.seg(at, len)]
                };
                let op = if write { Op::Write } else { Op::Read };
                disk.submit(&Request { id: slot, op, offset: offset as u64, len: len as u64, segs: &segs });
            }
            for done in collect(&mut disk, &wake, usize::from(SLOTS), &mut rng) {
                done.result.unwrap();
            }
            for (at, offset, len) in asked {
                let bytes = &memory.bytes()[at..at + len];
                if write {
                    model[offset..offset + len].copy_from_slice(bytes);
                } else {
                    assert!(bytes == &model[offset..offset + len], "read at {offset}, {cache:?} {aio:?}");
                }
            }
        }
        disk.detach();
    }
    drop(disk);
    assert!(std::fs::read(path).unwrap() == model, "{cache:?} {aio:?}");
}

#[test]
fn lent_memory_changes_nothing_but_the_speed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    let mut rng = Rng(7);
    std::fs::write(&path, rng.bytes(SIZE)).unwrap();
    for cache in [Cache::Writeback, Cache::None] {
        for aio in [Aio::Auto, Aio::IoUring, Aio::Threads] {
            let options = Options { cache, aio, ..Options::new(&path) };
            let wake = EventFd::new(0).unwrap();
            if let Err(e) = Disk::open(&options)
                .map(|mut d| d.attach(&wake))
                .map_err(|e| e.to_string())
                .and_then(|a| a.map_err(|e| e.to_string()))
            {
                println!("skipped {cache:?} {aio:?}: {e}");
                continue;
            }
            play(&path, cache, aio, 11 + rng.below(1000));
        }
    }
}

#[test]
fn more_in_flight_than_the_ring_has_places_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.raw");
    let mut rng = Rng(13);
    let model = rng.bytes(SIZE);
    std::fs::write(&path, &model).unwrap();
    let mut disk = Disk::open(&Options { cache: Cache::Writeback, aio: Aio::IoUring, ..Options::new(&path) }).unwrap();
    let wake = EventFd::new(0).unwrap();
    if let Err(e) = disk.attach(&wake) {
        println!("skipped: {e}");
        return;
    }
    let memory = AlignedBuf::large(SIZE).unwrap();
    let many = (SIZE / 4096) as u16;
    for _ in 0..3 {
        for id in 0..many {
            let (at, segs) = (u64::from(id) * 4096, [memory.seg(usize::from(id) * 4096, 4096)]);
            disk.submit(&Request { id, op: Op::Read, offset: at, len: 4096, segs: &segs });
        }
        for done in collect(&mut disk, &wake, usize::from(many), &mut rng) {
            done.result.unwrap();
        }
        assert!(memory.bytes() == model);
    }
}
