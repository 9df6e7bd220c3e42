// SPDX-License-Identifier: Apache-2.0
//! Images made to harm: each is refused in one line, or served within bounds. Never a panic, never a hang, never much
//! memory, never a byte of a file that nobody named, never a write over the image's own tables.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod claims;
#[path = "../common/mod.rs"]
mod common;

use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use block::qcow2::offline::{Image, Repair};
use block::{BackingGate, Cache, Disk, Options, Qcow2Options};
use claims::{be64, claims_of_size, claims_of_tables};
use common::tools::{self, qemu_check, qemu_img, qemu_io};
use common::watchdog::watch;
use testkit::qcow2::{Counting, Player, Rng, Step};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

static ALONE: Mutex<()> = Mutex::new(());

const CACHE: u64 = 1 << 20;
const BUDGET: usize = CACHE as usize + (64 << 20);

/// Runs `work` with an end and within the cache's budget and 64 MiB.
fn bounded<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    within(BUDGET, what, work)
}

/// Runs `work` with an end and a bound on memory.
fn within<T: Send + 'static>(budget: usize, what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let before = Counting::mark();
    let result = watch(work).unwrap_or_else(|e| panic!("{what}: {e}"));
    let used = Counting::peak_since(before);
    assert!(used < budget, "{what}: took {used} bytes of memory");
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
    // The checker finds whatever it finds, within the same bounds.
    if let Ok(mut image) = Image::open(path, true) {
        let _ = image.check();
        let _ = image.repair(if seed.is_multiple_of(2) { Repair::All } else { Repair::Leaks });
    }
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

#[test]
fn headers_that_claim_too_much_are_refused_in_one_line() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let good = std::fs::read(den.image("good.qcow2", "cluster_size=65536", DATA)).unwrap();
    for (what, at, bytes, says) in claims_of_size(&good).into_iter().chain(claims_of_tables()) {
        let path = den.with("bad.qcow2", &good, &[(at, &bytes)]);
        let name = path.display().to_string();
        let line = bounded(what, move || refusal(&options(&path)));
        assert_eq!(line, format!("disk {name}: {says}"), "{what}");
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

/// Sizes that are no size of a disk, raw and qcow2, with the line that says so.
#[test]
fn wrong_sizes_and_alignments_are_said() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let raw = den.path("small.raw");
    let line = |options: &Options| refusal(options).replace(&options.path.display().to_string(), "IMAGE");
    for len in [0, 1, 511] {
        std::fs::write(&raw, vec![1; len]).unwrap();
        let says = format!(
            "disk IMAGE: {len} bytes hold no 512-byte sector; make it larger, for instance `truncate -s 4G IMAGE`"
        );
        assert_eq!(line(&Options::new(&raw)), says);
        assert_eq!(
            line(&Options::qcow2(&raw)),
            "disk IMAGE: is not a qcow2 image: its first four bytes are not QFI\\xfb; give the right format="
        );
    }
    std::fs::write(&raw, vec![1; 1300]).unwrap();
    let disk = Disk::open(&Options::new(&raw)).unwrap();
    let warning = disk.warning().unwrap().replace(&raw.display().to_string(), "IMAGE");
    assert_eq!(
        warning,
        "disk IMAGE: 1300 bytes is no multiple of 512, so the last 276 are hidden from the guest; `truncate -s 1536 IMAGE` shows them"
    );
    assert_eq!(disk.size(), 1024);
    drop(disk);
    // Direct I/O would have to read past the end, or the tail is hidden all the same.
    match Disk::open(&Options { cache: Cache::None, ..Options::new(&raw) }) {
        Ok(disk) => assert_eq!(disk.size(), 1024),
        Err(e) => println!("cache=none: {}", one_line(&raw, &e.to_string())),
    }
    let good = std::fs::read(den.image("good.qcow2", "cluster_size=65536", DATA)).unwrap();
    for (size, says) in [
        (0_u64, "disk IMAGE: 0 bytes hold no 512-byte sector; make it larger, for instance `truncate -s 4G IMAGE`"),
        (1000, "disk IMAGE: its 1000 bytes are no multiple of 512; resize it"),
        ((1 << 20) - 1, "disk IMAGE: its 1048575 bytes are no multiple of 512; resize it"),
    ] {
        let path = den.with("odd.qcow2", &good, &[(24, &size.to_be_bytes())]);
        assert_eq!(line(&options(&path)), says);
    }
    // Cut off in the middle of what it needs.
    for len in [71, 100, 4096, 70_000] {
        std::fs::write(den.path("cut.qcow2"), &good[..len]).unwrap();
        println!("{len} bytes: {}", line(&options(&den.path("cut.qcow2"))));
    }
}

