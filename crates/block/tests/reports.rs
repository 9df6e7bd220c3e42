// SPDX-License-Identifier: Apache-2.0
//! One test for each way in which users of other monitors lost or leaked data in qcow2 images, as their reports tell it.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use block::qcow2::offline::{Image, Repair};
use block::{Aio, Cache, Cow, Disk, Options, Qcow2Options, Secret};
use common::tools::{self, qemu_check, qemu_img, qemu_io, qemu_read};
use testkit::qcow2::history::fill;
use testkit::qcow2::{Bytes, Layer, Player, Rng, Step};

static ALONE: Mutex<()> = Mutex::new(());

/// A folder for one test, alone; `None` without QEMU's tools.
struct Lab {
    dir: tempfile::TempDir,
    _alone: std::sync::MutexGuard<'static, ()>,
}

fn lab() -> Option<Lab> {
    let alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    tools::there().then(|| Lab { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), _alone: alone })
}

impl Lab {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn image(&self, name: &str, words: &str, size: &str, commands: &[&str]) -> PathBuf {
        let path = self.path(name);
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", words, path.to_str().unwrap(), size]).unwrap();
        let commands: Vec<String> = commands.iter().map(|c| (*c).to_owned()).collect();
        if !commands.is_empty() {
            qemu_io(&path, "qcow2", &commands).unwrap();
        }
        path
    }
}

fn open(path: &Path) -> Player {
    Player::new(Disk::open(&Options::qcow2(path)).unwrap_or_else(|e| panic!("{e}"))).unwrap()
}

fn refusal(options: &Options) -> String {
    let line = Disk::open(options).expect_err("must be refused").to_string();
    assert!(!line.contains('\n'), "one line: {line}");
    line
}

fn write(at: u64, len: u64, id: u32) -> Step {
    Step::Write { at, len, id }
}

fn holds(path: &Path, model: &Bytes) {
    let bytes = qemu_read(path, model.content.len() as u64).unwrap();
    assert_eq!(model.differs(0, &bytes), None, "the first byte that is wrong");
}

/// 118 of 200 L2 tables were overwritten after days of use, nothing logged: tables must survive being thrown out of the
/// cache and read back while clusters are allocated and freed all over the disk.
#[test]
fn no_l2_table_is_lost_when_the_cache_is_small() {
    let Some(lab) = lab() else { return };
    let size = 8_u64 << 20;
    let path = lab.image("many.qcow2", "cluster_size=1024", "8M", &[]);
    let qcow2 = Qcow2Options { l2_cache: Some(8192), ..Qcow2Options::default() };
    let options = Options { qcow2, ..Options::qcow2(&path) };
    let mut model = Bytes::new(vec![0; size as usize]);
    let rng = &mut Rng::new(8606);
    let mut player = Player::new(Disk::open(&options).unwrap()).unwrap();
    for round in 0..150 {
        let mut steps: Vec<Step> = Vec::new();
        for n in 0..16 {
            // Each in a table of its own, so that they never touch.
            let at = n * (size / 16) + rng.below(size / 16 / 512 - 8) * 512;
            let len = 512 * (1 + rng.below(8));
            steps.push(match rng.below(6) {
                0 => Step::Discard { at, len },
                1 => Step::Zero { at, len, unmap: true },
                _ => write(at, len, round * 16 + n as u32 + 2),
            });
        }
        for answer in player.play(&steps, rng) {
            answer.result.unwrap();
        }
        steps.iter().for_each(|s| model.apply(s));
        if round % 50 == 49 {
            drop(player.end());
            assert_eq!(qemu_check(&path).unwrap(), 0, "leaks");
            holds(&path, &model);
            player = Player::new(Disk::open(&options).unwrap()).unwrap();
        }
    }
    assert_eq!(model.differs(0, &player.read(0, size).unwrap()), None);
}

