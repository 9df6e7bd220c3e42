// SPDX-License-Identifier: Apache-2.0
//! Rate limits through the queues, counted in tokens of a clock of the test's own; block sizes; the write cache's switch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Change, Disk, Event, MemImage, RecordImage};
use testkit::conformance::eventually;
use virtio::blk::{Blk, CONFIG_WCE, Clock};
use virtio::device::VirtioDevice;
use virtio::features;

use crate::rig::{DISCARD, FLUSH, GET_ID, IN, IOERR, OK, OUT, Rig, WRITE_ZEROES, range};
use crate::several::{BOTH, Several, with_queues};

const DISK: usize = 256 << 10;
const SECOND: u64 = 1_000_000_000;

fn throttled(spec: &spec::Disk) -> (Several, Arc<AtomicU64>) {
    let clock = Arc::new(AtomicU64::new(0));
    let disk = Disk::in_memory(&MemImage::new(vec![1; DISK]), false);
    (Several::new(Blk::with_clock(disk, spec, Clock::Manual(clock.clone()))), clock)
}

/// Waits until so many answers are there and every worker has gone to sleep, then makes sure that there are no more.
fn settles_at(rig: &mut Several, answers: usize) {
    eventually("so many answers", || rig.answers() >= answers);
    let wakes = rig.device.stats().read().wakes;
    // A few more rounds of each worker give no more.
    for lane in 0..rig.lanes.len() {
        rig.kick(lane);
    }
    let stats = rig.device.stats();
    eventually("the workers look again", || stats.read().wakes > wakes);
    assert_eq!(rig.answers(), answers);
}

#[test]
fn requests_are_paid_in_tokens() {
    for threads in BOTH {
        let mut spec = with_queues(1, threads);
        // At most a token a minute, so that only the clock of the test brings any within it.
        (spec.throttle.iops, spec.throttle.iops_burst) = (Some(1), Some(5));
        let (mut rig, clock) = throttled(&spec);
        for i in 0..20 {
            let kind = [IN, FLUSH, DISCARD, WRITE_ZEROES][i % 4];
            let out = if i % 4 > 1 { range(0, 1, 0) } else { vec![] };
            rig.publish(0, kind, 0, &out, if kind == IN { 512 } else { 0 });
        }
        rig.kick(0);
        settles_at(&mut rig, 5);
        for (second, answers) in [(1, 6), (4, 9), (5, 10), (100, 15), (101, 16)] {
            clock.store(second * SECOND, Ordering::Release);
            rig.kick(0);
            settles_at(&mut rig, answers);
        }
        // What costs the disk nothing costs no token.
        clock.store(110 * SECOND, Ordering::Release);
        rig.kick(0);
        settles_at(&mut rig, 20);
        for _ in 0..10 {
            assert_eq!(rig.ask(0, GET_ID, 0, &[], 20).0, OK);
            assert_eq!(rig.ask(0, IN, u64::MAX, &[], 512).0, IOERR);
        }
        rig.device.reset();
        let counts = rig.device.stats().read();
        assert_eq!((counts.requests(), counts.errors), (40, 0), "throttled, never dropped");
        assert_eq!((counts.throttled, counts.throttled_ns), (6, 110 * SECOND));
    }
}

#[test]
fn bytes_are_paid_in_tokens_and_large_requests_in_debt() {
    let mut spec = with_queues(1, spec::DiskThreads::PerQueue);
    (spec.throttle.bps, spec.throttle.bps_burst) = (Some(1024), Some(4096));
    let (mut rig, clock) = throttled(&spec);
    // Larger than the bucket: it passes at once, and what follows waits for its debt.
    let large = rig.publish(0, OUT, 0, &[3; 64 << 10], 0);
    let after = rig.publish(0, IN, 0, &[], 512);
    rig.kick(0);
    assert_eq!(rig.wait(0, large).0, OK);
    settles_at(&mut rig, 0);
    // (64 KiB - 4 KiB) at 1 KiB a second are 60 seconds; one byte more is the first token.
    clock.store(60 * SECOND, Ordering::Release);
    rig.kick(0);
    settles_at(&mut rig, 0);
    clock.store(60 * SECOND + SECOND / 1024 + 1, Ordering::Release);
    rig.kick(0);
    assert_eq!(rig.wait(0, after), (OK, vec![3; 512]));
}

