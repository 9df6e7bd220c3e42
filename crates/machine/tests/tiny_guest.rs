// SPDX-License-Identifier: Apache-2.0
//! Guests of a few instructions through the real KVM API: what they print, how they end, what the ledger says of them.
//!
//! Skipped with a message where there is no usable /dev/kvm; the lab covers the same paths with Linux.
#![allow(clippy::unwrap_used)]

mod common;

use std::io::Write;

use common::{Code, have_kvm, run, run_kernel, run_vm, run_with};
use machine::{Accounting, Outcome};

#[test]
fn prints_and_powers_off() {
    if !have_kvm() {
        return;
    }
    let mut code = Code::new();
    for b in b"hello\n" {
        code.out(0x3f8, *b);
    }
    code.out(0x600, 5 << 2 | 1 << 5);
    let (report, output) = run(&code, |_| {});
    assert_eq!(report.outcome, Outcome::PowerOff);
    assert_eq!(output, b"hello\n");
    let exits = &report.ledger.vcpus[0].exits;
    let count = |device: &str| exits.iter().filter(|e| e.device == device).map(|e| e.count).sum::<u64>();
    assert_eq!(count("serial"), 6);
    assert_eq!(count("acpi"), 1);
    assert_eq!(report.ledger.monitor_exits, exits.iter().map(|e| e.count).sum::<u64>());
}

#[test]
fn a_polling_guest_leaves_once_a_byte() {
    if !have_kvm() {
        return;
    }
    // mov dx, LSR; in al, dx; before each byte, as Linux's console does.
    let mut code = Code::new();
    for b in b"polled\n" {
        code.bytes(&[0x66, 0xba, 0xfd, 0x03, 0xec]).out(0x3f8, *b);
    }
    code.out(0x600, 0x34);
    let (report, output) = run(&code, |_| {});
    assert_eq!(output, b"polled\n");
    let exits = &report.ledger.vcpus[0].exits;
    let writes: u64 = exits.iter().filter(|e| (e.reason, e.device) == ("pio-write", "serial")).map(|e| e.count).sum();
    assert_eq!(writes, 0, "KVM queues the bytes: {exits:?}");
}

#[test]
fn every_way_to_end_has_its_outcome() {
    if !have_kvm() {
        return;
    }
    let ends: [(u16, u8, Outcome); 3] =
        [(0x64, 0xfe, Outcome::Reset), (0x602, 1, Outcome::Reset), (0x505, 1, Outcome::Panic)];
    for (port, value, outcome) in ends {
        let mut code = Code::new();
        code.out(port, value);
        let (report, _) = run(&code, |_| {});
        assert_eq!(report.outcome, outcome, "port {port:#x}");
    }
    let mut code = Code::new();
    // An invalid instruction, with an empty interrupt table.
    code.bytes(&[0x0f, 0x0b]);
    let (report, _) = run(&code, |_| {});
    assert_eq!(report.outcome, Outcome::Reset);
}

#[test]
fn nobody_answers_all_ones() {
    if !have_kvm() {
        return;
    }
    // in al, 0x99; out 0x3f8, al; newline; off
    let mut code = Code::new();
    code.bytes(&[0xe4, 0x99]).bytes(&[0x66, 0xba, 0xf8, 0x03, 0xee]).out(0x3f8, b'\n').out(0x600, 0x34);
    let (report, output) = run(&code, |_| {});
    assert_eq!(output, [0xff, b'\n']);
    let nobody: u64 = report.ledger.vcpus[0].exits.iter().filter(|e| e.device == "nobody").map(|e| e.count).sum();
    assert_eq!(nobody, 1);
}

