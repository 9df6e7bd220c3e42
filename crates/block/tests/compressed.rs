// SPDX-License-Identifier: Apache-2.0
//! Compressed clusters with many requests in flight: shared reads, starts of clusters, threads; then with damage.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::Path;

use base::EventFd;
use block::{Aio, AlignedBuf, Cache, Disk, Op, Options, Request};
use common::{Rng, tools};

const SIZE: usize = 6 << 20;
const SLOTS: u16 = 40;
const SLOT: usize = 192 << 10;

/// Text, noise and zeroes in turn.
fn content(rng: &mut Rng) -> Vec<u8> {
    let mut data = vec![0; SIZE];
    for part in data.chunks_mut(24 << 10) {
        match rng.below(4) {
            0 => {}
            1 => part.copy_from_slice(&rng.bytes(part.len())),
            _ => {
                let salt = rng.next();
                part.iter_mut().enumerate().for_each(|(i, b)| *b = ((i as u64).wrapping_mul(salt | 1) >> 9) as u8 & 15);
            }
        }
    }
    data
}

fn image(dir: &Path, data: &[u8], cluster: &str, kind: &str) -> std::path::PathBuf {
    let raw = dir.join("plain.raw");
    std::fs::write(&raw, data).unwrap();
    let path = dir.join("packed.qcow2");
    let options = format!("cluster_size={cluster},compression_type={kind}");
    let words =
        ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", &options, raw.to_str().unwrap(), path.to_str().unwrap()];
    tools::qemu_img(&words).unwrap();
    path
}

/// A batch of reads, random or one after the other; how many failed. Those that did not are compared with `data`.
fn batch(disk: &mut Disk, wake: &EventFd, rng: &mut Rng, data: &[u8], memory: &mut AlignedBuf, leave: bool) -> usize {
    memory.bytes_mut().fill(0xee);
    let mut asked = Vec::new();
    let (step, mut next) = (512 << rng.below(8), rng.below(64) as usize * 65_536);
    let order = rng.below(2);
    for id in 0..SLOTS {
        let (offset, len) = if order == 0 {
            let at = next % (SIZE - step);
            next = at + step;
            (at, step)
        } else {
            let most = 2 << rng.below(8);
            let len = (1 + rng.below(most) as usize) * 512;
            (rng.below(((SIZE - len) / 512) as u64) as usize * 512, len)
        };
        let len = len.min(SLOT);
        asked.push((offset, len));
        let segs = [memory.seg(usize::from(id) * SLOT, len)];
        disk.submit(&Request { id, op: Op::Read, offset: offset as u64, len: len as u64, segs: &segs });
    }
    disk.commit();
    let (mut left, mut failed, mut done) = (asked.len(), 0, Vec::new());
    if leave {
        disk.detach();
    }
    while left > 0 {
        disk.want_wake(true);
        disk.reap(&mut done);
        if done.is_empty() {
            wake.read().unwrap();
        }
        disk.want_wake(false);
        for end in done.drain(..) {
            left -= 1;
            let (offset, len) = asked[usize::from(end.id)];
            let got = &memory.bytes()[usize::from(end.id) * SLOT..][..len];
            match end.result {
                Ok(()) => assert!(got == &data[offset..offset + len], "{len} bytes at {offset}"),
                Err(_) => failed += 1,
            }
        }
    }
    if leave {
        disk.attach(wake).unwrap();
    }
    failed
}

#[test]
fn many_at_a_time_read_what_one_by_one_do() {
    if !tools::there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng(31);
    let mut memory = AlignedBuf::large(usize::from(SLOTS) * SLOT).unwrap();
    for (cluster, kind) in
        [("64k", "zlib"), ("64k", "zstd"), ("4k", "zlib"), ("2M", "zlib"), ("512", "zlib"), ("128k", "zstd")]
    {
        let data = content(&mut rng);
        let path = image(dir.path(), &data, cluster, kind);
        for (cache, aio) in [(Cache::Writeback, Aio::Auto), (Cache::None, Aio::Auto), (Cache::Writeback, Aio::Threads)]
        {
            let options = Options { readonly: true, cache, aio, ..Options::qcow2(&path) };
            let mut disk = Disk::open(&options).unwrap();
            let wake = EventFd::new(0).unwrap();
            disk.attach(&wake).unwrap();
            for turn in 0..12 {
                let failed = batch(&mut disk, &wake, &mut rng, &data, &mut memory, turn % 5 == 4);
                assert_eq!(failed, 0, "{cluster} {kind} {cache:?} {aio:?}");
            }
        }
        // Two threads share the image and the unpacking threads; the one that stops first leaves the other alone.
        let options = Options { readonly: true, ..Options::qcow2(&path) };
        let mut first = Disk::open(&options).unwrap();
        let mut second = first.share().unwrap();
        let seed = rng.next();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut rng, wake) = (Rng(seed), EventFd::new(0).unwrap());
                let mut memory = AlignedBuf::large(usize::from(SLOTS) * SLOT).unwrap();
                second.attach(&wake).unwrap();
                for _ in 0..4 {
                    assert_eq!(batch(&mut second, &wake, &mut rng, &data, &mut memory, false), 0);
                }
                drop(second);
            });
            let wake = EventFd::new(0).unwrap();
            first.attach(&wake).unwrap();
            for _ in 0..8 {
                assert_eq!(batch(&mut first, &wake, &mut rng, &data, &mut memory, false), 0);
            }
        });
    }
}

#[test]
fn damaged_data_fails_the_requests_that_want_it() {
    if !tools::there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng(5);
    // Five bits in eight: each cluster is a stream of its own.
    let data: Vec<u8> = (0..SIZE).map(|_| rng.next() as u8 & 31).collect();
    let path = image(dir.path(), &data, "64k", "zlib");
    let mut bytes = std::fs::read(&path).unwrap();
    // The last tenth of the file is data of the last clusters.
    let from = bytes.len() - bytes.len() / 10;
    bytes[from..].fill(0xff);
    std::fs::write(&path, &bytes).unwrap();
    let mut disk = Disk::open(&Options { readonly: true, ..Options::qcow2(&path) }).unwrap();
    let wake = EventFd::new(0).unwrap();
    disk.attach(&wake).unwrap();
    let mut memory = AlignedBuf::large(usize::from(SLOTS) * SLOT).unwrap();
    let failed: usize = (0..20).map(|_| batch(&mut disk, &wake, &mut rng, &data, &mut memory, false)).sum();
    assert!(failed > 0, "some met the damage");
    assert!(failed < 20 * usize::from(SLOTS) / 2, "most did not: {failed}");
}
