// SPDX-License-Identifier: Apache-2.0
//! One way in for fuzzers: any bytes as a kernel. Called by the fuzz target and by the mutation test below.

use std::path::Path;

use base::{Gpa, Gsi};
use mem::GuestRam;

use crate::{Decompress, Ecam, Entry, Guest, Loaded, Pci, Platform, PmPorts, Serial, Source, load};

/// Loads `bytes` as a kernel into `ram` in every mode; panics if what comes out breaks a promise.
/// 32 MiB of RAM from address 0 reach all of the loader. RAM need not be zero.
pub fn fuzz_kernel(ram: &GuestRam, bytes: &[u8]) {
    let platform = Platform {
        apic_ids: vec![0],
        lapic: Gpa(0xfee0_0000),
        ioapic: Gpa(0xfec0_0000),
        ecam: Some(Ecam { base: Gpa(0xe000_0000), buses: 1 }),
        conf1: false,
        pci_window32: (Gpa(0xc000_0000), 0x2000_0000),
        pci_window64: (Gpa(0x40_0000_0000), 0x40_0000_0000),
        pci: Pci { ports: Some((0x1000, 0xffff)), ..Pci::default() },
        virtio_mmio: Vec::new(),
        vioapic: None,
        serial: Some(Serial { port: 0x3f8, gsi: Gsi(4) }),
        pvpanic_port: Some(0x505),
        pm: PmPorts { sleep_control: 0x600, sleep_status: 0x601, reset: 0x602, reset_value: 1, button: Gsi(5) },
        nodes: Vec::new(),
        to_plug: None,
    };
    let name = Path::new("fuzz");
    for (decompress, seed) in [(Decompress::Guest, None), (Decompress::Monitor, None), (Decompress::Monitor, Some(1))] {
        let kernel = Source::memory("kernel", name, bytes);
        let initrd = Some(Source::memory("initrd", name, &[7; 5000]));
        let guest = Guest { kernel, initrd, cmdline: "quiet", args: "quiet", decompress, seed };
        match load(ram, &guest, &platform) {
            Ok(loaded) => promises(&loaded, ram),
            Err(e) => assert!(!e.to_string().contains('\n')),
        }
    }
}

