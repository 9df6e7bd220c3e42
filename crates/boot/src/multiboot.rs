// SPDX-License-Identifier: Apache-2.0
//! Multiboot 1 (the Multiboot specification 0.6.96): the header in a kernel's first bytes, read with distrust, and the
//! information that such a kernel finds through EBX. Called by `load`.
//!
//! Such kernels start in 32-bit protected mode and may lie below 1 MiB, so the information goes where the kernel is not:
//! below the BIOS's area, or past the kernel.

use std::os::unix::ffi::OsStrExt;

use base::Gpa;
use mem::GuestRam;

use crate::bzimage::MAX_KERNEL;
use crate::e820::Range;
use crate::elf::{self, Elf, Segment};
use crate::layout::{HIGH_MEMORY, LOW_USABLE_END};
use crate::source::Source;
use crate::{BootError, cmdline};

/// Where the whole header must lie (3.1.1).
const SEARCH: usize = 8192;
/// First word of a header.
const HEADER_MAGIC: u32 = 0x1bad_b002;
/// Header flag: modules start at pages, as they always do here.
const PAGE_ALIGN: u32 = 1;
/// Header flag: the kernel wants to know its memory, as it always does here.
const MEMORY_INFO: u32 = 1 << 1;
/// Header flag: the kernel wants a video mode.
const VIDEO_MODE: u32 = 1 << 2;
/// Flags that a loader must know or refuse the kernel (3.1.2).
const REQUIRED: u32 = 0xffff;
/// Header flag: the header says where everything goes, whatever else the file is.
const ADDRESSES: u32 = 1 << 16;

/// What the kernel finds in EAX.
pub const MAGIC: u32 = 0x2bad_b002;
/// Descriptors: null, 32-bit code at 0x08, data at 0x10; flat.
const DESCRIPTORS: [u64; 3] = [0, 0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff];
/// Information flags (3.3): memory sizes, command line, modules, memory map, name of the loader.
const INFO_FLAGS: u32 = 1 | 1 << 2 | 1 << 3 | 1 << 6 | 1 << 9;
const LOADER: &[u8] = b"tare\0";

/// Places in the block of information, in bytes from its start: descriptors, the structure, one module, then the memory
/// map and texts.
const INFO: u64 = 32;
const MODULE: u64 = 160;
const MEMORY_MAP: u64 = 176;
/// Bytes of one entry of the memory map, its own size field included.
const MAP_ENTRY: u64 = 24;

/// A header found in a file's first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Where it is in the file.
    at: usize,
    flags: u32,
}

/// The first header in `head`, the start of a file: on a multiple of four, its three words adding up to 0.
#[must_use]
pub fn find(head: &[u8]) -> Option<Header> {
    let head = &head[..head.len().min(SEARCH)];
    (0..head.len()).step_by(4).find_map(|at| {
        let (magic, flags, sum) = (word(head, at)?, word(head, at + 4)?, word(head, at + 8)?);
        let whole = magic == HEADER_MAGIC && magic.wrapping_add(flags).wrapping_add(sum) == 0;
        whole.then_some(Header { at, flags })
    })
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|b| u32::from_le_bytes(*b))
}

impl Header {
    /// Whether a file with this header is to be started by it. A 64-bit ELF file has no 32-bit entry, unless the header
    /// gives one.
    #[must_use]
    pub fn counts(&self, head: &[u8]) -> bool {
        self.flags & ADDRESSES != 0 || !elf::is(head) || head.get(4) != Some(&2)
    }
}

/// A multiboot kernel: which bytes go where, and where it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// What goes into memory.
    pub segments: Vec<Segment>,
    /// First instruction, in one of them.
    pub entry: u64,
    /// Where it comes from, for the user's timeline.
    pub how: &'static str,
}

