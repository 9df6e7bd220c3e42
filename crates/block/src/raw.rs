// SPDX-License-Identifier: Apache-2.0
//! The raw format: the bytes of the disk, one to one. Checks ranges and passes requests on; called by `disk`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::segs::total_len;

use crate::disk::{Extent, ExtentKind, Limits, Op, Request};
use crate::storage::Storage;

/// A raw image on a storage.
#[derive(Debug)]
pub struct Raw {
    storage: Storage,
    size: Arc<AtomicU64>,
    readonly: bool,
    limits: Limits,
}

impl Raw {
    /// `size` bytes of `storage` as a disk.
    pub fn new(storage: Storage, size: u64, readonly: bool, limits: Limits) -> Self {
        Self { storage, size: Arc::new(AtomicU64::new(size)), readonly, limits }
    }

    /// Another one on the same bytes, for another thread.
    pub fn share(&self) -> Option<Self> {
        let size = Arc::clone(&self.size);
        Some(Self { storage: self.storage.share()?, size, readonly: self.readonly, limits: self.limits })
    }

    /// See [`crate::Disk::extents`].
    pub fn extents(&self, offset: u64, len: u64) -> io::Result<Vec<Extent>> {
        let einval = || io::Error::from_raw_os_error(libc::EINVAL);
        let end = offset.checked_add(len).filter(|end| *end <= self.size()).ok_or_else(einval)?;
        let mut out = Vec::new();
        let mut at = offset;
        while at < end {
            let hole = self.storage.hole_end(at).min(end);
            let (kind, next) = if hole > at {
                (ExtentKind::Hole, hole)
            } else {
                (ExtentKind::Data, self.storage.data_end(at).clamp(at + 1, end))
            };
            let host_offset = Some(at);
            out.push(Extent { offset: at, len: next - at, kind, depth: 0, host_offset, compressed: false });
            at = next;
        }
        Ok(out)
    }

    /// See [`crate::Disk::resize`].
    pub fn resize(&mut self, bytes: u64) -> io::Result<()> {
        if self.readonly {
            return Err(io::Error::from_raw_os_error(libc::EROFS));
        }
        if bytes == 0 || !bytes.is_multiple_of(512) {
            let what = "a disk's size is a multiple of 512 and not zero";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        self.storage.set_len(bytes)?;
        self.storage.sync_now()?;
        self.size.store(bytes, Ordering::Release);
        Ok(())
    }

    /// Replaces the storage by one made around it.
    pub fn wrap(&mut self, around: impl FnOnce(Storage) -> Storage) {
        let inner = std::mem::replace(&mut self.storage, Storage::Gone);
        self.storage = around(inner);
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Whether writes are refused.
    pub fn readonly(&self) -> bool {
        self.readonly
    }

    /// Sizes that the host likes.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The storage below.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The storage below.
    pub fn storage_mut(&mut self) -> &mut Storage {
        &mut self.storage
    }

    /// Passes `request` on, or fails it if it is out of range or writes to a read-only disk.
    pub fn submit(&mut self, request: &Request<'_>) {
        match self.check(request) {
            Ok(()) => self.storage.submit(request),
            Err(errno) => self.storage.refuse(request.id, io::Error::from_raw_os_error(errno)),
        }
    }

    fn check(&self, request: &Request<'_>) -> Result<(), i32> {
        let moves_bytes = matches!(request.op, Op::Read | Op::Write);
        if request.op == Op::Flush {
            return Ok(());
        }
        if self.readonly && request.op != Op::Read {
            return Err(libc::EROFS);
        }
        if request.offset.checked_add(request.len).is_none_or(|end| end > self.size()) {
            return Err(libc::EINVAL);
        }
        if moves_bytes && total_len(request.segs) != request.len {
            return Err(libc::EINVAL);
        }
        Ok(())
    }
}
