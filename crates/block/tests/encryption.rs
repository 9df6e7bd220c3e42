// SPDX-License-Identifier: Apache-2.0
//! Encrypted images beside QEMU's tools: both kinds, all cluster sizes, chains in which each image has a key of its own, and
//! what is refused.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::Path;
use std::sync::{Mutex, MutexGuard};

use block::qcow2::offline::{CreateOptions, Image, create};
use block::{Cache, Cow, Disk, ExtentKind, Op, Options, Qcow2Options, Secret};
use common::tools::{self, Node, qemu_check_on, qemu_img, qemu_io_on, qemu_read_on};
use common::{Buffer, Rng, User};

/// One at a time: a process just started holds, for a moment, every lock of the one that started it.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

fn options(path: &Path, keys: &[&str]) -> Options {
    let keys = keys.iter().map(|k| Secret::new(k.as_bytes().to_vec())).collect();
    Options { qcow2: Qcow2Options { keys, ..Qcow2Options::default() }, ..Options::qcow2(path) }
}

fn refusal(options: &Options) -> String {
    let line = Disk::open(options).expect_err("it opens").to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

/// Makes an encrypted image with qemu-img.
fn made(path: &Path, kind: &str, key: &str, more: &str, size: u64, backing: Option<(&str, &str)>) {
    let secret = format!("secret,id=s,data={key}");
    let time = if kind == "luks" { ",encrypt.iter-time=10" } else { "" };
    let words = format!("encrypt.format={kind},encrypt.key-secret=s{time}{more}");
    let size = size.to_string();
    let mut all = vec!["create", "-q", "--object", &secret, "-f", "qcow2", "-o", &words];
    if let Some((name, format)) = backing {
        // Unchecked: opening it would need its key.
        all.extend(["-u", "-b", name, "-F", format]);
    }
    all.extend([path.to_str().unwrap(), &size]);
    qemu_img(&all).unwrap();
}

/// Opens the disk and changes it; what QEMU then reads at `node` is the model.
fn changed(options: &Options, node: &Node, path: &Path, model: &mut [u8], rng: &mut Rng, what: &str) {
    let mut user = User::new(Disk::open(options).unwrap());
    play(&mut user, model, rng, 60);
    user.disk.detach();
    drop(user);
    assert_eq!(qemu_check_on(node).unwrap(), 0, "{what}");
    assert!(qemu_read_on(node, path, model.len() as u64).unwrap() == model, "{what}");
}

/// Random requests, in several segments cut at any byte, on a disk and on the bytes that it should hold.
fn play(user: &mut User, model: &mut [u8], rng: &mut Rng, count: usize) {
    let sectors = model.len() as u64 / 512;
    for _ in 0..count {
        let at = rng.below(sectors);
        let longest = if rng.below(3) == 0 { 600 } else { 20 };
        let len = (1 + rng.below(longest)).min(sectors - at) * 512;
        let at = at * 512;
        let range = at as usize..(at + len) as usize;
        match rng.below(8) {
            0..=3 => {
                let data = rng.bytes(len as usize);
                let mut buffer = Buffer::with(&data, rng.below(64) as usize);
                let segs = buffer.segs(rng, 16);
                user.submit(1, Op::Write, at, len, &segs);
                user.wait(1).unwrap();
                assert_eq!(buffer.data(), data, "the writer's own memory is left alone");
                model[range].copy_from_slice(&data);
            }
            4 => {
                user.submit(1, Op::WriteZeroes { unmap: rng.below(2) == 0 }, at, len, &[]);
                user.wait(1).unwrap();
                model[range].fill(0);
            }
            _ => {
                // Not only whole sectors.
                let (skip, short) = (rng.below(512), rng.below(512).min(len - 512));
                let (at, len) =
                    if rng.below(2) == 0 { (at, len) } else { (at + skip, len - skip - short.min(len - skip - 1)) };
                let mut buffer = Buffer::new(len as usize, rng.below(64) as usize);
                let segs = buffer.segs(rng, 1);
                user.submit(1, Op::Read, at, len, &segs);
                user.wait(1).unwrap();
                assert!(buffer.data() == &model[at as usize..(at + len) as usize], "read of {len} at {at:#x}");
            }
        }
    }
}

fn folder() -> Option<tempfile::TempDir> {
    tools::there().then(|| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
}

#[test]
fn luks_images_of_all_shapes() {
    let _alone = alone();
    let Some(dir) = folder() else { return };
    let path = dir.path().join("a.qcow2");
    let node = Node::encrypted(&[(&path, "luks", "sesame")]);
    let aes = ["", ",encrypt.cipher-alg=aes-128,encrypt.hash-alg=sha512"];
    let cbc = ",encrypt.hash-alg=sha1,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256";
    let shapes = [
        ("", 4 << 20, Cow::ZeroAware, Cache::Writeback),
        (",cluster_size=512", 512 << 10, Cow::ZeroAware, Cache::Writeback),
        (",cluster_size=4096", 1 << 20, Cow::Unallocated, Cache::None),
        (",cluster_size=2M", 9 << 20, Cow::Explicit, Cache::Writeback),
        (",extended_l2=on,cluster_size=16k", 2 << 20, Cow::ZeroAware, Cache::None),
        (",compat=0.10", 2 << 20, Cow::ZeroAware, Cache::Writeback),
        (aes[1], (1 << 20) + 512 * 77, Cow::ZeroAware, Cache::Writeback),
        (cbc, 1 << 20, Cow::ZeroAware, Cache::Writeback),
        (",encrypt.cipher-mode=cbc,encrypt.ivgen-alg=plain64", 1 << 20, Cow::ZeroAware, Cache::Writeback),
    ];
    for (n, (more, size, cow, cache)) in shapes.into_iter().enumerate() {
        made(&path, "luks", "sesame", more, size, None);
        let mut model = vec![0; size as usize];
        // Qemu writes what tare reads and changes.
        let pattern = format!("write -P 77 512 {}", size / 3 / 512 * 512);
        qemu_io_on(&node, &[pattern, "write -z 0 64k".into()]).unwrap();
        model[512..512 + size as usize / 3 / 512 * 512].fill(77);
        model[..64 << 10].fill(0);
        let mut options = options(&path, &["sesame"]);
        (options.qcow2.cow, options.cache) = (cow, cache);
        let mut rng = Rng(900 + n as u64);
        for _ in 0..2 {
            changed(&options, &node, &path, &mut model, &mut rng, more);
        }
    }
}

#[test]
fn the_old_aes_is_read_only() {
    let _alone = alone();
    let Some(dir) = folder() else { return };
    let path = dir.path().join("a.qcow2");
    for more in ["", ",cluster_size=512", ",cluster_size=2M,compat=0.10"] {
        made(&path, "aes", "sesame", more, 3 << 20, None);
        let mut model = vec![0; 3 << 20];
        model[70_144..2_170_880].fill(5);
        model[1 << 20..(1 << 20) + 4096].fill(9);
        let node = Node::encrypted(&[(&path, "aes", "sesame")]);
        qemu_io_on(&node, &["write -P 5 70144 2100736".into(), "write -P 9 1M 4k".into()]).unwrap();
        let line = refusal(&options(&path, &["sesame"]));
        assert!(line.contains("old AES") && line.contains("read only"), "{line}");
        let mut user = User::new(Disk::open(&Options { readonly: true, ..options(&path, &["sesame"]) }).unwrap());
        let mut rng = Rng(3);
        for _ in 0..40 {
            let at = rng.below(model.len() as u64 - 1);
            let len = (1 + rng.below(100_000)).min(model.len() as u64 - at);
            assert!(user.read(at, len as usize).unwrap() == model[at as usize..(at + len) as usize], "{more}: {at}");
        }
    }
}

/// raw under AES under LUKS under plain under LUKS: keys from the top down, the last for the rest.
#[test]
fn chains_with_a_key_for_each_image() {
    let _alone = alone();
    let Some(dir) = folder() else { return };
    let paths = ["raw", "old", "middle", "plain", "top"].map(|name| dir.path().join(name));
    let at = |name: &str| -> &Path { paths.iter().find(|p| p.ends_with(name)).unwrap() };
    let size = 2 << 20;
    let mut rng = Rng(11);
    let mut model = rng.bytes(size as usize);
    std::fs::write(at("raw"), &model).unwrap();
    made(at("old"), "aes", "eins", "", size, Some(("raw", "raw")));
    let below = [(at("old"), "aes", "eins"), (at("raw"), "raw", "")];
    qemu_io_on(&Node::encrypted(&below), &["write -P 1 100k 300k".into()]).unwrap();
    model[100 << 10..400 << 10].fill(1);
    made(at("middle"), "luks", "zwei", ",cluster_size=4096,encrypt.cipher-alg=aes-128", size, Some(("old", "qcow2")));
    let below = [&[(at("middle"), "luks", "zwei")], &below[..]].concat();
    qemu_io_on(&Node::encrypted(&below), &["write -P 2 200k 500k".into(), "write -z 1M 100k".into()]).unwrap();
    model[200 << 10..700 << 10].fill(2);
    model[1 << 20..(1 << 20) + (100 << 10)].fill(0);
    qemu_img(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-u",
        "-b",
        "middle",
        "-F",
        "qcow2",
        at("plain").to_str().unwrap(),
        "2M",
    ])
    .unwrap();
    let below = [&[(at("plain"), "qcow2", "")], &below[..]].concat();
    for more in ["", ",cluster_size=1k", ",extended_l2=on"] {
        let mut model = model.clone();
        made(at("top"), "luks", "drei", more, size, Some(("plain", "qcow2")));
        let layers = [&[(at("top"), "luks", "drei")], &below[..]].concat();
        let node = Node::encrypted(&layers);
        let options = options(at("top"), &["drei", "zwei", "eins"]);
        for _ in 0..2 {
            changed(&options, &node, at("top"), &mut model, &mut rng, more);
        }
    }
    // A plain image over encrypted ones: what it copies from below, in parts of sectors too.
    let mut user = User::new(Disk::open(&options(at("plain"), &["zwei", "eins"])).unwrap());
    for (at, len) in [(100 << 10, 700), (777, 3), (1 << 20, 513), (690_000, 40_000)] {
        let data = rng.bytes(len);
        user.write(at as u64, &data).unwrap();
        model[at..at + len].copy_from_slice(&data);
    }
    drop(user);
    assert!(qemu_read_on(&Node::encrypted(&below), at("plain"), size).unwrap() == model);
    // The wrong order, too few and too many keys.
    for keys in [&["zwei", "drei", "eins"][..], &["drei"], &["drei", "drei", "drei"]] {
        let line = refusal(&options(at("top"), keys));
        assert!(line.contains("opens none of its key slots"), "{keys:?}: {line}");
    }
    assert!(refusal(&options(at("top"), &["drei", "zwei", "eins", "vier"])).contains("nothing to open"));
}

#[test]
fn images_made_by_tare_open_in_qemu() {
    let _alone = alone();
    let Some(dir) = folder() else { return };
    let path = dir.path().join("a.qcow2");
    let key = "correct horse battery staple";
    let node = Node::encrypted(&[(&path, "luks", key)]);
    let secret = Secret::new(key.into());
    let wish = CreateOptions { size: 2 << 20, encryption: Some(secret), rounds: 2000, ..CreateOptions::default() };
    create(&path, &wish).unwrap();
    let mut model = vec![0; 2 << 20];
    let mut user = User::new(Disk::open(&options(&path, &[key])).unwrap());
    play(&mut user, &mut model, &mut Rng(4), 80);
    // Nothing lies in the file as it is, and no host offset is told.
    let extents = user.disk.extents(0, 2 << 20).unwrap();
    assert!(extents.iter().any(|e| e.kind == ExtentKind::Data) && extents.iter().all(|e| e.host_offset.is_none()));
    user.write(1 << 20, &[b'x'; 65536]).unwrap();
    model[1 << 20..(1 << 20) + 65536].fill(b'x');
    // Sectors are encrypted whole.
    assert_eq!(user.disk.granule(), 512);
    for (at, len) in [(1, 512), (512, 511)] {
        assert_eq!(user.write(at, &vec![1; len]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
    drop(user);
    assert!(!std::fs::read(&path).unwrap().windows(16).any(|w| w == [b'x'; 16]), "no plaintext");
    assert_eq!(qemu_check_on(&node).unwrap(), 0);
    assert!(qemu_read_on(&node, &path, 2 << 20).unwrap() == model);
    // A snapshot's clusters are copied, decrypted and encrypted under their new number.
    Image::open(&path, true).unwrap().snapshot_create("then").unwrap();
    let then = model.clone();
    let mut user = User::new(Disk::open(&options(&path, &[key])).unwrap());
    play(&mut user, &mut model, &mut Rng(5), 80);
    user.disk.resize(3 << 20).unwrap();
    model.resize(3 << 20, 0);
    play(&mut user, &mut model, &mut Rng(6), 40);
    drop(user);
    assert!(qemu_read_on(&node, &path, 3 << 20).unwrap() == model);
    Image::open(&path, true).unwrap().snapshot_apply("then").unwrap();
    assert!(qemu_read_on(&node, &path, 2 << 20).unwrap() == then);
}

#[test]
fn keys_that_open_nothing_are_refused_in_one_line() {
    let _alone = alone();
    let Some(dir) = folder() else { return };
    let path = dir.path().join("a.qcow2");
    made(&path, "luks", "sesame", "", 1 << 20, None);
    let line = refusal(&options(&path, &[]));
    assert!(line.contains("encrypted") && line.contains("key=FILE") && line.contains("--key FILE"), "{line}");
    assert!(refusal(&options(&path, &["simsim"])).contains("opens none of its key slots"));
    qemu_img(&["create", "-q", "-f", "qcow2", path.to_str().unwrap(), "1M"]).unwrap();
    assert!(refusal(&options(&path, &["sesame"])).contains("nothing to open"));
    // Key files.
    let file = dir.path().join("key");
    for (content, says) in [(None, "not there"), (Some(Vec::new()), "empty"), (Some(vec![1; 65537]), "longer")] {
        content.iter().for_each(|c| std::fs::write(&file, c).unwrap());
        let line = Secret::read(&file).unwrap_err().to_string();
        assert!(line.contains(says) && !line.contains('\n'), "{line}");
    }
    std::fs::write(&file, b"open sesame\n").unwrap();
    assert_eq!(Secret::read(&file).unwrap().bytes(), b"open sesame\n");
    assert_eq!(format!("{:?}", Secret::read(&file).unwrap()), "Secret(..)");
}
