// SPDX-License-Identifier: Apache-2.0
//! An ELF kernel's program headers, read with distrust: which bytes go where, and where it can be entered.
//!
//! `load` reads it from a vmlinux file; `unpack` meets the same headers at the start of a decompressed payload.

use base::Gpa;
use linux_loader::elf::{EM_386, EM_X86_64, PT_LOAD, PT_NOTE};
use mem::GuestRam;

use crate::BootError;
use crate::bzimage::MAX_KERNEL;
use crate::layout::HIGH_MEMORY;
use crate::source::Source;

/// Bytes at the start of a file in which all program headers must lie.
pub const HEAD: usize = 16 << 10;
/// Most program headers believed in; vmlinux has about six.
const MAX_HEADERS: usize = 64;
/// Largest note segment looked through.
const MAX_NOTES: u64 = 64 << 10;
/// Xen's note type for a 32-bit physical entry.
const PHYS32_ENTRY: u32 = 18;

/// One loadable range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// First byte in the file.
    pub offset: u64,
    /// Bytes in the file.
    pub file_len: u64,
    /// Physical address in the guest.
    pub at: u64,
    /// Bytes in guest memory; those past `file_len` are zero.
    pub mem_len: u64,
}

/// The headers of an x86 kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elf {
    /// 64-bit file for x86_64.
    pub is_64: bool,
    /// Where it says it starts.
    pub entry: u64,
    /// Loadable segments by file offset; none overlaps another in guest memory.
    pub segments: Vec<Segment>,
    /// File offset and length of each note segment.
    pub notes: Vec<(u64, u64)>,
    /// First byte past the section headers and all segments.
    pub file_end: u64,
}

/// Little-endian fields of a byte slice; `None` past its end.
#[derive(Clone, Copy)]
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn get(&self, at: usize, width: usize) -> Option<u64> {
        let bytes = self.0.get(at..at.checked_add(width)?)?;
        Some(bytes.iter().rev().fold(0, |v, b| v << 8 | u64::from(*b)))
    }

    /// A half, word or double word at `at32` or `at64` by class.
    fn by_class(&self, is_64: bool, (at32, w32): (usize, usize), (at64, w64): (usize, usize)) -> Option<u64> {
        if is_64 { self.get(at64, w64) } else { self.get(at32, w32) }
    }
}

/// Whether `head` starts an ELF file.
#[must_use]
pub fn is(head: &[u8]) -> bool {
    head.starts_with(b"\x7fELF")
}

impl Elf {
    /// Reads the headers from the first bytes of a file of `len` bytes ([`HEAD`] of them, or all there are).
    ///
    /// # Errors
    /// One phrase about the file, for [`BootError::Malformed`].
    pub fn parse(head: &[u8], len: u64) -> Result<Self, String> {
        Self::parse_from(head, len, HIGH_MEMORY)
    }

    /// [`Elf::parse`] of a file whose segments may lie anywhere from address `floor` on.
    ///
    /// # Errors
    /// As there.
    pub fn parse_from(head: &[u8], len: u64, floor: u64) -> Result<Self, String> {
        let f = Fields(head);
        let short = || "its ELF header is cut short".to_string();
        let class = f.get(4, 1).ok_or_else(short)?;
        let is_64 = class == 2;
        if !(is(head) && (is_64 || class == 1) && f.get(5, 1) == Some(1)) {
            return Err("it is not a little-endian ELF file".into());
        }
        let kind = f.get(16, 2).ok_or_else(short)?;
        let machine = f.get(18, 2).ok_or_else(short)?;
        if machine != u64::from(EM_X86_64) && (is_64 || machine != u64::from(EM_386)) {
            return Err(format!("it is an ELF file for machine {machine}, not x86_64"));
        }
        if kind != 2 && kind != 3 {
            return Err(format!("its ELF type is {kind}, not an executable"));
        }
        let entry = f.by_class(is_64, (24, 4), (24, 8)).ok_or_else(short)?;
        let table = f.by_class(is_64, (28, 4), (32, 8)).ok_or_else(short)?;
        let width = f.by_class(is_64, (42, 2), (54, 2)).ok_or_else(short)?;
        let count = f.by_class(is_64, (44, 2), (56, 2)).ok_or_else(short)?;
        if width != if is_64 { 56 } else { 32 } || count == 0 || count > MAX_HEADERS as u64 {
            return Err(format!("it has {count} program headers of {width} bytes"));
        }
        let sections = f.by_class(is_64, (32, 4), (40, 8)).ok_or_else(short)?;
        let section_bytes = f.by_class(is_64, (46, 2), (58, 2)).ok_or_else(short)?
            * f.by_class(is_64, (48, 2), (60, 2)).ok_or_else(short)?;
        let file_end = sections.checked_add(section_bytes).filter(|e| *e <= len).unwrap_or(0);
        let mut elf = Self { is_64, entry, segments: Vec::new(), notes: Vec::new(), file_end };
        for n in 0..count {
            let at = table.checked_add(n * width).and_then(|at| usize::try_from(at).ok());
            let header = at.and_then(|at| head.get(at..)?.get(..width as usize));
            let header = header.ok_or_else(|| "its program headers lie outside its first bytes".to_string())?;
            elf.add(Fields(header), len, floor)
                .ok_or_else(|| format!("its program header {n} is outside the file or memory"))?;
        }
        elf.check()?;
        Ok(elf)
    }

