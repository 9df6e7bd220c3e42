// SPDX-License-Identifier: Apache-2.0
//! The fixed newstyle handshake: what a client may ask before it reads or writes, answered from what the export is. Runs
//! on the connection's thread, once, over any pair of streams.

use std::io::{self, Read, Write};

use super::proto::{self, answer, handshake_flag, info, option};

/// An option longer than this is answered and not read into memory.
const LONGEST_OPTION: u32 = 8 << 10;
/// An option longer than this ends the connection.
const ABSURD_OPTION: u32 = 32 << 20;
/// Options of one client; no honest one needs a tenth.
const MOST_OPTIONS: u32 = 1000;

/// What clients may know of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct About {
    /// What clients call it; the empty name means it too.
    pub name: String,
    /// For people; may be empty.
    pub description: String,
    /// Bytes.
    pub size: u64,
    /// [`proto::export_flag`]s.
    pub flags: u16,
    /// The block size that the disk likes, in bytes.
    pub preferred_block: u32,
    /// Writes have to be in multiples of so many bytes.
    pub smallest_block: u32,
    /// `base:allocation` can be told.
    pub allocation: bool,
}

/// What was agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Replies to reads come in chunks.
    pub structured: bool,
    /// The client may ask for block status.
    pub allocation: bool,
}

/// Greets a client and answers its options. `None`: it left, or was sent away, without wanting the disk.
///
/// # Errors
/// Those of the stream, an early end included.
pub fn greet(stream: &mut (impl Read + Write), about: &About) -> io::Result<Option<Agreed>> {
    let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
    let mut hello = Vec::with_capacity(18);
    hello.extend(proto::MAGIC.to_be_bytes());
    hello.extend(proto::OPTION_MAGIC.to_be_bytes());
    hello.extend(flags.to_be_bytes());
    stream.write_all(&hello)?;
    let theirs = u32::from_be_bytes(take(stream)?);
    if theirs & !u32::from(flags) != 0 || theirs & u32::from(handshake_flag::FIXED_NEWSTYLE) == 0 {
        return Ok(None);
    }
    let zeroes = theirs & u32::from(handshake_flag::NO_ZEROES) == 0;
    let mut agreed = Agreed::default();
    for _ in 0..MOST_OPTIONS {
        if u64::from_be_bytes(take(stream)?) != proto::OPTION_MAGIC {
            return Ok(None);
        }
        let kind = u32::from_be_bytes(take(stream)?);
        let len = u32::from_be_bytes(take(stream)?);
        if len > ABSURD_OPTION {
            return Ok(None);
        }
        if len > LONGEST_OPTION {
            io::copy(&mut Read::by_ref(stream).take(len.into()), &mut io::sink())?;
            if kind == option::EXPORT_NAME {
                return Ok(None);
            }
            reply(stream, kind, answer::TOO_BIG, b"option too long")?;
            continue;
        }
        let mut data = vec![0; len as usize];
        stream.read_exact(&mut data)?;
        match kind {
            option::EXPORT_NAME => {
                if !about.is_called(&data) {
                    return Ok(None);
                }
                let mut out = about.size.to_be_bytes().to_vec();
                out.extend(about.flags_for(agreed).to_be_bytes());
                out.resize(out.len() + if zeroes { 124 } else { 0 }, 0);
                stream.write_all(&out)?;
                return Ok(Some(agreed));
            }
            option::ABORT => {
                // The client may be gone already.
                let _ = reply(stream, kind, answer::ACK, b"");
                return Ok(None);
            }
            option::GO | option::INFO => {
                if details(stream, kind, &data, about, agreed)? && kind == option::GO {
                    return Ok(Some(agreed));
                }
            }
            _ => simple_option(stream, kind, &data, about, &mut agreed)?,
        }
    }
    Ok(None)
}

/// Options that neither end the handshake nor say much.
fn simple_option(
    stream: &mut impl Write,
    kind: u32,
    data: &[u8],
    about: &About,
    agreed: &mut Agreed,
) -> io::Result<()> {
    match kind {
        option::LIST if data.is_empty() => {
            let mut entry = (about.name.len() as u32).to_be_bytes().to_vec();
            entry.extend(about.name.as_bytes());
            entry.extend(about.description.as_bytes());
            reply(stream, kind, answer::SERVER, &entry)?;
            reply(stream, kind, answer::ACK, b"")
        }
        option::STRUCTURED_REPLY if data.is_empty() => {
            agreed.structured = true;
            reply(stream, kind, answer::ACK, b"")
        }
        option::LIST | option::STRUCTURED_REPLY => reply(stream, kind, answer::INVALID, b"this option has no data"),
        option::STARTTLS => reply(stream, kind, answer::POLICY, b"no TLS on a Unix socket"),
        option::LIST_META_CONTEXT | option::SET_META_CONTEXT => contexts(stream, kind, data, about, agreed),
        _ => reply(stream, kind, answer::UNSUPPORTED, b"option not known"),
    }
}

