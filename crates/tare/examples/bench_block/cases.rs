// SPDX-License-Identifier: Apache-2.0
//! The cases and how each side runs one.

use std::path::Path;
use std::process::Command;

use crate::Asked;
use crate::images::{Folder, Kind};
use crate::measure::{self, Cost, Side};
use crate::serve;

/// What the clock is held to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// `img bench`, at offsets that step through the whole image, each cluster far from the one before.
    Scattered,
    /// `img bench` from the start on.
    Sequential,
    /// As `Scattered`, by tare twice: `cow=explicit` in QEMU's place.
    Cow,
    /// The image behind `img serve --nbd` or `qemu-nbd`, fio's nbd engine before it.
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

/// All cases, the raw ones first: they are the limit of the others.
pub fn all(asked: &Asked) -> Vec<Case> {
    let mut cases = Vec::new();
    let scaled = |n: f64| ((n * asked.scale) as u64).max(64);
    let mut add = |work, kind: Kind, write, block: u64, depth, cache| {
        // A second or two of each: fewer requests where each takes longer, none twice where writing changes the image.
        let wanted = match (block, cache, depth) {
            (4096, "writeback", _) => scaled(60_000.0),
            (4096, _, 1) => scaled(6_000.0),
            (4096, ..) => scaled(24_000.0),
            _ => scaled((1u64 << 31) as f64 / block as f64 / 2.0),
        };
        let clusters = asked.size >> 16;
        let fresh = write && kind.spent_by_writing() && work != Work::Sequential;
        let count = if fresh { wanted.min(clusters) } else { wanted };
        cases.push(Case { work, kind, write, block, depth, cache, count });
    };
    let allocating = [Kind::Empty, Kind::Extended, Kind::Overlay, Kind::OverCompressed, Kind::Zeroed];
    for cache in ["none", "writeback"] {
        for depth in [1, 32] {
            for kind in [Kind::Raw, Kind::Full] {
                add(Work::Scattered, kind, false, 4096, depth, cache);
                add(Work::Scattered, kind, true, 4096, depth, cache);
            }
            for kind in allocating {
                add(Work::Scattered, kind, true, 4096, depth, cache);
            }
            for kind in [Kind::Raw, Kind::Full] {
                for block in [64 << 10, 1 << 20] {
                    add(Work::Sequential, kind, false, block, depth, cache);
                    let target = if kind == Kind::Full { Kind::Empty } else { kind };
                    add(Work::Sequential, target, true, block, depth, cache);
                }
            }
            add(Work::Scattered, Kind::Compressed, false, 4096, depth, cache);
            add(Work::Cow, Kind::Zeroed, true, 4096, depth, cache);
        }
    }
    for depth in [1, 32] {
        for kind in [Kind::Raw, Kind::Full] {
            for write in [false, true] {
                add(Work::Served, kind, write, 4096, depth, "none");
                add(Work::Served, kind, write, 4096, depth, "writeback");
            }
        }
    }
    let mib = asked.size >> 20;
    for (work, kind) in [
        (Work::Convert, Kind::Raw),
        (Work::Convert, Kind::Full),
        (Work::Convert, Kind::Compressed),
        (Work::Check, Kind::Full),
        (Work::Check, Kind::Compressed),
    ] {
        cases.push(Case { work, kind, write: false, block: 1 << 20, depth: 1, cache: "writeback", count: mib });
    }
    cases
}

