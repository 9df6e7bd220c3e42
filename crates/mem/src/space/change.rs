// SPDX-License-Identifier: Apache-2.0
//! The difference between two flat views, and who wants to hear of it: KVM's slots and doorbells, and whatever else needs to
//! know where memory is (DMA maps, vhost's tables).

use super::SpaceError;
use super::flat::{FlatDoorbell, FlatRange, FlatView};

/// What changed from one view to the next.
pub struct Change<'a, D> {
    /// Ranges that are gone, lowest first.
    pub removed: Vec<&'a FlatRange<D>>,
    /// Ranges that are new. Those in neither list are as they were.
    pub added: Vec<&'a FlatRange<D>>,
    /// Ranges that are where they were and whose writes are noted now, or no longer; as they are now.
    pub relogged: Vec<&'a FlatRange<D>>,
    /// Doorbells that are gone.
    pub unbelled: Vec<&'a FlatDoorbell>,
    /// Doorbells that are new.
    pub belled: Vec<&'a FlatDoorbell>,
    /// Everything as it is now, for those who hand over whole tables.
    pub view: &'a FlatView<D>,
}

/// Follows an address space. Called with the space's writer lock held, one change at a time, on the thread that made it.
pub trait Listener<D>: Send {
    /// Follows one change: what is gone first, so that nothing overlaps on the way. A listener that fails has undone its
    /// own part.
    ///
    /// # Errors
    /// [`SpaceError::Refused`].
    fn apply(&mut self, change: &Change<'_, D>) -> Result<(), SpaceError>;
}

impl<'a, D: Clone> Change<'a, D> {
    /// The way from `old` to `new`.
    #[must_use]
    pub fn between(old: &'a FlatView<D>, new: &'a FlatView<D>) -> Self {
        let (mut removed, mut added, mut relogged) = (Vec::new(), Vec::new(), Vec::new());
        let (mut olds, mut news) = (old.ranges().iter().peekable(), new.ranges().iter().peekable());
        loop {
            match (olds.peek(), news.peek()) {
                (Some(a), Some(b)) if a.is_same(b) => {
                    if a.log != b.log {
                        relogged.push(*b);
                    }
                    olds.next();
                    news.next();
                }
                (Some(a), Some(b)) if a.start > b.start => {
                    added.push(*b);
                    news.next();
                }
                (Some(a), _) => {
                    removed.push(*a);
                    olds.next();
                }
                (None, Some(b)) => {
                    added.push(*b);
                    news.next();
                }
                (None, None) => break,
            }
        }
        let missing = |from: &'a [FlatDoorbell], other: &[FlatDoorbell]| -> Vec<&'a FlatDoorbell> {
            from.iter().filter(|bell| !other.iter().any(|o| o.is_same(bell))).collect()
        };
        let unbelled = missing(old.doorbells(), new.doorbells());
        let belled = missing(new.doorbells(), old.doorbells());
        Self { removed, added, relogged, unbelled, belled, view: new }
    }

    /// Whether nothing changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.removed.is_empty() && self.added.is_empty() && self.relogged.is_empty() && {
            self.unbelled.is_empty() && self.belled.is_empty()
        }
    }
}
