// SPDX-License-Identifier: Apache-2.0
//! The options of an image and of its use, as rows that cover every pair of values; and the words of `qemu-img` for them.

use std::path::{Path, PathBuf};

use block::{Aio, BackingGate, Cache, Cow, Format, Options, Qcow2Options, Zeros};

use super::rng::Rng;

/// How many values each option has, in the order of [`Row`]'s fields.
const VALUES: [u8; 18] = [2, 8, 7, 2, 2, 2, 3, 3, 6, 4, 3, 3, 3, 3, 2, 2, 2, 3];

/// One set of options: an index into the values of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Row([u8; VALUES.len()]);

macro_rules! fields {
    ($($(#[$doc:meta])* $name:ident = $at:literal: $type:ty => $value:expr;)*) => {
        impl Row {
            $($(#[$doc])* #[must_use] pub fn $name(&self) -> $type { let v = self.0[$at] as usize; $value[v] })*
        }
    };
}

/// What lies below an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Nothing.
    None,
    /// A raw file of the same size.
    Raw,
    /// A qcow2 image of the same size.
    Qcow2,
    /// A raw file that ends earlier, in the middle of a cluster.
    Shorter,
    /// A qcow2 image that goes on.
    Longer,
    /// qcow2 over qcow2 over raw.
    Chain,
}

fields! {
    /// Version 3, not 2.
    v3 = 0: bool => [true, false];
    /// Bytes of a cluster.
    cluster = 1: u64 => [65536_u64, 512, 1024, 2048, 4096, 16384, 262_144, 2_097_152];
    /// Bits of a refcount.
    refcount_bits = 2: u64 => [16_u64, 1, 2, 4, 8, 32, 64];
    /// With subclusters.
    extended = 3: bool => [false, true];
    /// With lazy refcounts.
    lazy = 4: bool => [false, true];
    /// zstd, not zlib.
    zstd = 5: bool => [false, true];
    /// What it holds at first: 0 nothing, 1 data, 2 compressed data.
    start = 6: u8 => [0_u8, 1, 2];
    /// External data file: 0 none, 1 one, 2 one that is a raw image of the disk.
    data_file = 7: u8 => [0_u8, 1, 2];
    /// What lies below.
    backing = 8: Backing => [Backing::None, Backing::Raw, Backing::Qcow2, Backing::Shorter, Backing::Longer, Backing::Chain];
    /// Preallocation, in qemu-img's words.
    preallocation = 9: &'static str => ["off", "metadata", "falloc", "full"];
    /// How allocating writes pad.
    cow = 10: Cow => [Cow::ZeroAware, Cow::Explicit, Cow::Unallocated];
    /// Use of the page cache.
    cache = 11: Cache => [Cache::Writeback, Cache::None, Cache::Unsafe];
    /// Way to the kernel.
    aio = 12: Aio => [Aio::Auto, Aio::IoUring, Aio::Threads];
    /// Handles, each on a thread.
    handles = 13: u64 => [1_u64, 2, 4];
    /// With internal snapshots.
    snapshots = 14: bool => [false, true];
    /// With resizes.
    resize = 15: bool => [false, true];
    /// Encrypted by LUKS; up to the user of the row, as are its words and keys.
    encrypted = 16: bool => [false, true];
    /// How allocating writes get their zeroes.
    zeros = 17: Zeros => [Zeros::Auto, Zeros::Fallocate, Zeros::Write];
}

impl Row {
    /// Everything at its default.
    #[must_use]
    pub fn plain() -> Self {
        Self([0; VALUES.len()])
    }

    /// Any options that go together.
    #[must_use]
    pub fn random(rng: &mut Rng) -> Self {
        let mut row = Self(VALUES.map(|n| rng.below(u64::from(n)) as u8));
        // What can't go together gives way in a random order, or some pairs would never be seen.
        for _ in 0..8 {
            let clashes = row.clashes();
            if clashes.is_empty() {
                break;
            }
            for (a, b) in clashes {
                row.0[if rng.one_in(2) { a } else { b }] = 0;
            }
        }
        row
    }

    /// Pairs of options that exclude each other, by position.
    fn clashes(&self) -> Vec<(usize, usize)> {
        let mut found = Vec::new();
        let mut clash = |a: usize, b: usize, bad: bool| {
            if bad {
                found.push((a, b));
            }
        };
        let old = !self.v3();
        clash(0, 2, old && self.refcount_bits() != 16);
        clash(0, 3, old && self.extended());
        clash(0, 4, old && self.lazy());
        clash(0, 5, old && self.zstd());
        clash(0, 7, old && self.data_file() > 0);
        clash(1, 3, self.extended() && self.cluster() < 16384);
        clash(2, 14, self.refcount_bits() == 1 && self.snapshots());
        // Compressed clusters share a host cluster, and each snapshot counts each of them once more.
        clash(6, 14, self.refcount_bits() <= 4 && self.start() == 2 && self.snapshots());
        clash(7, 14, self.data_file() > 0 && self.snapshots());
        clash(7, 6, self.data_file() > 0 && self.start() == 2);
        clash(6, 9, self.start() == 2 && self.preallocation() != "off");
        clash(7, 8, self.data_file() == 2 && self.backing() != Backing::None);
        clash(8, 9, self.backing() != Backing::None && self.preallocation() != "off" && !self.extended());
        clash(0, 15, old && self.resize() && self.snapshots());
        clash(8, 15, old && self.resize() && self.backing() != Backing::None);
        // Compressed clusters and preallocated ones are not encrypted, and a raw data file is to be plain.
        clash(6, 16, self.encrypted() && self.start() == 2);
        clash(9, 16, self.encrypted() && self.preallocation() != "off");
        clash(7, 16, self.encrypted() && self.data_file() == 2);
        found
    }

    /// A number for each pair of values in it.
    fn pairs(&self) -> impl Iterator<Item = usize> + '_ {
        let n = VALUES.len();
        let pair = move |a: usize, b: usize| ((a * n + b) * 8 + self.0[a] as usize) * 8 + self.0[b] as usize;
        (0..n).flat_map(move |a| (a + 1..n).map(move |b| pair(a, b)))
    }

    /// Bytes of the disk: some L2 tables' worth where clusters are small, few clusters where they are large; not always whole
    /// clusters.
    #[must_use]
    pub fn size(&self) -> u64 {
        let whole = match self.cluster() {
            512..=1024 => 384 << 10,
            2048..=4096 => 1 << 20,
            16384..=65536 => 2 << 20,
            262_144 => 4 << 20,
            _ => 10 << 20,
        };
        if self.handles() == 2 { whole - 1536 } else { whole }
    }

    /// The `-o` words of qemu-img for an image whose data file is `data`.
    #[must_use]
    pub fn words(&self, data: &Path) -> String {
        let mut words = vec![
            format!("compat={}", if self.v3() { "1.1" } else { "0.10" }),
            format!("cluster_size={}", self.cluster()),
            format!("preallocation={}", self.preallocation()),
        ];
        if self.v3() {
            words.push(format!("refcount_bits={}", self.refcount_bits()));
            words.push(format!("lazy_refcounts={}", if self.lazy() { "on" } else { "off" }));
            words.push(format!("compression_type={}", if self.zstd() { "zstd" } else { "zlib" }));
            words.push(format!("extended_l2={}", if self.extended() { "on" } else { "off" }));
        }
        if self.data_file() > 0 {
            words.push(format!("data_file={}", data.display()));
            words.push(format!("data_file_raw={}", if self.data_file() == 2 { "on" } else { "off" }));
        }
        words.join(",")
    }

    /// How tare opens such an image.
    #[must_use]
    pub fn options(&self, path: impl Into<PathBuf>) -> Options {
        let backing = BackingGate::SameFolder;
        let qcow2 = Qcow2Options { cow: self.cow(), zeros: self.zeros(), backing, ..Qcow2Options::default() };
        Options { format: Format::Qcow2, qcow2, cache: self.cache(), aio: self.aio(), ..Options::new(path) }
    }
}

/// Rows in which every pair of values appears that can appear at all.
#[must_use]
pub fn pairwise(seed: u64) -> Vec<Row> {
    let rng = &mut Rng::new(seed);
    let mut wanted = vec![false; VALUES.len() * VALUES.len() * 64];
    for _ in 0..20_000 {
        Row::random(rng).pairs().for_each(|p| wanted[p] = true);
    }
    let mut rows = vec![Row::plain()];
    rows[0].pairs().for_each(|p| wanted[p] = false);
    while wanted.contains(&true) {
        let tries = (0..200).map(|_| Row::random(rng));
        let Some(best) = tries.max_by_key(|row| row.pairs().filter(|p| wanted[*p]).count()) else { break };
        if best.pairs().any(|p| wanted[p]) {
            best.pairs().for_each(|p| wanted[p] = false);
            rows.push(best);
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pair_that_goes_together_has_a_row() {
        let rows = pairwise(1);
        assert!(rows.len() < 120, "{} rows", rows.len());
        assert!(rows.iter().all(|r| r.clashes().is_empty()));
        println!("{} rows", rows.len());
        for (cluster, backing) in (0..8).flat_map(|c| (0..6).map(move |b| (c, b))) {
            let seen = rows.iter().any(|r| (r.0[1], r.0[8]) == (cluster, backing));
            assert!(seen, "cluster {cluster} over backing {backing}");
        }
    }
}
