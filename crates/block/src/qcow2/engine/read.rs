// SPDX-License-Identifier: Apache-2.0
//! Reading: from the image that has the bytes, the first from the top down; neighbours in a file are read at once.

use std::sync::Arc;

use crate::disk::Op;
use crate::qcow2::format::crypto::SECTOR;
use crate::qcow2::format::entry::{Compressed, Mapping};
use crate::storage::buffer::{AlignedBuf, cut, fill_zero, scatter, transform};

use super::chain::{Chain, Layer};
use super::handle::Handle;
use super::image::{Image, Look};
use super::task::{Sealed, State, Tag, Task};

/// Where a run of guest bytes is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// In this file (of the chain), here.
    At(usize, u64),
    /// Reads as zeroes; whether an image says so.
    Zero(bool),
    /// In the compressed cluster, whose wanted bytes begin so far into it, of the image at a place.
    Squeezed(usize, Compressed, u64),
    /// A slice of the image at this place has to be read first.
    Miss(usize, u64),
    /// The image is damaged here.
    Bad,
}

/// What was found: where, of the image at which place, how many bytes are so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where.
    pub found: Found,
    /// At which place in the chain.
    pub place: usize,
    /// Bytes.
    pub len: u64,
}

impl Chain {
    /// Where the bytes from `offset` on are, at most up to `end`, seen from the image at place `top`. Never waits.
    pub fn find(&self, top: usize, offset: u64, end: u64) -> Extent {
        let mut end = end;
        for (at, place) in self.places.iter().enumerate().skip(top) {
            let extent = |found, end: u64| Extent { found, place: at, len: end - offset };
            let image = match &place.layer {
                Layer::Raw(size) if offset >= *size => return extent(Found::Zero(false), end),
                Layer::Raw(size) => return extent(Found::At(place.file, offset), end.min(*size)),
                Layer::Qcow2(image) => image,
            };
            let size = image.size();
            if offset >= size {
                return extent(Found::Zero(false), end);
            }
            end = end.min(size);
            let (found, len) = self.find_in(at, image, offset);
            end = end.min(offset.saturating_add(len));
            if let Some(found) = found {
                return extent(found, end);
            }
        }
        Extent { found: Found::Zero(false), place: self.places.len().saturating_sub(1), len: end - offset }
    }

    /// What one image says: `None` leaves it to the next one.
    fn find_in(&self, at: usize, image: &Image, offset: u64) -> (Option<Found>, u64) {
        let bits = image.layout.cluster_bits;
        let (cluster, within) = (offset >> bits, offset & ((1 << bits) - 1));
        let rest = (1u64 << bits) - within;
        let data = self.places.get(at).map_or(0, |p| p.data);
        match image.look(cluster) {
            Look::Miss => (Some(Found::Miss(at, image.place(cluster).0)), rest),
            Look::Bad => (Some(Found::Bad), rest),
            Look::NoTable => {
                let span = 1u64 << (bits + image.layout.l2_bits());
                (None, span - (offset & (span - 1)))
            }
            Look::Is(Mapping::Unallocated) => (None, rest),
            Look::Is(Mapping::Zero { .. }) => (Some(Found::Zero(true)), rest),
            Look::Is(Mapping::Data { host, .. }) => (Some(Found::At(data, host + within)), rest),
            Look::Is(Mapping::Compressed(what)) => (Some(Found::Squeezed(at, what, within)), rest),
            Look::Is(Mapping::Partial(p)) => {
                let sub_bits = image.layout.subcluster_bits();
                let state = |s: u64| (p.allocated >> s & 1, p.zero >> s & 1);
                let first = within >> sub_bits;
                let same = (first..32).take_while(|s| state(*s) == state(first)).count() as u64;
                let len = ((first + same) << sub_bits) - within;
                match (state(first), p.host) {
                    ((0, 0), _) => (None, len),
                    ((0, _), _) => (Some(Found::Zero(true)), len),
                    (_, Some(host)) => (Some(Found::At(data, host + within)), len),
                    (_, None) => (Some(Found::Bad), len),
                }
            }
        }
    }
}

