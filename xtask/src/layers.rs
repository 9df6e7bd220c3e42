// SPDX-License-Identifier: Apache-2.0
//! `check layers`: a crate uses crates of lower layers only, never its own layer or one above; some crates are held to
//! less, some outside crates belong to one room, and each has its reason in `ARCHITECTURE.md`.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use crate::findings::Finding;
use crate::house::House;
use crate::tree::Tree;

/// One room of the house.
struct Room {
    name: &'static str,
    layer: u8,
    /// Where the room may use less than its layer allows: the rooms it may use.
    only: Option<&'static [&'static str]>,
}

const fn room(name: &'static str, layer: u8) -> Room {
    Room { name, layer, only: None }
}

const fn held(name: &'static str, layer: u8, only: &'static [&'static str]) -> Room {
    Room { name, layer, only: Some(only) }
}

/// The house, from the roof down. `ARCHITECTURE.md` draws it.
const HOUSE: &[Room] = &[
    room("tare", 6),
    // The lab drives monitors as processes: it must not link what it measures.
    held("lab", 6, &["spec", "base", "api", "agent"]),
    held("api", 5, &["spec", "base"]),
    room("machine", 4),
    // Servers for other programs: a disk, a device and a socket, and nothing of a machine.
    held("export", 4, &["block", "base", "mem", "spec", "virtio"]),
    room("virtio", 3),
    room("vfio", 3),
    room("pci", 2),
    room("boot", 2),
    room("mem", 1),
    room("irq", 1),
    // The disk engine serves image tools and fuzzers alone: it knows byte ranges, never the guest.
    held("block", 1, &["base"]),
    held("kvm", 1, &["base"]),
    // What the lab and its machine say to each other; the program inside the machine is a binary of the same crate.
    held("agent", 1, &["base"]),
    room("base", 0),
    room("spec", 0),
    room("state", 0),
];

/// Crates beside the house, and what they may use; no room depends on them, except on `testkit` in tests.
const BESIDE: &[Room] = &[room("testkit", 4), held("xtask", 0, &[])];

/// Outside crates that only the named members may use.
const RESERVED: &[(&str, &[&str])] = &[
    ("kvm-ioctls", &["kvm"]),
    ("io-uring", &["block"]),
    ("vfio-bindings", &["vfio"]),
    ("anyhow", &["tare", "lab", "xtask", "agent"]),
];

/// The page that says why each dependency is there.
const ARCHITECTURE: &str = "ARCHITECTURE.md";

/// The part of `cargo metadata` that is read here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    name: String,
    /// `None` for an ordinary dependency, else `dev` or `build`.
    kind: Option<String>,
    /// Set when the dependency is a crate of this tree.
    path: Option<String>,
}

/// Asks cargo for the workspace's members and judges each arrow.
pub fn check(tree: &Tree, _house: &House) -> Result<Vec<Finding>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(&tree.root)
        .output()
        .context("cannot start cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let mut found = judge(&String::from_utf8_lossy(&output.stdout))?;
    let text = |path| tree.file(path).map_or("", |file| file.text.as_str());
    found.extend(undocumented(text("Cargo.toml"), text(ARCHITECTURE))?);
    Ok(found)
}

/// Outside crates of the workspace's manifest that have no line of their own in `ARCHITECTURE.md`.
fn undocumented(manifest: &str, page: &str) -> Result<Vec<Finding>> {
    let table: toml::Table = toml::from_str(manifest).context("cannot read Cargo.toml")?;
    let dependencies = table.get("workspace").and_then(|workspace| workspace.get("dependencies")?.as_table());
    let outside = dependencies.into_iter().flatten().filter(|(_, value)| value.get("path").is_none());
    Ok(outside
        .filter(|(name, _)| !page.lines().any(|line| line.starts_with(&format!("| `{name}` |"))))
        .map(|(name, _)| Finding::breach(ARCHITECTURE, format!("say in the table of dependencies why {name} is there")))
        .collect())
}

/// Judges the arrows in the JSON that `cargo metadata --no-deps` prints.
fn judge(json: &str) -> Result<Vec<Finding>> {
    let metadata: Metadata = serde_json::from_str(json).context("cannot read what cargo metadata printed")?;
    let mut found = Vec::new();
    for package in &metadata.packages {
        let Some(from) = find(&package.name) else {
            found.push(Finding::breach(&package.name, "has no layer: give it one in xtask/src/layers.rs"));
            continue;
        };
        for dependency in &package.dependencies {
            if let Some(text) = breach(from, dependency) {
                found.push(Finding::breach(format!("{} -> {}", package.name, dependency.name), text));
            }
        }
    }
    Ok(found)
}

