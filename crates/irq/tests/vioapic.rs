// SPDX-License-Identifier: Apache-2.0
//! The paravirtual controller register by register and bit by bit, as docs/vioapic.md has them, and random guests against what
//! must hold whatever they do.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, Mutex};

use irq::vioapic::{Counts, Mode, OwnPages, Pages, reg};
use irq::{MsiMessage, Vioapic};
use proptest::prelude::*;

type Sent = Arc<Mutex<Vec<MsiMessage>>>;

const MODES: [Mode; 3] = [Mode::Trap, Mode::RoPage, Mode::Pv];

/// A controller whose messages are written down; those to destination 9 are taken by nobody.
fn controller(mode: Mode) -> (Vioapic<OwnPages>, Sent) {
    let sent = Sent::default();
    let sink = sent.clone();
    let send = move |message: MsiMessage| {
        let taken = message.address >> 12 & 0xff != 9;
        if taken {
            sink.lock().unwrap().push(message);
        }
        taken
    };
    (Vioapic::new(OwnPages::default(), mode, send), sent)
}

fn get(vioapic: &Vioapic<OwnPages>, offset: u64) -> u64 {
    let mut word = [0xa5; 8];
    vioapic.read(offset, &mut word);
    u64::from_le_bytes(word)
}

fn set(vioapic: &Vioapic<OwnPages>, offset: u64, value: u64) {
    vioapic.write(offset, &value.to_le_bytes());
}

fn line(number: u64) -> u64 {
    reg::LINE + 8 * number
}

/// Each register: its first value, and what a write of one bit makes of it.
#[test]
fn each_bit_is_the_guests_or_not() {
    const LINE_BITS: u64 = 0xff_0000_00ff;
    for mode in MODES {
        let first_mode = 64 << 32 | mode as u64;
        // Offset, first value, bits that a write sets, bits that a write clears.
        let table: &[(u64, u64, u64, u64)] = &[
            (reg::MAGIC, u64::from_le_bytes(*b"vioapic1"), 0, 0),
            (reg::MODE, first_mode, 0, 0),
            (reg::IRR, 0, 0, 0),
            (reg::ISR, 0, 0, 0),
            (reg::MASK, u64::MAX, u64::MAX, 0),
            (reg::UNMASK, 0, 0, 0),
            (reg::ACK, 0, 0, 0),
            (reg::RAISE, 0, 0, 0),
            (reg::LEVEL, 0, 0, 0),
            (reg::EVENT, 0, 0, 0),
            (reg::RESET, 0, 0, 0),
            (0x58, 0, 0, 0),
            (0xf8, 0, 0, 0),
            (line(0), 0, LINE_BITS, u64::MAX),
            (line(63), 0, LINE_BITS, u64::MAX),
            (reg::DEVICE, 0, 0, 0),
            (reg::DEVICE + 8 * 63, 0, 0, 0),
            (reg::SIZE, 0, 0, 0),
            (0xff8, 0, 0, 0),
        ];
        for &(offset, first, sets, clears) in table {
            for bit in 0..64 {
                let (vioapic, sent) = controller(mode);
                assert_eq!(get(&vioapic, offset), first, "{mode:?} {offset:#x}");
                set(&vioapic, offset, 1 << bit);
                let expected = (first & !clears) | (1 << bit & sets);
                assert_eq!(get(&vioapic, offset), expected, "{mode:?}: bit {bit} of {offset:#x}");
                assert_eq!(*sent.lock().unwrap(), [], "nothing has a vector");
            }
        }
    }
}

