// SPDX-License-Identifier: Apache-2.0
//! Plugging of PCI functions in AML (ACPI 6.5, 6.3): a device with `_EJ0` for each slot, and the method that the event device
//! calls, which notifies those that are new or are to go. Written by `dsdt`, inside the host bridge.

use acpi_tables::Aml;
use acpi_tables::aml::{
    And, Arg, Device, Field, FieldAccessType, FieldEntry, FieldLockRule, FieldUpdateRule, If, Local, Method,
    MethodCall, Name, Notify, OpRegion, OpRegionSpace, Path, Store,
};

use crate::platform::PciHotplug;

/// Notification: look whether a device is there.
const CHECK: u8 = 1;
/// Notification: let go of the device.
const EJECT: u8 = 3;

/// The name of the device for `slot`.
fn name(slot: u8) -> String {
    format!("S{slot:03X}")
}

/// Registers, slots and the method, in the scope of the host bridge.
pub fn slots(hotplug: PciHotplug, out: &mut Vec<u8>) {
    OpRegion::new("HPRG".into(), OpRegionSpace::SystemIO, &hotplug.port, &12u8).to_aml_bytes(out);
    let registers = [*b"HPUP", *b"HPDN", *b"HPEJ"].map(|register| FieldEntry::Named(register, 32));
    Field::new(
        "HPRG".into(),
        FieldAccessType::DWord,
        FieldLockRule::NoLock,
        FieldUpdateRule::WriteAsZeroes,
        registers.to_vec(),
    )
    .to_aml_bytes(out);
    let slots: Vec<u8> = (0..32).filter(|slot| hotplug.slots >> slot & 1 == 1).collect();
    for &slot in &slots {
        let (eject, bit) = (Path::new("HPEJ"), 1u32 << slot);
        Device::new(
            name(slot).as_str().into(),
            vec![
                &Name::new("_ADR".into(), &(u32::from(slot) << 16)),
                &Name::new("_SUN".into(), &slot),
                &Method::new("_EJ0".into(), 1, true, vec![&Store::new(&eject, &bit)]),
            ],
        )
        .to_aml_bytes(out);
    }
    // Each register forgets what was read: it is read once.
    let (up, down) = (Path::new("HPUP"), Path::new("HPDN"));
    let (new, gone) = (Store::new(&Local(0), &up), Store::new(&Local(1), &down));
    let told = Notified(&slots);
    Method::new("HPLG".into(), 0, true, vec![&new, &gone, &told]).to_aml_bytes(out);
}

/// What the method does with what it read: a notification for each bit.
struct Notified<'a>(&'a [u8]);

impl Aml for Notified<'_> {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        for &slot in self.0 {
            let (device, bit) = (Path::new(&name(slot)), 1u32 << slot);
            for (local, event) in [(Local(0), CHECK), (Local(1), EJECT)] {
                // A zero byte as target: the result is not kept.
                let (set, notify) = (And::new(&Nowhere, &local, &bit), Notify::new(&device, &event));
                If::new(&set, vec![&notify]).to_aml_bytes(sink);
            }
        }
    }
}

/// No target.
struct Nowhere;

impl Aml for Nowhere {
    fn to_aml_bytes(&self, sink: &mut dyn acpi_tables::AmlSink) {
        sink.byte(0);
    }
}

/// What the event device does when the interrupt in its argument is that of `hotplug`.
pub fn event(hotplug: PciHotplug, out: &mut Vec<u8>) {
    let call = MethodCall::new("\\_SB_.PCI0.HPLG".into(), Vec::new());
    If::new(&acpi_tables::aml::Equal::new(&Arg(0), &hotplug.gsi.0), vec![&call]).to_aml_bytes(out);
}
