// SPDX-License-Identifier: Apache-2.0
//! The walk of one boot: tell the kernel's format, make room, place command line, initrd, tables and kernel, say where to start.

use base::Gpa;
use linux_loader::bootparam::setup_header;
use mem::GuestRam;

use crate::bzimage::{BzImage, ENTRY_64, PROBE};
use crate::e820::Range;
use crate::elf::{Elf, HEAD};
use crate::initrd::{Placed, Room};
use crate::layout::{HIGH_MEMORY, START_INFO, ZERO_PAGE};
use crate::multiboot::{self, Header, Info};
use crate::unpack::{Format, Outcome};
use crate::zero_page::{ZeroPage, bare_header};
use crate::{BootError, Decompress, Entry, Guest, Loaded, Platform};
use crate::{acpi, bzimage, cmdline, e820, elf, initrd, kaslr, long_mode, pvh, reset_vector, unpack};

/// Loads `guest` into `ram` and describes `platform` to it.
///
/// # Errors
/// Everything in [`BootError`]; guest memory may then hold parts of the kernel.
pub fn load(ram: &GuestRam, guest: &Guest<'_>, platform: &Platform) -> Result<Loaded, BootError> {
    platform.check()?;
    let map = e820::map(ram, platform)?;
    let kernel = &guest.kernel;
    let mut head = vec![0; HEAD.min(usize::try_from(kernel.len()).unwrap_or(HEAD))];
    kernel.read(0, &mut head, "header")?;
    reset_vector::write(ram, &platform.pm)?;
    let boot = Boot { ram, guest, map: &map, low_end: initrd::low_ram_end(&map), rsdp: acpi::write(ram, platform)? };
    let mut loaded = if bzimage::is(&head) {
        boot.bzimage(&BzImage::parse(kernel, &head)?)?
    } else if let Some(header) = boot.multiboot_header(&head)? {
        boot.multiboot(header, &head)?
    } else if elf::is(&head) {
        boot.elf(&Elf::parse(&head, kernel.len()).map_err(|what| kernel.malformed(what))?)?
    } else {
        return Err(BootError::NotAKernel { path: kernel.path().into(), found: looks_like(&head) });
    };
    for file in [Some(kernel), guest.initrd.as_ref()].into_iter().flatten() {
        loaded.how += &file.how_much_is_mapped();
    }
    Ok(loaded)
}

/// What every kind of kernel needs.
struct Boot<'a> {
    ram: &'a GuestRam,
    guest: &'a Guest<'a>,
    map: &'a [Range],
    low_end: u64,
    rsdp: Gpa,
}

/// What differs between kernels when the zero page is written.
struct Linux {
    header: setup_header,
    kernel: (Gpa, u64),
    entry: Gpa,
    kaslr: bool,
    how: String,
}

