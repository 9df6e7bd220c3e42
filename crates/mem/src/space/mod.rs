// SPDX-License-Identifier: Apache-2.0
//! Address spaces, of memory and of I/O ports: a tree of regions, rendered to a flat view that readers search without a
//! lock, and listeners that get the difference whenever it changes.
//!
//! `machine` has one for memory and one for ports. Updates are serialised by one lock, held while listeners follow (they
//! make system calls): two updates in the wrong order would leave KVM with another machine than the view shows.

mod change;
mod flat;
mod index;
mod slots;
#[cfg(test)]
mod tests;
mod tree;

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use change::{Change, Listener};
pub use flat::{FlatDoorbell, FlatRange, FlatView, Target};
pub use slots::{MemorySlot, SlotSink, Slots};
pub use tree::{Doorbell, Kind, ROOT, RegionId, Tree};

use crate::publish::Published;

/// Why an address space was not changed. It is as it was.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    /// No such region.
    #[error("region {0} does not exist")]
    Unknown(u32),
    /// The region is in use where it is.
    #[error("region {0} is placed or in use already")]
    Placed(u32),
    /// The region would hold itself.
    #[error("region {0} would hold itself")]
    Cycle(u32),
    /// Not a range of addresses.
    #[error("{size} bytes at {at:#x} are no range of addresses")]
    Outside {
        /// First address.
        at: u64,
        /// Bytes.
        size: u64,
    },
    /// A listener could not follow.
    #[error("cannot {what} at {at:#x}: {source}")]
    Refused {
        /// What it tried.
        what: &'static str,
        /// Where.
        at: u64,
        /// The host's reason.
        source: io::Error,
    },
}

struct Writer<D> {
    tree: Tree<D>,
    /// What readers see.
    view: FlatView<D>,
    listeners: Vec<(ListenerId, Box<dyn Listener<D>>)>,
    next: u64,
}

/// Names a listener of an address space; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerId(u64);

/// An address space whose devices are known as `D`.
pub struct AddressSpace<D: Send + Sync> {
    writer: Mutex<Writer<D>>,
    view: Published<FlatView<D>>,
}

impl<D: Clone + Send + Sync> AddressSpace<D> {
    /// An empty one of `size` bytes.
    #[must_use]
    pub fn new(size: u64) -> Self {
        let tree = Tree::new(size);
        Self {
            writer: Mutex::new(Writer { tree, view: FlatView::empty(), listeners: Vec::new(), next: 0 }),
            view: Published::new(FlatView::empty()),
        }
    }

    fn writer(&self) -> MutexGuard<'_, Writer<D>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has `listener` follow from now on. It is told of all there is first.
    ///
    /// # Errors
    /// [`SpaceError::Refused`] when it can't; it is gone then.
    pub fn listen(&self, mut listener: Box<dyn Listener<D>>) -> Result<ListenerId, SpaceError> {
        let mut writer = self.writer();
        listener.apply(&Change::between(&FlatView::empty(), &writer.view))?;
        let id = ListenerId(writer.next);
        writer.next += 1;
        writer.listeners.push((id, listener));
        Ok(id)
    }

    /// Has a listener follow no longer. It is told that all there is has gone, and is gone itself, also when it refuses.
    ///
    /// # Errors
    /// [`SpaceError::Refused`] when it can't take back what it did.
    pub fn leave(&self, id: ListenerId) -> Result<(), SpaceError> {
        let mut writer = self.writer();
        let Some(at) = writer.listeners.iter().position(|(other, _)| *other == id) else { return Ok(()) };
        let (_, mut listener) = writer.listeners.remove(at);
        listener.apply(&Change::between(&writer.view, &FlatView::empty()))
    }

    /// Changes regions, all at once: `edit` works on the tree, then listeners get the difference, then readers see it. When
    /// `edit` or a listener fails, nothing has happened.
    ///
    /// # Errors
    /// What `edit` gives, and [`SpaceError::Refused`] of a listener.
    pub fn change<R>(&self, edit: impl FnOnce(&mut Tree<D>) -> Result<R, SpaceError>) -> Result<R, SpaceError> {
        let mut guard = self.writer();
        let writer = &mut *guard;
        let mut tree = writer.tree.clone();
        let result = edit(&mut tree)?;
        if tree.take_moved() {
            let new = FlatView::render(&tree);
            let change = Change::between(&writer.view, &new);
            if !change.is_empty() {
                follow(&mut writer.listeners, &change, || Change::between(&new, &writer.view))?;
                self.view.publish(new.clone());
                writer.view = new;
            }
        }
        writer.tree = tree;
        Ok(result)
    }

    /// Looks at the current view: no lock, nothing shared written. `look` must not wait for anything.
    #[inline]
    pub fn read<R>(&self, look: impl FnOnce(&FlatView<D>) -> R) -> R {
        self.view.read(look)
    }

    /// Waits until no reader looks at anything older than the current view: memory that was taken out may be unmapped then.
    pub fn synchronize(&self) {
        let _one_at_a_time = self.writer();
        self.view.synchronize();
    }
}

/// Tells all listeners of `change`; when one refuses, those before it are told the way `back`.
fn follow<'a, D: 'a>(
    listeners: &mut [(ListenerId, Box<dyn Listener<D>>)],
    change: &Change<'_, D>,
    back: impl FnOnce() -> Change<'a, D>,
) -> Result<(), SpaceError> {
    for at in 0..listeners.len() {
        let Some(Err(refused)) = listeners.get_mut(at).map(|(_, l)| l.apply(change)) else { continue };
        let back = back();
        for (_, listener) in listeners.iter_mut().take(at).rev() {
            // What was there a moment ago is put back; a host that refuses that has no way out to offer.
            let _ = listener.apply(&back);
        }
        return Err(refused);
    }
    Ok(())
}
