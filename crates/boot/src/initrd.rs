// SPDX-License-Identifier: Apache-2.0
//! Where the initial RAM disk goes: as high in low RAM as the kernel reaches, so that it is out of the kernel's way.

use base::Gpa;
use mem::GuestRam;

use crate::source::Source;
use crate::{BootError, e820};

const PAGE: u64 = 4096;

/// Free space for an initrd.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// First byte past the kernel.
    pub floor: u64,
    /// End of low RAM.
    pub ram_end: u64,
    /// Highest address the kernel lets the last byte have, `initrd_addr_max` of its header.
    pub max: u64,
}

impl Room {
    /// The highest page where `len` bytes fit, or `None`.
    #[must_use]
    pub fn place(&self, len: u64) -> Option<Gpa> {
        let end = self.ram_end.min(self.max.saturating_add(1));
        let at = end.checked_sub(len)? & !(PAGE - 1);
        (at >= self.floor).then_some(Gpa(at))
    }
}

/// Reads `initrd` straight into guest memory; an empty file is no initrd.
///
/// # Errors
/// [`BootError::NoRoom`] or [`BootError::Read`].
pub fn load(ram: &GuestRam, initrd: &Source<'_>, room: Room) -> Result<Option<(Gpa, u64)>, BootError> {
    let len = initrd.len();
    if len == 0 {
        return Ok(None);
    }
    let at = room.place(len).ok_or_else(|| BootError::NoRoom {
        what: format!("initrd {}", initrd.path().display()),
        need: len,
        at: room.floor,
        have: room.ram_end,
    })?;
    initrd.read_to_guest(0, len, ram, at, "initrd")?;
    Ok(Some((at, len)))
}

/// End of the RAM that starts at address 0.
#[must_use]
pub fn low_ram_end(map: &[e820::Range]) -> u64 {
    let low = map.iter().filter(|r| r.kind == e820::RAM && r.at.0 < mem::HIGH_START);
    low.map(|r| r.at.0 + r.len).max().unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn it_goes_as_high_as_it_may_and_no_lower_than_the_kernel() {
        let room = Room { floor: 0x400_0000, ram_end: 0x1000_0000, max: 0x7fff_ffff };
        assert_eq!(room.place(1), Some(Gpa(0x0fff_f000)));
        assert_eq!(room.place(4096), Some(Gpa(0x0fff_f000)));
        assert_eq!(room.place(4097), Some(Gpa(0x0fff_e000)));
        assert_eq!(room.place(0xc00_0000), Some(Gpa(0x400_0000)));
        assert_eq!(room.place(0xc00_0001), None);
        assert_eq!(room.place(u64::MAX), None);
        let big = Room { ram_end: 0xc000_0000, ..room };
        assert_eq!(big.place(0x1000), Some(Gpa(0x7fff_f000)), "initrd_addr_max is the last byte");
        let all = Room { max: u64::MAX, ..big };
        assert_eq!(all.place(0x1000), Some(Gpa(0xbfff_f000)));
    }

    #[test]
    fn bytes_arrive_and_too_many_are_refused_by_name() {
        let ram = GuestRam::anonymous(&[(Gpa(0), 2 << 20)]).unwrap();
        let room = Room { floor: 0x10_0000, ram_end: 2 << 20, max: 0x7fff_ffff };
        let bytes: Vec<u8> = (0..5000u32).map(|i| i as u8).collect();
        let src = Source::memory("initrd", Path::new("i.img"), &bytes);
        assert_eq!(load(&ram, &src, room).unwrap(), Some((Gpa(0x1f_e000), 5000)));
        let mut got = vec![0; 5000];
        ram.read_bytes(Gpa(0x1f_e000), &mut got).unwrap();
        assert_eq!(got, bytes);
        let big = vec![1; (1 << 20) + 1];
        let err = load(&ram, &Source::memory("initrd", Path::new("i.img"), &big), room).unwrap_err().to_string();
        assert!(err.contains("initrd i.img needs 1048577 bytes") && err.contains("--memory"), "{err}");
        assert_eq!(load(&ram, &Source::memory("initrd", Path::new("i.img"), &[]), room).unwrap(), None);
    }
}