impl Case {
    /// The ratio of rates that this project promises.
    pub fn target(&self) -> f64 {
        match self.work {
            Work::Cow => 3.0,
            Work::Scattered if self.write && self.kind.spent_by_writing() && self.kind != Kind::Zeroed => 1.5,
            _ => 1.0,
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
        match self.work {
            Work::Scattered => format!("{kind}: rnd {way} {block} qd{} {}", self.depth, self.cache),
            Work::Sequential => format!("{kind}: seq {way} {block} qd{} {}", self.depth, self.cache),
            Work::Cow => format!("cow over explicit, zeroes: {way} {block} qd{} {}", self.depth, self.cache),
            Work::Served => format!("nbd {kind}: rnd {way} {block} qd{} {}", self.depth, self.cache),
            Work::Convert => format!("convert {kind} to qcow2"),
            Work::Check => format!("check {kind}"),
        }
    }

    /// One run by one side.
    pub fn run(&self, side: Side, asked: &Asked, folder: &Folder) -> Result<Cost, String> {
        let image = folder.image(self.kind)?;
        match self.work {
            Work::Scattered | Work::Sequential | Work::Cow => self.bench(side, asked, &image),
            Work::Served => serve::run(self, side, asked, folder, &image),
            Work::Convert => {
                let to = folder.file("converted.qcow2");
                let _ = std::fs::remove_file(&to);
                let mut command = program(side, asked, "convert");
                command.args(["-f", self.kind.format(), "-O", "qcow2"]).arg(&image).arg(&to);
                let cost = self.whole(&mut command);
                let _ = std::fs::remove_file(&to);
                cost
            }
            Work::Check => self.whole(program(side, asked, "check").args(["-q", "-f", self.kind.format()]).arg(&image)),
        }
    }

    /// One run through the imago crate, where it has the case.
    pub fn run_imago(&self, asked: &Asked, folder: &Folder) -> Option<Result<Cost, String>> {
        // The crate refuses subclusters.
        let has = matches!(self.work, Work::Scattered | Work::Sequential) && self.kind != Kind::Extended;
        asked.imago.as_ref().filter(|_| has)?;
        Some(folder.image(self.kind).and_then(|image| self.bench(Side::Imago, asked, &image)))
    }

    /// One run by tare with `aio=auto`, where that goes another way: through the page cache.
    pub fn run_auto(&self, asked: &Asked, folder: &Folder) -> Option<Result<Cost, String>> {
        let other = matches!(self.work, Work::Scattered | Work::Sequential) && self.cache == "writeback";
        (other && asked.aio != "auto").then(|| self.bench(Side::Auto, asked, &folder.image(self.kind)?))
    }

    fn bench(&self, side: Side, asked: &Asked, image: &Path) -> Result<Cost, String> {
        let step = if self.work == Work::Sequential { self.block } else { far_step(asked.size, self.block) };
        let program_side = if self.work == Work::Cow { Side::Tare } else { side };
        let mut command = program(program_side, asked, "bench");
        if self.work == Work::Cow {
            command.arg(if side == Side::Qemu { "--cow=explicit" } else { "--cow=zero-aware" });
        }
        command.args(["-f", self.kind.format(), "-t", self.cache]);
        match side {
            Side::Imago => {}
            Side::Qemu | Side::Tare if self.work != Work::Cow => {
                command.args(["-i", &asked.aio]);
            }
            _ => {
                command.args(["-i", "auto"]);
            }
        }
        command.args(["-c", &self.count.to_string(), "-d", &self.depth.to_string()]);
        command.args(["-s", &self.block.to_string(), "-S", &step.to_string()]);
        if self.write {
            command.arg("-w");
            if side != Side::Imago {
                command.arg("--pattern=90");
            }
        }
        let ended = measure::run(command.arg(image))?;
        let seconds = ended
            .stdout
            .split("Run completed in ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next()?.parse::<f64>().ok())
            .ok_or_else(|| format!("no time in `{}`", ended.stdout.trim()))?;
        let count = self.count as f64;
        Ok(Cost { rate: count / seconds.max(0.001), cpu: ended.cpu.as_secs_f64() * 1e6 / count })
    }

    /// The cost of a command from start to end, by the MiB.
    fn whole(&self, command: &mut Command) -> Result<Cost, String> {
        let ended = measure::run(command)?;
        let count = self.count as f64;
        Ok(Cost { rate: count / ended.wall.as_secs_f64(), cpu: ended.cpu.as_secs_f64() * 1e6 / count })
    }
}

fn program(side: Side, asked: &Asked, what: &str) -> Command {
    match side {
        Side::Qemu => {
            let mut command = Command::new("qemu-img");
            command.arg(what);
            command
        }
        Side::Tare | Side::Auto => {
            let mut command = Command::new(&asked.tare);
            command.args(["img", what]);
            command
        }
        Side::Imago => Command::new(asked.imago.as_deref().unwrap_or(Path::new("bench-imago"))),
    }
}

/// A step near the golden section of the image: an odd number of blocks, so that, the image being a power of two, each
/// block is met once before any is met twice, and neighbours in time are far apart.
fn far_step(size: u64, block: u64) -> u64 {
    let blocks = size / block;
    ((blocks as f64 * 0.618_033_988_75) as u64 | 1) * block
}
