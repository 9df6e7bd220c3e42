// SPDX-License-Identifier: Apache-2.0
//! The zero page (`struct boot_params`, Documentation/arch/x86/zero-page.rst): what a 64-bit Linux is told in RSI.

use base::Gpa;
use linux_loader::bootparam::{E820_MAX_ENTRIES_ZEROPAGE, KASLR_FLAG, boot_e820_entry, boot_params, setup_header};
use mem::GuestRam;

use crate::BootError;
use crate::e820::Range;
use crate::layout::{CMDLINE, ZERO_PAGE};

/// "Unregistered loader".
const LOADER: u8 = 0xff;

/// What goes in beside the kernel's own header.
#[derive(Clone, Debug)]
pub struct ZeroPage<'a> {
    /// The header from the kernel file, or [`bare_header`].
    pub header: setup_header,
    /// Where the initrd lies, below 4 GiB; length in bytes.
    pub initrd: Option<(Gpa, u64)>,
    /// The memory map.
    pub e820: &'a [Range],
    /// Where the RSDP is.
    pub rsdp: Gpa,
    /// The kernel's addresses were randomised, so it shall randomise its memory regions too.
    pub kaslr: bool,
}

/// The header for a kernel file that has none (ELF).
#[must_use]
pub fn bare_header() -> setup_header {
    setup_header {
        boot_flag: 0xaa55,
        header: u32::from_le_bytes(*b"HdrS"),
        version: 0x20c,
        loadflags: linux_loader::bootparam::LOADED_HIGH,
        kernel_alignment: 0x20_0000,
        cmdline_size: 2047,
        initrd_addr_max: 0x7fff_ffff,
        ..Default::default()
    }
}

impl ZeroPage<'_> {
    /// Writes it to [`ZERO_PAGE`].
    ///
    /// # Errors
    /// [`BootError::Platform`] if the memory map has more entries than the page holds or the initrd lies past 4 GiB.
    pub fn write(&self, ram: &GuestRam) -> Result<(), BootError> {
        let mut page = boot_params { hdr: self.header, ..Default::default() };
        page.hdr.type_of_loader = LOADER;
        page.hdr.loadflags &= !KASLR_FLAG;
        if self.kaslr {
            page.hdr.loadflags |= KASLR_FLAG;
        }
        page.hdr.cmd_line_ptr = narrow(CMDLINE.0, "command line")?;
        page.hdr.setup_data = 0;
        page.hdr.ramdisk_image = 0;
        page.hdr.ramdisk_size = 0;
        if let Some((at, len)) = self.initrd {
            page.hdr.ramdisk_image = narrow(at.0, "initrd")?;
            page.hdr.ramdisk_size = narrow(len, "initrd length")?;
        }
        page.acpi_rsdp_addr = self.rsdp.0;
        if self.e820.len() > E820_MAX_ENTRIES_ZEROPAGE {
            return Err(BootError::Platform(format!("memory map has {} entries", self.e820.len())));
        }
        let mut table = [boot_e820_entry::default(); E820_MAX_ENTRIES_ZEROPAGE];
        for (to, from) in table.iter_mut().zip(self.e820) {
            *to = boot_e820_entry { addr: from.at.0, size: from.len, r#type: from.kind };
        }
        page.e820_table = table;
        page.e820_entries = self.e820.len() as u8;
        ram.write(ZERO_PAGE, page).ok_or(mem::MemError::Outside(ZERO_PAGE, 4096))?;
        Ok(())
    }
}

fn narrow(value: u64, what: &str) -> Result<u32, BootError> {
    u32::try_from(value).map_err(|_| BootError::Platform(format!("{what} at {value:#x} is past 4 GiB")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::e820::{RAM, RESERVED};

    #[test]
    fn every_field_is_at_its_byte() {
        let ram = GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap();
        let e820 = [
            Range { at: Gpa(0), len: 0x9_fc00, kind: RAM },
            Range { at: Gpa(0x1_2345_6000), len: 0x1000, kind: RESERVED },
        ];
        let mut header = bare_header();
        header.loadflags |= KASLR_FLAG;
        header.setup_data = 0x6666;
        let page = ZeroPage {
            header,
            initrd: Some((Gpa(0x7f00_0000), 0x12_3456)),
            e820: &e820,
            rsdp: Gpa(0xe_0000),
            kaslr: false,
        };
        page.write(&ram).unwrap();
        let mut b = [0u8; 4096];
        ram.read_bytes(ZERO_PAGE, &mut b).unwrap();
        let u32_at = |o: usize| u32::from_le_bytes(b[o..o + 4].try_into().unwrap());
        let u64_at = |o: usize| u64::from_le_bytes(b[o..o + 8].try_into().unwrap());
        assert_eq!(u64_at(0x70), 0xe_0000, "acpi_rsdp_addr");
        assert_eq!(b[0x1e8], 2, "e820_entries");
        assert_eq!(b[0x1ef], 0, "sentinel");
        assert_eq!(&b[0x1fe..0x200], &[0x55, 0xaa]);
        assert_eq!(&b[0x202..0x206], b"HdrS");
        assert_eq!(b[0x210], 0xff, "type_of_loader");
        assert_eq!(b[0x211], 1, "loadflags: loaded high, a stale KASLR flag is gone");
        assert_eq!(u32_at(0x218), 0x7f00_0000, "ramdisk_image");
        assert_eq!(u32_at(0x21c), 0x12_3456, "ramdisk_size");
        assert_eq!(u32_at(0x228), 0x2_0000, "cmd_line_ptr");
        assert_eq!(u64_at(0x250), 0, "setup_data");
        assert_eq!((u64_at(0x2d0), u64_at(0x2d8), u32_at(0x2e0)), (0, 0x9_fc00, 1));
        assert_eq!((u64_at(0x2e4), u64_at(0x2ec), u32_at(0x2f4)), (0x1_2345_6000, 0x1000, 2));
        assert!(b[0x2f8..].iter().all(|&x| x == 0));
        ZeroPage { kaslr: true, ..page }.write(&ram).unwrap();
        assert_eq!(ram.read::<u8>(Gpa(ZERO_PAGE.0 + 0x211)), Some(3));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let ram = GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap();
        let many = vec![Range { at: Gpa(0), len: 1, kind: RAM }; 129];
        let page = ZeroPage { header: bare_header(), initrd: None, e820: &many, rsdp: Gpa(0), kaslr: false };
        assert!(page.write(&ram).is_err());
        assert!(ZeroPage { e820: &many[..128], ..page.clone() }.write(&ram).is_ok());
        assert!(ZeroPage { e820: &[], initrd: Some((Gpa(1 << 32), 1)), ..page }.write(&ram).is_err());
    }
}
