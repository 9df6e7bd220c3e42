// SPDX-License-Identifier: Apache-2.0
//! Any bytes as a qcow2 image for the offline editor: checked, repaired, checked again. Never a panic or a hang, and no more
//! than 64 MiB of memory; what a repair calls clean is clean.
#![no_main]

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use block::qcow2::offline::{Image, Medium, Repair};
use testkit::qcow2::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A file of at most 4 MiB.
#[derive(Clone)]
struct Small(Arc<Mutex<Vec<u8>>>);

const MOST: u64 = 4 << 20;

impl Small {
    fn with<T>(&self, work: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn grow(&self, end: u64) -> io::Result<()> {
        if end > MOST {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.with(|bytes| bytes.resize(bytes.len().max(end as usize), 0));
        Ok(())
    }
}

impl Medium for Small {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.with(|bytes| {
            let from = usize::try_from(offset).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
            let len = from.len().min(buf.len());
            buf[..len].copy_from_slice(&from[..len]);
            Ok(len)
        })
    }

    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        let end = offset.saturating_add(buf.len() as u64);
        self.grow(end)?;
        self.with(|bytes| bytes[offset as usize..end as usize].copy_from_slice(buf));
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.with(|bytes| bytes.len() as u64))
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.grow(size)?;
        self.with(|bytes| bytes.truncate(size as usize));
        Ok(())
    }

    fn as_medium(&self) -> &dyn Medium {
        self
    }
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let mark = Counting::mark();
    let small = Small(Arc::new(Mutex::new(data.to_vec())));
    let path = Path::new("/nowhere/image.qcow2");
    if let Ok(mut image) = Image::on(Box::new(small.clone()), path, true) {
        if let Ok(report) = image.check() {
            let repaired = image.repair(if data.len() % 2 == 0 { Repair::All } else { Repair::Leaks });
            if let Ok(after) = repaired {
                assert!(!report.clean() || after.corruptions == 0, "a clean image became worse");
            }
        }
    }
    let peak = Counting::peak_since(mark);
    assert!(peak < (64 << 20) + 4 * data.len() + MOST as usize, "{peak} bytes of memory");
});
