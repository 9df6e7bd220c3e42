// SPDX-License-Identifier: Apache-2.0
//! Metadata that is read when it is needed, L2 slices aside: refcount blocks, and L2 tables shared with a snapshot. Who finds
//! under the image's lock that one is missing gets a [`Need`], lets the lock go and waits for it as for any other request.
//! Each is read by one at a time: what was read is what the disk holds when it is put in place.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::{Arc, MutexGuard};

use crate::disk::Op;
use crate::storage::buffer::AlignedBuf;

use super::handle::Handle;
use super::image::Image;
use super::inbox::Waiter;
use super::meta::Meta;
use super::side;
use super::task::{State, Tag, Task};

/// Something to be read: which, and its offset in the file. One cluster long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Want {
    /// A refcount block.
    Block(usize, u64),
    /// The L2 table that an entry of the L1 table shares with a snapshot.
    Table(usize, u64),
}

/// Why something can't be done.
#[derive(Debug)]
pub enum Need {
    /// This has to be read first.
    Read(Want),
    /// It failed.
    Failed(io::Error),
}

impl From<io::Error> for Need {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// What is being read, and what was.
#[derive(Debug, Default)]
pub struct Fetches {
    under_way: HashMap<Want, Vec<Waiter>>,
    /// Shared L2 tables for those who waited for them, by index in the L1 table.
    pub copies: BTreeMap<usize, Vec<u8>>,
}

impl Want {
    fn offset(self) -> u64 {
        match self {
            Self::Block(_, offset) | Self::Table(_, offset) => offset,
        }
    }
}

impl Meta {
    /// Takes what was read; gives those who waited for it, and flushes that look again whatever came of it.
    fn fetched(&mut self, want: Want, bytes: Option<&[u8]>) -> (Vec<Waiter>, Vec<Waiter>) {
        match (want, bytes, &mut self.refs) {
            (Want::Block(index, _), Some(bytes), Some(refs)) => refs.put(index, bytes.to_vec()),
            // Clusters whose counts can't be read leak.
            (Want::Block(index, _), None, Some(refs)) => self.frees.ripe.retain(|c| refs.block_of(*c) != index),
            (Want::Table(index, _), Some(bytes), _) => {
                self.fetches.copies.insert(index, bytes.to_vec());
            }
            _ => {}
        }
        if bytes.is_none() {
            // Those who wanted them may have failed with this; who still does reads them again.
            self.fetches.copies.clear();
        }
        let flushes = match want {
            Want::Block(..) => std::mem::take(&mut self.frees.waiters),
            Want::Table(..) => Vec::new(),
        };
        (self.fetches.under_way.remove(&want).unwrap_or_default(), flushes)
    }
}

impl Handle {
    /// Parks a task until it has what it needs, or fails it.
    pub(super) fn lacks(
        &mut self,
        index: u32,
        task: &mut Task,
        (top, mut meta): (&Image, MutexGuard<'_, Meta>),
        need: Need,
    ) {
        match need {
            Need::Failed(e) => {
                meta.broke_by(top, &e);
                task.errno = e.raw_os_error().unwrap_or(libc::EIO);
            }
            Need::Read(want) => {
                task.state = State::Parked;
                self.fetch_table(meta, want, Some(self.waiter(index)));
            }
        }
    }

    /// Reads something, unless that is under way.
    pub(super) fn fetch_table(&mut self, mut meta: MutexGuard<'_, Meta>, want: Want, waiter: Option<Waiter>) {
        let len = 1usize << meta.header.cluster_bits;
        let first = !meta.fetches.under_way.contains_key(&want);
        meta.fetches.under_way.entry(want).or_default().extend(waiter);
        drop(meta);
        if !first {
            return;
        }
        match AlignedBuf::zeroed(len) {
            Ok(buf) => {
                let (file, segs) = (self.chain.places.first().map_or(0, |p| p.file), [buf.seg(0, len)]);
                self.issue(file, Tag::Fetch(want, buf), Op::Read, want.offset(), len as u64, &segs);
            }
            Err(_) => self.fetched(want, None, libc::ENOMEM),
        }
    }

    /// It has arrived, or not.
    pub(super) fn fetched(&mut self, want: Want, buf: Option<&AlignedBuf>, errno: i32) {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return };
        let mut meta = top.lock();
        let (waiters, flushes) = meta.fetched(want, buf.filter(|_| errno == 0).map(AlignedBuf::bytes));
        let freeing = matches!(want, Want::Block(..)) && !meta.frees.ripe.is_empty();
        drop(meta);
        for waiter in waiters {
            if errno == 0 { waiter.go_on() } else { waiter.flushed(errno) }
        }
        flushes.into_iter().for_each(Waiter::go_on);
        if freeing && errno == 0 {
            self.ripen(top, None);
        }
    }

    /// Reads something and waits for it; for tools.
    ///
    /// # Errors
    /// What the host says.
    pub(super) fn fetch_now(&mut self, top: &Image, want: Want) -> io::Result<()> {
        let mut meta = top.lock();
        if meta.fetches.under_way.contains_key(&want) {
            drop(meta);
            self.commit();
            self.pump();
            std::thread::yield_now();
            return Ok(());
        }
        let own = meta.side.share();
        meta.fetches.under_way.insert(want, Vec::new());
        drop(meta);
        let unsupported = || io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        let len = top.layout.cluster_size() as usize;
        let read = own.ok_or_else(unsupported).and_then(|mut own| side::read(&mut own, want.offset(), len, u64::MAX));
        let (waiters, flushes) = top.lock().fetched(want, read.as_deref().ok());
        // They look again, and read it themselves if that failed.
        waiters.into_iter().chain(flushes).for_each(Waiter::go_on);
        read.map(drop)
    }
}