/// What each bit of UNMASK, MASK, RAISE and ACK does to IRR, ISR, MASK and EVENT.
#[test]
fn each_line_by_each_register() {
    for mode in MODES {
        for number in 0..64 {
            let (vioapic, sent) = controller(mode);
            let bit = 1u64 << number;
            let shown = || [reg::IRR, reg::ISR, reg::MASK, reg::EVENT].map(|at| get(&vioapic, at));
            set(&vioapic, line(number), 5 << 32 | 0x40);
            set(&vioapic, reg::RAISE, bit);
            assert_eq!(shown(), [bit, 0, u64::MAX, bit], "masked");
            assert_eq!(*sent.lock().unwrap(), []);
            set(&vioapic, reg::UNMASK, bit);
            assert_eq!(shown(), [bit, bit, !bit, bit]);
            let message = MsiMessage { address: 0xfee0_5000, data: 0x40 };
            assert_eq!(*sent.lock().unwrap(), [message]);
            set(&vioapic, reg::RAISE, bit);
            assert_eq!(*sent.lock().unwrap(), [message], "one at a time");
            set(&vioapic, reg::MASK, bit);
            assert_eq!(shown(), [bit, 0, u64::MAX, bit]);
            set(&vioapic, reg::ACK, bit);
            assert_eq!(shown(), [0, 0, u64::MAX, bit]);
            set(&vioapic, reg::RAISE, bit);
            assert_eq!(shown(), [bit, 0, u64::MAX, 0], "the next event flips back");
            set(&vioapic, reg::UNMASK, bit);
            assert_eq!(*sent.lock().unwrap(), [message, message]);
            let counts = Counts { events: 2, merged: 1, sent: 2, refused: 0 };
            assert_eq!(vioapic.counts(), counts);
            set(&vioapic, reg::RESET, 1);
            assert_eq!(shown(), [0, 0, u64::MAX, 0]);
            assert_eq!(get(&vioapic, line(number)), 0);
        }
    }
}

#[test]
fn a_level_comes_again_until_it_goes_down() {
    let (vioapic, sent) = controller(Mode::RoPage);
    set(&vioapic, line(7), 0x31);
    set(&vioapic, reg::UNMASK, 1 << 7);
    vioapic.assert(7);
    vioapic.assert(7);
    set(&vioapic, reg::ACK, 1 << 7);
    assert_eq!((get(&vioapic, reg::IRR), sent.lock().unwrap().len()), (1 << 7, 1), "no event, and no end of it");
    set(&vioapic, reg::UNMASK, 1 << 7);
    assert_eq!(sent.lock().unwrap().len(), 2, "still asserted");
    vioapic.release(7, &|| true);
    assert_eq!((get(&vioapic, reg::LEVEL), sent.lock().unwrap().len()), (1 << 7, 2));
    vioapic.release(7, &|| false);
    assert_eq!(get(&vioapic, reg::IRR), 0);
    // A guest that quiets its device is in its handler still: no second message until it says that it is done.
    vioapic.assert(7);
    assert_eq!(sent.lock().unwrap().len(), 2);
    set(&vioapic, reg::UNMASK, 1 << 7);
    assert_eq!(sent.lock().unwrap().len(), 3);
    vioapic.release(7, &|| false);
    set(&vioapic, reg::UNMASK, 1 << 7);
    vioapic.assert(7);
    assert_eq!(sent.lock().unwrap().len(), 4);
}

#[test]
fn a_message_that_nobody_takes_waits_for_another_destination() {
    let (vioapic, sent) = controller(Mode::Trap);
    for nowhere in [0x0f, 9 << 32 | 0x31] {
        set(&vioapic, line(1), nowhere);
        set(&vioapic, reg::UNMASK, 2);
        set(&vioapic, reg::RAISE, 2);
        assert_eq!(*sent.lock().unwrap(), []);
    }
    vioapic.write(line(1) + 4, &8u32.to_le_bytes());
    assert_eq!(*sent.lock().unwrap(), [MsiMessage { address: 0xfee0_8000, data: 0x31 }]);
    assert!(vioapic.counts().refused > 0);
}

#[test]
fn halves_of_registers_are_registers() {
    let (vioapic, _) = controller(Mode::Trap);
    vioapic.write(reg::UNMASK + 4, &0x8000_0001u32.to_le_bytes());
    assert_eq!(get(&vioapic, reg::MASK), !0x8000_0001_0000_0000);
    vioapic.write(line(2), &0x55u32.to_le_bytes());
    vioapic.write(line(2) + 4, &3u32.to_le_bytes());
    assert_eq!(get(&vioapic, line(2)), 3 << 32 | 0x55);
    let mut half = [0; 4];
    vioapic.read(reg::MASK + 4, &mut half);
    assert_eq!(u32::from_le_bytes(half), !0x8000_0001);
}

