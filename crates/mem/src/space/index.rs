// SPDX-License-Identifier: Apache-2.0
//! Where a search of a flat view begins. Where nearly all ranges lie is divided into equal steps, about two for each range; a
//! step knows which ranges begin in it, mostly one or none, and only those are searched by halves. Used by `flat`.

/// Views of no more ranges are searched by halves alone.
const FEW: usize = 8;

/// Finds an address among sorted ones.
#[derive(Clone, Debug)]
pub(super) struct Index {
    /// First address of each range, lowest first; apart from the ranges, so that a search stays within few cache lines.
    starts: Box<[u64]>,
    /// How many addresses a step has, as a power of two.
    shift: u32,
    /// How many ranges begin before each step; the last entry is how many there are, since the last step has no end. Empty where
    /// a search need not begin anywhere.
    before: Box<[u32]>,
}

impl Index {
    /// For ranges that begin at `starts`, lowest first; fewer than 2^32.
    pub(super) fn new(starts: Box<[u64]>) -> Self {
        let count = starts.len();
        if count <= FEW {
            return Self { starts, shift: 0, before: Box::new([]) };
        }
        // What lies far above the rest, as a window for devices, would make all steps too long.
        let high = starts.get(count - count.div_ceil(8)).copied().unwrap_or(0);
        let bits = u64::BITS - high.leading_zeros();
        let shift = bits.saturating_sub(count.next_power_of_two().trailing_zeros() + 1);
        // Those up to that of `high`, one without an end, and the count.
        let before = vec![0; (high >> shift) as usize + 3].into();
        let mut index = Self { starts, shift, before };
        for at in &index.starts {
            let next = index.step(*at) + 1;
            if let Some(begin_here) = index.before.get_mut(next) {
                *begin_here += 1;
            }
        }
        let mut sum = 0;
        for before in &mut index.before {
            sum += *before;
            *before = sum;
        }
        index
    }

    /// The step of an address, where there are steps.
    #[inline]
    fn step(&self, at: u64) -> usize {
        ((at >> self.shift) as usize).min(self.before.len() - 2)
    }

    /// How many ranges begin at `at` or before.
    #[inline]
    pub(super) fn count_to(&self, at: u64) -> usize {
        let (mut from, mut here) = (0, &*self.starts);
        if !self.before.is_empty()
            && let Some([first, next]) = self.before.get(self.step(at)..).and_then(<[u32]>::first_chunk)
        {
            from = *first as usize;
            here = self.starts.get(from..*next as usize).unwrap_or_default();
        }
        from + here.partition_point(|start| *start <= at)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn same_as_a_plain_search(starts: &[u64], at: &[u64]) {
        let index = Index::new(starts.into());
        for at in at {
            assert_eq!(
                index.count_to(*at),
                starts.iter().filter(|start| *start <= at).count(),
                "{at:#x} of {starts:x?}"
            );
        }
    }

    /// Each start, and what lies beside it.
    fn around(starts: &[u64]) -> Vec<u64> {
        let ends = [0, 1, u64::MAX - 1, u64::MAX];
        starts.iter().flat_map(|at| [at.saturating_sub(1), *at, at.saturating_add(1)]).chain(ends).collect()
    }

    #[test]
    fn few_and_none_at_all() {
        same_as_a_plain_search(&[], &[0, 1, u64::MAX]);
        for count in 1..40u64 {
            for stride in [1, 4096, 1 << 30, 1 << 57] {
                let starts: Vec<u64> = (0..count).map(|n| n * stride).collect();
                same_as_a_plain_search(&starts, &around(&starts));
            }
        }
        let top: Vec<u64> = (0..40).rev().map(|n| u64::MAX - n * 3).collect();
        same_as_a_plain_search(&top, &around(&top));
    }

    #[test]
    fn ranges_side_by_side_have_steps_of_their_own() {
        let mut starts: Vec<u64> = (0..1000).map(|n| n << 20).collect();
        starts.push(1 << 50);
        let index = Index::new(starts.into());
        let most = index.before.windows(2).rev().skip(1).map(|pair| pair[1] - pair[0]).max();
        assert_eq!(most, Some(1), "a window far above them changes nothing");
    }

    proptest! {
        #[test]
        fn any_starts(
            starts in proptest::collection::btree_set(prop_oneof![0..1u64 << 16, 0..1u64 << 40, any::<u64>()], 0..300),
            at in proptest::collection::vec(any::<u64>(), 20),
        ) {
            let starts: Vec<u64> = starts.into_iter().collect();
            same_as_a_plain_search(&starts, &around(&starts));
            same_as_a_plain_search(&starts, &at);
        }
    }
}