/// Leaf 0xb as the guest's own CPUID instruction answers: the bits of an APIC id below the socket's, and a socket's vCPUs.
#[test]
fn cpuid_tells_the_topology() {
    if !have_kvm() {
        return;
    }
    // mov eax, 0xb; mov ecx, 1; cpuid; mov dx, 0x3f8; out dx, al; mov al, bl; out dx, al
    let mut code = Code::new();
    code.bytes(&[0xb8, 0xb, 0, 0, 0, 0xb9, 1, 0, 0, 0, 0x0f, 0xa2, 0x66, 0xba, 0xf8, 3, 0xee, 0x88, 0xd8, 0xee]);
    code.out(0x600, 0x34);
    let split = |vm: &mut spec::Vm| {
        vm.cpus = spec::Cpus { count: 12, sockets: Some(2), cores: Some(3), threads: Some(2) };
    };
    let (report, output) = run_vm(&code, Accounting::On, split, |_| {});
    assert_eq!(report.outcome, Outcome::PowerOff);
    assert_eq!(output, [3, 6]);
    assert_eq!(report.ledger.vcpus.len(), 12);
}

/// x2APIC in leaf 1 as the guest's own CPUID instruction answers, with it and without. A KVM that interprets guests adds some
/// features whatever it is told, but not this one.
#[test]
fn cpuid_lacks_what_was_taken_away() {
    if !have_kvm() {
        return;
    }
    let have = machine::host_cpu_features("/dev/kvm".as_ref()).unwrap().contains(&"x2apic");
    for (model, expected) in [("host", u8::from(have)), ("host,-x2apic", 0), ("host,-avx,-sse4_1,-xsave,-x2apic", 0)] {
        // mov eax, 1; cpuid; shr ecx, 21; and cl, 1; mov al, cl; mov dx, 0x3f8; out dx, al
        let mut code = Code::new();
        code.bytes(&[
            0xb8, 1, 0, 0, 0, 0x0f, 0xa2, 0xc1, 0xe9, 21, 0x80, 0xe1, 1, 0x88, 0xc8, 0x66, 0xba, 0xf8, 3, 0xee,
        ]);
        code.out(0x600, 0x34);
        let masked = |vm: &mut spec::Vm| vm.cpu = spec::FromText::from_text(model).unwrap();
        let (report, output) = run_vm(&code, Accounting::On, masked, |_| {});
        assert_eq!((report.outcome, output), (Outcome::PowerOff, vec![expected]), "{model}");
    }
}

#[test]
fn a_guest_that_hangs_can_be_ended() {
    if !have_kvm() {
        return;
    }
    // jmp $ ; the first SIGTERM asks in vain, the second ends it.
    let mut code = Code::new();
    code.out(0x3f8, b'x').out(0x3f8, b'\n').bytes(&[0xeb, 0xfe]);
    let (report, output) = run(&code, |started| {
        started.wait_for(b"x\n");
        started.signal_to_the_end(libc::SIGTERM);
    });
    assert_eq!(output, b"x\n");
    assert_eq!(report.outcome, Outcome::Killed);
}

/// Configuration space of the first device, behind the host bridge.
const CONFIG: u32 = 0xe000_8000;

/// Reads from a page or leaving to the monitor, a guest finds in configuration space what it wrote there, whatever else
/// the write changed or did not.
#[test]
fn configuration_space_reads_as_it_was_written() {
    if !have_kvm() {
        return;
    }
    // The command register: memory on, then the bus master too, which moves no BAR, then memory off again.
    const COMMAND: u32 = 4;
    for (irqchip, reads) in [(spec::Irqchip::Split, None), (spec::Irqchip::Kernel, Some(3))] {
        let mut code = Code::new();
        code.map_high(&[CONFIG]);
        // mov ebx, CONFIG; mov dx, 0x3f8
        code.bytes(&[0xbb]).bytes(&CONFIG.to_le_bytes()).bytes(&[0x66, 0xba, 0xf8, 3]);
        for value in [0x02, 0x06, 0x04] {
            // mov word ptr [rbx + COMMAND], value; mov al, [rbx + COMMAND]; add al, '0'; out dx, al
            code.bytes(&[0x66, 0xc7, 0x43, COMMAND as u8, value, 0, 0x8a, 0x43, COMMAND as u8, 0x04, 0x30, 0xee]);
        }
        code.out(0x600, 0x34);
        let change = |vm: &mut spec::Vm| (vm.irqchip, vm.rng) = (irqchip, true);
        let (report, output) = run_vm(&code, Accounting::On, change, |_| {});
        assert_eq!(String::from_utf8_lossy(&output), "264", "{irqchip:?}");
        let exits = &report.ledger.vcpus[0].exits;
        let seen = exits.iter().find(|e| e.reason == "mmio-read").map(|e| e.count);
        assert_eq!(seen, reads, "{exits:?}");
    }
}

