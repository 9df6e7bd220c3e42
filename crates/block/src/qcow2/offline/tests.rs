// SPDX-License-Identifier: Apache-2.0
//! Tests of the editor: against qemu-img on images of random options and content, and by cutting the power at every write.

use std::path::Path;
use std::process::{Command, Output};

use super::super::format::crypto;
use super::super::format::header::{Compression, incompatible};
use super::super::format::{be64, entry::OFFSET_MASK};
use super::*;

/// Numbers that look random, the same in each run.
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.roll(from.len() as u64) as usize]
    }
}

fn run(dir: &Path, program: &str, args: &[&str]) -> Option<Output> {
    loop {
        let out = Command::new(program).current_dir(dir).args(args).output().ok()?;
        // A process that another test is just starting holds our files, with their locks, for a moment.
        if !String::from_utf8_lossy(&out.stderr).contains("Is another process using the image") {
            return Some(out);
        }
    }
}

pub fn qemu_img(dir: &Path, args: &[&str]) -> String {
    let out = run(dir, "qemu-img", args).unwrap();
    assert!(out.status.success(), "qemu-img {args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

fn qemu_io(dir: &Path, image: &str, commands: &[String]) {
    let mut args = vec!["-f", "qcow2"];
    for c in commands {
        args.extend(["-c", c]);
    }
    args.push(image);
    let out = run(dir, "qemu-io", &args).unwrap();
    let said = String::from_utf8_lossy(&out.stdout);
    let wrong = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && !said.contains("failed"), "{commands:?}: {said} {wrong}");
}

/// The value of `"key":` in JSON that has the key once, as text.
fn field(json: &str, key: &str) -> Option<String> {
    let rest = &json[json.find(&format!("\"{key}\":"))? + key.len() + 3..];
    Some(rest[..rest.find([',', '\n', '}'])?].trim().trim_matches('"').to_owned())
}

/// The folder of a test, or nothing where there is no QEMU.
pub fn folder() -> Option<tempfile::TempDir> {
    let dir = tempfile::tempdir().unwrap();
    if run(dir.path(), "qemu-img", &["--version"]).is_none() || run(dir.path(), "qemu-io", &["--version"]).is_none() {
        println!("skipped: no qemu-img or qemu-io here");
        return None;
    }
    Some(dir)
}

fn options(dice: &mut Dice) -> CreateOptions {
    let version = if dice.roll(5) == 0 { 2 } else { 3 };
    let extended_l2 = version == 3 && dice.roll(3) == 0;
    let cluster_size =
        dice.pick(if extended_l2 { &[16384, 65_536, 2 << 20] } else { &[512, 1024, 4096, 65_536, 2 << 20] });
    CreateOptions {
        size: (1 + dice.roll(40)) * dice.pick(&[512, 65_536, 333 * 512]),
        cluster_size,
        refcount_bits: if version == 3 { dice.pick(&[1, 2, 4, 8, 16, 32, 64]) } else { 16 },
        version,
        extended_l2,
        lazy_refcounts: version == 3 && dice.roll(4) == 0,
        compression: if version == 3 { dice.pick(&[Compression::Zlib, Compression::Zstd]) } else { Compression::Zlib },
        ..CreateOptions::default()
    }
}

/// The same for `qemu-img create -o`.
fn qemu_options(o: &CreateOptions) -> String {
    let on = |set: bool| if set { "on" } else { "off" };
    let mut out = format!("compat={},cluster_size={}", if o.version == 2 { "0.10" } else { "1.1" }, o.cluster_size);
    if o.version == 3 {
        out += &format!(",refcount_bits={},extended_l2={}", o.refcount_bits, on(o.extended_l2));
        out += &format!(",lazy_refcounts={}", on(o.lazy_refcounts));
        out += if o.compression == Compression::Zstd { ",compression_type=zstd" } else { "" };
    }
    out
}

fn check(dir: &Path, image: &str) -> Report {
    Image::open(&dir.join(image), false).unwrap().check().unwrap()
}

/// Random content by QEMU: writes, zeroes, discards.
pub fn scribble(dice: &mut Dice, dir: &Path, image: &str, size: u64, times: u64) {
    let mut commands = Vec::new();
    for _ in 0..times {
        let at = dice.roll(size / 512) * 512;
        let len = ((1 + dice.roll(200)) * 512).min(size - at);
        commands.push(match dice.roll(6) {
            0 => format!("write -z {at} {len}"),
            1 => format!("write -z -u {at} {len}"),
            2 => format!("discard {at} {len}"),
            _ => format!("write -P {} {at} {len}", 1 + dice.roll(250)),
        });
    }
    qemu_io(dir, image, &commands);
}

/// Our report of `image` beside qemu-img's.
fn same_report(dir: &Path, image: &str, what: &str) -> Report {
    // Without its backing file, which some tests only name.
    let file = dir.join(image);
    let node = format!(
        r#"json:{{"driver":"qcow2","backing":null,"file":{{"driver":"file","filename":"{}"}}}}"#,
        file.display()
    );
    let out = run(dir, "qemu-img", &["check", "--output=json", &node]).unwrap();
    let json = String::from_utf8(out.stdout).unwrap();
    let ours = check(dir, image);
    let theirs = |key: &str| field(&json, key).map_or(0, |v| v.parse::<u64>().unwrap());
    let expect = [
        ("corruptions", ours.corruptions),
        ("leaks", ours.leaks),
        ("total-clusters", ours.total_clusters),
        ("allocated-clusters", ours.allocated_clusters),
        ("fragmented-clusters", ours.fragmented_clusters),
        ("compressed-clusters", ours.compressed_clusters),
        ("image-end-offset", ours.image_end),
    ];
    for (key, value) in expect {
        assert_eq!(value, theirs(key), "{what}: {key}\n{json}\n{:#?}\n{}", ours, String::from_utf8_lossy(&out.stderr));
    }
    ours
}

#[test]
fn created_images_are_qemus() {
    let Some(dir) = folder() else { return };
    let (dir, mut dice) = (dir.path(), Dice(1));
    for round in 0..12 {
        let mut o = options(&mut dice);
        let base = dice.roll(3) == 0;
        if base {
            (o.backing, o.backing_format) = (Some("no base".into()), Some("raw".into()));
        } else {
            o.preallocation = dice.pick(&[
                Preallocation::Off,
                Preallocation::Off,
                Preallocation::Metadata,
                Preallocation::Falloc,
                Preallocation::Full,
            ]);
        }
        let what = format!("round {round}: {o:?}");
        if let Err(e) = create(&dir.join("ours"), &o) {
            assert!(o.cluster_size == 512, "{what}: {e}");
            continue;
        }
        let (size, extra) = (o.size.to_string(), qemu_options(&o));
        let mut args = vec!["create", "-q", "-f", "qcow2", "-o", &extra];
        if base {
            args.extend(["-u", "-b", "no base", "-F", "raw"]);
        }
        args.extend(["theirs", &size]);
        qemu_img(dir, &args);
        let info = |name: &str| qemu_img(dir, &["info", "-f", "qcow2", "--output=json", name]);
        let (ours, theirs) = (info("ours"), info("theirs"));
        for key in ["virtual-size", "cluster-size", "compat", "compression-type", "lazy-refcounts", "refcount-bits"]
            .into_iter()
            .chain(["corrupt", "extended-l2", "backing-filename", "backing-filename-format", "dirty-flag"])
        {
            assert_eq!(field(&ours, key), field(&theirs, key), "{what}: {key}");
        }
        assert!(same_report(dir, "ours", &what).clean(), "{what}");
        if !base {
            qemu_img(dir, &["compare", "-f", "qcow2", "-F", "qcow2", "ours", "theirs"]);
            scribble(&mut dice, dir, "ours", o.size.next_multiple_of(512), 8);
            assert!(same_report(dir, "ours", &what).clean(), "{what}");
        }
    }
}

#[test]
fn data_files_are_made_along() {
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    for raw in [false, true] {
        let o = CreateOptions {
            size: 1 << 20,
            data_file: Some("d.raw".into()),
            data_file_raw: raw,
            ..CreateOptions::default()
        };
        create(&dir.join("a"), &o).unwrap();
        assert!(same_report(dir, "a", "data file").clean());
        qemu_io(dir, "a", &["write -P 7 100k 300k".into(), "write -z 200k 10k".into()]);
        assert!(same_report(dir, "a", "data file").clean());
        let said = Image::open(&dir.join("a"), true).unwrap().snapshot_create("x").unwrap_err().to_string();
        assert!(said.contains("external data file"), "{said}");
        let o = CreateOptions { data_file: Some("b".into()), ..o };
        let said = create(&dir.join("b"), &o).unwrap_err().to_string();
        assert!(said.contains("its own data file"), "{said}");
    }
}

#[test]
fn impossible_options_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |change: &dyn Fn(&mut CreateOptions)| {
        let mut o = CreateOptions { size: 1 << 20, ..CreateOptions::default() };
        change(&mut o);
        let said = create(&dir.path().join("a"), &o).unwrap_err().to_string();
        assert!(!said.contains('\n') && !dir.path().join("a").exists(), "{said}");
        said
    };
    assert!(refused(&|o| o.cluster_size = 256).contains("cluster_size=256"));
    assert!(refused(&|o| o.cluster_size = 3 << 16).contains("cluster_size=196608"));
    assert!(refused(&|o| o.cluster_size = 4 << 20).contains("cluster_size=4194304"));
    assert!(refused(&|o| o.refcount_bits = 24).contains("refcount_bits=24"));
    assert!(refused(&|o| (o.version, o.refcount_bits) = (2, 8)).contains("compat=1.1"));
    assert!(refused(&|o| (o.version, o.lazy_refcounts) = (2, true)).contains("lazy_refcounts"));
    assert!(refused(&|o| (o.extended_l2, o.cluster_size) = (true, 8192)).contains("16k"));
    assert!(refused(&|o| o.data_file_raw = true).contains("needs data_file"));
    assert!(refused(&|o| o.backing = Some("b".into())).contains("-F FORMAT"));
    assert!(refused(&|o| o.size = 1 << 62).contains("too large"));
    assert!(refused(&|o| o.size = u64::MAX).contains("too large"));
    assert!(refused(&|o| (o.size, o.cluster_size) = (1 << 40, 512)).contains("too large"));
}