impl Kernel {
    /// Reads what `header` in `head`, the first bytes of `file`, means. RAM ends at `low_end`, below 4 GiB.
    ///
    /// # Errors
    /// [`BootError::Malformed`] for contradictions, [`BootError::Truncated`] if the file ends too early,
    /// [`BootError::Unsupported`] for what this loader can't give, [`BootError::NoRoom`] past the end of RAM.
    pub fn parse(header: Header, head: &[u8], file: &Source<'_>, low_end: u64) -> Result<Self, BootError> {
        let unsupported = |what: String, hint| Err(BootError::Unsupported { path: file.path().into(), what, hint });
        if header.flags & VIDEO_MODE != 0 {
            return unsupported("its multiboot header asks for a video mode".into(), "build it for a serial console");
        }
        let unknown = header.flags & REQUIRED & !(PAGE_ALIGN | MEMORY_INFO);
        if unknown != 0 {
            let what = format!("its multiboot header asks for features {unknown:#x}, which nothing defines");
            return unsupported(what, "build it for multiboot 1");
        }
        let kernel = if header.flags & ADDRESSES != 0 {
            Self::by_header(header.at, head, file)?
        } else if elf::is(head) {
            let elf = Elf::parse_from(head, file.len(), 0).map_err(|what| file.malformed(what))?;
            Self { segments: elf.segments, entry: elf.entry, how: "multiboot, ELF" }
        } else {
            return Err(file.malformed("its multiboot header gives no addresses, and it is not an ELF file"));
        };
        kernel.check(file, low_end)?;
        Ok(kernel)
    }

    /// The addresses in the header itself (3.1.3), for files of any format.
    fn by_header(at: usize, head: &[u8], file: &Source<'_>) -> Result<Self, BootError> {
        let fields = &head[..head.len().min(SEARCH)];
        let field = |n: usize| word(fields, at + 4 * n).map(u64::from);
        let (Some(header), Some(load), Some(load_end), Some(bss_end), Some(entry)) =
            (field(3), field(4), field(5), field(6), field(7))
        else {
            return Err(file.malformed("its multiboot header is cut short"));
        };
        let before = header.checked_sub(load).ok_or_else(|| {
            file.malformed(format!("its multiboot header at {header:#x} is before its load address {load:#x}"))
        })?;
        let offset = (at as u64).checked_sub(before).ok_or_else(|| {
            file.malformed(format!("its multiboot load address {load:#x} is {before} bytes before the header"))
        })?;
        let file_len = match load_end {
            0 => file.len() - offset.min(file.len()),
            end => end.checked_sub(load).ok_or_else(|| {
                file.malformed(format!("its multiboot load end {end:#x} is before its load address {load:#x}"))
            })?,
        };
        file.within(offset, file_len, "what its multiboot header loads")?;
        let mem_len = match bss_end {
            0 => file_len,
            end => end.checked_sub(load).filter(|len| *len >= file_len).ok_or_else(|| {
                file.malformed(format!("its multiboot bss end {end:#x} is before the end of what it loads"))
            })?,
        };
        let segments = vec![Segment { offset, file_len, at: load, mem_len }];
        Ok(Self { segments, entry, how: "multiboot, addresses in its header" })
    }

    fn check(&self, file: &Source<'_>, low_end: u64) -> Result<(), BootError> {
        for s in &self.segments {
            let end = s.at + s.mem_len;
            if s.at >= HIGH_MEMORY && end > low_end {
                let what = format!("kernel {}", file.path().display());
                return Err(BootError::NoRoom { what, need: s.mem_len, at: s.at, have: low_end });
            }
            if s.at < HIGH_MEMORY && end > LOW_USABLE_END {
                return Err(file.malformed(format!(
                    "{} bytes of it go to {:#x}, into the firmware's area from {LOW_USABLE_END:#x} to {HIGH_MEMORY:#x}",
                    s.mem_len, s.at
                )));
            }
        }
        let (start, end) = self.extent();
        if end - start > MAX_KERNEL {
            return Err(file.malformed(format!("it spreads over {} bytes of memory", end - start)));
        }
        if !self.segments.iter().any(|s| self.entry >= s.at && self.entry - s.at < s.file_len) {
            return Err(file.malformed(format!("its entry {:#x} is not in what it loads", self.entry)));
        }
        Ok(())
    }

    /// First byte and first byte past the end, in guest memory.
    #[must_use]
    pub fn extent(&self) -> (u64, u64) {
        let first = self.segments.iter().map(|s| s.at).min().unwrap_or_default();
        let end = self.segments.iter().map(|s| s.at + s.mem_len).max().unwrap_or_default();
        (first, end)
    }

    fn touches(&self, at: u64, len: u64) -> bool {
        self.segments.iter().any(|s| s.at < at + len && at < s.at + s.mem_len)
    }

