// SPDX-License-Identifier: Apache-2.0
//! What hostile headers and tables claim, one field each, and the words with which they are refused. Used by `main.rs`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

/// A word of the header, or of a table, by its offset.
pub fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

pub fn long(v: u64) -> Vec<u8> {
    v.to_be_bytes().to_vec()
}

pub fn word(v: u32) -> Vec<u8> {
    v.to_be_bytes().to_vec()
}

/// What is changed, at which byte of the header, to what; and what is said of it.
pub type Claim = (&'static str, usize, Vec<u8>, &'static str);

pub fn claims_of_size(good: &[u8]) -> Vec<Claim> {
    vec![
        ("no magic", 0, word(0), "is not a qcow2 image: its first four bytes are not QFI\\xfb; give the right format="),
        ("version 1", 4, word(1), "cannot be used: qcow2 version 1; versions 2 and 3 are known"),
        ("version 4", 4, word(4), "cannot be used: qcow2 version 4; versions 2 and 3 are known"),
        (
            "clusters of 256 bytes",
            20,
            word(8),
            "cannot be used: clusters of 2^8 bytes; 512 bytes to 2 MiB are possible",
        ),
        ("clusters of 4 MiB", 20, word(22), "cannot be used: clusters of 2^22 bytes; 512 bytes to 2 MiB are possible"),
        (
            "clusters of 2^99 bytes",
            20,
            word(99),
            "cannot be used: clusters of 2^99 bytes; 512 bytes to 2 MiB are possible",
        ),
        (
            "exabytes with a small L1 table",
            24,
            long(1 << 60),
            "is damaged: its L1 table has 1 entries, its 1152921504606846976 bytes need 2147483648; `tare img check` tells more",
        ),
        ("2^64 - 1 bytes", 24, long(u64::MAX), "cannot be used: a disk of 18446744073709551615 bytes"),
        (
            "a petabyte with a small L1 table",
            24,
            long(1 << 50),
            "is damaged: its L1 table has 1 entries, its 1125899906842624 bytes need 2097152; `tare img check` tells more",
        ),
        ("unknown encryption", 32, word(7), "cannot be used: encryption method 7; AES (1) and LUKS (2) are known"),
        (
            "an L1 table of 2^32 entries",
            36,
            word(u32::MAX),
            "cannot be used: an L1 table of 34359738360 bytes; the limit is 32 MiB",
        ),
        (
            "an L1 table off its cluster",
            40,
            long(0x30001),
            "is damaged: the L1 table at 0x30001, not at a cluster's start; `tare img check` tells more",
        ),
        (
            "an L1 table at the end of everything",
            40,
            long(u64::MAX - 0xffff),
            "is damaged: the L1 table at 0xffffffffffff0000, past any file's end; `tare img check` tells more",
        ),
        (
            "an L1 table in the header",
            40,
            long(0),
            "is damaged: the header at 0x0 overlaps the L1 table at 0x0; `tare img check` tells more",
        ),
        (
            "an L1 table in the refcount table",
            40,
            long(be64(good, 48)),
            "is damaged: the refcount table at 0x10000 overlaps the L1 table at 0x10000; `tare img check` tells more",
        ),
    ]
}

pub fn claims_of_tables() -> Vec<Claim> {
    vec![
        (
            "a refcount table off its cluster",
            48,
            long(0x10001),
            "is damaged: the refcount table at 0x10001, not at a cluster's start; `tare img check` tells more",
        ),
        (
            "a refcount table in the header",
            48,
            long(0),
            "is damaged: the header at 0x0 overlaps the refcount table at 0x0; `tare img check` tells more",
        ),
        (
            "a refcount table of 2^32 clusters",
            56,
            word(u32::MAX),
            "cannot be used: a refcount table of 281474976645120 bytes; the limit is 8 MiB",
        ),
        ("no refcount table", 56, word(0), "is damaged: it has no refcount table; `tare img check` tells more"),
        ("2^32 snapshots", 60, word(u32::MAX), "cannot be used: 4294967295 snapshots; the limit is 65536"),
        (
            "a snapshot table in the header",
            60,
            [word(1), long(0)].concat(),
            "is damaged: the header at 0x0 overlaps the snapshot table at 0x0; `tare img check` tells more",
        ),
        (
            "an unknown incompatible feature",
            72,
            long(1 << 40),
            "cannot be used: it needs features unknown to this version: unnamed (bit 40)",
        ),
        (
            "refcounts of 2^40 bits",
            96,
            word(40),
            "is damaged: refcounts of 2^40 bits, 64 at most are possible; `tare img check` tells more",
        ),
        (
            "a header of no length",
            100,
            word(0),
            "is damaged: a header of 0 bytes, which does not fit its cluster; `tare img check` tells more",
        ),
        (
            "a header of 2^32 bytes",
            100,
            word(u32::MAX),
            "is damaged: a header of 4294967295 bytes, which does not fit its cluster; `tare img check` tells more",
        ),
        (
            "a backing file name past the cluster",
            8,
            [long(65000), word(1023)].concat(),
            "is damaged: a backing file name of 1023 bytes at 0xfde8, outside the header's cluster; `tare img check` tells more",
        ),
        (
            "a backing file name of 2^32 bytes",
            8,
            [long(200), word(u32::MAX)].concat(),
            "is damaged: a backing file name of 4294967295 bytes at 0xc8, outside the header's cluster; `tare img check` tells more",
        ),
        (
            "an unknown compression",
            72,
            [long(8), long(0), long(0), word(4), word(112), vec![9]].concat(),
            "cannot be used: compression type 9; zlib (0) and zstd (1) are known",
        ),
    ]
}
