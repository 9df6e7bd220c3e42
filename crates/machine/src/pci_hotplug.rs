// SPDX-License-Identifier: Apache-2.0
//! How the guest hears that a PCI function came or is to go, and says that it let go of one: three registers that the methods
//! in the DSDT use (`boot::acpi`), and the interrupt of their event device.
//!
//! vCPU threads read and write, the API's thread notes what is new; one lock, held for a moment.
//!
//! | port | read | written |
//! |---|---|---|
//! | 0 | slots with a function that is new, since the last read | nothing |
//! | 4 | slots whose function is to go, since the last read | nothing |
//! | 8 | 0 | slots that the guest let go of |

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use irq::IrqLine;

/// Offset of the slots that are new.
const UP: u16 = 0;
/// Offset of the slots that are to go.
const DOWN: u16 = 4;
/// Offset of the slots that were let go of.
const EJECT: u16 = 8;

/// What the guest has not read yet, a bit for each slot.
#[derive(Debug, Default)]
struct Waiting {
    up: u32,
    down: u32,
}

/// The registers.
pub struct PciHotplug {
    waiting: Mutex<Waiting>,
    line: Arc<dyn IrqLine>,
}

impl PciHotplug {
    /// Registers whose news the guest hears of by `line`.
    #[must_use]
    pub fn new(line: Arc<dyn IrqLine>) -> Self {
        Self { waiting: Mutex::default(), line }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A function came to `slot`.
    pub fn came(&self, slot: u8) {
        self.waiting().up |= 1 << slot;
        self.line.pulse();
    }

    /// The function in `slot` is to go.
    pub fn ask_back(&self, slot: u8) {
        self.waiting().down |= 1 << slot;
        self.line.pulse();
    }

    /// It may stay, if the guest has not read that it is to go.
    pub fn leave(&self, slot: u8) {
        self.waiting().down &= !(1 << slot);
    }

    /// Answers a read. Registers are read whole; anything else reads as 0 and changes nothing.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        let value = match (offset, data.len()) {
            (UP, 4) => std::mem::take(&mut self.waiting().up),
            (DOWN, 4) => std::mem::take(&mut self.waiting().down),
            _ => 0,
        };
        data.fill(0);
        data.iter_mut().zip(value.to_le_bytes()).for_each(|(out, byte)| *out = byte);
    }

    /// Answers a write: the slots that the guest let go of, lowest first.
    pub fn write(offset: u16, data: &[u8]) -> impl Iterator<Item = u8> + use<> {
        let mask = match (offset, data) {
            (EJECT, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]),
            _ => 0,
        };
        (0..32).filter(move |slot| mask >> slot & 1 == 1)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[derive(Default)]
    struct Counted(AtomicU32);

    impl IrqLine for Counted {
        fn pulse(&self) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn what_is_new_is_told_once() {
        let line = Arc::new(Counted::default());
        let registers = PciHotplug::new(line.clone());
        let read = |offset, len: usize| {
            let mut data = vec![0xee; len];
            registers.read(offset, &mut data);
            data
        };
        registers.came(1);
        registers.came(31);
        registers.ask_back(3);
        assert_eq!(line.0.load(Ordering::Relaxed), 3);
        assert_eq!((read(0, 1), read(1, 2), read(12, 4)), (vec![0], vec![0; 2], vec![0; 4]), "whole registers alone");
        assert_eq!((read(0, 4), read(0, 4)), (vec![2, 0, 0, 0x80], vec![0; 4]));
        registers.ask_back(4);
        registers.leave(3);
        assert_eq!((read(4, 4), read(4, 4)), (vec![0x10, 0, 0, 0], vec![0; 4]));
        assert_eq!(read(8, 4), vec![0; 4]);
    }

    #[test]
    fn ejects_name_slots_and_nothing_else_is_an_eject() {
        let slots = |offset, data: &[u8]| PciHotplug::write(offset, data).collect::<Vec<_>>();
        assert_eq!(slots(8, &[0x12, 0, 0, 0x80]), [1, 4, 31]);
        assert_eq!(slots(8, &[0x12]), []);
        assert_eq!(slots(0, &[0xff; 4]), []);
        assert_eq!(slots(9, &[0xff; 4]), []);
    }
}
