// SPDX-License-Identifier: Apache-2.0
//! The work tree as the checks see it: every file git tracks or would track, read once. Called by `main`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// One text file of the tree.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Path from the root, with forward slashes.
    pub path: String,
    /// Its text.
    pub text: String,
}

impl SourceFile {
    /// Whether it is Rust source.
    pub fn is_rust(&self) -> bool {
        self.path.ends_with(".rs")
    }
}

/// The whole tree. Files that are not UTF-8 text are left out.
#[derive(Debug)]
pub struct Tree {
    /// Absolute path of the workspace root.
    pub root: PathBuf,
    /// The files, in path order.
    pub files: Vec<SourceFile>,
}

impl Tree {
    /// Reads the tree this program was built from.
    pub fn read() -> Result<Self> {
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
        let root = manifest.parent().context("xtask lies inside the workspace")?.to_path_buf();
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(&root)
            .output()
            .context("cannot start git; the checks read the list of files from it")?;
        ensure!(listed.status.success(), "git ls-files: {}", String::from_utf8_lossy(&listed.stderr).trim());
        let names = String::from_utf8(listed.stdout).context("a file name is not UTF-8")?;
        let mut files: Vec<SourceFile> = names
            .split_terminator('\0')
            .filter_map(|path| {
                let bytes = std::fs::read(root.join(path)).ok()?;
                Some(SourceFile { path: path.to_owned(), text: String::from_utf8(bytes).ok()? })
            })
            .collect();
        files.sort_by(|a, b| a.path.cmp(&b.path));
        files.dedup_by(|a, b| a.path == b.path);
        Ok(Self { root, files })
    }

    /// The Rust sources.
    pub fn rust(&self) -> impl Iterator<Item = &SourceFile> {
        self.files.iter().filter(|file| file.is_rust())
    }

    /// The file at `path`, if the tree has it.
    pub fn file(&self, path: &str) -> Option<&SourceFile> {
        self.files.iter().find(|file| file.path == path)
    }
}
