// SPDX-License-Identifier: Apache-2.0
//! How each side runs a case: the commands, and what is read from their output.

use std::path::Path;
use std::process::Command;

use crate::Asked;
use crate::cases::{Case, Work};
use crate::images::Folder;
use crate::measure::{self, Cost, Side};
use crate::serve;

impl Case {
    /// One run by one side.
    pub fn run(&self, side: Side, asked: &Asked, folder: &Folder) -> Result<Cost, String> {
        let image = folder.image(self.kind)?;
        match self.work {
            Work::Scattered | Work::Sequential | Work::Cow(_) => self.bench(side, asked, folder, &image),
            Work::Served => serve::run(self, side, asked, folder, &image),
            Work::Convert => {
                let to = folder.file("converted.qcow2");
                let _ = std::fs::remove_file(&to);
                let mut command = program(side, asked, "convert");
                command.args(["-f", self.kind.format(), "-O", "qcow2"]).arg(&image).arg(&to);
                let cost = self.start_to_end(&mut command);
                let _ = std::fs::remove_file(&to);
                cost
            }
            Work::Check => {
                self.start_to_end(program(side, asked, "check").args(["-q", "-f", self.kind.format()]).arg(&image))
            }
        }
    }

    fn bench(&self, side: Side, asked: &Asked, folder: &Folder, image: &Path) -> Result<Cost, String> {
        let step = if self.work == Work::Sequential { self.block } else { far_step(folder.size, self.block) };
        let mut command;
        if let Work::Cow(mode) = self.work {
            command = program(Side::Tare, asked, "bench");
            command.arg(format!("--cow={}", if side == Side::Qemu { "explicit" } else { mode }));
        } else {
            command = program(side, asked, "bench");
        }
        command.args(["-f", self.kind.format(), "-t", self.cache]);
        match (side, self.work) {
            (Side::Imago, _) => {}
            (Side::Auto, _) | (_, Work::Cow(_)) => {
                command.args(["-i", "auto"]);
            }
            _ => {
                command.args(["-i", &asked.aio]);
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
    fn start_to_end(&self, command: &mut Command) -> Result<Cost, String> {
        let ended = measure::run(command)?;
        let count = self.count as f64;
        Ok(Cost { rate: count / ended.wall.as_secs_f64(), cpu: ended.cpu.as_secs_f64() * 1e6 / count })
    }
}

fn program(side: Side, asked: &Asked, what: &str) -> Command {
    match side {
        Side::Qemu | Side::Daemon => {
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