#[test]
fn snapshots_hold_what_they_should() {
    let Some(dir) = folder() else { return };
    let (dir, mut dice) = (dir.path(), Dice(2));
    for round in 0..5 {
        let mut o = options(&mut dice);
        (o.refcount_bits, o.size) = (if o.version == 2 { 16 } else { dice.pick(&[4, 8, 16, 64]) }, o.size.max(1 << 16));
        create(&dir.join("a"), &o).unwrap();
        let size = o.size.next_multiple_of(512);
        let (mut names, mut next): (Vec<String>, u32) = (Vec::new(), 0);
        for step in 0..7 {
            let what = format!("round {round} step {step}: {o:?}");
            let name =
                if names.is_empty() { String::new() } else { names[dice.roll(names.len() as u64) as usize].clone() };
            match dice.roll(5) {
                0 | 1 if names.len() < 5 => {
                    let name = format!("snap {next}");
                    next += 1;
                    if dice.roll(2) == 0 {
                        Image::open(&dir.join("a"), true).unwrap().snapshot_create(&name).unwrap();
                    } else {
                        qemu_img(dir, &["snapshot", "-c", &name, "a"]);
                    }
                    qemu_img(dir, &["convert", "-f", "qcow2", "-O", "raw", "a", &format!("{name}.raw")]);
                    names.push(name);
                }
                2 if !names.is_empty() => {
                    Image::open(&dir.join("a"), true).unwrap().snapshot_apply(&name).unwrap();
                    qemu_img(dir, &["compare", "-f", "qcow2", "-F", "raw", "a", &format!("{name}.raw")]);
                }
                3 if !names.is_empty() => {
                    if dice.roll(2) == 0 {
                        Image::open(&dir.join("a"), true).unwrap().snapshot_delete(&name).unwrap();
                    } else {
                        qemu_img(dir, &["snapshot", "-d", &name, "a"]);
                    }
                    names.retain(|n| *n != name);
                }
                _ => scribble(&mut dice, dir, "a", size, 5),
            }
            assert!(same_report(dir, "a", &what).clean(), "{what}");
            let list = qemu_img(dir, &["snapshot", "-l", "a"]);
            let ours = Image::open(&dir.join("a"), false).unwrap();
            assert_eq!(ours.snapshots().unwrap().iter().map(|s| s.name.clone()).collect::<Vec<_>>(), names);
            assert!(names.iter().all(|n| list.contains(n)), "{list}");
            for name in &names {
                let (from, to) = (format!("snapshot.name={name}"), format!("{name}.raw"));
                qemu_img(dir, &["convert", "-f", "qcow2", "-O", "raw", "-l", &from, "a", "now.raw"]);
                assert!(
                    std::fs::read(dir.join("now.raw")).unwrap() == std::fs::read(dir.join(&to)).unwrap(),
                    "{what}: {name}"
                );
            }
        }
    }
}

