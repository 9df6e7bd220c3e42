// SPDX-License-Identifier: Apache-2.0
//! The offline editor: the power is cut at every point of every change it makes; its check finds what QEMU's finds; what it
//! repairs is sound; what it creates, QEMU takes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use block::qcow2::format::compress::Decompressor;
use block::qcow2::format::header::Compression;
use block::qcow2::offline::{CreateOptions, Image, Medium, Preallocation, Repair, create};
use block::{Change, Event};
use common::tools::{self, qemu_check, qemu_img, qemu_io};
use testkit::qcow2::cut::Luck;
use testkit::qcow2::history::fill;
use testkit::qcow2::options::Backing;
use testkit::qcow2::{Cuts, Layer, Rng, Row, pairwise};

static ALONE: Mutex<()> = Mutex::new(());

#[derive(Default)]
struct Tape {
    bytes: Vec<u8>,
    log: Vec<Event>,
}

/// A file in memory that logs what happens to it.
#[derive(Clone, Default)]
struct Recorded(Arc<Mutex<Tape>>);

impl Recorded {
    fn new(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(Tape { bytes, log: Vec::new() })))
    }

    fn lock(&self) -> MutexGuard<'_, Tape> {
        self.0.lock().unwrap()
    }

    fn note(&self, change: Change) {
        let mut tape = self.lock();
        let serial = tape.log.len() as u64;
        tape.log.push(Event::Begin { file: 0, serial, change });
        tape.log.push(Event::End { serial });
    }
}

impl Medium for Recorded {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let tape = self.lock();
        let from = tape.bytes.get(offset as usize..).unwrap_or_default();
        let len = from.len().min(buf.len());
        buf[..len].copy_from_slice(&from[..len]);
        Ok(len)
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.note(Change::Write { offset, data: buf.to_vec() });
        let end = offset as usize + buf.len();
        let mut tape = self.lock();
        if tape.bytes.len() < end {
            tape.bytes.resize(end, 0);
        }
        tape.bytes[offset as usize..end].copy_from_slice(buf);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.note(Change::Sync);
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.lock().bytes.len() as u64)
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.note(Change::Resize(size));
        self.lock().bytes.resize(size as usize, 0);
        Ok(())
    }

    fn as_medium(&self) -> &dyn Medium {
        self
    }
}

fn inflate(data: &[u8], zstd: bool, len: usize) -> Option<Vec<u8>> {
    let kind = if zstd { Compression::Zstd } else { Compression::Zlib };
    let mut cluster = vec![0; len];
    Decompressor::new(kind).ok()?.run(data, &mut cluster).ok()?;
    Some(cluster)
}

/// All that an image holds: the disk and each snapshot by its name. An error if it is not sound.
type State = (Vec<u8>, Vec<(String, Vec<u8>)>);

fn state(bytes: &[u8], backing: &[u8], leaks: &mut u64) -> Result<State, String> {
    let layer = Layer::open(bytes, None)?;
    let check = layer.check();
    if let Some(first) = check.corruptions.first() {
        return Err(format!("{} corruptions: {first}", check.corruptions.len()));
    }
    *leaks = check.leaks;
    let disk = layer.read(backing, &inflate)?;
    let snapshots = layer.snapshots().iter();
    let snapshots: Result<Vec<_>, String> =
        snapshots.map(|s| Ok((s.name.clone(), layer.read_snapshot(s, backing, &inflate)?))).collect();
    Ok((disk, snapshots?))
}

/// Changes an image and cuts the power everywhere: what is left holds what it held before, or what it holds afterwards.
/// The new image, and the number of cuts.
fn cut(what: &str, start: &[u8], backing: &[u8], change: impl FnOnce(&mut Image)) -> (Vec<u8>, u64) {
    let tape = Recorded::new(start.to_vec());
    let path = Path::new("/nowhere/image.qcow2");
    let mut image = Image::on(Box::new(tape.clone()), path, true).unwrap_or_else(|e| panic!("{what}: {e}"));
    change(&mut image);
    drop(image);
    let mut leaks = 0;
    let before = state(start, backing, &mut leaks).unwrap_or_else(|e| panic!("{what}, before it: {e}"));
    let end = tape.lock().bytes.clone();
    let log = tape.lock().log.clone();
    let after = state(&end, backing, &mut leaks).unwrap_or_else(|e| panic!("{what}, after it: {e}"));
    assert_eq!(leaks, 0, "{what}: leaks");
    let mut cuts = Cuts::new(vec![start.to_vec()], &log);
    let (mut made, rng) = (0, &mut Rng::new(1));
    loop {
        for luck in Luck::ALL {
            let left = cuts.image(luck, rng);
            made += 1;
            match state(&left, backing, &mut leaks) {
                Ok(now) => assert!(
                    now == before || now == after,
                    "{what}, cut at {} of {}, {luck:?}: neither what it was nor what it is to be",
                    cuts.line(),
                    log.len()
                ),
                Err(why) => panic!("{what}, cut at {} of {}, {luck:?}: {why}", cuts.line(), log.len()),
            }
        }
        if !cuts.step() {
            return (end, made);
        }
    }
}

