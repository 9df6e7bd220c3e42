// SPDX-License-Identifier: Apache-2.0
//! The engine on a storage that fails or holds back what it is told to: a full host, tables that come late or not at all, and
//! who waits for them. The images are in memory; QEMU says what is left in them.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::Path;

use block::{Disk, Fault, FaultPlan, MemImage, Op, Options};
use common::tools::{self, check_holds, qemu_img};
use common::{Buffer, Rng, User, quick};

/// An empty image of 4 MiB in memory, clusters of 4 KiB.
fn in_memory(dir: &Path) -> Option<MemImage> {
    let path = dir.join("empty.qcow2");
    if !tools::there() {
        return None;
    }
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4k", path.to_str().unwrap(), "4M"]).unwrap();
    Some(MemImage::new(std::fs::read(path).unwrap()))
}

/// QEMU finds the image whole, and in it what `model` says.
fn check_left(image: &MemImage, model: &[u8], dir: &Path) {
    let path = dir.join("after.qcow2");
    std::fs::write(&path, image.to_vec()).unwrap();
    check_holds(&path, model, dir);
}

#[test]
fn a_full_host_fails_the_request_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let Some(image) = in_memory(dir.path()) else {
        return;
    };
    let plan = FaultPlan::new();
    let mut user = User::new(Disk::faulty_qcow2(&image, &Options::qcow2("memory"), &plan).unwrap());
    let mut model = vec![0; 4 << 20];
    let mut rng = Rng(9);
    let mut failed = 0;
    for turn in 0..600_u64 {
        if turn % 7 == 0 {
            let after = rng.below(3) as u32;
            let errno = Some(if turn % 2 == 0 { libc::ENOSPC } else { libc::EIO });
            plan.add(Fault { op: Op::Write, range: 0..u64::MAX, after, times: 1, errno });
        }
        let at = rng.below(8000) as usize * 512;
        let sectors = 1 + rng.below(20) as usize;
        let data = quick(&mut rng, 512 * sectors);
        match user.write(at as u64, &data) {
            Ok(()) => model[at..at + data.len()].copy_from_slice(&data),
            Err(_) => {
                failed += 1;
                // Its own range may be anything now; the rest is as it was.
                plan.clear();
                user.write(at as u64, &data).unwrap();
                model[at..at + data.len()].copy_from_slice(&data);
            }
        }
        if turn % 50 == 0 && user.flush().is_err() {
            plan.clear();
            user.flush().unwrap();
        }
        if turn % 100 == 0 {
            assert!(user.read(0, model.len()).unwrap() == model, "turn {turn}");
        }
    }
    assert!(failed > 20, "{failed} failures are no test");
    plan.clear();
    user.disk.detach();
    drop(user);
    check_left(&image, &model, dir.path());
}

/// A request that is still under way when its cluster is freed has it until it ends: nobody else gets that cluster before.
#[test]
fn a_freed_cluster_waits_for_those_who_use_it() {
    let dir = tempfile::tempdir().unwrap();
    let Some(image) = in_memory(dir.path()) else {
        return;
    };
    let plan = FaultPlan::new();
    let mut user = User::new(Disk::faulty_qcow2(&image, &Options::qcow2("memory"), &plan).unwrap());
    for op in [Op::Read, Op::Write] {
        user.write(0, &[0x11; 4096]).unwrap();
        user.flush().unwrap();
        // Held back at the storage: a read, or a write in place, of the cluster that the guest then gives up.
        plan.add(Fault { op, range: 0..u64::MAX, after: 0, times: 1, errno: None });
        let mut held = Buffer::with(&[0x22; 4096], 0);
        let segs = held.segs(&mut Rng(1), 4096);
        user.submit(9, op, 0, 4096, &segs);
        user.disk.commit();
        plan.clear();
        user.submit(1, Op::Discard, 0, 4096, &[]);
        user.wait(1).unwrap();
        for round in 0..4_u64 {
            user.flush().unwrap();
            for n in 1..20 {
                user.write((round * 20 + n) * 4096, &[0x33; 4096]).unwrap();
            }
        }
        plan.release();
        user.wait(9).unwrap();
        if op == Op::Read {
            assert!(held.data().iter().all(|b| *b == 0x11), "the read saw the next owner's bytes");
        }
        for n in (0..80_u64).filter(|n| n % 20 != 0) {
            assert_eq!(user.read(n * 4096, 4096).unwrap(), vec![0x33; 4096], "the write hit the next owner");
        }
        user.submit(1, Op::Discard, 0, 4 << 20, &[]);
        user.wait(1).unwrap();
    }
    user.disk.detach();
    drop(user);
    std::fs::write(dir.path().join("after.qcow2"), image.to_vec()).unwrap();
    let text = qemu_img(&["check", "-f", "qcow2", dir.path().join("after.qcow2").to_str().unwrap()]).unwrap();
    assert!(text.contains("No errors were found"), "{text}");
}

/// Where the table lies that the first entry of the table names which the header names at byte `at`: 48 for refcounts, 40
/// for L1.
fn first_of(image: &MemImage, at: usize) -> std::ops::Range<u64> {
    let bytes = image.to_vec();
    let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let table = number(number(at) as usize) & 0x00ff_ffff_ffff_fe00;
    table..table + 4096
}

