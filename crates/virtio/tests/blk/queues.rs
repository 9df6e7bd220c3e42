// SPDX-License-Identifier: Apache-2.0
//! Several queues on one disk: who answers, in which order things become durable, random histories on all of them at once,
//! hostile queues, and resets under load.

use std::path::Path;

use block::qcow2::offline::{CreateOptions, create};
use block::{Change, Disk, Event, Fault, FaultPlan, MemImage, Op, RecordImage};
use spec::DiskThreads;
use testkit::conformance::eventually;
use virtio::blk::Blk;
use virtio::device::{VirtioDevice, status};

use crate::rig::{DISCARD, FLUSH, GET_ID, IN, IOERR, OK, OUT, Rng, WRITE_ZEROES, range};
use crate::several::{BOTH, Several, with_queues};

const DISK: usize = 256 << 10;

fn memory(queues: u16, threads: DiskThreads) -> (Several, MemImage) {
    let image = MemImage::new(Rng::new(77).bytes(DISK));
    let device = Blk::new(Disk::in_memory(&image, false), &with_queues(queues, threads));
    (Several::new(device), image)
}

#[test]
fn each_queue_answers_on_its_own_ring_and_interrupt() {
    for threads in BOTH {
        let (mut rig, image) = memory(4, threads);
        assert_eq!(rig.device.features() >> 12 & 1, 1, "F_MQ");
        let mut config = [0; 2];
        rig.device.read_config(34, &mut config);
        assert_eq!((u16::from_le_bytes(config), rig.device.queue_sizes().len()), (4, 4));
        let before = image.to_vec();
        for lane in [2, 0, 3, 1] {
            let told = [0, 1, 2, 3].map(|l| rig.interrupts(l));
            let (status, data) = rig.ask(lane, IN, lane as u64, &[], 512);
            assert_eq!(status, OK);
            assert!(data == before[lane * 512..][..512], "queue {lane}");
            eventually("the interrupt", || rig.interrupts(lane) == told[lane] + 1);
            for other in (0..4).filter(|l| *l != lane) {
                assert_eq!(rig.interrupts(other), told[other], "{other} heard of {lane}");
            }
        }
        assert_eq!(rig.ask(3, GET_ID, 0, &[], 20).0, OK);
        rig.device.reset();
        let counts = rig.device.stats().read();
        assert_eq!((counts.reads, counts.read_bytes, counts.others), (4, 2048, 1), "one account for all queues");
    }
}

#[test]
fn one_queue_offers_no_more() {
    let (rig, _) = memory(1, DiskThreads::PerQueue);
    assert_eq!(rig.device.features() >> 12 & 1, 0);
}

#[test]
fn a_driver_may_leave_queues_out() {
    for threads in BOTH {
        let (mut rig, _) = memory(3, threads);
        rig.device.reset();
        rig.activate(&[0, 2]);
        assert_eq!(rig.ask(1, IN, 0, &[], 512).0, OK);
        let unheard = rig.publish(0, IN, 0, &[], 512);
        rig.kick(0);
        assert_eq!(rig.ask(1, IN, 1, &[], 512).0, OK);
        assert!(!rig.answered(0, unheard));
    }
}

/// What is durable after `log`: the serials of changes that ended before a sync began that ended.
fn durable(log: &[Event]) -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    let mut ended: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut begun: Vec<(u64, Change, usize)> = Vec::new();
    for event in log {
        match event {
            Event::Begin { serial, change, .. } => begun.push((*serial, change.clone(), ended.len())),
            Event::End { serial } => match begun.iter().find(|(s, ..)| s == serial) {
                Some((_, Change::Write { data, .. }, _)) => ended.push((*serial, data.clone())),
                Some((_, Change::Sync, count)) => out = ended[..*count].iter().map(|(_, d)| d.clone()).collect(),
                _ => {}
            },
            Event::Mark(_) => {}
        }
    }
    out
}

#[test]
fn a_flush_covers_what_was_answered_on_every_queue() {
    for threads in BOTH {
        let image = RecordImage::new(vec![0; DISK], 5);
        let start = image.log().len();
        let device = Blk::new(Disk::recorded(&image, false), &with_queues(4, threads));
        let mut rig = Several::new(device);
        for round in 0..20u8 {
            for lane in 0..4 {
                let data = [round * 4 + lane as u8 + 1; 512];
                assert_eq!(rig.ask(lane, OUT, u64::from(round) * 4 + lane as u64, &data, 0).0, OK);
            }
            assert_eq!(rig.ask(usize::from(round) % 4, FLUSH, 0, &[], 0).0, OK);
            let safe = durable(&image.log()[start..]);
            for byte in 1..=round * 4 + 4 {
                assert!(safe.iter().any(|d| d[..] == [byte; 512]), "{byte} is not durable after flush {round}");
            }
        }
    }
}