#[test]
fn a_cut_in_the_middle_of_a_change_leaves_the_old_image_or_the_new_one() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let mut made = 0;
    for words in [
        "cluster_size=512",
        "cluster_size=1024,refcount_bits=64,lazy_refcounts=on",
        "cluster_size=16384,extended_l2=on,compression_type=zstd",
        "cluster_size=4096,refcount_bits=4",
    ] {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = dir.path().join("image.qcow2");
        let backing = fill(1, 0, 100 << 10);
        std::fs::write(dir.path().join("base.raw"), &backing).unwrap();
        let name = path.to_str().unwrap();
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", words, "-b", "base.raw", "-F", "raw", name, "192k"]).unwrap();
        let commands = ["write -P 1 0 40k", "write -z 48k 16k", "write -c -P 9 64k 16k", "write -P 3 150k 5k"];
        qemu_io(&path, "qcow2", &commands.map(String::from)).unwrap();
        let image = std::fs::read(&path).unwrap();
        let mut run = |what: &str, image: &[u8], change: &dyn Fn(&mut Image)| {
            let (end, cuts) = cut(&format!("{words}: {what}"), image, &backing, change);
            made += cuts;
            std::fs::write(&path, &end).unwrap();
            assert_eq!(qemu_check(&path).unwrap(), 0, "{words}: {what}");
            end
        };
        let image = run("create", &image, &|i| i.snapshot_create("one").unwrap());
        let image = run("create", &image, &|i| i.snapshot_create("two").unwrap());
        std::fs::write(&path, &image).unwrap();
        let commands = ["write -P 5 10k 60k", "write -z -u 100k 20k", "discard 0 4k"];
        qemu_io(&path, "qcow2", &commands.map(String::from)).unwrap();
        let image = std::fs::read(&path).unwrap();
        let image = run("apply", &image, &|i| i.snapshot_apply("one").unwrap());
        let image = run("grow", &image, &|i| i.resize(300 << 10, Some(100 << 10)).unwrap());
        let image = run("shrink", &image, &|i| i.resize(70 << 10, Some(100 << 10)).unwrap());
        let image = run("grow again", &image, &|i| i.resize(110 << 10, Some(100 << 10)).unwrap());
        let image = run("delete", &image, &|i| i.snapshot_delete("one").unwrap());
        run("delete", &image, &|i| i.snapshot_delete("two").unwrap());
    }
    println!("{made} cuts");
}

