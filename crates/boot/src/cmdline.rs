// SPDX-License-Identifier: Apache-2.0
//! The kernel command line: checked against what the kernel and the boot protocol can take, then put in guest memory.

use mem::GuestRam;

use crate::BootError;
use crate::layout::{CMDLINE, CMDLINE_MAX};

/// What kernels took before they said so in their header (boot protocol 2.06).
pub const DEFAULT_MAX: u32 = 255;

/// Writes `text` and its NUL to [`CMDLINE`]; `max` is the kernel's limit without the NUL.
///
/// # Errors
/// [`BootError::Cmdline`] if it is too long or has a NUL or a line break inside.
pub fn write(ram: &GuestRam, text: &str, max: u64) -> Result<(), BootError> {
    check(text, max.min(CMDLINE_MAX - 1))?;
    ram.write_bytes(CMDLINE, text.as_bytes())?;
    let end = base::Gpa(CMDLINE.0 + text.len() as u64);
    Ok(ram.write_bytes(end, &[0])?)
}

/// Whether `text` can be passed on in at most `max` bytes without the NUL.
///
/// # Errors
/// [`BootError::Cmdline`] if it is too long or has a NUL or a line break inside.
pub fn check(text: &str, max: u64) -> Result<(), BootError> {
    let len = text.len() as u64;
    if len > max {
        return Err(BootError::Cmdline(format!("is {len} bytes long, this kernel takes {max}; shorten it")));
    }
    if let Some(at) = text.bytes().position(|b| b == 0 || b == b'\n') {
        return Err(BootError::Cmdline(format!("has a NUL or a line break at byte {at}; take it out")));
    }
    Ok(())
}

/// Whether `text` has the word `name`, alone or followed by `=value`, before the `--` that ends the kernel's part.
#[must_use]
pub fn has(text: &str, name: &str) -> bool {
    text.split_ascii_whitespace()
        .take_while(|w| *w != "--")
        .any(|w| w.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('=')))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use base::Gpa;

    use super::*;

    fn ram() -> GuestRam {
        GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap()
    }

    #[test]
    fn the_limit_is_exact_and_the_nul_is_there() {
        let ram = ram();
        ram.write_bytes(Gpa(CMDLINE.0 + 8), b"xx").unwrap();
        write(&ram, "quiet ro", 8).unwrap();
        let mut got = [0; 10];
        ram.read_bytes(CMDLINE, &mut got).unwrap();
        assert_eq!(&got, b"quiet ro\0x");
        let err = write(&ram, "quiet ro1", 8).unwrap_err().to_string();
        assert_eq!(err, "kernel command line is 9 bytes long, this kernel takes 8; shorten it");
    }

    #[test]
    fn an_absurd_kernel_limit_does_not_leave_the_page() {
        let long = "a".repeat(0x1_0000);
        assert!(write(&ram(), &long, u64::MAX).is_err());
        assert!(write(&ram(), &long[1..], u64::MAX).is_ok());
    }

    #[test]
    fn nul_and_line_break_are_refused() {
        assert!(write(&ram(), "a\0b", 2047).unwrap_err().to_string().contains("byte 1"));
        assert!(write(&ram(), "ab\nc", 2047).unwrap_err().to_string().contains("byte 2"));
    }

    #[test]
    fn words_are_found_whole_and_before_the_dashes() {
        assert!(has("ro nokaslr quiet", "nokaslr"));
        assert!(has("mem=1G", "mem"));
        assert!(!has("memmap=1G nokaslrx", "mem"));
        assert!(!has("ro -- nokaslr", "nokaslr"));
    }
}
