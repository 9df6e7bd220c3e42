// SPDX-License-Identifier: Apache-2.0
//! The I/O APIC register by register and bit by bit, as Intel's 82093AA datasheet has it (sections in the tests), and random
//! accesses against what must hold after each of them.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use irq::{IoApic, MsiMessage, Written};
use proptest::prelude::*;

const SELECT: u64 = 0x00;
const WINDOW: u64 = 0x10;
const MASKED: u32 = 1 << 16;
const LEVEL: u32 = 1 << 15;
const REMOTE_IRR: u32 = 1 << 14;

fn get(apic: &mut IoApic, register: u8) -> u32 {
    assert_eq!(apic.write(SELECT, &u32::from(register).to_le_bytes()), Written::default());
    let mut word = [0xff; 4];
    apic.read(WINDOW, &mut word);
    u32::from_le_bytes(word)
}

fn set(apic: &mut IoApic, register: u8, value: u32) -> Written {
    apic.write(SELECT, &u32::from(register).to_le_bytes());
    apic.write(WINDOW, &value.to_le_bytes())
}

/// Register of the lower half of an entry; the upper one follows.
const fn low(pin: u8) -> u8 {
    0x10 + 2 * pin
}

fn level(vector: u32) -> MsiMessage {
    MsiMessage { address: 0xfee0_0000, data: vector | 0xc000 }
}

/// Each register: what it holds after a reset, which bits of it a guest can set, whether a write is about a pin.
#[test]
fn each_bit_is_the_guests_or_not() {
    // Version (3.2.2): read-only, the number of the last pin and 0x11. Arbitration (3.2.3): read-only, follows the id.
    // Redirection table (3.2.4): delivery status 12 and remote IRR 14 are read-only, 17 to 55 reserved.
    let table: &[(u8, u32, u32, Option<u8>)] = &[
        (0x00, 0, 0x0f00_0000, None),
        (0x01, 4 << 16 | 0x11, 0, None),
        (0x03, 0, 0, None),
        (0x0f, 0, 0, None),
        (0x10, MASKED, 0x0001_afff, Some(0)),
        (0x11, 0, 0xff00_0000, Some(0)),
        (0x18, MASKED, 0x0001_afff, Some(4)),
        (0x19, 0, 0xff00_0000, Some(4)),
        (0x1a, 0, 0, None),
        (0xff, 0, 0, None),
    ];
    for &(register, reset, writable, pin) in table {
        for bit in 0..32 {
            let mut apic = IoApic::new(5);
            assert_eq!(get(&mut apic, register), reset, "register {register:#x}");
            assert_eq!(set(&mut apic, register, 1 << bit).pin, pin);
            let expected = (reset & !writable) | (1 << bit & writable);
            assert_eq!(get(&mut apic, register), expected, "bit {bit} of register {register:#x}");
            set(&mut apic, register, 0);
            assert_eq!(get(&mut apic, register), reset & !writable, "bit {bit} of {register:#x} cleared");
        }
    }
    let mut apic = IoApic::new(5);
    set(&mut apic, 0, 0x0500_0000);
    assert_eq!(get(&mut apic, 2), 0x0500_0000, "the arbitration id is loaded with the id");
    set(&mut apic, 2, 0x0700_0000);
    assert_eq!((get(&mut apic, 0), get(&mut apic, 2)), (0x0500_0000, 0x0500_0000));
}

/// Register select (3.1.1): eight bits of it count.
#[test]
fn the_select_register_has_eight_bits() {
    let mut apic = IoApic::new(3);
    for bit in 0..32 {
        apic.write(SELECT, &(1u32 << bit).to_le_bytes());
        let mut word = [0; 4];
        apic.read(SELECT, &mut word);
        assert_eq!(u32::from_le_bytes(word), 1 << bit & 0xff);
    }
}