/// A driver of a dozen steps reads one block, waits for its interrupt, prints what it read. With the registers in a page it
/// leaves for no read, the one of the interrupt's reason included.
#[test]
fn a_disk_is_read_through_mmio_registers() {
    if !have_kvm() {
        return;
    }
    for (status, reads) in [(spec::MmioStatus::Trap, Some(1)), (spec::MmioStatus::RoPage, None)] {
        read_a_disk(status, reads);
    }
}

fn read_a_disk(status: spec::MmioStatus, reads: Option<u64>) {
    let mut code = Code::new();
    code.read_disk().power_off();
    let mut disk = tempfile::NamedTempFile::new().unwrap();
    disk.write_all(b"found it").unwrap();
    disk.as_file().set_len(4096).unwrap();
    let change = |vm: &mut spec::Vm| {
        vm.transport = spec::Transport::Mmio;
        vm.mmio_status = status;
        vm.disks = vec![spec::Disk::new(disk.path())];
    };
    let (report, output) = run_vm(&code, Accounting::On, change, |_| {});
    assert_eq!(report.outcome, Outcome::PowerOff);
    assert_eq!(String::from_utf8_lossy(&output), "found it");
    let exits = &report.ledger.vcpus[0].exits;
    let writes = exits.iter().find(|e| (e.reason, e.device) == ("mmio-write", "virtio-mmio")).map(|e| e.count);
    assert_eq!(writes, Some(12), "one for each step, and the kick is KVM's: {exits:?}");
    let seen = exits.iter().find(|e| (e.reason, e.device) == ("mmio-read", "virtio-mmio")).map(|e| e.count);
    assert_eq!(seen.is_some(), reads.is_some(), "{exits:?}");
    let disk = &report.ledger.devices[0];
    assert_eq!((disk.requests, disk.bytes_read, disk.interrupts), (1, 512, 1), "{disk:?}");
}

#[test]
fn markers_and_places_are_in_the_ledger() {
    if !have_kvm() {
        return;
    }
    let mut code = Code::new();
    code.out(0x80, 0x41).out(0x80, 0x41).out(0x3f0, 7).out(0x3f0, 123).out(0x3f8, b'\n').out(0x600, 0x34);
    let (report, output) = run_with(&code, Accounting::Places, |_| {});
    assert_eq!(output, b"\n", "the tap passes output on");
    let moments: Vec<&str> = report.ledger.timeline.iter().map(|m| m.what.as_str()).collect();
    let at = moments.iter().position(|m| *m == "the guest starts").unwrap();
    assert_eq!(moments[at + 1..], ["debug port 0x41", "boot marker"]);
    let marked = report.ledger.places.iter().filter(|p| p.at == 0x80 || p.at == 0x3f0);
    assert_eq!(marked.map(|p| p.count).sum::<u64>(), 4);
    assert!(report.ledger.places.iter().all(|p| p.rip >= 0x20_0000 && p.rip < 0x20_1000), "the guest's own code");
    let (report, _) = run(&code, |_| {});
    assert!(report.ledger.places.is_empty() && !report.ledger.timeline.is_empty());
}