/// A run of bytes to be read at once.
#[derive(Clone, Copy)]
struct Piece {
    place: usize,
    file: usize,
    host: u64,
    at: u64,
    len: u64,
}

impl Handle {
    /// Sends off what can be read of a task.
    pub(super) fn step_read(&mut self, index: u32, task: &mut Task, top: usize) {
        let chain = Arc::clone(&self.chain);
        let mut piece: Option<Piece> = None;
        while task.cursor < task.end && task.errno == 0 {
            let Extent { found, len, place } = chain.find(top, task.cursor, task.end);
            if let Found::At(file, host) = found {
                match &mut piece {
                    Some(p) if p.file == file && p.host + p.len == host && p.at + p.len == task.cursor => p.len += len,
                    other => {
                        let full = other.replace(Piece { place, file, host, at: task.cursor, len });
                        if let Some(p) = full {
                            self.read_piece(index, task, p);
                        }
                    }
                }
                task.cursor += len;
                if task.pending >= 31 {
                    break;
                }
                continue;
            }
            let mut segs = Vec::new();
            let at = task.cursor - task.offset;
            match found {
                Found::At(..) => {}
                Found::Zero(_) => {
                    cut(&task.segs, at, len, &mut segs);
                    fill_zero(&segs);
                    task.cursor += len;
                }
                Found::Squeezed(place, what, within) => {
                    cut(&task.segs, at, len, &mut segs);
                    task.cursor += len;
                    self.read_squeezed((index, task), place, what, within, segs);
                    if task.pending >= 31 {
                        break;
                    }
                }
                Found::Miss(place, slice) => {
                    self.load(index, task, place, slice);
                    break;
                }
                Found::Bad => task.errno = libc::EIO,
            }
        }
        if let Some(p) = piece {
            self.read_piece(index, task, p);
        }
    }

    fn read_piece(&mut self, index: u32, task: &mut Task, p: Piece) {
        if Self::image_at(&self.chain, p.place).is_some_and(|image| image.cipher.is_some()) {
            return self.read_sealed(index, task, p);
        }
        let (at, whole) = (p.at - task.offset, p.len == task.end - task.offset);
        // What the file has not is zeroes.
        let len = p.len.min(self.file_end(p.file).saturating_sub(p.host));
        if whole && len == p.len {
            task.pending += 1;
            let segs = std::mem::take(&mut task.segs);
            self.issue(p.file, Tag::Part(index), Op::Read, p.host, p.len, &segs);
            task.segs = segs;
            return;
        }
        let mut segs = Vec::new();
        if len > 0 {
            cut(&task.segs, at, len, &mut segs);
            task.pending += 1;
            self.issue(p.file, Tag::Part(index), Op::Read, p.host, len, &segs);
        }
        if len < p.len {
            segs.clear();
            cut(&task.segs, at + len, p.len - len, &mut segs);
            fill_zero(&segs);
        }
    }

    /// Reads encrypted data: into the segments themselves, or through a buffer where not all of its sectors are wanted.
    fn read_sealed(&mut self, index: u32, task: &mut Task, p: Piece) {
        let chain = Arc::clone(&self.chain);
        let Some(cipher) = Self::image_at(&chain, p.place).and_then(|image| image.cipher.as_ref()) else { return };
        // What the file has not is zeroes.
        let len = p.len.min(self.file_end(p.file).saturating_sub(p.host));
        let mut segs = Vec::new();
        cut(&task.segs, p.at - task.offset + len, p.len - len, &mut segs);
        fill_zero(&segs);
        segs.clear();
        if len == 0 {
            return;
        }
        cut(&task.segs, p.at - task.offset, len, &mut segs);
        let sector = SECTOR as u64;
        let skip = p.host % sector;
        let (from, to) = (p.host - skip, (p.host + len).next_multiple_of(sector));
        let mut sealed = Sealed {
            task: index,
            place: p.place,
            sector: cipher.sector(p.at - skip, from),
            skip: skip as usize,
            segs,
            buf: None,
        };
        let mut into = sealed.segs.clone();
        if (from, to) != (p.host, p.host + len) {
            match self.buffer((to - from) as usize) {
                Ok(buf) => {
                    into = vec![buf.seg(0, buf.len())];
                    sealed.buf = Some(buf);
                }
                Err(_) => {
                    task.errno = libc::ENOMEM;
                    return;
                }
            }
        }
        task.pending += 1;
        self.issue(p.file, Tag::Sealed(Box::new(sealed)), Op::Read, from, to - from, &into);
    }

