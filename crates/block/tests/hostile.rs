// SPDX-License-Identifier: Apache-2.0
//! Images made to harm: each is refused in one line, or served within bounds. Never a panic, never a hang, never much
//! memory, never a byte of a file that nobody named, never a write over the image's own tables.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::Duration;

use block::{BackingGate, Disk, Options, Qcow2Options};
use common::tools::{self, qemu_img, qemu_io};
use testkit::qcow2::{Counting, Player, Rng, Step};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static ALONE: Mutex<()> = Mutex::new(());

const CACHE: u64 = 1 << 20;
const BUDGET: usize = CACHE as usize + (64 << 20);

/// Runs `work` with an end and a bound on memory.
fn bounded<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let before = Counting::mark();
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let _ = tell.send(work());
    });
    let result = match told.recv_timeout(Duration::from_secs(60)) {
        Ok(result) => result,
        Err(e) => panic!("{what}: it panics or hangs: {e}"),
    };
    let used = Counting::peak_since(before);
    assert!(used < BUDGET, "{what}: took {used} bytes of memory");
    result
}

fn options(path: &Path) -> Options {
    let qcow2 = Qcow2Options { l2_cache: Some(CACHE), ..Qcow2Options::default() };
    Options { qcow2, ..Options::qcow2(path) }
}

/// The one line with which an image is refused.
fn refusal(options: &Options) -> String {
    match Disk::open(options) {
        Ok(_) => panic!("{}: must be refused", options.path.display()),
        Err(e) => one_line(&options.path, &e.to_string()),
    }
}

fn one_line(path: &Path, text: &str) -> String {
    assert!(!text.contains('\n') && text.len() < 2000, "one line: {text}");
    let folder = path.parent().unwrap().display().to_string();
    assert!(text.contains(&folder), "says which file: {text}");
    text.to_owned()
}

/// Opens an image that may be anything and uses it; `None` if it was refused.
fn use_it(path: &Path, seed: u64) -> Option<()> {
    let opened = Disk::open(&options(path));
    let disk = match opened {
        Ok(disk) => disk,
        Err(e) => {
            one_line(path, &e.to_string());
            return None;
        }
    };
    let size = disk.size();
    let mut player = Player::new(disk).unwrap();
    let rng = &mut Rng::new(seed);
    for n in 0..24 {
        let len = 512 * (1 + rng.below(64)).min(size / 512);
        let near = if rng.one_in(3) { size } else { size.min(1 << 20) };
        let at = rng.below((near - len.min(near)) / 512 + 1) * 512;
        // Errors are fine, whatever they are; answers must come.
        let step = match rng.below(8) {
            0..4 => Step::Read { at, len },
            4..6 => Step::Write { at, len, id: n + 2 },
            6 => Step::Zero { at, len, unmap: true },
            _ => Step::Flush,
        };
        let _ = player.one(step);
    }
    let _ = player.disk.extents(0, size.min(16 << 20));
    drop(player.end());
    Some(())
}

struct Den {
    dir: tempfile::TempDir,
}