fn promises(loaded: &Loaded, ram: &GuestRam) {
    let (at, len) = loaded.kernel;
    let (rip, floor) = match loaded.entry {
        Entry::Linux64 { rip, .. } | Entry::Pvh { rip, .. } => (rip, 0x10_0000),
        Entry::Multiboot { rip, rbx, gdt, .. } => {
            assert!(rbx > gdt && rbx.0 < ram.size() && at.0 + len > at.0, "{loaded:?}");
            (rip, 0)
        }
    };
    assert!(at.0 >= floor && at.0 + len <= ram.size(), "{loaded:?}");
    assert!(rip.0 >= at.0 && rip.0 < at.0 + len, "{loaded:?}");
    if let Some((initrd, n)) = loaded.initrd {
        assert!(initrd.0 >= at.0 + len && initrd.0 + n <= ram.size(), "{loaded:?}");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::unpack::tests::{Dice, bzimage, inner};
    use crate::{BootError, elf, multiboot};

    fn ram() -> GuestRam {
        GuestRam::anonymous(&[(Gpa(0), 32 << 20)]).unwrap()
    }

    fn samples() -> [Vec<u8>; 5] {
        let vmlinux =
            elf::tests::build(0x100_0000, &[(0x100_0000, &[0x90; 300], 8000), (0x110_0000, &[1; 64], 0)], None);
        let pvh = elf::tests::build(0xffff_ffff_8100_0000, &[(0x100_0000, &[0x90; 300], 0)], Some(0x100_0020));
        let plain = multiboot::tests::plain(&[0x90; 300], 4096);
        [bzimage(&inner()), vmlinux, pvh, multiboot::tests::elf32(0x40_0000, &[0x90; 300], 4096), plain]
    }

    fn load_plain(bytes: &[u8], decompress: Decompress, seed: Option<u64>) -> Result<Loaded, BootError> {
        let kernel = Source::memory("kernel", Path::new("k"), bytes);
        load(
            &ram(),
            &Guest { kernel, initrd: None, cmdline: "", args: "", decompress, seed },
            &crate::platform::tests::platform(),
        )
    }

    #[test]
    fn the_samples_load_as_what_they_are() {
        let [bz, vmlinux, pvh, elf32, plain] = samples();
        let how = |b: &[u8], d, s| load_plain(b, d, s).unwrap().how;
        assert_eq!(how(&bz, Decompress::Guest, None), "bzImage, lz4, unpacked by the guest (as asked)");
        assert_eq!(how(&bz, Decompress::Monitor, None), "bzImage, lz4, unpacked by tare, KASLR off");
        assert_eq!(how(&bz, Decompress::Monitor, Some(3)), "bzImage, lz4, unpacked by tare, KASLR on");
        let loaded = load_plain(&vmlinux, Decompress::Monitor, None).unwrap();
        assert!(matches!(loaded.entry, Entry::Linux64 { rip: Gpa(0x100_0000), .. }), "{loaded:?}");
        assert_eq!(loaded.kernel, (Gpa(0x100_0000), 0x10_0040));
        let loaded = load_plain(&pvh, Decompress::Monitor, None).unwrap();
        assert!(matches!(loaded.entry, Entry::Pvh { rip: Gpa(0x100_0020), rbx: Gpa(0x6000), .. }), "{loaded:?}");
        assert_eq!(how(&elf32, Decompress::Monitor, None), "multiboot, ELF");
        assert_eq!(how(&plain, Decompress::Monitor, None), "multiboot, addresses in its header");
    }

    #[test]
    fn cut_short_at_any_length_they_are_refused_in_one_line() {
        for sample in samples() {
            for len in 0..sample.len() {
                let err = match load_plain(&sample[..len], Decompress::Monitor, Some(1)) {
                    Err(e) => e.to_string(),
                    // Past the last segment an ELF file has only what nobody loads.
                    Ok(l) => {
                        assert!(
                            l.how.starts_with("ELF") || l.how.starts_with("multiboot, ELF"),
                            "{len} of {}: {l:?}",
                            sample.len()
                        );
                        continue;
                    }
                };
                assert!(err.contains(" k ") && err.contains("copy") || err.contains("bzImage"), "{len}: {err}");
            }
        }
    }

    #[test]
    fn other_files_are_named() {
        let named = |bytes: &[u8], word: &str| {
            let err = load_plain(bytes, Decompress::Monitor, None).unwrap_err().to_string();
            assert!(err.contains(word), "{err}");
        };
        named(b"", "it is empty");
        named(&[0x1f, 0x8b, 8, 0], "gzip");
        named(b"070701000000", "perhaps an initrd");
        named(b"QFI\xfb\0\0\0\x03", "qcow2");
        named(b"#!/bin/sh\n", "script");
        named(&[7; 100], "only 100 bytes");
        named(&[7; 1000], "neither a Linux boot header nor an ELF header");
    }

    #[test]
    fn a_kernel_tare_cannot_start_says_what_would_work() {
        let changed = |at: usize, value: &[u8], word: &str| {
            let mut bz = bzimage(&inner());
            bz[at..at + value.len()].copy_from_slice(value);
            let err = load_plain(&bz, Decompress::Monitor, Some(1)).unwrap_err().to_string();
            assert!(err.contains(word), "{err}");
        };
        changed(0x206, &[0x0b, 2], "boot protocol 2.11 is older");
        changed(0x236, &[0, 0], "no 64-bit entry");
        changed(0x211, &[0], "zImage");
        changed(0x201, &[0x10], "setup header ends");
        changed(0x1f4, &[0xff; 4], "protected-mode part ends at byte");
        changed(0x24c, &[0xff; 4], "payload lies outside");
        changed(0x230, &[3, 0, 0, 0], "alignment");
        changed(0x258, &[0xff; 8], "alignment");
        changed(0x260, &[0, 0, 0, 0x30], "--memory");
        changed(0x260, &[0xff; 4], "asks for");
    }

    #[test]
    fn random_damage_never_panics() {
        let (ram, mut dice) = (ram(), Dice(42));
        for sample in samples() {
            for _ in 0..1500 {
                let mut bytes = sample.clone();
                for _ in 0..1 + dice.below(6) {
                    // Headers are where it hurts.
                    let span = if dice.below(3) == 0 { bytes.len() } else { bytes.len().min(0x400) };
                    let at = dice.below(span);
                    let value = [0, 0xff, 0x7f, 0x80, dice.below(256) as u8][dice.below(5)];
                    let width = [1, 1, 4, 8][dice.below(4)].min(bytes.len() - at);
                    bytes[at..at + width].fill(value);
                }
                bytes.truncate(bytes.len() - [0, 0, dice.below(bytes.len())][dice.below(3)]);
                fuzz_kernel(&ram, &bytes);
            }
        }
    }
}