#[test]
fn narrow_refcounts_refuse_what_they_cannot_count() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    let o = CreateOptions {
        size: 1 << 20,
        refcount_bits: 1,
        preallocation: Preallocation::Metadata,
        ..CreateOptions::default()
    };
    create(&path, &o).unwrap();
    let mut image = Image::open(&path, true).unwrap();
    let said = image.snapshot_create("x").unwrap_err().to_string();
    assert!(said.contains("would be used 2 times, its refcounts of 1 bits say 1 at most"), "{said}");
    assert!(image.check().unwrap().clean());
}

/// Damages an image at random in its tables.
fn damage(dice: &mut Dice, path: &Path) {
    let header = Image::open(path, false).unwrap().header().clone();
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let medium: &dyn Medium = &file;
    let cluster = header.cluster_size();
    let number = |at: u64| {
        let mut b = [0; 8];
        medium.read_at(&mut b, at).unwrap();
        be64(&b, 0)
    };
    let l1 = |dice: &mut Dice| header.l1.offset + 8 * dice.roll(u64::from(header.l1.count));
    match dice.roll(5) {
        0 => {
            let block = number(header.refcount_table.offset);
            medium.write_at(&[dice.roll(256) as u8], block + dice.roll(cluster.min(64))).unwrap();
        }
        1 => {
            let at = l1(dice);
            medium.write_at(&(number(at) ^ 1 << 63).to_be_bytes(), at).unwrap();
        }
        2 => medium.write_at(&[0; 8], header.refcount_table.offset).unwrap(),
        n => {
            let table = number(l1(dice)) & OFFSET_MASK;
            if table != 0 {
                let size = header.layout().entry_size();
                let at = table + size * dice.roll(cluster / size / 4);
                let flip = if n == 3 { 1 << 63 } else { cluster << dice.roll(4) };
                let now = number(at);
                if now & OFFSET_MASK != 0 && now >> 62 & 1 == 0 {
                    medium.write_at(&(now ^ flip).to_be_bytes(), at).unwrap();
                }
            }
        }
    }
}