/// Two queues that write into the same cluster of an overlay at the same time: one copy of the backing file's bytes, both
/// writes in it.
#[test]
fn queues_that_meet_in_one_cluster_do_not_undo_each_other() {
    let Some(lab) = lab() else { return };
    let size = 4_u64 << 20;
    for words in ["cluster_size=65536", "cluster_size=65536,extended_l2=on"] {
        std::fs::write(lab.path("base.raw"), fill(1, 0, size)).unwrap();
        let path = lab.path("top.qcow2");
        let base = ["-b", "base.raw", "-F", "raw"];
        qemu_img(&[&["create", "-q", "-f", "qcow2", "-o", words][..], &base, &[path.to_str().unwrap()]].concat())
            .unwrap();
        let mut model = Bytes::new(fill(1, 0, size));
        let disk = Disk::open(&Options::qcow2(&path)).unwrap();
        let mut disks: Vec<Disk> = (0..3).map(|_| disk.share().unwrap()).collect();
        disks.push(disk);
        let steps = |n: u64| (0..size / 65536).map(move |c| write(c * 65536 + n * 16384 + 512, 15872, 2 + n as u32));
        std::thread::scope(|scope| {
            for (n, disk) in (0_u64..).zip(disks) {
                scope.spawn(move || {
                    let mut player = Player::new(disk).unwrap();
                    let all: Vec<Step> = steps(n).collect();
                    for some in all.chunks(8) {
                        for answer in player.play(some, &mut Rng::new(n)) {
                            answer.result.unwrap();
                        }
                        player.one(Step::Flush).unwrap();
                    }
                    drop(player.end());
                });
            }
        });
        (0..4).flat_map(steps).for_each(|s| model.apply(&s));
        assert_eq!(qemu_check(&path).unwrap(), 0, "leaks");
        holds(&path, &model);
    }
}

/// The first 64 KiB of an image were overwritten: refcounts that call the header and the tables free are not believed.
#[test]
fn the_header_is_never_handed_out_as_a_free_cluster() {
    let Some(lab) = lab() else { return };
    let path = lab.image("first.qcow2", "cluster_size=4096", "4M", &["write -P 1 0 64k"]);
    let mut bytes = std::fs::read(&path).unwrap();
    let be64 = |bytes: &[u8], at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let block = be64(&bytes, be64(&bytes, 48));
    bytes[block..block + 20].fill(0);
    std::fs::write(&path, &bytes).unwrap();
    if let Ok(disk) = Disk::open(&Options::qcow2(&path)) {
        let mut player = Player::new(disk).unwrap();
        for n in 0..40 {
            // May fail: the image is damaged. It may not do harm.
            let _ = player.one(write((1 << 20) + n * 4096, 4096, 7));
            let _ = player.one(Step::Flush);
        }
        drop(player.end());
    }
    let after = std::fs::read(&path).unwrap();
    let same = |range: std::ops::Range<usize>| after[range.clone()] == bytes[range];
    assert!(same(0..72) && same(104..4096), "the header is as it was, but for its flags");
    let (l1, table) = (be64(&bytes, 40), be64(&bytes, be64(&bytes, 40)) & 0x00ff_ffff_ffff_fe00);
    assert_eq!(be64(&after, 40), l1);
    let guest = 0xda7a_0000_0000_0007_u64.to_le_bytes();
    for at in [0, l1, be64(&bytes, 48), block, table] {
        assert!(!after[at..at + 4096].windows(8).any(|w| w == guest), "guest data at {at:#x}");
    }
}

/// Clusters that a snapshot shares were written in place: afterwards the snapshot held the future.
#[test]
fn what_a_snapshot_shares_is_not_written_in_place() {
    let Some(lab) = lab() else { return };
    for words in ["cluster_size=65536", "cluster_size=512", "cluster_size=65536,extended_l2=on", "compat=0.10"] {
        let path = lab.image("snap.qcow2", words, "1M", &["write -P 17 0 512k"]);
        let name = path.to_str().unwrap();
        qemu_img(&["snapshot", "-c", "before", name]).unwrap();
        let mut player = open(&path);
        let steps = [
            write(0, 512, 2),
            write(70_000 / 512 * 512, 4096, 3),
            Step::Zero { at: 128 << 10, len: 64 << 10, unmap: true },
            Step::Discard { at: 256 << 10, len: 64 << 10 },
            write(600 << 10, 8192, 4),
        ];
        for step in steps {
            player.one(step).unwrap();
        }
        drop(player.end());
        assert_eq!(qemu_check(&path).unwrap(), 0, "{words}: leaks");
        let mut now = Bytes::new([vec![17; 512 << 10], vec![0; 512 << 10]].concat());
        steps.iter().for_each(|s| now.apply(s));
        holds(&path, &now);
        qemu_img(&["snapshot", "-a", "before", name]).unwrap();
        holds(&path, &Bytes::new([vec![17; 512 << 10], vec![0; 512 << 10]].concat()));
    }
}

