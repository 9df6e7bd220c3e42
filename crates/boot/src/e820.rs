// SPDX-License-Identifier: Apache-2.0
//! The memory map the guest starts with: RAM as it is, less the BIOS area, plus what must never be handed out.

use base::Gpa;
use mem::GuestRam;

use crate::BootError;
use crate::layout::{HIGH_MEMORY, LOW_USABLE_END};
use crate::platform::Platform;

/// Usable memory.
pub const RAM: u32 = 1;
/// Memory or device space the guest must not use.
pub const RESERVED: u32 = 2;

/// One range: first byte, length in bytes, kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub at: Gpa,
    /// Length in bytes, never 0.
    pub len: u64,
    /// [`RAM`] or [`RESERVED`].
    pub kind: u32,
}

/// The map, lowest first, no two ranges overlapping.
///
/// # Errors
/// [`BootError::Platform`] if RAM doesn't start at 0 and reach past 1 MiB, or if the ECAM lies in RAM.
pub fn map(ram: &GuestRam, platform: &Platform) -> Result<Vec<Range>, BootError> {
    let mut out = vec![
        Range { at: Gpa(0), len: LOW_USABLE_END, kind: RAM },
        Range { at: Gpa(LOW_USABLE_END), len: HIGH_MEMORY - LOW_USABLE_END, kind: RESERVED },
    ];
    for (index, (at, len, _)) in ram.regions().enumerate() {
        if index == 0 {
            if at.0 != 0 || len <= HIGH_MEMORY {
                return Err(BootError::Platform(format!(
                    "first RAM is {len} bytes at {at}, need more than 1 MiB at 0"
                )));
            }
            out.push(Range { at: Gpa(HIGH_MEMORY), len: len - HIGH_MEMORY, kind: RAM });
        } else {
            out.push(Range { at, len, kind: RAM });
        }
    }
    if let Some(ecam) = platform.ecam {
        out.push(Range { at: ecam.base, len: ecam.len(), kind: RESERVED });
    }
    out.sort_by_key(|r| r.at);
    if let Some(w) = out.windows(2).find(|w| w[0].at.0.saturating_add(w[0].len) > w[1].at.0) {
        return Err(BootError::Platform(format!("memory map: {} overlaps {}", w[0].at, w[1].at)));
    }
    Ok(out)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::platform::{Ecam, tests::platform};

    fn of(size: u64) -> Vec<(u64, u64, u32)> {
        let ram = GuestRam::anonymous(&mem::ranges(size)).unwrap();
        map(&ram, &platform()).unwrap().iter().map(|r| (r.at.0, r.at.0 + r.len, r.kind)).collect()
    }

    const G: u64 = 1 << 30;

    #[test]
    fn edges_of_the_hole_are_exact() {
        let low = [(0, 0x9_fc00, RAM), (0x9_fc00, 0x10_0000, RESERVED)];
        let ecam = (0xe000_0000, 0xe010_0000, RESERVED);
        let want = |rest: &[(u64, u64, u32)]| [&low[..], rest].concat();
        assert_eq!(of(3 * G - 4096), want(&[(0x10_0000, 3 * G - 4096, RAM), ecam]));
        assert_eq!(of(3 * G), want(&[(0x10_0000, 3 * G, RAM), ecam]));
        assert_eq!(of(3 * G + 4096), want(&[(0x10_0000, 3 * G, RAM), ecam, (4 * G, 4 * G + 4096, RAM)]));
        assert_eq!(of(256 << 20), want(&[(0x10_0000, 256 << 20, RAM), ecam]));
    }

    #[test]
    fn a_window_in_ram_is_refused() {
        let ram = GuestRam::anonymous(&mem::ranges(G)).unwrap();
        let mut p = platform();
        p.ecam = Some(Ecam { base: Gpa(G - (1 << 20)), buses: 1 });
        assert!(matches!(map(&ram, &p), Err(BootError::Platform(_))));
        let tiny = GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap();
        assert!(matches!(map(&tiny, &platform()), Err(BootError::Platform(_))));
    }
}
