// SPDX-License-Identifier: Apache-2.0
//! The machine as the guest's firmware tables describe it: a plain value that `machine` fills and `load` reads.

use base::{Gpa, Gsi};

use crate::BootError;

/// What the E820 map and the ACPI tables tell the guest about its machine. RAM itself comes from [`mem::GuestRam`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// APIC id of every CPU, the boot CPU's first; 1 to 64 of them, all different, below 255.
    pub apic_ids: Vec<u32>,
    /// Where every CPU sees its local APIC.
    pub lapic: Gpa,
    /// Where the I/O APIC is; its id is 0 and its first input GSI 0.
    pub ioapic: Gpa,
    /// The PCI Express configuration window, if there is a PCI bus at all.
    pub ecam: Option<Ecam>,
    /// Whether ports 0xcf8 to 0xcff answer. A guest with an ECAM needs them for nothing and is quicker without.
    pub conf1: bool,
    /// 32-bit memory for BARs: below 4 GiB, outside RAM; length in bytes, 0 for none.
    pub pci_window32: (Gpa, u64),
    /// 64-bit memory for BARs: past 4 GiB and all RAM; length in bytes, 0 for none.
    pub pci_window64: (Gpa, u64),
    /// What else PCI functions have.
    pub pci: Pci,
    /// Virtio devices that are no PCI functions, in the order the guest should find them.
    pub virtio_mmio: Vec<VirtioMmio>,
    /// The paravirtual interrupt controller's pages (docs/vioapic.md): first byte, below 4 GiB, and length.
    pub vioapic: Option<(Gpa, u32)>,
    /// A 16550 with eight ports, edge triggered.
    pub serial: Option<Serial>,
    /// The port of a pvpanic device, one byte.
    pub pvpanic_port: Option<u16>,
    /// How the guest switches itself off and is asked to.
    pub pm: PmPorts,
    /// Which CPUs and which memory belong together; none: nobody says.
    pub nodes: Vec<Node>,
    /// Where memory may be plugged later: past 4 GiB and all RAM; first byte and length.
    pub to_plug: Option<(Gpa, u64)>,
}

/// What functions on the PCI bus have beside memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pci {
    /// First and last port for BARs, past the legacy devices' below 0x1000.
    pub ports: Option<(u16, u16)>,
    /// First of the level-triggered interrupts for interrupt pins, and how many there are: slot N has the one that N modulo
    /// their number says. `None`: no function has a pin.
    pub pins: Option<(Gsi, u32)>,
    /// How functions come and go, if they may.
    pub hotplug: Option<PciHotplug>,
}

/// CPUs and memory that belong together.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// APIC ids of its CPUs.
    pub apic_ids: Vec<u32>,
    /// Its memory: first byte and length of each range.
    pub memory: Vec<(Gpa, u64)>,
}

/// A PCI Express configuration window: 1 MiB for each bus, starting with bus 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ecam {
    /// First byte; 1 MiB aligned, outside RAM.
    pub base: Gpa,
    /// 1 to 256.
    pub buses: u16,
}

impl Ecam {
    /// Bytes in the window.
    #[must_use]
    pub fn len(&self) -> u64 {
        u64::from(self.buses) << 20
    }

    /// Number of its last bus.
    #[must_use]
    pub fn last_bus(&self) -> u8 {
        self.buses.saturating_sub(1).min(255) as u8
    }

    /// Whether it has no bus; a checked one never is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.buses == 0
    }
}

/// A virtio device as registers in memory (virtio 1.2, 4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtioMmio {
    /// Its first register: below 4 GiB, outside RAM.
    pub at: Gpa,
    /// Bytes of registers.
    pub len: u32,
    /// Its interrupt, edge triggered; several devices may share one.
    pub gsi: Gsi,
}

/// Registers through which PCI functions of bus 0 are plugged (`machine::pci_hotplug`): double words at `port` (slots with
/// new functions), `port + 4` (slots whose functions are to go) and `port + 8` (written: slots that were let go of).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PciHotplug {
    /// First of twelve ports.
    pub port: u16,
    /// Edge triggered: there is something in the first two registers.
    pub gsi: Gsi,
    /// Slots that functions may come to or go from, a bit for each.
    pub slots: u32,
}

/// A 16550.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Serial {
    /// First of eight ports, 0x3f8 for COM1.
    pub port: u16,
    /// Its interrupt, 4 for COM1.
    pub gsi: Gsi,
}