#[test]
fn checks_count_as_qemu_does_and_repairs_repair() {
    let Some(dir) = folder() else { return };
    let (dir, mut dice) = (dir.path(), Dice(3));
    let (mut fixed, mut leaks) = (0, 0);
    for round in 0..16 {
        let mut o = options(&mut dice);
        (o.lazy_refcounts, o.size) = (false, o.size.max(1 << 17));
        create(&dir.join("a"), &o).unwrap();
        scribble(&mut dice, dir, "a", o.size.next_multiple_of(512), 10);
        if dice.roll(3) == 0 {
            qemu_img(dir, &["convert", "-c", "-O", "qcow2", "-o", &qemu_options(&o), "a", "b"]);
            std::fs::rename(dir.join("b"), dir.join("a")).unwrap();
        }
        let what = format!("round {round}: {o:?}");
        assert!(same_report(dir, "a", &what).clean(), "{what}");
        for _ in 0..1 + dice.roll(3) {
            damage(&mut dice, &dir.join("a"));
        }
        let report = check(dir, "a");
        let out = run(dir, "qemu-img", &["check", "-f", "qcow2", "--output=json", "a"]).unwrap();
        let json = String::from_utf8_lossy(&out.stdout).into_owned();
        let theirs = |key: &str| field(&json, key).map_or(0, |v| v.parse::<u64>().unwrap());
        // Counts differ in how far each goes after damage; what matters is whether, and of what kind, there is any.
        assert_eq!(report.corruptions > 0, theirs("corruptions") > 0, "{what} {json} {report:#?}");
        if report.corruptions == 0 {
            assert_eq!(report.leaks, theirs("leaks"), "{what} {json} {report:#?}");
        }
        let mut image = Image::open(&dir.join("a"), true).unwrap();
        let after = image.repair(Repair::Leaks).unwrap();
        assert_eq!((after.leaks, after.corruptions > 0), (0, report.corruptions > 0), "{what} {after:#?}");
        let after = image.repair(Repair::All).unwrap();
        assert!(after.clean(), "{what}: {after:#?}");
        (fixed, leaks) = (fixed + after.corruptions_fixed, leaks + report.leaks);
        drop(image);
        assert!(same_report(dir, "a", &what).clean(), "{what}");
    }
    assert!(fixed > 10 && leaks > 0, "the damage done is no test: {fixed} {leaks}");
}