/// The number that `qemu-img check` gives for `key`.
fn number(json: &str, key: &str) -> u64 {
    let Some(at) = json.find(&format!("\"{key}\": ")) else { return 0 };
    json[at + key.len() + 4..].chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0)
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn a_check_finds_what_qemu_finds_and_a_repair_mends_it() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (mut same, mut all, mut differ) = (0, 0, Vec::new());
    let rounds = if std::env::var("TARE_LONG").is_ok() { 300 } else { 10 };
    for (n, words) in [
        "cluster_size=512",
        "cluster_size=4096,refcount_bits=8",
        "cluster_size=16384,extended_l2=on",
        "compat=0.10,cluster_size=1024",
    ]
    .into_iter()
    .enumerate()
    {
        let path = dir.path().join("image.qcow2");
        let name = path.to_str().unwrap();
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", words, name, "512k"]).unwrap();
        let commands = ["write -P 1 0 100k", "write -c -P 9 128k 16k", "write -P 3 300k 50k"];
        qemu_io(&path, "qcow2", &commands.map(String::from)).unwrap();
        if n % 2 == 0 {
            qemu_img(&["snapshot", "-c", "one", name]).unwrap();
            qemu_io(&path, "qcow2", &["write -P 5 10k 30k".into()]).unwrap();
        }
        let good = std::fs::read(&path).unwrap();
        let l1 = be64(&good, 40) as usize;
        let table = (be64(&good, l1) & 0x00ff_ffff_ffff_fe00) as usize;
        let block = be64(&good, be64(&good, 48) as usize) as usize;
        for seed in 0..rounds {
            let rng = &mut Rng::new(seed);
            let mut bad = good.clone();
            for _ in 0..1 + rng.below(3) {
                // Refcounts, or flags and places of mappings.
                match rng.below(3) {
                    0 => {
                        let at = block + rng.below(64) as usize;
                        bad[at] = rng.below(4) as u8;
                    }
                    1 => {
                        let at = table + 8 * rng.below(32) as usize;
                        bad[at] ^= 0x80;
                    }
                    _ => {
                        let at = table + 8 * rng.below(32) as usize;
                        let (from, to) = (be64(&bad, table + 8 * rng.below(8) as usize), at);
                        bad[to..to + 8].copy_from_slice(&from.to_be_bytes());
                    }
                }
            }
            std::fs::write(&path, &bad).unwrap();
            let out = std::process::Command::new("qemu-img")
                .args(["check", "-f", "qcow2", "--output=json", name])
                .output()
                .unwrap();
            let json = String::from_utf8_lossy(&out.stdout).into_owned();
            let theirs = ["corruptions", "leaks", "check-errors"].map(|k| number(&json, k));
            let mut image = match Image::open(&path, true) {
                Ok(image) => image,
                Err(e) => {
                    assert!(!out.status.success(), "{words}, seed {seed}: refused, but QEMU checks it: {e}");
                    continue;
                }
            };
            let report = image.check().unwrap();
            let ours = [report.corruptions, report.leaks, report.check_errors];
            all += 1;
            same += u64::from(ours == theirs);
            if ours != theirs {
                differ.push(format!("{words}, seed {seed}: we {ours:?}, QEMU {theirs:?}: {:?}", report.messages));
            }
            assert_eq!(
                (ours[0] > 0, ours[1] > 0),
                (theirs[0] > 0, theirs[1] > 0),
                "{words}, seed {seed}: corruptions, leaks: we {ours:?}, QEMU {theirs:?}, {:?}",
                report.messages
            );
            let repaired = image.repair(Repair::All).unwrap_or_else(|e| panic!("{words}, seed {seed}: {e}"));
            drop(image);
            // An entry that means nothing can't be mended without losing data, and stays.
            if repaired.check_errors == 0 && repaired.corruptions == 0 {
                let again = Image::open(&path, false).unwrap().check().unwrap();
                assert!(again.clean(), "{words}, seed {seed}: not clean after its repair: {:?}", again.messages);
                assert_eq!(qemu_check(&path), Ok(0), "{words}, seed {seed}: QEMU on what was repaired");
            }
        }
    }
    println!("{same} of {all} counts are the same as QEMU's");
    differ.iter().take(5).for_each(|d| println!("{d:.400}"));
    assert!(same * 10 >= all * 9, "{same} of {all}: {differ:#?}");
}

fn options(row: &Row, data: &Path) -> CreateOptions {
    CreateOptions {
        size: row.size(),
        cluster_size: row.cluster(),
        refcount_bits: row.refcount_bits() as u32,
        version: if row.v3() { 3 } else { 2 },
        extended_l2: row.extended(),
        lazy_refcounts: row.lazy(),
        compression: if row.zstd() { Compression::Zstd } else { Compression::Zlib },
        data_file: (row.data_file() > 0).then(|| data.into()),
        data_file_raw: row.data_file() == 2,
        backing: None,
        backing_format: None,
        preallocation: match row.preallocation() {
            "metadata" => Preallocation::Metadata,
            "falloc" => Preallocation::Falloc,
            "full" => Preallocation::Full,
            _ => Preallocation::Off,
        },
        encryption: None,
        rounds: 1000,
    }
}

#[test]
fn what_is_created_is_what_qemu_would_have_created() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let at = |name: &str| -> PathBuf { dir.path().join(name) };
    for row in pairwise(1).into_iter().step_by(3) {
        if row.backing() != Backing::None {
            continue;
        }
        let (ours, theirs) = (at("image.qcow2"), at("theirs.qcow2"));
        create(&ours, &options(&row, &at("image.data"))).unwrap_or_else(|e| panic!("{row:?}: {e}"));
        let words = row.words(&at("theirs.data"));
        let size = row.size().to_string();
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", &words, theirs.to_str().unwrap(), &size]).unwrap();
        let info = |path: &Path| {
            let said = qemu_img(&["info", "-f", "qcow2", "--output=json", path.to_str().unwrap()]).unwrap();
            let lines = said.lines().filter(|l| !l.contains("actual-size"));
            lines.collect::<Vec<_>>().join("\n").replace("theirs", "image")
        };
        assert_eq!(info(&ours), info(&theirs), "{words}");
        assert_eq!(qemu_check(&ours), Ok(0), "{words}");
        qemu_io(&ours, "qcow2", &["write -P 1 0 100k".into(), "read -P 1 0 100k".into()]).unwrap();
        qemu_img(&["compare", "-q", ours.to_str().unwrap(), ours.to_str().unwrap()]).unwrap();
        assert_eq!(qemu_check(&ours), Ok(0), "{words}");
    }
}
