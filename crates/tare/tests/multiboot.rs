// SPDX-License-Identifier: Apache-2.0
//! Multiboot kernels and the debug exit through the program, and the script by which kvm-unit-tests take tare for QEMU.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{TARE, complaint, has_kvm, refuses, tare};
use testkit::Code;

/// Prints the first module, then ends with `status`: twice `status` and 1.
fn guest(dir: &Path, status: u8) -> PathBuf {
    let mut code = Code::new();
    // mov dx, 0x3f8; mov esi, [ebx + 24]; mov edi, [esi + 4]; mov esi, [esi]
    code.bytes(&[0x66, 0xba, 0xf8, 3, 0x8b, 0x73, 24, 0x8b, 0x7e, 4, 0x8b, 0x36]);
    // L: lodsb; out dx, al; cmp esi, edi; jb L
    code.bytes(&[0xac, 0xee, 0x39, 0xfe, 0x72, 0xfa]);
    // mov eax, status; mov dx, 0xf4; out dx, eax
    code.bytes(&[0xb8, status, 0, 0, 0, 0x66, 0xba, 0xf4, 0, 0xef]).halt();
    let path = dir.join("test.flat");
    fs::write(&path, code.multiboot(4 << 20)).unwrap();
    path
}

#[test]
fn the_guests_status_is_the_programs() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let initrd = dir.path().join("env");
    fs::write(&initrd, "A=1\n").unwrap();
    for (value, status) in [(0, 1), (1, 3), (127, 255)] {
        let kernel = guest(dir.path(), value);
        let output = tare(&["run", "--kernel", kernel.to_str().unwrap(), "--initrd", initrd.to_str().unwrap()])
            .args(["--console", "serial", "--memory", "64M", "--debug-exit", "0xf4"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(status), "{}", complaint(&output));
        assert_eq!((output.stdout.as_slice(), complaint(&output).as_str()), (&b"A=1\n"[..], ""));
    }
}

#[test]
fn a_port_that_another_device_has_is_refused() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let kernel = guest(dir.path(), 0);
    let kernel = kernel.to_str().unwrap();
    refuses(&mut tare(&["run", "--kernel", kernel, "--debug-exit", "0x3f8"]), 2, "are the serial port's too");
    refuses(&mut tare(&["run", "--kernel", kernel, "--debug-exit", "0xffff"]), 2, "4 ports don't fit from 0xffff on");
}

/// The script with the options that kvm-unit-tests give to QEMU.
fn stand_in(options: &[&str]) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/kvm-unit-tests-qemu");
    let mut command = Command::new(script);
    command.env("TARE", TARE).args(options).stdin(Stdio::null());
    command
}

const USUAL: [&str; 15] = [
    "--no-reboot",
    "-nodefaults",
    "-global",
    "kvm-pit.lost_tick_policy=discard",
    "-device",
    "pc-testdev",
    "-device",
    "isa-debug-exit,iobase=0xf4,iosize=0x4",
    "-display",
    "none",
    "-serial",
    "stdio",
    "-machine",
    "accel=kvm",
    "-kernel",
];

#[test]
fn kvm_unit_tests_take_the_script_for_qemu() {
    let said = |options: &[&str]| String::from_utf8(stand_in(options).output().unwrap().stdout).unwrap();
    assert!(said(&["-device", "?"]).contains("\"pc-testdev\""));
    assert!(said(&["--help"]).starts_with("QEMU"));
    for (options, word) in [
        (&["-device", "intel-iommu"][..], "no device intel-iommu"),
        (&["-cpu", "max,-x2apic,phys-bits=36"], "+NAME or -NAME"),
        (&["-machine", "accel=tcg"], "needs KVM"),
        (&["-icount", "1"], "no -icount"),
        (&["-kernel"], "no value"),
        (&["-smp", "2"], "no -kernel"),
        (&["-kernel", "k", "-smp", "2,sockets=2"], "plain number"),
    ] {
        let output = stand_in(options).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{options:?}");
        assert!(complaint(&output).contains(word), "{}", complaint(&output));
    }
}

#[test]
fn a_unit_test_runs_under_the_script() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let kernel = guest(dir.path(), 0);
    let env = dir.path().join("env");
    fs::write(&env, "KERNEL_VERSION=6\n").unwrap();
    let more =
        [kernel.to_str().unwrap(), "-initrd", env.to_str().unwrap(), "-smp", "1", "-cpu", "max", "-append", "a b"];
    let output = stand_in(&[&USUAL[..], &more].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", complaint(&output));
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(said, "KERNEL_VERSION=6\nNR_CPUS=1\nMEMSIZE=128\nTEST_DEVICE=0\n");
}
