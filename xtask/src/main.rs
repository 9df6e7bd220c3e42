// SPDX-License-Identifier: Apache-2.0
//! The project's own checks: `cargo xtask check [NAME...]` and `cargo xtask prepush`.
//!
//! `make check`, `make test` and CI call it; it reads the work tree and starts cargo, and changes nothing but `target/`.

mod findings;
mod forbid;
mod house;
mod layers;
mod rust;
mod sizes;
mod tools;
mod tree;
mod words;

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, bail};

use crate::findings::Finding;
use crate::house::House;
use crate::tree::Tree;

/// One named check: what it is called, what it says about itself, what runs it.
struct Check {
    name: &'static str,
    about: &'static str,
    run: fn(&Tree, &House) -> Result<Vec<Finding>>,
}

/// In the order they run: the cheap ones first, so that a slip is reported in a second.
const CHECKS: &[Check] = &[
    Check { name: "fmt", about: "cargo fmt --check", run: tools::fmt },
    Check { name: "layers", about: "dependencies point down only", run: layers::check },
    Check { name: "sizes", about: "files, functions, traits, structs, parameters", run: sizes::check },
    Check {
        name: "forbid",
        about: "forbid(unsafe_code) where promised, unsafe only in listed files",
        run: forbid::check,
    },
    Check {
        name: "words",
        about: "licence line, head, names, leftovers, paths of one machine, links",
        run: words::check,
    },
    Check { name: "clippy", about: "cargo clippy, all targets, warnings denied", run: tools::clippy },
    Check { name: "deny", about: "cargo-deny: licences, bans, sources, advisories", run: tools::deny },
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["check", names @ ..] => check(names),
        ["prepush"] => prepush(),
        ["tools"] => tools::install_deny().map(|_| true),
        ["help" | "-h" | "--help"] | [] => {
            print!("{}", usage());
            return ExitCode::SUCCESS;
        }
        other => {
            eprintln!("xtask: no such command: {}\n{}", other.join(" "), usage());
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::from(2)
        }
    }
}

/// Runs the named checks, or all of them; `Ok(false)` when one found a breach.
fn check(names: &[&str]) -> Result<bool> {
    for name in names {
        if !CHECKS.iter().any(|check| check.name == *name) {
            bail!("no such check: {name}; there are {}", check_names());
        }
    }
    let tree = Tree::read()?;
    let house = House::read(&tree)?;
    let mut breaches = 0;
    for check in CHECKS.iter().filter(|check| names.is_empty() || names.contains(&check.name)) {
        let start = Instant::now();
        let found = (check.run)(&tree, &house)?;
        let failed = found.iter().filter(|finding| finding.fails()).count();
        let looks = found.len() - failed;
        let verdict = if failed == 0 { "ok" } else { "FAILED" };
        let seconds = start.elapsed().as_secs_f64();
        println!("{:<7} {verdict:<6} {failed} to mend, {looks} to look at ({seconds:.1} s)", check.name);
        for finding in &found {
            println!("  {finding}");
        }
        breaches += failed;
    }
    if breaches > 0 {
        println!("check: {breaches} to mend");
    }
    Ok(breaches == 0)
}

/// What a developer runs before a push: every check, then every test that needs no lab machine.
fn prepush() -> Result<bool> {
    Ok(check(&[])? && tools::tests()?)
}

fn check_names() -> String {
    CHECKS.iter().map(|check| check.name).collect::<Vec<_>>().join(", ")
}

fn usage() -> String {
    let mut text = String::from(
        "cargo xtask check [NAME...]   run the named checks, or all\n\
         cargo xtask prepush           all checks, then the tests that need no lab machine\n\
         cargo xtask tools             build the tools the checks need into target/tools\n\nchecks:\n",
    );
    for check in CHECKS {
        text.push_str(&format!("  {:<7} {}\n", check.name, check.about));
    }
    text
}
