// SPDX-License-Identifier: Apache-2.0
//! `xtask/house.toml`: the exceptions the checks grant, each with its reason. Read once by `main`, asked by each check.

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::tree::Tree;

/// Where the exceptions are listed.
pub const PATH: &str = "xtask/house.toml";

/// All exceptions.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct House {
    /// Files that may contain `unsafe`.
    #[serde(default, rename = "unsafe")]
    pub unsafe_files: Vec<UnsafeFile>,
    /// Files or items that may be larger than the limits.
    #[serde(default)]
    pub size: Vec<Oversize>,
}

/// One file that may contain `unsafe`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnsafeFile {
    /// Path from the root.
    pub file: String,
    /// What the unsafe code there is for.
    pub why: String,
}

/// One thing that may exceed a limit.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Oversize {
    /// Path from the root.
    pub file: String,
    /// Name of the function, struct, trait or enum; absent for the file itself.
    pub item: Option<String>,
    /// Why it is no smaller.
    pub why: String,
}

impl House {
    /// Reads the list of the tree.
    pub fn read(tree: &Tree) -> Result<Self> {
        let file = tree.file(PATH).with_context(|| format!("{PATH} is missing"))?;
        Self::parse(&file.text)
    }

    /// Reads a list from its text; an entry without a reason is an error.
    pub fn parse(text: &str) -> Result<Self> {
        let house: Self = toml::from_str(text).with_context(|| format!("cannot read {PATH}"))?;
        let unsafe_reasons = house.unsafe_files.iter().map(|entry| (&entry.file, &entry.why));
        let size_reasons = house.size.iter().map(|entry| (&entry.file, &entry.why));
        for (file, why) in unsafe_reasons.chain(size_reasons) {
            ensure!(why.trim().len() >= 10, "{PATH}: the entry for {file} has no reason");
        }
        Ok(house)
    }

    /// Whether `file` may contain `unsafe`.
    pub fn allows_unsafe(&self, file: &str) -> bool {
        self.unsafe_files.iter().any(|entry| entry.file == file)
    }

    /// Whether `item` of `file` (or the file itself) may exceed a limit.
    pub fn allows_size(&self, file: &str, item: Option<&str>) -> bool {
        self.size.iter().any(|entry| entry.file == file && entry.item.as_deref() == item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_found_by_its_file_and_item() {
        let text = "[[size]]\nfile = \"a.rs\"\nitem = \"f\"\nwhy = \"a table, one row a line\"\n";
        let house = House::parse(text).unwrap();
        assert!(house.allows_size("a.rs", Some("f")));
        assert!(!house.allows_size("a.rs", None));
        assert!(!house.allows_size("b.rs", Some("f")));
        assert!(!house.allows_unsafe("a.rs"));
    }

    #[test]
    fn an_entry_without_a_reason_is_refused() {
        let error = House::parse("[[unsafe]]\nfile = \"a.rs\"\nwhy = \" \"\n").unwrap_err();
        assert!(error.to_string().contains("a.rs has no reason"), "{error}");
    }

    #[test]
    fn an_unknown_key_is_refused() {
        assert!(House::parse("[[unsave]]\nfile = \"a.rs\"\n").is_err());
    }
}