    fn add(&mut self, h: Fields<'_>, len: u64, floor: u64) -> Option<()> {
        let c = self.is_64;
        let kind = h.get(0, 4)? as u32;
        let offset = h.by_class(c, (4, 4), (8, 8))?;
        let at = h.by_class(c, (12, 4), (24, 8))?;
        let file_len = h.by_class(c, (16, 4), (32, 8))?;
        let mem_len = h.by_class(c, (20, 4), (40, 8))?;
        if kind == PT_NOTE && offset.checked_add(file_len)? <= len {
            self.notes.push((offset, file_len));
        }
        if kind != PT_LOAD || mem_len == 0 {
            return Some(());
        }
        let end = offset.checked_add(file_len)?;
        if end > len || file_len > mem_len || at.checked_add(mem_len)? > mem::LOW_END || at < floor {
            return None;
        }
        self.file_end = self.file_end.max(end);
        self.segments.push(Segment { offset, file_len, at, mem_len });
        Some(())
    }

    fn check(&mut self) -> Result<(), String> {
        self.segments.sort_by_key(|s| s.at);
        if self.segments.windows(2).any(|w| w[0].at + w[0].mem_len > w[1].at) {
            return Err("two of its segments overlap in memory".into());
        }
        let (first, end) = self.extent().ok_or_else(|| "it has nothing to load".to_string())?;
        if end - first > MAX_KERNEL {
            return Err(format!("it spreads over {} bytes of memory", end - first));
        }
        self.segments.sort_by_key(|s| s.offset);
        Ok(())
    }

    /// First byte and first byte past the end, in guest memory.
    #[must_use]
    pub fn extent(&self) -> Option<(u64, u64)> {
        let first = self.segments.iter().map(|s| s.at).min()?;
        let end = self.segments.iter().map(|s| s.at + s.mem_len).max()?;
        Some((first, end))
    }

    /// Whether `at` is in a loaded segment.
    #[must_use]
    pub fn holds(&self, at: u64) -> bool {
        self.segments.iter().any(|s| at >= s.at && at - s.at < s.file_len)
    }

    /// The PVH entry named by Xen's `PHYS32_ENTRY` note.
    ///
    /// # Errors
    /// What reading says.
    pub fn pvh_entry(&self, file: &Source<'_>) -> Result<Option<u64>, BootError> {
        for &(offset, len) in &self.notes {
            let mut bytes = vec![0; len.min(MAX_NOTES) as usize];
            file.read(offset, &mut bytes, "note")?;
            if let Some(entry) = find_note(&bytes) {
                return Ok(Some(entry));
            }
        }
        Ok(None)
    }

    /// Reads every segment of `file` straight into guest memory.
    ///
    /// # Errors
    /// [`BootError::NoRoom`] if RAM ends before the kernel does; what reading says.
    pub fn load(&self, file: &Source<'_>, ram: &GuestRam) -> Result<(), BootError> {
        for s in &self.segments {
            file.read_to_guest(s.offset, s.file_len, ram, Gpa(s.at), "segment")?;
        }
        Ok(())
    }
}

