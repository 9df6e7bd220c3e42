// SPDX-License-Identifier: Apache-2.0
//! The qcow2 engine against a vector of bytes, with QEMU's tools as the judge of the image that it leaves behind.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::Path;
use std::process::Command;

use block::{Aio, Cache, Cow, Disk, Op, Options, Qcow2Options};
use common::{Buffer, Rng, User};

/// Runs one of QEMU's tools; `None` where there is none.
fn qemu(tool: &str, arguments: &[&str]) -> Option<String> {
    let out = Command::new(tool).args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{tool} {arguments:?}: {text}");
    Some(text)
}

struct Case {
    name: &'static str,
    create: &'static [&'static str],
    size: u64,
    cluster: u64,
    cache: Cache,
    aio: Aio,
    cow: Cow,
    l2_cache: Option<u64>,
}

const BASE: Case = Case {
    name: "plain",
    create: &[],
    size: 8 << 20,
    cluster: 65536,
    cache: Cache::Writeback,
    aio: Aio::Auto,
    cow: Cow::ZeroAware,
    l2_cache: None,
};

fn check(path: &Path, model: &[u8], dir: &Path) {
    let image = path.to_str().unwrap();
    let text = qemu("qemu-img", &["check", "-f", "qcow2", image]).unwrap();
    assert!(text.contains("No errors were found"), "{text}");
    let raw = dir.join("model.raw");
    std::fs::write(&raw, model).unwrap();
    qemu("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", raw.to_str().unwrap(), image]).unwrap();
}

/// One request of a random kind on a model that it changes too.
fn step(user: &mut User, model: &mut [u8], rng: &mut Rng, case: &Case, ids: std::ops::Range<u16>) {
    let grain = 512;
    let size = case.size / grain;
    let mut waiting = Vec::new();
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for id in ids {
        let longest = if rng.below(4) == 0 { case.cluster * 5 } else { 16384 } / grain;
        let at = rng.below(size);
        let len = (1 + rng.below(longest)).min(size - at);
        let (mut at, mut len) = (at * grain, len * grain);
        if rng.below(3) == 0 {
            at = at / case.cluster * case.cluster;
            len = len.next_multiple_of(case.cluster).min(case.size - at);
        }
        if taken.iter().any(|(a, l)| at < a + l && *a < at + len) {
            continue;
        }
        taken.push((at, len));
        let range = at as usize..(at + len) as usize;
        let (op, buffer) = match rng.below(10) {
            0..=4 => {
                let data = rng.bytes(len as usize);
                model[range].copy_from_slice(&data);
                (Op::Write, Some(Buffer::with(&data, 0)))
            }
            5..=7 => (Op::Read, Some(Buffer::new(len as usize, 0))),
            8 => {
                model[range].fill(0);
                (Op::WriteZeroes { unmap: rng.below(2) == 0 }, None)
            }
            _ => (Op::Flush, None),
        };
        let mut buffer = buffer;
        let segs = buffer.as_mut().map_or_else(Vec::new, |b| b.segs(rng, 512));
        let (at, len) = if op == Op::Flush { (0, 0) } else { (at, len) };
        user.submit(id, op, at, len, &segs);
        waiting.push((id, op, at, buffer));
    }
    for (id, op, at, buffer) in waiting {
        user.wait(id).unwrap_or_else(|e| panic!("{}: {op:?} at {at:#x}: {e}", case.name));
        if let (Op::Read, Some(buffer)) = (op, buffer) {
            let want = &model[at as usize..at as usize + buffer.data().len()];
            let wrong = want.iter().zip(buffer.data()).position(|(a, b)| a != b);
            if let Some(w) = wrong {
                let (a, b) = (&want[w..], &buffer.data()[w..]);
                panic!(
                    "{}: read at {at:#x} of {} bytes, wrong at {:#x}: {:x?} {:x?} want {:x?}",
                    case.name,
                    want.len(),
                    at as usize + w,
                    a.len(),
                    &b[..8.min(b.len())],
                    &a[..8.min(a.len())]
                );
            }
        }
    }
}

fn options(case: &Case, path: &Path) -> Options {
    Options {
        cache: case.cache,
        aio: case.aio,
        qcow2: Qcow2Options { cow: case.cow, l2_cache: case.l2_cache, ..Qcow2Options::default() },
        ..Options::qcow2(path)
    }
}

