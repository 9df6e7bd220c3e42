// SPDX-License-Identifier: Apache-2.0
//! How often each host cluster is used, as found by walking an image's tables. Kept in pages, since an image may claim offsets
//! far beyond what it has.

use std::collections::HashMap;

/// Counts in a page.
const PAGE: u64 = 1024;

/// Counts by cluster number; all zero at first. They saturate instead of wrapping.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pages: HashMap<u64, Box<[u32]>>,
    end: u64,
}

impl Counts {
    /// The count of `cluster`.
    pub fn get(&self, cluster: u64) -> u32 {
        self.pages.get(&(cluster / PAGE)).map_or(0, |page| page[(cluster % PAGE) as usize])
    }

    /// Adds to the count of `cluster`.
    pub fn add(&mut self, cluster: u64, by: u32) {
        if by > 0 {
            let count = self.slot(cluster);
            *count = count.saturating_add(by);
            self.end = self.end.max(cluster + 1);
        }
    }

    /// Takes from the count of `cluster`.
    pub fn sub(&mut self, cluster: u64, by: u32) {
        let count = self.slot(cluster);
        *count = count.saturating_sub(by);
    }

    fn slot(&mut self, cluster: u64) -> &mut u32 {
        let page = self.pages.entry(cluster / PAGE).or_insert_with(|| vec![0; PAGE as usize].into());
        &mut page[(cluster % PAGE) as usize]
    }

    /// One past the highest cluster with a count now.
    pub fn used_end(&self) -> u64 {
        let mut end = self.end;
        while end > 0 && self.get(end - 1) == 0 {
            end -= 1;
        }
        end
    }

    /// The highest count.
    pub fn max(&self) -> u32 {
        self.pages.values().flat_map(|p| p.iter()).copied().max().unwrap_or(0)
    }

    /// Numbers of groups of `1 << bits` clusters with any count in them, rising.
    pub fn groups(&self, bits: u32) -> Vec<u64> {
        let mut found: Vec<u64> = self
            .pages
            .iter()
            .flat_map(|(number, page)| {
                let used = page.iter().enumerate().filter(|(_, c)| **c > 0);
                used.map(move |(i, _)| (number * PAGE + i as u64) >> bits)
            })
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }
}
