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

/// What of `ranges` each node has, where they have `sizes` bytes, lowest addresses first.
#[must_use]
pub fn nodes(ranges: &[(Gpa, u64)], sizes: &[u64]) -> Vec<Vec<(Gpa, u64)>> {
    let mut rest = ranges.iter().copied();
    let mut at_hand = rest.next();
    let mut out = Vec::with_capacity(sizes.len());
    for &size in sizes {
        let (mut node, mut left) = (Vec::new(), size);
        while let Some((at, len)) = at_hand.filter(|_| left > 0) {
            let part = len.min(left);
            node.push((at, part));
            left -= part;
            at_hand = if part < len { Some((Gpa(at.0 + part), len - part)) } else { rest.next() };
        }
        out.push(node);
    }
    out
}

/// Least bytes in which memory that is plugged becomes the guest's and ceases to be; Linux adds memory in such blocks.
pub const LEAST_PIECE: u64 = 128 << 20;

/// Bytes of such a piece where `size` bytes can be plugged: there are at most 256, each of which takes a slot of KVM's.
#[must_use]
pub fn piece_to_plug(size: u64) -> u64 {
    LEAST_PIECE.max(size.div_ceil(256).next_power_of_two())
}

/// Where memory that is plugged later lies in a guest that starts with `size` bytes: past all of that and past 4 GiB, at a
/// multiple of `piece` (a power of two) and of 2 GiB, the largest block in which a Linux guest adds memory. A hole keeps both apart,
/// so that no buffer goes from one into the other.
#[must_use]
pub fn room_to_plug(size: u64, piece: u64) -> Gpa {
    let end = ranges(size).last().map_or(0, |(at, len)| at.0 + len).max(HIGH_START);
    Gpa((end + 1).next_multiple_of(piece.max(2 << 30)))
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

    #[test]
    fn nodes_have_their_bytes_on_both_sides_of_the_hole() {
        let gpa = |parts: &[(u64, u64)]| parts.iter().map(|(at, len)| (Gpa(*at), *len)).collect::<Vec<_>>();
        let all = ranges(5 << 30);
        assert_eq!(nodes(&all, &[5 << 30]), [gpa(&[(0, 3 << 30), (4 << 30, 2 << 30)])]);
        let two = [gpa(&[(0, 2 << 30)]), gpa(&[(2 << 30, 1 << 30), (4 << 30, 2 << 30)])];
        assert_eq!(nodes(&all, &[2 << 30, 3 << 30]), two);
        assert_eq!(nodes(&all, &[3 << 30, 2 << 30]), [gpa(&[(0, 3 << 30)]), gpa(&[(4 << 30, 2 << 30)])]);
    }

    #[test]
    fn what_is_plugged_later_lies_past_the_rest_and_touches_it_nowhere() {
        const G: u64 = 1 << 30;
        let at = |size, piece| room_to_plug(size, piece).0;
        assert_eq!([at(G, 1), at(3 * G, 1), at(4 * G, 1), at(5 * G, 1)], [6 * G, 6 * G, 6 * G, 8 * G]);
        assert_eq!(at(5 * G, 16 * G), 16 * G);
        assert_eq!([1, 32 * G, 33 * G].map(piece_to_plug), [128 << 20, 128 << 20, 256 << 20]);
    }
}
