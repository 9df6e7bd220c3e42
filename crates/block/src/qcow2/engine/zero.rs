// SPDX-License-Identifier: Apache-2.0
//! Discarding and zeroing. Whole clusters change in the table alone; what lies at their edges is written as zeroes, or left
//! alone if it is only a discard.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::qcow2::format::entry::{Mapping, Partial};

use super::handle::Handle;
use super::image::{Image, Look};
use super::read::{Extent, Found};
use super::task::{Kind, Parent, State, Task};
use super::write::entry;

/// Most bytes written as zeroes by one piece.
const PIECE: u64 = 1 << 20;

/// What happens to whole clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Nobody needs them; they must not show what lies below, though.
    Discard,
    /// They read as zeroes, and may be freed.
    Zero(bool),
    /// They are past the disk's end.
    Cut,
}

/// What a cluster is after it was freed or zeroed; `None` leaves it as it is.
fn after(image: &Image, old: &Mapping, change: Change) -> Option<Mapping> {
    let gone = if image.has_backing { Mapping::Zero { host: None, copied: false } } else { Mapping::Unallocated };
    let unmap = match (change, old) {
        (Change::Cut, Mapping::Unallocated)
        | (Change::Discard, Mapping::Unallocated | Mapping::Zero { host: None, .. }) => return None,
        (Change::Cut, _) => return Some(Mapping::Unallocated),
        (Change::Discard, _) => return Some(gone),
        (Change::Zero(unmap), _) => unmap,
    };
    if *old == Mapping::Unallocated && !image.has_backing {
        return None;
    }
    if !image.layout.zero_flag {
        return Some(Mapping::Unallocated);
    }
    let kept = match *old {
        Mapping::Data { host, copied: true } => Some(host),
        Mapping::Zero { host: Some(host), copied: true } => Some(host),
        Mapping::Partial(Partial { host: Some(host), copied: true, .. }) => Some(host),
        _ => None,
    };
    let host = kept.filter(|_| !unmap || image.layout.data_file);
    let new = Mapping::Zero { host, copied: host.is_some() };
    (new != *old).then_some(new)
}

impl Handle {
    /// Frees or zeroes what can be at the task's cursor.
    pub(super) fn step_zero(&mut self, index: u32, task: &mut Task, change: Change) {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return };
        let cluster_size = top.layout.cluster_size();
        let within = task.cursor & (cluster_size - 1);
        let whole = within == 0 && (task.end - task.cursor >= cluster_size || task.end == top.size());
        let plain = !top.raw_data_file && (top.layout.zero_flag || !top.has_backing);
        let by_table = change == Change::Cut || (whole && plain);
        if by_table {
            return self.change_table(index, task, top, change);
        }
        let next = task.end.min(task.cursor - within + cluster_size);
        if change == Change::Discard {
            task.cursor = next;
            return;
        }
        let Extent { found, len, .. } = chain.find(0, task.cursor, next.min(task.cursor + PIECE));
        match found {
            Found::Miss(place, slice) => self.load(index, task, place, slice),
            // The data file has to have the zeroes itself.
            Found::Zero(_) if !top.raw_data_file => task.cursor += len,
            _ => {
                let mut segs = Vec::new();
                self.zero_segs(len, &mut segs);
                task.pending += 1;
                let from = task.cursor;
                task.cursor += len;
                self.start(Kind::Write, from, from + len, segs, Parent::Task(index), None);
            }
        }
    }

    /// Changes the entries of whole clusters, as many as are in one slice.
    fn change_table(&mut self, index: u32, task: &mut Task, top: &Image, change: Change) {
        let bits = top.layout.cluster_bits;
        let first = task.cursor >> bits;
        let table = top.table_of(first);
        let mut meta = top.lock();
        if top.broken.load(Ordering::Acquire) {
            task.errno = libc::EIO;
            return;
        }
        if top.look(first) == Look::NoTable && (!matches!(change, Change::Zero(_)) || !top.has_backing) {
            let span = 1u64 << (bits + top.layout.l2_bits());
            task.cursor = task.end.min((task.cursor & !(span - 1)) + span);
            return;
        }
        if let Err(need) = meta.own_table(top, table) {
            return self.lacks(index, task, (top, meta), need);
        }
        let (slice, _) = top.place(first);
        let Some(slot) = top.cache.find(slice) else {
            drop(meta);
            return self.load(index, task, 0, slice);
        };
        let last = ((slice + 1) << top.slice_bits()).min(if task.end == top.size() {
            task.end.div_ceil(1 << bits)
        } else {
            task.end >> bits
        });
        for cluster in first..last {
            if let Some(other) = meta.in_flight.get_mut(&cluster) {
                task.state = State::Parked;
                other.waiters.push(self.waiter(index));
                break;
            }
            let Some(old) = entry(top, cluster) else {
                meta.broke(top);
                task.errno = libc::EIO;
                return;
            };
            if let Some(new) = after(top, &old, change) {
                meta.publish(top, slot, cluster, &new, &old);
            }
            task.cursor = task.end.min((cluster + 1) << bits);
        }
        let wanted = meta.cycles.wanted && !meta.cycles.running;
        drop(meta);
        if wanted && self.hold(index) {
            task.pending += 1;
        }
    }
}