/// Delivery modes and destinations (3.2.4), edge and level, as messages.
#[test]
fn an_entry_becomes_a_message() {
    let physical = |data| Some(MsiMessage { address: 0xfee0_3000, data });
    let table: &[(u32, Option<MsiMessage>)] = &[
        (0x0031, physical(0x31)),
        (0x0831, Some(MsiMessage { address: 0xfee0_3004, data: 0x31 })),
        (0x0131, physical(0x131)),
        (0x8031, physical(0xc031)),
        (0x8131, physical(0xc131)),
        (0x2031, physical(0x31)),
        // SMI, NMI and INIT are edges whatever the trigger mode says.
        (0x0200, physical(0x200)),
        (0x0400, physical(0x400)),
        (0x8400, physical(0x400)),
        (0x8500, physical(0x500)),
        // Reserved modes, ExtINT without a PIC, vectors that are exceptions, a mask.
        (0x0331, None),
        (0x0631, None),
        (0x0731, None),
        (0x000f, None),
        (0x0010, physical(0x10)),
        (0x00ff, physical(0xff)),
        (0x1_0031, None),
    ];
    for &(entry, message) in table {
        let mut apic = IoApic::new(2);
        set(&mut apic, low(1) + 1, 3 << 24);
        assert_eq!(set(&mut apic, low(1), entry), Written { pin: Some(1), send: None });
        assert_eq!(apic.message(1), message, "{entry:#x}");
        assert_eq!(apic.is_level(1), entry & LEVEL != 0 && matches!(entry >> 8 & 7, 0 | 1), "{entry:#x}");
        assert_eq!(apic.set_line(1, true), message, "{entry:#x}: asserted");
        assert_eq!(apic.set_line(1, true), None, "{entry:#x}: still asserted");
        assert_eq!((apic.message(0), apic.message(7), apic.set_line(7, true)), (None, None, None));
    }
}

#[test]
fn an_edge_at_a_masked_pin_is_forgotten() {
    let mut apic = IoApic::new(1);
    assert_eq!(apic.set_line(0, true), None);
    assert_eq!(set(&mut apic, 0x10, 0x31).send, None);
    assert_eq!(apic.set_line(0, true), None, "no edge");
    assert_eq!(apic.set_line(0, false), None);
    assert_eq!(apic.set_line(0, true).map(|m| m.data), Some(0x31));
}

#[test]
fn a_level_waits_for_its_mask_and_its_end() {
    let mut apic = IoApic::new(2);
    set(&mut apic, 0x10, MASKED | LEVEL | 0x31);
    assert_eq!(apic.set_line(0, true), None);
    assert_eq!(set(&mut apic, 0x10, LEVEL | 0x31).send, Some(level(0x31)));
    assert_eq!(get(&mut apic, 0x10), LEVEL | REMOTE_IRR | 0x31);
    assert_eq!(apic.set_line(0, false), None);
    assert_eq!(apic.set_line(0, true), None, "the first one has not ended");
    assert_eq!(set(&mut apic, 0x10, MASKED | LEVEL | 0x31).send, None);
    assert_eq!(set(&mut apic, 0x10, LEVEL | 0x31).send, None, "nor has it by masking");
    let mut ended = Vec::new();
    apic.end(0x32, |pin, send| ended.push((pin, send)));
    assert_eq!(ended, [], "another vector");
    apic.end(0x31, |pin, send| ended.push((pin, send)));
    assert_eq!(ended, [(0, Some(level(0x31)))], "still asserted");
    apic.set_line(0, false);
    ended.clear();
    apic.end(0x31, |pin, send| ended.push((pin, send)));
    assert_eq!(ended, [(0, None)]);
    assert_eq!(get(&mut apic, 0x10), LEVEL | 0x31);
    assert_eq!(apic.set_line(0, true), Some(level(0x31)));
    // Masked when it ends: it comes with the unmasking.
    set(&mut apic, 0x10, MASKED | LEVEL | 0x31);
    ended.clear();
    apic.end(0x31, |pin, send| ended.push((pin, send)));
    assert_eq!(ended, [(0, None)]);
    assert_eq!(set(&mut apic, 0x10, LEVEL | 0x31).send, Some(level(0x31)));
}

