// SPDX-License-Identifier: Apache-2.0
//! The images of the benchmark, made by `qemu-img` so that both sides start from the same bytes.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

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
    /// qcow2 with subclusters, all allocated.
    ExtendedFull,
    /// qcow2 with all clusters allocated over a full one.
    OverlayFull,
    /// qcow2 with all clusters allocated over a compressed one.
    OverCompressedFull,
    /// qcow2 whose clusters all are zero clusters.
    Zeroed,
    /// Compressed qcow2.
    Compressed,
    /// A copy of it, to be written to.
    CompressedCopy,
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
            Self::ExtendedFull => "qcow2 extended_l2 full",
            Self::OverlayFull => "qcow2 full on backing",
            Self::OverCompressedFull => "qcow2 full on compressed",
            Self::Zeroed => "qcow2 zero clusters",
            Self::Compressed | Self::CompressedCopy => "qcow2 compressed",
        }
    }

    /// `-f`.
    pub fn format(self) -> &'static str {
        if self == Self::Raw { "raw" } else { "qcow2" }
    }

    /// Whether a run changes what the next one would find.
    pub fn spent_by_writing(self) -> bool {
        !matches!(self, Self::Raw | Self::Compressed) && !self.full()
    }

    /// Whether all its clusters are there, so that reads and writes go to them in place.
    pub fn full(self) -> bool {
        matches!(self, Self::Full | Self::ExtendedFull | Self::OverlayFull | Self::OverCompressedFull)
    }
}

/// The folder of a run; removed at its end.
pub struct Folder {
    path: PathBuf,
    /// Bytes of the images.
    pub size: u64,
}

impl Folder {
    /// Makes a folder in `dir`, for images of `size` bytes, and the image that the others are made from.
    pub fn new(dir: &Path, size: u64) -> Result<Self, String> {
        // Images name each other by these paths, and qemu-nbd wants its socket's from the root on.
        let dir = dir.canonicalize().map_err(|e| format!("cannot find {}: {e}", dir.display()))?;
        let path = dir.join(format!("bench-block-{}-{}m", std::process::id(), size >> 20));
        fs::create_dir(&path).map_err(|e| format!("cannot make {}: {e}", path.display()))?;
        let folder = Self { path, size };
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
        for (i, word) in chunk.chunks_exact_mut(8).enumerate() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let value = if i % 16 < 8 { random } else { 0x7461_7265 };
            word.copy_from_slice(&value.to_le_bytes());
        }
        for number in 0..self.size >> 20 {
            // No two pages are alike.
            for (i, page) in chunk.chunks_exact_mut(4096).enumerate() {
                page[..8].copy_from_slice(&(number << 8 | i as u64).to_le_bytes());
            }
            file.write_all(&chunk)?;
        }
        file.sync_all()
    }

    /// An image of this kind, made anew if a run has changed it.
    pub fn image(&self, kind: Kind) -> Result<PathBuf, String> {
        let base = self.file("base.raw");
        match kind {
            Kind::Raw => synced(&base),
            Kind::Full => self.once("full.qcow2", &["convert", "-f", "raw", "-O", "qcow2"], &base),
            Kind::ExtendedFull => {
                let how = ["convert", "-f", "raw", "-O", "qcow2", "-o", "extended_l2=on"];
                self.once("extended-full.qcow2", &how, &base)
            }
            Kind::OverlayFull => self.once_over("overlay-full.qcow2", Kind::Full, &base),
            Kind::OverCompressedFull => self.once_over("over-full.qcow2", Kind::Compressed, &base),
            Kind::Compressed => {
                self.once("compressed.qcow2", &["convert", "-c", "-m", "4", "-W", "-f", "raw", "-O", "qcow2"], &base)
            }
            Kind::CompressedCopy => {
                let path = self.file("compressed-copy.qcow2");
                let copied = fs::copy(self.image(Kind::Compressed)?, &path);
                copied.map_err(|e| format!("cannot copy to {}: {e}", path.display()))?;
                synced(&path)
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

    /// All of `from` in an image of its own over one of another kind.
    fn once_over(&self, name: &str, backing: Kind, from: &Path) -> Result<PathBuf, String> {
        let backing = self.image(backing)?.display().to_string();
        self.once(name, &["convert", "-f", "raw", "-O", "qcow2", "-F", "qcow2", "-B", &backing], from)
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
