// SPDX-License-Identifier: Apache-2.0
//! Random requests through each storage, several in flight, against a plain `Vec<u8>`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use block::{Aio, Cache, Disk, Error, MemImage, Op, Options};
use common::{Buffer, Rng, User};

const SIZE: u64 = 1 << 20;

struct Flying {
    id: u16,
    op: Op,
    offset: u64,
    buffer: Buffer,
}

/// Ranges in flight never overlap, so that the model knows every byte.
fn free_range(rng: &mut Rng, flying: &[Flying], lens: &[u64]) -> Option<(u64, u64)> {
    for _ in 0..20 {
        let len = (1 + rng.below(64)) * 512;
        let offset = rng.below((SIZE - len) / 512) * 512;
        let clash = flying.iter().zip(lens).any(|(f, l)| offset < f.offset + l && f.offset < offset + len);
        if !clash {
            return Some((offset, len));
        }
    }
    None
}

fn run(disk: Disk, attached: bool, seed: u64) -> Vec<u8> {
    let rng = &mut Rng(seed);
    let mut user = if attached { User::new(disk) } else { User::detached(disk) };
    let mut model = user.read(0, SIZE as usize).unwrap();
    for round in 0..60 {
        let (mut flying, mut lens) = (Vec::new(), Vec::new());
        for id in 0..1 + rng.below(12) as u16 {
            let Some((offset, len)) = free_range(rng, &flying, &lens) else { break };
            let op = match rng.below(12) {
                0..5 => Op::Read,
                5..9 => Op::Write,
                9 => Op::Flush,
                10 => Op::WriteZeroes { unmap: false },
                _ => Op::WriteZeroes { unmap: true },
            };
            // Now and then at an address that direct I/O can't take, in segments that it can't take.
            let (skew, step) = if rng.below(4) == 0 { (rng.below(600) as usize, 1) } else { (0, 512) };
            let mut buffer = match op {
                Op::Read => Buffer::new(len as usize, skew),
                Op::Write => Buffer::with(&rng.bytes(len as usize), skew),
                _ => Buffer::new(0, 0),
            };
            let segs = if matches!(op, Op::Read | Op::Write) { buffer.segs(rng, step) } else { Vec::new() };
            user.submit(id, op, offset, len, &segs);
            flying.push(Flying { id, op, offset, buffer });
            lens.push(len);
        }
        for (f, len) in flying.iter().zip(&lens) {
            user.wait(f.id).unwrap_or_else(|e| panic!("round {round}: {:?} at {} failed: {e}", f.op, f.offset));
            let range = f.offset as usize..(f.offset + len) as usize;
            match f.op {
                Op::Read => assert!(f.buffer.data() == &model[range], "round {round}: read at {} differs", f.offset),
                Op::Write => model[range].copy_from_slice(f.buffer.data()),
                Op::WriteZeroes { .. } => model[range].fill(0),
                Op::Flush | Op::Discard => {}
            }
        }
    }
    user.submit(7, Op::Discard, 4096, 8192, &[]);
    user.wait(7).unwrap();
    let now = user.read(0, SIZE as usize).unwrap();
    assert!(now[..4096] == model[..4096] && now[12288..] == model[12288..], "a discard stays in its range");
    assert!(now[4096..12288] == model[4096..12288] || now[4096..12288].iter().all(|b| *b == 0));
    user.disk.detach();
    now
}

#[test]
fn every_storage_behaves_like_plain_bytes() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (i, cache) in [Cache::Writeback, Cache::None, Cache::Unsafe].into_iter().enumerate() {
        for (j, aio) in [Aio::Auto, Aio::IoUring, Aio::Threads].into_iter().enumerate() {
            for attached in [true, false] {
                let path = dir.path().join(format!("{i}{j}{attached}.raw"));
                let start = Rng(99).bytes(SIZE as usize);
                std::fs::write(&path, start).unwrap();
                let options = Options { cache, aio, ..Options::new(&path) };
                let disk = match Disk::open(&options) {
                    Ok(disk) => disk,
                    Err(Error::Unsupported(_, why)) => {
                        println!("skipped {cache:?} {aio:?}: {why}");
                        continue;
                    }
                    Err(e) => panic!("{e}"),
                };
                let seed = 0x9e37_79b9 + (i * 10 + j) as u64;
                let now = run(disk, attached, seed);
                let on_disk = std::fs::read(&path).unwrap();
                assert!(now == on_disk, "{cache:?} {aio:?}: the file has what the disk says");
            }
        }
    }
}

#[test]
fn memory_behaves_like_plain_bytes() {
    let image = MemImage::new(Rng(99).bytes(SIZE as usize));
    let now = run(Disk::in_memory(&image, false), true, 4242);
    assert!(now == image.to_vec());
}

#[test]
fn huge_segment_lists_arrive_whole() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for aio in [Aio::Auto, Aio::IoUring, Aio::Threads] {
        let path = dir.path().join(format!("{aio:?}.raw"));
        std::fs::write(&path, vec![0; SIZE as usize]).unwrap();
        let mut user = User::new(Disk::open(&Options { aio, ..Options::new(&path) }).unwrap());
        // More segments than one system call takes, so the storage must go on by itself.
        let data = Rng(5).bytes(3000 * 16);
        let mut buffer = Buffer::with(&data, 0);
        let [whole] = buffer.segs(&mut Rng(1), data.len())[..] else { panic!() };
        let segs: Vec<_> = (0..3000).map(|i| base::Seg { ptr: whole.ptr.wrapping_add(16 * i), len: 16 }).collect();
        let len = data.len() as u64;
        user.submit(3, Op::Write, 512, len, &segs);
        user.wait(3).unwrap();
        let mut back = Buffer::new(data.len(), 0);
        let [whole] = back.segs(&mut Rng(1), data.len())[..] else { panic!() };
        let segs: Vec<_> = (0..3000).map(|i| base::Seg { ptr: whole.ptr.wrapping_add(16 * i), len: 16 }).collect();
        user.submit(4, Op::Read, 512, len, &segs);
        user.wait(4).unwrap();
        assert!(back.data() == data, "{aio:?}");
    }
}