/// The hardware-reduced ACPI power registers (ACPI 6.5, 4.8.3.7), one port each, and the power button's interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PmPorts {
    /// The guest writes [`PmPorts::POWER_OFF`] here to switch itself off.
    pub sleep_control: u16,
    /// Reads as 0; writes are ignored.
    pub sleep_status: u16,
    /// Any write of `reset_value` here resets the guest.
    pub reset: u16,
    /// What the guest writes to `reset`.
    pub reset_value: u8,
    /// Edge triggered: each pulse is one press of the power button.
    pub button: Gsi,
}

impl PmPorts {
    /// The value of the sleep control register that means "off now": SLP_EN with the sleep type of `\_S5`.
    pub const POWER_OFF: u8 = Self::SLP_EN | Self::S5 << 2;
    /// Sleep type of S5 as `\_S5` names it.
    pub const S5: u8 = 5;
    /// "Do it now" bit of the sleep control register.
    pub const SLP_EN: u8 = 1 << 5;
}

impl Platform {
    /// Most CPUs the tables are made for.
    pub const MAX_CPUS: usize = 64;
    /// Most nodes the tables are made for.
    pub const MAX_NODES: usize = 16;

    /// Whether the tables can describe it.
    ///
    /// # Errors
    /// [`BootError::Platform`] naming the field.
    pub fn check(&self) -> Result<(), BootError> {
        let bad = |what: String| Err(BootError::Platform(what));
        let n = self.apic_ids.len();
        if n == 0 || n > Self::MAX_CPUS {
            return bad(format!("{n} CPUs, need 1 to {}", Self::MAX_CPUS));
        }
        let mut ids = self.apic_ids.clone();
        ids.sort_unstable();
        if ids.windows(2).any(|w| w[0] == w[1]) {
            return bad("two CPUs share an APIC id".into());
        }
        if let Some(id) = ids.iter().find(|id| **id >= 255) {
            return bad(format!("APIC id {id}, need less than 255"));
        }
        for (name, at) in [("local APIC", self.lapic), ("I/O APIC", self.ioapic)] {
            if at.0 > u64::from(u32::MAX) || at.0 & 0xfff != 0 {
                return bad(format!("{name} at {at}, need a page below 4 GiB"));
            }
        }
        if let Some(ecam) = self.ecam
            && (ecam.buses == 0
                || ecam.buses > 256
                || ecam.base.0 & 0xf_ffff != 0
                || ecam.base.checked_add(ecam.len()).is_none())
        {
            return bad(format!("ECAM of {} buses at {}", ecam.buses, ecam.base));
        }
        let (at32, len32) = self.pci_window32;
        if at32.checked_add(len32).is_none_or(|end| end.0 > mem::HIGH_START) {
            return bad(format!("32-bit PCI window of {len32} bytes at {at32}"));
        }
        if let Some((first, last)) = self.pci.ports
            && (first < 0x1000 || first > last)
        {
            return bad(format!("PCI ports from {first:#x} to {last:#x}"));
        }
        let (at64, len64) = self.pci_window64;
        if at64.checked_add(len64).is_none() || (len64 > 0 && at64.0 < mem::HIGH_START) {
            return bad(format!("64-bit PCI window of {len64} bytes at {at64}"));
        }
        let mut taken = vec![(self.lapic.0, 4096), (self.ioapic.0, 4096), (at32.0, len32), (at64.0, len64)];
        taken.extend(self.ecam.map(|e| (e.base.0, e.len())));
        for device in &self.virtio_mmio {
            let len = u64::from(device.len);
            if len == 0 || device.at.checked_add(len).is_none_or(|end| end.0 > mem::HIGH_START) {
                return bad(format!("virtio registers of {len} bytes at {}", device.at));
            }
            taken.push((device.at.0, len));
        }
        taken.extend(self.vioapic.map(|(at, len)| (at.0, u64::from(len))));
        if let Some((at, len)) = self.to_plug
            && (at.checked_add(len).is_none() || at.0 < mem::HIGH_START)
        {
            return bad(format!("{len} bytes to plug at {at}"));
        }
        taken.extend(self.to_plug.map(|(at, len)| (at.0, len)));
        self.check_nodes()?;
        taken.retain(|(_, len)| *len > 0);
        taken.sort_unstable();
        if let Some(w) = taken.windows(2).find(|w| w[0].0 + w[0].1 > w[1].0) {
            return bad(format!("device memory at {:#x} overlaps {:#x}", w[0].0, w[1].0));
        }
        Ok(())
    }

