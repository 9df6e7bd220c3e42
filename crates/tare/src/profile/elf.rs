// SPDX-License-Identifier: Apache-2.0
//! What a profile needs of a 64-bit ELF file: its functions' names and where its call frames are described. A file that is
//! something else, or broken, has none of it. Called by `objects`, for the files that this process was loaded from.

use std::ops::Range;

/// A section: where it is once loaded, counted from the file's base, and what it holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Section {
    /// Addresses.
    pub at: Range<u64>,
    /// Bytes.
    pub bytes: Vec<u8>,
}

/// A function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Addresses, counted from the file's base.
    pub at: Range<u64>,
    /// As the linker knows it.
    pub name: String,
}

/// A file.
#[derive(Debug, Default)]
pub struct Elf {
    /// `.text`.
    pub text: Option<Section>,
    /// `.eh_frame`.
    pub frames: Option<Section>,
    /// `.eh_frame_hdr`.
    pub index: Option<Section>,
    /// Lowest address first; empty where the file is stripped.
    pub functions: Vec<Function>,
}

const SYMBOLS: u32 = 2;
const DYNAMIC_SYMBOLS: u32 = 11;
/// Bytes of a symbol and of a section's header.
const SYMBOL: u64 = 24;
const HEADER: u64 = 64;

/// A section's header.
struct Header {
    name: u32,
    kind: u32,
    at: u64,
    offset: u64,
    size: u64,
    link: u32,
}

struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn part(&self, at: u64, len: u64) -> Option<&'a [u8]> {
        self.0.get(usize::try_from(at).ok()?..usize::try_from(at.checked_add(len)?).ok()?)
    }

    fn number<const N: usize>(&self, at: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        bytes.get_mut(..N)?.copy_from_slice(self.part(at, N as u64)?);
        Some(u64::from_le_bytes(bytes))
    }

    /// The text at `at`, up to its zero.
    fn text(&self, at: u64) -> Option<&'a str> {
        let rest = self.0.get(usize::try_from(at).ok()?..)?;
        std::str::from_utf8(rest.get(..rest.iter().position(|byte| *byte == 0)?)?).ok()
    }

    fn header(&self, at: u64) -> Option<Header> {
        Some(Header {
            name: self.number::<4>(at)? as u32,
            kind: self.number::<4>(at + 4)? as u32,
            at: self.number::<8>(at + 16)?,
            offset: self.number::<8>(at + 24)?,
            size: self.number::<8>(at + 32)?,
            link: self.number::<4>(at + 40)? as u32,
        })
    }

    fn section(&self, header: &Header) -> Option<Section> {
        let bytes = self.part(header.offset, header.size)?.to_vec();
        Some(Section { at: header.at..header.at.checked_add(header.size)?, bytes })
    }

    fn functions(&self, table: &Header, names: &Header) -> Option<Vec<Function>> {
        const FUNCTION: u64 = 2;
        let (symbols, names) =
            (Bytes(self.part(table.offset, table.size)?), Bytes(self.part(names.offset, names.size)?));
        let function = |number: u64| {
            let symbol = number * SYMBOL;
            let (at, size) = (symbols.number::<8>(symbol + 8)?, symbols.number::<8>(symbol + 16)?);
            let is_one = symbols.number::<1>(symbol + 4)? & 15 == FUNCTION && size > 0;
            let name = names.text(symbols.number::<4>(symbol)?)?;
            (is_one && !name.is_empty())
                .then(|| Some(Function { at: at..at.checked_add(size)?, name: name.to_owned() }))?
        };
        Some((0..table.size / SYMBOL).filter_map(function).collect())
    }
}

impl Elf {
    /// What is in `file`.
    #[must_use]
    pub fn parse(file: &[u8]) -> Self {
        Self::read(&Bytes(file)).unwrap_or_default()
    }

    fn read(file: &Bytes<'_>) -> Option<Self> {
        if file.part(0, 6)? != b"\x7fELF\x02\x01" {
            return None;
        }
        let (at, count, names) = (file.number::<8>(40)?, file.number::<2>(60)?, file.number::<2>(62)?);
        let headers: Vec<Header> =
            (0..count).map_while(|number| file.header(at.checked_add(number * HEADER)?)).collect();
        let named = headers.get(usize::try_from(names).ok()?)?;
        let named = Bytes(file.part(named.offset, named.size)?);
        let find = |name: &str| {
            let header = headers.iter().find(|header| named.text(header.name.into()) == Some(name))?;
            file.section(header)
        };
        let functions = |kind: u32| {
            let table = headers.iter().find(|header| header.kind == kind)?;
            file.functions(table, headers.get(usize::try_from(table.link).ok()?)?)
        };
        let mut functions = functions(SYMBOLS).or_else(|| functions(DYNAMIC_SYMBOLS)).unwrap_or_default();
        functions.sort_by_key(|function| function.at.start);
        Some(Self { text: find(".text"), frames: find(".eh_frame"), index: find(".eh_frame_hdr"), functions })
    }

    /// The function at `at`, counted from the file's base.
    #[must_use]
    pub fn function(&self, at: u64) -> Option<&Function> {
        let after = self.functions.partition_point(|function| function.at.start <= at);
        self.functions.get(after.checked_sub(1)?).filter(|function| function.at.contains(&at))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn this_program_has_functions_and_frames() {
        let file = std::fs::read("/proc/self/exe").unwrap();
        let elf = Elf::parse(&file);
        let (text, frames) = (elf.text.as_ref().unwrap(), elf.frames.as_ref().unwrap());
        assert!(!text.bytes.is_empty() && !frames.bytes.is_empty() && elf.index.is_some());
        let parse = elf.functions.iter().find(|f| f.name.contains("Elf") && f.name.contains("parse")).unwrap();
        assert_eq!(elf.function(parse.at.start).unwrap().at, parse.at);
        assert_eq!(elf.function(parse.at.end - 1).unwrap().at.end, parse.at.end);
        assert!(elf.function(0).is_none());
    }

    #[test]
    fn what_is_broken_has_nothing_and_harms_nobody() {
        let mut file = std::fs::read("/proc/self/exe").unwrap();
        for len in [0, 5, 63, 64, 4096] {
            let elf = Elf::parse(&file[..len]);
            assert!(elf.functions.is_empty() && elf.text.is_none());
        }
        // Section headers all over the place.
        for (at, byte) in [(40, 0xff), (47, 0xff), (60, 0xff), (62, 0xfe)] {
            let was = std::mem::replace(&mut file[at], byte);
            let _ = Elf::parse(&file);
            file[at] = was;
        }
        assert!(Elf::parse(b"\x7fELF\x01\x01 and more").functions.is_empty());
    }
}
