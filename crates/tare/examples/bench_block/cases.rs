// SPDX-License-Identifier: Apache-2.0
//! The cases of the table: what is done to which image, how often, and what was promised of it.

use crate::Asked;
use crate::images::Kind;
use crate::measure::Side;

/// What the clock is held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// `img bench`, at offsets that step through the whole image, each cluster far from the one before.
    Scattered,
    /// `img bench` from the start on.
    Sequential,
    /// As `Scattered`, by tare twice: `cow=explicit` in QEMU's place, and this mode.
    Cow(&'static str),
    /// The image behind a server of NBD, fio's nbd engine before it.
    Served,
    /// `img convert` to qcow2.
    Convert,
    /// `img check`.
    Check,
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub work: Work,
    pub kind: Kind,
    pub write: bool,
    pub block: u64,
    pub depth: u32,
    pub cache: &'static str,
    /// Requests; MiB for convert and check.
    pub count: u64,
}

const PAGE: u64 = 4096;
const EMPTY: [Kind; 5] = [Kind::Empty, Kind::Extended, Kind::Overlay, Kind::OverCompressed, Kind::Zeroed];
const FULL: [Kind; 4] = [Kind::Full, Kind::ExtendedFull, Kind::OverlayFull, Kind::OverCompressedFull];

/// All cases, the raw ones first: they are the limit of the others.
pub fn all(asked: &Asked) -> Vec<Case> {
    let mut cases = Vec::new();
    for cache in ["none", "writeback"] {
        for depth in [1, 32] {
            let mut add = |work, kind, write, block| {
                cases.push(Case { work, kind, write, block, depth, cache, count: 0 }.counted(asked))
            };
            for write in [false, true] {
                add(Work::Scattered, Kind::Raw, write, PAGE);
                FULL.iter().for_each(|kind| add(Work::Scattered, *kind, write, PAGE));
            }
            // These bytes are in the image below, or have to be unpacked.
            for kind in [Kind::Overlay, Kind::OverCompressed, Kind::Compressed] {
                add(Work::Scattered, kind, false, PAGE);
            }
            EMPTY.iter().for_each(|kind| add(Work::Scattered, *kind, true, PAGE));
            add(Work::Scattered, Kind::CompressedCopy, true, PAGE);
            for kind in [Kind::Empty, Kind::Zeroed] {
                add(Work::Cow("unallocated"), kind, true, PAGE);
                add(Work::Cow("zero-aware"), kind, true, PAGE);
            }
            for block in [64 << 10, 1 << 20] {
                for (read, written) in [(Kind::Raw, Kind::Raw), (Kind::Full, Kind::Empty)] {
                    add(Work::Sequential, read, false, block);
                    add(Work::Sequential, written, true, block);
                }
            }
        }
    }
    for depth in [1, 32] {
        for kind in [Kind::Raw, Kind::Full] {
            for (write, cache) in [(false, "none"), (false, "writeback"), (true, "none"), (true, "writeback")] {
                cases
                    .push(Case { work: Work::Served, kind, write, block: PAGE, depth, cache, count: 0 }.counted(asked));
            }
        }
    }
    for (work, kind) in [
        (Work::Convert, Kind::Raw),
        (Work::Convert, Kind::Full),
        (Work::Convert, Kind::Compressed),
        (Work::Check, Kind::Full),
        (Work::Check, Kind::Compressed),
    ] {
        let count = asked.whole >> 20;
        cases.push(Case { work, kind, write: false, block: 1 << 20, depth: 1, cache: "writeback", count });
    }
    cases
}

impl Case {
    /// The case with its number of requests.
    fn counted(mut self, asked: &Asked) -> Self {
        let Self { work, kind, write, block, depth, cache, .. } = self;
        // Half a second or two of each: fewer requests where each takes longer, none twice where writing changes the image.
        let unpacks = matches!(kind, Kind::Compressed | Kind::CompressedCopy | Kind::OverCompressed);
        let wanted = match (block, cache, depth) {
            _ if work == Work::Served => 16_000.0,
            (PAGE, ..) if unpacks => 6_000.0,
            (PAGE, "writeback", _) if write => 120_000.0,
            (PAGE, "writeback", _) => 240_000.0,
            (PAGE, _, 1) => 6_000.0,
            (PAGE, ..) => 40_000.0,
            _ => (1u64 << 30) as f64 / block as f64,
        };
        let wanted = ((wanted * asked.scale) as u64).max(64);
        let once = write && kind.spent_by_writing() && work != Work::Sequential;
        self.count = if once { wanted.min(asked.size >> 16) } else { wanted };
        self
    }

    /// Done to the images of the second size.
    pub fn whole(&self) -> bool {
        matches!(self.work, Work::Convert | Work::Check)
    }

    /// Who takes part.
    pub fn sides(&self, asked: &Asked) -> Vec<Side> {
        let mut sides = vec![Side::Qemu, Side::Tare];
        let plain = matches!(self.work, Work::Scattered | Work::Sequential);
        if plain && self.cache == "writeback" && asked.aio != "auto" {
            sides.push(Side::Auto);
        }
        // The crate refuses subclusters.
        if plain && asked.imago.is_some() && !matches!(self.kind, Kind::Extended | Kind::ExtendedFull) {
            sides.push(Side::Imago);
        }
        if self.work == Work::Served {
            sides.push(Side::Daemon);
        }
        sides
    }

    /// The ratio of rates that this project promises, if it promises one.
    pub fn target(&self) -> Option<f64> {
        match self.work {
            Work::Cow("zero-aware") if self.kind == Kind::Zeroed => Some(3.0),
            Work::Cow(_) => None,
            Work::Scattered if self.write && self.kind.spent_by_writing() && self.kind != Kind::Zeroed => Some(1.5),
            _ => Some(1.0),
        }
    }

    /// The same on the raw file, if this is a case of clusters that are all allocated.
    pub fn on_raw(&self) -> Option<String> {
        let alike = self.kind == Kind::Full && matches!(self.work, Work::Scattered | Work::Sequential);
        alike.then(|| Self { kind: Kind::Raw, ..*self }.name())
    }

    /// As in the table.
    pub fn name(&self) -> String {
        let kind = self.kind.name();
        let block =
            if self.block < 1 << 20 { format!("{}k", self.block >> 10) } else { format!("{}m", self.block >> 20) };
        let way = if self.write { "write" } else { "read" };
        let way = if self.write && self.kind.spent_by_writing() { "alloc" } else { way };
        let how = format!("{way} {block} qd{} {}", self.depth, self.cache);
        match self.work {
            Work::Scattered => format!("{kind}: rnd {how}"),
            Work::Sequential => format!("{kind}: seq {how}"),
            Work::Cow(mode) => format!("{kind}: cow={mode} over explicit, {how}"),
            Work::Served => format!("nbd {kind}: rnd {how}"),
            Work::Convert => format!("convert {kind} to qcow2"),
            Work::Check => format!("check {kind}"),
        }
    }
}