/// A LUKS image was opened, its ciphertext given to the guest, and plaintext written over it.
#[test]
fn ciphertext_is_never_served() {
    let Some(lab) = lab() else { return };
    let path = lab.path("luks.qcow2");
    let name = path.to_str().unwrap();
    let secret = "secret,id=s,data=open sesame";
    let made = qemu_img(&[
        "create",
        "-q",
        "--object",
        secret,
        "-f",
        "qcow2",
        "-o",
        "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10",
        name,
        "1M",
    ]);
    if let Err(why) = made {
        return println!("skipped: {why}");
    }
    let opts = format!("driver=qcow2,file.filename={name},encrypt.key-secret=s");
    let io = |command: &str| {
        tools::tool("qemu-io", &["--object", secret, "--image-opts", "-c", command, &opts]).map(|said| {
            assert!(!said.contains("failed"), "{said}");
        })
    };
    io("write -P 66 0 128k").unwrap();
    let line = refusal(&Options::qcow2(&path));
    assert!(line.contains("encrypt") || line.contains("key") || line.contains("LUKS"), "{line}");
    println!("{line}");
    let with = |key: &str| Options {
        qcow2: Qcow2Options { keys: vec![Secret::new(key.into())], ..Qcow2Options::default() },
        ..Options::qcow2(&path)
    };
    let line = refusal(&with("open barley"));
    println!("{line}");
    match Disk::open(&with("open sesame")) {
        Ok(disk) => {
            let mut player = Player::new(disk).unwrap();
            assert_eq!(player.read(0, 4096).unwrap(), vec![66; 4096], "plaintext");
            player.one(write(65536 - 512, 1024, 5)).unwrap();
            player.one(write(512 << 10, 512, 6)).unwrap();
            drop(player.end());
            io("read -P 66 0 65024").unwrap();
            io("read -P 0 525000 1000").unwrap();
            assert!(
                !std::fs::read(&path).unwrap().windows(64).any(|w| w == &fill(5, 65536 - 512, 64)[..]),
                "no plaintext"
            );
            let node = tools::Node::encrypted(&[(&path, "luks", "open sesame")]);
            assert_eq!(tools::qemu_check_on(&node).unwrap(), 0);
        }
        Err(e) => panic!("not served even with its key: {e}"),
    }
}

/// Bits that change what an image means were ignored: subclusters and external data files read as garbage.
#[test]
fn subclusters_and_data_files_are_understood() {
    let Some(lab) = lab() else { return };
    let commands = ["write -P 1 0 2k", "write -P 2 6k 2k", "write -z 64k 2k", "write -P 3 300k 100k"];
    let path = lab.image("sub.qcow2", "cluster_size=65536,extended_l2=on", "1M", &commands);
    let seen = open(&path).read(0, 1 << 20).unwrap();
    assert_eq!(seen, qemu_read(&path, 1 << 20).unwrap());
    assert_eq!((seen[0], seen[2048], seen[6144], seen[300 << 10]), (1, 0, 2, 3));
    for raw in ["off", "on"] {
        let words = format!("data_file={},data_file_raw={raw}", lab.path("bytes.data").display());
        let path = lab.image("table.qcow2", &words, "1M", &commands);
        let mut player = open(&path);
        assert_eq!(player.read(0, 1 << 20).unwrap(), seen);
        player.one(write(4096, 512, 9)).unwrap();
        player.one(write(900 << 10, 512, 9)).unwrap();
        drop(player.end());
        let data = std::fs::read(lab.path("bytes.data")).unwrap();
        assert_eq!(&data[4096..4608], fill(9, 4096, 512), "the data is in the data file");
        assert_eq!(qemu_check(&path).unwrap(), 0);
        let now = qemu_read(&path, 1 << 20).unwrap();
        assert_eq!(&now[900 << 10..(900 << 10) + 512], fill(9, 900 << 10, 512));
        std::fs::remove_file(lab.path("bytes.data")).unwrap();
        let line = refusal(&Options::qcow2(&path));
        assert!(line.contains("bytes.data"), "a missing data file is named: {line}");
    }
}

