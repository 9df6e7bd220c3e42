// SPDX-License-Identifier: Apache-2.0
//! Random histories through the device, many requests in flight, cut at random, against a plain `Vec<u8>`.

use block::{Disk, MemImage};
use testkit::Buf;
use virtio::VirtioDevice;

use crate::rig::*;

const DISK: u64 = 512 << 10;

struct Flying {
    head: u16,
    kind: u32,
    start: usize,
    data: Vec<u8>,
}

fn cuts(rng: &mut Rng, len: usize) -> Vec<usize> {
    (0..rng.below(5)).map(|_| 1 + rng.below(len as u64) as usize).collect()
}

fn run(rig: &mut Rig, seed: u64, rounds: usize, mut model: Vec<u8>) -> Vec<u8> {
    let rng = &mut Rng::new(seed);
    for round in 0..rounds {
        let mut flying: Vec<Flying> = Vec::new();
        for _ in 0..1 + rng.below(16) {
            let sectors = 1 + rng.below(40);
            let sector = rng.below(DISK / 512 - sectors);
            let (start, len) = (sector as usize * 512, sectors as usize * 512);
            if flying.iter().any(|f| start < f.start + f.data.len() && f.start < start + len) {
                continue;
            }
            let kind = [IN, IN, IN, OUT, OUT, OUT, FLUSH, WRITE_ZEROES][rng.below(8) as usize];
            let (mut out, room) = (header(kind, sector), if kind == IN { len } else { 0 });
            let data = match kind {
                OUT => rng.bytes(len),
                FLUSH => Vec::new(),
                _ => vec![0; len],
            };
            match kind {
                OUT => out.extend(&data),
                WRITE_ZEROES => out.extend(range(sector, sectors as u32, rng.below(2) as u32)),
                _ => {}
            }
            let (a, b) = (cuts(rng, out.len()), cuts(rng, room + 1));
            let bufs: Vec<Buf> = [rig.readable(&out, &a), rig.writable(room + 1, &b)].concat();
            let head = if rng.below(2) == 0 { rig.publish(&bufs) } else { rig.publish_indirect(&bufs) };
            flying.push(Flying { head, kind, start, data });
            if rng.below(3) == 0 {
                rig.kick();
            }
        }
        rig.kick();
        for f in flying {
            let reply = rig.wait(f.head);
            assert_eq!(reply.status, OK, "round {round}, type {} at {}", f.kind, f.start);
            let range = f.start..f.start + f.data.len();
            if f.kind == IN {
                assert!(reply.data == model[range], "round {round}: read at {}", f.start);
                assert_eq!(reply.written as usize, f.data.len() + 1);
            } else {
                model[range].copy_from_slice(&f.data);
                assert_eq!(reply.written, 1);
            }
        }
        if round % 16 == 15 {
            rig.restart();
        }
    }
    model
}

#[test]
fn memory() {
    let (mut rig, image) = Rig::memory(DISK as usize);
    let model = run(&mut rig, 11, 64, image.to_vec());
    assert!(image.to_vec() == model);
}

#[test]
fn files_in_every_cache_and_aio_mode() {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut seed = 1000;
    for cache in [spec::Cache::Writeback, spec::Cache::None, spec::Cache::Unsafe] {
        for aio in [spec::Aio::Auto, spec::Aio::IoUring, spec::Aio::Threads] {
            seed += 1;
            let path = dir.path().join(format!("{seed}.raw"));
            let start = Rng::new(seed).bytes(DISK as usize);
            std::fs::write(&path, &start).unwrap();
            let spec = spec::Disk { cache, aio, ..spec::Disk::new(&path) };
            let options = block::Options {
                cache: match cache {
                    spec::Cache::Writeback => block::Cache::Writeback,
                    spec::Cache::None => block::Cache::None,
                    spec::Cache::Unsafe => block::Cache::Unsafe,
                },
                aio: match aio {
                    spec::Aio::Auto => block::Aio::Auto,
                    spec::Aio::IoUring => block::Aio::IoUring,
                    spec::Aio::Threads => block::Aio::Threads,
                },
                ..block::Options::new(&path)
            };
            let disk = match Disk::open(&options) {
                Ok(disk) => disk,
                Err(block::Error::Unsupported(_, why)) => {
                    println!("skipped {cache:?} {aio:?}: {why}");
                    continue;
                }
                Err(e) => panic!("{e}"),
            };
            let mut rig = Rig::new(disk, &spec);
            let model = run(&mut rig, seed, 40, start);
            rig.device.reset();
            let counts = rig.device.stats().read();
            assert_eq!((counts.errors, counts.faults), (0, 0));
            drop(rig);
            assert!(std::fs::read(&path).unwrap() == model, "{cache:?} {aio:?}");
        }
    }
}

#[test]
fn a_device_opens_its_own_disk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("own.raw");
    std::fs::write(&path, vec![3; 4096 + 100]).unwrap();
    let device = virtio::blk::Blk::open(&spec::Disk::new(&path)).unwrap().numbered(0);
    assert!(device.warning().unwrap().contains("the last 100 are hidden"));
    let Err(error) = virtio::blk::Blk::open(&spec::Disk::new(&path)) else { panic!("locked") };
    assert!(error.to_string().contains("in use by another process"), "{error}");
    drop(device);
    let image = MemImage::new(vec![0; 512]);
    assert!(virtio::blk::Blk::new(Disk::in_memory(&image, false), &spec::Disk::new("m")).warning().is_none());
}
