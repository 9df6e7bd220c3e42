// SPDX-License-Identifier: Apache-2.0
//! Where the loader puts its own tables in the first MiB. `machine` keeps out of these pages until the guest runs.

use base::Gpa;

/// Global descriptor table, one page's start.
pub const GDT: Gpa = Gpa(0x500);
/// PVH `hvm_start_info`, its module list and memory map, one page.
pub const START_INFO: Gpa = Gpa(0x6000);
/// Linux `boot_params`, one page.
pub const ZERO_PAGE: Gpa = Gpa(0x7000);
/// Page tables: PML4, PDPT and up to four page directories, six pages.
pub const PAGE_TABLES: Gpa = Gpa(0x9000);
/// The command line with its NUL, up to 64 KiB.
pub const CMDLINE: Gpa = Gpa(0x2_0000);
/// Bytes kept for the command line.
pub const CMDLINE_MAX: u64 = 0x1_0000;
/// End of usable memory below 640 KiB; the rest up to 1 MiB is the BIOS's.
pub const LOW_USABLE_END: u64 = 0x9_fc00;
/// ACPI tables, RSDP first, where a guest without a pointer would scan for it.
pub const ACPI_START: Gpa = Gpa(0xe_0000);
/// First byte past the space for ACPI tables; the reset vector follows.
pub const ACPI_END: u64 = 0xf_fff0;
/// Where memory above the first MiB starts.
pub const HIGH_MEMORY: u64 = 0x10_0000;
