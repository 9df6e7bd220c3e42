// SPDX-License-Identifier: Apache-2.0
//! Where things are in the guest's physical address space and port space. RAM itself is laid out by `mem`.
//!
//! ```text
//! 0xc000_0000  PCI memory window (BARs)      0xfec0_0000  IOAPIC
//! 0xe000_0000  ECAM, one bus                 0xfee0_0000  local APIC (in KVM)
//! 0xe100_0000  virtio registers              0xfeff_c000  KVM's own pages
//! 0xfec1_0000  paravirtual interrupt controller
//! 4 GiB        high RAM, then the 64-bit PCI window
//! ```

use base::{Gpa, Gsi};

/// Memory window of the PCI host bridge below 4 GiB: all BARs that tare places.
pub const PCI_WINDOW: (Gpa, u64) = (Gpa(0xc000_0000), 0x2000_0000);
/// First and last port of the PCI host bridge, past all legacy devices.
pub const PCI_PORTS: (u16, u16) = (0x1000, 0xffff);
/// ECAM (PCIe 5.0, 7.2.2): 1 MiB for bus 0.
pub const ECAM: (Gpa, u64) = (Gpa(0xe000_0000), 0x10_0000);
/// First page of virtio registers, where devices are no PCI functions.
pub const VIRTIO_MMIO: Gpa = Gpa(0xe100_0000);
/// The most such pages.
pub const VIRTIO_MMIO_MOST: usize = 64;
/// Interrupts for them, in the order of the devices; then they are shared, from the first one on. Those below 16 first: a
/// kernel that reads no tables has no others. Clock, keyboard, and what ports of a PC have, and the numbers that a PIC
/// uses for spurious interrupts, are left out.
pub const VIRTIO_MMIO_GSIS: [Gsi; 13] =
    [Gsi(6), Gsi(9), Gsi(10), Gsi(11), Gsi(14), Gsi(16), Gsi(17), Gsi(18), Gsi(19), Gsi(20), Gsi(21), Gsi(22), Gsi(23)];
/// Size of the PCI window above high RAM.
pub const PCI_WINDOW_HIGH: u64 = 16 << 30;

/// Where that window begins: past all RAM and past what can be plugged.
#[must_use]
pub fn high_window(ram: &mem::GuestRam) -> Gpa {
    let to_plug = ram.hot().map(|hot| hot.start().0 + hot.size());
    let end = ram.regions().map(|(at, size, _)| at.0 + size).chain(to_plug).max().unwrap_or(0).max(mem::HIGH_START);
    Gpa(end.next_multiple_of(1 << 30))
}

/// First port of the 16550.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Interrupt of the 16550.
pub const SERIAL_GSI: Gsi = Gsi(4);
/// pvpanic's port, where its ACPI device and the Linux driver expect it.
pub const PVPANIC_PORT: u16 = 0x505;
/// ACPI sleep control, sleep status and reset registers, one byte each.
pub const ACPI_PORT: u16 = 0x600;
/// First of the interrupts for pins of PCI functions: slots take turns.
pub const PCI_PIN_GSI: Gsi = Gsi(16);
/// How many there are.
pub const PCI_PINS: u32 = 4;
/// First of the ports through which PCI functions are plugged, and how many there are: three double words.
pub const PCI_HOTPLUG_PORTS: (u16, u64) = (0x610, 12);
/// Interrupt of the ACPI generic event device that says that one is.
pub const PCI_HOTPLUG_GSI: Gsi = Gsi(9);
/// Interrupt of the ACPI generic event device that carries the power button.
pub const ACPI_EVENT_GSI: Gsi = Gsi(5);
/// The I/O APIC's page.
pub const IOAPIC: (Gpa, u64) = (Gpa(0xfec0_0000), 0x1000);
/// The paravirtual interrupt controller: registers, the guest's words, a doorbell; a page each.
pub const VIOAPIC: (Gpa, u64) = (Gpa(0xfec1_0000), 0x3000);
/// First interrupt number for messages: past the 24 pins of an I/O APIC.
pub const FIRST_MSI_GSI: u32 = 24;
