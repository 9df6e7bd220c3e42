// SPDX-License-Identifier: Apache-2.0
//! The relocation table that follows the ELF file in a bzImage's payload, and how to apply it for KASLR.
//!
//! It is read from its end: 32-bit places, a zero, (until Linux 6.14) inverse 32-bit places, a zero, 64-bit places, a zero.

use base::Gpa;
use mem::GuestRam;
use vm_memory::VolatileMemory;

/// Virtual address of physical 0 in the kernel's own mapping.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;

/// The lists, as little-endian words: low halves of virtual addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Table<'a> {
    add64: &'a [[u8; 4]],
    sub32: &'a [[u8; 4]],
    add32: &'a [[u8; 4]],
}

/// The kernel image in guest memory.
#[derive(Clone, Copy, Debug)]
pub struct Area {
    /// Physical address it is linked for.
    pub linked: u64,
    /// Physical address it was loaded at.
    pub loaded: u64,
    /// Length in bytes.
    pub len: u64,
}

impl<'a> Table<'a> {
    /// Splits the bytes after the ELF file; `None` if they are no such table.
    #[must_use]
    pub fn parse(tail: &'a [u8]) -> Option<Self> {
        let (words, rest) = tail.as_chunks::<4>();
        if !rest.is_empty() || words.is_empty() {
            return None;
        }
        let mut lists = words.split(|w| *w == [0; 4]);
        // The table starts with a zero, so there is an empty list before it.
        if !lists.next()?.is_empty() {
            return None;
        }
        let lists: Vec<_> = lists.take(4).collect();
        match lists[..] {
            [add64, sub32, add32] => Some(Self { add64, sub32, add32 }),
            [add64, add32] => Some(Self { add64, sub32: &[], add32 }),
            _ => None,
        }
    }

    /// Adds `shift` to every place listed.
    ///
    /// # Errors
    /// A phrase if a place is outside the kernel; places before it have been changed.
    pub fn apply(&self, ram: &GuestRam, area: Area, shift: u64) -> Result<(), String> {
        let outside = || "its relocation table points outside the kernel".to_string();
        let len = usize::try_from(area.len).map_err(|_| outside())?;
        let image = ram.slice(Gpa(area.loaded), len).ok_or_else(outside)?;
        let place = |word: &[u8; 4]| {
            let virt = i64::from(i32::from_le_bytes(*word)) as u64;
            virt.wrapping_sub(KERNEL_MAP).wrapping_sub(area.linked) as usize
        };
        for word in self.add32 {
            let r = image.get_ref::<u32>(place(word)).map_err(|_| outside())?;
            r.store(r.load().wrapping_add(shift as u32));
        }
        for word in self.sub32 {
            let r = image.get_ref::<u32>(place(word)).map_err(|_| outside())?;
            r.store(r.load().wrapping_sub(shift as u32));
        }
        for word in self.add64 {
            let r = image.get_ref::<u64>(place(word)).map_err(|_| outside())?;
            r.store(r.load().wrapping_add(shift));
        }
        Ok(())
    }
}