    /// The highest page below the firmware's area where `len` bytes are free, or the first one past the kernel.
    fn place(&self, len: u64, low_end: u64) -> Option<u64> {
        let low = LOW_USABLE_END.checked_sub(len)? & !0xfff;
        if low > 0 && !self.touches(low, len) {
            return Some(low);
        }
        let high = self.extent().1.max(HIGH_MEMORY).next_multiple_of(4096);
        (high + len <= low_end).then_some(high)
    }
}

/// What a multiboot kernel is told.
pub struct Info<'a> {
    /// The memory map.
    pub map: &'a [Range],
    /// End of RAM below 4 GiB.
    pub low_end: u64,
    /// The kernel's file: its name is the first word of the command line.
    pub file: &'a Source<'a>,
    /// The rest of the command line.
    pub args: &'a str,
    /// The one module, and its file, whose name is the module's text.
    pub module: Option<((Gpa, u64), &'a Source<'a>)>,
}

/// Where things are that the boot CPU's registers point to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Descriptor table: code at 0x08, data at 0x10.
    pub gdt: Gpa,
    /// Its limit.
    pub gdt_limit: u16,
    /// The information structure.
    pub info: Gpa,
}

impl Info<'_> {
    /// Writes it where neither `kernel` nor the module is.
    ///
    /// # Errors
    /// [`BootError::Cmdline`], or [`BootError::NoRoom`] if there is no such place.
    pub fn write(&self, ram: &GuestRam, kernel: &Kernel) -> Result<Written, BootError> {
        cmdline::check(self.args, crate::layout::CMDLINE_MAX - 1)?;
        let mut line = self.file.path().as_os_str().as_bytes().to_vec();
        if !self.args.is_empty() {
            line.push(b' ');
            line.extend_from_slice(self.args.as_bytes());
        }
        line.push(0);
        let mut name = self.module.map(|(_, file)| file.path().as_os_str().as_bytes().to_vec()).unwrap_or_default();
        name.push(0);
        let map_len = MAP_ENTRY * self.map.len() as u64;
        let texts = MEMORY_MAP + map_len;
        let len = texts + (LOADER.len() + line.len() + name.len()) as u64;
        // The module lies as high as it can.
        let end = self.module.map_or(self.low_end, |((at, _), _)| at.0);
        let at = kernel.place(len, end).ok_or_else(|| BootError::NoRoom {
            what: "what a multiboot kernel is told".into(),
            need: len,
            at: HIGH_MEMORY,
            have: end,
        })?;

        let mut block = vec![0; MEMORY_MAP as usize];
        let mut put = |at: u64, bytes: &[u8]| block[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        for (n, descriptor) in (0..).zip(DESCRIPTORS) {
            put(8 * n, &descriptor.to_le_bytes());
        }
        let (line_at, name_at) = (texts + LOADER.len() as u64, texts + (LOADER.len() + line.len()) as u64);
        let fields = [
            (0, u64::from(INFO_FLAGS)),
            (4, LOW_USABLE_END >> 10),
            (8, (self.low_end - HIGH_MEMORY) >> 10),
            (16, at + line_at),
            (20, u64::from(self.module.is_some())),
            (24, at + MODULE),
            (44, map_len),
            (48, at + MEMORY_MAP),
            (64, at + texts),
        ];
        // All of these are below 4 GiB.
        for (offset, value) in fields {
            put(INFO + offset, &(value as u32).to_le_bytes());
        }
        if let Some(((module, len), _)) = self.module {
            for (n, value) in (0..).zip([module.0, module.0 + len, at + name_at]) {
                put(MODULE + 4 * n, &(value as u32).to_le_bytes());
            }
        }
        for r in self.map {
            block.extend_from_slice(&(MAP_ENTRY as u32 - 4).to_le_bytes());
            block.extend_from_slice(&r.at.0.to_le_bytes());
            block.extend_from_slice(&r.len.to_le_bytes());
            block.extend_from_slice(&r.kind.to_le_bytes());
        }
        for text in [LOADER, &line, &name] {
            block.extend_from_slice(text);
        }
        ram.write_bytes(Gpa(at), &block)?;
        Ok(Written { gdt: Gpa(at), gdt_limit: size_of_val(&DESCRIPTORS) as u16 - 1, info: Gpa(at + INFO) })
    }
}

#[cfg(test)]
#[path = "multiboot_tests.rs"]
pub(crate) mod tests;
