// SPDX-License-Identifier: Apache-2.0
//! Unpacked initrds against the bytes that the `zstd` program packed. Skips, saying so, where there is no such program.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use super::prefix::tests::member;
use super::*;
use crate::unpack::tests::Dice;

const RAM: u64 = 32 << 20;

fn ram() -> GuestRam {
    GuestRam::anonymous(&[(Gpa(0), RAM)]).unwrap()
}

fn put(ram: &GuestRam, bytes: &[u8]) -> Result<Option<Placed>, BootError> {
    let room = Room { floor: 0x10_0000, ram_end: RAM, max: 0x7fff_ffff };
    load(ram, &Source::memory("initrd", Path::new("i.img"), bytes), room, Decompress::Monitor)
}

/// `plain` packed by the `zstd` program, its size known to it or not.
fn pack(plain: &[u8], sized: bool, flags: &[&str]) -> Option<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("plain");
    std::fs::write(&file, plain).unwrap();
    let mut zstd = Command::new("zstd");
    zstd.arg("-qc").args(flags).stdout(Stdio::piped());
    if sized {
        zstd.arg(&file);
    } else {
        zstd.stdin(Stdio::piped());
    }
    let Ok(mut child) = zstd.spawn() else {
        println!("skipped: no zstd program");
        return None;
    };
    let (stdin, data) = (child.stdin.take(), plain.to_vec());
    let feed = std::thread::spawn(move || stdin.map(|mut to| to.write_all(&data)));
    let out = child.wait_with_output().unwrap();
    let _ = feed.join();
    assert!(out.status.success());
    Some(out.stdout)
}