impl Den {
    fn new() -> Self {
        Self { dir: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// An image by qemu-img, with something in it.
    fn image(&self, name: &str, words: &str, commands: &[&str]) -> PathBuf {
        let path = self.path(name);
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", words, path.to_str().unwrap(), "1M"]).unwrap();
        let commands: Vec<String> = commands.iter().map(|c| (*c).to_owned()).collect();
        if !commands.is_empty() {
            qemu_io(&path, "qcow2", &commands).unwrap();
        }
        path
    }

    /// A copy of `bytes` with changes: offset and big-endian bytes.
    fn with(&self, name: &str, bytes: &[u8], changes: &[(usize, &[u8])]) -> PathBuf {
        let mut bytes = bytes.to_vec();
        for (at, change) in changes {
            bytes[*at..at + change.len()].copy_from_slice(change);
        }
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }
}

const DATA: &[&str] = &["write -P 1 0 200k", "write -P 2 512k 70k", "write -z 640k 128k"];

/// A word of the header, or of a table, by its offset.
fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn headers_that_claim_too_much_are_refused_in_one_line() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let good = std::fs::read(den.image("good.qcow2", "cluster_size=65536", DATA)).unwrap();
    let long = |v: u64| v.to_be_bytes().to_vec();
    let word = |v: u32| v.to_be_bytes().to_vec();
    let claims: Vec<(&str, usize, Vec<u8>)> = vec![
        ("no magic", 0, word(0)),
        ("version 1", 4, word(1)),
        ("version 4", 4, word(4)),
        ("clusters of 256 bytes", 20, word(8)),
        ("clusters of 4 MiB", 20, word(22)),
        ("clusters of 2^99 bytes", 20, word(99)),
        ("exabytes with a small L1 table", 24, long(1 << 60)),
        ("2^64 - 1 bytes", 24, long(u64::MAX)),
        ("a petabyte with a small L1 table", 24, long(1 << 50)),
        ("unknown encryption", 32, word(7)),
        ("an L1 table of 2^32 entries", 36, word(u32::MAX)),
        ("an L1 table off its cluster", 40, long(0x30001)),
        ("an L1 table at the end of everything", 40, long(u64::MAX - 0xffff)),
        ("an L1 table in the header", 40, long(0)),
        ("an L1 table in the refcount table", 40, long(be64(&good, 48))),
        ("a refcount table off its cluster", 48, long(0x10001)),
        ("a refcount table in the header", 48, long(0)),
        ("a refcount table of 2^32 clusters", 56, word(u32::MAX)),
        ("no refcount table", 56, word(0)),
        ("2^32 snapshots", 60, word(u32::MAX)),
        ("a snapshot table in the header", 60, [word(1), long(0)].concat()),
        ("an unknown incompatible feature", 72, long(1 << 40)),
        ("refcounts of 2^40 bits", 96, word(40)),
        ("a header of no length", 100, word(0)),
        ("a header of 2^32 bytes", 100, word(u32::MAX)),
        ("a backing file name past the cluster", 8, [long(65000), word(1023)].concat()),
        ("a backing file name of 2^32 bytes", 8, [long(200), word(u32::MAX)].concat()),
        ("an unknown compression", 72, [long(8), long(0), long(0), word(4), word(112), vec![9]].concat()),
    ];
    for (what, at, bytes) in claims {
        let path = den.with("bad.qcow2", &good, &[(at, &bytes)]);
        let line = bounded(what, move || refusal(&options(&path)));
        println!("{what}: {line}");
    }
}

#[test]
fn any_changed_word_is_refused_or_served_within_bounds() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let images = [
        ("small", "cluster_size=512"),
        ("middle", "cluster_size=4096,refcount_bits=1"),
        ("extended", "cluster_size=16384,extended_l2=on"),
        ("lazy", "cluster_size=4096,lazy_refcounts=on,refcount_bits=64"),
        ("old", "compat=0.10,cluster_size=1024"),
    ];
    let rounds = if std::env::var("TARE_LONG").is_ok() { 3000 } else { 60 };
    for (n, (name, words)) in images.into_iter().enumerate() {
        let path = den.image(name, words, &[DATA, &["write -c -P 5 800k 32k"]].concat());
        if n % 2 == 0 {
            qemu_img(&["snapshot", "-q", "-c", "one", path.to_str().unwrap()]).unwrap();
        }
        let good = std::fs::read(&path).unwrap();
        let tables = [40, 48, 64].map(|at| be64(&good, at) as usize);
        let first_table = (be64(&good, tables[0]) & 0x00ff_ffff_ffff_fe00) as usize;
        let first_block = be64(&good, tables[1]) as usize;
        let mut served = 0;
        for seed in 0..rounds {
            let rng = &mut Rng::new(seed);
            let mut bad = good.clone();
            for _ in 0..1 + rng.below(3) {
                let base = *rng.pick(&[0, 0, tables[0], tables[1], tables[2], first_table, first_block]);
                let at = (base + 4 * rng.below(30) as usize).min(bad.len() - 8);
                let value = match rng.below(5) {
                    0 => rng.next(),
                    1 => rng.below(bad.len() as u64) & !511 | 1 << 63,
                    2 => be64(&bad, at) ^ 1 << rng.below(64),
                    3 => 1 << 62 | rng.next(),
                    _ => u64::MAX,
                };
                bad[at..at + 8].copy_from_slice(&value.to_be_bytes());
            }
            if rng.one_in(10) {
                bad.truncate(rng.below(bad.len() as u64) as usize);
            }
            let path = den.path("changed.qcow2");
            std::fs::write(&path, &bad).unwrap();
            served += usize::from(bounded(&format!("{name}, seed {seed}"), move || use_it(&path, seed)).is_some());
        }
        println!("{name}: {served} of {rounds} were served");
    }
}

