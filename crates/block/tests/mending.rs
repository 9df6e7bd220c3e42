// SPDX-License-Identifier: Apache-2.0
//! Images that another writer left behind, and images that turn out to be damaged: stale refcounts are counted anew, space
//! that a crash left is given back, damage stops the writing and is marked on disk.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use base::news::News;
use block::qcow2::offline::{Image, Repair};
use block::{Disk, ExtentKind, MemImage, Options};
use common::User;
use common::tools::{self, qemu_check, qemu_img, qemu_io, qemu_read};

/// One at a time: a process just started holds, for a moment, every lock of the one that started it.
static ALONE: Mutex<()> = Mutex::new(());

struct Lab(tempfile::TempDir, #[allow(dead_code)] MutexGuard<'static, ()>);

impl Lab {
    fn new() -> Option<Self> {
        let alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
        tools::there().then(|| Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), alone))
    }

    fn image(&self, words: &str, commands: &[&str]) -> PathBuf {
        let path = self.0.path().join("image.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", words, path.to_str().unwrap(), "4M"]).unwrap();
        qemu_io(&path, "qcow2", &commands.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>()).unwrap();
        path
    }
}

fn open(path: &Path) -> User {
    User::new(Disk::open(&Options::qcow2(path)).unwrap_or_else(|e| panic!("{e}")))
}

fn refusal(path: &Path) -> String {
    let line = Disk::open(&Options::qcow2(path)).expect_err("must be refused").to_string();
    assert!(!line.contains('\n'), "{line}");
    line
}

fn be64(bytes: &[u8], at: u64) -> u64 {
    u64::from_be_bytes(bytes[at as usize..at as usize + 8].try_into().unwrap())
}

