// SPDX-License-Identifier: Apache-2.0
//! `check words`: what a file must say (licence line, head) and must not say (leftovers, empty names, paths and hosts of
//! one machine), and that links between the documents lead somewhere.

use std::path::Path;

use anyhow::Result;
use syn::visit::{self, Visit};

use crate::findings::Finding;
use crate::house::House;
use crate::rust;
use crate::tree::{SourceFile, Tree};

/// The licence line, without its comment mark.
const LICENCE: &str = "SPDX-License-Identifier: Apache-2.0";
/// A module of the Linux kernel has the kernel's licence.
const KERNEL_MODULE: (&str, &str) = ("guests/vioapic-linux/", "SPDX-License-Identifier: GPL-2.0");
/// A file's head may have this many lines.
const HEAD_LINES: usize = 8;
/// Endings of names that say nothing about what a thing does. Halves are joined so that this table passes its own check.
const EMPTY_NAMES: &[&str] =
    &[concat!("Man", "ager"), concat!("Hel", "per"), concat!("Ut", "il"), concat!("Ut", "ils")];
/// Words that mark unfinished work.
const LEFTOVERS: &[&str] = &[
    concat!("TO", "DO"),
    concat!("FIX", "ME"),
    concat!("XX", "X:"),
    concat!("HA", "CK"),
    concat!("todo", "!("),
    concat!("unimplemented", "!("),
    concat!("dbg", "!("),
];
/// Paths and hosts that belong to the machine a file was written on.
const FOREIGN: &[&str] = &[
    concat!("/wo", "rk/"),
    concat!("/ho", "me/"),
    concat!("/root", "/."),
    concat!("deb.", "debian.org"),
    concat!("index.", "crates.io"),
    concat!("static.", "crates.io"),
    concat!("pypi", ".org"),
    concat!("proxy.golang", ".org"),
];

/// Runs the check on the whole tree.
pub fn check(tree: &Tree, _house: &House) -> Result<Vec<Finding>> {
    let mut found = Vec::new();
    for file in tree.files.iter().filter(|file| !file.path.ends_with("Cargo.lock")) {
        found.extend(licence(file));
        found.extend(leftovers(file));
        found.extend(foreign(file));
        found.extend(file_name(&file.path));
        if file.is_rust() {
            found.extend(head(file));
            found.extend(type_names(file));
        }
        if file.path.ends_with(".md") {
            found.extend(links(file, &|path| tree.root.join(path).exists()));
        }
    }
    Ok(found)
}

/// Source files open with the licence line, after `#!` where there is one.
fn licence(file: &SourceFile) -> Option<Finding> {
    let extension = Path::new(&file.path).extension().and_then(|ext| ext.to_str()).unwrap_or("");
    let is_source = ["rs", "sh", "py", "c", "h", "S"].contains(&extension) || file.text.starts_with("#!");
    let wanted = if file.path.starts_with(KERNEL_MODULE.0) { KERNEL_MODULE.1 } else { LICENCE };
    let says = file.text.lines().take(2).any(|line| line.contains(wanted));
    (is_source && !says).then(|| Finding::breach(&file.path, format!("open it with `{wanted}`")))
}

/// Rust files go on with a head of a few `//!` lines, before any item.
fn head(file: &SourceFile) -> Option<Finding> {
    let before_items = |line: &&str| line.is_empty() || line.starts_with("//") || line.starts_with("#!");
    let lines = file.text.lines().take_while(before_items).filter(|line| line.starts_with("//!")).count();
    match lines {
        0 => Some(Finding::breach(&file.path, "no //! head: say what the file is for and who calls it")),
        1..=HEAD_LINES => None,
        _ => Some(Finding::look(&file.path, format!("a head of {lines} lines, better at most {HEAD_LINES}"))),
    }
}

fn leftovers(file: &SourceFile) -> Vec<Finding> {
    lines_with(file, LEFTOVERS, |word| format!("unfinished work: {word}"))
}

fn foreign(file: &SourceFile) -> Vec<Finding> {
    lines_with(file, FOREIGN, |word| format!("belongs to one machine or network: {word}"))
}

/// One breach for each line that holds one of `words`, not as a part of a longer word.
fn lines_with(file: &SourceFile, words: &[&str], say: impl Fn(&str) -> String) -> Vec<Finding> {
    let mut found = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        if let Some(word) = words.iter().find(|word| holds(line, word)) {
            found.push(Finding::breach(format!("{}:{}", file.path, index + 1), say(word)));
        }
    }
    found
}

fn holds(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let in_word = |neighbour: Option<char>| neighbour.is_some_and(|c| c.is_alphanumeric() || c == '_');
        let longer_before = in_word(line[..at].chars().next_back());
        let longer_after = word.ends_with(char::is_alphanumeric) && in_word(line[at + word.len()..].chars().next());
        !(longer_before || longer_after)
    })
}

fn file_name(path: &str) -> Option<Finding> {
    let stem = Path::new(path).file_stem()?.to_str()?.to_lowercase();
    let word = EMPTY_NAMES.iter().find(|word| {
        let word = word.to_lowercase();
        stem == word || stem == format!("{word}s") || stem.ends_with(&format!("_{word}"))
    })?;
    Some(Finding::breach(path, format!("{word} says nothing: name the file after what it does")))
}

