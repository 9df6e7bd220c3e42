// SPDX-License-Identifier: Apache-2.0
//! `hvm_start_info` for kernels entered by Xen's PVH protocol, used where a kernel has no 64-bit entry.

use base::Gpa;
use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use mem::GuestRam;
use vm_memory::ByteValued;

use crate::BootError;
use crate::e820::Range;
use crate::layout::{CMDLINE, START_INFO};

/// Most memory map entries that fit the page beside the other structures.
const MAX_ENTRIES: usize = 128;

/// Writes the structure, its module list and memory map to the page at [`START_INFO`].
///
/// # Errors
/// [`BootError::Platform`] if the memory map has more than [`MAX_ENTRIES`].
pub fn write(ram: &GuestRam, map: &[Range], initrd: Option<(Gpa, u64)>, rsdp: Gpa) -> Result<(), BootError> {
    if map.len() > MAX_ENTRIES {
        return Err(BootError::Platform(format!("memory map has {} entries", map.len())));
    }
    let modules = START_INFO.0 + size_of::<hvm_start_info>() as u64;
    let table = modules + size_of::<hvm_modlist_entry>() as u64;
    let info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        version: 1,
        nr_modules: u32::from(initrd.is_some()),
        modlist_paddr: if initrd.is_some() { modules } else { 0 },
        cmdline_paddr: CMDLINE.0,
        rsdp_paddr: rsdp.0,
        memmap_paddr: table,
        memmap_entries: map.len() as u32,
        ..Default::default()
    };
    ram.write_bytes(START_INFO, info.as_slice())?;
    let (paddr, size) = initrd.map_or((0, 0), |(at, len)| (at.0, len));
    ram.write_bytes(Gpa(modules), hvm_modlist_entry { paddr, size, ..Default::default() }.as_slice())?;
    let mut at = table;
    for r in map {
        let entry = hvm_memmap_table_entry { addr: r.at.0, size: r.len, type_: r.kind, reserved: 0 };
        ram.write_bytes(Gpa(at), entry.as_slice())?;
        at += size_of::<hvm_memmap_table_entry>() as u64;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::e820::{RAM, RESERVED};

    #[test]
    fn every_field_is_at_its_byte() {
        let ram = GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap();
        let map =
            [Range { at: Gpa(0), len: 0x9_fc00, kind: RAM }, Range { at: Gpa(0xe000_0000), len: 7, kind: RESERVED }];
        write(&ram, &map, Some((Gpa(0x123_0000), 99)), Gpa(0xe_0000)).unwrap();
        let q = |o: u64| ram.read::<u64>(Gpa(START_INFO.0 + o)).unwrap();
        let d = |o: u64| ram.read::<u32>(Gpa(START_INFO.0 + o)).unwrap();
        assert_eq!((d(0), d(4), d(8), d(12)), (0x336e_c578, 1, 0, 1));
        assert_eq!((q(16), q(24), q(32)), (START_INFO.0 + 56, CMDLINE.0, 0xe_0000));
        assert_eq!((q(40), d(48)), (START_INFO.0 + 88, 2));
        assert_eq!((q(56), q(64)), (0x123_0000, 99));
        assert_eq!((q(88), q(96), d(104)), (0, 0x9_fc00, 1));
        assert_eq!((q(112), q(120), d(128)), (0xe000_0000, 7, 2));
        write(&ram, &map, None, Gpa(0)).unwrap();
        assert_eq!((d(12), q(16)), (0, 0));
        assert!(write(&ram, &[map[0]; 129], None, Gpa(0)).is_err());
    }
}