#[test]
fn an_image_reads_only_what_the_gate_lets_through() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let secret = den.path("secret.raw");
    std::fs::write(&secret, vec![0x5e; 1 << 20]).unwrap();
    let room = den.path("room");
    std::fs::create_dir(&room).unwrap();
    std::os::unix::fs::symlink(&secret, room.join("link.raw")).unwrap();
    std::fs::write(room.join("fine.raw"), vec![0x11; 1 << 20]).unwrap();
    let make = |name: &str, backing: &str, format: &str| {
        let path = room.join(name);
        qemu_img(&["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", format, path.to_str().unwrap(), "1M"])
            .unwrap();
        path
    };
    for (n, backing) in
        ["../secret.raw", secret.to_str().unwrap(), "link.raw", "./../room/../secret.raw", "/etc/passwd", "/dev/zero"]
            .into_iter()
            .enumerate()
    {
        let path = make(&format!("out{n}.qcow2"), backing, "raw");
        let line = refusal(&options(&path));
        println!("{backing}: {line}");
        let none = Qcow2Options { backing: BackingGate::None, ..Qcow2Options::default() };
        refusal(&Options { qcow2: none, ..Options::qcow2(&path) });
    }
    for backing in ["nbd://127.0.0.1:1/x", "json:{\"driver\":\"file\"}", "http://127.0.0.1:1/x", "no-such.raw"] {
        println!("{backing}: {}", refusal(&options(&make("odd.qcow2", backing, "raw"))));
    }
    println!("vmdk: {}", refusal(&options(&make("odd.qcow2", "fine.raw", "vmdk"))));
    let path = make("in.qcow2", "fine.raw", "raw");
    let mut player = Player::new(Disk::open(&options(&path)).unwrap()).unwrap();
    assert_eq!(player.read(4096, 512).unwrap(), vec![0x11; 512]);
    let listed = |file: &Path| Options {
        qcow2: Qcow2Options { backing: BackingGate::Listed(vec![file.into()]), ..Qcow2Options::default() },
        ..Options::qcow2(make("listed.qcow2", "../secret.raw", "raw"))
    };
    drop(player.end());
    assert!(Disk::open(&listed(&secret)).is_ok());
    refusal(&listed(&room.join("fine.raw")));
    let data = room.join("data.qcow2");
    let words = format!("data_file={}", room.join("own.data").display());
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &words, data.to_str().unwrap(), "1M"]).unwrap();
    assert!(Disk::open(&options(&data)).is_ok());
    let words = format!("data_file={}", den.path("outside.data").display());
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &words, data.to_str().unwrap(), "1M"]).unwrap();
    println!("data file: {}", refusal(&options(&data)));
}