#[test]
fn odd_accesses_do_nothing_odd() {
    let (vioapic, sent) = controller(Mode::Pv);
    for offset in 0..0x1010u64 {
        for len in [0, 1, 2, 3, 4, 5, 7, 8, 16] {
            if matches!(len, 4 | 8) && offset % len == 0 {
                continue;
            }
            let mut data = [0xffu8; 16];
            vioapic.write(offset, &data[..len as usize]);
            vioapic.read(offset, &mut data[..len as usize]);
            assert!(data[..len as usize].iter().all(|byte| *byte == 0));
        }
    }
    vioapic.write(u64::MAX, &[0; 1]);
    vioapic.write(u64::MAX - 7, &[0xff; 8]);
    assert_eq!((get(&vioapic, reg::MASK), sent.lock().unwrap().len()), (u64::MAX, 0));
    vioapic.describe(63, 0xe100_0000);
    assert_eq!(get(&vioapic, reg::DEVICE + 8 * 63), 0xe100_0000);
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64),
    Store(u8, u64),
    Ring,
    Assert(u8),
    Release(u8, bool),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bits = prop_oneof![0..16u64, any::<u64>()];
    let register = prop::sample::select(vec![
        reg::MASK,
        reg::UNMASK,
        reg::UNMASK,
        reg::ACK,
        reg::RAISE,
        reg::RAISE,
        reg::RESET,
        reg::LINE,
        reg::LINE + 8,
    ]);
    let config = prop::sample::select(vec![0x31u64, 0x32, 1 << 32 | 0x31, 9 << 32 | 0x31, 3]);
    let step = prop_oneof![
        8 => (register, bits.clone()).prop_map(|(at, value)| Step::Write(at, value)),
        2 => (0..2u64, config).prop_map(|(number, value)| Step::Write(line(number), value)),
        4 => (0..3u8, bits).prop_map(|(word, value)| Step::Store(word, value)),
        2 => Just(Step::Ring),
        1 => (0..4u8).prop_map(Step::Assert),
        1 => (0..4u8, any::<bool>()).prop_map(|(number, still)| Step::Release(number, still)),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    /// Whatever a guest stores and writes: a line is sent at most once between two endings of its service (by UNMASK or RESET);
    /// and once the monitor has looked, none is due that was not sent and can be.
    #[test]
    fn a_hostile_guest_gets_each_line_once(steps in steps(), mode in prop::sample::select(MODES.to_vec())) {
        let (vioapic, sent) = controller(mode);
        for step in steps {
            let guest = vioapic.pages().guest();
            let before = vioapic.counts();
            sent.lock().unwrap().clear();
            match step {
                Step::Write(at, value) => set(&vioapic, at, value),
                Step::Store(0, value) => guest.mask.store(value, SeqCst),
                Step::Store(1, value) => guest.unmask.store(value, SeqCst),
                Step::Store(_, value) => guest.ack.store(value, SeqCst),
                Step::Ring => vioapic.doorbell(),
                Step::Assert(number) => vioapic.assert(number),
                Step::Release(number, still) => vioapic.release(number, &|| still),
            }
            let after = vioapic.counts();
            let now = sent.lock().unwrap().len() as u64;
            prop_assert_eq!(after.sent - before.sent, now);
            prop_assert!(now <= 4, "two lines have vectors; MASK over the register looks twice");
            if !matches!(step, Step::Store(..)) {
                prop_assert_eq!(guest.unmask.load(SeqCst), 0, "taken over");
                let registers = vioapic.pages().registers();
                let irr = registers.get(reg::LEVEL) | (registers.get(reg::EVENT) ^ guest.ack.load(SeqCst));
                prop_assert_eq!(registers.get(reg::IRR), irr);
                prop_assert_eq!(registers.get(reg::ISR), irr & !guest.mask.load(SeqCst));
            }
            // A second look finds nothing new but what was refused.
            sent.lock().unwrap().clear();
            vioapic.doorbell();
            if !matches!(step, Step::Store(..)) {
                prop_assert_eq!(sent.lock().unwrap().len(), 0);
            }
        }
    }
}
