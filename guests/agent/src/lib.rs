// SPDX-License-Identifier: Apache-2.0
//! What the lab and its machine say to each other, and over what.
//!
//! The lab machine has no disk, no network and no interrupting device. The lab and the agent inside share one piece of
//! memory (a range of physical addresses there, a file here) and poll it. [`mailbox`] is the layout of that memory, [`wire`] the frames that
//! travel in it, [`session`] the half that the agent serves; [`watch`] is a tool that samples use there. The `lab` crate links the first two; the binary all three.

pub mod mailbox;
pub mod session;
pub mod transact;
pub mod watch;
pub mod wire;

/// Names this agent's sources: the lab keys its snapshots by it and refuses a binary built from other sources.
pub const FINGERPRINT: u64 = fingerprint(&[
    include_bytes!("lib.rs"),
    include_bytes!("main.rs"),
    include_bytes!("mailbox.rs"),
    include_bytes!("session.rs"),
    include_bytes!("transact.rs"),
    include_bytes!("watch.rs"),
    include_bytes!("wire.rs"),
]);

const fn fingerprint(parts: &[&[u8]]) -> u64 {
    let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
    let mut part = 0;
    while part < parts.len() {
        let mut i = 0;
        while i < parts[part].len() {
            hash = (hash ^ parts[part][i] as u64).wrapping_mul(0x0100_0000_01b3);
            i += 1;
        }
        part += 1;
    }
    hash
}
