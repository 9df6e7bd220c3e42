// SPDX-License-Identifier: Apache-2.0
//! Guests of a few instructions through the real KVM API: what they print, how they end, what the ledger says of them.
//!
//! Skipped with a message where there is no usable /dev/kvm; the lab covers the same paths with Linux.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Code, have_kvm, run};
use machine::Outcome;

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
    code.triple_fault();
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