/// A backing file that is not what it was: shorter, longer, another format, gone, or cut off while it is in use.
#[test]
fn backing_files_that_changed_harm_nobody() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let (base, top) = (den.path("base"), den.path("top.qcow2"));
    let cover = |format: &str| {
        let _ = std::fs::remove_file(&base);
        std::fs::write(&base, vec![7; 1 << 20]).unwrap();
        if format == "qcow2" {
            qemu_img(&["create", "-q", "-f", "qcow2", base.to_str().unwrap(), "1M"]).unwrap();
        }
        qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", format, top.to_str().unwrap()]).unwrap();
    };
    let open = || Player::new(Disk::open(&options(&top)).unwrap()).unwrap();
    cover("raw");
    std::fs::write(&base, vec![7; 300 << 10]).unwrap();
    let mut player = open();
    let seen = player.read(0, 1 << 20).unwrap();
    assert!(
        seen[..300 << 10].iter().all(|b| *b == 7) && seen[300 << 10..].iter().all(|b| *b == 0),
        "past its end: zeroes"
    );
    player.one(Step::Write { at: 290 << 10, len: 20 << 10, id: 3 }).unwrap();
    // Cut off behind our back: an error there at worst, and nowhere else.
    std::fs::OpenOptions::new().write(true).open(&base).unwrap().set_len(4096).unwrap();
    assert_eq!(player.read(0, 4096).unwrap(), vec![7; 4096]);
    match player.read(128 << 10, 4096) {
        Ok(seen) => assert_eq!(seen, vec![0; 4096]),
        Err(e) => assert_eq!(e.raw_os_error(), Some(libc::EIO)),
    }
    player.one(Step::Write { at: 900 << 10, len: 4096, id: 4 }).unwrap();
    player.one(Step::Flush).unwrap();
    drop(player.end());
    assert_eq!(qemu_check(&top).unwrap(), 0);
    // Longer than it was: the disk is as large as it says.
    std::fs::write(&base, vec![7; 3 << 20]).unwrap();
    let mut player = open();
    assert_eq!((player.disk.size(), player.read((1 << 20) - 512, 512).unwrap()), (1 << 20, vec![7; 512]));
    drop(player.end());
    let line = |what: &str| {
        let line = refusal(&options(&top)).replace(&den.dir.path().display().to_string(), "DIR");
        println!("{what}: {line}");
        line
    };
    std::fs::remove_file(&base).unwrap();
    assert_eq!(line("gone"), "disk DIR/base: no such file; check the path, or make one with `truncate -s 4G DIR/base`");
    std::fs::create_dir(&base).unwrap();
    assert_eq!(
        line("a folder"),
        "disk DIR/base: is a directory, not a regular file or block device; give the path of an image"
    );
    std::fs::remove_dir(&base).unwrap();
    cover("qcow2");
    std::fs::write(&base, vec![7; 1 << 20]).unwrap();
    assert_eq!(
        line("no longer qcow2"),
        "disk DIR/base: is not a qcow2 image: its first four bytes are not QFI\\xfb; give the right format="
    );
    std::fs::write(&base, b"").unwrap();
    assert!(line("empty").contains("DIR/base: is not a qcow2 image"));
}

/// Images that claim petabytes are served as such, in little memory; those that need larger tables than there may be are
/// refused.
#[test]
fn petabytes_cost_little() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    for (words, size) in
        [("cluster_size=2M", 1_u64 << 50), ("cluster_size=64k", 1 << 50), ("cluster_size=64k", 2 << 50)]
    {
        let path = den.path("huge.qcow2");
        qemu_img(&["create", "-q", "-f", "qcow2", "-o", words, path.to_str().unwrap(), &size.to_string()]).unwrap();
        for readonly in [true, false] {
            let options = Options { readonly, ..options(&path) };
            bounded(&format!("{words}, {size}, readonly {readonly}"), move || {
                let mut player = Player::new(Disk::open(&options).unwrap()).unwrap();
                assert_eq!(player.disk.size(), size);
                for at in [0, size / 2, size - 4096] {
                    assert_eq!(player.read(at, 4096).unwrap(), vec![0; 4096]);
                    if !readonly {
                        let step = Step::Write { at, len: 4096, id: 9 };
                        player.one(step).unwrap();
                        assert_eq!(player.read(at, 4096).unwrap(), testkit::qcow2::history::fill(9, at, 4096));
                    }
                }
                if !readonly {
                    player.one(Step::Flush).unwrap();
                }
                drop(player.end());
            });
        }
        let image = path.clone();
        let report = bounded("check", move || Image::open(&image, false).unwrap().check().unwrap());
        assert!(report.clean(), "{report:?}");
        assert!(std::fs::metadata(&path).unwrap().len() < 128 << 20, "nothing is stored for what is not there");
    }
    // Tables full of entries, as many as the format allows: what is kept of each is all that it may cost.
    let path = den.path("full.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=64k", path.to_str().unwrap(), "2P"]).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let (l1, entries) = (be64(&bytes, 40) as usize, u32::from_be_bytes(bytes[36..40].try_into().unwrap()) as usize);
    for (n, entry) in bytes[l1..l1 + entries * 8].chunks_exact_mut(8).enumerate() {
        entry.copy_from_slice(&((1_u64 << 63) | ((1 << 30) + ((n as u64) << 16))).to_be_bytes());
    }
    std::fs::write(&path, &bytes).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
    let reading = Options { readonly: true, ..options(&path) };
    bounded("a full L1 table, readonly", move || {
        let mut player = Player::new(Disk::open(&reading).unwrap()).unwrap();
        assert_eq!(player.read(4096, 4096).unwrap(), vec![0; 4096]);
        drop(player.end());
    });
    within(256 << 20, "a full L1 table", move || {
        let Ok(disk) = Disk::open(&options(&path)) else { return };
        let mut player = Player::new(disk).unwrap();
        let size = player.disk.size();
        for at in [0, size / 2, size - 4096] {
            let _ = player.read(at, 4096);
            let _ = player.one(Step::Write { at, len: 4096, id: 9 });
        }
        drop(player.end());
    });
}

