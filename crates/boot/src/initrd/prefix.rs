// SPDX-License-Identifier: Apache-2.0
//! Steps over the uncompressed cpio archives that may stand before a compressed one, such as early microcode.
//!
//! The kernel's own rules: members start at multiples of four, zeros between archives don't count.

use crate::BootError;
use crate::source::Source;

/// Members stepped over at most: early archives have a handful.
const MAX_MEMBERS: usize = 64;
/// Zeros stepped over at most, in bytes.
const MAX_PADDING: u64 = 1 << 20;
/// A "newc" header: magic and thirteen fields of eight hexadecimal digits.
const HEADER: u64 = 110;

/// Offset of the first byte of `initrd` that belongs to no cpio member and no padding; `None` if there is none or it
/// is not found within the bounds.
///
/// # Errors
/// What reading says.
pub fn end(initrd: &Source<'_>) -> Result<Option<u64>, BootError> {
    let mut at = 0;
    for _ in 0..MAX_MEMBERS {
        let Some(next) = skip_zeros(initrd, at)? else { return Ok(None) };
        at = next;
        let mut head = [0; HEADER as usize];
        let have = (initrd.len() - at).min(HEADER) as usize;
        initrd.read(at, &mut head[..have], "member")?;
        if at % 4 != 0 || !is_cpio(&head) {
            return Ok(Some(at));
        }
        let Some(len) = member_len(&head) else { return Ok(None) };
        at += len;
        if at >= initrd.len() {
            return Ok(None);
        }
    }
    Ok(None)
}

/// Whether `head` starts a cpio archive that the kernel reads.
#[must_use]
pub fn is_cpio(head: &[u8]) -> bool {
    head.starts_with(b"070701") || head.starts_with(b"070702")
}

/// Bytes of a member with name and data, up to where the next may start. At most a little over 8 GiB.
fn member_len(head: &[u8]) -> Option<u64> {
    let field = |n: usize| {
        let digits = head.get(6 + n * 8..14 + n * 8)?;
        u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
    };
    let (data, name) = (field(6)?, field(11)?);
    Some((HEADER + name).next_multiple_of(4) + data.next_multiple_of(4))
}

/// The first byte from `at` on that is not zero.
fn skip_zeros(initrd: &Source<'_>, mut at: u64) -> Result<Option<u64>, BootError> {
    let stop = initrd.len().min(at.saturating_add(MAX_PADDING));
    let mut piece = [0; 512];
    while at < stop {
        let piece = &mut piece[..(stop - at).min(512) as usize];
        initrd.read(at, piece, "padding")?;
        if let Some(n) = piece.iter().position(|b| *b != 0) {
            return Ok(Some(at + n as u64));
        }
        at += piece.len() as u64;
    }
    Ok(None)
}

/// Whether `initrd` has nothing but zeros from `at` on. Reads all of it if so.
///
/// # Errors
/// What reading says.
pub fn only_zeros(initrd: &Source<'_>, at: u64) -> Result<bool, BootError> {
    Ok(initrd.len() - at.min(initrd.len()) <= MAX_PADDING && skip_zeros(initrd, at)?.is_none())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use std::path::Path;

    use super::*;

    /// One member, padded to four bytes.
    pub(in crate::initrd) fn member(name: &str, data: &[u8]) -> Vec<u8> {
        let mut out = b"070701".to_vec();
        for n in 0..13 {
            let value = [0, data.len(), name.len() + 1][usize::from(n == 6) + 2 * usize::from(n == 11)];
            out.extend_from_slice(format!("{value:08X}").as_bytes());
        }
        out.extend_from_slice(name.as_bytes());
        out.push(0);
        out.resize(out.len().next_multiple_of(4), 0);
        out.extend_from_slice(data);
        out.resize(out.len().next_multiple_of(4), 0);
        out
    }

    fn end_of(bytes: &[u8]) -> Option<u64> {
        end(&Source::memory("initrd", Path::new("i"), bytes)).unwrap()
    }

    #[test]
    fn members_and_padding_are_stepped_over() {
        let mut bytes = [member("kernel", b""), member("kernel/x.bin", &[9; 1001]), member("TRAILER!!!", b"")].concat();
        assert_eq!(end_of(&bytes), None, "nothing follows");
        bytes.resize(bytes.len().next_multiple_of(512) + 1024, 0);
        assert_eq!(end_of(&bytes), None, "zeros follow");
        let at = bytes.len() as u64;
        bytes.extend_from_slice(b"x");
        assert_eq!(end_of(&bytes), Some(at));
        assert_eq!(end_of(b"\x28\xb5"), Some(0));
        assert_eq!(end_of(b""), None);
    }

    #[test]
    fn what_makes_no_sense_ends_the_walk() {
        let good = member("a", &[1; 50]);
        let changed = |at: usize, with: &[u8]| {
            let mut bytes = [&good[..], b"rest"].concat();
            bytes[at..at + with.len()].copy_from_slice(with);
            end_of(&bytes)
        };
        assert_eq!(changed(0, b"0"), Some(good.len() as u64));
        assert_eq!(changed(54, b"zzzzzzzz"), None, "no number");
        assert_eq!(changed(54, &[0xff; 8]), None, "no text");
        assert_eq!(changed(54, b"ffffffff"), None, "past the end");
        assert_eq!(changed(0, b"1"), Some(0));
        assert_eq!(end_of(&[&good.repeat(63)[..], b"rest"].concat()), Some(63 * good.len() as u64));
        assert_eq!(end_of(&[&good.repeat(64)[..], b"rest"].concat()), None, "too many members");
        for len in 1..good.len() {
            assert_eq!(end_of(&good[..len]), (len < 6).then_some(0), "{len}");
        }
    }
}
