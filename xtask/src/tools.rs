// SPDX-License-Identifier: Apache-2.0
//! The checks that are other programs: rustfmt, clippy, cargo-deny, the test runner. Each is started from the root.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::findings::Finding;
use crate::house::House;
use crate::tree::Tree;

/// The release of cargo-deny that `deny.toml` is written for.
const DENY_VERSION: &str = "0.20.2";
/// Workspaces of their own that the checks of `fmt` cover too.
const OTHER_WORKSPACES: &[&str] = &["fuzz/Cargo.toml", "peers/imago/Cargo.toml"];

/// `cargo fmt --check` for the workspace and those beside it.
pub fn fmt(tree: &Tree, _house: &House) -> Result<Vec<Finding>> {
    let mut found = run(tree, &["fmt", "--all", "--check"], "cargo fmt --all mends it")?;
    for manifest in OTHER_WORKSPACES.iter().filter(|manifest| tree.file(manifest).is_some()) {
        found.extend(run(tree, &["fmt", "--manifest-path", manifest, "--check"], "cargo fmt mends it")?);
    }
    Ok(found)
}

/// Clippy on every target, warnings denied.
pub fn clippy(tree: &Tree, _house: &House) -> Result<Vec<Finding>> {
    let args = ["clippy", "--workspace", "--all-targets", "--locked", "--quiet", "--", "-D", "warnings"];
    run(tree, &args, "the lines above say where")
}

/// The unit and property tests, with nextest where it is installed.
pub fn tests() -> Result<bool> {
    let tree = Tree::read()?;
    let nextest = Command::new(cargo()).args(["nextest", "--version"]).output().is_ok_and(|out| out.status.success());
    let args: &[&str] = if nextest {
        &["nextest", "run", "--workspace", "--locked"]
    } else {
        &["test", "--workspace", "--locked", "--quiet"]
    };
    Ok(run(&tree, args, "a test failed")?.is_empty())
}

/// Starts cargo with `args` in the root; its output goes to the user, its failure is a breach that says `advice`.
fn run(tree: &Tree, args: &[&str], advice: &str) -> Result<Vec<Finding>> {
    let status = Command::new(cargo()).args(args).current_dir(&tree.root).status().context("cannot start cargo")?;
    Ok(verdict(status.success(), args, advice).into_iter().collect())
}

fn verdict(success: bool, args: &[&str], advice: &str) -> Option<Finding> {
    (!success).then(|| Finding::breach(format!("cargo {}", args.join(" ")), format!("failed: {advice}")))
}

fn cargo() -> String {
    std::env::var("CARGO").unwrap_or_else(|_| env!("CARGO").to_owned())
}

/// cargo-deny on the workspace. The advisory database lies on the network: without it that part is left out, and said.
pub fn deny(tree: &Tree, _house: &House) -> Result<Vec<Finding>> {
    let program = install_deny()?;
    let start = |args: &[&str]| Command::new(&program).args(args).current_dir(&tree.root).output();
    let report = start(&["--log-level", "error", "check", "bans", "licenses", "sources"]).context("cargo-deny")?;
    let mut found = Vec::new();
    if !report.status.success() {
        eprint!("{}", String::from_utf8_lossy(&report.stderr));
        found.push(Finding::breach("deny.toml", "cargo-deny found what the lines above say"));
    }
    let fetched = start(&["--log-level", "off", "fetch", "db"]).is_ok_and(|out| out.status.success());
    if !fetched {
        found.push(Finding::look("deny.toml", "advisories not checked: their database cannot be fetched from here"));
        return Ok(found);
    }
    let report = start(&["--log-level", "error", "check", "--disable-fetch", "advisories"]).context("cargo-deny")?;
    if !report.status.success() {
        eprint!("{}", String::from_utf8_lossy(&report.stderr));
        found.push(Finding::breach("Cargo.lock", "a dependency has an advisory, see the lines above"));
    }
    Ok(found)
}

/// The path of cargo-deny: the installed one, else one built once into `target/tools`, about a minute on two cores.
pub fn install_deny() -> Result<PathBuf> {
    let installed = PathBuf::from("cargo-deny");
    if answers(&installed) {
        return Ok(installed);
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().context("xtask lies inside the workspace")?;
    let tools = root.join("target/tools");
    let built = tools.join("bin/cargo-deny");
    if answers(&built) {
        return Ok(built);
    }
    eprintln!("xtask: building cargo-deny {DENY_VERSION} into target/tools (once, about a minute)");
    // It runs for a second and takes a minute to build: so no optimisation.
    let status = Command::new(cargo())
        .args(["install", "cargo-deny", "--version", DENY_VERSION, "--locked", "--no-default-features", "--quiet"])
        .arg("--root")
        .arg(&tools)
        .arg("--target-dir")
        .arg(tools.join("build"))
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env_remove("RUSTFLAGS")
        .status()
        .context("cannot start cargo install")?;
    if !status.success() || !answers(&built) {
        bail!("cargo-deny could not be built; install it (cargo install cargo-deny --locked) and try again");
    }
    // Best effort: the intermediate files are large and not needed again.
    let _ = std::fs::remove_dir_all(tools.join("build"));
    Ok(built)
}

fn answers(program: &Path) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|out| out.status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_fails_is_a_breach() {
        let found = verdict(false, &["fmt", "--check"], "cargo fmt mends it").unwrap();
        assert!(found.fails());
        assert_eq!(found.to_string(), "mend: cargo fmt --check: failed: cargo fmt mends it");
        assert_eq!(verdict(true, &["fmt"], ""), None);
    }

    #[test]
    fn a_program_that_is_not_there_does_not_answer() {
        assert!(!answers(Path::new("/nonexistent/cargo-deny")));
    }
}