/// A guest that ends a level's interrupts and does nothing about them waits once in 10,000; one that serves its device never.
#[test]
fn a_level_that_nobody_serves_is_a_storm() {
    let mut apic = IoApic::new(1);
    set(&mut apic, 0x10, LEVEL | 0x31);
    apic.set_line(0, true);
    let mut again = 0;
    let mut ends = |apic: &mut IoApic, count| {
        (0..count).filter(|_| apic.end(0x31, |_, send| again += u32::from(send.is_some()))).count()
    };
    assert_eq!((ends(&mut apic, 9_999), ends(&mut apic, 1)), (0, 1));
    assert_eq!((ends(&mut apic, 9_999), ends(&mut apic, 10_001)), (0, 2));
    // The line falls for a moment: its device was served.
    assert_eq!(ends(&mut apic, 9_999), 0);
    apic.set_line(0, false);
    apic.set_line(0, true);
    assert_eq!(ends(&mut apic, 9_999), 0);
    assert_eq!(again, 49_998, "no interrupt is lost by it");
}

#[test]
fn pins_that_share_a_vector_end_together() {
    let mut apic = IoApic::new(3);
    for pin in 0..3 {
        set(&mut apic, low(pin), LEVEL | 0x40);
        assert_eq!(apic.set_line(pin, true), Some(level(0x40)));
    }
    apic.set_line(1, false);
    let mut ended = Vec::new();
    apic.end(0x40, |pin, send| ended.push((pin, send.is_some())));
    assert_eq!(ended, [(0, true), (1, false), (2, true)]);
}

/// What guests do to an I/O APIC without directed EOIs: an edge for a moment forgets the wait.
#[test]
fn an_edge_for_a_moment_ends_the_wait() {
    let mut apic = IoApic::new(1);
    set(&mut apic, 0x10, LEVEL | 0x31);
    apic.set_line(0, true);
    assert_eq!(set(&mut apic, 0x10, MASKED | 0x31).send, None);
    assert_eq!(get(&mut apic, 0x10), MASKED | 0x31);
    assert_eq!(set(&mut apic, 0x10, LEVEL | 0x31).send, Some(level(0x31)));
    // A vector that changes meanwhile: the old one's end is not this entry's.
    set(&mut apic, 0x10, LEVEL | 0x32);
    let mut ended = 0;
    apic.end(0x31, |_, _| ended += 1);
    assert_eq!((ended, get(&mut apic, 0x10)), (0, LEVEL | REMOTE_IRR | 0x32));
    // Nobody took it: it may be sent again.
    apic.refused(0);
    apic.refused(9);
    assert_eq!(set(&mut apic, 0x11, 1 << 24).send.map(|m| m.address), Some(0xfee0_1000));
}

