// SPDX-License-Identifier: Apache-2.0
//! The I/O APIC's registers (Intel 82093AA, section 3.2) for a handful of edge-triggered pins: what a guest programs a pin
//! with becomes a message.
//!
//! `machine` answers accesses to its page with this, under its own lock, and routes each pin's interrupt to the message.
//! A guest reads and writes each entry of an I/O APIC several times while it boots, so it matters how many there are:
//! KVM's own has 24.

use crate::MsiMessage;

/// Register select: an offset into the page.
const SELECT: u64 = 0x00;
/// The selected register.
const WINDOW: u64 = 0x10;
const ID: u8 = 0;
const VERSION: u8 = 1;
const ARBITRATION: u8 = 2;
/// First half of the first entry.
const ENTRIES: u8 = 0x10;
/// What the version register says in its low byte.
const VERSION_11: u32 = 0x11;

const MASKED: u64 = 1 << 16;
/// Delivery status and remote IRR: the guest can't write them.
const READ_ONLY: u64 = 1 << 12 | 1 << 14;
const LOGICAL: u64 = 1 << 11;
/// Delivery mode and vector.
const MODE_AND_VECTOR: u64 = 0x7ff;
/// Where messages go.
const MSI_BASE: u64 = 0xfee0_0000;

/// An I/O APIC.
#[derive(Debug)]
pub struct IoApic {
    select: u8,
    id: u32,
    entries: Vec<u64>,
}

impl IoApic {
    /// As after a reset, with 1 to 240 pins, all masked.
    #[must_use]
    pub fn new(pins: u8) -> Self {
        Self { select: 0, id: 0, entries: vec![MASKED; usize::from(pins.clamp(1, 240))] }
    }

    /// Number of pins.
    #[must_use]
    pub fn pins(&self) -> u8 {
        self.entries.len() as u8
    }

    /// Reads at byte `offset` of the page. Registers are 32 bits wide; what is not there reads as 0.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            SELECT => u32::from(self.select),
            WINDOW => self.register(),
            _ => 0,
        };
        data.fill(0);
        for (out, byte) in data.iter_mut().zip(value.to_le_bytes()) {
            *out = byte;
        }
    }

    /// Writes at byte `offset` of the page; gives the pin whose message may be another now.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Option<u8> {
        let mut word = [0; 4];
        for (out, byte) in word.iter_mut().zip(data) {
            *out = *byte;
        }
        match offset {
            SELECT => {
                self.select = word[0];
                None
            }
            WINDOW => self.set_register(u32::from_le_bytes(word)),
            _ => None,
        }
    }

    /// What `pin` sends; `None` while it is masked.
    #[must_use]
    pub fn message(&self, pin: u8) -> Option<MsiMessage> {
        let entry = *self.entries.get(usize::from(pin)).filter(|entry| **entry & MASKED == 0)?;
        let logical = if entry & LOGICAL != 0 { 1 << 2 } else { 0 };
        Some(MsiMessage { address: MSI_BASE | (entry >> 56) << 12 | logical, data: (entry & MODE_AND_VECTOR) as u32 })
    }

    /// The selected entry and whether its upper half is meant.
    fn entry(&self) -> Option<(usize, bool)> {
        let index = usize::from(self.select.checked_sub(ENTRIES)?);
        (index / 2 < self.entries.len()).then_some((index / 2, index % 2 == 1))
    }

    fn register(&self) -> u32 {
        match (self.select, self.entry()) {
            (_, Some((index, high))) => {
                let entry = self.entries.get(index).copied().unwrap_or(MASKED);
                (if high { entry >> 32 } else { entry }) as u32
            }
            (ID | ARBITRATION, _) => self.id,
            (VERSION, _) => VERSION_11 | (u32::from(self.pins()) - 1) << 16,
            _ => 0,
        }
    }

    fn set_register(&mut self, value: u32) -> Option<u8> {
        if self.select == ID {
            self.id = value & 0x0f00_0000;
            return None;
        }
        let (index, high) = self.entry()?;
        let entry = self.entries.get_mut(index)?;
        *entry = if high {
            (*entry & 0xffff_ffff) | u64::from(value) << 32
        } else {
            (*entry & !0xffff_ffff) | (u64::from(value) & !READ_ONLY & 0x1_ffff)
        };
        Some(index as u8)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn get(apic: &mut IoApic, register: u8) -> u32 {
        assert_eq!(apic.write(SELECT, &u32::from(register).to_le_bytes()), None);
        let mut word = [0xff; 4];
        apic.read(WINDOW, &mut word);
        u32::from_le_bytes(word)
    }

    fn set(apic: &mut IoApic, register: u8, value: u32) -> Option<u8> {
        apic.write(SELECT, &u32::from(register).to_le_bytes());
        apic.write(WINDOW, &value.to_le_bytes())
    }

    #[test]
    fn it_says_what_it_is() {
        let mut apic = IoApic::new(5);
        assert_eq!(get(&mut apic, 1), 4 << 16 | 0x11);
        assert_eq!(get(&mut apic, 0), 0);
        set(&mut apic, 0, 0xffff_ffff);
        assert_eq!(get(&mut apic, 0), 0x0f00_0000);
        for pin in 0..5 {
            assert_eq!((get(&mut apic, 0x10 + 2 * pin), apic.message(pin)), (1 << 16, None));
        }
        assert_eq!(get(&mut apic, 0x10 + 2 * 5), 0, "no sixth pin");
        assert_eq!(set(&mut apic, 0x10 + 2 * 5, 0x31), None);
    }

    #[test]
    fn an_entry_becomes_a_message() {
        let mut apic = IoApic::new(2);
        assert_eq!(set(&mut apic, 0x13, 3 << 24), Some(1));
        assert_eq!(apic.message(1), None, "still masked");
        assert_eq!(set(&mut apic, 0x12, 0x0000_0831), Some(1));
        assert_eq!(apic.message(1), Some(MsiMessage { address: 0xfee0_3004, data: 0x31 }));
        assert_eq!(set(&mut apic, 0x12, 0x0000_f131), Some(1));
        assert_eq!(get(&mut apic, 0x12), 0xa131, "status bits are not the guest's");
        assert_eq!(apic.message(1), Some(MsiMessage { address: 0xfee0_3000, data: 0x131 }));
        assert_eq!(set(&mut apic, 0x12, 0x0001_0031), Some(1));
        assert_eq!(apic.message(1), None);
        assert_eq!(apic.message(0), None);
        assert_eq!(apic.message(7), None);
    }

    #[test]
    fn odd_accesses_do_nothing_odd() {
        let mut apic = IoApic::new(240);
        assert_eq!(apic.pins(), 240);
        for select in 0..=255u8 {
            for offset in [0, 1, 4, 0x10, 0x14, 0x20, 0x40, 0xfff] {
                for len in [0, 1, 2, 4, 8] {
                    let mut data = [0xa5u8; 8];
                    apic.write(SELECT, &[select]);
                    apic.write(offset, &data[..len]);
                    apic.read(offset, &mut data[..len]);
                }
            }
        }
        assert_eq!(IoApic::new(0).pins(), 1);
    }
}