impl Boot<'_> {
    fn bzimage(&self, bz: &BzImage) -> Result<Loaded, BootError> {
        let file = &self.guest.kernel;
        let end = bz.pref + bz.init_size;
        self.room(bz.pref, bz.init_size)?;
        cmdline::write(self.ram, self.guest.cmdline, bz.cmdline_max())?;
        let max = u64::from(bz.header.initrd_addr_max);
        let initrd = self.initrd(Room { floor: end, ram_end: self.low_end, max })?;
        let mut magic = [0; 6];
        if bz.payload_len >= magic.len() as u64 {
            file.read(bz.payload, &mut magic, "payload")?;
        }
        let format = Format::of(&magic).name();
        let mut why = "as asked";
        if self.guest.decompress == Decompress::Monitor {
            let free_end = initrd.as_ref().map_or(self.low_end, |i| i.at.0.min(self.low_end));
            let to = kaslr::place(bz, free_end, self.guest.cmdline, self.guest.seed);
            match unpack::unpack(self.ram, file, bz, to)? {
                Outcome::Done(entry) => {
                    let kaslr = to.shift != 0 || to.at != bz.pref;
                    let how =
                        format!("bzImage, {format}, unpacked by tare, KASLR {}", if kaslr { "on" } else { "off" });
                    let kernel = (Gpa(to.at), bz.init_size);
                    return self.linux(Linux { header: bz.header, kernel, entry, kaslr, how }, initrd);
                }
                Outcome::LeaveToGuest(reason) => why = reason,
            }
        }
        file.read_to_guest(bz.code, bz.code_len, self.ram, Gpa(bz.pref), "protected-mode part")?;
        let how = format!("bzImage, {format}, unpacked by the guest ({why})");
        let kernel = (Gpa(bz.pref), bz.init_size);
        self.linux(Linux { header: bz.header, kernel, entry: Gpa(bz.pref + ENTRY_64), kaslr: false, how }, initrd)
    }

    fn elf(&self, elf: &Elf) -> Result<Loaded, BootError> {
        let file = &self.guest.kernel;
        let (start, end) = elf.extent().unwrap_or_default();
        self.room(start, end - start)?;
        let pvh_entry = elf.pvh_entry(file)?;
        // A 64-bit entry is physical and its own; kernels that only do PVH have a virtual one, or the 32-bit one.
        let linux = elf.is_64 && elf.holds(elf.entry) && pvh_entry != Some(elf.entry);
        let header = bare_header();
        cmdline::write(self.ram, self.guest.cmdline, u64::from(header.cmdline_size))?;
        let max = u64::from(header.initrd_addr_max);
        let initrd = self.initrd(Room { floor: end, ram_end: self.low_end, max })?;
        elf.load(file, self.ram)?;
        let kernel = (Gpa(start), end - start);
        if linux {
            let how = "ELF, 64-bit entry".into();
            return self.linux(Linux { header, kernel, entry: Gpa(elf.entry), kaslr: false, how }, initrd);
        }
        let Some(entry) = pvh_entry.filter(|at| elf.holds(*at)) else {
            return Err(BootError::Unsupported {
                path: file.path().into(),
                what: format!("its ELF entry {:#x} is not a physical address in it, and it has no PVH note", elf.entry),
                hint: "use an x86_64 bzImage or vmlinux",
            });
        };
        let (initrd, how) = with_initrd("ELF, PVH entry".into(), initrd);
        pvh::write(self.ram, self.map, initrd, self.rsdp)?;
        let tables = long_mode::write(self.ram, end)?;
        let entry = Entry::Pvh { rip: Gpa(entry), rbx: START_INFO, tables };
        Ok(Loaded { entry, how, kernel, initrd })
    }

    /// The header by which to start the kernel whose first bytes these are. PVH, where an ELF kernel has both, says more.
    fn multiboot_header(&self, head: &[u8]) -> Result<Option<Header>, BootError> {
        let file = &self.guest.kernel;
        let Some(header) = multiboot::find(head) else { return Ok(None) };
        let elf = if elf::is(head) { Elf::parse(head, file.len()).ok() } else { None };
        if let Some(elf) = elf
            && elf.pvh_entry(file)?.is_some()
        {
            return Ok(None);
        }
        if !header.counts(head) {
            return Err(BootError::Unsupported {
                path: file.path().into(),
                what: "it is a multiboot kernel in a 64-bit ELF file".into(),
                hint: "make it a 32-bit one with objcopy -O elf32-i386",
            });
        }
        Ok(Some(header))
    }

    fn multiboot(&self, header: Header, head: &[u8]) -> Result<Loaded, BootError> {
        let file = &self.guest.kernel;
        let kernel = multiboot::Kernel::parse(header, head, file, self.low_end)?;
        let (start, end) = kernel.extent();
        let module = match &self.guest.initrd {
            // As it is: what a module is for only the kernel knows.
            Some(from) => {
                let room = Room { floor: end.max(HIGH_MEMORY), ram_end: self.low_end, max: u64::MAX };
                initrd::load(self.ram, from, room, Decompress::Guest)?.map(|placed| ((placed.at, placed.len), from))
            }
            None => None,
        };
        for s in &kernel.segments {
            file.read_to_guest(s.offset, s.file_len, self.ram, Gpa(s.at), "segment")?;
        }
        let info = Info { map: self.map, low_end: self.low_end, file, args: self.guest.args, module };
        let written = info.write(self.ram, &kernel)?;
        let (entry, initrd) = (Gpa(kernel.entry), module.map(|(place, _)| place));
        let entry = Entry::Multiboot { rip: entry, rbx: written.info, gdt: written.gdt, gdt_limit: written.gdt_limit };
        Ok(Loaded { entry, how: kernel.how.into(), kernel: (Gpa(start), end - start), initrd })
    }

    fn linux(&self, linux: Linux, initrd: Option<Placed>) -> Result<Loaded, BootError> {
        let Linux { header, kernel, entry, kaslr, how } = linux;
        let (initrd, how) = with_initrd(how, initrd);
        ZeroPage { header, initrd, e820: self.map, rsdp: self.rsdp, kaslr }.write(self.ram)?;
        let tables = long_mode::write(self.ram, kernel.0.0 + kernel.1)?;
        Ok(Loaded { entry: Entry::Linux64 { rip: entry, rsi: ZERO_PAGE, tables }, how, kernel, initrd })
    }

    fn room(&self, at: u64, need: u64) -> Result<(), BootError> {
        if at.checked_add(need).is_none_or(|end| end > self.low_end) {
            let what = format!("kernel {}", self.guest.kernel.path().display());
            return Err(BootError::NoRoom { what, need, at, have: self.low_end });
        }
        Ok(())
    }

    fn initrd(&self, room: Room) -> Result<Option<Placed>, BootError> {
        let Some(file) = &self.guest.initrd else { return Ok(None) };
        initrd::load(self.ram, file, room, self.guest.decompress)
    }
}

/// Where the initrd lies, and its part of the user's line.
fn with_initrd(how: String, initrd: Option<Placed>) -> (Option<(Gpa, u64)>, String) {
    match initrd {
        Some(Placed { at, len, how: also }) => (Some((at, len)), format!("{how}; {also}")),
        None => (None, how),
    }
}

/// Names what users give by mistake.
fn looks_like(head: &[u8]) -> String {
    let known: [(&[u8], &str); 8] = [
        (&[], "it is empty"),
        (&[0x1f, 0x8b], "it is a gzip file"),
        (&[0x28, 0xb5, 0x2f, 0xfd], "it is a zstd file, perhaps an initrd"),
        (&[0xfd, b'7', b'z', b'X', b'Z'], "it is an xz file"),
        (b"0707", "it is a cpio archive, perhaps an initrd"),
        (b"QFI\xfb", "it is a qcow2 disk image"),
        (b"#!", "it is a script"),
        (b"MZ", "it is an EFI program with no Linux boot header"),
    ];
    let is = |magic: &[u8]| if magic.is_empty() { head.is_empty() } else { head.starts_with(magic) };
    match known.iter().find(|(magic, _)| is(magic)) {
        Some((_, name)) => (*name).into(),
        None if head.len() < PROBE => format!("it has only {} bytes", head.len()),
        None => "it starts with neither a Linux boot header nor an ELF header".into(),
    }
}
