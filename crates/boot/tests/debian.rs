// SPDX-License-Identifier: Apache-2.0
//! Loads the kernels installed on this machine and compares what lies in guest memory with what other tools say.
//! Skips, saying so, where there is no kernel or no `lz4`.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use base::{Gpa, Gsi};
use boot::{Decompress, Ecam, Entry, Guest, Platform, PmPorts, Serial, Source, load};
use mem::GuestRam;

fn platform() -> Platform {
    Platform {
        apic_ids: vec![0],
        lapic: Gpa(0xfee0_0000),
        ioapic: Gpa(0xfec0_0000),
        ecam: Some(Ecam { base: Gpa(0xe000_0000), buses: 1 }),
        conf1: false,
        pci_window32: (Gpa(0xc000_0000), 0x2000_0000),
        pci_window64: (Gpa(0x40_0000_0000), 0x40_0000_0000),
        pci: boot::Pci { ports: Some((0x1000, 0xffff)), ..boot::Pci::default() },
        virtio_mmio: Vec::new(),
        vioapic: None,
        serial: Some(Serial { port: 0x3f8, gsi: Gsi(4) }),
        pvpanic_port: Some(0x505),
        pm: PmPorts { sleep_control: 0x600, sleep_status: 0x601, reset: 0x602, reset_value: 1, button: Gsi(5) },
        nodes: Vec::new(),
        to_plug: None,
    }
}

/// Installed kernels, newest name last.
fn kernels() -> Vec<PathBuf> {
    let dir = std::fs::read_dir("/boot").into_iter().flatten().flatten();
    let mut found: Vec<_> = dir
        .map(|e| e.path())
        .filter(|p| p.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"vmlinuz-")))
        .collect();
    found.sort();
    if found.is_empty() {
        println!("skipped: no kernel in /boot");
    }
    found
}

fn u32_at(b: &[u8], at: usize) -> usize {
    u32::from_le_bytes(b[at..at + 4].try_into().unwrap()) as usize
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().unwrap())
}