#[test]
fn queues_share_the_tokens_of_their_disk() {
    for threads in BOTH {
        let mut spec = with_queues(4, threads);
        (spec.throttle.iops, spec.throttle.iops_burst) = (Some(1), Some(8));
        let (mut rig, clock) = throttled(&spec);
        for lane in 0..4 {
            for _ in 0..30 {
                rig.publish(lane, IN, 0, &[], 512);
            }
            rig.kick(lane);
        }
        // A thread may take one on credit while another takes the last; it is paid back.
        let most = if threads == spec::DiskThreads::Shared { 8 } else { 11 };
        eventually("the burst", || rig.answers() >= 8);
        assert!(rig.answers() <= most);
        for second in [10, 20, 30] {
            clock.store(second * SECOND, Ordering::Release);
            (0..4).for_each(|lane| rig.kick(lane));
            let (least, most) = (second as usize + 8 - 2 * (second as usize / 10), second as usize + most);
            eventually("what the clock brought", || rig.answers() >= least);
            assert!(rig.answers() <= most, "{} after {second} s", rig.answers());
        }
        // A reset does not wait for tokens.
        let answered = rig.answers();
        rig.device.reset();
        assert_eq!(rig.device.stats().read().reads as usize, rig.answers());
        assert!(rig.answers() < answered + 4);
        assert!(rig.device.stats().read().throttled > 0);
    }
}

#[test]
fn the_block_size_that_was_agreed_binds() {
    let image = MemImage::new(vec![5; DISK]);
    let spec =
        spec::Disk { logical_block_size: Some(4096), physical_block_size: Some(16 << 10), ..spec::Disk::new("memory") };
    let mut rig = Rig::new(Disk::in_memory(&image, false), &spec);
    let mut config = [0; 60];
    rig.device.read_config(0, &mut config);
    assert_eq!(config[20..24], 4096u32.to_le_bytes(), "blk_size");
    assert_eq!(config[24..26], [2, 0], "2^2 logical blocks in a physical one, aligned at 0");
    assert_eq!(config[26..28], 4u16.to_le_bytes(), "min_io_size, in logical blocks");
    for (kind, sector, out, room, status) in [
        (IN, 0, vec![], 4096, OK),
        (IN, 8, vec![], 8192, OK),
        (IN, 1, vec![], 4096, IOERR),
        (IN, 0, vec![], 512, IOERR),
        (OUT, 0, vec![1; 512], 0, IOERR),
        (OUT, 4, vec![1; 4096], 0, IOERR),
        (OUT, 8, vec![1; 4096], 0, OK),
        (DISCARD, 0, range(0, 1, 0), 0, IOERR),
        (WRITE_ZEROES, 0, range(7, 8, 0), 0, IOERR),
        (WRITE_ZEROES, 0, range(8, 8, 0), 0, OK),
    ] {
        assert_eq!(rig.request(kind, sector, &out, room).status, status, "type {kind} at {sector}");
    }
    assert!(image.to_vec()[..4096] == [5; 4096]);
    // A driver that does not take the feature asks for sectors.
    let mut rig = Rig::with_features(Disk::in_memory(&image, false), &spec, features::TRANSPORT);
    assert_eq!(rig.request(IN, 1, &[], 512).status, OK);
    // A tail that is no block is no part of the disk.
    let image = MemImage::new(vec![5; 8192 + 1024]);
    let device = Blk::new(Disk::in_memory(&image, false), &spec);
    assert!(device.warning().unwrap().contains("its last 1024 bytes are no whole block of 4096"));
    let mut capacity = [0; 8];
    device.read_config(0, &mut capacity);
    assert_eq!(u64::from_le_bytes(capacity), 16);
}

