// SPDX-License-Identifier: Apache-2.0
//! The console's escape key, Ctrl-A, as a state machine over bytes. Pure: no terminal, no I/O.
//!
//! Owned by whoever reads the user's terminal (`machine`'s console input), fed each byte in order. Meant for terminals
//! only: input from a pipe is data and should go to the guest as it is.

/// Ctrl-A, the first key of each command.
pub const ESCAPE: u8 = 0x01;

/// What `Ctrl-A h` should print, in lines that end the way a raw terminal needs.
pub const HELP: &str = "\r\nCtrl-A x  quit, killing the guest\r\n\
                        Ctrl-A Ctrl-A  send one Ctrl-A to the guest\r\n\
                        Ctrl-A h  this help\r\n";

/// What a byte turned out to mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Key {
    /// Goes to the guest.
    Byte(u8),
    /// `Ctrl-A x`: the user wants the monitor to end.
    Quit,
    /// `Ctrl-A h`: the user wants [`HELP`].
    Help,
}

/// Where in a command the input is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Escape {
    held: bool,
}

impl Escape {
    /// Takes `input` and gives `sink` what it means, in order. A Ctrl-A at the end waits for the byte after it, in this
    /// call or a later one. Ctrl-A before a byte that starts no command goes to the guest with that byte.
    pub fn feed(&mut self, input: &[u8], mut sink: impl FnMut(Key)) {
        for &byte in input {
            if !std::mem::take(&mut self.held) {
                if byte == ESCAPE {
                    self.held = true;
                } else {
                    sink(Key::Byte(byte));
                }
                continue;
            }
            match byte {
                ESCAPE => sink(Key::Byte(ESCAPE)),
                b'x' | b'X' => sink(Key::Quit),
                b'h' | b'H' | b'?' => sink(Key::Help),
                other => {
                    sink(Key::Byte(ESCAPE));
                    sink(Key::Byte(other));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(chunks: &[&[u8]]) -> Vec<Key> {
        let mut escape = Escape::default();
        let mut out = Vec::new();
        for chunk in chunks {
            escape.feed(chunk, |key| out.push(key));
        }
        out
    }

    #[test]
    fn commands() {
        assert_eq!(keys(&[b"a\x01x"]), [Key::Byte(b'a'), Key::Quit]);
        assert_eq!(keys(&[b"\x01h\x01?"]), [Key::Help, Key::Help]);
        assert_eq!(keys(&[b"\x01\x01x"]), [Key::Byte(1), Key::Byte(b'x')], "a sent Ctrl-A starts no command");
        assert_eq!(keys(&[b"\x01e"]), [Key::Byte(1), Key::Byte(b'e')], "no keystroke is lost");
        assert_eq!(keys(&[b"\x01"]), [], "waits for the next byte");
    }

    /// Where the reads happen to be cut changes nothing.
    #[test]
    fn any_split_means_the_same() {
        let input = b"ab\x01\x01\x01x\x00\xff\x01q\x01h\x01";
        let whole = keys(&[input]);
        for cut in 0..=input.len() {
            let (head, tail) = input.split_at(cut);
            assert_eq!(keys(&[head, b"", tail]), whole, "cut at {cut}");
        }
    }
}