/// 32-bit code: fails unless EAX has the magic number, prints the command line, then the first three bytes of the first module.
fn multiboot_guest() -> Code {
    let mut code = Code::new();
    // cmp eax, magic; je over the next two; mov al, 1; out 0xf4, al
    code.bytes(&[0x3d]).bytes(&0x2bad_b002u32.to_le_bytes()).bytes(&[0x74, 4, 0xb0, 1, 0xe6, 0xf4]);
    // mov dx, 0x3f8; mov esi, [ebx + 16]; L: lodsb; test al, al; jz out; out dx, al; jmp L
    code.bytes(&[0x66, 0xba, 0xf8, 3, 0x8b, 0x73, 16, 0xac, 0x84, 0xc0, 0x74, 3, 0xee, 0xeb, 0xf8]);
    // mov esi, [ebx + 24]; mov esi, [esi]; three times lodsb; out dx, al
    code.bytes(&[0x8b, 0x73, 24, 0x8b, 0x36]).bytes(&[0xac, 0xee].repeat(3));
    // mov eax, 0x25; out 0xf4, eax; hlt
    code.bytes(&[0xb8, 0x25, 0, 0, 0, 0xe7, 0xf4, 0xf4]);
    code
}

#[test]
fn a_multiboot_kernel_starts_as_promised_and_ends_as_it_says() {
    if !have_kvm() {
        return;
    }
    let mut module = tempfile::NamedTempFile::new().unwrap();
    module.write_all(b"abc").unwrap();
    // Where kvm-unit-tests go, and where their real-mode test goes.
    for at in [0x40_0000, 0x8000] {
        let change = |vm: &mut spec::Vm| {
            vm.debug_exit = Some(0xf4);
            vm.initrd = Some(module.path().into());
            vm.cmdline = Some("x=1 y".into());
        };
        let (report, output) = run_kernel(&multiboot_guest().multiboot(at), Accounting::On, change, |_| {});
        assert_eq!(report.outcome, Outcome::Exit(0x4b));
        let said = String::from_utf8(output).unwrap();
        assert!(said.starts_with('/') && said.ends_with(" x=1 yabc"), "{said}");
        let exits = &report.ledger.vcpus[0].exits;
        let ends: u64 = exits.iter().filter(|e| e.device == "debug-exit").map(|e| e.count).sum();
        assert_eq!(ends, 1, "{exits:?}");
    }
}

#[test]
fn without_the_flag_the_port_is_nobodys() {
    if !have_kvm() {
        return;
    }
    let mut code = Code::new();
    code.out(0xf4, 1).power_off();
    let (report, _) = run(&code, |_| {});
    assert_eq!(report.outcome, Outcome::PowerOff);
}

#[test]
fn machines_with_nodes_and_memory_to_plug_start_and_end() {
    if !have_kvm() {
        return;
    }
    for transport in [spec::Transport::Pci, spec::Transport::Mmio] {
        let mut code = Code::new();
        code.out(0x3f8, b'x').out(0x600, 0x34);
        let change = |vm: &mut spec::Vm| {
            vm.transport = transport;
            (vm.cpus.count, vm.cpus.sockets) = (2, Some(2));
            vm.memory = spec::Memory { nodes: 2, hotplug: 256 << 20, ..vm.memory.clone() };
        };
        let (report, output) = run_vm(&code, Accounting::On, change, |_| {});
        assert_eq!((report.outcome, output.as_slice()), (Outcome::PowerOff, &b"x"[..]));
        assert!(report.ledger.devices.iter().any(|device| device.name == "memory"));
        let (report, _) = run_vm(
            &code,
            Accounting::On,
            |vm| {
                vm.transport = transport;
                let (size, boot, prealloc) = (192 << 20, Some(64 << 20), spec::Prealloc::Background);
                vm.memory = spec::Memory { size, boot, prealloc, ..vm.memory.clone() };
            },
            |_| {},
        );
        assert_eq!(report.outcome, Outcome::PowerOff);
        assert!(report.ledger.startup.ready >= 64 << 20, "what it starts with is there");
    }
}