#[test]
fn a_cluster_is_the_best_size_of_large_requests() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("c.qcow2");
    let options = block::qcow2::offline::CreateOptions { size: 1 << 20, ..Default::default() };
    block::qcow2::offline::create(&path, &options).unwrap();
    let spec = spec::Disk { format: spec::DiskFormat::Qcow2, ..spec::Disk::new(&path) };
    let device = Blk::open(&spec).unwrap();
    let mut config = [0; 60];
    device.read_config(0, &mut config);
    let word = |at: usize| u32::from_le_bytes(config[at..at + 4].try_into().unwrap());
    assert_eq!(word(28) * word(20), 64 << 10, "opt_io_size");
    assert_eq!(word(44) * 512, 64 << 10, "discard_sector_alignment");
    assert!(word(20) << config[24] <= 4096, "a cluster is no physical block");
    drop(device);
    let spec = spec::Disk { logical_block_size: Some(4096), ..spec::Disk::new(dir.path().join("tiny")) };
    std::fs::write(&spec.path, [0; 512]).unwrap();
    let Err(refused) = Blk::open(&spec) else { panic!("a disk of no block") };
    assert!(refused.to_string().contains("no whole block of 4096 bytes"), "{refused}");
}

/// How many changes have ended that no ended sync covers.
fn at_risk(log: &[Event]) -> usize {
    let (mut open, mut ended) = (Vec::new(), Vec::new());
    for event in log {
        match event {
            Event::Begin { serial, change, .. } => open.push((*serial, change.clone(), ended.clone())),
            Event::End { serial } => match open.iter().find(|(s, ..)| s == serial) {
                Some((_, Change::Sync, covered)) => ended.retain(|s| !covered.contains(s)),
                _ => ended.push(*serial),
            },
            Event::Mark(_) => {}
        }
    }
    ended.len()
}

#[test]
fn the_write_cache_can_be_switched_off() {
    let image = RecordImage::new(vec![0; DISK], 5);
    let spec = spec::Disk::new("memory");
    let mut rig = Rig::new(Disk::recorded(&image, false), &spec);
    assert_eq!(rig.device.features() & CONFIG_WCE, CONFIG_WCE);
    let cache = |rig: &Rig| {
        let mut byte = [9];
        rig.device.read_config(32, &mut byte);
        byte[0]
    };
    assert_eq!(cache(&rig), 1);
    assert_eq!(rig.request(OUT, 0, &[1; 512], 0).status, OK);
    assert_eq!(at_risk(&image.log()), 1, "writeback: a write waits for its flush");
    rig.device.write_config(32, &[0]);
    assert_eq!((cache(&rig), at_risk(&image.log())), (0, 0), "what was written before is durable too");
    for sector in 0..20 {
        assert_eq!(rig.request(OUT, sector, &[2; 512], 0).status, OK);
        assert_eq!(rig.request(WRITE_ZEROES, 0, &range(sector + 40, 1, 0), 0).status, OK);
        assert_eq!(at_risk(&image.log()), 0, "writethrough: an answered write is durable");
    }
    rig.device.write_config(32, &[1, 0]);
    rig.device.write_config(33, &[1]);
    assert_eq!(cache(&rig), 0, "one byte at its place");
    rig.device.write_config(32, &[1]);
    assert_eq!(rig.request(OUT, 0, &[3; 512], 0).status, OK);
    assert_eq!(at_risk(&image.log()), 1);
    rig.device.write_config(32, &[0]);
    rig.restart();
    assert_eq!(cache(&rig), 1, "a reset forgets it");
    rig.device.reset();
    assert_eq!(rig.device.stats().read().flushes, 0, "the guest sent none");
}

#[test]
fn a_driver_that_can_not_flush_needs_not() {
    let image = RecordImage::new(vec![0; DISK], 6);
    let mut rig = Rig::with_features(Disk::recorded(&image, false), &spec::Disk::new("memory"), features::TRANSPORT);
    for sector in 0..20 {
        assert_eq!(rig.request(OUT, sector, &[2; 512], 0).status, OK);
        assert_eq!(at_risk(&image.log()), 0);
    }
    // With `cache=unsafe` nobody wants that.
    let spec = spec::Disk { cache: spec::Cache::Unsafe, ..spec::Disk::new("memory") };
    let rig = Rig::new(Disk::recorded(&image, false), &spec);
    assert_eq!(rig.device.features() & CONFIG_WCE, 0);
}
