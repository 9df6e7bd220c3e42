// SPDX-License-Identifier: Apache-2.0
//! The raw format: the bytes of the disk, one to one. Checks ranges and passes requests on; called by `disk`.

use std::io;

use base::segs::total_len;

use crate::disk::{Limits, Op, Request};
use crate::storage::Storage;

/// A raw image on a storage.
#[derive(Debug)]
pub struct Raw {
    storage: Storage,
    size: u64,
    readonly: bool,
    limits: Limits,
}

impl Raw {
    /// `size` bytes of `storage` as a disk.
    pub fn new(storage: Storage, size: u64, readonly: bool, limits: Limits) -> Self {
        Self { storage, size, readonly, limits }
    }

    /// Replaces the storage by one made around it.
    pub fn wrap(&mut self, around: impl FnOnce(Storage) -> Storage) {
        let inner = std::mem::replace(&mut self.storage, Storage::Gone);
        self.storage = around(inner);
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
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
        if request.offset.checked_add(request.len).is_none_or(|end| end > self.size) {
            return Err(libc::EINVAL);
        }
        if moves_bytes && total_len(request.segs) != request.len {
            return Err(libc::EINVAL);
        }
        Ok(())
    }
}
