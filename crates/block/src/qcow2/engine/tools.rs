// SPDX-License-Identifier: Apache-2.0
//! What tools ask of an open image, waiting for the answer: how its bytes are kept, and another size.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::disk::{Extent, ExtentKind};

use crate::qcow2::format::header::MAX_L1_BYTES;
use crate::storage::Storage;
use crate::storage::buffer::AlignedBuf;

use super::chain::Chain;
use super::fetch::Need;
use super::handle::{Handle, errno_of};
use super::inbox::Waiter;
use super::meta::{Meta, NewHead};
use super::read::Found;
use super::side;
use super::task::Kind;
use super::zero::Change;

fn error(errno: i32) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

impl Handle {
    /// See [`crate::Disk::extents`].
    ///
    /// # Errors
    /// A range past the end, damage, or what the host says.
    pub fn extents(&mut self, offset: u64, len: u64) -> io::Result<Vec<Extent>> {
        let chain = Arc::clone(&self.chain);
        let size = self.top().map_or(0, super::image::Image::size);
        let end = offset.checked_add(len).filter(|end| *end <= size).ok_or_else(|| error(libc::EINVAL))?;
        let mut out: Vec<Extent> = Vec::new();
        let mut at = offset;
        while at < end {
            let found = chain.find(0, at, end);
            let (kind, host_offset, compressed) = match found.found {
                Found::At(file, host) => {
                    let known_hole = chain.places.get(found.place).is_some_and(|p| {
                        matches!(p.layer, super::chain::Layer::Raw(_))
                            && chain.files.get(file).is_some_and(|f| f.hole_end(host) >= host + found.len)
                    });
                    let sealed = Self::image_at(&chain, found.place).is_some_and(|image| image.cipher.is_some());
                    (if known_hole { ExtentKind::Zero } else { ExtentKind::Data }, (!sealed).then_some(host), false)
                }
                Found::Zero(true) => (ExtentKind::Zero, None, false),
                Found::Zero(false) => (ExtentKind::Hole, None, false),
                Found::Squeezed(..) => (ExtentKind::Data, None, true),
                Found::Bad => return Err(error(libc::EIO)),
                Found::Miss(place, slice) => {
                    self.load_now(place, slice)?;
                    continue;
                }
            };
            let next = Extent { offset: at, len: found.len, kind, depth: found.place as u32, host_offset, compressed };
            at += found.len;
            match out.last_mut() {
                Some(last) if joins(last, &next) => last.len += next.len,
                _ => out.push(next),
            }
        }
        Ok(out)
    }

    /// Reads a slice of an L2 table, waiting for it.
    fn load_now(&mut self, place: usize, slice: u64) -> io::Result<()> {
        let chain = Arc::clone(&self.chain);
        let image = Self::image_at(&chain, place).ok_or_else(|| error(libc::EIO))?;
        let mut meta = image.lock();
        if image.cache.find(slice).is_some() {
            return Ok(());
        }
        if meta.loading.contains_key(&slice) {
            drop(meta);
            self.pump();
            std::thread::yield_now();
            return Ok(());
        }
        if let Some(bytes) = meta.unwritten(image, slice) {
            let room = meta.install(image, slice, &bytes).is_some();
            drop(meta);
            return if room { Ok(()) } else { self.flush_now() };
        }
        let offset = image.slice_offset(slice)?;
        let mut own = meta.side.share().ok_or_else(|| error(libc::EOPNOTSUPP))?;
        meta.loading.insert(slice, Vec::new());
        drop(meta);
        let read = side::read(&mut own, offset, image.slice_bytes(), u64::MAX);
        let buf = AlignedBuf::with(read.as_deref().unwrap_or_default(), image.slice_bytes());
        let result = read.and_then(|_| buf.as_ref().map(|_| ()).map_err(|_| error(libc::ENOMEM)));
        let errno = errno_of(&result);
        match buf {
            Ok(buf) => self.loaded(place, slice, buf, errno),
            Err(_) => {
                let waiters = image.lock().loading.remove(&slice).unwrap_or_default();
                waiters.into_iter().for_each(|w| w.flushed(libc::ENOMEM));
            }
        }
        result?;
        let meta = image.lock();
        let room = image.cache.find(slice).is_some();
        drop(meta);
        if room { Ok(()) } else { self.flush_now() }
    }