/// The inner ELF and relocation table, unpacked by the `lz4` program.
fn oracle(file: &[u8]) -> Option<Vec<u8>> {
    let start = (usize::from(file[0x1f1]) + 1) * 512 + u32_at(file, 0x248);
    let payload = &file[start..start + u32_at(file, 0x24c)];
    if !payload.starts_with(&[0x02, 0x21, 0x4c, 0x18]) {
        println!("skipped: not lz4");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let from = dir.path().join("payload.lz4");
    std::fs::write(&from, &payload[..payload.len() - 4]).unwrap();
    let out = Command::new("lz4").arg("-dc").arg(&from).stderr(Stdio::null()).output();
    let Ok(out) = out else {
        println!("skipped: no lz4 program");
        return None;
    };
    assert_eq!(out.stdout.len(), u32_at(payload, payload.len() - 4));
    Some(out.stdout)
}

fn run(ram: &GuestRam, path: &Path, decompress: Decompress, seed: Option<u64>) -> boot::Loaded {
    let kernel = Source::open("kernel", path).unwrap();
    let guest = Guest { kernel, initrd: None, cmdline: "console=hvc0", args: "", decompress, seed };
    load(ram, &guest, &platform()).unwrap()
}

/// Compares guest memory with `elf`'s segments, each word listed in `moved` being `shift` larger. Returns the relocations.
fn compare(ram: &GuestRam, elf: &[u8], at: u64, shift: u64) {
    let (phoff, phnum) = (u64_at(elf, 32) as usize, usize::from(elf[56]));
    let end = u64_at(elf, 40) as usize + usize::from(elf[60]) * 64;
    // Virtual address by low half -> image offset, as the decompressor does it: read from the end.
    let words: Vec<u32> = elf[end..].chunks(4).map(|c| u32::from_le_bytes(c.try_into().unwrap())).collect();
    let mut image = vec![0u8; 128 << 20];
    let mut extent = 0;
    for n in 0..phnum {
        let h = &elf[phoff + n * 56..][..56];
        if u32_at(h, 0) == 1 {
            let to = (u64_at(h, 24) - 0x100_0000) as usize;
            let (from, len) = (u64_at(h, 8) as usize, u64_at(h, 32) as usize);
            image[to..to + len].copy_from_slice(&elf[from..from + len]);
            extent = extent.max(to + len);
        }
    }
    if shift != 0 {
        let mut lists = words.rsplit(|w| *w == 0);
        let at = |w: u32| (w - 0x8000_0000 - 0x100_0000) as usize;
        for &w in lists.next().unwrap() {
            let v = (u32_at(&image, at(w)) as u32).wrapping_add(shift as u32);
            image[at(w)..at(w) + 4].copy_from_slice(&v.to_le_bytes());
        }
        for &w in lists.next().unwrap() {
            let v = (u32_at(&image, at(w)) as u32).wrapping_sub(shift as u32);
            image[at(w)..at(w) + 4].copy_from_slice(&v.to_le_bytes());
        }
        for &w in lists.next().unwrap() {
            let v = u64_at(&image, at(w)).wrapping_add(shift);
            image[at(w)..at(w) + 8].copy_from_slice(&v.to_le_bytes());
        }
    }
    let mut got = vec![0; extent];
    ram.read_bytes(Gpa(at), &mut got).unwrap();
    if let Some(bad) = got.iter().zip(&image).position(|(a, b)| a != b) {
        panic!("guest memory differs from the oracle at image offset {bad:#x}");
    }
}

#[test]
fn unpacked_kernels_equal_what_lz4_and_the_headers_say() {
    for path in kernels() {
        let file = std::fs::read(&path).unwrap();
        let Some(elf) = oracle(&file) else { continue };
        let entry = u64_at(&elf, 24);
        let ram = GuestRam::anonymous(&mem::ranges(512 << 20)).unwrap();
        let loaded = run(&ram, &path, Decompress::Monitor, None);
        assert_eq!(loaded.how, "bzImage, lz4, unpacked by tare, KASLR off");
        assert!(matches!(loaded.entry, Entry::Linux64 { rip, .. } if rip.0 == entry));
        compare(&ram, &elf, 0x100_0000, 0);
        for seed in [1, 2] {
            let ram = GuestRam::anonymous(&mem::ranges(512 << 20)).unwrap();
            let loaded = run(&ram, &path, Decompress::Monitor, Some(seed));
            assert_eq!(loaded.how, "bzImage, lz4, unpacked by tare, KASLR on");
            let Entry::Linux64 { rip, .. } = loaded.entry else { panic!("{loaded:?}") };
            assert_eq!(rip.0 - loaded.kernel.0.0, entry - 0x100_0000);
            // The shift is not reported; the boot CPU's GOT-free head tells: take it from a relocated word.
            let end = u64_at(&elf, 40) as usize + usize::from(elf[60]) * 64;
            let first = u32_at(&elf, end + 4) as u64 - 0x8000_0000 - 0x100_0000;
            let before = {
                let off = file_offset(&elf, 0x100_0000 + first);
                u64_at(&elf, off)
            };
            let after: u64 = ram.read(Gpa(loaded.kernel.0.0 + first)).unwrap();
            let shift = after.wrapping_sub(before);
            assert!(shift != 0 && shift.is_multiple_of(2 << 20) && shift < 1 << 30, "{shift:#x}");
            compare(&ram, &elf, loaded.kernel.0.0, shift);
        }
    }
}

fn file_offset(elf: &[u8], paddr: u64) -> usize {
    for n in 0..usize::from(elf[56]) {
        let h = &elf[64 + n * 56..][..56];
        let (at, len) = (u64_at(h, 24), u64_at(h, 32));
        if u32_at(h, 0) == 1 && paddr >= at && paddr < at + len {
            return (paddr - at + u64_at(h, 8)) as usize;
        }
    }
    panic!("{paddr:#x} is in no segment");
}

#[test]
fn the_guest_path_copies_the_protected_mode_part() {
    for path in kernels() {
        let file = std::fs::read(&path).unwrap();
        let ram = GuestRam::anonymous(&mem::ranges(256 << 20)).unwrap();
        let loaded = run(&ram, &path, Decompress::Guest, Some(1));
        let code = (usize::from(file[0x1f1]) + 1) * 512;
        let len = u32_at(&file, 0x1f4) * 16;
        let mut got = vec![0; len];
        ram.read_bytes(Gpa(0x100_0000), &mut got).unwrap();
        assert!(got == file[code..code + len], "protected-mode part differs");
        let Entry::Linux64 { rip, rsi, tables } = loaded.entry else { panic!("{loaded:?}") };
        assert_eq!((rip, rsi), (Gpa(0x100_0200), Gpa(0x7000)));
        assert_eq!(tables.mapped, 1 << 30);
        let mut page = vec![0; 4096];
        ram.read_bytes(rsi, &mut page).unwrap();
        let end = 0x202 + usize::from(file[0x201]);
        for at in (0x1f1..end).filter(|at| !matches!(at, 0x210 | 0x211 | 0x218..=0x21f | 0x228..=0x22b)) {
            assert_eq!(page[at], file[at], "setup header byte {at:#x}");
        }
    }
}

#[test]
fn too_little_memory_is_said_with_numbers() {
    for path in kernels() {
        let kernel = Source::open("kernel", &path).unwrap();
        let ram = GuestRam::anonymous(&mem::ranges(48 << 20)).unwrap();
        let guest = Guest { kernel, initrd: None, cmdline: "", args: "", decompress: Decompress::Monitor, seed: None };
        let err = load(&ram, &guest, &platform()).unwrap_err().to_string();
        assert!(err.contains("--memory") && err.contains("50331648"), "{err}");
    }
}
