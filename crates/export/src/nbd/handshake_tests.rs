// SPDX-License-Identifier: Apache-2.0
//! Handshakes as bytes: what an honest client gets, and that a hostile one gets no further.
#![allow(clippy::unwrap_used)]

use super::*;

/// What a client sends, and what it was sent.
struct Wire {
    from_client: io::Cursor<Vec<u8>>,
    to_client: Vec<u8>,
}

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.from_client.read(buffer)
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.to_client.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn about() -> About {
    About {
        name: "disk".into(),
        description: "a disk".into(),
        size: 1 << 30,
        flags: proto::export_flag::HAS_FLAGS,
        preferred_block: 4096,
        smallest_block: 1,
        allocation: true,
    }
}

fn opt(kind: u32, data: &[u8]) -> Vec<u8> {
    [&proto::OPTION_MAGIC.to_be_bytes()[..], &kind.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

fn named(name: &str) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name.as_bytes()].concat()
}

fn query(name: &str, queries: &[&str]) -> Vec<u8> {
    let all: Vec<u8> = queries.iter().flat_map(|q| named(q)).collect();
    [named(name), (queries.len() as u32).to_be_bytes().to_vec(), all].concat()
}

/// Runs a handshake of a client with these flags and options; the answers as (option, kind, content).
#[allow(clippy::type_complexity)]
fn talk(flags: u32, options: &[Vec<u8>]) -> (io::Result<Option<Agreed>>, Vec<(u32, u32, Vec<u8>)>, Vec<u8>) {
    let sent = [flags.to_be_bytes().to_vec(), options.concat()].concat();
    let mut wire = Wire { from_client: io::Cursor::new(sent), to_client: Vec::new() };
    let agreed = greet(&mut wire, &about());
    let mut rest = &wire.to_client[18..];
    let mut answers = Vec::new();
    while rest.starts_with(&proto::OPTION_REPLY_MAGIC.to_be_bytes()) {
        let word = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().unwrap());
        let len = word(16) as usize;
        answers.push((word(8), word(12), rest[20..20 + len].to_vec()));
        rest = &rest[20 + len..];
    }
    (agreed, answers, rest.to_vec())
}

#[test]
fn go_with_everything() {
    let go = [named("disk"), vec![0, 2, 0, 1, 0, 2]].concat();
    let (agreed, answers, _) = talk(
        3,
        &[
            opt(option::STRUCTURED_REPLY, b""),
            opt(option::SET_META_CONTEXT, &query("disk", &["base:allocation", "qemu:x"])),
            opt(option::GO, &go),
        ],
    );
    assert_eq!(agreed.unwrap(), Some(Agreed { structured: true, allocation: true }));
    let kinds: Vec<u32> = answers.iter().map(|(_, kind, _)| *kind).collect();
    assert_eq!(kinds, [1, 4, 1, 3, 3, 3, 3, 1]);
    assert_eq!(answers[1].2, [&[0, 0, 0, 1][..], b"base:allocation"].concat());
    let export = [&[0, 0][..], &(1u64 << 30).to_be_bytes(), &[0, 0x81]].concat();
    assert_eq!(answers[3].2, export);
    assert_eq!(answers[5].2, b"\0\x01disk");
    assert_eq!(answers[6].2, b"\0\x02a disk");
}

#[test]
fn the_old_way_in() {
    let (agreed, _, rest) = talk(1, &[opt(option::EXPORT_NAME, b"")]);
    assert_eq!(agreed.unwrap(), Some(Agreed::default()));
    assert_eq!(rest.len(), 8 + 2 + 124);
    let (agreed, _, rest) = talk(3, &[opt(option::EXPORT_NAME, b"disk")]);
    assert!(agreed.unwrap().is_some());
    assert_eq!(rest.len(), 8 + 2);
    let (agreed, _, rest) = talk(3, &[opt(option::EXPORT_NAME, b"other")]);
    assert_eq!((agreed.unwrap(), rest.len()), (None, 0));
}

#[test]
fn questions_without_going() {
    let (agreed, answers, _) = talk(
        3,
        &[
            opt(option::LIST, b""),
            opt(option::LIST_META_CONTEXT, &query("", &[])),
            opt(option::STRUCTURED_REPLY, b""),
            opt(option::LIST_META_CONTEXT, &query("", &[])),
            opt(option::LIST_META_CONTEXT, &query("", &["base:"])),
            opt(option::LIST_META_CONTEXT, &query("", &["qemu:"])),
            opt(option::INFO, &[named(""), vec![0, 0]].concat()),
            opt(option::ABORT, b""),
        ],
    );
    assert_eq!(agreed.unwrap(), None);
    assert_eq!(answers[0].2, b"\0\0\0\x04diska disk");
    assert_eq!(answers[2].1, answer::INVALID, "contexts need structured replies");
    let kinds: Vec<u32> = answers[3..].iter().map(|(_, kind, _)| *kind).collect();
    assert_eq!(kinds, [1, 4, 1, 4, 1, 1, 3, 3, 1, 1]);
}

#[test]
fn a_later_selection_replaces_the_earlier() {
    let (agreed, _, _) = talk(
        3,
        &[
            opt(option::STRUCTURED_REPLY, b""),
            opt(option::SET_META_CONTEXT, &query("", &["base:allocation"])),
            opt(option::SET_META_CONTEXT, &query("", &[])),
            opt(option::EXPORT_NAME, b""),
        ],
    );
    assert_eq!(agreed.unwrap(), Some(Agreed { structured: true, allocation: false }));
}

#[test]
fn what_is_wrong_is_answered_and_survived() {
    for (kind, data, expected) in [
        (option::LIST, vec![0], answer::INVALID),
        (option::STRUCTURED_REPLY, vec![0], answer::INVALID),
        (option::STARTTLS, vec![], answer::POLICY),
        (11, vec![], answer::UNSUPPORTED),
        (0xffff_ffff, vec![1; 100], answer::UNSUPPORTED),
        (option::GO, vec![], answer::INVALID),
        (option::GO, vec![0xff; 4], answer::INVALID),
        (option::GO, [named("disk"), vec![0, 9]].concat(), answer::INVALID),
        (option::GO, [named("other"), vec![0, 0]].concat(), answer::UNKNOWN),
        (option::SET_META_CONTEXT, vec![0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], answer::INVALID),
        (option::LIST, vec![0; 9000], answer::TOO_BIG),
    ] {
        let (agreed, answers, _) = talk(3, &[opt(kind, &data), opt(option::EXPORT_NAME, b"")]);
        assert_eq!(answers.iter().map(|(_, kind, _)| *kind).collect::<Vec<_>>(), [expected], "option {kind}");
        assert!(agreed.unwrap().is_some(), "the client may go on after option {kind}");
    }
}

#[test]
fn what_is_no_nbd_ends_it() {
    assert_eq!(talk(0, &[]).0.unwrap(), None, "not fixed newstyle");
    assert_eq!(talk(0x8000_0003, &[]).0.unwrap(), None, "a flag nobody knows");
    assert_eq!(talk(3, &[vec![0; 16]]).0.unwrap(), None, "no option");
    let absurd = [&proto::OPTION_MAGIC.to_be_bytes()[..], &[0, 0, 0, 3], &[0xff; 4]].concat();
    assert_eq!(talk(3, &[absurd]).0.unwrap(), None);
    assert!(talk(3, &[opt(option::LIST, b"")]).0.is_err(), "left in the middle");
    assert_eq!(talk(3, &vec![opt(option::LIST, b""); 2000]).0.unwrap(), None, "asks for ever");
}
