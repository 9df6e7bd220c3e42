// SPDX-License-Identifier: Apache-2.0
//! QEMU's tools as the other side.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::{Command, Stdio};

/// What QEMU's tools now and then fail with though nothing is wrong: a lock that a process just started holds for a moment,
/// being the copy of one that held it; and the time that a passphrase takes, which can't be measured on a busy machine.
const PASSING: [&str; 2] = ["Failed to get", "Unable to get accurate CPU usage"];

/// Runs a tool; its output if it succeeded, else what it said. Tried again if it failed with what passes.
pub fn tool(name: &str, words: &[&str]) -> Result<String, String> {
    for left in (0..20).rev() {
        let out = Command::new(name)
            .args(words)
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|e| panic!("{name} must be installed for this test: {e}"));
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        if out.status.success() {
            return Ok(said);
        }
        if left == 0 || !PASSING.iter().any(|p| said.contains(p)) {
            return Err(format!("{name} {}: {said}", words.join(" ")));
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    unreachable!()
}

pub fn qemu_img(words: &[&str]) -> Result<String, String> {
    tool("qemu-img", words)
}

/// Whether QEMU's tools are there; says so if not.
pub fn there() -> bool {
    let there = Command::new("qemu-img").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !there {
        println!("skipped: qemu-img is not installed");
    }
    there
}

/// An image as QEMU's tools are to open it: their words for it.
#[derive(Clone, Debug)]
pub struct Node(Vec<String>);

impl Node {
    /// Of this format.
    pub fn plain(path: &Path, format: &str) -> Self {
        Self(["-f", format, path.to_str().unwrap()].map(str::to_owned).into())
    }

    /// A qcow2 image that is encrypted (`luks` or `aes`), and what lies below it: format, encryption and passphrase of each.
    pub fn encrypted(layers: &[(&Path, &str, &str)]) -> Self {
        let (mut words, mut options) = (Vec::new(), Vec::new());
        for (n, (path, kind, key)) in layers.iter().enumerate() {
            let below = "backing.".repeat(n);
            let format = if *kind == "raw" { "raw" } else { "qcow2" };
            options.push(format!("{below}driver={format},{below}file.filename={}", path.to_str().unwrap()));
            if !matches!(*kind, "raw" | "qcow2") {
                words.extend(["--object".into(), format!("secret,id=s{n},data={key}")]);
                options.push(format!("{below}encrypt.format={kind},{below}encrypt.key-secret=s{n}"));
            }
        }
        words.extend(["--image-opts".into(), options.join(",")]);
        Self(words)
    }

    /// The words that come with the image's own name, which is the last one.
    pub fn words(&self) -> Vec<&str> {
        self.0.iter().map(String::as_str).collect()
    }
}

/// Runs qemu-io's commands on an image, all in one process.
pub fn qemu_io(path: &Path, format: &str, commands: &[String]) -> Result<String, String> {
    qemu_io_on(&Node::plain(path, format), commands).map_err(|why| format!("{}: {why}", path.display()))
}

/// Runs qemu-io's commands on an image, all in one process.
pub fn qemu_io_on(node: &Node, commands: &[String]) -> Result<String, String> {
    let mut words = Vec::new();
    for command in commands {
        words.extend(["-c", command]);
    }
    words.extend(node.words());
    let said = tool("qemu-io", &words)?;
    match said.lines().find(|l| l.contains("failed") || l.contains("rror") || l.contains("annot")) {
        Some(bad) => Err(format!("qemu-io: {bad}")),
        None => Ok(said),
    }
}

/// `Ok` if the check finds nothing but leaks: their number.
pub fn qemu_check(path: &Path) -> Result<u64, String> {
    qemu_check_on(&Node::plain(path, "qcow2")).map_err(|why| format!("{}: {why}", path.display()))
}

/// As [`qemu_check`].
pub fn qemu_check_on(node: &Node) -> Result<u64, String> {
    let out = Command::new("qemu-img").args(["check", "--output=json"]).args(node.words()).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let number = |key: &str| -> u64 {
        let Some(at) = said.find(&format!("\"{key}\": ")) else { return 0 };
        said[at + key.len() + 4..].chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0)
    };
    match out.status.code() {
        Some(0 | 3) if number("corruptions") == 0 && number("check-errors") == 0 => Ok(number("leaks")),
        _ => Err(format!("{said}{}", String::from_utf8_lossy(&out.stderr))),
    }
}

/// Fails the test unless qemu-img finds no errors in the image, leaks included, and `model` in it. A file for that is made in
/// `dir`.
pub fn check_holds(path: &Path, model: &[u8], dir: &Path) {
    let image = path.to_str().unwrap();
    let text = qemu_img(&["check", "-f", "qcow2", image]).unwrap();
    assert!(text.contains("No errors were found"), "{text}");
    let raw = dir.join("model.raw");
    std::fs::write(&raw, model).unwrap();
    qemu_img(&["compare", "-f", "raw", "-F", "qcow2", raw.to_str().unwrap(), image]).unwrap();
}

/// The content of an image, by qemu-img.
pub fn qemu_read(path: &Path, size: u64) -> Result<Vec<u8>, String> {
    qemu_read_on(&Node::plain(path, "qcow2"), path, size)
}

/// The content of an image, by qemu-img, on the way in a file beside `path`.
pub fn qemu_read_on(node: &Node, path: &Path, size: u64) -> Result<Vec<u8>, String> {
    let to = path.with_extension("raw-copy");
    qemu_img(&[&["convert", "-O", "raw"], &node.words()[..], &[to.to_str().unwrap()]].concat())?;
    let mut bytes = std::fs::read(&to).unwrap();
    std::fs::remove_file(&to).unwrap();
    bytes.resize(size as usize, 0);
    Ok(bytes)
}