const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Changes the file's bytes.
fn patch(path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// The dirty bit, and refcounts as a crashed writer with lazy refcounts leaves them: data and tables not counted, others
/// counted for nothing.
fn leave_dirty(bytes: &mut [u8]) {
    let block = be64(bytes, be64(bytes, 48)) as usize;
    bytes[block + 2 * 4..block + 2 * 40].fill(0);
    bytes[block + 2 * 60..block + 2 * 64].fill(1);
    bytes[79] |= 1;
}

#[test]
fn a_dirty_image_is_counted_anew_when_it_is_opened_for_writing() {
    let Some(lab) = Lab::new() else { return };
    for words in ["cluster_size=65536,lazy_refcounts=on", "cluster_size=4096,lazy_refcounts=on,extended_l2=off"] {
        let path = lab.image(words, &["write -P 1 0 1M", "write -P 2 2M 512k"]);
        patch(&path, |bytes| leave_dirty(bytes));
        let left = std::fs::read(&path).unwrap();
        // Reading needs no refcounts and changes nothing.
        let mut user = User::new(Disk::open(&Options { readonly: true, ..Options::qcow2(&path) }).unwrap());
        assert_eq!(user.read(0, 1 << 20).unwrap(), vec![1; 1 << 20]);
        drop(user);
        assert!(std::fs::read(&path).unwrap() == left);
        let mut user = open(&path);
        let said = user.disk.warning().unwrap().to_owned();
        assert!(said.contains("not closed") && said.contains("repaired"), "{said}");
        for n in 0..16 {
            user.write((3 << 20) + n * 4096, &[3; 4096]).unwrap();
        }
        drop(user);
        assert_eq!(qemu_check(&path).unwrap(), 0);
        let mut model = vec![0; 4 << 20];
        model[..1 << 20].fill(1);
        model[2 << 20..(2 << 20) + (512 << 10)].fill(2);
        model[3 << 20..(3 << 20) + 65536].fill(3);
        assert!(qemu_read(&path, 4 << 20).unwrap() == model);
        assert!(open(&path).disk.warning().is_none(), "only once");
        // The same without a file.
        let memory = MemImage::new(left);
        let disk = Disk::faulty_qcow2(&memory, &Options::qcow2("memory"), &block::FaultPlan::default()).unwrap();
        let mut user = User::new(disk);
        assert_eq!(user.read(0, 1 << 20).unwrap(), vec![1; 1 << 20]);
        drop(user);
        assert_eq!(memory.to_vec()[79] & 1, 0);
    }
}

#[test]
fn a_dirty_image_with_other_damage_is_refused() {
    let Some(lab) = Lab::new() else { return };
    let path = lab.image("cluster_size=65536,lazy_refcounts=on", &["write -P 1 0 1M"]);
    patch(&path, |bytes| {
        leave_dirty(bytes);
        // An L2 table that is nowhere.
        let l1 = be64(bytes, 40) as usize;
        bytes[l1..l1 + 8].copy_from_slice(&0x8000_0fff_ffff_0000_u64.to_be_bytes());
    });
    let line = refusal(&path);
    assert!(line.contains("not closed") && line.contains("--repair"), "{line}");
}

/// Each kind of damage is met by a write: an error for the guest, the mark on disk, and no further write.
#[test]
fn damage_that_a_write_meets_is_marked() {
    let Some(lab) = Lab::new() else { return };
    type Damage = fn(&mut [u8], u64, u64);
    let cases: [(&str, &str, Damage); 5] = [
        ("an entry that claims the L1 table", "1.1", |bytes, l1, table| {
            bytes[table as usize + 8..table as usize + 16].copy_from_slice(&(1 << 63 | l1).to_be_bytes());
        }),
        ("an entry off a cluster's start", "1.1", |bytes, _, table| bytes[table as usize + 14] |= 2),
        ("reserved bits", "1.1", |bytes, _, table| bytes[table as usize + 8] |= 8),
        ("refcounts of nothing", "1.1", |bytes, _, _| {
            let block = be64(bytes, be64(bytes, 48)) as usize;
            bytes[block..block + 2 * 64].fill(0);
        }),
        ("an old image has no mark", "0.10", |bytes, l1, table| {
            bytes[table as usize + 8..table as usize + 16].copy_from_slice(&(1 << 63 | l1).to_be_bytes());
        }),
    ];
    for (name, compat, damage) in cases {
        let path = lab.image(&format!("compat={compat}"), &["write -P 1 0 192k", "write -P 2 1M 64k"]);
        patch(&path, |bytes| {
            let l1 = be64(bytes, 40);
            let table = be64(bytes, l1) & OFFSET;
            damage(bytes, l1, table);
        });
        let before = std::fs::read(&path).unwrap();
        let news = Arc::new(News::new().unwrap());
        let mut disk = Disk::open(&Options::qcow2(&path)).unwrap();
        disk.report_to(&news);
        let mut user = User::new(disk);
        // Where the damage is, or where something new is needed.
        let failed = [65536, 3 << 20].map(|at| user.write(at, &[7; 512]).is_err());
        assert!(failed.contains(&true), "{name}");
        for at in [0, 1 << 20, 2 << 20] {
            assert_eq!(user.write(at, &[7; 512]).unwrap_err().raw_os_error(), Some(libc::EIO), "{name}: writing stops");
        }
        assert_eq!(user.read(1 << 20, 65536).unwrap(), vec![2; 65536], "{name}: reading goes on");
        let _ = user.flush();
        drop(user);
        let said = news.take();
        assert!(said.len() == 1 && said[0].contains("takes no more writes"), "{name}: {said:?}");
        let after = std::fs::read(&path).unwrap();
        let l1 = be64(&before, 40) as usize;
        assert!(after[l1..l1 + 65536] == before[l1..l1 + 65536], "{name}: the L1 table");
        if compat == "0.10" {
            assert!(after[..512] == before[..512], "{name}");
            continue;
        }
        assert_eq!(after[79], before[79] | 2, "{name}: marked");
        assert!(after[..79] == before[..79] && after[80..512] == before[80..512], "{name}: only marked");
        let line = refusal(&path);
        assert!(line.contains("marked as damaged") && line.contains("tare img check --repair"), "{line}");
        assert!(
            qemu_img(&["info", "-f", "qcow2", path.to_str().unwrap()]).unwrap().contains("corrupt: true"),
            "{name}"
        );
        let mut reader = User::new(Disk::open(&Options { readonly: true, ..Options::qcow2(&path) }).unwrap());
        assert_eq!(reader.read(1 << 20, 65536).unwrap(), vec![2; 65536], "{name}");
        drop(reader);
        // What can be repaired is used again after that.
        let report = Image::open(&path, true).unwrap().repair(Repair::All).unwrap();
        if report.corruptions == 0 {
            let mut user = open(&path);
            user.write(3 << 20, &[8; 512]).unwrap();
            assert_eq!(user.read(1 << 20, 65536).unwrap(), vec![2; 65536], "{name}");
        }
    }
}

#[test]
fn space_that_a_crash_left_is_given_back() {
    let Some(lab) = Lab::new() else { return };
    let len = |path: &Path| std::fs::metadata(path).unwrap().len();
    let path = lab.image("cluster_size=65536", &["write -P 1 0 1M"]);
    let used = len(&path);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    // A hole behind all that is used.
    file.set_len(used + (10 << 20)).unwrap();
    let mut raw = Disk::open(&Options { readonly: true, ..Options::new(&path) }).unwrap();
    let known = raw.extents(used, 512).unwrap()[0].kind == ExtentKind::Hole;
    drop(raw);
    if !known {
        println!("skipped: the file system knows no holes");
        return;
    }
    drop(open(&path));
    assert_eq!(len(&path), used);
    // Something was written there, and counted by nobody: it stays.
    file.set_len(used + (10 << 20)).unwrap();
    file.write_all_at(&[9; 512], used + (3 << 20)).unwrap();
    let mut user = open(&path);
    assert!((used + (3 << 20) + 512..used + (4 << 20)).contains(&len(&path)), "{} of {used}", len(&path));
    user.write(2 << 20, &[2; 65536]).unwrap();
    drop(user);
    assert_eq!(qemu_check(&path).unwrap(), 0);
    assert_eq!(qemu_read(&path, 4 << 20).unwrap()[2 << 20..(2 << 20) + 65536], [2; 65536]);
    // Holes that are counted are no such space.
    let path = lab.image("preallocation=metadata", &[]);
    let whole = len(&path);
    drop(open(&path));
    assert_eq!(len(&path), whole);
    assert_eq!(qemu_check(&path).unwrap(), 0);
    // Nor is anything cut for who only reads.
    file.set_len(used + (20 << 20)).unwrap();
    drop(Disk::open(&Options { readonly: true, ..Options::qcow2(&path) }).unwrap());
    assert_eq!(len(&path), used + (20 << 20));
}