#[test]
fn odd_accesses_do_nothing_odd() {
    assert_eq!((IoApic::new(0).pins(), IoApic::new(255).pins()), (1, 120));
    let mut apic = IoApic::new(120);
    for select in 0..=255u8 {
        for offset in [0, 1, 4, 0x10, 0x14, 0x20, 0x40, 0xfff, u64::MAX] {
            for len in [0, 1, 2, 4, 8] {
                let mut data = [0xa5u8; 8];
                apic.write(SELECT, &[select]);
                apic.write(offset, &data[..len]);
                apic.read(offset, &mut data[..len]);
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Low(u8, u32),
    High(u8, u32),
    Line(u8, bool),
    End(u8),
    Refused(u8),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Few vectors, few modes: so that pins meet.
    let entry = (prop::sample::select(vec![0x0fu32, 0x30, 0x31]), 0..32u32).prop_map(|(vector, bits)| {
        vector | (bits & 3) << 8 | (bits >> 2 & 1) << 15 | (bits >> 3 & 1) << 16 | (bits >> 4) << 12
    });
    let step = prop_oneof![
        (0..4u8, entry).prop_map(|(pin, value)| Step::Low(pin, value)),
        (0..4u8, any::<u32>()).prop_map(|(pin, value)| Step::High(pin, value)),
        (0..4u8, any::<bool>()).prop_map(|(pin, on)| Step::Line(pin, on)),
        (0x2f..0x33u8).prop_map(Step::End),
        (0..4u8).prop_map(Step::Refused),
    ];
    prop::collection::vec(step, 1..200)
}

/// What each pin's line is and how often it was sent and ended, beside the state machine.
#[derive(Default)]
struct Pin {
    asserted: bool,
    refused: bool,
}

proptest! {
    /// After every step: a level that is asserted, unmasked and valid has been sent and not ended (nothing is lost); nothing
    /// was sent while an earlier one waited (nothing is doubled).
    #[test]
    fn no_level_is_lost_or_doubled(steps in steps()) {
        let mut apic = IoApic::new(4);
        let mut pins: [Pin; 4] = Default::default();
        for step in steps {
            let waited: Vec<bool> = (0..4).map(|pin| get(&mut apic, low(pin)) & REMOTE_IRR != 0).collect();
            let mut sent: Vec<(u8, Option<MsiMessage>)> = Vec::new();
            let mut ended = Vec::new();
            match step {
                Step::Low(pin, value) => sent.push((pin, set(&mut apic, low(pin), value).send)),
                Step::High(pin, value) => sent.push((pin, set(&mut apic, low(pin) + 1, value).send)),
                Step::Line(pin, on) => {
                    pins[usize::from(pin)].asserted = on;
                    sent.push((pin, apic.set_line(pin, on)));
                }
                Step::End(vector) => {
                    apic.end(vector, |pin, send| { ended.push(pin); sent.push((pin, send)); });
                }
                Step::Refused(pin) => apic.refused(pin),
            }
            if let Step::Refused(pin) = step { pins[usize::from(pin)].refused = true }
            for (pin, send) in &sent {
                pins[usize::from(*pin)].refused = false;
                let is_level = apic.is_level(*pin);
                prop_assert!(!(is_level && send.is_some() && waited[usize::from(*pin)] && !ended.contains(pin)), "doubled: {:?}", step);
                prop_assert_eq!(is_level && send.is_some(), is_level && send == &apic.message(*pin) && send.is_some());
            }
            for pin in 0..4u8 {
                let entry = get(&mut apic, low(pin));
                prop_assert_eq!(entry & 0xfffe_1000, 0);
                prop_assert!(entry & REMOTE_IRR == 0 || apic.is_level(pin));
                let state = &pins[usize::from(pin)];
                let due = state.asserted && apic.is_level(pin) && apic.message(pin).is_some() && !state.refused;
                prop_assert!(!due || entry & REMOTE_IRR != 0, "lost: pin {} after {:?}", pin, step);
            }
        }
    }
}

/// Who is told of the end of an interrupt: pins whose level was sent with that vector, and no others.
#[test]
fn pins_that_wait_for_an_end_are_known_by_its_vector() {
    let mut apic = IoApic::new(4);
    for (pin, entry) in [(0, LEVEL | 0x41), (1, 0x41), (2, LEVEL | 0x41), (3, LEVEL | 0x42)] {
        set(&mut apic, low(pin), entry);
    }
    let waiting = |apic: &IoApic, vector| apic.waiting(vector).collect::<Vec<_>>();
    assert_eq!(waiting(&apic, 0x41), []);
    for pin in 0..4 {
        assert!(apic.set_line(pin, true).is_some());
    }
    assert_eq!((waiting(&apic, 0x41), waiting(&apic, 0x42), waiting(&apic, 0x40)), (vec![0, 2], vec![3], vec![]));
    apic.set_line(0, false);
    let mut ended = Vec::new();
    apic.end(0x41, |pin, send| ended.push((pin, send.is_some())));
    assert_eq!(ended, [(0, false), (2, true)], "what was released in between sends nothing");
    assert_eq!(waiting(&apic, 0x41), [2]);
}
