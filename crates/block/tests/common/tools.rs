// SPDX-License-Identifier: Apache-2.0
//! QEMU's tools as the other side.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::Path;
use std::process::{Command, Stdio};

/// Runs a tool; its output if it succeeded, else what it said. Tried again if an image was locked: for a moment a process
/// just started holds the locks of the one that started it.
pub fn tool(name: &str, words: &[&str]) -> Result<String, String> {
    for last in [false, false, false, true] {
        let out = Command::new(name)
            .args(words)
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|e| panic!("{name} must be installed for this test: {e}"));
        let said = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
        if out.status.success() {
            return Ok(said);
        }
        if !said.contains("Failed to get") || last {
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

/// Runs qemu-io's commands on an image, all in one process.
pub fn qemu_io(path: &Path, format: &str, commands: &[String]) -> Result<String, String> {
    let mut words = vec!["-f", format];
    for command in commands {
        words.extend(["-c", command]);
    }
    words.push(path.to_str().unwrap());
    let said = tool("qemu-io", &words)?;
    match said.lines().find(|l| l.contains("failed") || l.contains("rror") || l.contains("annot")) {
        Some(bad) => Err(format!("qemu-io on {}: {bad}", path.display())),
        None => Ok(said),
    }
}

/// `Ok` if the check finds nothing but leaks: their number.
pub fn qemu_check(path: &Path) -> Result<u64, String> {
    let out = Command::new("qemu-img").args(["check", "-f", "qcow2", "--output=json"]).arg(path).output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    let number = |key: &str| -> u64 {
        let Some(at) = said.find(&format!("\"{key}\": ")) else { return 0 };
        said[at + key.len() + 4..].chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap_or(0)
    };
    match out.status.code() {
        Some(0 | 3) if number("corruptions") == 0 && number("check-errors") == 0 => Ok(number("leaks")),
        _ => Err(format!("{}: {said}{}", path.display(), String::from_utf8_lossy(&out.stderr))),
    }
}

/// The content of an image, by qemu-img.
pub fn qemu_read(path: &Path, size: u64) -> Result<Vec<u8>, String> {
    let to = path.with_extension("raw-copy");
    qemu_img(&["convert", "-f", "qcow2", "-O", "raw", path.to_str().unwrap(), to.to_str().unwrap()])?;
    let mut bytes = std::fs::read(&to).unwrap();
    std::fs::remove_file(&to).unwrap();
    bytes.resize(size as usize, 0);
    Ok(bytes)
}