    /// Encrypted data has arrived.
    pub(super) fn unseal(&mut self, mut what: Sealed, errno: i32) {
        let chain = Arc::clone(&self.chain);
        let cipher = Self::image_at(&chain, what.place).and_then(|image| image.cipher.as_ref());
        match (cipher, errno, &mut what.buf) {
            (Some(cipher), 0, Some(buf)) => {
                cipher.decrypt(what.sector, buf.bytes_mut());
                scatter(buf.bytes().get(what.skip..).unwrap_or_default(), &what.segs);
            }
            (Some(cipher), 0, None) => {
                let (mut sector, mut scratch) = (what.sector, [0; 8 * SECTOR]);
                transform(&what.segs, &mut scratch, |bytes| {
                    cipher.decrypt(sector, bytes);
                    sector += (bytes.len() / SECTOR) as u64;
                });
            }
            _ => {}
        }
        self.recycle(what.buf);
        self.part_done(what.task, errno);
    }

    /// Bytes that can be read of a file of the chain.
    pub(super) fn file_end(&self, file: usize) -> u64 {
        self.chain.ends.get(file).copied().unwrap_or(0)
    }

    /// Reads a slice of an L2 table, or waits for it if someone else is reading it; parks the task unless it can go on.
    pub(super) fn load(&mut self, index: u32, task: &mut Task, place: usize, slice: u64) {
        let chain = Arc::clone(&self.chain);
        let Some(image) = Self::image_at(&chain, place) else {
            task.errno = libc::EIO;
            return;
        };
        let mut meta = image.lock();
        if image.cache.find(slice).is_some() {
            return;
        }
        let waiter = self.waiter(index);
        if let Some(waiters) = meta.loading.get_mut(&slice) {
            task.state = State::Parked;
            waiters.push(waiter);
            return;
        }
        if let Some(bytes) = meta.unwritten(image, slice) {
            if meta.install(image, slice, &bytes).is_none() {
                task.state = State::Parked;
                meta.room.push(waiter);
                drop(meta);
                self.need_cycle();
            }
            return;
        }
        let offset = match image.slice_offset(slice) {
            Ok(offset) => offset,
            Err(_) => {
                task.errno = libc::EIO;
                return;
            }
        };
        task.state = State::Parked;
        meta.loading.insert(slice, vec![waiter]);
        drop(meta);
        let len = image.slice_bytes();
        match self.buffer(len) {
            Ok(buf) => {
                let segs = [buf.seg(0, len)];
                let file = chain.places.get(place).map_or(0, |p| p.file);
                self.issue(file, Tag::Load(place, slice, buf), Op::Read, offset, len as u64, &segs);
            }
            Err(_) => {
                let waiters = image.lock().loading.remove(&slice).unwrap_or_default();
                waiters.into_iter().for_each(|w| w.flushed(libc::ENOMEM));
            }
        }
    }

    /// A slice has arrived.
    pub(super) fn loaded(&mut self, place: usize, slice: u64, buf: AlignedBuf, errno: i32) {
        let chain = Arc::clone(&self.chain);
        let Some(image) = Self::image_at(&chain, place) else { return };
        let mut meta = image.lock();
        let waiters = meta.loading.remove(&slice).unwrap_or_default();
        if errno != 0 {
            waiters.into_iter().for_each(|w| w.flushed(errno));
            return;
        }
        if !meta.plausible(image, slice, buf.bytes()) {
            // Its entries are still read one by one; nothing is written any more.
            meta.broke(image);
        }
        if meta.install(image, slice, buf.bytes()).is_some() {
            drop(meta);
            waiters.into_iter().for_each(super::inbox::Waiter::go_on);
            if self.spare.len() < 64 {
                self.spare.push(buf);
            }
            return;
        }
        meta.room.extend(waiters);
        drop(meta);
        self.need_cycle();
    }
}