/// Writes of which some overlap, on all queues at once: each sector holds what was there or what one of the writes of the round
/// put there, and reads see nothing else.
fn histories(rig: &mut Several, rounds: u32, seed: u64) {
    let sectors = DISK / 512;
    let rng = &mut Rng::new(seed);
    let mut model: Vec<u32> = vec![u32::MAX; sectors];
    let stamp = |id: u32| id.to_le_bytes().repeat(128);
    let lanes = rig.lanes.len() as u64;
    let known = |data: &[u8]| u32::from_le_bytes(data[..4].try_into().unwrap());
    // A first content of every sector.
    for (sector, slot) in model.iter_mut().enumerate() {
        *slot = 1_000_000 + sector as u32;
        assert_eq!(rig.ask(sector % lanes as usize, OUT, sector as u64, &stamp(*slot), 0).0, OK);
    }
    for round in 0..rounds {
        let mut flying = Vec::new();
        let mut may: Vec<Vec<u32>> = model.iter().map(|id| vec![*id]).collect();
        for n in 0..4 + rng.below(28) {
            let lane = rng.below(lanes) as usize;
            let len = 1 + rng.below(16);
            // Half of them in one corner, so that they meet.
            let span = if rng.below(2) == 0 { 32 } else { sectors as u64 };
            let at = rng.below(span.max(len + 1) - len);
            let id = round * 64 + n as u32 + 1;
            let (kind, out, room) = match rng.below(9) {
                0..=3 => (OUT, stamp(id).repeat(len as usize), 0),
                4 | 5 => (IN, Vec::new(), len as usize * 512),
                6 => (WRITE_ZEROES, range(at, len as u32, rng.below(2) as u32), 0),
                7 => (DISCARD, range(at, 0, 0), 0),
                _ => (FLUSH, Vec::new(), 0),
            };
            for slot in &mut may[at as usize..(at + len) as usize] {
                match kind {
                    OUT => slot.push(id),
                    WRITE_ZEROES => slot.push(0),
                    _ => {}
                }
            }
            flying.push((lane, rig.publish(lane, kind, at, &out, room), kind, at));
            if rng.below(3) == 0 {
                rig.kick(lane);
            }
        }
        (0..lanes as usize).for_each(|lane| rig.kick(lane));
        for (lane, head, kind, at) in flying {
            let (status, data) = rig.wait(lane, head);
            assert_eq!(status, OK, "round {round}: type {kind} at {at}");
            for (i, sector) in data.chunks(512).enumerate() {
                let all = &may[at as usize + i];
                // A read that met a write of the same sector may have seen a part of it.
                let whole = sector.chunks(4).all(|word| all.contains(&known(word)));
                assert!(whole, "round {round}: sector {} holds what nobody wrote", at as usize + i);
            }
        }
        for (sector, slot) in model.iter_mut().enumerate() {
            if may[sector].len() == 1 && round % 8 != 7 {
                continue;
            }
            let (status, data) = rig.ask(sector % lanes as usize, IN, sector as u64, &[], 512);
            let id = known(&data);
            assert_eq!(status, OK);
            let torn = data.chunks(4).any(|word| known(word) != id);
            assert!(!torn && may[sector].contains(&id), "round {round}: sector {sector} holds {id} (torn: {torn})");
            *slot = id;
        }
        if round % 16 == 15 {
            rig.restart();
        }
    }
}

#[test]
fn random_histories_in_memory() {
    for threads in BOTH {
        let (mut rig, _) = memory(4, threads);
        histories(&mut rig, 40, 21);
        rig.device.reset();
        assert_eq!((rig.device.stats().read().errors, rig.device.stats().read().faults), (0, 0));
    }
}

fn on_file(path: &Path, format: spec::DiskFormat, threads: DiskThreads) -> Several {
    let spec = spec::Disk { format, ..with_queues(4, threads) };
    Several::new(Blk::open(&spec::Disk { path: path.to_owned(), ..spec }).unwrap())
}

#[test]
fn random_histories_in_files() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (i, threads) in BOTH.into_iter().enumerate() {
        let raw = dir.path().join(format!("{i}.raw"));
        std::fs::write(&raw, vec![0; DISK]).unwrap();
        histories(&mut on_file(&raw, spec::DiskFormat::Raw, threads), 24, 31);
        // Small clusters: allocations, shared tables and zero clusters all the time.
        let qcow2 = dir.path().join(format!("{i}.qcow2"));
        create(&qcow2, &CreateOptions { cluster_size: 1024, size: DISK as u64, ..CreateOptions::default() }).unwrap();
        let mut rig = on_file(&qcow2, spec::DiskFormat::Qcow2, threads);
        histories(&mut rig, 24, 41);
        let counts = rig.device.stats();
        drop(rig);
        assert_eq!((counts.read().errors, counts.read().faults), (0, 0));
        let report = block::qcow2::offline::Image::open(&qcow2, false).unwrap().check().unwrap();
        assert!(report.clean(), "{report:?}");
    }
}