/// The extension with the backing file's format was looked for under a wrong number; and a raw backing file must stay raw,
/// even if a guest wrote a qcow2 header into it.
#[test]
fn the_backing_format_is_read_and_never_guessed() {
    let Some(lab) = lab() else { return };
    let inner = lab.image("inner.qcow2", "cluster_size=4096", "64k", &["write -P 9 0 64k"]);
    let disguised = std::fs::read(inner).unwrap();
    std::fs::write(lab.path("base"), &disguised).unwrap();
    let path = lab.path("top.qcow2");
    let name = path.to_str().unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", name]).unwrap();
    assert_eq!(open(&path).read(0, 512).unwrap(), &disguised[..512], "as it lies there");
    qemu_img(&["rebase", "-u", "-f", "qcow2", "-b", "base", "-F", "qcow2", name]).unwrap();
    assert_eq!(open(&path).read(0, 512).unwrap(), vec![9; 512], "as qcow2, if the image says so");
    // An image that does not say: whatever is done with it, no guest-made header decides.
    qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-o", "compat=0.10", "-b", "base", "-F", "raw", name, "64k"])
        .unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let at = bytes[..512].windows(4).position(|w| w == 0xe279_2aca_u32.to_be_bytes()).unwrap();
    // The extension becomes one that nobody knows.
    bytes[at..at + 4].copy_from_slice(&0x1234_5678_u32.to_be_bytes());
    std::fs::write(&path, bytes).unwrap();
    match Disk::open(&Options::qcow2(&path)) {
        Err(e) => println!("{e}"),
        Ok(disk) => assert_eq!(Player::new(disk).unwrap().read(0, 512).unwrap(), &disguised[..512]),
    }
}

/// Persistent bitmaps were made inconsistent and their clusters leaked.
#[test]
fn bitmaps_stay_true_or_the_image_is_refused() {
    let Some(lab) = lab() else { return };
    let path = lab.image("bits.qcow2", "cluster_size=65536", "8M", &["write -P 1 0 64k"]);
    qemu_img(&["bitmap", "--add", "--enable", path.to_str().unwrap(), "b0"]).unwrap();
    match Disk::open(&Options::qcow2(&path)) {
        Err(e) => println!("{e}"),
        Ok(disk) => {
            let mut player = Player::new(disk).unwrap();
            player.one(write(1 << 20, 4096, 3)).unwrap();
            player.one(Step::Flush).unwrap();
            drop(player.end());
            let info = qemu_img(&["info", "--output=json", path.to_str().unwrap()]).unwrap();
            // A bitmap that is still called good must know of the write; no tool of 7.2 prints its bits, so the least is
            // that a bitmap tare did not keep is marked in use, or gone.
            println!("{}", info.lines().filter(|l| l.contains("in-use") || l.contains("b0")).collect::<String>());
            assert_eq!(qemu_check(&path).unwrap(), 0, "leaks");
        }
    }
    let mut reader = Player::new(Disk::open(&Options { readonly: true, ..Options::qcow2(&path) }).unwrap()).unwrap();
    assert_eq!(reader.read(0, 512).unwrap(), vec![1; 512], "reading does no harm");
}

/// After a crash refcounts of a lazy image are behind: they are made good before anything is allocated.
#[test]
fn a_dirty_image_is_repaired_before_it_is_used() {
    let Some(lab) = lab() else { return };
    let words = "cluster_size=4096,lazy_refcounts=on";
    let path = lab.image("lazy.qcow2", words, "1M", &["write -P 1 0 256k"]);
    let mut bytes = std::fs::read(&path).unwrap();
    let be64 = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let block = be64(be64(48));
    // None of the data clusters is counted, and the dirty bit says so.
    bytes[block + 2 * 8..block + 2 * 70].fill(0);
    bytes[79] |= 1;
    std::fs::write(&path, &bytes).unwrap();
    let mut model = Bytes::new([vec![1; 256 << 10], vec![0; 768 << 10]].concat());
    // Either the engine repairs it, or it says what does.
    if Disk::open(&Options::qcow2(&path)).is_err() {
        let line = refusal(&Options::qcow2(&path));
        assert!(line.contains("--repair"), "{line}");
        Image::open(&path, true).unwrap().repair(Repair::All).unwrap();
    }
    let mut player = open(&path);
    for n in 0..64 {
        let step = write((512 << 10) + n * 4096, 4096, 5);
        player.one(step).unwrap();
        model.apply(&step);
    }
    assert_eq!(model.differs(0, &player.read(0, 1 << 20).unwrap()), None);
    drop(player.end());
    assert_eq!(qemu_check(&path).unwrap(), 0);
    holds(&path, &model);
}

