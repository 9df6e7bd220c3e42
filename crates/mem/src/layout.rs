// SPDX-License-Identifier: Apache-2.0
//! Where RAM lies in the guest-physical address space of an x86 machine: below the 32-bit hole and above 4 GiB.

use base::Gpa;

/// First address past low RAM: from here to 4 GiB lie PCI windows, ECAM, IOAPIC, LAPIC and the reset vector.
pub const LOW_END: u64 = 0xc000_0000;
/// First address of high RAM.
pub const HIGH_START: u64 = 0x1_0000_0000;

/// The RAM ranges of a guest with `size` bytes, lowest first: one up to 3 GiB, two past it.
#[must_use]
pub fn ranges(size: u64) -> Vec<(Gpa, u64)> {
    let low = size.min(LOW_END);
    let mut out = vec![(Gpa(0), low)];
    if size > low {
        out.push((Gpa(HIGH_START), size - low));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exactly_at_the_hole_there_is_one_range() {
        assert_eq!(ranges(LOW_END - 4096), [(Gpa(0), LOW_END - 4096)]);
        assert_eq!(ranges(LOW_END), [(Gpa(0), LOW_END)]);
        assert_eq!(ranges(LOW_END + 4096), [(Gpa(0), LOW_END), (Gpa(HIGH_START), 4096)]);
        assert_eq!(ranges(LOW_END * 2), [(Gpa(0), LOW_END), (Gpa(HIGH_START), LOW_END)]);
    }
}
