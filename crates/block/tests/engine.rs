// SPDX-License-Identifier: Apache-2.0
//! The qcow2 engine against a vector of bytes, with QEMU's tools as the judge of the image that it leaves behind.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard};

use block::{Aio, Cache, Cow, Disk, Error, Op, Options, Qcow2Options, Zeros};
use common::tools::check_holds as check;
use common::{Buffer, Rng, User, quick};

/// One at a time: a process just started holds, for a moment, every lock of the one that started it.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

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
    zeros: Zeros,
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
    zeros: Zeros::Auto,
    l2_cache: None,
};

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
                let data = quick(rng, len as usize);
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
        qcow2: Qcow2Options { cow: case.cow, zeros: case.zeros, l2_cache: case.l2_cache, ..Qcow2Options::default() },
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
        for _ in 0..6 {
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

/// Opens the image, changes it at random along with the model, and closes it.
fn use_once(case: &Case, path: &Path, model: &mut [u8], rng: &mut Rng) {
    let mut user = User::new(Disk::open(&options(case, path)).unwrap());
    for _ in 0..8 {
        step(&mut user, model, rng, case, 0..20);
    }
    user.disk.detach();
}

#[test]
fn random_requests_on_images_of_all_shapes() {
    let _alone = alone();
    let cases = [
        BASE,
        Case { name: "direct", cache: Cache::None, aio: Aio::IoUring, ..BASE },
        Case { name: "threads", aio: Aio::Threads, ..BASE },
        Case { name: "v2", create: &["-o", "compat=0.10"], ..BASE },
        Case { name: "explicit", cow: Cow::Explicit, ..BASE },
        Case { name: "explicit, fallocate", cow: Cow::Explicit, zeros: Zeros::Fallocate, ..BASE },
        Case {
            name: "explicit, fallocate, direct",
            cow: Cow::Explicit,
            zeros: Zeros::Fallocate,
            cache: Cache::None,
            aio: Aio::IoUring,
            ..BASE
        },
        Case { name: "written", zeros: Zeros::Write, ..BASE },
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
        Case {
            name: "2M, fallocate",
            create: &["-o", "cluster_size=2M"],
            cluster: 2 << 20,
            size: 32 << 20,
            zeros: Zeros::Fallocate,
            ..BASE
        },
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
    let _alone = alone();
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

#[test]
fn what_a_snapshot_shares_is_never_written() {
    let _alone = alone();
    for (create, seed) in
        [(&[][..], 3), (&["-o", "cluster_size=4k,refcount_bits=4"], 4), (&["-o", "extended_l2=on"], 5)]
    {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image.qcow2");
        let image = path.to_str().unwrap();
        let cluster = if seed == 4 { 4096 } else { 65536 };
        let case = Case { name: "snapshots", create, cluster, l2_cache: (seed == 4).then_some(0), ..BASE };
        let size = case.size.to_string();
        let arguments = [&["create", "-q", "-f", "qcow2"], create, &[image, &size]].concat();
        if qemu("qemu-img", &arguments).is_none() {
            println!("skipped: qemu-img is not installed");
            return;
        }
        let mut model = vec![0; case.size as usize];
        let mut kept = Vec::new();
        let mut rng = Rng(seed);
        for round in 0..3 {
            use_once(&case, &path, &mut model, &mut rng);
            check(&path, &model, dir.path());
            if round < 2 {
                qemu("qemu-img", &["snapshot", "-c", &format!("s{round}"), image]).unwrap();
                kept.push(model.clone());
            }
        }
        for (n, model) in kept.iter().enumerate() {
            qemu("qemu-img", &["snapshot", "-a", &format!("s{n}"), image]).unwrap();
            check(&path, model, dir.path());
        }
    }
}

#[test]
fn threads_share_an_image() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    for (create, l2_cache, cluster) in [
        (&["-o", "cluster_size=4k"][..], Some(0), 4096_u64),
        (&[], None, 65536),
        (&["-o", "extended_l2=on"], None, 65536),
    ] {
        let path = dir.path().join("image.qcow2");
        let image = path.to_str().unwrap();
        if qemu("qemu-img", &[&["create", "-q", "-f", "qcow2"], create, &[image, "16M"]].concat()).is_none() {
            println!("skipped: qemu-img is not installed");
            return;
        }
        let case = Case { name: "shared", l2_cache, size: 16 << 20, cluster, ..BASE };
        let first = Disk::open(&options(&case, &path)).unwrap();
        const THREADS: u64 = 3;
        let sectors = (16 << 20) / 4096;
        let play = |disk: Disk, thread: u64| {
            let mut user = User::new(disk);
            let mut rng = Rng(thread + 1);
            let mut model = std::collections::HashMap::new();
            for _ in 0..60 {
                let mut waiting = Vec::new();
                for id in 0..16 {
                    // Neighbouring blocks belong to different threads, so all meet in every cluster.
                    let block = rng.below(sectors / THREADS) * THREADS + thread;
                    if waiting.iter().any(|(_, b, _, _)| *b == block) {
                        continue;
                    }
                    let (op, data) = match rng.below(8) {
                        0 => (Op::Flush, Vec::new()),
                        1 => (Op::WriteZeroes { unmap: true }, vec![0; 4096]),
                        2 | 3 => (Op::Read, vec![0; 4096]),
                        _ => (Op::Write, quick(&mut rng, 4096)),
                    };
                    let mut buffer = Buffer::with(&data, 0);
                    let segs = if matches!(op, Op::Read | Op::Write) { buffer.segs(&mut rng, 512) } else { Vec::new() };
                    let (at, len) = if op == Op::Flush { (0, 0) } else { (block * 4096, 4096) };
                    user.submit(id, op, at, len, &segs);
                    waiting.push((id, block, op, buffer));
                }
                for (id, block, op, buffer) in waiting {
                    user.wait(id).unwrap();
                    match op {
                        Op::Write | Op::WriteZeroes { .. } => {
                            model.insert(block, buffer.data().to_vec());
                        }
                        Op::Read => {
                            let want = model.get(&block).cloned().unwrap_or_else(|| vec![0; 4096]);
                            assert!(buffer.data() == want, "thread {thread}, block {block}");
                        }
                        _ => {}
                    }
                }
            }
            user.disk.detach();
            model
        };
        let mut whole = vec![0; 16 << 20];
        let handles: Vec<Disk> = (1..THREADS).map(|_| first.share().unwrap()).collect();
        std::thread::scope(|scope| {
            let others: Vec<_> =
                handles.into_iter().zip(1..).map(|(disk, n)| scope.spawn(move || play(disk, n))).collect();
            let models = std::iter::once(play(first, 0)).chain(others.into_iter().map(|t| t.join().unwrap()));
            for (block, data) in models.flatten() {
                whole[block as usize * 4096..][..4096].copy_from_slice(&data);
            }
        });
        check(&path, &whole, dir.path());
    }
}

#[test]
fn an_external_data_file_is_where_the_data_goes() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    for raw in ["off", "on"] {
        let (path, data) = (dir.path().join("image.qcow2"), dir.path().join(format!("data-{raw}")));
        let word = format!("data_file={},data_file_raw={raw}", data.display());
        let create = ["create", "-q", "-f", "qcow2", "-o", &word, path.to_str().unwrap(), "8M"];
        if qemu("qemu-img", &create).is_none() {
            println!("skipped: qemu-img is not installed");
            return;
        }
        let case = Case { name: "data file", ..BASE };
        let mut model = vec![0; 8 << 20];
        let mut rng = Rng(21);
        for _ in 0..3 {
            use_once(&case, &path, &mut model, &mut rng);
            check(&path, &model, dir.path());
            if raw == "on" {
                assert!(std::fs::read(&data).unwrap() == model, "the data file is a raw image");
            }
        }
    }
}

#[test]
fn what_can_not_be_served_is_refused_in_one_line() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image.qcow2");
    let image = path.to_str().unwrap();
    let refusal = |options: &Options| match Disk::open(options) {
        Ok(_) => panic!("{options:?} must be refused"),
        Err(e) => {
            let text = e.to_string();
            assert!(!text.contains('\n'), "{text}");
            text
        }
    };
    let make = |words: &[&str]| qemu("qemu-img", &[&["create", "-q", "-f", "qcow2"], words, &[image, "4M"]].concat());
    if make(&[]).is_none() {
        println!("skipped: qemu-img is not installed");
        return;
    }
    let writer = Disk::open(&Options::qcow2(&path)).unwrap();
    assert!(matches!(Disk::open(&Options::qcow2(&path)), Err(Error::Locked(..))));
    drop(writer);
    // Bytes of the header, patched: unknown feature, damaged, dirty.
    for (byte, value, says) in [(79, 2, "damaged"), (72, 0x80, "features unknown")] {
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[byte] = value;
        let patched = dir.path().join("patched.qcow2");
        std::fs::write(&patched, bytes).unwrap();
        let text = refusal(&Options::qcow2(&patched));
        assert!(text.contains(says), "{text}");
        let readable = Disk::open(&Options { readonly: true, ..Options::qcow2(&patched) });
        assert_eq!(readable.is_ok(), byte == 79, "reading is harmless where the tables are understood");
    }
    qemu("qemu-img", &["bitmap", "--add", image, "b"]).unwrap();
    assert!(refusal(&Options::qcow2(&path)).contains("bitmaps"));
    assert!(Disk::open(&Options { readonly: true, ..Options::qcow2(&path) }).is_ok());
    make(&["--object", "secret,id=s,data=x", "-o", "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"]);
    assert!(refusal(&Options::qcow2(&path)).contains("encrypted"));
    std::fs::write(&path, [0; 1 << 16]).unwrap();
    assert!(refusal(&Options::qcow2(&path)).contains("not a qcow2 image"));
    // Chains: a loop, a file outside, no format, a missing file.
    let other = dir.path().join("other.qcow2");
    let rebase = |file: &Path, words: &[&str]| {
        qemu("qemu-img", &[&["rebase", "-u", "-f", "qcow2"], words, &[file.to_str().unwrap()]].concat()).unwrap()
    };
    make(&[]);
    std::fs::copy(&path, &other).unwrap();
    rebase(&path, &["-b", "other.qcow2", "-F", "qcow2"]);
    assert!(Disk::open(&Options::qcow2(&path)).is_ok());
    rebase(&other, &["-b", "image.qcow2", "-F", "qcow2"]);
    assert!(refusal(&Options::qcow2(&path)).contains("twice"));
    rebase(&other, &["-b", "/etc/passwd", "-F", "raw"]);
    assert!(refusal(&Options::qcow2(&path)).contains("backing=folder"));
    rebase(&other, &["-b", "nothing", "-F", "raw"]);
    assert!(refusal(&Options::qcow2(&path)).contains("no such file"));
    rebase(&other, &["-b", "nbd://localhost/x", "-F", "raw"]);
    assert!(refusal(&Options::qcow2(&path)).contains("no plain file name"));
    let none = Qcow2Options { backing: block::BackingGate::None, ..Qcow2Options::default() };
    assert!(refusal(&Options { qcow2: none, ..Options::qcow2(&path) }).contains("forbids"));
}