/// The first read of a range is held back, or fails.
fn first_read(range: std::ops::Range<u64>, errno: Option<i32>) -> Fault {
    Fault { op: Op::Read, range, after: 0, times: 1, errno }
}

/// Sends off a write of one byte over and over, and does not wait for it.
fn begin_write(user: &mut User, id: u16, at: u64, byte: u8) -> Buffer {
    let mut buffer = Buffer::with(&[byte; 4096], 0);
    let segs = buffer.segs(&mut Rng(1), 4096);
    user.submit(id, Op::Write, at, 4096, &segs);
    user.disk.commit();
    buffer
}

#[test]
fn who_needs_a_refcount_block_waits_for_it_alone() {
    let dir = tempfile::tempdir().unwrap();
    let Some(image) = in_memory(dir.path()) else {
        return;
    };
    let mut model = vec![0; 4 << 20];
    let open = |plan: &FaultPlan| User::new(Disk::faulty_qcow2(&image, &Options::qcow2("memory"), plan).unwrap());
    let write = |user: &mut User, model: &mut Vec<u8>, at: usize, byte: u8| {
        let result = user.write(at as u64, &[byte; 4096]);
        if result.is_ok() {
            model[at..at + 4096].fill(byte);
        }
        result.map_err(|e| e.raw_os_error().unwrap())
    };
    write(&mut open(&FaultPlan::new()), &mut model, 5 << 12, 1).unwrap();

    let plan = FaultPlan::new();
    let block = first_of(&image, 48);
    plan.add(first_read(block.clone(), None));
    let mut user = open(&plan);
    let _buffer = begin_write(&mut user, 7, 9 << 12, 2);
    // While the block is on its way: an allocated cluster, and reads.
    write(&mut user, &mut model, 5 << 12, 3).unwrap();
    assert!(user.read(0, model.len()).unwrap() == model);
    plan.release();
    user.wait(7).unwrap();
    model[9 << 12..10 << 12].fill(2);
    assert!(user.read(0, model.len()).unwrap() == model);
    drop(user);

    let plan = FaultPlan::new();
    plan.add(first_read(block, Some(libc::EIO)));
    let mut user = open(&plan);
    assert_eq!(write(&mut user, &mut model, 20 << 12, 4), Err(libc::EIO));
    write(&mut user, &mut model, 20 << 12, 5).unwrap();
    user.flush().unwrap();
    drop(user);
    check_left(&image, &model, dir.path());
}

/// A refcount block that two handles need, then a table that a snapshot shares: each is read once, late or not at all.
#[test]
fn two_handles_wait_for_the_same_table() {
    let dir = tempfile::tempdir().unwrap();
    let Some(image) = in_memory(dir.path()) else {
        return;
    };
    let path = dir.path().join("after.qcow2");
    let mut model = vec![0; 4 << 20];
    let open = |image: &MemImage, plan: &FaultPlan| {
        let first = Disk::faulty_qcow2(image, &Options::qcow2("memory"), plan).unwrap();
        let second = first.share().unwrap();
        [User::new(second), User::new(first)]
    };
    let mut users = open(&image, &FaultPlan::new());
    users[0].write(0, &[1; 4096]).unwrap();
    model[..4096].fill(1);
    drop(users);
    std::fs::write(&path, image.to_vec()).unwrap();
    qemu_img(&["snapshot", "-c", "s", path.to_str().unwrap()]).unwrap();
    let shared = MemImage::new(std::fs::read(&path).unwrap());

    for (start, header, errno) in
        [(&image, 48, None), (&image, 48, Some(libc::EIO)), (&shared, 40, None), (&shared, 40, Some(libc::EIO))]
    {
        let image = MemImage::new(start.to_vec());
        let plan = FaultPlan::new();
        let mut users = open(&image, &plan);
        // The slice that a write looks into is here; what has to be read next is not.
        assert!(users[0].read(0, 4096).unwrap() == model[..4096]);
        plan.add(first_read(first_of(start, header), errno));
        let places = [1 << 12, 2 << 12];
        let _buffers = [begin_write(&mut users[0], 7, places[0], 2), begin_write(&mut users[1], 7, places[1], 2)];
        // Held back: what needs nothing of it goes on.
        assert!(users[0].read(1 << 20, 4096).unwrap() == [0; 4096]);
        plan.release();
        let mut after = model.clone();
        for (user, at) in users.iter_mut().zip(places) {
            // Who came while the failing read was under way fails with it, who came after reads anew.
            if let Err(e) = user.wait(7) {
                assert_eq!((e.raw_os_error(), errno), (Some(libc::EIO), Some(libc::EIO)));
                user.write(at, &[2; 4096]).unwrap();
            }
            after[at as usize..at as usize + 4096].fill(2);
        }
        for user in &mut users {
            assert!(user.read(0, after.len()).unwrap() == after);
        }
        users[0].flush().unwrap();
        drop(users);
        std::fs::write(&path, image.to_vec()).unwrap();
        check_holds(&path, &after, dir.path());
        if header == 40 {
            qemu_img(&["snapshot", "-a", "s", path.to_str().unwrap()]).unwrap();
            check_holds(&path, &model, dir.path());
        }
    }
}
