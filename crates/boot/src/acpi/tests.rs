// SPDX-License-Identifier: Apache-2.0
//! The tables as a guest would follow them, byte by byte, and as ACPICA's disassembler reads them.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::process::Command;

use super::*;
use crate::platform::tests::platform;

fn ram() -> GuestRam {
    GuestRam::anonymous(&[(Gpa(0), 2 << 20)]).unwrap()
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |s, b| s.wrapping_add(*b))
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(b[at..at + 8].try_into().unwrap())
}

/// Follows RSDP and XSDT; every table by signature, checksums proven.
fn tables(platform: &Platform) -> BTreeMap<String, Vec<u8>> {
    let ram = ram();
    let at = write(&ram, platform).unwrap();
    let read = |at: u64, len: usize| {
        let mut b = vec![0; len];
        ram.read_bytes(Gpa(at), &mut b).unwrap();
        b
    };
    let rsdp = read(at.0, 36);
    assert_eq!(&rsdp[..8], b"RSD PTR ");
    assert_eq!((sum(&rsdp[..20]), sum(&rsdp), rsdp[15]), (0, 0, 2));
    let table = |at: u64| {
        let len = u32::from_le_bytes(read(at + 4, 4).try_into().unwrap()) as usize;
        let b = read(at, len);
        assert_eq!(sum(&b), 0, "checksum of {}", String::from_utf8_lossy(&b[..4]));
        assert_eq!(at % 16, 0);
        b
    };
    let xsdt = table(u64_at(&rsdp, 24));
    let mut out = BTreeMap::new();
    for entry in xsdt[36..].chunks(8) {
        let t = table(u64_at(entry, 0));
        if t.starts_with(b"FACP") {
            out.insert("DSDT".into(), table(u64_at(&t, 140)));
        }
        out.insert(String::from_utf8_lossy(&t[..4]).into_owned(), t);
    }
    out.insert("XSDT".into(), xsdt);
    out
}

#[test]
fn the_tables_are_found_and_say_what_the_platform_is() {
    let mut p = platform();
    p.apic_ids = vec![0, 2, 5];
    let t = tables(&p);
    assert_eq!(t.keys().collect::<Vec<_>>(), ["APIC", "DSDT", "FACP", "MCFG", "XSDT"]);
    let f = &t["FACP"];
    assert_eq!((f.len(), f[8], f[131]), (276, 6, 5));
    let flags = u32::from_le_bytes(f[112..116].try_into().unwrap());
    assert_eq!(flags, 1 | 1 << 4 | 1 << 5 | 1 << 10 | 1 << 12 | 1 << 20);
    assert_eq!(u16::from_le_bytes([f[109], f[110]]), 0b10_0100, "no VGA, no CMOS clock, no 8042, no legacy devices");
    let gas = |at: usize| (f[at], f[at + 1], f[at + 3], u64_at(f, at + 4));
    assert_eq!((gas(116), f[128]), ((1, 8, 1, 0x602), 1), "reset register and value");
    assert_eq!((gas(244), gas(256)), ((1, 8, 1, 0x600), (1, 8, 1, 0x601)), "sleep registers");
    let m = &t["APIC"];
    assert_eq!(u32::from_le_bytes(m[36..40].try_into().unwrap()), 0xfee0_0000);
    assert_eq!(m[40], 0, "no 8259");
    assert_eq!(
        &m[44..],
        [
            &[0, 8, 0, 0, 1, 0, 0, 0, 0, 8, 1, 2, 1, 0, 0, 0, 0, 8, 2, 5, 1, 0, 0, 0][..],
            &[1, 12, 0, 0, 0, 0, 0xc0, 0xfe, 0, 0, 0, 0],
        ]
        .concat()
    );
    let c = &t["MCFG"];
    assert_eq!((u64_at(c, 44), &c[52..]), (0xe000_0000, &[0u8; 8][..]));
}