/// `INFO` and `GO`; whether the export was the right one.
fn details(stream: &mut impl Write, kind: u32, data: &[u8], about: &About, agreed: Agreed) -> io::Result<bool> {
    let mut rest = data;
    let parsed = name(&mut rest).and_then(|name| {
        let count = u16::from_be_bytes(cut(&mut rest)?);
        (rest.len() == 2 * usize::from(count)).then_some(name)
    });
    let Some(name) = parsed else {
        reply(stream, kind, answer::INVALID, b"lengths don't agree")?;
        return Ok(false);
    };
    if !about.is_called(name) {
        reply(stream, kind, answer::UNKNOWN, b"no export of that name")?;
        return Ok(false);
    }
    let mut export = info::EXPORT.to_be_bytes().to_vec();
    export.extend(about.size.to_be_bytes());
    export.extend(about.flags_for(agreed).to_be_bytes());
    reply(stream, kind, answer::INFO, &export)?;
    let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
    sizes.extend([about.smallest_block, about.preferred_block, proto::MAX_PAYLOAD].map(u32::to_be_bytes).concat());
    reply(stream, kind, answer::INFO, &sizes)?;
    for asked in rest.chunks_exact(2) {
        let text = match <[u8; 2]>::try_from(asked).map(u16::from_be_bytes) {
            Ok(info::NAME) => (info::NAME, &about.name),
            Ok(info::DESCRIPTION) if !about.description.is_empty() => (info::DESCRIPTION, &about.description),
            _ => continue,
        };
        let mut content = text.0.to_be_bytes().to_vec();
        content.extend(text.1.as_bytes());
        reply(stream, kind, answer::INFO, &content)?;
    }
    reply(stream, kind, answer::ACK, b"")?;
    Ok(true)
}

/// `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
fn contexts(stream: &mut impl Write, kind: u32, data: &[u8], about: &About, agreed: &mut Agreed) -> io::Result<()> {
    let setting = kind == option::SET_META_CONTEXT;
    if setting {
        agreed.allocation = false;
    }
    let mut rest = data;
    let mut queries = Vec::new();
    let parsed = name(&mut rest).and_then(|name| {
        let count = u32::from_be_bytes(cut(&mut rest)?);
        for _ in 0..count {
            queries.push(self::name(&mut rest)?);
        }
        rest.is_empty().then_some(name)
    });
    let Some(name) = parsed else {
        return reply(stream, kind, answer::INVALID, b"lengths don't agree");
    };
    if !agreed.structured {
        return reply(stream, kind, answer::INVALID, b"structured replies come first");
    }
    if !about.is_called(name) {
        return reply(stream, kind, answer::UNKNOWN, b"no export of that name");
    }
    let meant = |query: &&[u8]| *query == proto::ALLOCATION.as_bytes() || (!setting && *query == b"base:");
    let wanted = if queries.is_empty() { !setting } else { queries.iter().any(meant) };
    if wanted && about.allocation {
        // A listing has no numbers (the field is reserved); a selection has ours.
        let number = if setting { proto::ALLOCATION_ID } else { 0 };
        let mut content = number.to_be_bytes().to_vec();
        content.extend(proto::ALLOCATION.as_bytes());
        reply(stream, kind, answer::META_CONTEXT, &content)?;
        agreed.allocation |= setting;
    }
    reply(stream, kind, answer::ACK, b"")
}

impl About {
    fn is_called(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }

    fn flags_for(&self, agreed: Agreed) -> u16 {
        self.flags | if agreed.structured { proto::export_flag::SEND_DF } else { 0 }
    }
}

fn reply(stream: &mut impl Write, kind: u32, what: u32, content: &[u8]) -> io::Result<()> {
    let mut out = proto::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
    out.extend([kind, what, content.len() as u32].map(u32::to_be_bytes).concat());
    out.extend(content);
    stream.write_all(&out)
}

fn take<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Cuts the first `N` bytes off `rest`.
fn cut<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk()?;
    *rest = tail;
    Some(*head)
}

/// Cuts a length and as many bytes off `rest`.
fn name<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let len = u32::from_be_bytes(cut(rest)?) as usize;
    let (name, tail) = rest.split_at_checked(len)?;
    *rest = tail;
    Some(name)
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