#[test]
fn sizes_change_and_show_no_old_content() {
    let Some(dir) = folder() else { return };
    let (dir, mut dice) = (dir.path(), Dice(4));
    for round in 0..6 {
        let mut o = options(&mut dice);
        o.size = o.size.max(o.cluster_size) / o.cluster_size * o.cluster_size;
        create(&dir.join("a"), &o).unwrap();
        std::fs::write(dir.join("r"), vec![0; o.size as usize]).unwrap();
        let mut size = o.size;
        for step in 0..5 {
            let what = format!("round {round} step {step}: {o:?}");
            let (at, pattern) = (dice.roll(size / 512) * 512, 1 + dice.roll(200));
            let write = format!("write -P {pattern} {at} {}", (size - at).min(100 << 10));
            qemu_io(dir, "a", std::slice::from_ref(&write));
            assert!(run(dir, "qemu-io", &["-f", "raw", "-c", &write, "r"]).unwrap().status.success());
            let new = (1 + dice.roll(12)) * o.cluster_size.max(1 << 14);
            let new = if o.extended_l2 || new > size { new } else { new - 512 * dice.roll(2) };
            let outcome = Image::open(&dir.join("a"), true).unwrap().resize(new, None);
            if !size.is_multiple_of(o.cluster_size) && new > size && outcome.is_err() {
                break;
            }
            outcome.unwrap();
            std::fs::File::options().write(true).open(dir.join("r")).unwrap().set_len(new).unwrap();
            size = new;
            assert_eq!(Image::open(&dir.join("a"), false).unwrap().header().size, size);
            assert!(same_report(dir, "a", &what).clean(), "{what}");
            qemu_img(dir, &["compare", "-f", "qcow2", "-F", "raw", "a", "r"]);
        }
    }
}

#[test]
fn growing_hides_a_longer_backing_file() {
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    std::fs::write(dir.join("base"), vec![9; 4 << 20]).unwrap();
    for extended_l2 in [false, true] {
        let o = CreateOptions {
            size: 1 << 20,
            extended_l2,
            backing: Some("base".into()),
            backing_format: Some("raw".into()),
            ..CreateOptions::default()
        };
        create(&dir.join("a"), &o).unwrap();
        Image::open(&dir.join("a"), true).unwrap().resize(3 << 20, Some(4 << 20)).unwrap();
        qemu_io(dir, "a", &["read -P 9 0 1M".into(), "read -P 0 1M 2M".into()]);
        let out = run(dir, "qemu-io", &["-f", "qcow2", "-c", "read -P 0 1M 2M", "-c", "read -P 9 0 1M", "a"]).unwrap();
        assert!(!String::from_utf8_lossy(&out.stdout).contains("Pattern verification failed"));
        assert!(same_report(dir, "a", "grown").clean());
    }
}

