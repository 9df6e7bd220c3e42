// SPDX-License-Identifier: Apache-2.0
//! The power is cut at every point of random histories, each time with other parts of what was not synced: what was flushed
//! must be there, and each sector holds what it held before, or something written since.
//! `TARE_LONG=SECONDS` goes on with new seeds, so long in each test; `TARE_SEED=N` plays one again.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;
mod power;

use std::path::PathBuf;

use block::qcow2::format::compress::Decompressor;
use block::qcow2::format::crypto::{Cipher, unlock};
use block::qcow2::format::header::Compression;
use block::qcow2::offline::Image;
use block::{Cow, Disk, Options, Qcow2Options, RecordImage, Secret, Zeros};
use common::tools::{self, Node, qemu_check, qemu_check_on, qemu_img, qemu_io};
use power::{Files, Kind, Trouble, cut_everywhere, env, record, run};
use testkit::qcow2::cut::{Host, Luck};
use testkit::qcow2::history::{Style, THIN, fill};
use testkit::qcow2::{Cuts, Layer, Rng};

fn style(size: u64, cluster: u64) -> Style {
    Style {
        size,
        cluster,
        grain: 512,
        longest: (cluster * 3).max(4096).min(size),
        batches: if size > 1 << 20 { 6 } else { 20 },
        depth: 6,
        flush: 12,
        snapshots: 0,
        resize: false,
        reopen: true,
    }
}

fn raw_disk(resize: bool, handles: usize) -> Kind<'static> {
    let size = 64 << 10;
    Kind {
        style: Style { resize, ..style(size, 4096) },
        start: vec![fill(1, 0, size)],
        handles,
        trouble: Trouble::Nothing,
        open: &|image, _| Ok(Disk::recorded(image, false)),
        read: &|files| Ok(files[0].clone()),
        leaks: &|_| 0,
        raw_data: false,
        whole: true,
    }
}

/// A cluster by the engine's own decompressor: the only code that it shares with the naive reader.
fn inflate(data: &[u8], zstd: bool, len: usize) -> Option<Vec<u8>> {
    let kind = if zstd { Compression::Zstd } else { Compression::Zlib };
    let mut cluster = vec![0; len];
    Decompressor::new(kind).ok()?.run(data, &mut cluster).ok()?;
    Some(cluster)
}

