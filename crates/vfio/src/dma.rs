// SPDX-License-Identifier: Apache-2.0
//! What memory devices reach: a listener of the machine's address space that keeps a container's DMA maps equal to the
//! guest's RAM, at the guest's addresses.
//!
//! Called with the space's writer lock held. Memory that stays is never unmapped on the way, not for a moment: a device may
//! be writing there. Runs are cut at multiples of 1 GiB, so that the IOMMU can use its largest pages and a change at one
//! place leaves the others alone.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::Hva;
use mem::space::{Change, FlatRange, Listener, SpaceError, Target};

/// Pieces end at multiples of this.
const PIECE: u64 = 1 << 30;
const PAGE: u64 = 4096;

/// Where maps go.
pub trait DmaSink: Send {
    /// Lets devices reach `size` bytes at `host`, which are pinned, at address `iova`. Whole pages.
    ///
    /// # Errors
    /// The host's; nothing is mapped then.
    fn map(&mut self, iova: u64, host: Hva, size: u64) -> io::Result<()>;

    /// Takes a map away that was made with the same `iova` and `size`.
    ///
    /// # Errors
    /// The host's.
    fn unmap(&mut self, iova: u64, size: u64) -> io::Result<()>;
}

impl<S: DmaSink + ?Sized> DmaSink for Box<S> {
    fn map(&mut self, iova: u64, host: Hva, size: u64) -> io::Result<()> {
        (**self).map(iova, host, size)
    }

    fn unmap(&mut self, iova: u64, size: u64) -> io::Result<()> {
        (**self).unmap(iova, size)
    }
}

/// A map: from its address on, bytes and where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    size: u64,
    host: u64,
}

/// Follows an address space with DMA maps.
pub struct DmaMaps<S> {
    sink: S,
    maps: BTreeMap<u64, Piece>,
    mapped: Arc<AtomicU64>,
}

/// A step that was taken, for the way back.
enum Done {
    Mapped(u64),
    Unmapped(u64, Piece),
}

impl<S: DmaSink> DmaMaps<S> {
    /// Maps into `sink`, which has none yet.
    #[must_use]
    pub fn new(sink: S) -> Self {
        Self { sink, maps: BTreeMap::new(), mapped: Arc::default() }
    }

    /// Bytes that are mapped now; goes on counting when the maps are elsewhere. What a failed change mapped on its way
    /// stays in the count until the next one.
    #[must_use]
    pub fn mapped(&self) -> Arc<AtomicU64> {
        self.mapped.clone()
    }

    fn map(&mut self, iova: u64, piece: Piece, done: &mut Vec<Done>) -> io::Result<()> {
        self.sink.map(iova, Hva(piece.host), piece.size)?;
        self.maps.insert(iova, piece);
        self.mapped.fetch_add(piece.size, Ordering::Relaxed);
        done.push(Done::Mapped(iova));
        Ok(())
    }

    fn unmap(&mut self, iova: u64, done: &mut Vec<Done>) -> io::Result<()> {
        let Some(piece) = self.maps.get(&iova).copied() else { return Ok(()) };
        self.sink.unmap(iova, piece.size)?;
        self.maps.remove(&iova);
        self.mapped.fetch_sub(piece.size, Ordering::Relaxed);
        done.push(Done::Unmapped(iova, piece));
        Ok(())
    }

    fn undo(&mut self, done: Vec<Done>) {
        for step in done.into_iter().rev() {
            // Each is a state that the host had a moment ago; one that refuses it now has no way out to offer.
            match step {
                Done::Mapped(iova) => {
                    if let Some(piece) = self.maps.remove(&iova) {
                        let _ = self.sink.unmap(iova, piece.size);
                    }
                }
                Done::Unmapped(iova, piece) => {
                    if self.sink.map(iova, Hva(piece.host), piece.size).is_ok() {
                        self.maps.insert(iova, piece);
                    }
                }
            }
        }
    }

    /// The maps inside `start..end`.
    fn within(&self, start: u64, end: u64) -> Vec<(u64, Piece)> {
        self.maps.range(start..end).map(|(at, piece)| (*at, *piece)).collect()
    }
}

/// A run of RAM in whole pages: first address, bytes, host address.
fn pages<D>(range: &FlatRange<D>) -> Option<(u64, u64, u64)> {
    let Target::Ram(host) = range.target else { return None };
    let start = range.start.checked_next_multiple_of(PAGE)?;
    let size = (range.end() / PAGE * PAGE).checked_sub(start).filter(|size| *size > 0)?;
    let host = host.0 + (start - range.start);
    host.is_multiple_of(PAGE).then_some((start, size, host))
}

impl<D, S: DmaSink> Listener<D> for DmaMaps<S> {
    fn apply(&mut self, change: &Change<'_, D>) -> Result<(), SpaceError> {
        let mut done = Vec::new();
        let added: Vec<_> = change.added.iter().filter_map(|range| pages(range)).collect();
        let stays = |at: u64, piece: Piece| {
            added.iter().any(|(start, size, host)| {
                at.checked_sub(*start)
                    .is_some_and(|skip| piece.size <= *size && skip <= *size - piece.size && host + skip == piece.host)
            })
        };
        let gone = change.removed.iter().filter_map(|range| pages(range));
        let gone: Vec<(u64, Piece)> = gone.flat_map(|(start, size, _)| self.within(start, start + size)).collect();
        for (at, piece) in gone {
            if stays(at, piece) {
                continue;
            }
            if let Err(source) = self.unmap(at, &mut done) {
                self.undo(done);
                return Err(SpaceError::Refused { what: "take memory from devices", at, source });
            }
        }
        for (start, size, host) in &added {
            // What stayed is there already: the gaps between are mapped.
            let (mut at, end) = (*start, start + size);
            while at < end {
                if let Some(piece) = self.maps.get(&at) {
                    at += piece.size;
                    continue;
                }
                let next = self.maps.range(at..end).next().map_or(end, |(next, _)| *next);
                let size = next.min((at / PIECE + 1) * PIECE) - at;
                if let Err(source) = self.map(at, Piece { size, host: host + (at - start) }, &mut done) {
                    let mapped = self.mapped.load(Ordering::Relaxed);
                    self.undo(done);
                    self.mapped.store(mapped, Ordering::Relaxed);
                    return Err(SpaceError::Refused { what: "give memory to devices", at, source });
                }
                at += size;
            }
        }
        self.mapped.store(self.maps.values().map(|piece| piece.size).sum(), Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
