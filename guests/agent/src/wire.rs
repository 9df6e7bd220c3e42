// SPDX-License-Identifier: Apache-2.0
//! Frames in a ring: a 16-byte head (kind, payload length, argument), then the payload; little endian.
//!
//! Used by both sides. A decoder is fed with what the ring had and gives whole frames; it never trusts a length.

use thiserror::Error;

/// Largest payload of one frame.
pub const MAX_PAYLOAD: usize = 512 << 10;
/// Bytes of a frame's head.
pub const HEAD: usize = 16;

/// What a frame is. Those of the lab come first, those of the agent from 16 on; `Data` and `End` go both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Run a command: payload is an [`Exec`].
    Exec = 1,
    /// Make a file: payload is the path, argument the mode; `Data` frames and `End` follow.
    Put = 2,
    /// Send a file: payload is the path.
    Get = 3,
    /// A piece of a file: argument is its offset.
    Data = 4,
    /// The file ends; argument is its length (holes at the end included).
    End = 5,
    /// Kill the running command.
    Kill = 6,
    /// Bytes for the command's standard input; an empty payload closes it.
    Stdin = 7,
    /// Bytes the command wrote to its standard output.
    Stdout = 16,
    /// Bytes the command wrote to its standard error.
    Stderr = 17,
    /// The command is over: argument is its [`exit_code`], payload an [`Ended`].
    Exit = 18,
    /// The request could not be done: payload says why.
    Error = 19,
}

impl Kind {
    const ALL: [Self; 11] = [
        Self::Exec,
        Self::Put,
        Self::Get,
        Self::Data,
        Self::End,
        Self::Kill,
        Self::Stdin,
        Self::Stdout,
        Self::Stderr,
        Self::Exit,
        Self::Error,
    ];

    fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == code)
    }
}

/// One frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What it is.
    pub kind: Kind,
    /// Its argument; what it means depends on the kind.
    pub arg: u64,
    /// Its payload, at most [`MAX_PAYLOAD`] bytes.
    pub payload: Vec<u8>,
}

/// Why bytes are not what this protocol says.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum WireError {
    /// No such frame kind.
    #[error("mailbox: unknown frame kind {0}")]
    Kind(u32),
    /// A payload longer than allowed.
    #[error("mailbox: a frame of {0} bytes is too long")]
    Length(u32),
    /// A payload that ends early or carries no text where text belongs.
    #[error("mailbox: malformed {0}")]
    Payload(&'static str),
}

/// The head of a frame with `len` payload bytes.
#[must_use]
pub fn head(kind: Kind, arg: u64, len: usize) -> [u8; HEAD] {
    debug_assert!(len <= MAX_PAYLOAD);
    let mut out = [0; HEAD];
    out[0..4].copy_from_slice(&(kind as u32).to_le_bytes());
    out[4..8].copy_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
    out[8..16].copy_from_slice(&arg.to_le_bytes());
    out
}

/// Puts frames together from whatever pieces the ring gives.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: Vec<u8>,
}

impl Decoder {
    /// Adds bytes as they came.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole frame, if there is one.
    ///
    /// # Errors
    /// [`WireError`] when the stream is not this protocol; the connection is of no more use then.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, WireError> {
        let Some((head, rest)) = self.bytes.split_first_chunk::<HEAD>() else { return Ok(None) };
        let [k0, k1, k2, k3, l0, l1, l2, l3, arg @ ..] = *head;
        let code = u32::from_le_bytes([k0, k1, k2, k3]);
        let kind = Kind::from_code(code).ok_or(WireError::Kind(code))?;
        let len = u32::from_le_bytes([l0, l1, l2, l3]);
        let size = len as usize;
        if size > MAX_PAYLOAD {
            return Err(WireError::Length(len));
        }
        if rest.len() < size {
            return Ok(None);
        }
        let payload = rest[..size].to_vec();
        self.bytes.drain(..HEAD + size);
        Ok(Some(Frame { kind, arg: u64::from_le_bytes(arg), payload }))
    }
}

/// A command to run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Exec {
    /// Ends the command after this many ns of the machine's clock; 0 for no limit.
    pub limit_ns: u64,
    /// The agent does nothing at all while the command runs: output goes to files in memory and is sent afterwards.
    pub quiet: bool,
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables set in addition to the agent's own.
    pub env: Vec<(String, String)>,
    /// Working directory; empty for the root.
    pub cwd: String,
}

