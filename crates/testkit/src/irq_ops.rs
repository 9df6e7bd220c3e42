// SPDX-License-Identifier: Apache-2.0
//! One fuzz input for an interrupt controller: a list of accesses by a guest, events of devices and ends of interrupts, read from
//! raw bytes. Panics when a level is lost or sent twice, or a message is sent that the registers don't hold.
//!
//! `fuzz/fuzz_targets/ioapic.rs` and `vioapic.rs` feed them what the fuzzer finds, and tests below random bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use irq::vioapic::{Mode, OwnPages, Pages, reg};
use irq::{IoApic, MsiMessage, Vioapic};

use crate::ops::Input;

const PINS: u8 = 5;
const REMOTE_IRR: u32 = 1 << 14;

fn low_half(apic: &mut IoApic, pin: u8) -> u32 {
    apic.write(0, &[0x10 + 2 * pin]);
    let mut word = [0; 4];
    apic.read(0x10, &mut word);
    u32::from_le_bytes(word)
}

/// Runs one input on an I/O APIC.
///
/// # Panics
/// When it breaks a rule of level-triggered interrupts.
pub fn ioapic_ops(data: &[u8]) {
    let mut input = Input(data);
    let mut apic = IoApic::new(PINS);
    let (mut asserted, mut refused) = ([false; PINS as usize], [false; PINS as usize]);
    while !input.is_empty() {
        let waited: Vec<bool> = (0..PINS).map(|pin| low_half(&mut apic, pin) & REMOTE_IRR != 0).collect();
        let mut sent: Vec<(u8, MsiMessage)> = Vec::new();
        let mut ended = Vec::new();
        let mut touched = None;
        match input.u8() {
            0..96 => {
                let (select, value) = (0x10 + input.u8() % (2 * PINS), input.u32());
                apic.write(0, &[select]);
                let written = apic.write(0x10, &value.to_le_bytes());
                touched = written.pin;
                sent.extend(written.pin.zip(written.send));
            }
            96..112 => {
                let (offset, len) = (u64::from(input.u8()), usize::from(input.u8() % 9));
                let bytes = [input.u32().to_le_bytes(); 2].concat();
                let written = apic.write(offset, bytes.get(..len).unwrap_or(&[]));
                touched = written.pin;
                sent.extend(written.pin.zip(written.send));
                apic.read(offset, &mut [0; 8]);
            }
            112..192 => {
                let (pin, on) = (input.u8() % PINS, input.u8() & 1 == 1);
                asserted[usize::from(pin)] = on;
                touched = Some(pin);
                sent.extend(apic.set_line(pin, on).map(|message| (pin, message)));
            }
            192..240 => {
                apic.end(input.u8(), |pin, send| {
                    ended.push(pin);
                    sent.extend(send.map(|message| (pin, message)));
                });
            }
            _ => {
                let pin = input.u8() % PINS;
                apic.refused(pin);
                refused[usize::from(pin)] = true;
            }
        }
        for pin in touched.iter().chain(&ended) {
            refused[usize::from(*pin)] = false;
        }
        for (pin, message) in sent {
            assert_eq!(apic.message(pin), Some(message), "pin {pin}");
            let doubled = apic.is_level(pin) && waited[usize::from(pin)] && !ended.contains(&pin);
            assert!(!doubled, "pin {pin} was sent and had not ended");
        }
        for pin in 0..PINS {
            let (index, waits) = (usize::from(pin), low_half(&mut apic, pin) & REMOTE_IRR != 0);
            assert!(!waits || apic.is_level(pin));
            let due = asserted[index] && apic.is_level(pin) && apic.message(pin).is_some();
            assert!(!due || waits || refused[index], "the level of pin {pin} is lost");
        }
    }
}

/// Runs one input on a paravirtual controller, in the mode that its first byte says.
///
/// # Panics
/// When a line is sent again before its service ended, or one that is due is not sent.
pub fn vioapic_ops(data: &[u8]) {
    let mut input = Input(data);
    let mode = [Mode::Trap, Mode::RoPage, Mode::Pv][usize::from(input.u8() % 3)];
    let sent = Arc::new(AtomicU64::new(0));
    let counter = sent.clone();
    // One destination in eight has no CPU.
    let send = move |message: MsiMessage| {
        assert!(message.data >= 16 && message.data < 256 && message.address >> 20 == 0xfee);
        let taken = message.address >> 12 & 7 != 7;
        counter.fetch_add(u64::from(taken), SeqCst);
        taken
    };
    let vioapic = Vioapic::new(OwnPages::default(), mode, send);
    while !input.is_empty() {
        let guest = vioapic.pages().guest();
        let before = sent.load(SeqCst);
        match input.u8() {
            0..64 => {
                vioapic.write(reg::LINE + 8 * u64::from(input.u8() % 64), &[input.u8(), 0, 0, 0, input.u8(), 0, 0, 0])
            }
            64..160 => {
                let at = [reg::MASK, reg::UNMASK, reg::ACK, reg::RAISE][usize::from(input.u8() % 4)];
                vioapic.write(at + 4 * u64::from(input.u8() & 1), &input.u32().to_le_bytes());
            }
            160..176 => {
                let (offset, len) = (u64::from(input.u16()), usize::from(input.u8() % 9));
                vioapic.write(offset, [input.u32().to_le_bytes(); 2].concat().get(..len).unwrap_or(&[]));
                vioapic.read(offset, &mut [0u8; 8][..len]);
            }
            176..208 => {
                let word = [&guest.mask, &guest.unmask, &guest.ack][usize::from(input.u8() % 3)];
                word.store(u64::from(input.u32()) << (input.u8() & 32), SeqCst);
            }
            208..224 => vioapic.doorbell(),
            224..240 => vioapic.assert(input.u8()),
            _ => {
                let still = input.u8() & 1 == 1;
                vioapic.release(input.u8(), &|| still);
            }
        }
        // MASK over the register looks twice; every other access once.
        assert!(sent.load(SeqCst) - before <= 128);
        vioapic.doorbell();
        let settled = sent.load(SeqCst);
        vioapic.doorbell();
        assert_eq!(sent.load(SeqCst), settled, "a line was sent twice");
        let registers = vioapic.pages().registers();
        let isr = registers.get(reg::IRR) & !guest.mask.load(SeqCst);
        assert_eq!((guest.unmask.load(SeqCst), registers.get(reg::ISR)), (0, isr));
        assert_eq!(vioapic.counts().sent, settled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rng;

    #[test]
    fn random_bytes_break_no_rule() {
        let mut rng = Rng::new(7);
        for round in 0..600 {
            let bytes: Vec<u8> = (0..round).map(|_| rng.next() as u8).collect();
            ioapic_ops(&bytes);
            vioapic_ops(&bytes);
        }
    }
}