/// What a qcow2 image is at first, and how it is used.
struct Start {
    words: &'static str,
    cluster: u64,
    size: u64,
    /// Bytes written before, with `qemu-io`'s options.
    written: &'static [(u64, u64, &'static str)],
    snapshots: Snapshots,
    backing: Backing,
    cow: Cow,
    zeros: Zeros,
    data: Data,
    /// It is encrypted by LUKS, with this key.
    key: Option<&'static str>,
    handles: usize,
    resize: bool,
    trouble: Trouble,
    /// Many requests at a time, flushes among them that meet each other's cycles.
    busy: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Snapshots {
    None,
    /// One, by QEMU.
    Qemu,
    /// Two, by the offline editor, with one more between them that was removed again; the disk was resized after the first.
    Editor,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Backing {
    None,
    /// A raw file that ends before the image does, in the middle of a cluster.
    Raw,
    /// qcow2 with zero and compressed clusters over that raw file.
    Chain,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Data {
    Inside,
    External,
    ExternalRaw,
}

const EMPTY: Start = Start {
    words: "cluster_size=512",
    cluster: 512,
    size: 96 << 10,
    written: &[],
    snapshots: Snapshots::None,
    backing: Backing::None,
    cow: Cow::ZeroAware,
    zeros: Zeros::Auto,
    data: Data::Inside,
    key: None,
    handles: 1,
    resize: false,
    trouble: Trouble::Nothing,
    busy: false,
};

impl Start {
    fn style(&self) -> Style {
        let style = Style { resize: self.resize, ..style(self.size, self.cluster) };
        let busy = Style { batches: 10, depth: 24, flush: 4, longest: 3 * self.cluster, ..style.clone() };
        if self.busy { busy } else { style }
    }
}

/// A start made real.
struct Made {
    dir: tempfile::TempDir,
    path: PathBuf,
    files: Files,
    backing: Vec<u8>,
    /// What each snapshot holds.
    kept: Vec<(String, Vec<u8>)>,
    options: Options,
    /// Of an encrypted image; `encryption.rs` compares what it does with QEMU's.
    cipher: Option<Cipher>,
}

/// What lies below; its bytes are left in `dir`.
fn make_backing(start: &Start, dir: &std::path::Path) -> (Vec<u8>, Vec<&'static str>) {
    if start.backing == Backing::None {
        return (Vec::new(), Vec::new());
    }
    let mut content = fill(1, 0, start.size - 2560);
    content[start.size as usize / 4..start.size as usize / 2].fill(0);
    std::fs::write(dir.join("base.raw"), &content).unwrap();
    if start.backing == Backing::Raw {
        return (content, vec!["-b", "base.raw", "-F", "raw"]);
    }
    let middle = dir.join("middle.qcow2");
    let base = ["-b", "base.raw", "-F", "raw", middle.to_str().unwrap()];
    qemu_img(&[&["create", "-q", "-f", "qcow2", "-o", "cluster_size=4096"][..], &base].concat()).unwrap();
    std::fs::write(dir.join("packed"), fill(THIN | 1, 8192, 8192)).unwrap();
    let packed = format!("write -c -s {} 8192 4096", dir.join("packed").display());
    qemu_io(&middle, "qcow2", &[packed, "write -z 20480 8192".into()]).unwrap();
    content[8192..12288].copy_from_slice(&fill(THIN | 1, 8192, 4096));
    content[20480..28672].fill(0);
    (content, vec!["-b", "middle.qcow2", "-F", "qcow2"])
}

fn write_first(start: &Start, made: &Made, skip: usize, take: usize) {
    let mut commands = Vec::new();
    for (n, (at, len, options)) in start.written.iter().enumerate().skip(skip).take(take) {
        let source = made.dir.path().join(format!("source-{n}"));
        std::fs::write(&source, fill(if options.contains('c') { THIN | 1 } else { 1 }, *at, *len)).unwrap();
        commands.push(format!("write {options} -s {} {at} {len}", source.display()));
    }
    if !commands.is_empty() {
        qemu_io(&made.path, "qcow2", &commands).unwrap();
    }
}

fn take_snapshots(start: &Start, made: &Made) {
    let half = start.written.len() / 2;
    match start.snapshots {
        Snapshots::None => write_first(start, made, 0, usize::MAX),
        Snapshots::Qemu => {
            write_first(start, made, 0, usize::MAX);
            qemu_img(&["snapshot", "-q", "-c", "s", made.path.to_str().unwrap()]).unwrap();
        }
        Snapshots::Editor => {
            let below = (start.backing != Backing::None).then_some(made.backing.len() as u64);
            let edit = |change: &dyn Fn(&mut Image)| change(&mut Image::open(&made.path, true).unwrap());
            edit(&|image| image.resize(start.size / 2, below).unwrap());
            write_first(start, made, 0, half);
            edit(&|image| {
                image.snapshot_create("small").unwrap();
                image.snapshot_create("gone").unwrap();
            });
            edit(&|image| image.resize(start.size, below).unwrap());
            write_first(start, made, half, usize::MAX);
            edit(&|image| {
                image.snapshot_create("large").unwrap();
                image.snapshot_delete("gone").unwrap();
            });
        }
    }
}

fn make(start: &Start) -> Made {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("start.qcow2");
    let (backing, below) = make_backing(start, dir.path());
    let data = dir.path().join("start.data");
    let words = match start.data {
        Data::Inside => start.words.to_owned(),
        Data::External => format!("{},data_file={}", start.words, data.display()),
        Data::ExternalRaw => format!("{},data_file={},data_file_raw=on", start.words, data.display()),
    };
    let size = start.size.to_string();
    let secret = format!("secret,id=s,data={}", start.key.unwrap_or_default());
    let create = ["create", "-q", "--object", &secret, "-f", "qcow2", "-o", &words];
    let create = if start.key.is_some() { &create[..] } else { &[&create[..2], &create[4..]].concat() };
    qemu_img(&[create, &below, &[path.to_str().unwrap(), &size]].concat()).unwrap();
    let keys = start.key.iter().map(|key| Secret::new(key.as_bytes().to_vec())).collect();
    let qcow2 =
        Qcow2Options { cow: start.cow, zeros: start.zeros, l2_cache: Some(4096), keys, ..Qcow2Options::default() };
    let options = Options { qcow2, ..Options::qcow2(&path) };
    let mut made = Made { dir, path, files: Vec::new(), backing, kept: Vec::new(), options, cipher: None };
    take_snapshots(start, &made);
    made.files = vec![std::fs::read(&made.path).unwrap()];
    made.files.extend(std::fs::read(&data).ok());
    let layer = Layer::open(&made.files[0], made.files.get(1).map(Vec::as_slice)).unwrap();
    made.cipher = start.key.map(|key| unlock(layer.luks_header().unwrap(), key.as_bytes()).unwrap());
    let content = |s| layer.read_snapshot(s, &made.backing, &inflate).unwrap();
    made.kept = layer.snapshots().iter().map(|s| (s.name.clone(), content(s))).collect();
    assert_eq!(made.kept.len(), [0, 1, 2][start.snapshots as usize]);
    made
}

impl Made {
    fn layer<'a>(&self, files: &'a Files) -> Result<Layer<'a>, String> {
        Layer::open(&files[0], files.get(1).map(Vec::as_slice))
    }

    /// The content, if the image has no error and its snapshots hold what they always held.
    fn read(&self, files: &Files) -> Result<Vec<u8>, String> {
        let layer = self.layer(files)?;
        let check = layer.check();
        if let Some(first) = check.corruptions.first() {
            return Err(format!("{} corruptions: {first}", check.corruptions.len()));
        }
        let same = |s: &testkit::qcow2::reader::Snapshot, kept: &(String, Vec<u8>)| {
            Ok::<bool, String>(s.name == kept.0 && layer.read_snapshot(s, &self.backing, &inflate)? == kept.1)
        };
        for (snapshot, kept) in layer.snapshots().iter().zip(&self.kept) {
            if !same(snapshot, kept)? {
                return Err(format!("snapshot {} has changed", kept.0));
            }
        }
        if layer.snapshots().len() != self.kept.len() {
            return Err("a snapshot is gone".into());
        }
        match &self.cipher {
            None => layer.read(&self.backing, &inflate),
            Some(cipher) => layer.read_encrypted(&self.backing, &|host, data| cipher.decrypt(host / 512, data)),
        }
    }
}

