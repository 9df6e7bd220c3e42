// SPDX-License-Identifier: Apache-2.0
//! What a handle keeps of its requests: tasks, and what storages were asked for on their behalf. Made and moved by `handle`,
//! filled in by `read`, `write`, `zero` and `straight`.

use base::Seg;

use crate::storage::buffer::AlignedBuf;

use super::fetch::Want;
use super::unpack::Squeezed;
use super::zero::Change;

/// Who asked for a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parent {
    /// The user of the disk; the request's id.
    Guest(u16),
    /// An allocation that needs what was there before.
    Alloc(u32),
    /// Another task: this one is part of it.
    Task(u32),
    /// The handle itself; the outcome is kept for it.
    Close,
}

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// From the image so many below the top.
    Read(usize),
    /// To the top.
    Write,
    /// Frees or zeroes.
    Zero(Change),
    /// Makes durable.
    Flush,
}

/// Whether a task's turn may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Goes on when it is its turn.
    Ready,
    /// Waits for news.
    Parked,
    /// Goes on when one of its pieces is done.
    Throttled,
}

/// A request, or part of one.
#[derive(Debug)]
pub struct Task {
    /// What it does.
    pub kind: Kind,
    /// First byte on the disk.
    pub offset: u64,
    /// Past its last byte.
    pub end: u64,
    /// Everything before this has been sent off.
    pub cursor: u64,
    /// The bytes.
    pub segs: Vec<Seg>,
    /// Pieces under way.
    pub pending: u32,
    /// The first error.
    pub errno: i32,
    /// Whether its turn may come.
    pub state: State,
    /// Who asked.
    pub parent: Parent,
    /// For [`super::image::Epochs::leave`].
    pub ticket: Option<usize>,
}

/// What a storage was asked for.
#[derive(Debug)]
pub enum Tag {
    /// A piece of a task.
    Part(u32),
    /// A slice of an L2 table of the image at a place.
    Load(usize, u64, AlignedBuf),
    /// Compressed data.
    Squeezed(Box<Squeezed>),
    /// The data of an allocation.
    Fill(u32),
    /// Data for a cluster that another request is allocating.
    Join(u32, u64),
    /// Part of the cycle, and what it writes.
    Cycle(Vec<AlignedBuf>),
    /// Metadata that is needed.
    Fetch(Want, AlignedBuf),
    /// Encrypted data for a piece of a task.
    Sealed(Box<Sealed>),
    /// What was to be written, encrypted: the buffer it is in.
    Seals(Box<Tag>, AlignedBuf),
    /// All of a request of the user, and its ticket.
    Straight(u16, Option<usize>),
}

/// Encrypted data on its way.
#[derive(Debug)]
pub struct Sealed {
    /// For this task.
    pub task: u32,
    /// The image's place.
    pub place: usize,
    /// The number of the first sector, as the cipher counts.
    pub sector: u64,
    /// Bytes of the first sector that are not wanted.
    pub skip: usize,
    /// Where the wanted bytes go; the data itself, if there is no buffer.
    pub segs: Vec<Seg>,
    /// Whole sectors, where less is wanted.
    pub buf: Option<AlignedBuf>,
}
