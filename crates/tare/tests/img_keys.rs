// SPDX-License-Identifier: Apache-2.0
//! `tare img` on encrypted images, beside `qemu-img`. Skipped where QEMU's tools are missing.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::process::{Command, Output, Stdio};

use common::TARE;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Option<Self> {
        if Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_err() {
            eprintln!("skipped: qemu-img is missing");
            return None;
        }
        Some(Self(tempfile::tempdir().unwrap()))
    }

    fn run(&self, program: &str, command: &str) -> Output {
        Command::new(program).args(command.split(' ')).current_dir(self.0.path()).output().unwrap()
    }

    /// Must succeed; what it printed.
    fn tare(&self, command: &str) -> String {
        let out = self.run(TARE, &format!("img {command}"));
        assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8(out.stdout).unwrap()
    }

    /// Must fail with this code; its one line.
    fn fails(&self, code: i32, command: &str) -> String {
        let out = self.run(TARE, &format!("img {command}"));
        let line = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(code), "{command}: {line}");
        assert_eq!(line.lines().count(), 1, "{line}");
        line
    }

    fn qemu(&self, command: &str) {
        let mut out = self.run("qemu-img", command);
        for _ in 0..20 {
            // On a busy machine it fails to measure how long a passphrase takes; that passes.
            if !String::from_utf8_lossy(&out.stderr).contains("Unable to get accurate CPU usage") {
                break;
            }
            out = self.run("qemu-img", command);
        }
        assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
    }
}

/// An encrypted image in QEMU's words, its passphrase in the file `top.key`.
fn node(name: &str) -> String {
    format!(
        "--object secret,id=s,file=top.key --image-opts driver=qcow2,file.filename={name},encrypt.format=luks,encrypt.key-secret=s"
    )
}

#[test]
fn encrypted_images_are_made_read_and_written() {
    let Some(p) = Place::new() else { return };
    fs::write(p.0.path().join("top.key"), "open sesame").unwrap();
    fs::write(p.0.path().join("low.key"), "simsim").unwrap();
    fs::write(p.0.path().join("bad.key"), "open barley").unwrap();
    let noise: Vec<u8> = (0..1_500_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(p.0.path().join("raw"), &noise[..1_499_648]).unwrap();
    let luks = "-o encrypt.format=luks,encrypt.iter-time=10";
    // To and fro, and by QEMU.
    p.tare(&format!("convert -f raw -O qcow2 {luks} --target-key=top.key raw enc"));
    p.qemu(&format!("convert -O raw {} back", node("enc")));
    assert!(fs::read(p.0.path().join("back")).unwrap() == noise[..1_499_648]);
    p.tare("convert -f qcow2 -O raw --key=top.key enc again");
    assert!(fs::read(p.0.path().join("again")).unwrap() == noise[..1_499_648]);
    assert!(!fs::read(p.0.path().join("enc")).unwrap().windows(32).any(|w| w == &noise[4096..4128]), "no plaintext");
    // A chain with two keys.
    p.tare(&format!("create -q -f qcow2 {luks} --key=low.key --backing-key=top.key -b enc -F qcow2 over"));
    let line = p.fails(1, "map --output=json --key=low.key over");
    assert!(line.contains("opens none of its key slots"), "{line}");
    let map = p.tare("map --output=json --key=low.key --key=top.key over");
    assert!(map.contains("\"depth\": 1") && !map.contains("offset"), "{map}");
    p.tare("compare -f raw -F qcow2 --second-key=low.key --second-key=top.key raw over");
    p.tare("bench -q -w -c 40 -s 8k -S 20k --pattern=7 --key=low.key --key=top.key over");
    p.tare("commit -q --key=low.key --key=top.key over");
    p.tare("compare --key=low.key --key=top.key --second-key=top.key over enc");
    assert!(p.run(TARE, "img compare -q -f raw -F qcow2 --second-key=top.key raw enc").status.code() == Some(1));
    p.tare("resize --key=top.key enc 2M");
    p.tare("rebase -F qcow2 --key=low.key --key=top.key -b  over".trim());
    p.tare("check over");
    assert!(p.tare("info over").contains("encrypted: yes"));
    p.tare("compare --key=low.key --second-key=top.key over enc");
    // What makes no sense.
    for (code, command, says) in [
        (1, "map enc", "key=FILE"),
        (1, "map --key=bad.key enc", "opens none of its key slots"),
        (2, "compare -f raw -F qcow2 raw enc", "encrypted"),
        (1, "convert -f raw -O raw --key=top.key raw x", "raw image is not encrypted"),
        (1, "map --key=none.key enc", "not there"),
        (1, "create -f qcow2 -o encrypt.format=luks x 1M", "--key=FILE"),
        (1, "create -f qcow2 --key=top.key x 1M", "encrypt.format=luks"),
        (1, "create -f qcow2 -o encrypt.format=aes --key=top.key x 1M", "use luks"),
        (1, "create -f raw -o encrypt.format=luks --key=top.key x 1M", "encrypt.format"),
        (1, "map --key=top.key --key=top.key enc", "nothing to open"),
    ] {
        let line = p.fails(code, command);
        assert!(line.contains(says), "{command}: {line}");
    }
    assert!(!p.0.path().join("x").exists());
}

/// The list of files that an image may name.
#[test]
fn backing_files_can_be_listed() {
    let Some(p) = Place::new() else { return };
    fs::create_dir(p.0.path().join("elsewhere")).unwrap();
    fs::write(p.0.path().join("elsewhere/base"), [9; 65536]).unwrap();
    fs::create_dir(p.0.path().join("here")).unwrap();
    p.qemu("create -q -f qcow2 -b ../elsewhere/base -F raw here/top");
    let line = p.fails(1, "map --output=json here/top");
    assert!(line.contains("backing=folder") && line.contains("backing=any"), "{line}");
    p.tare("map --output=json --backing=./elsewhere/base here/top");
    p.tare("map --output=json --backing=./here/x:elsewhere/base here/top");
    let line = p.fails(1, "map --output=json --backing=./here/top here/top");
    assert!(line.contains("does not list"), "{line}");
    assert!(p.fails(1, "map --backing=foldr here/top").contains("use none, folder, any"));
}
