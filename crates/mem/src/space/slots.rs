// SPDX-License-Identifier: Apache-2.0
//! Memory slots that follow a flat view: which number each run of memory has, and the calls that bring KVM from one view to
//! the next without two slots ever overlapping.
//!
//! Slots hold whole pages. What of a range is less, and memory whose host address does not agree with its guest address below the page, stays without one:
//! the guest's accesses leave to the monitor there, and find the memory in the view.

use std::collections::BTreeMap;
use std::io;

use base::{Gpa, Hva};

use super::SpaceError;
use super::change::{Change, Listener};
use super::flat::FlatRange;

const PAGE: u64 = 4096;

/// A run of memory as KVM is told of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySlot {
    /// First guest address, a multiple of a page.
    pub at: Gpa,
    /// Bytes, whole pages.
    pub size: u64,
    /// Where it is in this process.
    pub host: Hva,
    /// The guest's writes leave to the monitor.
    pub readonly: bool,
    /// Writes are noted.
    pub log: bool,
}

impl MemorySlot {
    fn of<D>(range: &FlatRange<D>) -> Option<Self> {
        let (host, writable) = range.memory()?;
        let start = range.start.checked_next_multiple_of(PAGE)?;
        let size = (range.end() / PAGE * PAGE).checked_sub(start).filter(|size| *size > 0)?;
        let host = Hva(host.0 + (start - range.start));
        host.0.is_multiple_of(PAGE).then_some(Self { at: Gpa(start), size, host, readonly: !writable, log: range.log })
    }
}

/// Who makes slots: KVM, or a test.
pub trait SlotSink: Send {
    /// Makes slot `number`, or switches the log of one that is there.
    ///
    /// # Errors
    /// The host's reason.
    fn set(&mut self, number: u32, slot: &MemorySlot) -> io::Result<()>;

    /// Takes slot `number` away.
    ///
    /// # Errors
    /// The host's reason.
    fn remove(&mut self, number: u32, slot: &MemorySlot) -> io::Result<()>;
}

/// The slots of one address space.
pub struct Slots<S> {
    sink: S,
    /// By first address.
    used: BTreeMap<u64, (u32, MemorySlot)>,
    /// Numbers that were used before, lowest last.
    free: Vec<u32>,
    /// First number never used.
    next: u32,
    /// How many numbers there are.
    limit: u32,
}

/// One call that was made, so that it can be unmade.
enum Done {
    Removed(u32, MemorySlot),
    Set(u32, MemorySlot),
    Logged(u32, MemorySlot),
}

impl<S: SlotSink> Slots<S> {
    /// No slots yet, and at most `limit`.
    #[must_use]
    pub const fn new(sink: S, limit: u32) -> Self {
        Self { sink, used: BTreeMap::new(), free: Vec::new(), next: 0, limit }
    }

    /// All slots with their numbers, lowest address first.
    pub fn all(&self) -> impl Iterator<Item = (u32, MemorySlot)> + '_ {
        self.used.values().copied()
    }

    fn number(&mut self) -> io::Result<u32> {
        if let Some(number) = self.free.pop() {
            return Ok(number);
        }
        if self.next >= self.limit {
            return Err(io::Error::other(format!("all {} memory slots of this host's KVM are in use", self.limit)));
        }
        self.next += 1;
        Ok(self.next - 1)
    }

    fn remove(&mut self, slot: &MemorySlot, done: &mut Vec<Done>) -> io::Result<()> {
        let Some((number, is)) = self.used.get(&slot.at.0).copied() else { return Ok(()) };
        self.sink.remove(number, &is)?;
        self.used.remove(&slot.at.0);
        self.free.push(number);
        done.push(Done::Removed(number, is));
        Ok(())
    }

    fn add(&mut self, slot: MemorySlot, done: &mut Vec<Done>) -> io::Result<()> {
        let number = self.number()?;
        if let Err(refused) = self.sink.set(number, &slot) {
            self.free.push(number);
            return Err(refused);
        }
        self.used.insert(slot.at.0, (number, slot));
        done.push(Done::Set(number, slot));
        Ok(())
    }

    fn relog(&mut self, slot: MemorySlot, done: &mut Vec<Done>) -> io::Result<()> {
        let Some((number, is)) = self.used.get_mut(&slot.at.0) else { return Ok(()) };
        self.sink.set(*number, &slot)?;
        done.push(Done::Logged(*number, std::mem::replace(is, slot)));
        Ok(())
    }

    /// Back to before `done`, the last call first.
    fn undo(&mut self, done: Vec<Done>) {
        for call in done.into_iter().rev() {
            // Each is a state that KVM had a moment ago; a host that refuses it now has no way out to offer.
            match call {
                Done::Removed(number, slot) => {
                    let _ = self.sink.set(number, &slot);
                    self.free.retain(|free| *free != number);
                    self.used.insert(slot.at.0, (number, slot));
                }
                Done::Set(number, slot) => {
                    let _ = self.sink.remove(number, &slot);
                    self.used.remove(&slot.at.0);
                    self.free.push(number);
                }
                Done::Logged(number, slot) => {
                    let _ = self.sink.set(number, &slot);
                    self.used.insert(slot.at.0, (number, slot));
                }
            }
        }
    }
}

impl<D, S: SlotSink> Listener<D> for Slots<S> {
    fn apply(&mut self, change: &Change<'_, D>) -> Result<(), SpaceError> {
        let mut done = Vec::new();
        let slots = |ranges: &[&FlatRange<D>]| -> Vec<MemorySlot> {
            ranges.iter().filter_map(|range| MemorySlot::of(range)).collect()
        };
        let steps = [
            ("take a memory slot away", slots(&change.removed), 0),
            ("switch the dirty log of a memory slot", slots(&change.relogged), 1),
            ("make a memory slot", slots(&change.added), 2),
        ];
        for (what, slots, step) in steps {
            for slot in slots {
                let tried = match step {
                    0 => self.remove(&slot, &mut done),
                    1 => self.relog(slot, &mut done),
                    _ => self.add(slot, &mut done),
                };
                if let Err(source) = tried {
                    self.undo(done);
                    return Err(SpaceError::Refused { what, at: slot.at.0, source });
                }
            }
        }
        Ok(())
    }
}