/// A device of 4 KiB; every fourth has a line of its own.
fn registers(number: u32) -> crate::VirtioMmio {
    let gsi = base::Gsi(if number.is_multiple_of(4) { 6 + number / 4 } else { 23 });
    crate::VirtioMmio { at: Gpa(0xe100_0000 + u64::from(number) * 0x1000), len: 0x1000, gsi }
}

#[test]
fn virtio_registers_are_described_with_memory_and_interrupt() {
    let mut p = platform();
    p.virtio_mmio = (0..3).map(registers).collect();
    let dsdt = &tables(&p)["DSDT"];
    let count = |wanted: &[u8]| dsdt.windows(wanted.len()).filter(|w| *w == wanted).count();
    assert_eq!(count(b"LNRO0005\0"), 3);
    for (number, line, flags) in [(0u8, 6u8, 0b0011), (1, 23, 0b1011), (2, 23, 0b1011)] {
        let memory = [0x86, 9, 0, 1, 0, 0x10 * number, 0, 0xe1, 0, 0x10, 0, 0];
        assert_eq!(count(&memory), 1, "read-write memory of device {number}");
        // Consumer, edge, active high, and shared where it is.
        let interrupt = [0x89, 6, 0, flags, 1, line, 0, 0, 0];
        assert_eq!(count(&[&memory[..], &interrupt].concat()), 1, "interrupt of device {number}");
    }
}

/// Two nodes with three ranges, and room for more.
fn with_nodes() -> Platform {
    let node = |ids: &[u32], memory: &[(u64, u64)]| crate::Node {
        apic_ids: ids.to_vec(),
        memory: memory.iter().map(|(at, len)| (Gpa(*at), *len)).collect(),
    };
    let nodes = vec![
        node(&[0, 2], &[(0, 0xc000_0000), (0x1_0000_0000, 0x4000_0000)]),
        node(&[1], &[(0x1_4000_0000, 0x1234_5000)]),
    ];
    Platform { apic_ids: vec![0, 1, 2], nodes, to_plug: Some((Gpa(0x2_0000_0000), 0x8000_0000)), ..platform() }
}