/// Does something with the kind of disk that a start is.
fn with_kind<T>(start: &Start, work: impl FnOnce(&Kind<'_>, &Made) -> T) -> Option<T> {
    if !tools::there() {
        return None;
    }
    let made = make(start);
    let open = |image: &RecordImage, data: Option<&RecordImage>| {
        Disk::recorded_qcow2(image, data, &made.options).map_err(|e| e.to_string())
    };
    let kind = Kind {
        style: start.style(),
        start: made.files.clone(),
        handles: start.handles,
        trouble: start.trouble,
        open: &open,
        read: &|files| made.read(files),
        leaks: &|files| made.layer(files).map_or(0, |l| l.check().leaks),
        raw_data: start.data == Data::ExternalRaw,
        whole: true,
    };
    Some(work(&kind, &made))
}

fn qcow2_keeps(start: &Start, wanted: u64) {
    with_kind(start, |kind, made| {
        let cuts = run(kind, wanted);
        assert!(cuts >= wanted, "{cuts} cuts");
        println!("{cuts} cuts");
        // More histories without cuts: no wake-up is lost, all trouble passes, nothing leaks.
        let plays = if start.size > 1 << 20 { 1 } else { 6 };
        for seed in 1000..1000 + env("TARE_PLAYS").unwrap_or(plays) {
            record(kind, seed).unwrap_or_else(|e| panic!("TARE_SEED={seed}: {e}"));
        }
        // The naive judge is judged by QEMU, on a few.
        let log = record(kind, 99).unwrap().log;
        let mut cuts = Cuts::new(kind.start.clone(), &log);
        let rng = &mut Rng::new(5);
        for _ in 0..4 {
            for _ in 0..log.len() / 4 {
                cuts.step();
            }
            std::fs::write(&made.path, cuts.image(Luck::Torn, rng)).unwrap();
            match start.key {
                None => qemu_check(&made.path).unwrap(),
                Some(key) => qemu_check_on(&Node::encrypted(&[(&made.path, "luks", key)])).unwrap(),
            };
        }
    });
}

/// Tests of so many cuts each, at least ten thousand together.
macro_rules! cases {
    ($($name:ident, $wanted:literal: $start:expr;)*) => {
        $(#[test] fn $name() { qcow2_keeps(&$start, $wanted); })*
        const _: () = assert!($($wanted +)* RAW >= 10_000);
    };
}

const RAW: u64 = 900;

#[test]
fn a_raw_disk() {
    assert!(run(&raw_disk(false, 1), RAW / 3) >= RAW / 3);
    assert!(run(&raw_disk(true, 1), RAW / 3) >= RAW / 3);
    assert!(run(&raw_disk(false, 3), RAW / 3) >= RAW / 3);
}

const SOME: &[(u64, u64, &str)] = &[(0, 40 << 10, ""), (64 << 10, 4096, ""), (80 << 10, 8192, "")];
const PACKED: &[(u64, u64, &str)] =
    &[(0, 4096, "-c"), (4096, 4096, "-c"), (16384, 4096, "-c"), (20480, 4096, "-c"), (32768, 4096, "")];
/// Wide counts in small blocks: a block for 32 KiB, a table's cluster for 2 MiB.
const WIDE: &str = "cluster_size=512,refcount_bits=64";
/// All but six of the clusters that a table's first cluster covers are used.
const MUCH: &[(u64, u64, &str)] = &[(0, 1980 << 10, "")];
const SUBS: &str = "cluster_size=16384,extended_l2=on";
const LUKS: &str = "cluster_size=4096,encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
const FOUR: Start = Start { words: "cluster_size=4096", cluster: 4096, size: 192 << 10, written: SOME, ..EMPTY };
/// Clusters of four blocks, and all their zeroes by `fallocate`.
const NOTED: Start = Start {
    words: "cluster_size=16384",
    cluster: 16384,
    size: 256 << 10,
    cow: Cow::Explicit,
    zeros: Zeros::Fallocate,
    written: SOME,
    ..EMPTY
};
const PARTS: Start = Start { words: SUBS, cluster: 16384, size: 256 << 10, written: SOME, ..EMPTY };

cases! {
    many_small_tables, 550: EMPTY;
    data_in_place_and_new, 370: FOUR;
    large_clusters, 180: Start { words: "cluster_size=65536", cluster: 65536, size: 1 << 20, ..FOUR };
    subclusters, 370: PARTS;
    lazy_refcounts, 180:
        Start { words: "cluster_size=1024,lazy_refcounts=on", cluster: 1024, written: SOME, ..EMPTY };
    refcounts_of_1_bit, 180:
        Start { words: "cluster_size=1024,refcount_bits=1", cluster: 1024, cow: Cow::Explicit, ..EMPTY };
    refcounts_of_2_bits, 180:
        Start { words: "cluster_size=512,refcount_bits=2", snapshots: Snapshots::Qemu, written: SOME, ..EMPTY };
    refcounts_of_4_bits, 180:
        Start { words: "cluster_size=1024,refcount_bits=4", cluster: 1024, snapshots: Snapshots::Editor, written: SOME, ..EMPTY };
    refcounts_of_8_bits, 180: Start { words: "cluster_size=512,refcount_bits=8", ..EMPTY };
    refcounts_of_32_bits, 180: Start { words: "cluster_size=512,refcount_bits=32", written: SOME, ..EMPTY };
    refcounts_of_64_bits, 180: Start { words: WIDE, size: 192 << 10, written: SOME, ..EMPTY };
    a_refcount_table_that_moves, 150: Start { words: WIDE, size: 2400 << 10, written: MUCH, ..EMPTY };
    the_old_version, 240:
        Start { words: "compat=0.10,cluster_size=2048", cluster: 2048, cow: Cow::Unallocated, resize: true, ..EMPTY };
    zeroes_by_fallocate, 310: NOTED;
    zeroes_by_fallocate_where_they_are_needed, 180: Start { cow: Cow::ZeroAware, handles: 2, ..NOTED };
    zeroes_by_fallocate_in_a_data_file, 180: Start { cow: Cow::ZeroAware, data: Data::External, backing: Backing::Raw, ..NOTED };
    zeroes_by_fallocate_with_snapshots, 180: Start { snapshots: Snapshots::Editor, backing: Backing::Chain, ..NOTED };
    zeroes_by_fallocate_on_a_failing_medium, 180: Start { trouble: Trouble::Errors, busy: true, ..NOTED };
    zeroes_by_fallocate_on_a_full_medium, 180: Start { trouble: Trouble::Full, ..NOTED };
    over_a_raw_file, 310: Start { backing: Backing::Raw, written: &[], ..FOUR };
    over_a_chain, 310: Start { backing: Backing::Chain, ..FOUR };
    subclusters_over_a_chain, 240: Start { backing: Backing::Chain, written: &[], ..PARTS };
    over_zlib, 240: Start { size: 96 << 10, written: PACKED, ..FOUR };
    over_zstd, 240: Start { words: "cluster_size=4096,compression_type=zstd", size: 96 << 10, written: PACKED, ..FOUR };
    shared_with_a_snapshot, 310:
        Start { words: "cluster_size=1024", cluster: 1024, snapshots: Snapshots::Qemu, written: SOME, ..EMPTY };
    shared_with_snapshots_by_the_editor, 310: Start { snapshots: Snapshots::Editor, ..FOUR };
    subclusters_shared_with_snapshots, 240: Start { snapshots: Snapshots::Editor, ..PARTS };
    compressed_shared_with_snapshots, 240:
        Start { size: 96 << 10, written: PACKED, snapshots: Snapshots::Editor, backing: Backing::Chain, ..FOUR };
    encrypted, 60: Start { words: LUKS, key: Some("sesame"), written: &[], ..FOUR };
    an_external_data_file, 310: Start { data: Data::External, ..FOUR };
    an_external_data_file_with_subclusters, 180: Start { data: Data::External, backing: Backing::Raw, ..PARTS };
    a_raw_external_data_file, 310: Start { data: Data::ExternalRaw, resize: true, ..FOUR };
    resized_while_used, 370: Start { resize: true, ..EMPTY };
    resized_with_subclusters, 240: Start { resize: true, ..PARTS };
    resized_over_a_chain, 240: Start { resize: true, backing: Backing::Chain, ..FOUR };
    resized_with_snapshots, 240: Start { resize: true, snapshots: Snapshots::Editor, ..FOUR };
    resized_with_a_data_file, 180: Start { resize: true, data: Data::External, ..FOUR };
    two_handles, 370: Start { handles: 2, ..EMPTY };
    three_handles_over_a_chain, 310: Start { handles: 3, backing: Backing::Chain, ..FOUR };
    four_handles_with_subclusters, 240: Start { handles: 4, snapshots: Snapshots::Editor, ..PARTS };
    flushes_upon_flushes, 400: Start { busy: true, ..EMPTY };
    flushes_upon_flushes_on_three_handles, 400: Start { busy: true, handles: 3, ..EMPTY };
    handles_and_a_data_file, 180: Start { handles: 3, data: Data::External, ..FOUR };
    a_full_medium, 310: Start { trouble: Trouble::Full, ..EMPTY };
    a_full_medium_over_a_chain, 240: Start { trouble: Trouble::Full, backing: Backing::Chain, ..FOUR };
    a_full_medium_with_snapshots, 240: Start { trouble: Trouble::Full, snapshots: Snapshots::Editor, handles: 2, ..PARTS };
    a_failing_medium, 310: Start { trouble: Trouble::Errors, busy: true, ..EMPTY };
    a_failing_medium_with_snapshots, 240: Start { trouble: Trouble::Errors, busy: true, snapshots: Snapshots::Editor, ..FOUR };
}

/// A refcount table moves seldom: here soon, and the power is cut many times between the header's write that names the new
/// one and the end of the cycle.
#[test]
fn a_refcount_table_that_moves_now() {
    let start = Start { words: WIDE, size: 2400 << 10, written: MUCH, ..EMPTY };
    with_kind(&start, |kind, _| {
        let mut cuts = 0;
        for seed in 1..40 {
            cuts += power::cut_where_a_table_moves(kind, seed, 12).unwrap_or_else(|e| panic!("{e}"));
            if cuts >= 400 {
                break;
            }
        }
        assert!(cuts >= 300, "{cuts} cuts: no table moves");
        println!("{cuts} cuts");
    });
}

/// The tests above can fail: on hosts that do not keep their word about syncs the same cuts leave damage or lose data.
#[test]
fn a_host_that_lies_about_syncs_is_found_out() {
    for start in [EMPTY, FOUR, PARTS, Start { data: Data::External, ..FOUR }, Start { handles: 3, ..FOUR }] {
        with_kind(&start, |kind, _| {
            for host in [Host::Deaf, Host::HardOfHearing, Host::Late] {
                let found = (1..30).find_map(|seed| Some((seed, cut_everywhere(kind, seed, 3, host).err()?)));
                let (seed, why) = found.unwrap_or_else(|| panic!("{}: nobody minds {host:?}", start.words));
                println!("{}, {host:?}: history {seed}: {}", start.words, why.lines().next().unwrap_or_default());
            }
        });
    }
}
