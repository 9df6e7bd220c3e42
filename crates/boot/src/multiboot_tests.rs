// SPDX-License-Identifier: Apache-2.0
//! Multiboot kernels that are right, and each way to be wrong. The hand-made files are samples for `fuzz`, too.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use super::*;
use crate::{Decompress, Entry, Guest, Loaded, Platform, load};

/// The three words of a header with `flags`.
fn header(flags: u32) -> [u32; 3] {
    [HEADER_MAGIC, flags, 0u32.wrapping_sub(HEADER_MAGIC).wrapping_sub(flags)]
}

fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// A 32-bit ELF file with one segment at `at`: the header, `code` where it starts, and `bss` zero bytes.
pub fn elf32(at: u32, code: &[u8], bss: u32) -> Vec<u8> {
    let start = 52 + 32;
    let len = 12 + code.len() as u32;
    let mut file = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x03\0".to_vec();
    file.extend(bytes(&[1, at + 12, 52, 0, 0, 52 | 32 << 16, 1, 0]));
    file.resize(52, 0);
    file.extend(bytes(&[1, start, at, at, len, len + bss, 7, 4]));
    file.extend(bytes(&header(3)));
    file.extend(code);
    file
}

/// A file of no format whose header, 16 bytes in, says that everything from byte 8 on goes to 1 MiB.
pub fn plain(code: &[u8], bss: u32) -> Vec<u8> {
    let load = 0x10_0000;
    let entry = load + 8 + 32;
    let end = entry + code.len() as u32;
    let mut file = vec![0xcc; 16];
    file.extend(bytes(&header(ADDRESSES)));
    file.extend(bytes(&[load + 8, load, end, end + bss, entry]));
    file.extend(code);
    file
}

fn ram() -> GuestRam {
    GuestRam::anonymous(&[(Gpa(0), 32 << 20)]).unwrap()
}

fn start(ram: &GuestRam, file: &[u8], initrd: Option<&[u8]>) -> Result<Loaded, BootError> {
    let platform: Platform = crate::platform::tests::platform();
    let guest = Guest {
        kernel: Source::memory("kernel", Path::new("dir/test.flat"), file),
        initrd: initrd.map(|bytes| Source::memory("initrd", Path::new("env"), bytes)),
        cmdline: "console=ttyS0",
        args: "one two",
        decompress: Decompress::Monitor,
        seed: None,
    };
    load(ram, &guest, &platform)
}

fn text(ram: &GuestRam, at: u32) -> String {
    let byte = |n| ram.read::<u8>(Gpa(u64::from(at) + n)).unwrap();
    (0..).map(byte).take_while(|b| *b != 0).map(char::from).collect()
}

#[test]
fn every_field_is_at_its_byte() {
    let ram = ram();
    let loaded = start(&ram, &elf32(0x40_0000, b"code", 100), Some(b"NR_CPUS=1\n")).unwrap();
    let Entry::Multiboot { rip, rbx, gdt, gdt_limit } = loaded.entry else { panic!("{loaded:?}") };
    assert_eq!((rip, loaded.kernel), (Gpa(0x40_000c), (Gpa(0x40_0000), 116)));
    let mut code = [0; 4];
    ram.read_bytes(rip, &mut code).unwrap();
    assert_eq!(&code, b"code");
    let word = |o: u64| ram.read::<u32>(Gpa(rbx.0 + o)).unwrap();
    assert_eq!((word(0), word(4), word(8)), (0x24d, 639, 31 << 10));
    assert_eq!(text(&ram, word(16)), "dir/test.flat one two", "and nothing that Linux is told");
    assert_eq!((word(20), text(&ram, word(64)).as_str()), (1, "tare"));
    let module = |o: u64| ram.read::<u32>(Gpa(u64::from(word(24)) + o)).unwrap();
    let (at, len) = loaded.initrd.unwrap();
    assert_eq!((u64::from(module(0)), u64::from(module(4)), len), (at.0, at.0 + 10, 10));
    assert_eq!((text(&ram, module(8)).as_str(), at.0 % 4096), ("env", 0));
    assert!(text(&ram, at.0 as u32).starts_with("NR_CPUS=1\n"));
    // Entries of 20 bytes after their size: low memory, the firmware's area, the rest, the configuration window.
    let entry = |n: u64| Gpa(u64::from(word(48)) + 24 * n);
    assert_eq!(word(44), 4 * 24);
    let fields = |n| (ram.read::<u32>(entry(n)).unwrap(), ram.read::<u64>(Gpa(entry(n).0 + 4)).unwrap());
    assert_eq!(
        [fields(0), fields(1), fields(2), fields(3)],
        [(20, 0), (20, 0x9_fc00), (20, 1 << 20), (20, 0xe000_0000)]
    );
    assert_eq!(ram.read::<u64>(Gpa(entry(2).0 + 12)).unwrap(), 31 << 20);
    assert_eq!([0, 1, 2].map(|n| ram.read::<u32>(Gpa(entry(n).0 + 20)).unwrap()), [1, 2, 1]);
    let flat = |n: u64| ram.read::<u64>(Gpa(gdt.0 + 8 * n)).unwrap();
    assert_eq!((gdt_limit, flat(1) >> 40 & 0xff, flat(2) >> 40 & 0xff), (23, 0x9b, 0x93));
}