#[test]
fn names_and_options_change() {
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    for cluster_size in [512, 4096, 65_536] {
        let size = "1M";
        qemu_img(dir, &["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size={cluster_size}"), "a", size]);
        for name in ["base one", "b", &"long/".repeat(30), "another base", &"x".repeat(250)] {
            let outcome = Image::open(&dir.join("a"), true).unwrap().set_backing(Some((name.as_ref(), "qcow2")));
            if cluster_size == 512 && name.len() > 100 {
                let _ = outcome;
                continue;
            }
            outcome.unwrap();
            let info = qemu_img(dir, &["info", "-f", "qcow2", "--output=json", "a"]);
            assert_eq!(field(&info, "backing-filename").as_deref(), Some(name));
            assert_eq!(field(&info, "backing-filename-format").as_deref(), Some("qcow2"));
            assert!(same_report(dir, "a", name).clean());
        }
        let mut image = Image::open(&dir.join("a"), true).unwrap();
        image.set_backing(None).unwrap();
        image.amend(Amend { lazy_refcounts: Some(true) }).unwrap();
        drop(image);
        let info = qemu_img(dir, &["info", "-f", "qcow2", "--output=json", "a"]);
        assert_eq!((field(&info, "backing-filename"), field(&info, "lazy-refcounts").as_deref()), (None, Some("true")));
        assert!(same_report(dir, "a", "amended").clean());
    }
}

#[test]
fn bitmaps_are_qemus() {
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    for cluster_size in [512u64, 65_536] {
        qemu_img(dir, &["create", "-q", "-f", "qcow2", "-o", &format!("cluster_size={cluster_size}"), "a", "3M"]);
        let open = || Image::open(&dir.join("a"), true).unwrap();
        open().bitmap_add("ours", Some(512), true).unwrap();
        qemu_img(dir, &["bitmap", "--add", "-g", "4096", "a", "theirs"]);
        assert!(same_report(dir, "a", "bitmaps").clean());
        qemu_io(dir, "a", &["write 1M 1k".into(), "write 2M 64k".into()]);
        let expect = |granularity: u64| {
            let mut bits = vec![0u8; (3 << 20) / granularity as usize / 8];
            for at in (1 << 20..(1 << 20) + 1024).chain(2 << 20..(2 << 20) + 65_536).step_by(512) {
                bits[(at / granularity / 8) as usize] |= 1 << (at / granularity % 8);
            }
            bits
        };
        assert!(open().bitmap_bits("ours").unwrap() == expect(512));
        assert!(open().bitmap_bits("theirs").unwrap() == expect(4096));
        open().bitmap_add("merged", None, false).unwrap();
        open().bitmap_merge("ours", "merged").unwrap();
        open().bitmap_clear("ours").unwrap();
        assert!(open().bitmap_bits("ours").unwrap().iter().all(|b| *b == 0));
        qemu_img(dir, &["bitmap", "--merge", "merged", "a", "ours"]);
        let bits = open().bitmap_bits("ours").unwrap();
        let first = bits.iter().position(|b| *b != 0).unwrap();
        assert_eq!(first, (1 << 20) / 512 / 8);
        assert!(same_report(dir, "a", "bitmaps").clean());
        open().bitmap_enable("ours", false).unwrap();
        open().bitmap_enable("theirs", false).unwrap();
        let info = qemu_img(dir, &["info", "-f", "qcow2", "--output=json", "a"]);
        assert!(!info.contains("\"auto\""), "{info}");
        open().snapshot_create("with bitmaps").unwrap();
        assert!(same_report(dir, "a", "bitmaps").clean());
        assert!(open().resize(4 << 20, None).unwrap_err().to_string().contains("remove it first"));
        open().bitmap_enable("ours", true).unwrap();
        assert!(open().snapshot_apply("with bitmaps").unwrap_err().to_string().contains("disable or remove it"));
        for name in ["ours", "theirs", "merged"] {
            open().bitmap_remove(name).unwrap();
            assert!(same_report(dir, "a", name).clean());
        }
        let info = qemu_img(dir, &["info", "-f", "qcow2", "--output=json", "a"]);
        assert!(!info.contains("\"bitmaps\""), "{info}");
    }
}