#[test]
fn a_broken_queue_stops_its_device_until_a_reset() {
    for threads in BOTH {
        for bad in 0..3 {
            let (mut rig, image) = memory(3, threads);
            let before = image.to_vec();
            // A head past the table.
            rig.lanes[bad].queue.set_avail_entry(0, 64);
            rig.lanes[bad].queue.set_avail_idx(1);
            rig.kick(bad);
            let state = rig.status.clone();
            eventually("the device gives up", || state.get() & status::NEEDS_RESET != 0);
            for lane in 0..3 {
                let head = if lane == bad { continue } else { rig.publish(lane, IN, 0, &[], 512) };
                rig.kick(lane);
                std::thread::yield_now();
                assert!(!rig.answered(lane, head), "queue {lane} of a broken device answers");
            }
            rig.restart();
            for lane in 0..3 {
                assert_eq!(rig.ask(lane, IN, 1, &[], 512), (OK, before[512..1024].to_vec()));
            }
            rig.device.reset();
            assert_eq!(rig.device.stats().read().faults, 1);
        }
    }
}

#[test]
fn wrong_requests_get_their_status_on_every_queue() {
    for threads in BOTH {
        let (mut rig, image) = memory(3, threads);
        let before = image.to_vec();
        for lane in 0..3 {
            assert_eq!(rig.ask(lane, IN, DISK as u64 / 512, &[], 512).0, IOERR);
            assert_eq!(rig.ask(lane, OUT, u64::MAX, &[1; 512], 0).0, IOERR);
            assert_eq!(rig.ask(lane, 77, 0, &[], 0).0, 2);
        }
        assert!(image.to_vec() == before);
        assert_eq!(rig.status.get(), 0);
    }
}

#[test]
fn a_hanging_request_holds_up_no_queue_and_a_reset_waits_for_it() {
    for threads in BOTH {
        let (plan, image) = (FaultPlan::new(), MemImage::new(vec![9; DISK]));
        let disk = Disk::in_memory(&image, false).with_faults(&plan);
        let mut rig = Several::new(Blk::new(disk, &with_queues(3, threads)));
        plan.add(Fault { op: Op::Read, range: 0..512, after: 0, times: 1, errno: None });
        let hanging = rig.publish(1, IN, 0, &[], 512);
        rig.kick(1);
        // The fault hits the first to read there: let that be the one that is to hang.
        assert_eq!(rig.ask(1, OUT, 8, &[1; 512], 0).0, OK);
        for i in 0..30 {
            assert_eq!(rig.ask(i % 3, OUT, 16 + i as u64, &[i as u8; 512], 0).0, OK);
            assert_eq!(rig.ask(i % 3, FLUSH, 0, &[], 0).0, OK);
        }
        assert!(!rig.answered(1, hanging));
        rig.device.reset();
        assert!(rig.answered(1, hanging), "the memory may be the guest's for something else now");
        assert_eq!(rig.wait(1, hanging), (OK, vec![9; 512]));
        // An error is one request's on one queue.
        rig.restart();
        plan.add(Fault { times: 1, ..Fault::every(Op::Write, 28) });
        assert_eq!(rig.ask(2, OUT, 0, &[3; 512], 0).0, IOERR);
        assert_eq!(rig.ask(0, OUT, 0, &[4; 512], 0).0, OK);
        assert_eq!(rig.ask(2, IN, 0, &[], 512), (OK, vec![4; 512]));
    }
}

/// Threads of this process whose name starts so.
fn threads_named(start: &str) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim_end().to_owned())
        .filter(|name| name.starts_with(start))
        .collect();
    names.sort();
    names
}

#[test]
fn resets_under_load_leave_nothing_behind() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (threads, number, names) in [
        (DiskThreads::PerQueue, 71, &["blk-71-q0", "blk-71-q1", "blk-71-q2", "blk-71-q3"][..]),
        (DiskThreads::Shared, 72, &["blk-72"]),
    ] {
        let path = dir.path().join(format!("{number}.raw"));
        std::fs::write(&path, vec![9; DISK]).unwrap();
        let spec = spec::Disk { path: path.clone(), ..with_queues(4, threads) };
        let mut rig = Several::new(Blk::open(&spec).unwrap().numbered(number));
        // The kernel lists a thread for a moment longer than it takes to join it.
        let nothing_is_left =
            || eventually("no thread outlives a reset", || threads_named(&format!("blk-{number}")).is_empty());
        let rng = &mut Rng::new(3);
        for _ in 0..30 {
            rig.device.reset();
            nothing_is_left();
            rig.restart();
            eventually("the threads are there", || threads_named(&format!("blk-{number}")) == names);
            for _ in 0..rng.below(24) {
                for lane in 0..4 {
                    let (sector, data) = (rng.below(500), [9; 512 * 8]);
                    rig.publish(lane, if rng.below(2) == 0 { OUT } else { FLUSH }, sector, &data, 0);
                    rig.kick(lane);
                }
            }
        }
        rig.restart();
        for lane in 0..4 {
            assert_eq!(rig.ask(lane, IN, 7, &[], 512), (OK, vec![9; 512]));
        }
        let counts = rig.device.stats();
        drop(rig);
        assert_eq!((counts.read().errors, counts.read().faults), (0, 0));
        nothing_is_left();
        assert!(std::fs::read(&path).unwrap() == vec![9; DISK]);
        // The image is free for the next user.
        drop(Blk::open(&spec).unwrap());
    }
}
