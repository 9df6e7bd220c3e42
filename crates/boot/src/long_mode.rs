// SPDX-License-Identifier: Apache-2.0
//! Page tables and GDT for the boot CPU (Linux boot protocol, 64-bit entry): identity mapping, flat segments.

use base::Gpa;
use mem::GuestRam;

use crate::layout::{GDT, PAGE_TABLES};
use crate::{BootError, LongMode};

const GIB: u64 = 1 << 30;
const PRESENT_WRITE: u64 = 0b11;
const HUGE: u64 = 1 << 7;
/// Page directories there is room for: all of the address space below 4 GiB.
const DIRECTORIES: u64 = 4;

/// Flat descriptors, base 0, limit 4 GiB: null, null, 64-bit code, data, busy TSS, 32-bit code.
const DESCRIPTORS: [u64; 6] =
    [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x0000_8b00_0000_0067, 0x00cf_9b00_0000_ffff];

/// Writes them so that every byte below `end` is mapped, at most 4 GiB.
///
/// # Errors
/// [`BootError::Memory`] if RAM doesn't reach the tables.
pub fn write(ram: &GuestRam, end: u64) -> Result<LongMode, BootError> {
    let directories = end.div_ceil(GIB).clamp(1, DIRECTORIES);
    let page = |n: u64| PAGE_TABLES.0 + n * 4096;
    let mut out = Vec::with_capacity(4096);
    out.extend_from_slice(&(page(1) | PRESENT_WRITE).to_le_bytes());
    ram.write_bytes(Gpa(page(0)), &out)?;
    out.clear();
    for d in 0..directories {
        out.extend_from_slice(&(page(2 + d) | PRESENT_WRITE).to_le_bytes());
    }
    ram.write_bytes(Gpa(page(1)), &out)?;
    for d in 0..directories {
        out.clear();
        for entry in 0..512 {
            out.extend_from_slice(&((d * GIB + (entry << 21)) | PRESENT_WRITE | HUGE).to_le_bytes());
        }
        ram.write_bytes(Gpa(page(2 + d)), &out)?;
    }
    let gdt: Vec<u8> = DESCRIPTORS.iter().flat_map(|d| d.to_le_bytes()).collect();
    ram.write_bytes(GDT, &gdt)?;
    Ok(LongMode { cr3: PAGE_TABLES, mapped: directories * GIB, gdt: GDT, gdt_limit: gdt.len() as u16 - 1 })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// Walks the tables as the CPU would.
    fn translate(ram: &GuestRam, t: &LongMode, va: u64) -> Option<u64> {
        let step = |table: u64, shift: u32| {
            let entry: u64 = ram.read(Gpa((table & !0xfff) + ((va >> shift) & 511) * 8)).unwrap();
            (entry & 1 == 1).then_some(entry)
        };
        let pde = step(step(step(t.cr3.0, 39)?, 30)?, 21)?;
        assert_ne!(pde & HUGE, 0);
        Some((pde & !0x1f_ffff) + (va & 0x1f_ffff))
    }

    #[test]
    fn what_is_mapped_is_itself_and_the_rest_is_not_there() {
        for (end, mapped) in [(1, GIB), (GIB, GIB), (GIB + 1, 2 * GIB), (u64::MAX, 4 * GIB)] {
            let ram = GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap();
            let t = write(&ram, end).unwrap();
            assert_eq!(t.mapped, mapped);
            for va in [0, 0x7000, 0x1f_ffff, 0x20_0000, mapped - 1] {
                assert_eq!(translate(&ram, &t, va), Some(va));
            }
            assert_eq!(translate(&ram, &t, mapped), None);
            assert_eq!(translate(&ram, &t, 1 << 39), None);
        }
    }

    #[test]
    fn descriptors_are_flat() {
        let ram = GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap();
        let t = write(&ram, 1).unwrap();
        assert_eq!(t.gdt_limit, 47);
        let code: u64 = ram.read(Gpa(t.gdt.0 + 0x10)).unwrap();
        assert_eq!(code >> 53 & 1, 1, "long");
        assert_eq!(code >> 54 & 1, 0, "not 32-bit");
        let code32: u64 = ram.read(Gpa(t.gdt.0 + 0x28)).unwrap();
        assert_eq!((code32 >> 53 & 3, code32 & 0xffff, code32 >> 48 & 0xf), (2, 0xffff, 0xf));
    }
}
