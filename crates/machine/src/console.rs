// SPDX-License-Identifier: Apache-2.0
//! The user's side of the guest's console: where output goes and input comes from, and the escape key.
//!
//! The CLI hands over descriptors and has put the terminal into raw mode; the main loop reads the input.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;

use base::escape::{Escape, HELP, Key};

/// The descriptors a guest's console is connected to.
pub struct ConsoleIo {
    /// Where the user's input comes from; `None` for no input.
    pub input: Option<File>,
    /// Where the guest's output goes.
    pub output: Arc<File>,
    /// The input is a terminal in raw mode: Ctrl-A is an escape key.
    pub terminal: bool,
}

/// What a round of input came to.
#[derive(Debug, PartialEq, Eq)]
pub enum Typed {
    /// Bytes for the guest.
    Bytes(Vec<u8>),
    /// The user quit.
    Quit,
    /// The input is at its end; stop watching it.
    End,
}

/// Reads the user's input.
pub struct ConsoleInput {
    file: File,
    escape: Option<Escape>,
    output: Arc<File>,
}

impl ConsoleInput {
    /// Input as `io` has it, if it has any.
    #[must_use]
    pub fn new(io: &ConsoleIo) -> Option<Self> {
        let file = io.input.as_ref()?.try_clone().ok()?;
        Some(Self { file, escape: io.terminal.then(Escape::default), output: io.output.clone() })
    }

    /// The descriptor to watch.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Reads what there is. Call when the descriptor is readable.
    pub fn read(&mut self) -> Typed {
        let mut buffer = [0u8; 256];
        let n = match self.file.read(&mut buffer) {
            Ok(0) => return Typed::End,
            Ok(n) => n,
            Err(e) if matches!(e.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => 0,
            Err(_) => return Typed::End,
        };
        let Some(escape) = &mut self.escape else { return Typed::Bytes(buffer[..n].to_vec()) };
        let (mut bytes, mut quit, mut help) = (Vec::with_capacity(n), false, false);
        escape.feed(&buffer[..n], |key| match key {
            Key::Byte(b) => bytes.push(b),
            Key::Quit => quit = true,
            Key::Help => help = true,
        });
        if help {
            let _ = (&*self.output).write_all(HELP.as_bytes());
        }
        if quit { Typed::Quit } else { Typed::Bytes(bytes) }
    }
}