#[test]
fn chains_that_bite_their_tail_are_refused() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let make = |name: &str, backing: &str| {
        let path = den.path(name);
        let words = ["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "qcow2", path.to_str().unwrap(), "1M"];
        qemu_img(&words).unwrap();
        path
    };
    let own = make("own.qcow2", "own.qcow2");
    let line = bounded("itself", move || refusal(&options(&own)));
    println!("{line}");
    let [a, _, _] = [make("a.qcow2", "b.qcow2"), make("b.qcow2", "c.qcow2"), make("c.qcow2", "a.qcow2")];
    std::fs::hard_link(&a, den.path("other-name.qcow2")).unwrap();
    for (what, path) in [("three", a), ("by another name", make("d.qcow2", "other-name.qcow2"))] {
        let line = bounded(what, move || refusal(&options(&path)));
        println!("{line}");
    }
}

#[test]
fn entries_that_point_into_the_tables_are_never_written_through() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let good = std::fs::read(den.image("good.qcow2", "cluster_size=4096", &["write -P 1 0 64k"])).unwrap();
    let l1 = be64(&good, 40);
    let table = be64(&good, l1 as usize) & 0x00ff_ffff_ffff_fe00;
    let refcounts = be64(&good, 48);
    let block = be64(&good, refcounts as usize);
    for (what, target) in
        [("L1 table", l1), ("L2 table", table), ("refcount table", refcounts), ("refcount block", block)]
    {
        let entry = (1_u64 << 63 | target).to_be_bytes();
        let path = den.with("bad.qcow2", &good, &[(table as usize, &entry)]);
        let at = target as usize;
        // A refusal to open would do as well.
        if let Ok(disk) = Disk::open(&options(&path)) {
            let mut player = Player::new(disk).unwrap();
            let answer = player.one(Step::Write { at: 0, len: 4096, id: 9 });
            let _ = player.one(Step::Flush);
            drop(player.end());
            assert!(answer.is_err(), "{what}: a write over it is an I/O error");
        }
        let after = std::fs::read(&path).unwrap();
        let name = 0xda7a_0000_0000_0009_u64.to_le_bytes();
        assert!(!after[at..at + 4096].windows(8).any(|w| w == name), "{what}: it was overwritten with guest data");
    }
}

#[test]
fn compressed_bombs_stay_within_their_cluster() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    for kind in ["zlib", "zstd"] {
        // A 2 MiB cluster of zeroes in few bytes...
        let words = format!("cluster_size=2M,compression_type={kind}");
        let large = std::fs::read(den.image("large.qcow2", &words, &["write -c -P 7 0 1M"])).unwrap();
        let l1 = be64(&large, 40) as usize;
        let table = (be64(&large, l1) & 0x00ff_ffff_ffff_fe00) as usize;
        let at = (be64(&large, table) & ((1 << 49) - 1)) as usize;
        let stream = large[at..(at + 4096).min(large.len())].to_vec();
        // ...in the place of a cluster of 4 KiB.
        let words = format!("cluster_size=4096,compression_type={kind}");
        let small = den.image("small.qcow2", &words, &["write -c -P 7 0 4k", "write -P 1 4k 4k"]);
        let mut bytes = std::fs::read(&small).unwrap();
        let l1 = be64(&bytes, 40) as usize;
        let table = (be64(&bytes, l1) & 0x00ff_ffff_ffff_fe00) as usize;
        let at = (be64(&bytes, table) & ((1 << 58) - 1)) as usize;
        let end = (at + stream.len()).min(at / 4096 * 4096 + 4096);
        bytes.resize(bytes.len().max(end), 0);
        bytes[at..end].copy_from_slice(&stream[..end - at]);
        std::fs::write(&small, &bytes).unwrap();
        bounded(kind, move || {
            let mut player = Player::new(Disk::open(&options(&small)).unwrap()).unwrap();
            // QEMU takes what fits and calls the rest an error; either is bounded.
            let _ = player.read(0, 4096);
            assert_eq!(player.read(4096, 512).unwrap(), vec![1; 512], "{kind}: the next cluster is as it was");
            drop(player.end());
        });
    }
}