/// An archive of runs, words and noise, about `len` bytes long.
fn archive(dice: &mut Dice, len: usize) -> Vec<u8> {
    let mut out = Vec::new();
    while out.len() < len {
        let mut data = Vec::new();
        for _ in 0..dice.below(40) {
            let n = dice.below(9000);
            match dice.below(3) {
                0 => data.resize(data.len() + n, dice.below(2) as u8),
                1 => (0..n / 8).for_each(|_| data.extend_from_slice(&[b"modprobe", b"kernel/x"][dice.below(2)][..])),
                _ => data.extend((0..n).map(|_| dice.below(256) as u8)),
            }
        }
        out.extend_from_slice(&member(&format!("lib/{}", out.len()), &data));
    }
    out.extend_from_slice(&member("TRAILER!!!", b""));
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

fn assert_all_zero(ram: &GuestRam) {
    let mut all = vec![0; RAM as usize];
    ram.read_bytes(Gpa(0), &mut all).unwrap();
    assert!(all == vec![0; RAM as usize], "byte {:?}", all.iter().position(|b| *b != 0));
}

/// `packed` arrives as `plain`, high in RAM, and nothing else is written.
fn assert_unpacks(packed: &[u8], plain: &[u8]) {
    let ram = ram();
    let placed = put(&ram, packed).unwrap().unwrap();
    assert_eq!(placed.how, "initrd, zstd, unpacked by tare");
    assert_eq!((placed.len, placed.at.0 % PAGE), (plain.len() as u64, 0));
    let mut got = vec![0; plain.len()];
    ram.read_bytes(placed.at, &mut got).unwrap();
    assert!(got == plain, "{:?}", got.iter().zip(plain).position(|(a, b)| a != b));
    got.fill(0);
    ram.write_bytes(placed.at, &got).unwrap();
    assert_all_zero(&ram);
}

/// `packed` arrives as it is, and nothing else is written.
fn assert_as_it_is(packed: &[u8], why: &str) {
    let ram = ram();
    let placed = put(&ram, packed).unwrap().unwrap();
    assert_eq!((placed.how, placed.len), (format!("initrd as it is ({why})"), packed.len() as u64));
    let mut got = vec![0; packed.len()];
    ram.read_bytes(placed.at, &mut got).unwrap();
    assert!(got == packed);
    got.fill(0);
    ram.write_bytes(placed.at, &got).unwrap();
    assert_all_zero(&ram);
}

#[test]
fn memory_holds_what_was_packed() {
    let mut dice = Dice(7);
    for (n, flags) in [&["-1"][..], &["-3", "--no-check"], &["-9"], &["-19"], &["--ultra", "-20", "--long=24"]]
        .into_iter()
        .enumerate()
    {
        let len = [100, 70_000, 1_500_000, 100_000, 300_000][n];
        let plain = archive(&mut dice, len);
        for sized in [true, false] {
            let Some(packed) = pack(&plain, sized, flags) else { return };
            assert_unpacks(&packed, &plain);
            assert_unpacks(&[&packed[..], &[0; 700]].concat(), &plain);
            let early = [member("kernel/x86/microcode/y.bin", &[5; 3000]), member("TRAILER!!!", b"")].concat();
            for pad in [0, 301] {
                let mut packed_all = early.clone();
                packed_all.resize(early.len() + pad, 0);
                let mut plain_all = packed_all.clone();
                plain_all.resize(plain_all.len().next_multiple_of(4), 0);
                packed_all.extend_from_slice(&packed);
                plain_all.extend_from_slice(&plain);
                assert_unpacks(&packed_all, &plain_all);
            }
        }
    }
}

#[test]
fn what_tare_does_not_unpack_arrives_as_it_is() {
    let plain = archive(&mut Dice(3), 200_000);
    assert_as_it_is(&plain, "no compressed part found");
    assert_as_it_is(&[0x1f, 0x8b, 8, 0, 1], "not zstd");
    let Some(packed) = pack(&plain, true, &["-3"]) else { return };
    assert_as_it_is(&packed.repeat(2), "more follows its zstd frame");
    assert_as_it_is(&pack(&[7; 5000], true, &[]).unwrap(), "no cpio archive in its zstd frame");
    assert_as_it_is(&packed[..packed.len() - 1], "its zstd frame cannot be decoded");
    let mut wide = packed.clone();
    (wide[4], wide[5]) = (wide[4] & !0x20, 0xff);
    let placed = put(&ram(), &wide).unwrap().unwrap();
    assert_eq!(placed.how, "initrd as it is (its zstd window is too large)");
}

#[test]
fn a_quarter_of_memory_is_the_limit() {
    let quarter = (RAM / 4) as usize;
    let mut plain = member("zeros", &vec![0; quarter - 200]);
    plain.resize(quarter, 0);
    for sized in [true, false] {
        let Some(packed) = pack(&plain, sized, &["-1"]) else { return };
        assert_unpacks(&packed, &plain);
        plain.push(0);
        let over = pack(&plain, sized, &["-1"]).unwrap();
        plain.pop();
        // Unknown, the size is taken for up to a block more than it is.
        let much = if sized { over } else { pack(&[&plain[..], &[0; 131_073]].concat(), false, &["-1"]).unwrap() };
        assert_as_it_is(&much, "unpacked it would fill more than a quarter of memory");
    }
}

#[test]
fn a_wrong_checksum_is_said_in_one_line() {
    let Some(mut packed) = pack(&archive(&mut Dice(5), 50_000), true, &["-3", "--check"]) else { return };
    let end = packed.len();
    packed[end - 1] ^= 1;
    let err = put(&ram(), &packed).unwrap_err().to_string();
    assert!(err.starts_with("initrd i.img is damaged: ") && err.contains("checksum"), "{err}");
}

#[test]
fn damage_never_panics_and_never_leaves_a_trace_below() {
    let (mut dice, ram) = (Dice(11), ram());
    let plain = archive(&mut dice, 150_000);
    for sized in [true, false] {
        let Some(packed) = pack(&plain, sized, &["-5", "--check"]) else { return };
        for round in 0..150 {
            let mut bytes = packed.clone();
            let span = if round % 3 == 0 { 40 } else { bytes.len() };
            for _ in 0..1 + dice.below(3) {
                bytes[dice.below(span)] = dice.below(256) as u8;
            }
            bytes.truncate(bytes.len() - [0, 0, dice.below(bytes.len())][dice.below(3)]);
            match put(&ram, &bytes) {
                Ok(Some(placed)) => {
                    assert!(placed.at.0 >= 0x10_0000 && placed.at.0 + placed.len <= RAM, "{placed:?}");
                    ram.write_bytes(placed.at, &vec![0; placed.len as usize]).unwrap();
                    if !placed.how.contains("unpacked by") {
                        // All that an attempt wrote is zero again.
                        let mut low = vec![0; plain.len() + (256 << 10)];
                        ram.read_bytes(Gpa(RAM - low.len() as u64), &mut low).unwrap();
                        assert!(low.iter().all(|b| *b == 0), "{placed:?}");
                    }
                }
                Ok(None) => assert!(bytes.is_empty()),
                Err(e) => {
                    assert!(e.to_string().contains("checksum"), "{e}");
                    ram.write_bytes(Gpa(RAM - (4 << 20)), &vec![0; 4 << 20]).unwrap();
                }
            }
        }
    }
}