/// An image marked corrupt may be read, not written.
#[test]
fn a_corrupt_image_is_not_written_to() {
    let Some(lab) = lab() else { return };
    let path = lab.image("corrupt.qcow2", "cluster_size=4096", "1M", &["write -P 1 0 64k"]);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[79] |= 2;
    std::fs::write(&path, &bytes).unwrap();
    let line = refusal(&Options::qcow2(&path));
    assert!(line.contains("corrupt") || line.contains("damaged"), "{line}");
    let mut player = Player::new(Disk::open(&Options { readonly: true, ..Options::qcow2(&path) }).unwrap()).unwrap();
    assert_eq!(player.read(0, 512).unwrap(), vec![1; 512]);
}

/// Freed clusters were used again at once and late hole punches hit their new owners; elsewhere the file grew to twice the
/// data. So: what is freed is used again, and what is used is not punched.
#[test]
fn freed_space_is_used_again_and_never_punched_late() {
    let Some(lab) = lab() else { return };
    let path = lab.image("churn.qcow2", "cluster_size=65536", "16M", &[]);
    let mut model = Bytes::new(vec![0; 16 << 20]);
    let mut player = open(&path);
    let rng = &mut Rng::new(8624);
    for round in 0..40_u64 {
        let (new, old) = (round % 2 * (8 << 20), (round + 1) % 2 * (8 << 20));
        let mut steps: Vec<Step> = (0..16).map(|n| write(new + n * 131_072, 131_072, round as u32 + 2)).collect();
        steps.extend((0..16).map(|n| Step::Discard { at: old + n * 131_072, len: 131_072 }));
        if round % 5 == 0 {
            steps.push(Step::Flush);
        }
        for answer in player.play(&steps, rng) {
            answer.result.unwrap();
        }
        player.one(Step::Flush).unwrap();
        steps.iter().for_each(|s| model.apply(s));
    }
    drop(player.end());
    assert_eq!(qemu_check(&path).unwrap(), 0, "leaks");
    holds(&path, &model);
    let bytes = std::fs::metadata(&path).unwrap().len();
    assert!(bytes < 16 << 20, "at most 4 MiB were ever in use at once, twice that while they change: {bytes} bytes");
}

/// The footprint of what is written once is what was written, and little more.
#[test]
fn the_file_is_no_larger_than_its_data() {
    let Some(lab) = lab() else { return };
    for cow in [Cow::ZeroAware, Cow::Explicit, Cow::Unallocated] {
        let path = lab.image("size.qcow2", "cluster_size=65536", "64M", &[]);
        let qcow2 = Qcow2Options { cow, ..Qcow2Options::default() };
        let mut player = Player::new(Disk::open(&Options { qcow2, ..Options::qcow2(&path) }).unwrap()).unwrap();
        for n in 0..128 {
            player.one(write(n * 65536, 65536, 2)).unwrap();
            player.one(write((16 << 20) + n * 65536 + 4096, 4096, 3)).unwrap();
        }
        drop(player.end());
        assert_eq!(qemu_check(&path).unwrap(), 0);
        let bytes = std::fs::metadata(&path).unwrap().len();
        assert!(bytes <= (16 << 20) + (2 << 20), "{cow:?}: {bytes} bytes for 16 MiB of clusters");
    }
}

