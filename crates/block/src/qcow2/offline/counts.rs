// SPDX-License-Identifier: Apache-2.0
//! How often each host cluster is used, as found by walking an image's tables. Kept in small pages, since an image may claim
//! offsets far beyond what it has: the near ones in a row, the rest by number.

use std::collections::HashMap;

/// Counts in a page.
const PAGE: usize = 64;
/// Pages that are kept in a row.
const NEAR: u64 = 1 << 20;

/// The counts of a page: a byte each, until one of them needs more.
#[derive(Clone, Debug, Default)]
enum Page {
    #[default]
    Empty,
    Small(Box<[u8; PAGE]>),
    Large(Box<[u32; PAGE]>),
}

impl Page {
    fn get(&self, index: usize) -> u32 {
        match self {
            Self::Empty => 0,
            Self::Small(counts) => counts.get(index).map_or(0, |c| u32::from(*c)),
            Self::Large(counts) => counts.get(index).copied().unwrap_or(0),
        }
    }

    fn set(&mut self, index: usize, value: u32) {
        if let Self::Empty = self {
            *self = Self::Small(Box::new([0; PAGE]));
        }
        if let (Self::Small(counts), Err(_)) = (&*self, u8::try_from(value)) {
            *self = Self::Large(Box::new(counts.map(u32::from)));
        }
        match self {
            Self::Empty => {}
            Self::Small(counts) => counts[index] = value as u8,
            Self::Large(counts) => counts[index] = value,
        }
    }
}

/// Counts by cluster number; all zero at first. They saturate instead of wrapping.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    near: Vec<Page>,
    far: HashMap<u64, Page>,
}

impl Counts {
    /// The count of `cluster`.
    pub fn get(&self, cluster: u64) -> u32 {
        let number = cluster / PAGE as u64;
        let page = if number < NEAR { self.near.get(number as usize) } else { self.far.get(&number) };
        page.map_or(0, |page| page.get(cluster as usize % PAGE))
    }

    /// Adds to the count of `cluster`.
    pub fn add(&mut self, cluster: u64, by: u32) {
        if by > 0 {
            let page = self.page(cluster);
            page.set(cluster as usize % PAGE, page.get(cluster as usize % PAGE).saturating_add(by));
        }
    }

    /// Takes from the count of `cluster`.
    pub fn sub(&mut self, cluster: u64, by: u32) {
        let page = self.page(cluster);
        page.set(cluster as usize % PAGE, page.get(cluster as usize % PAGE).saturating_sub(by));
    }

    fn page(&mut self, cluster: u64) -> &mut Page {
        let number = cluster / PAGE as u64;
        if number >= NEAR {
            return self.far.entry(number).or_default();
        }
        let index = number as usize;
        if self.near.len() <= index {
            self.near.resize_with(index + 1, Page::default);
        }
        &mut self.near[index]
    }

    /// Clusters that may have a count here or in `other`, rising: all that share a page with one that has.
    pub fn near_used(&self, other: &Self) -> impl Iterator<Item = u64> + use<> {
        let mut numbers: Vec<u64> = self.pages().chain(other.pages()).map(|(number, _)| number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers.into_iter().flat_map(|number| number * PAGE as u64..(number + 1) * PAGE as u64)
    }

    /// Those that are not empty, by number.
    fn pages(&self) -> impl Iterator<Item = (u64, &Page)> {
        let near = self.near.iter().enumerate().map(|(number, page)| (number as u64, page));
        let all = near.chain(self.far.iter().map(|(number, page)| (*number, page)));
        all.filter(|(_, page)| !matches!(page, Page::Empty))
    }

    /// The clusters that have a count, with it; in no order.
    pub fn used(&self) -> impl Iterator<Item = (u64, u32)> {
        self.pages().flat_map(|(number, page)| {
            let counts = (0..PAGE).map(move |i| (number * PAGE as u64 + i as u64, page.get(i)));
            counts.filter(|(_, count)| *count > 0)
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
        fn near_and_far_are_alike(ops in prop::collection::vec((any::<bool>(), 0u64..500, any::<bool>(), prop_oneof![0u32..4, 250u32..260]), 0..100)) {
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
            let listed: Vec<u64> = counts.near_used(&Counts::default()).collect();
            prop_assert_eq!(&listed, &Counts::default().near_used(&counts).collect::<Vec<_>>());
            prop_assert!(listed.is_sorted() && used.iter().all(|(cluster, _)| listed.binary_search(cluster).is_ok()));
            let mut groups: Vec<u64> = used.iter().map(|(cluster, _)| cluster >> 4).collect();
            groups.dedup();
            prop_assert_eq!(counts.groups(4), groups);
        }
    }
}
