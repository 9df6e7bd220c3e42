// SPDX-License-Identifier: Apache-2.0
//! Requests that lie in one piece of one file, as nearly all do once a disk has its data: reads of what one image holds,
//! writes in place. They are passed on as they are, with no task behind them, so that a cached one costs little more than
//! one of a raw file. Called by `handle` on its thread; takes no lock.

use std::sync::atomic::Ordering;

use crate::disk::{Op, Request};

use super::chain::Chain;
use super::handle::Handle;
use super::image::{Image, Look};
use super::read::{Extent, Found};
use super::task::Tag;
use super::write::in_place;

impl Handle {
    /// Passes `request`, which was checked, on to the storage that has its bytes. `false`: they are not in one piece, or not
    /// as they are, and it needs a task.
    pub(super) fn go_straight(&mut self, request: &Request<'_>) -> bool {
        let Request { id, op, offset, len, segs } = *request;
        if len == 0 || !self.has_room() {
            return false;
        }
        let Some(top) = self.chain.top() else { return false };
        // Before it is looked up where the bytes are, and until they have moved. What is only read is never freed.
        let ticket = top.writable.then(|| top.epochs.enter());
        let place = match op {
            Op::Read => self.chain.piece(offset, offset + len),
            Op::Write => self.chain.piece_in_place(top, offset, offset + len),
            _ => None,
        };
        let Some((file, host)) = place.filter(|(file, host)| op == Op::Write || host + len <= self.file_end(*file))
        else {
            if let Some(ticket) = ticket {
                top.epochs.leave(ticket);
            }
            return false;
        };
        self.send(file, Tag::Straight(id, ticket), op, host, len, segs);
        true
    }
}

impl Chain {
    /// The file and the place in it where all bytes from `offset` to `end` lie as they are, in one piece.
    fn piece(&self, offset: u64, end: u64) -> Option<(usize, u64)> {
        let mut first = None;
        let mut at = offset;
        while at < end {
            let Extent { found: Found::At(file, host), place, len } = self.find(0, at, end) else { return None };
            if Handle::image_at(self, place).is_some_and(|image| image.cipher.is_some()) {
                return None;
            }
            let (first_file, start) = *first.get_or_insert((file, host));
            if (file, host) != (first_file, start + (at - offset)) {
                return None;
            }
            at += len;
        }
        first
    }

    /// As [`Chain::piece`], of clusters of the image on top that may be written in place.
    fn piece_in_place(&self, top: &Image, offset: u64, end: u64) -> Option<(usize, u64)> {
        if top.cipher.is_some() {
            return None;
        }
        let mut first = None;
        let mut at = offset;
        while at < end {
            let cluster = at >> top.layout.cluster_bits;
            let stop = end.min((cluster + 1) << top.layout.cluster_bits);
            let Look::Is(mapping) = top.look(cluster) else { return None };
            let host = in_place(top, &mapping, at, stop)?;
            if host != *first.get_or_insert(host) + (at - offset) {
                return None;
            }
            at = stop;
        }
        // The slice that was just looked at may be the one that gave the image away.
        let sound = !top.broken.load(Ordering::Acquire);
        first.filter(|_| sound).and_then(|host| Some((self.places.first()?.data, host)))
    }
}