/// A full host in the middle of an allocation: that request fails alone, nothing is given out twice, and all is well when
/// there is space again.
#[test]
fn a_full_host_costs_a_request_and_nothing_else() {
    let Some(lab) = lab() else { return };
    for (aio, cache) in
        [(Aio::Auto, Cache::Writeback), (Aio::Threads, Cache::Writeback), (Aio::IoUring, Cache::Writeback)]
    {
        let path = lab.image("full.qcow2", "cluster_size=4096", "16M", &["write -P 1 0 64k"]);
        let keep = lab.path("full-after.qcow2");
        let (from, to) = (path.clone(), keep.clone());
        // A mount that ends with the thread that made it.
        let model = std::thread::spawn(move || full_host(&from, &to, aio, cache)).join().unwrap();
        let Some(model) = model else { return };
        // Leaks are allowed after errors; corruption is not.
        let leaks = qemu_check(&keep).unwrap();
        println!("{aio:?}: {leaks} leaks");
        let bytes = std::fs::read(&keep).unwrap();
        let check = Layer::open(&bytes, None).unwrap().check();
        assert!(check.corruptions.is_empty(), "{:?}", check.corruptions);
        holds(&keep, &model);
    }
}

/// A file system of 2 MiB, seen by this thread and its children alone.
fn small_file_system(at: &Path) -> bool {
    let target = std::ffi::CString::new(at.to_str().unwrap()).unwrap();
    let private = libc::MS_REC | libc::MS_PRIVATE;
    let null = std::ptr::null();
    // SAFETY: the strings live through the calls; a mount namespace of its own touches nobody else's mounts.
    unsafe {
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(null, c"/".as_ptr(), null, private, null.cast()) == 0
            && libc::mount(c"none".as_ptr(), target.as_ptr(), c"tmpfs".as_ptr(), 0, c"size=2M".as_ptr().cast()) == 0
    }
}

fn full_host(from: &Path, to: &Path, aio: Aio, cache: Cache) -> Option<Bytes> {
    let small = from.with_extension("small");
    std::fs::create_dir_all(&small).unwrap();
    if !small_file_system(&small) {
        println!("skipped: this user may not mount");
        return None;
    }
    let image = small.join("image.qcow2");
    std::fs::copy(from, &image).unwrap();
    std::fs::write(small.join("filler"), vec![1; 1 << 20]).unwrap();
    let mut model = Bytes::new([vec![1; 64 << 10], vec![0; (16 << 20) - (64 << 10)]].concat());
    let options = Options { aio, cache, ..Options::qcow2(&image) };
    let mut player = Player::new(Disk::open(&options).unwrap()).unwrap();
    let rng = &mut Rng::new(8748);
    let (mut failed, mut maybe) = (0, Vec::new());
    for n in 0..60_u64 {
        let steps: Vec<Step> =
            (0..8).map(|k| write((1 << 20) + (n * 8 + k) * 16384 + 1024, 8192, (n * 8 + k) as u32 + 2)).collect();
        for answer in player.play(&steps, rng) {
            match answer.result {
                Ok(()) => model.apply(&answer.step),
                Err(_) => {
                    failed += 1;
                    maybe.push(answer.step);
                }
            }
        }
        if n % 8 == 0 {
            let _ = player.one(Step::Flush);
        }
    }
    assert!(failed > 0, "the host was full");
    // What was there can be read, and written to again.
    assert_eq!(player.read(0, 65536).unwrap(), &model.content[..65536]);
    player.one(write(0, 512, 3)).unwrap();
    model.apply(&write(0, 512, 3));
    std::fs::remove_file(small.join("filler")).unwrap();
    // With space again, the same requests succeed.
    for step in maybe.into_iter().take(60) {
        player.one(step).unwrap_or_else(|e| panic!("{step:?} with space again: {e}"));
        model.apply(&step);
    }
    player.one(Step::Flush).unwrap();
    // What failed and was not tried again is old or new in each sector.
    let seen = player.read(0, 16 << 20).unwrap();
    for (n, (have, want)) in seen.chunks(512).zip(model.content.chunks_mut(512)).enumerate() {
        if have != want {
            let id = u64::from_le_bytes(have[..8].try_into().unwrap()) as u32;
            assert!(want.iter().all(|b| *b == 0) && have == fill(id, n as u64 * 512, 512), "sector {n} is strange");
            want.copy_from_slice(have);
        }
    }
    drop(player.end());
    std::fs::copy(&image, to).unwrap();
    Some(model)
}
