// SPDX-License-Identifier: Apache-2.0
//! The unpacked kernel as it streams by: ELF headers first, then segments into guest memory, then the relocation table.

use base::Gpa;
use mem::GuestRam;

use super::{Outcome, Placement, relocs};
use crate::BootError;
use crate::bzimage::BzImage;
use crate::elf::{Elf, HEAD};
use crate::source::Source;

/// Pages of zeros are not written.
const PAGE: usize = 4096;
/// Bytes copied at a time: below the length where the C library prefers `rep movsb`, which is slow to start.
const PIECE: usize = 2048;
static ZEROS: [u8; PAGE] = [0; PAGE];
/// Largest relocation table kept, in bytes; Debian's has 0.8 MiB.
const MAX_RELOCS: u64 = 32 << 20;

/// Where decoded bytes go.
#[derive(Debug)]
pub struct Image<'a> {
    ram: &'a GuestRam,
    kernel: &'a Source<'a>,
    bz: &'a BzImage,
    to: Placement,
    /// Bytes the payload says it has unpacked.
    size: u64,
    /// Bytes seen.
    pos: u64,
    /// The first bytes, until `elf` is known.
    head: Vec<u8>,
    elf: Option<Elf>,
    /// What follows the ELF file.
    tail: Vec<u8>,
}

impl<'a> Image<'a> {
    /// An image of `size` bytes to be placed at `to`.
    #[must_use]
    pub fn new(ram: &'a GuestRam, kernel: &'a Source<'a>, bz: &'a BzImage, to: Placement, size: u64) -> Self {
        Self { ram, kernel, bz, to, size, pos: 0, head: Vec::new(), elf: None, tail: Vec::new() }
    }

    /// Takes the next decoded bytes.
    ///
    /// # Errors
    /// [`BootError::Malformed`] if they are too many or not a kernel that belongs at its address.
    pub fn push(&mut self, bytes: &[u8]) -> Result<(), BootError> {
        if bytes.len() as u64 > self.size - self.pos - self.head.len() as u64 {
            return Err(self
                .kernel
                .malformed(format!("its payload unpacks to more than the {} bytes it claims", self.size)));
        }
        if self.elf.is_some() {
            return self.place(bytes);
        }
        self.head.extend_from_slice(bytes);
        if self.head.len() < HEAD && (self.head.len() as u64) < self.size {
            return Ok(());
        }
        let head = std::mem::take(&mut self.head);
        let elf = Elf::parse(&head[..head.len().min(HEAD)], self.size)
            .map_err(|what| self.kernel.malformed(format!("inside, {what}")))?;
        let inside = |s: u64, e: u64| s >= self.bz.pref && e <= self.bz.pref + self.bz.init_size;
        let fits = elf.extent().is_some_and(|(s, e)| inside(s, e));
        if !(elf.is_64 && fits && elf.holds(elf.entry)) {
            return Err(self.kernel.malformed("the kernel inside does not lie where its header says"));
        }
        self.elf = Some(elf);
        self.place(&head)
    }

    fn place(&mut self, bytes: &[u8]) -> Result<(), BootError> {
        let Some(elf) = &self.elf else { return Ok(()) };
        let (start, end) = (self.pos, self.pos + bytes.len() as u64);
        for s in &elf.segments {
            let (from, to) = (start.max(s.offset), end.min(s.offset + s.file_len));
            if from < to {
                let at = s.at - self.bz.pref + self.to.at + (from - s.offset);
                write_sparse(self.ram, Gpa(at), &bytes[(from - start) as usize..(to - start) as usize])?;
            }
        }
        if end > elf.file_end {
            let from = start.max(elf.file_end);
            if self.size - elf.file_end <= MAX_RELOCS {
                self.tail.extend_from_slice(&bytes[(from - start) as usize..]);
            }
        }
        self.pos = end;
        Ok(())
    }

    /// All bytes are there: moves the kernel to its virtual address and says where it starts.
    ///
    /// # Errors
    /// [`BootError::Malformed`] if bytes are missing or the relocation table points outside the kernel.
    pub fn finish(self) -> Result<Outcome, BootError> {
        let Some(elf) = self.elf.filter(|_| self.pos == self.size) else {
            let got = self.pos + self.head.len() as u64;
            return Err(self.kernel.malformed(format!("its payload unpacks to {got} bytes, not to {}", self.size)));
        };
        if self.to.shift != 0 {
            let Some(table) = relocs::Table::parse(&self.tail) else {
                return Ok(Outcome::LeaveToGuest("its relocation table has an unknown form"));
            };
            let area = relocs::Area { linked: self.bz.pref, loaded: self.to.at, len: self.bz.init_size };
            table.apply(self.ram, area, self.to.shift).map_err(|what| self.kernel.malformed(what))?;
        }
        Ok(Outcome::Done(Gpa(elf.entry - self.bz.pref + self.to.at)))
    }
}

/// Writes `bytes` page by page, leaving out pages of zeros.
fn write_sparse(ram: &GuestRam, mut at: Gpa, mut bytes: &[u8]) -> Result<(), BootError> {
    while !bytes.is_empty() {
        let n = (PAGE - at.0 as usize % PAGE).min(bytes.len());
        let (piece, rest) = bytes.split_at(n);
        if piece != &ZEROS[..n] {
            for (index, part) in piece.chunks(PIECE).enumerate() {
                ram.write_bytes(Gpa(at.0 + (index * PIECE) as u64), part)?;
            }
        }
        at = Gpa(at.0 + n as u64);
        bytes = rest;
    }
    Ok(())
}
