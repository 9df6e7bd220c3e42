// SPDX-License-Identifier: Apache-2.0
//! Where the initial RAM disk goes: as high in low RAM as the kernel reaches, so that it is out of the kernel's way.
//!
//! A zstd initrd is unpacked on the way there: natively, by libzstd, where the guest would do the same with its kernel's
//! plainer code. The guest then finds a plain archive, which takes as much memory as the files that it becomes; so that
//! happens only up to a quarter of RAM. Everything else reaches the guest as it is.

mod prefix;
pub mod zstd;

use base::Gpa;
use mem::GuestRam;

use crate::source::Source;
use crate::{BootError, Decompress, e820};
use zstd::Frame;

const PAGE: u64 = 4096;
/// An unpacked initrd takes at most one part in this many of RAM: the files in it take as much again until it is freed.
const SHARE: u64 = 4;

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

/// An initrd in guest memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// First byte, at a page's start.
    pub at: Gpa,
    /// Length in bytes.
    pub len: u64,
    /// For the user's timeline: who unpacks it and why.
    pub how: String,
}

/// Puts `initrd` into guest memory, unpacked if tare shall and can do so, else as it is; an empty file is no initrd.
///
/// # Errors
/// [`BootError::NoRoom`] or [`BootError::Read`]; [`BootError::Malformed`] if its checksum is wrong.
pub fn load(
    ram: &GuestRam,
    initrd: &Source<'_>,
    room: Room,
    decompress: Decompress,
) -> Result<Option<Placed>, BootError> {
    let len = initrd.len();
    if len == 0 {
        return Ok(None);
    }
    let why = match decompress {
        Decompress::Guest => "as asked",
        Decompress::Monitor => match unpack(ram, initrd, room)? {
            Unpacked::At(at, len) => return Ok(Some(Placed { at, len, how: "initrd, zstd, unpacked by tare".into() })),
            Unpacked::No(why) => why,
        },
    };
    let at = room.place(len).ok_or_else(|| BootError::NoRoom {
        what: format!("initrd {}", initrd.path().display()),
        need: len,
        at: room.floor,
        have: room.ram_end,
    })?;
    initrd.read_to_guest(0, len, ram, at, "initrd")?;
    Ok(Some(Placed { at, len, how: format!("initrd as it is ({why})") }))
}

/// What came of unpacking.
enum Unpacked {
    /// It lies there, with that many bytes.
    At(Gpa, u64),
    /// Guest memory is as it was; why.
    No(&'static str),
}

/// Unpacks the zstd frame that ends `initrd` straight into guest memory, behind the plain archives before it.
fn unpack(ram: &GuestRam, initrd: &Source<'_>, room: Room) -> Result<Unpacked, BootError> {
    let Some(start) = prefix::end(initrd)? else { return Ok(Unpacked::No("no compressed part found")) };
    let mut head = [0; zstd::HEAD];
    let head = &mut head[..(initrd.len() - start).min(zstd::HEAD as u64) as usize];
    initrd.read(start, head, "frame")?;
    let Some(frame) = Frame::parse(head) else { return Ok(Unpacked::No("not zstd")) };
    if !frame.is_decodable() {
        return Ok(Unpacked::No("its zstd window is too large"));
    }
    // The kernel wants an archive to start at a multiple of four. RAM is zero there, which is what it steps over.
    let before = start.next_multiple_of(4);
    let limit = (ram.size() / SHARE).saturating_sub(before);
    let Some(most) = frame.bound(initrd, start, limit)? else {
        return Ok(Unpacked::No("unpacked it would fill more than a quarter of memory"));
    };
    let Some(at) = room.place(before + most) else { return Ok(Unpacked::No("no room for it unpacked")) };
    let mut done = 0;
    let mut not_cpio = false;
    let end = zstd::decode(initrd, start, &mut |bytes| {
        not_cpio = done == 0 && !prefix::is_cpio(bytes);
        if not_cpio || bytes.len() as u64 > most - done {
            return Ok(false);
        }
        ram.write_bytes(Gpa(at.0 + before + done), bytes)?;
        done += bytes.len() as u64;
        Ok(true)
    })?;
    let why = match end {
        zstd::End::Done(end) if prefix::only_zeros(initrd, end)? => {
            initrd.read_to_guest(0, start, ram, at, "archives before the compressed one")?;
            return Ok(Unpacked::At(at, before + done));
        }
        zstd::End::Done(_) => "more follows its zstd frame",
        zstd::End::WrongChecksum => return Err(initrd.malformed("its unpacked content has the wrong checksum")),
        zstd::End::Failed if not_cpio => "no cpio archive in its zstd frame",
        zstd::End::Failed => "its zstd frame cannot be decoded",
    };
    // Whoever loads next counts on zeros.
    let zeros = [0; 4096];
    let mut from = 0;
    while from < done {
        let n = (done - from).min(zeros.len() as u64);
        ram.write_bytes(Gpa(at.0 + before + from), &zeros[..n as usize])?;
        from += n;
    }
    Ok(Unpacked::No(why))
}

/// End of the RAM that starts at address 0.
#[must_use]
pub fn low_ram_end(map: &[e820::Range]) -> u64 {
    let low = map.iter().filter(|r| r.kind == e820::RAM && r.at.0 < mem::HIGH_START);
    low.map(|r| r.at.0 + r.len).max().unwrap_or(0)
}

#[cfg(test)]
mod unpack_tests;

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
        let how = "initrd as it is (not zstd)".to_string();
        let placed = Placed { at: Gpa(0x1f_e000), len: 5000, how };
        assert_eq!(load(&ram, &src, room, Decompress::Monitor).unwrap(), Some(placed));
        let mut got = vec![0; 5000];
        ram.read_bytes(Gpa(0x1f_e000), &mut got).unwrap();
        assert_eq!(got, bytes);
        let big = vec![1; (1 << 20) + 1];
        let big = Source::memory("initrd", Path::new("i.img"), &big);
        let err = load(&ram, &big, room, Decompress::Guest).unwrap_err().to_string();
        assert!(err.contains("initrd i.img needs 1048577 bytes") && err.contains("--memory"), "{err}");
        let none = Source::memory("initrd", Path::new("i.img"), &[]);
        assert_eq!(load(&ram, &none, room, Decompress::Monitor).unwrap(), None);
    }
}
