// SPDX-License-Identifier: Apache-2.0
//! A port that ends the machine with an exit status of the guest's choice, as QEMU's `isa-debug-exit` does for unit tests
//! of kernels. Only on request. Written by vCPU threads; no state, so no lock.

use spec::DEBUG_EXIT_PORTS;

use super::Ask;
use crate::error::Error;
use crate::layout::{ACPI_PORT, PVPANIC_PORT, SERIAL_PORT};
use crate::legacy::{I8042_COMMAND, I8042_DATA};
use crate::timeline::{BOOT_PORT, DEBUG_PORT};

/// Ports that are answered in KVM, or that every machine has, with their last ones.
const TAKEN: [(u16, u16, &str); 9] = [
    (0x20, 0x21, "the interrupt controller"),
    (0xa0, 0xa1, "the interrupt controller"),
    (0x4d0, 0x4d1, "the interrupt controller"),
    (I8042_DATA, I8042_COMMAND, "the keyboard controller"),
    (DEBUG_PORT, DEBUG_PORT, "a boot marker"),
    (BOOT_PORT, BOOT_PORT, "a boot marker"),
    (SERIAL_PORT, SERIAL_PORT + 7, "the serial port"),
    (PVPANIC_PORT, PVPANIC_PORT, "pvpanic"),
    (ACPI_PORT, ACPI_PORT + 2, "the ACPI registers"),
];

/// Where the port is, if there is one: a write to it or to one of the three after it ends the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DebugExit(u16);

impl DebugExit {
    /// One at `port`.
    ///
    /// # Errors
    /// [`Error::TooMuch`] where another device has one of its ports.
    pub fn new(port: u16) -> Result<Self, Error> {
        let last = port.saturating_add(DEBUG_EXIT_PORTS - 1);
        match TAKEN.iter().find(|(from, to, _)| port <= *to && last >= *from) {
            Some((_, _, owner)) => Err(Error::TooMuch(format!(
                "ports {port:#x} to {last:#x} are {owner}'s too: --debug-exit; kvm-unit-tests use 0xf4"
            ))),
            None => Ok(Self(port)),
        }
    }

    /// The first of its ports.
    #[must_use]
    pub const fn first(self) -> u16 {
        self.0
    }

    /// What a write of `data` asks for: a process's status has eight bits, so all but the lowest byte is lost.
    #[must_use]
    pub fn write(data: &[u8]) -> Ask {
        data.first().map_or(Ask::Nothing, |value| Ask::Exit(value << 1 | 1))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_status_is_never_that_of_a_clean_end() {
        for (value, status) in [(0, 1), (1, 3), (0x10, 0x21), (0x7f, 0xff), (0x80, 1), (0xff, 0xff)] {
            assert_eq!(DebugExit::write(&[value, 0, 0, 0]), Ask::Exit(status));
        }
        assert_eq!(DebugExit::write(&[]), Ask::Nothing);
    }

    #[test]
    fn it_has_four_ports_that_are_nobody_elses() {
        let exit = DebugExit::new(0xf4).unwrap();
        assert_eq!(exit.first(), 0xf4);
        let taken = [(0x5d, "keyboard"), (0x3f8, "serial"), (0x3ed, "marker"), (0x1e, "interrupt"), (0x602, "ACPI")];
        for (port, owner) in taken {
            let said = DebugExit::new(port).unwrap_err().to_string();
            assert!(said.contains(owner), "{said}");
        }
        for free in [0, 0x3ec, 0x400, 0xfffc] {
            assert!(DebugExit::new(free).is_ok(), "{free:#x}");
        }
    }
}