    /// See [`crate::Disk::resize`].
    ///
    /// # Errors
    /// What can't be had, in one line; or what the host says.
    pub fn resize(&mut self, bytes: u64) -> io::Result<()> {
        let unsupported = |what: &str| Err(io::Error::new(io::ErrorKind::Unsupported, what.to_owned()));
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return Err(error(libc::EIO)) };
        if !top.writable {
            return Err(error(libc::EROFS));
        }
        if bytes == 0 || !bytes.is_multiple_of(512) || bytes > i64::MAX as u64 {
            return unsupported("a disk's size is a multiple of 512 and not zero");
        }
        let size = top.size();
        if bytes == size {
            return Ok(());
        }
        let meta = top.lock();
        let (old, snapshots) = (meta.header.version < 3, meta.header.snapshots.count > 0);
        drop(meta);
        if old && snapshots {
            return unsupported(
                "an image of version 2 with snapshots can't be resized: they have no size of their own",
            );
        }
        if bytes < size { self.shrink(size, bytes) } else { self.extend(size, bytes) }
    }

    /// Zeroes what stays behind the new end in its cluster, frees the clusters past it, then says so in the header.
    fn shrink(&mut self, size: u64, bytes: u64) -> io::Result<()> {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return Err(error(libc::EIO)) };
        let cluster = top.layout.cluster_size();
        let whole = bytes.next_multiple_of(cluster);
        if whole != bytes {
            self.wait_for(Kind::Zero(Change::Zero(false)), bytes, whole.min(size))?;
        }
        top.size.store(bytes, Ordering::Release);
        let freed = self.wait_for(Kind::Zero(Change::Cut), whole, size.next_multiple_of(cluster));
        freed.and_then(|()| self.flush_now())?;
        self.change_head(|meta| meta.head_with_size(bytes))?;
        if top.raw_data_file {
            self.data_file(&chain)?.set_len(bytes)?;
        }
        Ok(())
    }

    /// Makes room in the L1 table, makes sure that the new bytes are zeroes, then says so in the header.
    fn extend(&mut self, size: u64, bytes: u64) -> io::Result<()> {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return Err(error(libc::EIO)) };
        let entries = top.layout.l1_entries(bytes);
        if entries * 8 > MAX_L1_BYTES {
            let what = "with clusters of this size a disk can't be that large";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        if top.layout.data_file {
            let file = self.data_file(&chain)?;
            if file.len()? < bytes {
                file.set_len(bytes)?;
            }
        }
        if entries > u64::from(top.lock().header.l1.count) {
            let place = loop {
                let place = top.lock().alloc_l1(entries);
                match place {
                    Ok(place) => break place,
                    Err(Need::Read(want)) => self.fetch_now(top, want)?,
                    Err(Need::Failed(e)) => return Err(e),
                }
            };
            // Their refcounts are on disk before the header names them.
            self.flush_now()?;
            self.change_head(|meta| meta.head_with_l1(place.0, place.1))?;
        }
        top.size.store(bytes, Ordering::Release);
        // What another writer left behind the old end, and what a backing file has there.
        let whole = size.next_multiple_of(top.layout.cluster_size()).min(bytes);
        let to = if top.has_backing { bytes } else { whole };
        let zeroed = self.wait_for(Kind::Zero(Change::Zero(true)), size, to).and_then(|()| self.flush_now());
        if let Err(e) = zeroed.and_then(|()| self.change_head(|meta| meta.head_with_size(bytes))) {
            top.size.store(size, Ordering::Release);
            return Err(e);
        }
        Ok(())
    }

    /// Changes the header, in place of a cycle: none runs meanwhile.
    fn change_head(&mut self, change: impl FnOnce(&Meta) -> NewHead) -> io::Result<()> {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return Err(error(libc::EIO)) };
        let mut meta = loop {
            let meta = top.lock();
            if !meta.cycles.running {
                break meta;
            }
            drop(meta);
            self.commit();
            self.pump();
            std::thread::yield_now();
        };
        let mut own = meta.side.share().ok_or_else(|| error(libc::EOPNOTSUPP))?;
        let new = change(&meta);
        meta.cycles.running = true;
        drop(meta);
        let result = new.write(&mut own);
        let mut meta = top.lock();
        if result.is_ok() {
            meta.new_head_written(new);
        }
        // What was written has no mark of damage that was met meanwhile.
        meta.mark_broken(top);
        meta.cycles.running = false;
        meta.made_room();
        // Flushes that came meanwhile wait for someone to run the next cycle.
        let leader = if meta.cycles.waiters.is_empty() { None } else { Some(meta.cycles.waiters.remove(0)) };
        drop(meta);
        leader.into_iter().for_each(Waiter::go_on);
        result
    }

    fn data_file<'a>(&self, chain: &'a Chain) -> io::Result<&'a Storage> {
        let place = chain.places.first().ok_or_else(|| error(libc::EIO))?;
        chain.files.get(place.data).ok_or_else(|| error(libc::EIO))
    }
}

fn joins(last: &Extent, next: &Extent) -> bool {
    let follows = match (last.host_offset, next.host_offset) {
        (Some(a), Some(b)) => a + last.len == b,
        (None, None) => true,
        _ => false,
    };
    follows && (last.kind, last.depth, last.compressed) == (next.kind, next.depth, next.compressed)
}
