// SPDX-License-Identifier: Apache-2.0
//! Tests of the header: round trips, hostile fields, QEMU's own images.

use super::super::extensions::FEATURE_NAMES;
use super::*;
use proptest::prelude::*;

fn sample() -> Header {
    Header {
        version: 3,
        cluster_bits: 16,
        size: 1 << 30,
        crypt: Crypt::None,
        l1: Table { offset: 0x30000, count: 2 },
        refcount_table: Table { offset: 0x10000, count: 1 },
        snapshots: Table::default(),
        features: Features::default(),
        width: Width::DEFAULT,
        compression: Compression::Zlib,
        unknown_fields: Vec::new(),
        backing: None,
        extensions: Extensions::default(),
    }
}

/// `parse` fills in the names it finds.
fn named(mut header: Header) -> Header {
    if header.version >= 3 {
        header.extensions.feature_names = FEATURE_NAMES.iter().map(|(k, b, n)| (*k, *b, (*n).to_owned())).collect();
    }
    header
}

fn broken(change: impl FnOnce(&mut [u8])) -> String {
    let mut bytes = sample().to_cluster().unwrap();
    change(&mut bytes);
    Header::parse(&bytes).unwrap_err().to_string()
}

fn put32(bytes: &mut [u8], at: usize, v: u32) {
    bytes[at..at + 4].copy_from_slice(&v.to_be_bytes());
}

fn put64(bytes: &mut [u8], at: usize, v: u64) {
    bytes[at..at + 8].copy_from_slice(&v.to_be_bytes());
}

#[test]
fn hostile_fields_are_refused() {
    for (at, value, expect) in [
        (0, 0, "not a qcow2 image"),
        (4, 4, "qcow2 version 4"),
        (4, 1, "qcow2 version 1"),
        (20, 8, "clusters of 2^8"),
        (20, 22, "clusters of 2^22"),
        (20, u32::MAX, "clusters of 2^4294967295"),
        (32, 3, "encryption method 3"),
        (32, 2, "without a LUKS header"),
        (36, 1, "1 entries"),
        (36, u32::MAX, "L1 table of 34359738360 bytes"),
        (44, 0x30200, "not at a cluster's start"),
        (40, 0x8000_0000, "past any file's end"),
        (56, 129, "refcount table of 8454144 bytes"),
        (60, 65_537, "65537 snapshots"),
        (24, 0x8000_0000, "a disk of"),
        (24, 0x1000_0000, "its L1 table has 2 entries"),
        (96, 7, "refcounts of 2^7 bits"),
        (100, 96, "a header of 96 bytes"),
        (100, 108, "a header of 108 bytes"),
        (100, 0x0001_0008, "a header of 65544 bytes"),
        (112 + 4, 0x0001_0000, "is cut off"),
    ] {
        let said = broken(|b| put32(b, at, value));
        assert!(said.contains(expect), "{at}: {said}");
    }
    let said = broken(|b| put64(b, 48, u64::MAX << 16));
    assert!(said.contains("past any file's end"), "{said}");
    let said = broken(|b| b[79] = 0x08);
    assert!(said.contains("compression type 0 does not agree"), "{said}");
    let said = broken(|b| (b[79], b[104]) = (0x08, 2));
    assert!(said.contains("compression type 2"), "{said}");
    let said = broken(|b| b[104] = 1);
    assert!(said.contains("does not agree"), "{said}");
    let said = broken(|b| (b[8..16].copy_from_slice(&0xff00u64.to_be_bytes()), put32(b, 16, 1000)).1);
    assert!(said.contains("outside the header's cluster"), "{said}");
    let said = broken(|b| (put64(b, 8, 1024), put32(b, 16, 1024)).1);
    assert!(said.contains("1024 bytes; 1023"), "{said}");
    assert!(Header::parse(&sample().to_cluster().unwrap()[..100]).is_err(), "cut off");
    assert!(Header::parse(b"QFI\xfb").is_err());
}

