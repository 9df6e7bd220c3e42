// SPDX-License-Identifier: Apache-2.0
//! ACPI's sleep control, sleep status and reset registers for hardware-reduced machines (ACPI 6.4, 4.8.3.6 and 4.8.3.7).
//!
//! Three consecutive byte ports that read as 0. Written by vCPU threads; no state, so no lock.

use base::Gsi;
use boot::PmPorts;

use super::Ask;

/// What the FADT tells the guest to write to the reset register.
const RESET_VALUE: u8 = 1;
/// Sleep type field and enable bit of the sleep control register.
const SLEEP_MASK: u8 = 7 << 2 | PmPorts::SLP_EN;

/// The three registers, by offset: 0 sleep control, 1 sleep status, 2 reset.
pub struct AcpiPorts;

impl AcpiPorts {
    /// How the tables describe the ports at `first` to the guest, with the power button on `button`.
    #[must_use]
    pub fn describe(first: u16, button: Gsi) -> PmPorts {
        PmPorts { sleep_control: first, sleep_status: first + 1, reset: first + 2, reset_value: RESET_VALUE, button }
    }

    /// Writes it.
    #[must_use]
    pub fn write(offset: u16, value: u8) -> Ask {
        match offset {
            0 if value & SLEEP_MASK == PmPorts::POWER_OFF => Ask::PowerOff,
            2 if value == RESET_VALUE => Ask::Reset,
            _ => Ask::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_enabled_s5_powers_off() {
        assert_eq!(AcpiPorts::write(0, 5 << 2 | 1 << 5), Ask::PowerOff);
        assert_eq!(AcpiPorts::write(0, 5 << 2), Ask::Nothing);
        assert_eq!(AcpiPorts::write(0, 3 << 2 | 1 << 5), Ask::Nothing);
        assert_eq!(AcpiPorts::write(1, 0xff), Ask::Nothing);
        assert_eq!(AcpiPorts::write(2, 1), Ask::Reset);
        assert_eq!(AcpiPorts::write(2, 0), Ask::Nothing);
    }
}