/// The first 512 bytes of the disk as its host cluster has them, and the sector number that they are under.
fn first_sector(image: &Image, cipher: &crypto::Cipher) -> Vec<u8> {
    let table = image.read(image.l1[0] & OFFSET_MASK, image.header.cluster_size()).unwrap();
    let host = be64(&table, 0) & OFFSET_MASK;
    let mut data = image.read(host, 512).unwrap();
    cipher.decrypt(cipher.sector(0, host), &mut data);
    data
}

#[test]
fn encrypted_images_are_qemus() {
    let Some(dir) = folder() else { return };
    let dir = dir.path();
    let secret = "secret,id=s,data=sesame";
    let node = |image: &str, format: &str| {
        format!("driver=qcow2,file.driver=file,file.filename={image},encrypt.format={format},encrypt.key-secret=s")
    };
    let write = |image: &str, format: &str, command: &str| {
        let args = ["--object", secret, "--image-opts", &node(image, format), "-c", command];
        let out = run(dir, "qemu-io", &args).unwrap();
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && !said.to_lowercase().contains("fail"), "{said}");
    };
    // Ours, used by QEMU.
    let key = Some(crate::Secret::new(b"sesame".to_vec()));
    let o = CreateOptions { size: 1 << 20, encryption: key, rounds: 1000, ..CreateOptions::default() };
    create(&dir.join("ours"), &o).unwrap();
    write("ours", "luks", "write -P 9 0 100k");
    write("ours", "luks", "read -P 9 0 100k");
    // QEMU's, read by us.
    for options in [
        "encrypt.format=luks,encrypt.iter-time=10,encrypt.cipher-alg=aes-128,encrypt.hash-alg=sha512",
        "encrypt.format=luks,encrypt.iter-time=10,encrypt.hash-alg=sha1,encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv,encrypt.ivgen-hash-alg=sha256",
        "encrypt.format=aes",
    ] {
        let all = format!("{options},encrypt.key-secret=s");
        qemu_img(dir, &["create", "-q", "--object", secret, "-f", "qcow2", "-o", &all, "theirs", "1M"]);
        write("theirs", if options.ends_with("aes") { "aes" } else { "luks" }, "write -P 9 0 100k");
        for name in if options.ends_with("aes") { &["ours", "theirs"][..] } else { &["theirs"] } {
            let image = Image::open(&dir.join(name), false).unwrap();
            let cipher = match image.header().extensions.encryption {
                Some(at) => {
                    let area = image.read(at.offset, at.len).unwrap();
                    crypto::unlock(&area, b"sesame").unwrap()
                }
                None => crypto::Cipher::old(b"sesame").unwrap(),
            };
            assert!(first_sector(&image, &cipher) == [9; 512], "{name} {options}");
            assert!(image.check().unwrap().clean());
        }
    }
    Image::open(&dir.join("ours"), true).unwrap().snapshot_create("x").unwrap();
    write("ours", "luks", "read -P 9 0 100k");
}

#[test]
fn edits_of_what_should_not_be_edited_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    create(&path, &CreateOptions { size: 1 << 20, ..CreateOptions::default() }).unwrap();
    let said = Image::open(&path, false).unwrap().snapshot_create("x").unwrap_err().to_string();
    assert!(said.contains("opened for reading only"), "{said}");
    let mut image = Image::open(&path, true).unwrap();
    let said = Image::open(&path, true).unwrap_err().to_string();
    assert!(said.contains("in use by another process"), "{said}");
    image.header.features.incompatible |= incompatible::CORRUPT;
    let (at, bytes) = image.header.patch_features();
    image.write(at, &bytes).unwrap();
    let said = image.snapshot_create("x").unwrap_err().to_string();
    assert!(said.contains("marked as damaged"), "{said}");
    let report = image.repair(Repair::All).unwrap();
    assert!(report.clean() && !image.header().corrupt(), "{report:?}");
    image.snapshot_create("x").unwrap();
    for (outcome, expect) in [
        (image.snapshot_create("x"), "already"),
        (image.snapshot_apply("y"), "has no snapshot"),
        (image.snapshot_delete("y"), "has no snapshot"),
        (image.bitmap_remove("y"), "has no bitmap"),
        (image.resize(777, None), "multiple of 512"),
    ] {
        let said = outcome.unwrap_err().to_string();
        assert!(said.contains(expect) && !said.contains('\n'), "{said}");
    }
}
