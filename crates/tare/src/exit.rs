// SPDX-License-Identifier: Apache-2.0
//! How the process ends: exit codes, and failures as one line on standard error. Used by every command.

use std::fmt::Display;
use std::io;
use std::process::ExitCode;

/// Exit codes, part of the interface: scripts rely on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The guest powered itself off, or reset itself under `--on-reset exit`.
    Clean,
    /// `tare doctor` found something that guests need and the host lacks.
    NotReady,
    /// Flags, the config or a file they name can't be used.
    Usage,
    /// The host or the monitor failed.
    Monitor,
    /// The guest kept resetting itself.
    ResetLoop,
    /// The guest's kernel panicked.
    Panic,
    /// The user ended the guest.
    Killed,
    /// KVM can't run what the guest does. A triple fault is no such thing: it resets a machine.
    GuestFault,
    /// What the guest asked for through its debug exit, always odd.
    Guest(u8),
}

impl Exit {
    /// The code.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Clean => 0,
            Self::NotReady => 1,
            Self::Usage => 2,
            Self::Monitor => 3,
            Self::ResetLoop => 4,
            Self::Panic => 5,
            Self::Killed => 6,
            Self::GuestFault => 7,
            Self::Guest(status) => status,
        }
    }

    /// Every code of tare's own with its line of `--help`.
    pub const ALL: &'static [(Self, &'static str)] = &[
        (Self::Clean, "the guest powered itself off (or reset itself, with --on-reset exit)"),
        (Self::NotReady, "doctor: the host lacks something that guests need"),
        (Self::Usage, "flags, the config file or a file they name can't be used"),
        (Self::Monitor, "the host or the monitor failed"),
        (Self::ResetLoop, "the guest kept resetting itself"),
        (Self::Panic, "the guest's kernel panicked"),
        (Self::Killed, "the user ended the guest (Ctrl-A x, or a second SIGTERM)"),
        (Self::GuestFault, "KVM can't run what the guest does (a triple fault is a reset)"),
    ];
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Why a command can't go on: `what: where; what to do`, and the code to end with.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// The code.
    pub exit: Exit,
    /// The line, without the program's name.
    pub message: String,
}

impl Failure {
    /// Flags, config or files.
    pub fn usage(message: impl Display) -> Self {
        Self { exit: Exit::Usage, message: message.to_string() }
    }

    /// Host or monitor.
    pub fn monitor(message: impl Display) -> Self {
        Self { exit: Exit::Monitor, message: message.to_string() }
    }
}

impl From<spec::SpecError> for Failure {
    fn from(error: spec::SpecError) -> Self {
        Self::usage(error)
    }
}

/// Prints `tare: message` as one line on standard error, whatever the message holds.
pub fn complain(message: &str) {
    base::news::print(&one_line(message));
}

/// The host's reason in words: `No such file or directory`.
pub fn reason(error: &io::Error) -> String {
    one_line(&error.to_string())
}

/// Without line ends and other control characters, and without the numbers that follow the host's reasons.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    let mut rest = text.trim_end();
    while let Some((before, after)) = rest.split_once(" (os error ") {
        line.push_str(before);
        rest = after.trim_start_matches(|c: char| c.is_ascii_digit()).trim_start_matches(')');
    }
    line.push_str(rest);
    line.replace(|c: char| c.is_control(), " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_distinct_and_all_documented() {
        let codes: Vec<u8> = Exit::ALL.iter().map(|(exit, _)| exit.code()).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn reasons_have_no_numbers() {
        assert_eq!(reason(&io::Error::from_raw_os_error(libc::ENOENT)), "No such file or directory");
        assert_eq!(reason(&io::Error::other("x")), "x");
        assert_eq!(one_line("a (os error 2): b (os error 13)\n; c\u{7}\n"), "a: b ; c ");
    }
}