/// The 32-bit entry in a run of ELF notes.
fn find_note(bytes: &[u8]) -> Option<u64> {
    let f = Fields(bytes);
    let round = |n: u64| n.checked_add(3).map(|n| n & !3);
    let mut at = 0usize;
    loop {
        let (name_len, desc_len, kind) = (f.get(at, 4)?, f.get(at + 4, 4)?, f.get(at + 8, 4)?);
        let name = at + 12;
        let desc = name.checked_add(usize::try_from(round(name_len)?).ok()?)?;
        let is_xen = bytes.get(name..name + 4) == Some(b"Xen\0") && name_len == 4;
        if is_xen && kind == u64::from(PHYS32_ENTRY) && (desc_len == 4 || desc_len == 8) {
            return f.get(desc, desc_len as usize);
        }
        at = desc.checked_add(usize::try_from(round(desc_len)?).ok()?)?;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;

    /// A 64-bit ELF with `segments` (address, bytes, extra zero bytes) and an optional PVH note.
    pub(crate) fn build(entry: u64, segments: &[(u64, &[u8], u64)], pvh: Option<u32>) -> Vec<u8> {
        let headers = segments.len() + usize::from(pvh.is_some());
        let mut data = vec![0u8; 64 + headers * 56];
        let mut table = Vec::new();
        let mut header = |kind: u32, offset: usize, at: u64, file: u64, mem: u64| {
            table.extend_from_slice(&kind.to_le_bytes());
            table.extend_from_slice(&7u32.to_le_bytes());
            for v in [offset as u64, 0xffff_ffff_8000_0000 + at, at, file, mem, 4096] {
                table.extend_from_slice(&v.to_le_bytes());
            }
        };
        for (at, bytes, more) in segments {
            header(PT_LOAD, data.len(), *at, bytes.len() as u64, bytes.len() as u64 + more);
            data.extend_from_slice(bytes);
        }
        if let Some(entry) = pvh {
            let mut note = Vec::new();
            for v in [4u32, 4, 1, u32::from_le_bytes(*b"GNU\0"), 7, 4, 4, PHYS32_ENTRY] {
                note.extend_from_slice(&v.to_le_bytes());
            }
            note.extend_from_slice(b"Xen\0");
            note.extend_from_slice(&entry.to_le_bytes());
            header(PT_NOTE, data.len(), 0, note.len() as u64, note.len() as u64);
            data.extend_from_slice(&note);
        }
        data[..7].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1, 1]);
        data[16..18].copy_from_slice(&2u16.to_le_bytes());
        data[18..20].copy_from_slice(&EM_X86_64.to_le_bytes());
        data[20..24].copy_from_slice(&1u32.to_le_bytes());
        data[24..32].copy_from_slice(&entry.to_le_bytes());
        data[32..40].copy_from_slice(&64u64.to_le_bytes());
        let sections = data.len() as u64;
        data[40..48].copy_from_slice(&sections.to_le_bytes());
        data[52..54].copy_from_slice(&64u16.to_le_bytes());
        data[54..56].copy_from_slice(&56u16.to_le_bytes());
        data[56..58].copy_from_slice(&(headers as u16).to_le_bytes());
        data[58..60].copy_from_slice(&64u16.to_le_bytes());
        data[64..64 + table.len()].copy_from_slice(&table);
        data
    }

    #[test]
    fn headers_say_what_goes_where() {
        let file = build(0x100_0010, &[(0x100_0000, &[1; 100], 0), (0x120_0000, &[2; 50], 4046)], Some(0x100_0040));
        let elf = Elf::parse(&file, file.len() as u64).unwrap();
        assert_eq!((elf.is_64, elf.entry), (true, 0x100_0010));
        assert_eq!(elf.extent(), Some((0x100_0000, 0x120_1000)));
        assert_eq!(elf.segments[1].mem_len, 4096);
        assert!(elf.holds(0x100_0063) && !elf.holds(0x100_0064) && !elf.holds(0x120_0032));
        assert_eq!(elf.file_end, file.len() as u64);
        let src = Source::memory("kernel", std::path::Path::new("k"), &file);
        assert_eq!(elf.pvh_entry(&src).unwrap(), Some(0x100_0040));
    }

    #[test]
    fn contradictions_are_phrases() {
        let check = |change: &dyn Fn(&mut Vec<u8>), word: &str| {
            let mut file = build(0x100_0000, &[(0x100_0000, &[1; 100], 0), (0x100_1000, &[1; 100], 0)], None);
            change(&mut file);
            let err = Elf::parse(&file, file.len() as u64).unwrap_err();
            assert!(err.contains(word), "{err} lacks {word}");
        };
        let put = |o: usize, v: u64| move |f: &mut Vec<u8>| f[o..o + 8].copy_from_slice(&v.to_le_bytes());
        check(&|f| f[5] = 2, "little-endian");
        check(&|f| f[18] = 183, "machine 183");
        check(&|f| f[16] = 1, "type is 1");
        check(&|f| f[56] = 0, "0 program headers");
        check(&|f| f[56] = 65, "65 program headers");
        check(&put(32, u64::MAX - 8), "outside its first bytes");
        check(&put(64 + 8, u64::MAX), "header 0 is outside");
        check(&put(64 + 24, 0x1000), "header 0 is outside");
        check(&put(64 + 24, mem::LOW_END - 99), "header 0 is outside");
        check(&put(64 + 24, 0x100_1000), "overlap");
        check(&put(64 + 40, 99), "header 0 is outside");
        check(&put(64 + 24, 0x7000_0000), "spreads over");
        check(&|f| [64, 64 + 56].iter().for_each(|&o| f[o] = 0), "nothing to load");
        check(&|f| f.truncate(60), "cut short");
    }
}