#[test]
fn nodes_and_room_for_more_are_in_srat_and_slit() {
    let t = tables(&with_nodes());
    let s = &t["SRAT"];
    assert_eq!((s[8], &s[36..40]), (3, &[1u8, 0, 0, 0][..]));
    let cpu = |node: u8, id: u8| {
        let mut out = [0; 16];
        [out[0], out[1], out[2], out[3], out[4]] = [0, 16, node, id, 1];
        out.to_vec()
    };
    let memory = |node: u8, at: u64, len: u64, flags: u8| {
        let mut out = vec![1, 40, node, 0, 0, 0, 0, 0];
        out.extend(at.to_le_bytes());
        out.extend(len.to_le_bytes());
        out.extend([0, 0, 0, 0, flags, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        out
    };
    let want = [
        cpu(0, 0),
        cpu(0, 2),
        memory(0, 0, 0xc000_0000, 1),
        memory(0, 0x1_0000_0000, 0x4000_0000, 1),
        cpu(1, 1),
        memory(1, 0x1_4000_0000, 0x1234_5000, 1),
        memory(0, 0x2_0000_0000, 0x8000_0000, 3),
    ];
    assert_eq!(s[48..], want.concat());
    assert_eq!(t["SLIT"][36..], [2, 0, 0, 0, 0, 0, 0, 0, 10, 20, 20, 10]);
    // Room alone is a node with all there is.
    let t = tables(&Platform { nodes: Vec::new(), ..with_nodes() });
    let ram = memory(0, 0, 2 << 20, 1);
    let want = [cpu(0, 0), cpu(0, 1), cpu(0, 2), ram, memory(0, 0x2_0000_0000, 0x8000_0000, 3)];
    assert_eq!(t["SRAT"][48..], want.concat());
    assert!(!t.contains_key("SLIT") && !tables(&platform()).contains_key("SRAT"));
}

#[test]
fn what_is_absent_is_not_described() {
    let mut p = platform();
    (p.ecam, p.serial, p.pvpanic_port) = (None, None, None);
    let t = tables(&p);
    assert!(!t.contains_key("MCFG"));
    let has = |name: &[u8]| t["DSDT"].windows(4).any(|w| w == name);
    assert!(has(b"PWRB") && has(b"_S5_"));
    assert!(!has(b"PCI0") && !has(b"MBRD") && !has(b"COM1") && !has(b"PEVT"));
}

#[test]
fn the_most_a_platform_may_have_fits() {
    let mut p = platform();
    p.apic_ids = (0..64).map(|n| n * 3).collect();
    p.ecam = Some(crate::Ecam { base: Gpa(0x20_0000_0000), buses: 256 });
    p.conf1 = true;
    p.virtio_mmio = (0..64).map(registers).collect();
    let node = |number: u32| crate::Node {
        apic_ids: (number * 4..number * 4 + 4).map(|n| n * 3).collect(),
        memory: vec![(Gpa(u64::from(number) << 30), 1 << 30)],
    };
    p.nodes = (0..Platform::MAX_NODES as u32).map(node).collect();
    p.to_plug = Some((Gpa(1 << 45), 1 << 40));
    p.pci.hotplug = Some(crate::PciHotplug { port: 0x610, gsi: base::Gsi(9), slots: u32::MAX });
    p.pci.pins = Some((base::Gsi(16), 4));
    assert!(p.check().is_ok());
    let t = tables(&p);
    assert_eq!(t["APIC"].len(), 44 + 64 * 8 + 12);
    assert_eq!((t["SRAT"].len(), t["SLIT"].len()), (48 + 64 * 16 + 17 * 40, 44 + 16 * 16));
}

#[test]
fn acpica_disassembles_and_compiles_them_without_a_word() {
    let mut high = platform();
    high.ecam = Some(crate::Ecam { base: Gpa(0x20_0000_0000), buses: 256 });
    high.conf1 = true;
    high.virtio_mmio = (0..5).map(registers).collect();
    let hotplug = crate::PciHotplug { port: 0x610, gsi: base::Gsi(9), slots: 0xffff_fff0 };
    let pci = crate::Pci { pins: Some((base::Gsi(16), 4)), hotplug: Some(hotplug), ..platform().pci };
    let plugged = Platform { pci, ..platform() };
    for p in [platform(), high, with_nodes(), plugged] {
        let dir = tempfile::tempdir().unwrap();
        for (name, table) in tables(&p) {
            std::fs::write(dir.path().join(format!("{name}.aml")), table).unwrap();
            let iasl = |args: &[&str]| Command::new("iasl").args(args).current_dir(dir.path()).output();
            let Ok(out) = iasl(&["-d", &format!("{name}.aml")]) else {
                println!("skipped: no iasl");
                return;
            };
            let text = [out.stdout, out.stderr].concat();
            let text = String::from_utf8_lossy(&text);
            assert!(out.status.success() && !text.contains("rror") && !text.contains("arning"), "{name}: {text}");
            let source = std::fs::read_to_string(dir.path().join(format!("{name}.dsl"))).unwrap();
            assert!(!source.contains("rror") && !source.contains("arning"), "{name}: {source}");
            if name == "DSDT" {
                assert!(source.contains("PNP0A08") && source.contains("Notify (PWRB, 0x80)"), "{source}");
                if p.pci.hotplug.is_some() {
                    assert!(source.contains("Name (_PRT, Package (0x1F)"), "{source}");
                    assert_eq!(source.matches("Method (_EJ0, 1, Serialized)").count(), 28, "{source}");
                    assert!(source.contains("HPEJ = 0x80000000") && source.contains("Notify (S01F, 0x03)"), "{source}");
                    assert!(source.contains("\\_SB.PCI0.HPLG ()") && !source.contains("S003"), "{source}");
                }
                let out = iasl(&["-oa", "DSDT.dsl"]).unwrap();
                let text = String::from_utf8_lossy(&out.stdout);
                assert!(text.contains("0 Errors, 0 Warnings"), "{text}\n{source}");
            }
        }
    }
}
