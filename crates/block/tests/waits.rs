// SPDX-License-Identifier: Apache-2.0
//! Who waits for what, and who tells him: handles that nobody drives any more, requests that find no room for a table. What
//! must come by itself is waited for by looking so many times, never by a clock.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io::Write as _;
use std::path::Path;

use block::{Disk, Fault, FaultPlan, MemImage, Op, Options, Qcow2Options, RecordImage};
use common::tools::{self, qemu_img};
use common::{Buffer, Rng, User};

/// Bytes of the disk that one slice of a table covers, and one cluster.
const SLICE: u64 = 32 << 10;
const CLUSTER: usize = 512;

/// An image of small clusters, and how it is opened: the smallest cache, 4 sets of 8 slices.
fn start(dir: &Path) -> (Vec<u8>, Options) {
    let path = dir.join("start.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", path.to_str().unwrap(), "4M"]).unwrap();
    let qcow2 = Qcow2Options { l2_cache: Some(0), ..Qcow2Options::default() };
    (std::fs::read(path).unwrap(), Options { qcow2, ..Options::qcow2("memory") })
}

fn begin(user: &mut User, id: u16, op: Op, at: u64, byte: u8) -> Buffer {
    let mut buffer = Buffer::with(&[byte; CLUSTER], 0);
    let segs = if op == Op::Flush { Vec::new() } else { buffer.segs(&mut Rng(1), CLUSTER) };
    user.submit(id, op, at, segs.iter().map(|s| s.len as u64).sum(), &segs);
    user.disk.commit();
    buffer
}

/// Looks for answers many times, and never sleeps: whether all of these came.
fn all_come(user: &mut User, ids: std::ops::Range<u16>) -> bool {
    let mut missing: Vec<u16> = ids.collect();
    for _ in 0..20_000 {
        let mut done = Vec::new();
        user.disk.reap(&mut done);
        for one in done {
            one.result.unwrap();
            missing.retain(|id| *id != one.id);
        }
        if missing.is_empty() {
            return true;
        }
    }
    false
}

/// As [`all_come`], and ends the test if they do not: a disk with requests that never end can't be closed either.
fn come(user: &mut User, ids: std::ops::Range<u16>, what: &str) {
    if !all_come(user, ids) {
        // Past what the test runner keeps for later.
        let _ = writeln!(std::io::stderr(), "never answered: {what}");
        std::process::abort();
    }
}

/// A write that fills the cache begins a cycle, and ends no sooner: the handle may have nobody to drive it after that.
#[test]
fn a_cycle_never_outlives_the_requests_of_its_handle() {
    if !tools::there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (bytes, options) = start(dir.path());
    for seed in 1..20 {
        let image = RecordImage::new(bytes.clone(), seed);
        let first = Disk::recorded_qcow2(&image, None, &options).unwrap();
        let mut other = User::new(first.share().unwrap());
        let mut user = User::new(first);
        // So many slices that the last write, or one before it, finds three quarters of the cache changed.
        for (round, slices) in (20..32).enumerate() {
            for slice in 0..slices {
                let at = slice * SLICE + round as u64 * 4096;
                let _buffer = begin(&mut user, 0, Op::Write, at, 1);
                come(&mut user, 0..1, "a write");
            }
            // From here on nobody looks at the first handle, until it is used again.
            let _buffer = begin(&mut other, 0, Op::Flush, 0, 0);
            come(&mut other, 0..1, "a flush, the other handle's cycle standing still");
        }
        user.disk.detach();
        other.disk.detach();
    }
}

/// All slices of a set are in the hands of writes that are held back; who needs one more goes on when they end, with no
/// flush and no further request to remind anybody.
#[test]
fn who_waits_for_room_is_told_by_the_last_user() {
    if !tools::there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (bytes, options) = start(dir.path());
    let plan = FaultPlan::new();
    let image = MemImage::new(bytes);
    let mut user = User::new(Disk::faulty_qcow2(&image, &options, &plan).unwrap());
    plan.add(Fault { op: Op::Write, range: 0..u64::MAX, after: 0, times: 8, errno: None });
    let at = |n: u16| u64::from(n) * 4 * SLICE;
    let mut buffers: Vec<_> = (0..8).map(|n| begin(&mut user, n, Op::Write, at(n), 1)).collect();
    for n in 8..11 {
        buffers.push(begin(&mut user, n, Op::Write, at(n), 2));
    }
    assert!(!all_come(&mut user, 8..9), "a ninth slice found room: this test tests nothing");
    plan.release();
    come(&mut user, 0..11, "those who wait for room");
    for n in 0..11 {
        let byte = if n < 8 { 1 } else { 2 };
        assert_eq!(user.read(at(n), CLUSTER).unwrap(), [byte; CLUSTER], "{n}");
    }
    drop(buffers);
    user.disk.detach();
}
