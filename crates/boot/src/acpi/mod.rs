// SPDX-License-Identifier: Apache-2.0
//! ACPI tables (ACPI 6.5): hardware-reduced, so that the guest probes no PIC, PIT, RTC or PM timer.
//!
//! `load` calls [`write`]. RSDP, DSDT, FADT, MADT, MCFG, SRAT, SLIT and XSDT lie one after another in the BIOS area.

mod dsdt;
mod fadt;
mod hotplug;
mod numa;

use acpi_tables::Aml;
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;
use base::Gpa;
use mem::GuestRam;

use crate::layout::{ACPI_END, ACPI_START};
use crate::{BootError, Platform};

const OEM: [u8; 6] = *b"TARE  ";
const OEM_TABLE: [u8; 8] = *b"TAREVM  ";
const OEM_REVISION: u32 = 1;
/// Tables start at multiples of this.
const ALIGN: u64 = 16;

/// Writes the tables for `platform`; returns where the RSDP is.
///
/// # Errors
/// [`BootError::Platform`] if they don't fit the space kept for them.
pub fn write(ram: &GuestRam, platform: &Platform) -> Result<Gpa, BootError> {
    let mut place = Place { ram, next: ACPI_START.0 + Rsdp::len().next_multiple_of(ALIGN as usize) as u64 };
    let dsdt = place.put(dsdt::table(platform).as_slice())?;
    let mut tables = vec![place.put(&bytes(&fadt::table(platform, dsdt)))?, place.put(&bytes(&madt(platform)))?];
    if let Some(ecam) = platform.ecam {
        let mut mcfg = MCFG::new(OEM, OEM_TABLE, OEM_REVISION);
        mcfg.add_ecam(ecam.base.0, 0, 0, ecam.last_bus());
        tables.push(place.put(&bytes(&mcfg))?);
    }
    for table in [numa::srat(ram, platform), numa::slit(platform)].into_iter().flatten() {
        tables.push(place.put(table.as_slice())?);
    }
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    for at in tables {
        xsdt.add_entry(at.0);
    }
    let xsdt = place.put(&bytes(&xsdt))?;
    ram.write_bytes(ACPI_START, &bytes(&Rsdp::new(OEM, xsdt.0)))?;
    Ok(ACPI_START)
}

/// Puts tables one after another.
struct Place<'a> {
    ram: &'a GuestRam,
    next: u64,
}

impl Place<'_> {
    fn put(&mut self, table: &[u8]) -> Result<Gpa, BootError> {
        let at = Gpa(self.next);
        let end = at.0 + table.len() as u64;
        if end > ACPI_END {
            return Err(BootError::Platform(format!("ACPI tables end at {end:#x}, past {ACPI_END:#x}")));
        }
        self.ram.write_bytes(at, table)?;
        self.next = end.next_multiple_of(ALIGN);
        Ok(at)
    }
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut out = Vec::with_capacity(512);
    table.to_aml_bytes(&mut out);
    out
}

/// Every CPU enabled, one I/O APIC, no legacy interrupts and so no overrides.
fn madt(platform: &Platform) -> MADT {
    let lapic = LocalInterruptController::Address(platform.lapic.0 as u32);
    let mut madt = MADT::new(OEM, OEM_TABLE, OEM_REVISION, lapic);
    for (uid, id) in platform.apic_ids.iter().enumerate() {
        madt.add_structure(ProcessorLocalApic::new(uid as u8, *id as u8, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, platform.ioapic.0 as u32, 0));
    madt
}

#[cfg(test)]
mod tests;
