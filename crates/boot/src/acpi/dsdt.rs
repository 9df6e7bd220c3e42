// SPDX-License-Identifier: Apache-2.0
//! The differentiated system description table: the devices the guest can't find by itself.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Arg, Device, EISAName, Equal, IO, If, Interrupt, Memory32Fixed, Method, Name,
    Notify, Package, Path, ResourceTemplate, Scope,
};
use acpi_tables::sdt::Sdt;
use base::Gsi;

use super::hotplug;
use super::{OEM, OEM_REVISION, OEM_TABLE};
use crate::platform::{Ecam, Platform, PmPorts, Serial, VirtioMmio};

/// Notification of a power button: it was pressed.
const PRESSED: u8 = 0x80;

/// The table for `platform`.
pub fn table(platform: &Platform) -> Sdt {
    let mut aml = Vec::with_capacity(1024);
    let (s5, zero) = (PmPorts::S5, 0u8);
    Name::new("_S5_".into(), &Package::new(vec![&s5, &zero, &zero, &zero])).to_aml_bytes(&mut aml);
    if let Some(ecam) = platform.ecam {
        in_system_bus(&mut aml, |out| host_bridge(platform, ecam, out));
        in_system_bus(&mut aml, |out| motherboard(ecam, out));
    }
    for (number, device) in platform.virtio_mmio.iter().enumerate() {
        let shared = platform.virtio_mmio.iter().filter(|other| other.gsi == device.gsi).count() > 1;
        in_system_bus(&mut aml, |out| virtio(number, device, shared, out));
    }
    if let Some((at, len)) = platform.vioapic {
        in_system_bus(&mut aml, |out| vioapic(at.0 as u32, len, out));
    }
    if let Some(serial) = platform.serial {
        in_system_bus(&mut aml, |out| com(serial, out));
    }
    if let Some(port) = platform.pvpanic_port {
        in_system_bus(&mut aml, |out| pvpanic(port, out));
    }
    in_system_bus(&mut aml, |out| events(platform, out));
    let mut sdt = Sdt::new(*b"DSDT", 36, 2, OEM, OEM_TABLE, OEM_REVISION);
    sdt.append_slice(&aml);
    sdt
}

/// Bytes that are AML already.
struct Raw(Vec<u8>);

impl Aml for Raw {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.vec(&self.0);
    }
}

/// Wraps what `make` writes in `Scope (\_SB)`.
fn in_system_bus(aml: &mut Vec<u8>, make: impl FnOnce(&mut Vec<u8>)) {
    let mut inner = Raw(Vec::new());
    make(&mut inner.0);
    Scope::new("_SB_".into(), vec![&inner]).to_aml_bytes(aml);
}

/// Which interrupt the first pin of each slot has (ACPI 6.5, 6.2.13); functions of tare have no others.
fn routing((first, count): (Gsi, u32), out: &mut Vec<u8>) {
    let (pin, source) = (0u8, 0u8);
    let entry = |slot: u32| {
        let (slot, gsi) = (slot << 16 | 0xffff, first.0 + slot % count.max(1));
        let mut entry = Raw(Vec::new());
        Package::new(vec![&slot, &pin, &source, &gsi]).to_aml_bytes(&mut entry.0);
        entry
    };
    let entries: Vec<Raw> = (1..32).map(entry).collect();
    let entries = entries.iter().map(|entry| entry as &dyn Aml).collect();
    Name::new("_PRT".into(), &Package::new(entries)).to_aml_bytes(out);
}

/// The PCI Express root: its buses, the memory its BARs may use, and the interrupts of pins where there is any.
fn host_bridge(platform: &Platform, ecam: Ecam, out: &mut Vec<u8>) {
    let mut crs = Raw(Vec::new());
    AddressSpace::new_bus_number(0u16, u16::from(ecam.last_bus())).to_aml_bytes(&mut crs.0);
    if platform.conf1 {
        IO::new(0xcf8, 0xcf8, 1, 8).to_aml_bytes(&mut crs.0);
    }
    if let Some((first, last)) = platform.pci.ports {
        AddressSpace::new_io(first, last, None).to_aml_bytes(&mut crs.0);
    }
    let (at, len) = platform.pci_window32;
    if len > 0 {
        let (min, max) = (at.0 as u32, (at.0 + (len - 1)) as u32);
        AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, min, max, None).to_aml_bytes(&mut crs.0);
    }
    let (at, len) = platform.pci_window64;
    if len > 0 {
        let (min, max) = (at.0, at.0 + (len - 1));
        AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, min, max, None).to_aml_bytes(&mut crs.0);
    }
    let zero = 0u8;
    let mut slots = Raw(Vec::new());
    platform.pci.pins.into_iter().for_each(|pins| routing(pins, &mut slots.0));
    platform.pci.hotplug.into_iter().for_each(|plugged| hotplug::slots(plugged, &mut slots.0));
    Device::new(
        "PCI0".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
            &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
            &Name::new("_UID".into(), &zero),
            &Name::new("_SEG".into(), &zero),
            &Name::new("_BBN".into(), &zero),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&crs])),
            &slots,
        ],
    )
    .to_aml_bytes(out);
}

