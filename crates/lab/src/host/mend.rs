// SPDX-License-Identifier: Apache-2.0
//! Keeps the software CPU from delivering a guest's interrupt twice.
//!
//! QEMU's emulated VMRUN (seen in 7.2 and 10.0) delivers the interrupt that the hypervisor asks for, and leaves its number
//! behind as the CPU's pending exception. If the instruction budget ends before the next exit, which counted time makes
//! likely, the run loop takes that number for an exception and delivers the interrupt again, with interrupts off: the guest
//! then waits for ever for a lock it holds, or dies of a double fault. The number is only used for a log line, so the lab
//! turns the one instruction that stores it into a no-op, in the memory of the QEMU it has just started and nowhere else,
//! if it finds exactly that instruction between exactly its neighbours. Otherwise the lab works as well, and watchdogs and
//! repeated samples take care of the guests that get stuck.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result};

/// A six-byte instruction that does nothing.
const NOTHING: [u8; 6] = [0x66, 0x0f, 0x1f, 0x44, 0x00, 0x00];

/// What stands around the store: load the vector, store its error code, **store the vector**, clear and set two fields
/// behind the error code. `None` is any byte: part of a field's place in the CPU's structure.
#[rustfmt::skip]
const PATTERN: [Option<u8>; 38] = {
    const ANY: Option<u8> = None;
    const fn b(byte: u8) -> Option<u8> { Some(byte) }
    [
        b(0x41), b(0x0f), b(0xb6), b(0xf4),
        b(0x44), b(0x89), b(0xab), ANY, ANY, b(0x00), b(0x00),
        b(0x89), b(0xb3), ANY, ANY, b(0xff), b(0xff),
        b(0xc7), b(0x83), ANY, ANY, b(0x00), b(0x00), b(0x00), b(0x00), b(0x00), b(0x00),
        b(0x48), b(0xc7), b(0x83), ANY, ANY, b(0x00), b(0x00), b(0xff), b(0xff), b(0xff), b(0xff),
    ]
};
/// Where the store is in the pattern.
const STORE: usize = 11;
/// Where the places of three neighbouring fields are in the pattern: each lies 4 bytes behind the one before.
const FIELDS: [usize; 3] = [7, 19, 30];

/// Mends the QEMU process `pid`, which runs no guest yet. False when this QEMU's code is not the known one.
///
/// # Errors
/// When the process's memory can't be read or written.
pub fn mend(pid: u32) -> Result<bool> {
    let exe = fs::read_link(format!("/proc/{pid}/exe")).context("which program the lab machine is")?;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).context("where its code is")?;
    let Some((start, end)) = code_of(&maps, &exe) else { return Ok(false) };
    let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem")).context("its memory")?;
    let mut code = vec![0; usize::try_from(end - start)?];
    memory.read_exact_at(&mut code, start).context("read its code")?;
    let Some(at) = find(&code) else { return Ok(false) };
    memory.write_all_at(&NOTHING, start + at as u64).context("mend its code")?;
    Ok(true)
}

/// Whether [`mend`] knows the code of the program at `path`.
#[must_use]
pub fn knows(path: &Path) -> bool {
    fs::read(path).is_ok_and(|bytes| find(&bytes).is_some())
}

/// Start and end of the executable mapping of `exe` in a process's list of mappings.
fn code_of(maps: &str, exe: &Path) -> Option<(u64, u64)> {
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let mut fields = rest.split_whitespace();
        if fields.next()? != "r-xp" || Path::new(fields.nth(3)?) != exe {
            return None;
        }
        let (start, end) = range.split_once('-')?;
        Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
    })
}

/// Offset of the store, if the pattern is there exactly once.
fn find(code: &[u8]) -> Option<usize> {
    let mut hits = code.windows(PATTERN.len()).enumerate().filter(|(_, window)| is_it(window));
    let (at, _) = hits.next()?;
    hits.next().is_none().then_some(at + STORE)
}

fn is_it(window: &[u8]) -> bool {
    if window[0] != 0x41 || !window.iter().zip(PATTERN).all(|(byte, wanted)| wanted.is_none_or(|w| w == *byte)) {
        return false;
    }
    let place = |at: usize| u16::from_le_bytes([window[at], window[at + 1]]);
    let [error, is_int, next] = FIELDS.map(place);
    is_int.checked_sub(error) == Some(4) && next.checked_sub(is_int) == Some(4)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The pattern with the places of its fields filled in.
    fn sample(places: [u16; 3]) -> Vec<u8> {
        let mut code: Vec<u8> = PATTERN.iter().map(|byte| byte.unwrap_or(0xee)).collect();
        for (at, place) in FIELDS.into_iter().zip(places) {
            code[at..at + 2].copy_from_slice(&place.to_le_bytes());
        }
        code
    }

    #[test]
    fn the_store_is_found_only_if_it_is_surely_the_one() {
        let known = sample([0x3380, 0x3384, 0x3388]);
        let padded = [vec![0x41; 99], known.clone(), vec![0x90; 50]].concat();
        assert_eq!(find(&padded), Some(99 + STORE));
        assert_eq!(padded[99 + STORE..99 + STORE + 2], [0x89, 0xb3]);
        assert_eq!(find(&sample([0x3380, 0x3384, 0x3390])), None, "other fields");
        assert_eq!(find(&[known.clone(), known.clone()].concat()), None, "twice");
        assert_eq!(find(&known[..known.len() - 1]), None, "cut off");
        let mut mended = known;
        mended[STORE..STORE + 6].copy_from_slice(&NOTHING);
        assert_eq!(find(&mended), None, "mended already");
        assert_eq!(find(&[]), None);
    }

    #[test]
    fn the_code_of_a_program_is_found_among_its_mappings() {
        let maps = "55a0-55b0 r--p 00000000 00:01 7 /usr/bin/q\n\
                    55b0-56c0 r-xp 00000000 00:01 7    /usr/bin/q\n\
                    7f00-7f10 r-xp 00000000 00:01 8 /lib/other\n\
                    ffff-fffff r-xp 0 00:00 0 [vdso]\n";
        assert_eq!(code_of(maps, Path::new("/usr/bin/q")), Some((0x55b0, 0x56c0)));
        assert_eq!(code_of(maps, Path::new("/lib/none")), None);
        assert_eq!(code_of("", Path::new("/usr/bin/q")), None);
    }

    #[test]
    fn a_program_that_is_no_qemu_is_left_alone() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let mended = mend(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!mended.unwrap());
        assert!(!knows(Path::new("/nonexistent")));
    }
}
