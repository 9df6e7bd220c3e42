// SPDX-License-Identifier: Apache-2.0
//! The fixed description table: what hardware there is not, and the three ports that switch the guest off or reset it.

use acpi_tables::fadt::{FADT, FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use base::Gpa;

use super::{OEM, OEM_REVISION, OEM_TABLE};
use crate::Platform;

/// `IAPC_BOOT_ARCH` (table 5.11): no VGA to probe, no CMOS clock. Unset: legacy devices, 8042.
const NO_VGA: u16 = 1 << 2;
const NO_CMOS_RTC: u16 = 1 << 5;

fn port(at: u16) -> GAS {
    GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(at))
}

/// The table for `platform`, pointing to `dsdt`.
pub fn table(platform: &Platform, dsdt: Gpa) -> FADT {
    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt.0)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless)
        .flag(Flags::HwReducedAcpi);
    fadt.iapc_boot_arch = (NO_VGA | NO_CMOS_RTC).into();
    fadt.reset_reg = port(platform.pm.reset);
    fadt.reset_value = platform.pm.reset_value;
    fadt.sleep_control_reg = port(platform.pm.sleep_control);
    fadt.sleep_status_reg = port(platform.pm.sleep_status);
    fadt.finalize()
}