#[test]
fn unknown_features_are_named() {
    let mut header = sample();
    header.features.incompatible = 1 << 5 | 1 << 63;
    let bytes = header.to_cluster().unwrap();
    let said = Header::parse(&bytes).unwrap_err().to_string();
    assert!(said.ends_with("unnamed (bit 5), unnamed (bit 63)"), "{said}");
    let mut bytes = bytes;
    let at = bytes.windows(9).position(|w| w == b"dirty bit").unwrap() - 2;
    bytes[at..at + 14].copy_from_slice(b"\x00\x05moon\nphase\0\0");
    let said = Header::parse(&bytes).unwrap_err().to_string();
    assert!(said.ends_with("\"moonphase\" (bit 5), unnamed (bit 63)"), "{said}");
}

#[test]
fn extended_entries_want_large_clusters() {
    let mut header = sample();
    (header.features.incompatible, header.l1.count) = (incompatible::EXTENDED_L2, 4);
    assert!(Header::parse(&header.to_cluster().unwrap()).is_ok());
    (header.cluster_bits, header.size) = (13, 4 << 20);
    assert!(Header::parse(&header.to_cluster().unwrap()).unwrap_err().to_string().contains("at least 16384"));
}

#[test]
fn tables_may_not_overlap() {
    let check = |change: &dyn Fn(&mut Header)| {
        let mut header = sample();
        change(&mut header);
        header.check_layout(0x100_0000).map_err(|e| e.to_string())
    };
    assert_eq!(check(&|_| ()), Ok(()));
    let said = check(&|h| h.l1.offset = 0).unwrap_err();
    assert!(said.contains("the header at 0x0") || said.contains("overlaps"), "{said}");
    let said = check(&|h| h.l1.offset = 0x10000).unwrap_err();
    assert!(said.contains("overlaps"), "{said}");
    let said = check(&|h| h.refcount_table.count = 3).unwrap_err();
    assert!(said.contains("the L1 table at 0x30000 overlaps the refcount table at 0x10000"), "{said}");
    let said = check(&|h| h.refcount_table.count = 0).unwrap_err();
    assert!(said.contains("no refcount table"), "{said}");
    let said = check(&|h| h.snapshots = Table { offset: 0x30000, count: 1 }).unwrap_err();
    assert!(said.contains("overlaps"), "{said}");
    let said = check(&|h| h.l1.offset = 0x200_0000).unwrap_err();
    assert!(said.contains("the file ends at 0x1000000"), "{said}");
}

#[test]
fn names_make_way_in_small_clusters() {
    let mut header = sample();
    (header.cluster_bits, header.size, header.l1.count) = (9, 1 << 20, 32);
    assert_eq!(Header::parse(&header.to_cluster().unwrap()).unwrap(), named(header.clone()));
    header.backing = Some(OsString::from("base.qcow2"));
    assert_eq!(Header::parse(&header.to_cluster().unwrap()).unwrap(), header, "no feature names");
    header.backing = Some(OsString::from("x".repeat(500)));
    assert!(header.to_cluster().unwrap_err().to_string().contains("use larger clusters or shorter names"));
}

#[test]
fn patches_are_the_header_bytes() {
    let bytes = sample().to_cluster().unwrap();
    let h = sample();
    for (at, patch) in [
        (h.patch_l1().0, h.patch_l1().1.to_vec()),
        (h.patch_refcount_table().0, h.patch_refcount_table().1.to_vec()),
        (h.patch_snapshots().0, h.patch_snapshots().1.to_vec()),
        (h.patch_features().0, h.patch_features().1.to_vec()),
        (h.patch_size().0, h.patch_size().1.to_vec()),
    ] {
        assert_eq!(bytes[at as usize..][..patch.len()], patch);
    }
}

