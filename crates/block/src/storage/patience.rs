// SPDX-License-Identifier: Apache-2.0
//! When to try an operation on the calling thread, learnt from how the last ones went. Used by `file`, no clock of its own.

/// After so many bad tries in a row the operation is not tried for a while.
const TOLERATED: u32 = 2;
/// Longest while, in operations.
const LONGEST: u32 = 256;

/// Backs off from an operation that keeps going badly; comes back by trying once in a while.
#[derive(Debug, Default)]
pub struct Patience {
    bad_in_a_row: u32,
    skip: u32,
}

impl Patience {
    /// Whether to try now. Counts the operations that are not tried.
    pub fn try_now(&mut self) -> bool {
        if self.skip == 0 {
            return true;
        }
        self.skip -= 1;
        false
    }

    /// The try went well.
    pub fn good(&mut self) {
        self.bad_in_a_row = 0;
    }

    /// The try was in vain or held the thread up.
    pub fn bad(&mut self) {
        self.bad_in_a_row = (self.bad_in_a_row + 1).min(31);
        if self.bad_in_a_row > TOLERATED {
            self.skip = 1u32.checked_shl(self.bad_in_a_row).map_or(LONGEST, |n| n.min(LONGEST));
        }
    }

    /// It never works here: don't try again.
    pub fn never(&mut self) {
        self.skip = u32::MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backs_off_and_comes_back() {
        let mut p = Patience::default();
        p.bad();
        p.bad();
        assert!(p.try_now(), "two bad tries are forgiven");
        p.bad();
        let skipped = (0..1000).take_while(|_| !p.try_now()).count();
        assert_eq!(skipped, 8);
        for _ in 0..40 {
            p.bad();
        }
        let skipped = (0..1000).take_while(|_| !p.try_now()).count();
        assert_eq!(skipped, LONGEST as usize);
        p.good();
        p.bad();
        assert!(p.try_now(), "one good try clears the record");
    }
}
