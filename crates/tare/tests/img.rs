// SPDX-License-Identifier: Apache-2.0
//! `tare img` beside `qemu-img`: the same words, the same JSON, the same exit codes, the same bytes. Skipped where QEMU's
//! tools are missing.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{TARE, refuses, tare};
use serde_json::Value;

/// A folder in which both programs run.
struct Place(tempfile::TempDir);

/// How a program ended.
#[derive(Debug, PartialEq)]
struct Ended {
    code: i32,
    stdout: String,
}

impl Place {
    /// `None` where there is no QEMU to compare with.
    fn new() -> Option<Self> {
        if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
            eprintln!("skipped: qemu-img is missing");
            return None;
        }
        Some(Self(tempfile::tempdir().unwrap()))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A server on the socket `s`, once it is there.
    fn serve(&self, args: &[&str]) -> std::process::Child {
        let server = Command::new(TARE).args(args).current_dir(self.0.path()).spawn().unwrap();
        for _ in 0..500 {
            if self.path("s").exists() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        server
    }

    fn run(&self, program: &str, args: &[&str]) -> Ended {
        let output = Command::new(program).args(args).current_dir(self.0.path()).env("TZ", "UTC").output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        if output.status.code() != Some(0) {
            eprintln!("{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ended { code: output.status.code().unwrap(), stdout }
    }

    fn qemu(&self, args: &[&str]) -> Ended {
        self.run("qemu-img", args)
    }

    fn tare(&self, args: &[&str]) -> Ended {
        self.run(TARE, &[&["img"], args].concat())
    }

    /// Both say the same.
    fn same(&self, args: &[&str]) {
        assert_eq!(self.tare(args), self.qemu(args), "{args:?}");
    }

    /// Both say the same JSON, whatever the order of its keys.
    fn same_json(&self, args: &[&str]) {
        let (ours, theirs) = (self.tare(args), self.qemu(args));
        assert_eq!(ours.code, theirs.code, "{args:?}");
        let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap();
        assert_eq!(parse(&ours.stdout), parse(&theirs.stdout), "{args:?}");
    }

    fn do_all(&self, commands: &[&str]) {
        for command in commands {
            let words: Vec<&str> = command.split(' ').collect();
            assert_eq!(self.qemu(&words).code, 0, "qemu-img {command}");
        }
    }

    fn io(&self, image: &str, commands: &[&str]) {
        let mut command = Command::new("qemu-io");
        for c in commands {
            command.args(["-c", c]);
        }
        let output = command.arg(image).current_dir(self.0.path()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// A raw disk of 8 MiB with data, zeroes and holes.
    fn mixed(&self, name: &str) {
        let file = File::create(self.path(name)).unwrap();
        file.set_len(8 << 20).unwrap();
        let noise: Vec<u8> = (0..1_500_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        file.write_all_at(&noise, 100_000).unwrap();
        file.write_all_at(&[0; 70_000], 500_000).unwrap();
        file.write_all_at(&[7; 512], (8 << 20) - 512).unwrap();
        file.sync_all().unwrap();
    }
}

#[test]
fn info_says_the_same() {
    let Some(p) = Place::new() else { return };
    p.mixed("a.raw");
    p.do_all(&[
        "create -q -f qcow2 base.qcow2 10M",
        "create -q -f qcow2 -o compat=0.10,cluster_size=4k old.qcow2 1G",
        "create -q -f qcow2 -o extended_l2=on,lazy_refcounts=on,refcount_bits=1,compression_type=zstd new.qcow2 3G",
        "create -q -f qcow2 -F qcow2 -b base.qcow2 top.qcow2",
        "snapshot -c first base.qcow2",
        "snapshot -c second base.qcow2",
        "bitmap --add base.qcow2 bits",
        "bitmap --add -g 32k --disable base.qcow2 more",
        "create -q -f qcow2 -o data_file=data.raw,data_file_raw=on ext.qcow2 1M",
    ]);
    for image in ["base.qcow2", "old.qcow2", "new.qcow2", "top.qcow2", "ext.qcow2"] {
        p.same(&["info", image]);
        p.same_json(&["info", "--output=json", image]);
    }
    p.same(&["info", "-f", "raw", "a.raw"]);
    p.same_json(&["info", "-f", "raw", "--output=json", "a.raw"]);
    p.same(&["info", "--backing-chain", "top.qcow2"]);
    p.same_json(&["info", "--backing-chain", "--output=json", "top.qcow2"]);
    p.same(&["snapshot", "-l", "base.qcow2"]);
    assert_eq!(p.tare(&["info", "none.qcow2"]).code, 1);
}

#[test]
fn check_counts_the_same() {
    let Some(p) = Place::new() else { return };
    p.do_all(&["create -q -f qcow2 a.qcow2 64M"]);
    p.io("a.qcow2", &["write -P 1 1M 300k", "write -P 2 32M 1M", "write -z 40M 1M"]);
    p.same(&["check", "a.qcow2"]);
    p.same_json(&["check", "--output=json", "a.qcow2"]);
    // The first refcount block is the third cluster: one count too many, then one too few.
    let image = File::options().write(true).open(p.path("a.qcow2")).unwrap();
    image.write_all_at(&[2], 131_072 + 2 * 5 + 1).unwrap();
    p.same_json(&["check", "--output=json", "a.qcow2"]);
    image.write_all_at(&[0], 131_072 + 2 * 6 + 1).unwrap();
    assert_eq!(p.tare(&["check", "-q", "a.qcow2"]).code, 2);
    assert_eq!(p.tare(&["check", "-q", "-r", "all", "a.qcow2"]).code, 0);
    assert_eq!(p.qemu(&["check", "a.qcow2"]).code, 0);
    p.mixed("a.raw");
    assert_eq!(p.tare(&["check", "-f", "raw", "a.raw"]).code, 63);
}

#[test]
fn a_check_reports_when_nobody_listens_to_its_messages() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("d.qcow2");
    assert!(tare(&["img", "create", "-q", "-f", "qcow2"]).arg(&path).arg("64M").status().unwrap().success());
    // The first refcount: the header's cluster is in use, and is said not to be.
    File::options().write(true).open(&path).unwrap().write_all_at(&[0; 2], 2 << 16).unwrap();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = tare(&["img", "check"]).arg(&path).stderr(writer).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("errors were found"), "{said}");
}

#[test]
fn created_images_are_the_same() {
    let Some(p) = Place::new() else { return };
    p.do_all(&["create -q -f qcow2 base.qcow2 10M"]);
    for args in [
        &["create", "-f", "raw", "x", "1G"][..],
        &["create", "-f", "raw", "x", "1000"],
        &["create", "-f", "qcow2", "x", "1.5G"],
        &["create", "-f", "qcow2", "-o", "cluster_size=2M,extended_l2=on,compression_type=zstd", "x", "10T"],
        &["create", "-f", "qcow2", "-o", "compat=0.10,cluster_size=512", "x", "100M"],
        &["create", "-f", "qcow2", "-o", "refcount_bits=64,lazy_refcounts=on", "x", "3M"],
        &["create", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", "x"],
    ] {
        let theirs = p.qemu(args);
        let format = args[2];
        let facts = |text: String| {
            let mut json: Value = serde_json::from_str(&text).unwrap();
            json["actual-size"].take();
            json
        };
        let info = ["info", "-f", format, "--output=json", "x"];
        let of_theirs = facts(p.qemu(&info).stdout);
        assert_eq!(p.tare(args).code, theirs.code, "{args:?}");
        assert_eq!(facts(p.qemu(&info).stdout), of_theirs, "{args:?}");
        if format == "qcow2" {
            assert_eq!(p.qemu(&["check", "-q", "x"]).code, 0);
        }
    }
    let text = p.tare(&["create", "-f", "qcow2", "y", "1G"]).stdout;
    assert_eq!(text, p.qemu(&["create", "-f", "qcow2", "y", "1G"]).stdout);
    assert_eq!(p.tare(&["create", "-f", "qcow2", "-b", "none", "-F", "raw", "z"]).code, 1);
    assert!(!p.path("z").exists());
}

#[test]
fn raw_images_map_the_same() {
    let Some(p) = Place::new() else { return };
    p.mixed("a.raw");
    p.same_json(&["map", "-f", "raw", "--output=json", "a.raw"]);
    p.same(&["map", "-f", "raw", "a.raw"]);
    p.same_json(&["map", "-f", "raw", "--output=json", "--start-offset=64k", "--max-length=1M", "a.raw"]);
}

#[test]
fn comparing_ends_the_same() {
    let Some(p) = Place::new() else { return };
    p.mixed("a.raw");
    p.mixed("b.raw");
    let raw = |extra: &[&'static str], b: &'static str| {
        [&["compare", "-f", "raw", "-F", "raw"], extra, &["a.raw", b]].concat()
    };
    p.same(&raw(&[], "b.raw"));
    p.same(&raw(&["-s"], "b.raw"));
    let b = File::options().write(true).open(p.path("b.raw")).unwrap();
    b.set_len(9 << 20).unwrap();
    p.same(&raw(&[], "b.raw"));
    p.same(&raw(&["-s"], "b.raw"));
    b.write_all_at(&[1], (8 << 20) + 5000).unwrap();
    p.same(&raw(&[], "b.raw"));
    b.write_all_at(&[1], 3_000_000).unwrap();
    p.same(&raw(&[], "b.raw"));
    p.same(&raw(&["-q"], "b.raw"));
    assert_eq!(p.tare(&["compare", "-f", "raw", "a.raw", "none"]).code, 2);
    assert_eq!(p.qemu(&["compare", "-f", "raw", "a.raw", "none"]).code, 2);
}

#[test]
fn raw_copies_are_equal_and_sparse() {
    use std::os::unix::fs::MetadataExt;
    let Some(p) = Place::new() else { return };
    p.mixed("a.raw");
    for extra in [&[][..], &["-S", "64k"], &["-S", "0"], &["-t", "none", "-T", "none"], &["-m", "1", "-i", "threads"]] {
        let args = [&["convert", "-f", "raw", "-O", "raw"], extra, &["a.raw", "b.raw"]].concat();
        assert_eq!(p.tare(&args).code, 0, "{extra:?}");
        assert_eq!(fs::read(p.path("a.raw")).unwrap(), fs::read(p.path("b.raw")).unwrap(), "{extra:?}");
        let taken = fs::metadata(p.path("b.raw")).unwrap().blocks() * 512;
        assert_eq!(taken < 2 << 20, extra != ["-S", "0"], "{extra:?} takes {taken}");
    }
    let text = p.tare(&["convert", "-p", "-f", "raw", "-O", "raw", "a.raw", "b.raw"]).stdout;
    assert!(text.starts_with("    (") && text.ends_with("    (100.00/100%)\r\n"), "{text:?}");
    // In place: what was there goes, zeroes included.
    fs::write(p.path("c.raw"), vec![0xff; 9 << 20]).unwrap();
    assert_eq!(p.tare(&["convert", "-n", "-f", "raw", "-O", "raw", "a.raw", "c.raw"]).code, 0);
    assert_eq!(fs::read(p.path("c.raw")).unwrap()[..8 << 20], fs::read(p.path("a.raw")).unwrap());
    let names: Vec<_> = fs::read_dir(p.0.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "no drafts are left: {names:?}");
}

#[test]
fn an_interrupted_copy_leaves_nothing() {
    let Some(p) = Place::new() else { return };
    let source = File::create(p.path("big.raw")).unwrap();
    source.set_len(4 << 40).unwrap();
    for i in 0..3000u64 {
        source.write_all_at(&[1], i << 28).unwrap();
    }
    let mut child = Command::new(TARE)
        .args(["img", "convert", "-f", "raw", "-O", "raw", "-S", "0", "big.raw", "copy.raw"])
        .current_dir(p.0.path())
        .spawn()
        .unwrap();
    let drafts = || fs::read_dir(p.0.path()).unwrap().filter(|e| e.as_ref().unwrap().file_name() != "big.raw").count();
    for _ in 0..1000 {
        if drafts() > 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(drafts(), 0);
}

#[test]
fn what_takes_long_leaves_nothing_when_it_is_interrupted() {
    let Some(p) = Place::new() else { return };
    let noise: Vec<u8> = (0..64u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 23) as u8).collect();
    fs::write(p.path("big.raw"), noise).unwrap();
    for args in [
        &["convert", "-c", "-m", "2", "-f", "raw", "-O", "qcow2", "big.raw", "new"][..],
        &["create", "-q", "-f", "qcow2", "-o", "preallocation=full", "new", "2G"],
        &["create", "-q", "-f", "raw", "-o", "preallocation=full", "new", "2G"],
    ] {
        let mut child = Command::new(TARE).arg("img").args(args).current_dir(p.0.path()).spawn().unwrap();
        let others = || fs::read_dir(p.0.path()).unwrap().map(|e| e.unwrap()).filter(|e| e.file_name() != "big.raw");
        while child.try_wait().unwrap().is_none() && !others().any(|e| e.metadata().is_ok_and(|m| m.len() > 1 << 20)) {
            std::thread::sleep(Duration::from_millis(2));
        }
        // It may have been quicker than this test; then its work is whole.
        let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success();
        let code = child.wait().unwrap().code();
        assert!(sent && code == Some(130) || code == Some(0), "{args:?} ended with {code:?}");
        assert_eq!(others().count(), usize::from(code == Some(0)), "{args:?}");
        let _ = fs::remove_file(p.path("new"));
    }
}

#[test]
fn snapshots_and_bitmaps_are_qemus() {
    let Some(p) = Place::new() else { return };
    p.do_all(&["create -q -f qcow2 a.qcow2 64M"]);
    p.io("a.qcow2", &["write -P 1 0 1M"]);
    assert_eq!(p.tare(&["snapshot", "-c", "one", "a.qcow2"]).code, 0);
    p.io("a.qcow2", &["write -P 2 0 1M"]);
    assert_eq!(p.tare(&["snapshot", "-c", "two", "a.qcow2"]).code, 0);
    p.same(&["snapshot", "-l", "a.qcow2"]);
    assert_eq!(p.tare(&["snapshot", "-a", "one", "a.qcow2"]).code, 0);
    p.io("a.qcow2", &["read -P 1 0 1M"]);
    assert_eq!(p.tare(&["snapshot", "-d", "two", "a.qcow2"]).code, 0);
    assert_eq!(p.tare(&["snapshot", "-d", "two", "a.qcow2"]).code, 1);
    assert_eq!(p.qemu(&["check", "-q", "a.qcow2"]).code, 0);
    assert_eq!(p.tare(&["bitmap", "--add", "-g", "4k", "a.qcow2", "b"]).code, 0);
    assert_eq!(p.tare(&["bitmap", "--add", "--disable", "a.qcow2", "c"]).code, 0);
    p.io("a.qcow2", &["write -P 3 5M 1M"]);
    assert_eq!(p.tare(&["bitmap", "--merge", "b", "a.qcow2", "c"]).code, 0);
    p.same_json(&["info", "--output=json", "a.qcow2"]);
    assert_eq!(p.qemu(&["check", "-q", "a.qcow2"]).code, 0);
    assert_eq!(p.tare(&["bitmap", "--remove", "a.qcow2", "b"]).code, 0);
    assert_eq!(p.tare(&["bitmap", "--remove", "a.qcow2", "b"]).code, 1);
}

#[test]
fn what_cannot_be_done_gets_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).display().to_string();
    fs::write(file("a.raw"), [1; 4096]).unwrap();
    let raw = file("a.raw");
    for (args, code, needle) in [
        (&["img"][..], 1, "no command"),
        (&["img", "dd"], 1, "unknown command `dd`"),
        (&["img", "--fast"], 1, "unknown flag --fast"),
        (&["img", "bench", "-s", "1M", &raw], 1, "smaller than one request"),
        (&["img", "bench", &file("none")], 1, "no such file"),
        (&["img", "resize", "-f", "raw", &raw, "512"], 1, "use --shrink"),
        (&["img", "resize", "-f", "raw", &raw, "-1M"], 1, "no size that can be"),
        (&["img", "resize", "-f", "raw", &raw, "much"], 1, "is not a size"),
        (&["img", "convert", "-f", "raw", &raw, &raw], 1, "one file"),
        (&["img", "convert", "-O", "vmdk", &raw, "x"], 1, "use raw or qcow2"),
        (&["img", "create", &file("b.raw")], 1, "no size"),
        (&["img", "create", "-o", "cluster_size=4k", &file("b.raw"), "1M"], 1, "no option `cluster_size`"),
        (&["img", "check", "-f", "raw", &raw], 63, "nothing to check"),
        (&["img", "snapshot", "-c", "s", &raw], 1, "only qcow2"),
        (&["img", "serve", &raw], 1, "--nbd"),
        (&["img", "serve", "--nbd", &raw, &raw], 1, "no socket"),
        (&["img", "compare", &raw], 2, "two images"),
        (&["img", "rebase", &raw], 1, "name it with -b"),
    ] {
        refuses(&mut tare(args), code, needle);
    }
    assert_eq!(fs::read(&raw).unwrap(), [1; 4096]);
}

#[test]
fn sizes_change_as_asked() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.raw");
    fs::write(&path, vec![5; 1 << 20]).unwrap();
    let resize = |args: &[&str]| {
        let all = [&["img", "resize", "-q", "-f", "raw"], args].concat();
        assert!(tare(&all).status().unwrap().success(), "{args:?}");
        fs::metadata(&path).unwrap().len()
    };
    let file = path.to_str().unwrap();
    assert_eq!(resize(&[file, "+512k"]), 3 << 19);
    assert_eq!(resize(&["--shrink", file, "-1M"]), 1 << 19);
    assert_eq!(resize(&[file, "2M"]), 2 << 20);
    let bytes = fs::read(&path).unwrap();
    assert!(bytes[..1 << 19].iter().all(|b| *b == 5) && bytes[1 << 19..].iter().all(|b| *b == 0));
}

/// A chain of three images with every kind of cluster: `top.qcow2` on `mid.qcow2` on `low.raw`.
fn chained(p: &Place, options: &str) {
    p.mixed("low.raw");
    p.do_all(&[
        &format!("create -q -f qcow2 -o {options} -F raw -b low.raw mid.qcow2 12M"),
        "create -q -f qcow2 -F qcow2 -b mid.qcow2 top.qcow2",
    ]);
    p.io("mid.qcow2", &["write -P 3 1M 200k", "write -z 2M 1M", "write -P 4 9M 64k"]);
    p.io("top.qcow2", &["write -P 5 0 4k", "write -P 6 1100k 100k", "write -z 9M 32k", "discard 1M 64k"]);
}

#[test]
fn copies_of_every_kind_of_image_are_equal() {
    let Some(p) = Place::new() else { return };
    chained(&p, "cluster_size=64k");
    p.do_all(&[
        "convert -c -f raw -O qcow2 low.raw packed.qcow2",
        "convert -c -f raw -O qcow2 -o compression_type=zstd,cluster_size=16k low.raw zstd.qcow2",
        "convert -f raw -O qcow2 -o extended_l2=on low.raw sub.qcow2",
    ]);
    for image in ["top.qcow2", "mid.qcow2", "packed.qcow2", "zstd.qcow2", "sub.qcow2"] {
        for (format, extra) in [
            ("raw", &[][..]),
            ("qcow2", &[]),
            ("qcow2", &["-o", "cluster_size=4k,refcount_bits=1", "-t", "none"]),
            ("qcow2", &["-o", "extended_l2=on", "-S", "0"]),
            ("qcow2", &["-m", "4", "-i", "threads"]),
        ] {
            let args = [&["convert", "-f", "qcow2", "-O", format], extra, &[image, "copy"]].concat();
            assert_eq!(p.tare(&args).code, 0, "{args:?}");
            assert_eq!(p.qemu(&["compare", "-f", "qcow2", "-F", format, image, "copy"]).code, 0, "{args:?}");
            assert_eq!(p.tare(&["compare", "-f", "qcow2", "-F", format, image, "copy"]).code, 0, "{args:?}");
            if format == "qcow2" {
                assert_eq!(p.qemu(&["check", "-q", "-f", "qcow2", "copy"]).code, 0, "{args:?}");
            }
        }
    }
}

#[test]
fn compressed_copies_are_equal_and_small() {
    let Some(p) = Place::new() else { return };
    chained(&p, "cluster_size=64k");
    p.do_all(&["convert -f raw -O qcow2 -o cluster_size=4k,compat=0.10 low.raw old.qcow2"]);
    for (image, format) in [("top.qcow2", "qcow2"), ("low.raw", "raw"), ("old.qcow2", "qcow2")] {
        for extra in [
            &[][..],
            &["-m", "1"],
            &["-m", "5", "-o", "compression_type=zstd"],
            &["-o", "cluster_size=512,refcount_bits=1"],
            &["-o", "cluster_size=2M,compat=0.10"],
            &["-o", "extended_l2=on,cluster_size=32k,refcount_bits=64", "-t", "writeback"],
            &["-S", "0"],
        ] {
            if image != "top.qcow2" && extra.len() > 1 {
                continue;
            }
            let args = [&["convert", "-c", "-f", format, "-O", "qcow2"], extra, &[image, "copy"]].concat();
            assert_eq!(p.tare(&args).code, 0, "{args:?}");
            assert_eq!(p.qemu(&["compare", "-f", format, "-F", "qcow2", image, "copy"]).code, 0, "{args:?}");
            assert_eq!(p.tare(&["compare", "-f", format, "-F", "qcow2", image, "copy"]).code, 0, "{args:?}");
            assert_eq!(p.qemu(&["check", "-q", "-f", "qcow2", "copy"]).code, 0, "{args:?}");
            p.same_json(&["check", "--output=json", "copy"]);
        }
    }
    // About as small as QEMU's own.
    let size = |name: &str| fs::metadata(p.path(name)).unwrap().len();
    assert_eq!(p.tare(&["convert", "-c", "-f", "raw", "-O", "qcow2", "low.raw", "ours"]).code, 0);
    p.do_all(&["convert -c -f raw -O qcow2 low.raw theirs"]);
    assert!(size("ours") <= size("theirs") + (64 << 10), "{} and {}", size("ours"), size("theirs"));
    let names = fs::read_dir(p.0.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    assert!(names.filter(|name| name.contains(".part")).count() == 0);
    assert_eq!(p.tare(&["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "data_file=d", "low.raw", "x"]).code, 1);
    assert!(!p.path("x").exists());
}

#[test]
fn copies_on_a_backing_file_hold_what_is_above_it() {
    let Some(p) = Place::new() else { return };
    chained(&p, "cluster_size=64k");
    for extra in
        [&[][..], &["-c"], &["-c", "-o", "cluster_size=4k,compression_type=zstd"], &["-o", "cluster_size=256k"]]
    {
        let args = [
            &["convert", "-f", "qcow2", "-O", "qcow2", "-B", "mid.qcow2", "-F", "qcow2"],
            extra,
            &["top.qcow2", "copy.qcow2"],
        ]
        .concat();
        assert_eq!(p.tare(&args).code, 0, "{args:?}");
        assert_eq!(p.qemu(&["compare", "-f", "qcow2", "-F", "qcow2", "top.qcow2", "copy.qcow2"]).code, 0, "{args:?}");
        assert_eq!(p.qemu(&["check", "-q", "copy.qcow2"]).code, 0, "{args:?}");
        let info: Value = serde_json::from_str(&p.qemu(&["info", "--output=json", "copy.qcow2"]).stdout).unwrap();
        assert_eq!(
            (&info["backing-filename"], &info["backing-filename-format"]),
            (&"mid.qcow2".into(), &"qcow2".into())
        );
        let small = info["actual-size"].as_u64().unwrap() < 1 << 20 || info["cluster-size"].as_u64() > Some(65_536);
        assert!(small, "{args:?}: {info}");
    }
    // Of a raw file everything is its own, holes too.
    let args = ["convert", "-f", "raw", "-O", "qcow2", "-B", "mid.qcow2", "-F", "qcow2", "low.raw", "copy.qcow2"];
    assert_eq!(p.tare(&args).code, 0);
    assert_eq!(p.qemu(&["compare", "-f", "raw", "-F", "qcow2", "low.raw", "copy.qcow2"]).code, 0);
    assert_eq!(p.tare(&["convert", "-O", "qcow2", "-B", "none", "-F", "raw", "low.raw", "y"]).code, 1);
    assert_eq!(p.tare(&["convert", "-O", "qcow2", "-B", "mid.qcow2", "low.raw", "y"]).code, 1);
    assert!(!p.path("y").exists());
}

#[test]
fn snapshots_are_copied_as_they_were() {
    let Some(p) = Place::new() else { return };
    chained(&p, "cluster_size=64k");
    p.do_all(&["convert -f qcow2 -O raw top.qcow2 one.raw", "snapshot -c first top.qcow2"]);
    p.io("top.qcow2", &["write -P 9 0 5M"]);
    p.do_all(&[
        "convert -f qcow2 -O raw top.qcow2 two.raw",
        "snapshot -c second top.qcow2",
        // A snapshot keeps the size it was taken at.
        "resize -q --shrink top.qcow2 2M",
    ]);
    for (name, theirs) in [("first", "one.raw"), ("snapshot.id=1", "one.raw"), ("second", "two.raw"), ("2", "two.raw")]
    {
        for extra in [&["-O", "raw"][..], &["-O", "qcow2", "-c"]] {
            let args = [&["convert", "-f", "qcow2", "-l", name], extra, &["top.qcow2", "copy"]].concat();
            assert_eq!(p.tare(&args).code, 0, "{args:?}");
            assert_eq!(p.qemu(&["compare", "-f", "raw", "-F", extra[1], theirs, "copy"]).code, 0, "{args:?}");
        }
    }
    assert_eq!(p.tare(&["convert", "-f", "qcow2", "-l", "third", "top.qcow2", "none"]).code, 1);
    assert_eq!(p.tare(&["convert", "-f", "raw", "-l", "first", "one.raw", "none"]).code, 1);
    assert!(!p.path("none").exists());
}

#[test]
fn several_images_are_committed_into_one_below_them() {
    let Some(p) = Place::new() else { return };
    for base in ["low.qcow2", "./low.qcow2"] {
        p.mixed("low.raw");
        p.do_all(&[
            "convert -f raw -O qcow2 low.raw low.qcow2",
            // Shorter than what is below it: it ends in zeroes for the one above.
            "create -q -f qcow2 -F qcow2 -b low.qcow2 mid.qcow2 5M",
            "create -q -f qcow2 -F qcow2 -b mid.qcow2 over.qcow2 12M",
            "create -q -f qcow2 -F qcow2 -b over.qcow2 top.qcow2",
        ]);
        p.io("mid.qcow2", &["write -P 3 1M 200k", "write -z 2M 1M"]);
        p.io("over.qcow2", &["write -P 4 1100k 10k", "write -P 4 11M 64k"]);
        p.io("top.qcow2", &["write -P 5 0 4k", "write -z 1M 64k"]);
        p.do_all(&["convert -f qcow2 -O raw top.qcow2 before.raw"]);
        let ours = p.tare(&["commit", "-b", base, "top.qcow2"]);
        assert_eq!(ours, Ended { code: 0, stdout: "Image committed.\n".into() });
        assert_eq!(p.qemu(&["check", "-q", "low.qcow2"]).code, 0);
        for image in ["low.qcow2", "top.qcow2"] {
            assert_eq!(p.qemu(&["compare", "-f", "qcow2", "-F", "raw", image, "before.raw"]).code, 0, "{image}");
        }
    }
    assert_eq!(p.tare(&["commit", "-b", "before.raw", "top.qcow2"]).code, 1);
    assert_eq!(p.tare(&["commit", "-b", "top.qcow2", "top.qcow2"]).code, 1);
}

/// A map as JSON, by clusters of 64 KiB: whether anything of each is present, and data. Below that, QEMU alone tells holes
/// of the files.
fn map_of(text: &str) -> Vec<(bool, bool)> {
    let json: Value = serde_json::from_str(text).unwrap();
    let mut clusters = Vec::new();
    for run in json.as_array().unwrap() {
        let number = |key: &str| run[key].as_u64().unwrap();
        let (first, end) = (number("start") >> 16, (number("start") + number("length")).div_ceil(1 << 16));
        clusters.resize(end as usize, (false, false));
        for cluster in &mut clusters[first as usize..] {
            cluster.0 |= run["present"].as_bool().unwrap();
            cluster.1 |= run["data"].as_bool().unwrap();
        }
    }
    clusters
}

#[test]
fn chains_map_the_same() {
    let Some(p) = Place::new() else { return };
    chained(&p, "cluster_size=64k");
    for image in ["top.qcow2", "mid.qcow2"] {
        let args = ["map", "--output=json", "-f", "qcow2", image];
        let (ours, theirs) = (p.tare(&args), p.qemu(&args));
        assert_eq!((ours.code, map_of(&ours.stdout)), (0, map_of(&theirs.stdout)), "{image}");
    }
}

#[test]
fn a_rebased_image_shows_the_same() {
    let Some(p) = Place::new() else { return };
    chained(&p, "cluster_size=64k");
    p.do_all(&["convert -f qcow2 -O raw top.qcow2 before.raw", "create -q -f qcow2 other.qcow2 5M"]);
    p.io("other.qcow2", &["write -P 9 0 2M"]);
    let shows_the_same = |what: &str| {
        assert_eq!(p.qemu(&["compare", "-f", "qcow2", "-F", "raw", "top.qcow2", "before.raw"]).code, 0, "{what}");
        assert_eq!(p.qemu(&["check", "-q", "top.qcow2"]).code, 0, "{what}");
    };
    for (backing, format) in [("low.raw", "raw"), ("other.qcow2", "qcow2"), ("mid.qcow2", "qcow2")] {
        assert_eq!(p.tare(&["rebase", "-F", format, "-b", backing, "top.qcow2"]).code, 0, "{backing}");
        shows_the_same(backing);
        let info: Value = serde_json::from_str(&p.qemu(&["info", "--output=json", "top.qcow2"]).stdout).unwrap();
        assert_eq!(info["backing-filename"], backing);
    }
    assert_eq!(p.tare(&["rebase", "-b", "", "top.qcow2"]).code, 0);
    shows_the_same("none");
    assert_eq!(p.tare(&["rebase", "-u", "-F", "raw", "-b", "low.raw", "top.qcow2"]).code, 0);
    assert_eq!(p.tare(&["rebase", "-F", "raw", "-b", "none.raw", "top.qcow2"]).code, 1);
}

#[test]
fn qcow2_is_served_to_several_clients() {
    let Some(p) = Place::new() else { return };
    chained(&p, "cluster_size=64k");
    p.do_all(&["convert -f qcow2 -O raw top.qcow2 before.raw"]);
    let mut server = p.serve(&["img", "serve", "--nbd", "s", "-f", "qcow2", "top.qcow2"]);
    let uri = "nbd+unix:///top.qcow2?socket=s";
    assert_eq!(p.qemu(&["compare", "-f", "raw", "-F", "raw", uri, "before.raw"]).code, 0);
    let (map, local) = (
        p.qemu(&["map", "--output=json", "-f", "raw", uri]),
        p.tare(&["map", "--output=json", "-f", "qcow2", "mid.qcow2"]),
    );
    assert_eq!((map.code, local.code), (0, 0));
    let served: Value = serde_json::from_str(&map.stdout).unwrap();
    let zero = served.as_array().unwrap().iter().any(|r| r["data"] == false && r["start"].as_u64().unwrap() >= 2 << 20);
    assert!(zero, "block status tells zeroes: {}", map.stdout);
    // Two writers at one time, each of its own half.
    std::thread::scope(|scope| {
        for half in 0..2u64 {
            let p = &p;
            scope.spawn(move || {
                let at = half * (6 << 20);
                let write = format!("aio_write -P {} {at} 6M", half + 1);
                p.io(uri, &[&write, "aio_flush", "flush"]);
            });
        }
    });
    p.io(uri, &["read -P 1 0 6M", "read -P 2 6M 6M"]);
    assert!(Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success());
    assert_eq!(server.wait().unwrap().code(), Some(0));
    assert!(!p.path("s").exists());
    p.io("top.qcow2", &["read -P 1 0 6M", "read -P 2 6M 6M"]);
    assert_eq!(p.qemu(&["check", "-q", "top.qcow2"]).code, 0);
}

#[test]
fn a_committed_image_is_in_its_backing_file() {
    let Some(p) = Place::new() else { return };
    for (options, keep) in [("cluster_size=64k", false), ("cluster_size=4k,refcount_bits=8", true)] {
        chained(&p, options);
        p.do_all(&["convert -f qcow2 -O raw top.qcow2 before.raw"]);
        let args = [&["commit"][..], if keep { &["-d"] } else { &[] }, &["top.qcow2"]].concat();
        assert_eq!(p.tare(&args), Ended { code: 0, stdout: "Image committed.\n".into() });
        for image in ["top.qcow2", "mid.qcow2"] {
            assert_eq!(p.qemu(&["compare", "-f", "qcow2", "-F", "raw", image, "before.raw"]).code, 0, "{image}");
            assert_eq!(p.qemu(&["check", "-q", image]).code, 0, "{image}");
        }
        // Into a raw file, which has to grow first.
        assert_eq!(p.tare(&["commit", "-q", "mid.qcow2"]).code, 0);
        assert_eq!(fs::read(p.path("low.raw")).unwrap(), fs::read(p.path("before.raw")).unwrap());
        let (_, held) = (p.qemu(&["check", "mid.qcow2"]), fs::metadata(p.path("mid.qcow2")).unwrap().len());
        assert!(held <= 5 << 16, "emptied: {held}");
    }
    assert_eq!(p.tare(&["commit", "before.raw"]).code, 1);
}

/// A boot sector that reads sector 1, says its first four bytes on port 0xe9, writes it to sector 2 and ends the machine.
fn boot_sector() -> Vec<u8> {
    const READ: u16 = 0x7c80;
    const WRITE: u16 = 0x7c90;
    let packet = |sector: u64| [&[0x10, 0, 1, 0, 0, 0x80, 0, 0][..], &sector.to_le_bytes()].concat();
    let mut code = vec![0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xfb];
    code.extend([&[0xbe][..], &READ.to_le_bytes(), &[0xb4, 0x42, 0xcd, 0x13]].concat()); // the packet; int 13h, 42h
    code.extend([0xbe, 0x00, 0x80, 0xb9, 0x04, 0x00, 0xfc, 0xac, 0xe6, 0xe9, 0xe2, 0xfb]); // lodsb, out, four times
    code.extend([&[0xbe][..], &WRITE.to_le_bytes(), &[0xb4, 0x43, 0x30, 0xc0, 0xcd, 0x13]].concat()); // int 13h, 43h
    code.extend([0xb0, 0x00, 0xe6, 0xf4, 0xf4, 0xeb, 0xfd]); // the exit port
    code.resize(0x80, 0);
    code.extend([packet(1), packet(2)].concat());
    code.resize(510, 0);
    code.extend([0x55, 0xaa]);
    code
}

#[test]
fn qemus_guest_boots_from_a_vhost_user_disk() {
    let Some(p) = Place::new() else { return };
    if Command::new("qemu-system-x86_64").arg("--version").stdout(Stdio::null()).status().is_err() {
        eprintln!("skipped: qemu-system-x86_64 is missing");
        return;
    }
    let mut bytes = boot_sector();
    bytes.extend(b"TARE");
    bytes.resize(8 << 20, 0);
    fs::write(p.path("boot.raw"), bytes).unwrap();
    p.do_all(&["convert -f raw -O qcow2 boot.raw boot.qcow2"]);
    let mut server = p.serve(&["img", "serve", "--vhost-user", "s", "-f", "qcow2", "--serial=tare-1", "boot.qcow2"]);
    let ended = Command::new("timeout")
        .args("60 qemu-system-x86_64 -nodefaults -display none -M q35,accel=tcg,memory-backend=m -m 64".split(' '))
        .args("-object memory-backend-memfd,id=m,size=64M,share=on -chardev socket,id=c,path=s".split(' '))
        .args("-device vhost-user-blk-pci,chardev=c,num-queues=1".split(' '))
        .args("-debugcon file:said -device isa-debug-exit,iobase=0xf4".split(' '))
        .current_dir(p.0.path())
        .status()
        .unwrap();
    assert!(Command::new("kill").args(["-TERM", &server.id().to_string()]).status().unwrap().success());
    assert_eq!(server.wait().unwrap().code(), Some(0));
    assert_eq!(ended.code(), Some(1), "the exit port with 0");
    assert!(fs::read_to_string(p.path("said")).unwrap().ends_with("TARE"));
    assert_eq!(p.qemu(&["convert", "-f", "qcow2", "-O", "raw", "boot.qcow2", "after.raw"]).code, 0);
    assert_eq!(fs::read(p.path("after.raw")).unwrap()[1024..1028], *b"TARE");
}
