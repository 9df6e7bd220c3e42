// SPDX-License-Identifier: Apache-2.0
//! Locks on images, with QEMU's tools as the other side.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use block::{Disk, Error, Options};

/// One test at a time: a process just started holds, for a moment, every lock of the one that started it.
static ALONE: Mutex<()> = Mutex::new(());

fn image(dir: &Path, name: &str) -> std::path::PathBuf {
    let path = dir.join(name);
    std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
    path
}

fn qemu_io(arguments: &[&str], path: &Path) -> Option<(bool, String)> {
    let out = Command::new("qemu-io").args(arguments).arg(path).output().ok()?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    Some((out.status.success() && !text.contains("Failed to get"), text))
}

#[test]
fn qemu_and_tare_keep_off_each_others_images() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "shared.raw");
    let write = ["-f", "raw", "-c", "write 0 4k"];
    let read = ["-r", "-f", "raw", "-c", "read 0 4k"];
    let Some((free, text)) = qemu_io(&write, &path) else {
        println!("skipped: qemu-io is not installed");
        return;
    };
    assert!(free, "nobody has it open: {text}");
    let writer = Disk::open(&Options::new(&path)).unwrap();
    let (allowed, text) = qemu_io(&write, &path).unwrap();
    assert!(!allowed && text.contains("lock"), "QEMU may not write beside us: {text}");
    drop(writer);
    let _reader = Disk::open(&Options { readonly: true, ..Options::new(&path) }).unwrap();
    assert!(qemu_io(&read, &path).unwrap().0, "readers get along");
    let (allowed, text) = qemu_io(&write, &path).unwrap();
    assert!(!allowed && text.contains("lock"), "but not with a writer: {text}");
}

#[test]
fn qemu_locks_us_out() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "theirs.raw");
    // Waits for commands on its standard input, holding the image.
    let child = Command::new("qemu-io")
        .args(["-f", "raw"])
        .arg(&path)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::null())
        .spawn();
    let Ok(mut child) = child else {
        println!("skipped: qemu-io is not installed");
        return;
    };
    // Until it has opened the image: its lock appears at byte 101.
    let mut refused = None;
    for _ in 0..1000 {
        match Disk::open(&Options::new(&path)) {
            Err(e) => {
                refused = Some(e);
                break;
            }
            Ok(disk) => drop(disk),
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    drop(child.stdin.take());
    child.wait().unwrap();
    let refused = refused.expect("an image that QEMU writes is refused");
    assert!(matches!(refused, Error::Locked(_, "which writes to it")), "{refused}");
    assert!(Disk::open(&Options::new(&path)).is_ok(), "and free again afterwards");
}
