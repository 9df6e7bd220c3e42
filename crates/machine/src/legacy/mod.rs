// SPDX-License-Identifier: Apache-2.0
//! The few PC devices a Linux guest still expects at fixed ports.

mod acpi;
mod debug_exit;
mod serial;

pub use acpi::AcpiPorts;
pub use debug_exit::DebugExit;
pub use serial::{Coalesced, SerialPort};

/// What a port write asks of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Nothing more.
    Nothing,
    /// Switch the machine off.
    PowerOff,
    /// Reset it.
    Reset,
    /// Note that the guest's kernel panicked.
    Panic,
    /// End the machine with this exit status.
    Exit(u8),
    /// Note a marker of the guest: its port and value.
    Mark(u16, u8),
}

/// i8042 command port (and status when read).
pub const I8042_COMMAND: u16 = 0x64;
/// i8042 data port.
pub const I8042_DATA: u16 = 0x60;
/// Command that pulses the CPU's reset line.
pub const I8042_RESET: u8 = 0xfe;
/// pvpanic: bit 0, the guest panicked (QEMU docs/specs/pvpanic).
pub const PVPANIC_PANICKED: u8 = 1;
/// pvpanic: bit 1, the guest panicked and its crash kernel takes over.
pub const PVPANIC_CRASH_LOADED: u8 = 2;