    /// Nodes hold each CPU once, where there are any.
    fn check_nodes(&self) -> Result<(), BootError> {
        let mut ids: Vec<u32> = self.nodes.iter().flat_map(|node| node.apic_ids.iter().copied()).collect();
        let mut all = self.apic_ids.clone();
        ids.sort_unstable();
        all.sort_unstable();
        if self.nodes.len() > Self::MAX_NODES || (!self.nodes.is_empty() && ids != all) {
            return Err(BootError::Platform(format!("{} nodes that do not hold each CPU once", self.nodes.len())));
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A plain machine with everything in it.
    pub(crate) fn platform() -> Platform {
        Platform {
            apic_ids: vec![0, 1],
            lapic: Gpa(0xfee0_0000),
            ioapic: Gpa(0xfec0_0000),
            ecam: Some(Ecam { base: Gpa(0xe000_0000), buses: 1 }),
            conf1: false,
            pci_window32: (Gpa(0xc000_0000), 0x2000_0000),
            pci_window64: (Gpa(0x40_0000_0000), 0x40_0000_0000),
            pci: Pci { ports: Some((0x1000, 0xffff)), ..Pci::default() },
            virtio_mmio: Vec::new(),
            vioapic: None,
            serial: Some(Serial { port: 0x3f8, gsi: Gsi(4) }),
            pvpanic_port: Some(0x505),
            pm: PmPorts { sleep_control: 0x600, sleep_status: 0x601, reset: 0x602, reset_value: 1, button: Gsi(5) },
            nodes: Vec::new(),
            to_plug: None,
        }
    }

    fn registers(at: u64, len: u32) -> Vec<VirtioMmio> {
        vec![VirtioMmio { at: Gpa(at), len, gsi: Gsi(6) }]
    }

    #[test]
    fn what_cannot_be_described_is_named() {
        let check = |f: fn(&mut Platform), word: &str| {
            let mut p = platform();
            f(&mut p);
            let text = p.check().map_err(|e| e.to_string());
            assert!(text.as_ref().is_err_and(|t| t.contains(word)), "{text:?} lacks {word}");
        };
        assert!(platform().check().is_ok());
        check(|p| p.apic_ids.clear(), "0 CPUs");
        check(|p| p.apic_ids = (0..65).collect(), "65 CPUs");
        check(|p| p.apic_ids = vec![3, 1, 3], "share");
        check(|p| p.apic_ids = vec![255], "255");
        check(|p| p.pci_window32.1 = 0x2000_0001, "overlaps");
        check(|p| p.ioapic = Gpa(0xfec0_0010), "I/O APIC");
        check(|p| p.ecam = Some(Ecam { base: Gpa(0xe000_0000), buses: 257 }), "257 buses");
        check(|p| p.ecam = Some(Ecam { base: Gpa(u64::MAX << 20), buses: 1 }), "ECAM");
        check(|p| p.pci_window32.1 = 0x4000_0001, "32-bit");
        check(|p| p.pci_window64.0 = Gpa(0x1000), "64-bit");
        check(|p| p.pci.ports = Some((0xcf8, 0xcff)), "ports");
        check(|p| p.pci.ports = Some((0x2000, 0x1fff)), "ports");
        check(|p| p.to_plug = Some((Gpa(0x40_0000_0000), 1 << 30)), "overlaps");
        check(|p| p.to_plug = Some((Gpa(0x8000_0000), 1 << 30)), "to plug");
        check(|p| p.nodes = vec![Node { apic_ids: vec![0], memory: Vec::new() }], "each CPU once");
        check(|p| p.nodes = vec![Node { apic_ids: vec![0, 1], memory: Vec::new() }; 2], "each CPU once");
        check(|p| p.virtio_mmio = registers(0xe100_0000, 0), "virtio registers of 0 bytes");
        check(|p| p.virtio_mmio = registers(0xffff_f000, 0x2000), "virtio registers of 8192");
        check(|p| p.virtio_mmio = registers(u64::MAX - 7, 0x1000), "virtio registers");
        check(|p| p.virtio_mmio = registers(0xe000_f000, 0x1000), "overlaps");
        check(
            |p| p.virtio_mmio = [registers(0xe100_0000, 0x1000), registers(0xe100_0800, 0x1000)].concat(),
            "overlaps",
        );
    }
}