fn find(name: &str) -> Option<&'static Room> {
    HOUSE.iter().chain(BESIDE).find(|room| room.name == name)
}

fn is_beside(name: &str) -> bool {
    BESIDE.iter().any(|room| room.name == name)
}

/// Why `from` may not use `dependency`, if so.
fn breach(from: &Room, dependency: &Dependency) -> Option<String> {
    if dependency.path.is_none() {
        let (_, owners) = RESERVED.iter().find(|(name, _)| *name == dependency.name)?;
        return (!owners.contains(&from.name)).then(|| format!("only {} may use this crate", owners.join(", ")));
    }
    let is_dev = dependency.kind.as_deref() == Some("dev");
    if is_dev && dependency.name == "testkit" {
        return None;
    }
    if is_beside(&dependency.name) {
        return Some("stands beside the house: no room may use it (testkit as a dev-dependency excepted)".into());
    }
    let to = find(&dependency.name)?;
    if to.layer >= from.layer {
        return Some(format!(
            "arrows point down only: {} is in layer {}, {} in {}",
            from.name, from.layer, to.name, to.layer
        ));
    }
    match from.only {
        Some(only) if !is_dev && !only.contains(&to.name) => {
            let rooms = if only.is_empty() { "no room".to_owned() } else { only.join(", ") };
            Some(format!("this crate may use {rooms} only"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The metadata of a workspace with one member and one arrow.
    fn arrow(from: &str, to: &str, kind: &str, ours: bool) -> String {
        let path = if ours { format!("\"/x/{to}\"") } else { "null".into() };
        format!(
            r#"{{"packages":[{{"name":"{from}","dependencies":[{{"name":"{to}","kind":{kind},"path":{path}}}]}}]}}"#
        )
    }

    fn texts(json: &str) -> Vec<String> {
        judge(json).unwrap().iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_arrow_down_is_fine() {
        assert!(texts(&arrow("virtio", "pci", "null", true)).is_empty());
        assert!(texts(&arrow("tare", "machine", "null", true)).is_empty());
    }

    #[test]
    fn an_arrow_up_or_sideways_is_a_breach() {
        assert_eq!(
            texts(&arrow("mem", "kvm", "null", true)),
            ["mend: mem -> kvm: arrows point down only: mem is in layer 1, kvm in 1"]
        );
        assert_eq!(texts(&arrow("base", "machine", "null", true)).len(), 1);
        assert_eq!(texts(&arrow("base", "mem", "\"build\"", true)).len(), 1);
        assert_eq!(texts(&arrow("base", "mem", "\"dev\"", true)).len(), 1);
    }

    #[test]
    fn testkit_is_for_tests_only() {
        assert!(texts(&arrow("base", "testkit", "\"dev\"", true)).is_empty());
        assert!(texts(&arrow("testkit", "virtio", "null", true)).is_empty());
        assert!(texts(&arrow("machine", "testkit", "null", true))[0].contains("beside the house"));
    }

    #[test]
    fn the_lab_never_links_a_monitor() {
        assert!(texts(&arrow("lab", "spec", "null", true)).is_empty());
        assert!(texts(&arrow("lab", "machine", "null", true))[0].contains("may use spec, base, api, agent only"));
        assert!(texts(&arrow("block", "spec", "null", true))[0].contains("may use base only"));
    }

    #[test]
    fn a_reserved_crate_stays_in_its_room() {
        assert!(texts(&arrow("kvm", "kvm-ioctls", "null", false)).is_empty());
        assert!(texts(&arrow("machine", "kvm-ioctls", "null", false))[0].contains("only kvm may use"));
        assert!(texts(&arrow("machine", "libc", "null", false)).is_empty());
    }

    #[test]
    fn a_crate_nobody_placed_is_a_breach() {
        assert!(texts(r#"{"packages":[{"name":"attic","dependencies":[]}]}"#)[0].contains("has no layer"));
    }

    #[test]
    fn a_dependency_without_a_reason_is_a_breach() {
        let manifest = "[workspace.dependencies]\nlibc = \"0.2\"\nbase = { path = \"crates/base\" }\n";
        let found = undocumented(manifest, "| `serde` | text |\nlibc is used\n").unwrap();
        assert_eq!(found.len(), 1);
        assert!(found[0].text().contains("why libc is there"));
        assert!(undocumented(manifest, "| `libc` | system calls |\n").unwrap().is_empty());
    }

    #[test]
    fn every_name_has_one_place() {
        let mut names: Vec<_> = HOUSE.iter().chain(BESIDE).map(|room| room.name).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
