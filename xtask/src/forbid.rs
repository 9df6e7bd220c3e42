// SPDX-License-Identifier: Apache-2.0
//! `check forbid`: crates that promise `#![forbid(unsafe_code)]` say so, every crate takes the workspace's lints, and
//! `unsafe` elsewhere stands only in the files that `house.toml` lists.

use std::str::FromStr;

use anyhow::Result;
use proc_macro2::TokenStream;

use crate::findings::Finding;
use crate::house::{self, House};
use crate::rust;
use crate::tree::{SourceFile, Tree};

/// Crates that promise to contain no unsafe code at all; checked when the crate exists.
const FORBIDDING: &[&str] = &["spec", "state", "irq", "pci", "boot", "api"];

/// Runs the check on the whole tree.
pub fn check(tree: &Tree, house: &House) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    for name in FORBIDDING {
        if let Some(lib) = tree.file(&format!("crates/{name}/src/lib.rs")) {
            found.extend(promise(lib));
        }
    }
    for file in tree.files.iter().filter(|file| is_member_manifest(&file.path)) {
        found.extend(lints(file));
    }
    for file in tree.rust() {
        found.extend(sites(file, house));
    }
    found.extend(stale(tree, house));
    Ok(found)
}

fn is_member_manifest(path: &str) -> bool {
    path.ends_with("/Cargo.toml") && !path.starts_with("fuzz/") && !path.starts_with("peers/")
}

/// A promising crate's root must carry the attribute.
fn promise(lib: &SourceFile) -> Option<Finding> {
    let found = match rust::parse(lib) {
        Ok(ast) => ast.attrs.iter().any(|attr| {
            attr.path().is_ident("forbid") && attr.parse_args::<syn::Ident>().is_ok_and(|lint| lint == "unsafe_code")
        }),
        Err(finding) => return Some(finding),
    };
    (!found).then(|| Finding::breach(&lib.path, "this crate promises #![forbid(unsafe_code)]: add it"))
}

/// A member's manifest must take the workspace's lints, or none of them applies to it.
fn lints(manifest: &SourceFile) -> Option<Finding> {
    let inherits = toml::from_str::<toml::Table>(&manifest.text)
        .ok()
        .and_then(|table| table.get("lints")?.get("workspace")?.as_bool())
        .unwrap_or(false);
    (!inherits).then(|| Finding::breach(&manifest.path, "add `[lints] workspace = true`"))
}

/// Each `unsafe` of a file that is not listed.
fn sites(file: &SourceFile, house: &House) -> Vec<Finding> {
    if house.allows_unsafe(&file.path) {
        return Vec::new();
    }
    match TokenStream::from_str(&file.text) {
        Ok(tokens) => rust::lines_with_word(tokens, "unsafe")
            .into_iter()
            .map(|line| {
                let place = format!("{}:{line}", file.path);
                Finding::breach(place, format!("unsafe in a file that {} does not list", house::PATH))
            })
            .collect(),
        Err(error) => vec![Finding::breach(&file.path, format!("does not tokenize: {error}"))],
    }
}

/// Listed files that are gone or need the listing no longer.
fn stale(tree: &Tree, house: &House) -> Vec<Finding> {
    house
        .unsafe_files
        .iter()
        .filter(|entry| {
            let tokens = tree.file(&entry.file).and_then(|file| TokenStream::from_str(&file.text).ok());
            tokens.is_none_or(|tokens| rust::lines_with_word(tokens, "unsafe").is_empty())
        })
        .map(|entry| Finding::breach(house::PATH, format!("{} has no unsafe code: drop the entry", entry.file)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    #[test]
    fn a_promise_must_be_kept() {
        let lib = file("crates/irq/src/lib.rs", "//! Head.\npub mod pic;\n");
        assert!(promise(&lib).unwrap().text().contains("forbid(unsafe_code)"));
        let lib = file("crates/irq/src/lib.rs", "//! Head.\n#![deny(unsafe_code)]\n");
        assert!(promise(&lib).is_some(), "deny can be overridden further down, so it is not enough");
        let lib = file("crates/irq/src/lib.rs", "//! Head.\n#![forbid(unsafe_code)]\n");
        assert_eq!(promise(&lib), None);
    }

    #[test]
    fn unsafe_needs_a_listed_file() {
        let bad = file("crates/pci/src/bus.rs", "fn f() {\n    unsafe { g() }\n}\nunsafe impl Send for X {}\n");
        let found = sites(&bad, &House::default());
        assert_eq!(found.len(), 2);
        assert_eq!(
            found[0].to_string(),
            "mend: crates/pci/src/bus.rs:2: unsafe in a file that xtask/house.toml does not list"
        );
        let listed = House::parse("[[unsafe]]\nfile = \"crates/pci/src/bus.rs\"\nwhy = \"a system call\"\n").unwrap();
        assert_eq!(sites(&bad, &listed), []);
    }

    #[test]
    fn a_listing_that_is_no_longer_needed_is_reported() {
        let house = House::parse("[[unsafe]]\nfile = \"a.rs\"\nwhy = \"a system call\"\n").unwrap();
        let tree = |text: &str| Tree { root: "/".into(), files: vec![file("a.rs", text)] };
        assert_eq!(stale(&tree("fn f() {}"), &house).len(), 1);
        assert_eq!(stale(&tree("unsafe fn f() {}"), &house), []);
    }

    #[test]
    fn a_manifest_without_the_lints_is_reported() {
        assert!(lints(&file("crates/x/Cargo.toml", "[package]\nname = \"x\"\n")).is_some());
        assert!(lints(&file("crates/x/Cargo.toml", "[lints]\nworkspace = true\n")).is_none());
    }
}