/// Claims the ECAM: Linux trusts a configuration window only if a motherboard device holds it (PCI Firmware 3.3, 4.1.2).
fn motherboard(ecam: Ecam, out: &mut Vec<u8>) {
    let (base, len) = (ecam.base.0, ecam.len());
    let window: Box<dyn Aml> = if base + len <= mem::HIGH_START {
        Box::new(Memory32Fixed::new(true, base as u32, len as u32))
    } else {
        Box::new(AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, base, base + len - 1, None))
    };
    Device::new(
        "MBRD".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
            &Name::new("_UID".into(), &0u8),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![window.as_ref()])),
        ],
    )
    .to_aml_bytes(out);
}

/// A virtio device as registers, under the id guests know them all by; `_UID` tells them apart.
fn virtio(number: usize, device: &VirtioMmio, shared: bool, out: &mut Vec<u8>) {
    let crs: [&dyn Aml; 2] = [
        &Memory32Fixed::new(true, device.at.0 as u32, device.len),
        &Interrupt::new(true, true, false, shared, device.gsi.0),
    ];
    let name = format!("V{number:03X}");
    Device::new(
        name.as_str().into(),
        vec![
            &Name::new("_HID".into(), &"LNRO0005"),
            &Name::new("_UID".into(), &number),
            &Name::new("_CRS".into(), &ResourceTemplate::new(crs.to_vec())),
        ],
    )
    .to_aml_bytes(out);
}

/// The paravirtual interrupt controller; devices on its lines are its own to announce.
fn vioapic(at: u32, len: u32, out: &mut Vec<u8>) {
    Device::new(
        "VIOA".into(),
        vec![
            &Name::new("_HID".into(), &"TARE0001"),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&Memory32Fixed::new(true, at, len)])),
        ],
    )
    .to_aml_bytes(out);
}

/// A 16550.
fn com(serial: Serial, out: &mut Vec<u8>) {
    let crs: [&dyn Aml; 2] =
        [&IO::new(serial.port, serial.port, 1, 8), &Interrupt::new(true, true, false, false, serial.gsi.0)];
    Device::new(
        "COM1".into(),
        vec![
            &Name::new("_HID".into(), &EISAName::new("PNP0501")),
            &Name::new("_UID".into(), &0u8),
            &Name::new("_CRS".into(), &ResourceTemplate::new(crs.to_vec())),
        ],
    )
    .to_aml_bytes(out);
}

/// The pvpanic port, under the id guests know it by.
fn pvpanic(port: u16, out: &mut Vec<u8>) {
    Device::new(
        "PEVT".into(),
        vec![
            &Name::new("_HID".into(), &"QEMU0001"),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&IO::new(port, port, 1, 1)])),
        ],
    )
    .to_aml_bytes(out);
}

/// A power button, pressed by the interrupt of a generic event device (ACPI 6.5, 5.6.9), which has another one for PCI functions
/// that come and go.
fn events(platform: &Platform, out: &mut Vec<u8>) {
    let pm = platform.pm;
    Device::new(
        "PWRB".into(),
        vec![&Name::new("_HID".into(), &EISAName::new("PNP0C0C")), &Name::new("_UID".into(), &0u8)],
    )
    .to_aml_bytes(out);
    let button = Path::new("PWRB");
    let notify = Notify::new(&button, &PRESSED);
    let (mut crs, mut answers) = (Raw(Vec::new()), Raw(Vec::new()));
    Interrupt::new(true, true, false, false, pm.button.0).to_aml_bytes(&mut crs.0);
    If::new(&Equal::new(&Arg(0), &pm.button.0), vec![&notify]).to_aml_bytes(&mut answers.0);
    if let Some(plugged) = platform.pci.hotplug {
        Interrupt::new(true, true, false, false, plugged.gsi.0).to_aml_bytes(&mut crs.0);
        hotplug::event(plugged, &mut answers.0);
    }
    Device::new(
        "GED_".into(),
        vec![
            &Name::new("_HID".into(), &"ACPI0013"),
            &Name::new("_UID".into(), &0u8),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&crs])),
            &Method::new("_EVT".into(), 1, true, vec![&answers]),
        ],
    )
    .to_aml_bytes(out);
}