fn play(case: &Case, backing: Option<(&Path, &str, &[u8])>, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image.qcow2");
    let size = case.size.to_string();
    let mut arguments = vec!["create", "-q", "-f", "qcow2"];
    arguments.extend(case.create);
    let linked = dir.path().join("base");
    let mut model = vec![0; case.size as usize];
    if let Some((base, format, content)) = &backing {
        std::fs::copy(base, &linked).unwrap();
        arguments.extend(["-b", linked.to_str().unwrap(), "-F", format]);
        let n = content.len().min(model.len());
        model[..n].copy_from_slice(&content[..n]);
    }
    arguments.extend([path.to_str().unwrap(), &size]);
    if qemu("qemu-img", &arguments).is_none() {
        println!("skipped: qemu-img is not installed");
        return;
    }
    let mut rng = Rng(seed);
    for round in 0..4 {
        let mut user = User::new(Disk::open(&options(case, &path)).unwrap());
        for _ in 0..12 {
            step(&mut user, &mut model, &mut rng, case, 0..20);
        }
        if round % 2 == 0 {
            user.flush().unwrap();
        }
        user.disk.detach();
        drop(user);
        check(&path, &model, dir.path());
    }
}

#[test]
fn random_requests_on_images_of_all_shapes() {
    let cases = [
        BASE,
        Case { name: "direct", cache: Cache::None, aio: Aio::IoUring, ..BASE },
        Case { name: "threads", aio: Aio::Threads, ..BASE },
        Case { name: "v2", create: &["-o", "compat=0.10"], ..BASE },
        Case { name: "explicit", cow: Cow::Explicit, ..BASE },
        Case { name: "unallocated", cow: Cow::Unallocated, cache: Cache::None, ..BASE },
        Case { name: "small clusters", create: &["-o", "cluster_size=512"], cluster: 512, size: 2 << 20, ..BASE },
        Case {
            name: "small clusters, wide counts, small cache",
            create: &["-o", "cluster_size=512,refcount_bits=64"],
            cluster: 512,
            size: 4 << 20,
            l2_cache: Some(0),
            ..BASE
        },
        Case { name: "narrow", create: &["-o", "refcount_bits=1"], ..BASE },
        Case { name: "4K", create: &["-o", "cluster_size=4096"], cluster: 4096, l2_cache: Some(0), ..BASE },
        Case { name: "2M", create: &["-o", "cluster_size=2M"], cluster: 2 << 20, size: 32 << 20, ..BASE },
        Case { name: "extended", create: &["-o", "extended_l2=on"], ..BASE },
        Case {
            name: "extended, direct",
            create: &["-o", "extended_l2=on,cluster_size=16k"],
            cluster: 16384,
            cache: Cache::None,
            ..BASE
        },
        Case { name: "preallocated", create: &["-o", "preallocation=metadata"], ..BASE },
        Case { name: "odd size", create: &[], size: (5 << 20) + 512 * 37, ..BASE },
    ];
    for (i, case) in cases.iter().enumerate() {
        play(case, None, 77 + i as u64);
    }
}

#[test]
fn random_requests_over_backing_files() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = Rng(5);
    let mut content = vec![0; 6 << 20];
    for _ in 0..20 {
        let at = rng.below(11 << 9) as usize * 512;
        let data = rng.bytes(100 * 512);
        content[at..at + data.len()].copy_from_slice(&data);
    }
    let raw = dir.path().join("base.raw");
    std::fs::write(&raw, &content).unwrap();
    let formats: [(&str, &[&str]); 5] = [
        ("raw", &[]),
        ("qcow2", &[]),
        ("qcow2", &["-c"]),
        ("qcow2", &["-c", "-o", "compression_type=zstd"]),
        ("qcow2", &["-o", "extended_l2=on"]),
    ];
    for (i, (format, extra)) in formats.iter().enumerate() {
        let base = dir.path().join("base");
        let mut arguments = vec!["convert", "-f", "raw", "-O", format];
        arguments.extend(*extra);
        arguments.extend([raw.to_str().unwrap(), base.to_str().unwrap()]);
        if qemu("qemu-img", &arguments).is_none() {
            println!("skipped: qemu-img is not installed");
            return;
        }
        for case in [
            Case { name: "over", ..BASE },
            Case { name: "extended over", create: &["-o", "extended_l2=on"], cache: Cache::None, ..BASE },
            Case { name: "v2 over", create: &["-o", "compat=0.10"], cow: Cow::Unallocated, ..BASE },
        ] {
            play(&case, Some((&base, format, &content)), 500 + i as u64);
        }
    }
}
