// SPDX-License-Identifier: Apache-2.0
//! Drives a [`Disk`] from one thread with several requests in flight, each with its own buffer. Used by every command that
//! moves bytes.

use std::io;

use base::EventFd;
use block::{AlignedBuf, Completion, Disk, Op, Request};

/// Buffers are aligned like this, which is what direct I/O wants on any device.
const ALIGN: usize = 4096;

/// A disk, the buffers of its requests, and what it has answered.
pub struct Pump<'d> {
    disk: &'d mut Disk,
    wake: EventFd,
    done: Vec<Completion>,
    in_flight: usize,
    buffers: Buffers,
}

/// Equal buffers, by slot.
struct Buffers {
    memory: AlignedBuf,
    each: usize,
    stride: usize,
}

impl Buffers {
    fn new(slots: usize, each: usize) -> io::Result<Self> {
        let stride = each.next_multiple_of(ALIGN);
        let len = slots.checked_mul(stride).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { memory: AlignedBuf::large(len)?, each, stride })
    }

    fn range(&self, slot: u16, len: usize) -> std::ops::Range<usize> {
        let from = usize::from(slot) * self.stride;
        from..from + len.min(self.each)
    }
}

impl<'d> Pump<'d> {
    /// Takes `disk` into use on this thread, with `slots` buffers of `each` bytes.
    ///
    /// # Errors
    /// No memory, no ring, no threads.
    pub fn new(disk: &'d mut Disk, slots: usize, each: usize) -> io::Result<Self> {
        let buffers = Buffers::new(slots, each)?;
        let wake = EventFd::new(0)?;
        disk.attach(&wake)?;
        disk.want_wake(false);
        disk.lend(&[buffers.memory.seg(0, buffers.memory.len())]);
        Ok(Self { disk, wake, done: Vec::new(), in_flight: 0, buffers })
    }

    /// The disk.
    pub fn disk(&self) -> &Disk {
        self.disk
    }

    /// Requests submitted and not taken from [`Pump::wait`].
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The first `len` bytes of a slot's buffer; only meaningful while the slot has no request in flight.
    pub fn buffer(&self, slot: u16, len: usize) -> &[u8] {
        self.buffers.memory.bytes().get(self.buffers.range(slot, len)).unwrap_or_default()
    }

    /// The same, to fill it.
    pub fn buffer_mut(&mut self, slot: u16, len: usize) -> &mut [u8] {
        let range = self.buffers.range(slot, len);
        self.buffers.memory.bytes_mut().get_mut(range).unwrap_or_default()
    }

    /// Submits a request whose id is its slot. Reads and writes move `len` bytes, at most a buffer, between disk and buffer.
    pub fn submit(&mut self, slot: u16, op: Op, offset: u64, len: u64) {
        self.in_flight += 1;
        if matches!(op, Op::Read | Op::Write) {
            let len = usize::try_from(len).unwrap_or(usize::MAX).min(self.buffers.each);
            let segs = [self.buffers.memory.seg(self.buffers.range(slot, len).start, len)];
            self.disk.submit(&Request { id: slot, op, offset, len: len as u64, segs: &segs });
        } else {
            self.disk.submit(&Request { id: slot, op, offset, len, segs: &[] });
        }
    }

    /// Sends off what was submitted, and waits until at least one request is answered if any is in flight.
    ///
    /// # Errors
    /// When the eventfd can't be read.
    pub fn wait(&mut self) -> io::Result<std::vec::Drain<'_, Completion>> {
        self.disk.linger();
        self.disk.reap(&mut self.done);
        while self.done.is_empty() && self.in_flight > 0 {
            self.disk.want_wake(true);
            self.disk.reap(&mut self.done);
            if self.done.is_empty() {
                match self.wake.read() {
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                    Err(e) => return Err(e),
                }
            }
            self.disk.want_wake(false);
            self.disk.reap(&mut self.done);
        }
        self.in_flight = self.in_flight.saturating_sub(self.done.len());
        Ok(self.done.drain(..))
    }

    /// One request, waited for; nothing else may be in flight.
    ///
    /// # Errors
    /// The request's.
    pub fn one(&mut self, op: Op, offset: u64, len: u64) -> io::Result<()> {
        self.submit(0, op, offset, len);
        self.wait()?.next().map_or(Ok(()), |done| done.result)
    }
}

impl Drop for Pump<'_> {
    fn drop(&mut self) {
        // The kernel must be done with the buffers before they go.
        self.disk.detach();
    }
}
