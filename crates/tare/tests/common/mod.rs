// SPDX-License-Identifier: Apache-2.0
//! What the end-to-end tests share: running the built binary, hand-made guests of a few instructions, and skipping
//! where there is no KVM. The guests need no hardware: an interpreted ring 0 runs them as well.
#![allow(dead_code, clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use testkit::Code;

/// The built binary.
pub const TARE: &str = env!("CARGO_BIN_EXE_tare");

/// What a tiny guest does.
pub enum Guest<'a> {
    /// Writes the text to the serial port, then powers off.
    Say(&'a str),
    /// Resets through the i8042.
    Reset,
    /// Says that it panicked through pvpanic.
    Panic,
    /// Takes an exception with no handler, which resets a machine.
    TripleFault,
    /// Runs off to where there is no memory.
    Stray,
    /// Writes the text to the serial port, then sleeps for ever.
    Hang(&'a str),
}

impl Guest<'_> {
    /// The guest as an ELF kernel: one segment at 16 MiB, entered at its start.
    pub fn elf(&self) -> Vec<u8> {
        let mut code = Code::new();
        match self {
            Self::Say(text) => code.say(text).power_off().halt(),
            Self::Reset => code.out(0x64, 0xfe).halt(),
            Self::Panic => code.out(0x505, 1).halt(),
            // lidt [rip+2] (over the ud2, onto zeros: an empty table); ud2
            Self::TripleFault => code.bytes(&[0x0f, 0x01, 0x1d, 2, 0, 0, 0, 0x0f, 0x0b]).bytes(&[0; 16]),
            // mov eax, 128 MiB; jmp rax: mapped by the boot page tables, past the 64 MiB of the test machines
            Self::Stray => code.bytes(&[0xb8, 0, 0, 0, 8, 0xff, 0xe0]),
            Self::Hang(text) => code.say(text).halt(),
        };
        code.elf(16 << 20)
    }

    /// Writes the kernel into `dir`.
    pub fn write(&self, dir: &Path) -> PathBuf {
        let path = dir.join("guest.elf");
        fs::write(&path, self.elf()).unwrap();
        path
    }
}

/// `tare` with these arguments and no input.
pub fn tare(args: &[&str]) -> Command {
    let mut command = Command::new(TARE);
    command.args(args).stdin(Stdio::null());
    command
}

/// What it said on standard error.
pub fn complaint(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs it and holds it to one line on standard error that has `needle`, no panic, and this exit code.
#[track_caller]
pub fn refuses(command: &mut Command, code: i32, needle: &str) {
    let output = command.output().unwrap();
    let said = complaint(&output);
    assert_eq!(output.status.code(), Some(code), "{command:?} said: {said}");
    assert!(said.starts_with("tare: ") && said.ends_with('\n') && said.lines().count() == 1, "one line: {said:?}");
    assert!(said.contains(needle), "{needle:?} in {said:?}");
    assert!(!said.contains("panic") && !said.contains("internal error"), "{said}");
    assert!(!said.contains("(os error"), "numbers are for programs: {said}");
    assert!(output.stdout.is_empty());
}

/// Whether a guest can be made here; says so when not.
pub fn has_kvm() -> bool {
    let usable = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    if !usable {
        println!("skipped: no usable /dev/kvm");
    }
    usable
}