#[test]
fn without_an_initrd_there_is_no_module() {
    let ram = ram();
    for initrd in [None, Some(&b""[..])] {
        let loaded = start(&ram, &plain(b"code", 0), initrd).unwrap();
        let Entry::Multiboot { rip, rbx, .. } = loaded.entry else { panic!("{loaded:?}") };
        assert_eq!((rip, loaded.initrd), (Gpa(0x10_0028), None));
        assert_eq!(ram.read::<u32>(Gpa(rbx.0 + 20)).unwrap(), 0);
    }
    assert_eq!(
        ram.read::<u64>(Gpa(0x10_0000)).unwrap(),
        0xcccc_cccc_cccc_cccc,
        "what is before the header comes along"
    );
}

#[test]
fn headers_are_found_where_they_may_be() {
    let found = |at: usize, flags: u32| {
        let mut file = vec![0; at];
        file.extend(bytes(&header(flags)));
        find(&file)
    };
    for at in [0, 4, 4096, 8180] {
        assert_eq!(found(at, 3), Some(Header { at, flags: 3 }));
    }
    assert_eq!((found(2, 3), found(8184, 3), found(9000, 3)), (None, None, None));
    let mut wrong = bytes(&header(3));
    wrong[4] = 2;
    assert_eq!(find(&wrong), None, "the sum is wrong");
}

/// Kernels below 1 MiB, as kvm-unit-tests has them, and what they are told out of their way.
#[test]
fn low_kernels_keep_their_memory() {
    let ram = ram();
    let told = |at: u32, bss: u32| {
        let loaded = start(&ram, &elf32(at, b"code", bss), None).unwrap();
        let Entry::Multiboot { gdt, .. } = loaded.entry else { panic!("{loaded:?}") };
        let (from, len) = loaded.kernel;
        assert!(gdt.0 + 4096 <= from.0 || gdt >= Gpa(from.0 + len), "{loaded:?}");
        gdt.0
    };
    assert_eq!(told(0x8000, 0x1_0000), 0x9_f000);
    assert_eq!(told(0, 100), 0x9_f000);
    assert_eq!(told(0x8000, 0x9_7bf0), 0x10_0000, "low memory is full to its last byte");
}

#[test]
fn each_contradiction_of_an_elf_file_is_named() {
    let says = |change: &dyn Fn(&mut Vec<u8>), word: &str| {
        let mut file = elf32(0x40_0000, &[0x90; 64], 100);
        change(&mut file);
        let err = start(&ram(), &file, None).unwrap_err().to_string();
        assert!(err.contains(word) && err.contains("dir/test.flat") && !err.contains('\n'), "{err} lacks {word}");
    };
    let put = |o: usize, v: u32| move |f: &mut Vec<u8>| f[o..o + 4].copy_from_slice(&v.to_le_bytes());
    let flags = |v: u32| move |f: &mut Vec<u8>| f[84..96].copy_from_slice(&bytes(&header(v)));
    says(&flags(7), "video mode");
    says(&flags(0x8), "features 0x8");
    says(&flags(0x8001), "features 0x8000");
    says(&put(64, 0x9_fbf0), "firmware's area from 0x9fc00");
    says(&|f| (put(64, 0x8_0000)(f), put(72, 0x10_0000)(f)).0, "firmware's area");
    says(&put(64, 0xf_0000), "firmware's area");
    says(&put(64, 0x1ff_ffff), "give more with --memory");
    says(&put(64, 0xffff_fff0), "outside the file or memory");
    says(&put(68, 4096), "outside the file or memory");
    says(&put(56, u32::MAX), "outside the file or memory");
    says(&put(24, 0x3f_ffff), "its entry 0x3fffff is not in what it loads");
    says(&put(24, 0x40_0000 + 76), "is not in what it loads");
    says(&put(28, 0xffff_fff0), "outside its first bytes");
    says(&put(52, 6), "nothing to load");
    says(&|f| f[5] = 2, "little-endian");
    says(&|f| f[18] = 40, "machine 40");
    says(&|f| f[4] = 2, "objcopy -O elf32-i386");
    says(&|f| f[0] = 0, "not an ELF file");
}

