// SPDX-License-Identifier: Apache-2.0
//! The images of the benchmark, made by `qemu-img` so that both sides start from the same bytes.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Asked;
use crate::measure;

/// What lies in an image before a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A raw file with all its bytes.
    Raw,
    /// qcow2 with all clusters allocated.
    Full,
    /// qcow2 with nothing in it.
    Empty,
    /// The same, with subclusters.
    Extended,
    /// qcow2 with nothing in it over a full one.
    Overlay,
    /// qcow2 with nothing in it over a compressed one.
    OverCompressed,
    /// qcow2 whose clusters all are zero clusters.
    Zeroed,
    /// Compressed qcow2.
    Compressed,
}

impl Kind {
    /// In names of cases.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Full => "qcow2",
            Self::Empty => "qcow2 empty",
            Self::Extended => "qcow2 extended_l2",
            Self::Overlay => "qcow2 on backing",
            Self::OverCompressed => "qcow2 on compressed",
            Self::Zeroed => "qcow2 zero clusters",
            Self::Compressed => "qcow2 compressed",
        }
    }

    /// `-f`.
    pub fn format(self) -> &'static str {
        if self == Self::Raw { "raw" } else { "qcow2" }
    }

    /// Whether a run changes what the next one would find.
    pub fn spent_by_writing(self) -> bool {
        !matches!(self, Self::Raw | Self::Full)
    }
}

/// The folder of a run; removed at its end.
pub struct Folder {
    path: PathBuf,
    size: u64,
}

impl Folder {
    /// Makes the folder and the images that others stand on.
    pub fn new(asked: &Asked) -> Result<Self, String> {
        let path = asked.dir.join(format!("bench-block-{}", std::process::id()));
        fs::create_dir(&path).map_err(|e| format!("cannot make {}: {e}", path.display()))?;
        let folder = Self { path, size: asked.size };
        folder.fill().map_err(|e| format!("cannot fill {}: {e}", folder.path.display()))?;
        Ok(folder)
    }

    /// A file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Half of each MiB is noise, half compresses well: what disks look like, and work for a compressor.
    fn fill(&self) -> std::io::Result<()> {
        let mut file = File::create(self.file("base.raw"))?;
        let mut chunk = vec![0u8; 1 << 20];
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..self.size >> 20 {
            for (i, word) in chunk.chunks_exact_mut(8).enumerate() {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let value = if i % 16 < 8 { random } else { 0x7461_7265 };
                word.copy_from_slice(&value.to_le_bytes());
            }
            file.write_all(&chunk)?;
        }
        file.sync_all()
    }

    /// An image of this kind, made anew if a run has changed it.
    pub fn image(&self, kind: Kind) -> Result<PathBuf, String> {
        let base = self.file("base.raw");
        match kind {
            Kind::Raw => Ok(base),
            Kind::Full => self.once("full.qcow2", &["convert", "-f", "raw", "-O", "qcow2"], &base),
            Kind::Compressed => {
                self.once("compressed.qcow2", &["convert", "-c", "-m", "4", "-W", "-f", "raw", "-O", "qcow2"], &base)
            }
            Kind::Empty => self.create("empty.qcow2", "lazy_refcounts=off", None),
            Kind::Extended => self.create("extended.qcow2", "extended_l2=on", None),
            Kind::Overlay => self.create("overlay.qcow2", "lazy_refcounts=off", Some(&self.image(Kind::Full)?)),
            Kind::OverCompressed => {
                self.create("over.qcow2", "lazy_refcounts=off", Some(&self.image(Kind::Compressed)?))
            }
            Kind::Zeroed => {
                let path = self.create("zeroed.qcow2", "lazy_refcounts=off", None)?;
                let mut command = Command::new("qemu-io");
                // One command writes at most 2 GiB.
                for at in (0..self.size).step_by(1 << 30) {
                    let len = (self.size - at).min(1 << 30);
                    command.arg("-c").arg(format!("write -z {at} {len}"));
                }
                measure::run(command.arg("-f").arg("qcow2").arg(&path))?;
                synced(&path)
            }
        }
    }

    fn once(&self, name: &str, how: &[&str], from: &Path) -> Result<PathBuf, String> {
        let path = self.file(name);
        if !path.exists() {
            measure::run(Command::new("qemu-img").args(how).arg(from).arg(&path))?;
        }
        synced(&path)
    }

    fn create(&self, name: &str, option: &str, backing: Option<&Path>) -> Result<PathBuf, String> {
        let path = self.file(name);
        let _ = fs::remove_file(&path);
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2", "-o", option]);
        if let Some(backing) = backing {
            command.args(["-F", "qcow2", "-b"]).arg(backing);
        }
        measure::run(command.arg(&path).arg(self.size.to_string()))?;
        synced(&path)
    }
}

/// Nothing of the preparation is left to be written while the clock runs.
fn synced(path: &Path) -> Result<PathBuf, String> {
    File::open(path).and_then(|f| f.sync_all()).map_err(|e| format!("cannot sync {}: {e}", path.display()))?;
    Ok(path.to_owned())
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}