/// Types and modules whose name says nothing.
fn type_names(file: &SourceFile) -> Vec<Finding> {
    struct Names<'a> {
        path: &'a str,
        found: Vec<Finding>,
    }
    impl Names<'_> {
        fn judge(&mut self, ident: &syn::Ident) {
            let name = ident.to_string();
            let lower = name.to_lowercase();
            let hit = EMPTY_NAMES.iter().any(|word| {
                name.ends_with(word) || lower == word.to_lowercase() || lower == format!("{}s", word.to_lowercase())
            });
            if hit {
                let place = format!("{}:{}", self.path, ident.span().start().line);
                self.found.push(Finding::breach(place, format!("{name}: name it after what it does")));
            }
        }
    }
    impl<'ast> Visit<'ast> for Names<'_> {
        fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
            self.judge(&item.ident);
        }
        fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
            self.judge(&item.ident);
        }
        fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
            self.judge(&item.ident);
        }
        fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
            self.judge(&item.ident);
        }
        fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
            self.judge(&item.ident);
            visit::visit_item_mod(self, item);
        }
    }
    match rust::parse(file) {
        Ok(ast) => {
            let mut names = Names { path: &file.path, found: Vec::new() };
            names.visit_file(&ast);
            names.found
        }
        Err(finding) => vec![finding],
    }
}

/// Relative links of a Markdown file that lead nowhere. `exists` is asked with a path from the root.
fn links(file: &SourceFile, exists: &dyn Fn(&Path) -> bool) -> Vec<Finding> {
    let folder = Path::new(&file.path).parent().unwrap_or(Path::new(""));
    let mut found = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        for target in line.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = target.split('#').next().unwrap_or("");
            if target.is_empty() || target.contains("://") || exists(&folder.join(target)) {
                continue;
            }
            found.push(Finding::breach(
                format!("{}:{}", file.path, index + 1),
                format!("link to {target}, which is not there"),
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    #[test]
    fn sources_open_with_the_licence() {
        assert!(licence(&file("a.rs", "//! Head.\n")).is_some());
        assert!(licence(&file("scripts/run", "#!/bin/sh\necho\n")).is_some());
        let module = "// SPDX-License-Identifier: GPL-2.0\n";
        assert!(licence(&file("guests/vioapic-linux/vioapic.c", module)).is_none());
        assert!(licence(&file("guests/interrupts/main.c", module)).is_some());
        assert!(licence(&file("a.rs", &format!("// {LICENCE}\n"))).is_none());
        assert!(licence(&file("scripts/run", &format!("#!/bin/sh\n# {LICENCE}\n"))).is_none());
        assert!(licence(&file("README.md", "# x\n")).is_none());
    }

    #[test]
    fn rust_files_have_a_head() {
        assert!(head(&file("a.rs", "// licence\nfn f() {}\n")).unwrap().fails());
        assert!(head(&file("a.rs", "// licence\n//! What it is for.\n")).is_none());
        assert!(head(&file("a.rs", "// licence\n#![forbid(unsafe_code)]\n\n//! What it is for.\nuse x;\n")).is_none());
        assert!(head(&file("a.rs", "// licence\nmod a {\n//! Not the file's.\n}\n")).is_some());
        let long = format!("// licence\n{}", "//! more\n".repeat(12));
        assert!(!head(&file("a.rs", &long)).unwrap().fails());
    }

    #[test]
    fn leftovers_are_found_as_words() {
        for word in LEFTOVERS {
            assert_eq!(leftovers(&file("a.rs", &format!("x\n// {word} later\n"))).len(), 1, "{word}");
        }
        assert_eq!(leftovers(&file("a.rs", "let MASTODON = 1;\n")), []);
    }

    #[test]
    fn paths_of_one_machine_are_found() {
        for word in FOREIGN {
            assert_eq!(foreign(&file("a.md", &format!("see {word}/x\n"))).len(), 1, "{word}");
        }
        assert_eq!(foreign(&file("a.md", "see the network/workers/ folder and crates.io\n")), []);
    }

    #[test]
    fn names_that_say_nothing_are_found() {
        let empty = EMPTY_NAMES[0];
        assert_eq!(type_names(&file("a.rs", &format!("struct Device{empty};\n"))).len(), 1);
        assert_eq!(type_names(&file("a.rs", &format!("mod x {{ enum {} {{}} }}\n", EMPTY_NAMES[1]))).len(), 1);
        assert_eq!(type_names(&file("a.rs", &format!("mod {};\n", EMPTY_NAMES[3].to_lowercase()))).len(), 1);
        assert_eq!(type_names(&file("a.rs", "struct Device;\nfn manage() {}\nstruct Utilisation;\n")), []);
        assert!(file_name(&format!("crates/a/src/{}.rs", EMPTY_NAMES[3].to_lowercase())).is_some());
        assert!(file_name("crates/a/src/bus.rs").is_none());
    }

    #[test]
    fn links_lead_somewhere() {
        let page = file("docs/a.md", "[b](b.md#part) [web](https://x.y/z) [top](#top)\n[gone](c.md)\n");
        let found = links(&page, &|path| path == Path::new("docs/b.md"));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].to_string(), "mend: docs/a.md:2: link to c.md, which is not there");
    }
}