#[test]
fn overlapping_segments_are_refused() {
    // A second program header that is the first's copy; it needs room before the code.
    let one = elf32(0x40_0000, &[0x90; 64], 0);
    let mut file = one[..84].to_vec();
    file.extend(&one[52..84]);
    file.extend(&one[84..]);
    file[44] = 2;
    for at in [56, 88] {
        file[at..at + 4].copy_from_slice(&116u32.to_le_bytes());
    }
    let says = |file: &[u8]| start(&ram(), file, None).unwrap_err().to_string();
    assert!(says(&file).contains("two of its segments overlap"), "{}", says(&file));
    file[92..96].copy_from_slice(&0x8000u32.to_le_bytes());
    file[96..100].copy_from_slice(&0x8000u32.to_le_bytes());
    let loaded = start(&ram(), &file, None).unwrap();
    assert_eq!(loaded.kernel.0, Gpa(0x8000));
}

#[test]
fn each_contradiction_of_a_header_with_addresses_is_named() {
    let says = |field: usize, value: u32, word: &str| {
        let mut file = plain(&[0x90; 64], 100);
        file[16 + 4 * field..20 + 4 * field].copy_from_slice(&value.to_le_bytes());
        let err = start(&ram(), &file, None).unwrap_err().to_string();
        assert!(err.contains(word) && err.contains("dir/test.flat") && !err.contains('\n'), "{err} lacks {word}");
    };
    says(3, 0xf_fff8, "is before its load address 0x100000");
    says(4, 0x10_0009, "is before its load address 0x100009");
    says(4, 0xf_fff0, "is 24 bytes before the header");
    says(4, 0, "bytes before the header");
    says(5, 0xf_ffff, "load end 0xfffff is before");
    says(5, 0x20_0000, "cut short: what its multiboot header loads ends at byte");
    says(5, u32::MAX, "cut short");
    says(6, 0x10_0009, "bss end 0x100009 is before");
    says(6, 1, "bss end 0x1 is before");
    says(6, 0x300_0000, "give more with --memory");
    says(6, u32::MAX, "give more with --memory");
    says(7, 0xf_ffff, "entry 0xfffff is not in what it loads");
    says(7, 0x10_0000 + 8 + 32 + 64, "is not in what it loads");
    says(7, u32::MAX, "is not in what it loads");
    let whole = plain(&[0x90; 64], 0);
    let err = start(&ram(), &whole[..47], None).unwrap_err().to_string();
    assert!(err.contains("multiboot header is cut short"), "{err}");
    let mut late = vec![0; 8180];
    late.extend(&whole[16..]);
    let err = start(&ram(), &late, None).unwrap_err().to_string();
    assert!(err.contains("multiboot header is cut short"), "past the first 8 KiB: {err}");
    // No end: to the end of the file. No bss: none.
    let mut open = whole.clone();
    open[36..44].fill(0);
    assert_eq!(start(&ram(), &open, None).unwrap().kernel, (Gpa(0x10_0000), whole.len() as u64 - 8));
    // Kernels that fill memory leave no room for a module.
    let mut full = plain(&[0x90; 64], 100);
    full[40..44].copy_from_slice(&0x200_0000u32.to_le_bytes());
    assert!(start(&ram(), &full, None).is_ok());
    assert!(start(&ram(), &full, Some(b"x")).unwrap_err().to_string().contains("--memory"));
}
