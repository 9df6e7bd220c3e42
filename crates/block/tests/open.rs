// SPDX-License-Identifier: Apache-2.0
//! Opening images: what is refused, with which line; requests out of range; staged faults.
//!
//! No test in this file starts a process: for a moment the child would hold the locks of the others' images.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::Path;

use block::{Aio, Disk, Error, Fault, FaultPlan, MemImage, Op, Options};
use common::User;

fn image(dir: &Path, name: &str, size: u64) -> std::path::PathBuf {
    let path = dir.join(name);
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    path
}

fn line(options: &Options) -> String {
    let text = Disk::open(options).expect_err("must be refused").to_string();
    assert!(!text.contains('\n'), "one line: {text}");
    assert!(text.contains(&options.path.display().to_string()), "says where: {text}");
    text
}

#[test]
fn what_is_no_disk_is_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("no.raw");
    assert!(line(&Options::new(&missing)).contains("no such file"));
    assert!(line(&Options::new(dir.path())).contains("is a directory"));
    assert!(line(&Options::new("/dev/null")).contains("is a character device"));
    let pipe = dir.path().join("pipe");
    let name = std::ffi::CString::new(pipe.to_str().unwrap()).unwrap();
    // SAFETY: the name lives through the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    assert!(line(&Options::new(&pipe)).contains("is a pipe"), "and opening it does not hang");
    assert!(line(&Options::new(image(dir.path(), "empty.raw", 0))).contains("0 bytes hold no 512-byte sector"));
    assert!(line(&Options::new(image(dir.path(), "tiny.raw", 511))).contains("511 bytes hold no"));
    let through_file = image(dir.path(), "x.raw", 512).join("y.raw");
    assert!(matches!(Disk::open(&Options::new(through_file)), Err(Error::Missing(_))));
}

#[test]
fn a_ragged_size_is_rounded_down_and_said() {
    let dir = tempfile::tempdir().unwrap();
    let disk = Disk::open(&Options::new(image(dir.path(), "ragged.raw", 1000))).unwrap();
    assert_eq!(disk.size(), 512);
    let warning = disk.warning().unwrap();
    assert!(warning.contains("1000 bytes is no multiple of 512, so the last 488 are hidden"), "{warning}");
    assert!(Disk::open(&Options::new(image(dir.path(), "whole.raw", 1024))).unwrap().warning().is_none());
}

#[test]
fn permissions_decide_what_can_be_asked_for() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "ro.raw", 4096);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    match Disk::open(&Options::new(&path)) {
        Err(e @ Error::ReadOnly(_)) => assert!(e.to_string().contains("use readonly=on"), "{e}"),
        Ok(_) => println!("skipped: this user may write anything"),
        Err(e) => panic!("{e}"),
    }
    let mut user = User::new(Disk::open(&Options { readonly: true, ..Options::new(&path) }).unwrap());
    assert!(user.disk.readonly());
    assert_eq!(user.read(0, 512).unwrap(), vec![0; 512]);
    assert_eq!(user.write(0, &[1; 512]).unwrap_err().raw_os_error(), Some(libc::EROFS));
    user.submit(1, Op::Discard, 0, 512, &[]);
    assert_eq!(user.wait(1).unwrap_err().raw_os_error(), Some(libc::EROFS));
}

#[test]
fn a_second_writer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "locked.raw", 4096);
    let first = Disk::open(&Options::new(&path)).unwrap();
    assert!(line(&Options::new(&path)).contains("in use by another process"));
    assert!(line(&Options { readonly: true, ..Options::new(&path) }).contains("which writes to it"));
    drop(first);
    let reader = Disk::open(&Options { readonly: true, ..Options::new(&path) }).unwrap();
    let _second = Disk::open(&Options { readonly: true, ..Options::new(&path) }).unwrap();
    assert!(line(&Options::new(&path)).contains("which allows no writer beside it"));
    drop(reader);
}

#[test]
fn requests_out_of_range_fail_alone() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "range.raw", 8192);
    let mut user = User::new(Disk::open(&Options::new(&path)).unwrap());
    for (offset, len) in [(8192u64, 512usize), (7680, 1024), (u64::MAX - 511, 512), (u64::MAX, 1)] {
        assert_eq!(user.read(offset, len).unwrap_err().raw_os_error(), Some(libc::EINVAL), "{offset}+{len}");
        assert_eq!(user.write(offset, &vec![1; len]).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
    assert_eq!(user.read(0, 8192).unwrap(), vec![0; 8192], "nothing was written");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8192, "and the file did not grow");
    user.write(0, &[]).unwrap();
    assert_eq!(user.read(0, 0).unwrap(), []);
}

#[test]
fn a_file_that_shrinks_gives_errors_not_zeroes() {
    let dir = tempfile::tempdir().unwrap();
    for aio in [Aio::Auto, Aio::IoUring, Aio::Threads] {
        let path = image(dir.path(), &format!("{aio:?}.raw"), 8192);
        let mut user = User::new(Disk::open(&Options { aio, ..Options::new(&path) }).unwrap());
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
        assert_eq!(user.read(0, 4096).unwrap(), vec![0; 4096]);
        assert_eq!(user.read(2048, 4096).unwrap_err().raw_os_error(), Some(libc::EIO), "{aio:?}");
    }
}

#[test]
fn staged_faults_hit_what_they_should_and_nothing_else() {
    let image = MemImage::new(vec![7; 8192]);
    let plan = FaultPlan::new();
    let mut user = User::new(Disk::in_memory(&image, false).with_faults(&plan));
    plan.add(Fault { op: Op::Write, range: 512..1024, after: 1, times: 1, errno: Some(libc::ENOSPC) });
    user.write(512, &[1; 512]).unwrap();
    user.write(0, &[2; 512]).unwrap();
    assert_eq!(user.write(512, &[3; 512]).unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(user.read(512, 512).unwrap(), vec![1; 512], "the failed write wrote nothing");
    user.write(512, &[4; 512]).unwrap();
    assert_eq!(user.read(512, 512).unwrap(), vec![4; 512]);

    plan.add(Fault { op: Op::Read, range: 0..8192, after: 0, times: 1, errno: None });
    let mut held = common::Buffer::new(512, 0);
    let segs = held.segs(&mut common::Rng(1), 512);
    user.submit(9, Op::Read, 0, 512, &segs);
    assert_eq!(user.read(512, 512).unwrap(), vec![4; 512], "a later request overtakes the held one");
    plan.release();
    user.wait(9).unwrap();
    assert_eq!(held.data(), vec![2; 512]);
}

#[test]
fn without_io_uring_threads_do_the_work() {
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), "old.raw", 1 << 20);
    // The filter holds for the thread that sets it and what it starts, and ends with them.
    std::thread::spawn(move || {
        common::forbid_io_uring();
        let text = line(&Options { aio: Aio::IoUring, ..Options::new(&path) });
        assert!(text.contains("use aio=threads"), "{text}");
        let mut user = User::new(Disk::open(&Options::new(&path)).unwrap());
        assert_eq!(user.disk.engine(), "threads");
        user.write(4096, &[9; 4096]).unwrap();
        user.flush().unwrap();
        assert_eq!(user.read(4096, 4096).unwrap(), vec![9; 4096]);
    })
    .join()
    .unwrap();
}
