// SPDX-License-Identifier: Apache-2.0
//! How often each host cluster is used, as found by walking an image's tables. Kept in small pages, since an image may claim
//! offsets far beyond what it has: the near ones in a row, the rest by number.

use std::collections::HashMap;

/// Counts in a page.
const PAGE: u64 = 64;
/// Pages that are kept in a row.
const NEAR: u64 = 1 << 20;

/// Counts by cluster number; all zero at first. They saturate instead of wrapping.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    near: Vec<Box<[u32]>>,
    far: HashMap<u64, Box<[u32]>>,
}

impl Counts {
    /// The count of `cluster`.
    pub fn get(&self, cluster: u64) -> u32 {
        let number = cluster / PAGE;
        let page = if number < NEAR { self.near.get(number as usize) } else { self.far.get(&number) };
        page.and_then(|page| page.get((cluster % PAGE) as usize)).copied().unwrap_or(0)
    }

    /// Adds to the count of `cluster`.
    pub fn add(&mut self, cluster: u64, by: u32) {
        if by > 0 {
            let count = self.slot(cluster);
            *count = count.saturating_add(by);
        }
    }

    /// Takes from the count of `cluster`.
    pub fn sub(&mut self, cluster: u64, by: u32) {
        let count = self.slot(cluster);
        *count = count.saturating_sub(by);
    }

    fn slot(&mut self, cluster: u64) -> &mut u32 {
        let number = cluster / PAGE;
        let page = if number < NEAR {
            let index = number as usize;
            if self.near.len() <= index {
                self.near.resize_with(index + 1, Box::default);
            }
            &mut self.near[index]
        } else {
            self.far.entry(number).or_default()
        };
        if page.is_empty() {
            *page = vec![0; PAGE as usize].into();
        }
        &mut page[(cluster % PAGE) as usize]
    }

    /// The clusters that have a count, with it; in no order.
    pub fn used(&self) -> impl Iterator<Item = (u64, u32)> {
        let near = self.near.iter().enumerate().map(|(number, page)| (number as u64, page));
        let pages = near.chain(self.far.iter().map(|(number, page)| (*number, page)));
        pages.flat_map(|(number, page)| {
            let counts = page.iter().enumerate().filter(|(_, count)| **count > 0);
            counts.map(move |(i, count)| (number * PAGE + i as u64, *count))
        })
    }

    /// One past the highest cluster with a count.
    pub fn used_end(&self) -> u64 {
        self.used().map(|(cluster, _)| cluster + 1).max().unwrap_or(0)
    }

    /// The highest count.
    pub fn max(&self) -> u32 {
        self.used().map(|(_, count)| count).max().unwrap_or(0)
    }

    /// Numbers of groups of `1 << bits` clusters with any count in them, rising.
    pub fn groups(&self, bits: u32) -> Vec<u64> {
        let mut found = Vec::new();
        for (cluster, _) in self.used() {
            if found.last() != Some(&(cluster >> bits)) {
                found.push(cluster >> bits);
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn near_and_far_are_alike(ops in prop::collection::vec((any::<bool>(), 0u64..500, any::<bool>(), 0u32..4), 0..100)) {
            let (mut counts, mut model) = (Counts::default(), std::collections::BTreeMap::<u64, u32>::new());
            for (far, cluster, more, by) in ops {
                let cluster = if far { cluster << 40 | cluster } else { cluster };
                let slot = model.entry(cluster).or_default();
                if more {
                    counts.add(cluster, by);
                    *slot += by;
                } else {
                    counts.sub(cluster, by);
                    *slot = slot.saturating_sub(by);
                }
            }
            model.retain(|_, count| *count > 0);
            let mut used: Vec<_> = counts.used().collect();
            used.sort_unstable();
            prop_assert_eq!(&used, &model.iter().map(|(k, v)| (*k, *v)).collect::<Vec<_>>());
            prop_assert!(used.iter().all(|(cluster, count)| counts.get(*cluster) == *count));
            prop_assert_eq!(counts.used_end(), used.last().map_or(0, |(cluster, _)| cluster + 1));
            let mut groups: Vec<u64> = used.iter().map(|(cluster, _)| cluster >> 4).collect();
            groups.dedup();
            prop_assert_eq!(counts.groups(4), groups);
        }
    }
}