/// A check keeps a few bytes for each table that an image names, wherever it lies and whether it is counted or not.
#[test]
fn a_check_of_many_tables_costs_little() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let path = den.path("tables.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "cluster_size=512", path.to_str().unwrap(), "8G"]).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    let (l1, entries) = (be64(&bytes, 40) as usize, u32::from_be_bytes(bytes[36..40].try_into().unwrap()) as usize);
    for (n, entry) in bytes[l1..l1 + entries * 8].chunks_exact_mut(8).enumerate() {
        entry.copy_from_slice(&((1_u64 << 63) | ((1 << 30) + ((n as u64) << 9))).to_be_bytes());
    }
    std::fs::write(&path, &bytes).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(2 << 30).unwrap();
    let image = path.clone();
    // The table itself, what it is read with, four bytes each, and pages that begin far from nought.
    let budget = entries * 8 + (4 << 20) + entries * 4 + (4 << 20);
    let report = within(budget, "a check of many tables", move || Image::open(&image, false).unwrap().check().unwrap());
    assert_eq!(report.corruptions, 2 * entries as u64, "none is counted, so none may be written in place");
    for readonly in [true, false] {
        let options = Options { readonly, ..options(&path) };
        let what = format!("many tables, readonly {readonly}");
        bounded(&what, move || drop(Player::new(Disk::open(&options).unwrap()).unwrap().end()));
    }
}

/// What an image names and the gate does not let through is not even opened.
#[test]
fn no_file_is_opened_that_was_not_let_through() {
    let _alone = ALONE.lock().unwrap_or_else(|e| e.into_inner());
    if !tools::there() {
        return;
    }
    let den = Den::new();
    let (room, out) = (den.path("room"), den.path("out"));
    std::fs::create_dir(&room).unwrap();
    std::fs::create_dir(&out).unwrap();
    let secret = out.join("secret");
    std::fs::write(&secret, vec![0x5e; 1 << 20]).unwrap();
    std::os::unix::fs::symlink(&secret, room.join("link")).unwrap();
    let images: Vec<PathBuf> = ["../out/secret", secret.to_str().unwrap(), "link", "file:../out/secret"]
        .iter()
        .flat_map(|name| ["raw", "qcow2"].map(|format| (name, format)))
        .enumerate()
        .map(|(n, (name, format))| {
            let path = room.join(format!("{n}.qcow2"));
            let words = ["create", "-q", "-u", "-f", "qcow2", "-b", name, "-F", format, path.to_str().unwrap(), "1M"];
            qemu_img(&words).unwrap();
            path
        })
        .collect();
    let data = room.join("data.qcow2");
    let words = format!("data_file={}", secret.display());
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &words, data.to_str().unwrap(), "1M"]).unwrap();
    let c_path = std::ffi::CString::new(secret.to_str().unwrap()).unwrap();
    // SAFETY: the path lives through the calls; the descriptor is this test's.
    let watcher = unsafe {
        let watcher = libc::inotify_init1(libc::IN_NONBLOCK | libc::IN_CLOEXEC);
        assert!(watcher >= 0 && libc::inotify_add_watch(watcher, c_path.as_ptr(), libc::IN_ALL_EVENTS) >= 0);
        std::os::fd::OwnedFd::from_raw_fd(watcher)
    };
    let mut events = std::fs::File::from(watcher);
    let mut happened = || std::io::Read::read(&mut events, &mut [0; 4096]).is_ok_and(|n| n > 0);
    for path in images.iter().chain([&data]) {
        for readonly in [true, false] {
            refusal(&Options { readonly, ..options(path) });
            if let Ok(image) = Image::open(path, !readonly) {
                let _ = image.check();
            }
        }
        assert!(!happened(), "{}: the secret was touched", path.display());
    }
    drop(std::fs::File::open(&secret).unwrap());
    assert!(happened(), "and it would have been noticed");
}