#[test]
fn qemu_images_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.qcow2");
    let make = |options: &str, backing: bool| {
        let mut command = std::process::Command::new("qemu-img");
        command.current_dir(dir.path()).args(["create", "-q", "-f", "qcow2", "-o", options]);
        if backing {
            command.args(["-u", "-b", "no/such base", "-F", "raw"]);
        }
        match command.args(["a.qcow2", "10G"]).status() {
            Ok(status) => assert!(status.success()),
            Err(_) => return None,
        }
        Some(std::fs::read(&path).unwrap())
    };
    let Some(bytes) = make("compat=0.10,cluster_size=4k", true) else {
        println!("skipped: no qemu-img here");
        return;
    };
    let old = Header::parse(&bytes).unwrap();
    assert_eq!((old.version, old.cluster_bits, old.size, old.width.bits()), (2, 12, 10 << 30, 16));
    assert_eq!(
        (old.backing.as_deref(), old.extensions.backing_format.as_deref()),
        (Some("no/such base".as_ref()), Some("raw"))
    );
    old.check_layout(bytes.len() as u64).unwrap();
    let bytes = make("extended_l2=on,compression_type=zstd,lazy_refcounts=on,refcount_bits=1", false).unwrap();
    let new = Header::parse(&bytes).unwrap();
    assert_eq!((new.compression, new.width.bits(), new.lazy_refcounts()), (Compression::Zstd, 1, true));
    assert_eq!(new.layout(), Layout { cluster_bits: 16, extended: true, data_file: false, zero_flag: true });
    new.check_layout(bytes.len() as u64).unwrap();
    assert_eq!(new.to_cluster().unwrap(), bytes[..0x10000], "written as QEMU writes it");
    let bytes = make("data_file=d.raw,data_file_raw=on", false).unwrap();
    let split = Header::parse(&bytes).unwrap();
    assert_eq!(split.extensions.data_file.as_deref(), Some("d.raw".as_ref()));
    assert!(split.raw_data_file());
    assert_eq!(split.to_cluster().unwrap(), bytes[..0x10000]);
}

fn headers() -> impl Strategy<Value = Header> {
    let numbers = (any::<bool>(), 9u32..=21, 0u64..1 << 33, 0u32..=6, any::<u64>(), any::<bool>());
    let names = (
        prop::option::of("[ -~]{1,40}"),
        prop::option::of("[a-z0-9]{1,15}"),
        prop::collection::vec((1u32..100, prop::collection::vec(any::<u8>(), 0..20)), 0..3),
        prop::collection::vec(any::<u8>(), 0..3),
    );
    (numbers, names).prop_map(|((v3, bits, size, order, features, zstd), (backing, format, other, unknown))| {
        let mut h = sample();
        h.version = if v3 { 3 } else { 2 };
        h.cluster_bits = if v3 { bits } else { bits.max(11) };
        h.backing = backing.map(OsString::from);
        h.extensions.backing_format = format;
        h.extensions.other = other;
        if v3 {
            let known = incompatible::DIRTY | incompatible::CORRUPT;
            h.features = Features { incompatible: features & known, compatible: features, autoclear: features & !3 };
            h.width = Width::from_order(order).unwrap();
            h.unknown_fields = unknown.iter().flat_map(|b| [*b; 8]).collect();
            if zstd {
                (h.compression, h.features.incompatible) = (Compression::Zstd, h.features.incompatible | 8);
            }
        }
        h.size = size >> (21 - h.cluster_bits.min(21));
        h.l1 = Table { offset: 1 << 24, count: h.layout().l1_entries(h.size) as u32 };
        h.refcount_table = Table { offset: 1 << 25, count: 1 };
        h
    })
}

proptest! {
    #[test]
    fn what_is_written_is_read(header in headers()) {
        let Ok(bytes) = header.to_cluster() else { return Ok(()) };
        prop_assert_eq!(bytes.len() as u64, header.cluster_size());
        let mut read = Header::parse(&bytes).unwrap();
        read.extensions.feature_names.clear();
        prop_assert_eq!(&read, &header);
        prop_assert!(header.check_layout(1 << 30).is_ok());
    }

    /// A header with bytes changed at random is read or refused, never a panic, and what is read can be written.
    #[test]
    fn torn_headers(header in headers(), changes in prop::collection::vec((0usize..600, any::<u8>()), 1..20), cut in 0usize..2000) {
        let Ok(mut bytes) = header.to_cluster() else { return Ok(()) };
        for (at, value) in changes {
            let len = bytes.len();
            bytes[at % len] = value;
        }
        let _ = Header::parse(&bytes[..cut.min(bytes.len())]);
        if let Ok(read) = Header::parse(&bytes) {
            let _ = read.check_layout(1 << 30);
            if let Ok(again) = read.to_cluster() {
                let mut back = Header::parse(&again).unwrap();
                let mut read = read;
                read.extensions.feature_names.clear();
                back.extensions.feature_names.clear();
                read.extensions.stale_bitmaps = false;
                prop_assert_eq!(back, read);
            }
        }
    }
}