impl Exec {
    /// As a payload.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&self.limit_ns.to_le_bytes());
        out.push(u8::from(self.quiet));
        let text = |out: &mut Vec<u8>, s: &str| {
            out.extend_from_slice(&u32::try_from(s.len()).unwrap_or(u32::MAX).to_le_bytes());
            out.extend_from_slice(s.as_bytes());
        };
        let count = |out: &mut Vec<u8>, n: usize| {
            out.extend_from_slice(&u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes());
        };
        text(&mut out, &self.cwd);
        count(&mut out, self.argv.len());
        self.argv.iter().for_each(|s| text(&mut out, s));
        count(&mut out, self.env.len());
        for (name, value) in &self.env {
            text(&mut out, name);
            text(&mut out, value);
        }
        out
    }

    /// From a payload.
    ///
    /// # Errors
    /// [`WireError::Payload`] when it ends early or is no text.
    pub fn decode(mut bytes: &[u8]) -> Result<Self, WireError> {
        let bytes = &mut bytes;
        let limit_ns = u64::from_le_bytes(take(bytes)?);
        let [quiet] = take(bytes)?;
        let cwd = text(bytes)?;
        let mut argv = Vec::new();
        for _ in 0..u32::from_le_bytes(take(bytes)?) {
            argv.push(text(bytes)?);
        }
        let mut env = Vec::new();
        for _ in 0..u32::from_le_bytes(take(bytes)?) {
            env.push((text(bytes)?, text(bytes)?));
        }
        Ok(Self { limit_ns, quiet: quiet != 0, argv, env, cwd })
    }
}

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ended {
    /// ns of the machine's clock from start to end.
    pub clock_ns: u64,
    /// The agent ended it because its limit had passed.
    pub timed_out: bool,
}

impl Ended {
    /// As a payload.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = self.clock_ns.to_le_bytes().to_vec();
        out.push(u8::from(self.timed_out));
        out
    }

    /// From a payload.
    ///
    /// # Errors
    /// [`WireError::Payload`] when it ends early.
    pub fn decode(mut bytes: &[u8]) -> Result<Self, WireError> {
        let clock_ns = u64::from_le_bytes(take(&mut bytes)?);
        let [timed_out] = take(&mut bytes)?;
        Ok(Self { clock_ns, timed_out: timed_out != 0 })
    }
}

/// A wait status as shells write it: the exit code, or 128 plus the signal.
#[must_use]
pub fn exit_code(status: std::process::ExitStatus) -> u64 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    u64::try_from(code.unwrap_or(255)).unwrap_or(255)
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Result<[u8; N], WireError> {
    let (first, rest) = bytes.split_first_chunk::<N>().ok_or(WireError::Payload("request: it ends early"))?;
    *bytes = rest;
    Ok(*first)
}

fn text(bytes: &mut &[u8]) -> Result<String, WireError> {
    let len = u32::from_le_bytes(take(bytes)?) as usize;
    let (first, rest) = bytes.split_at_checked(len).ok_or(WireError::Payload("request: it ends early"))?;
    *bytes = rest;
    String::from_utf8(first.to_vec()).map_err(|_| WireError::Payload("request: not text"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn frames_survive_any_cut(parts in prop::collection::vec((0usize..11, any::<u64>(), prop::collection::vec(any::<u8>(), 0..200)), 1..12), cut in 1usize..97) {
            let frames: Vec<Frame> = parts.into_iter().map(|(k, arg, payload)| Frame { kind: Kind::ALL[k], arg, payload }).collect();
            let mut stream = Vec::new();
            for f in &frames {
                stream.extend_from_slice(&head(f.kind, f.arg, f.payload.len()));
                stream.extend_from_slice(&f.payload);
            }
            let mut decoder = Decoder::default();
            let mut got = Vec::new();
            for piece in stream.chunks(cut) {
                decoder.feed(piece);
                while let Some(frame) = decoder.next_frame().unwrap() {
                    got.push(frame);
                }
            }
            prop_assert_eq!(got, frames);
        }

        #[test]
        fn any_bytes_are_refused_or_read_but_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = Exec::decode(&bytes);
            let _ = Ended::decode(&bytes);
            let mut decoder = Decoder::default();
            decoder.feed(&bytes);
            while let Ok(Some(_)) = decoder.next_frame() {}
        }
    }

    #[test]
    fn a_request_comes_back_as_it_was() {
        let exec = Exec {
            limit_ns: 7,
            quiet: true,
            argv: vec!["sh".into(), "-c".into(), "exit 3".into()],
            env: vec![("A".into(), "ä b".into())],
            cwd: "/lab".into(),
        };
        let bytes = exec.encode();
        assert_eq!(Exec::decode(&bytes).unwrap(), exec);
        for cut in 0..bytes.len() {
            assert!(Exec::decode(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        let ended = Ended { clock_ns: 99, timed_out: true };
        assert_eq!(Ended::decode(&ended.encode()).unwrap(), ended);
    }

    #[test]
    fn unknown_kinds_and_giant_payloads_are_refused() {
        let mut decoder = Decoder::default();
        decoder.feed(&[99, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(decoder.next_frame(), Err(WireError::Kind(99)));
        let mut decoder = Decoder::default();
        decoder.feed(&[4, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(decoder.next_frame(), Err(WireError::Length(1 << 24)));
    }
}
