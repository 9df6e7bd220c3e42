// SPDX-License-Identifier: Apache-2.0
//! What tools ask of an open image, waiting for the answer: how its bytes are kept, and another size.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::disk::{Extent, ExtentKind};

use super::handle::Handle;
use super::read::Found;
use super::side;

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
                    (if known_hole { ExtentKind::Zero } else { ExtentKind::Data }, Some(host), false)
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
        let bytes = match meta.unwritten(image, slice) {
            Some(bytes) => bytes,
            None => {
                let offset = image.slice_offset(slice)?;
                side::read(&mut meta.side, offset, image.slice_bytes(), u64::MAX)?
            }
        };
        if !meta.plausible(image, slice, &bytes) {
            meta.broke(image);
        }
        let room = meta.install(image, slice, &bytes).is_some();
        drop(meta);
        if !room {
            self.flush_now()?;
        }
        Ok(())
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
        if bytes == 0 || bytes % 512 != 0 || bytes > i64::MAX as u64 {
            return unsupported("a disk's size is a multiple of 512 and not zero");
        }
        let size = top.size();
        if bytes == size {
            return Ok(());
        }
        if bytes < size {
            return unsupported(
                "a qcow2 disk in use can't be made smaller; use `tare img resize --shrink` when it is not",
            );
        }
        if top.has_backing || top.layout.data_file {
            return unsupported(
                "a disk in use with a backing file or a data file can't be resized; use `tare img resize` when it is not",
            );
        }
        let mut meta = top.lock();
        if top.layout.l1_entries(bytes) > u64::from(meta.header.l1.count) {
            return unsupported(
                "its table has no room for that size while it is in use; use `tare img resize` when it is not",
            );
        }
        let mut header = meta.header.clone();
        header.size = bytes;
        let (at, patch) = header.patch_size();
        let mut head = meta.head.clone();
        if let Some(to) = head.get_mut(at as usize..at as usize + patch.len()) {
            to.copy_from_slice(&patch);
        }
        if meta.cycles.running {
            return Err(error(libc::EBUSY));
        }
        side::write(&mut meta.side, 0, &head)?;
        side::flush(&mut meta.side)?;
        (meta.head, meta.header) = (head, header);
        top.size.store(bytes, Ordering::Release);
        Ok(())
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
