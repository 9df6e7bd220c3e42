// SPDX-License-Identifier: Apache-2.0
//! Regions and how they lie in each other: RAM, ROM, devices, containers, aliases; priorities decide overlaps.
//!
//! A tree is plain data. `AddressSpace::change` hands out a copy, renders it, and puts it in place when all listeners agree.

use std::collections::BTreeMap;
use std::sync::Arc;

use base::{EventFd, Hva};

use super::SpaceError;

/// Names a region for the life of its tree; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub(super) u32);

/// The region that is the whole address space.
pub const ROOT: RegionId = RegionId(0);

/// What answers in a region where none of its children does.
#[derive(Clone, Debug)]
pub enum Kind<D> {
    /// Nothing: a place for other regions.
    Container,
    /// Memory of this process from the given address on.
    Ram(Hva),
    /// Memory of a device that is passed through: the guest reaches it as RAM, without leaving, but it is none. Nobody else
    /// copies there, and devices don't reach it.
    Direct(Hva),
    /// Memory that the guest can only read; the device answers writes, and reads of what no slot could hold, from the given
    /// byte of it on.
    Rom(Hva, D, u64),
    /// A device.
    Mmio(D),
    /// Another region, from the given offset in it on; in the guest's eyes read-only, if so said.
    Alias {
        /// What is seen here, too.
        of: RegionId,
        /// First byte of it that is.
        offset: u64,
        /// RAM seen through this alias can't be written.
        readonly: bool,
    },
}

/// A write that signals an eventfd instead of leaving the guest.
#[derive(Clone, Debug)]
pub struct Doorbell {
    /// Byte in its region.
    pub offset: u64,
    /// Only 32-bit writes of this value; `None` is any write.
    pub value: Option<u32>,
    /// What is signalled.
    pub fd: Arc<EventFd>,
}

#[derive(Clone, Debug)]
struct Child {
    at: u64,
    priority: i32,
    id: RegionId,
}

#[derive(Clone, Debug)]
pub(super) struct Region<D> {
    pub(super) size: u64,
    pub(super) kind: Kind<D>,
    /// Writes are noted, RAM only.
    pub(super) log: bool,
    pub(super) doorbells: Arc<[Doorbell]>,
    /// Highest priority first, of equal ones the later first.
    children: Vec<Child>,
    parent: Option<RegionId>,
}

/// All regions of an address space, in use or not.
#[derive(Clone, Debug)]
pub struct Tree<D> {
    regions: BTreeMap<RegionId, Region<D>>,
    next: u32,
    /// Something that can be seen may have changed.
    moved: bool,
}

impl<D: Clone> Tree<D> {
    /// An empty address space of `size` bytes.
    pub(super) fn new(size: u64) -> Self {
        let mut tree = Self { regions: BTreeMap::new(), next: 0, moved: false };
        tree.make(size, Kind::Container, Arc::new([]));
        tree
    }

    fn make(&mut self, size: u64, kind: Kind<D>, doorbells: Arc<[Doorbell]>) -> RegionId {
        let id = RegionId(self.next);
        self.next += 1;
        self.regions.insert(id, Region { size, kind, log: false, doorbells, children: Vec::new(), parent: None });
        id
    }

    /// Makes a region of `size` bytes that is nowhere yet.
    ///
    /// # Errors
    /// [`SpaceError::Unknown`] for an alias of nothing, [`SpaceError::Outside`] for an empty region.
    pub fn region(&mut self, size: u64, kind: Kind<D>) -> Result<RegionId, SpaceError> {
        self.device(size, kind, Vec::new())
    }

    /// The same for a device with doorbells.
    ///
    /// # Errors
    /// As [`Tree::region`].
    pub fn device(&mut self, size: u64, kind: Kind<D>, bells: Vec<Doorbell>) -> Result<RegionId, SpaceError> {
        if let Kind::Alias { of, .. } = kind {
            self.get(of)?;
        }
        if size == 0 {
            return Err(SpaceError::Outside { at: 0, size });
        }
        Ok(self.make(size, kind, bells.into()))
    }

    /// Whether anything was placed, taken out or marked since this was last asked.
    pub(super) fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }

    pub(super) fn get(&self, id: RegionId) -> Result<&Region<D>, SpaceError> {
        self.regions.get(&id).ok_or(SpaceError::Unknown(id.0))
    }

    fn get_mut(&mut self, id: RegionId) -> Result<&mut Region<D>, SpaceError> {
        self.regions.get_mut(&id).ok_or(SpaceError::Unknown(id.0))
    }

    /// The children of `id` as offset and region, the one that wins first.
    pub(super) fn children(&self, id: RegionId) -> impl Iterator<Item = (u64, RegionId)> + '_ {
        self.regions.get(&id).into_iter().flat_map(|r| r.children.iter().map(|c| (c.at, c.id)))
    }

    /// Puts `child` into `parent`, `at` bytes from its start. Where regions overlap the higher priority wins, of equal ones
    /// the later. What of it is past the parent's end is not seen.
    ///
    /// # Errors
    /// [`SpaceError::Placed`] if it is somewhere already, [`SpaceError::Cycle`] if it holds or shows its parent,
    /// [`SpaceError::Outside`] past the end of all addresses.
    pub fn place(&mut self, parent: RegionId, at: u64, priority: i32, child: RegionId) -> Result<(), SpaceError> {
        let region = self.get(child)?;
        if region.parent.is_some() || child == ROOT {
            return Err(SpaceError::Placed(child.0));
        }
        if at.checked_add(region.size).is_none() {
            return Err(SpaceError::Outside { at, size: region.size });
        }
        self.get(parent)?;
        if self.reaches(child, parent) {
            return Err(SpaceError::Cycle(child.0));
        }
        let children = &mut self.get_mut(parent)?.children;
        let before = children.partition_point(|c| c.priority > priority);
        children.insert(before, Child { at, priority, id: child });
        self.get_mut(child)?.parent = Some(parent);
        self.moved = true;
        Ok(())
    }

    /// Whether `from` is, holds or shows `to`.
    fn reaches(&self, from: RegionId, to: RegionId) -> bool {
        let mut seen = std::collections::BTreeSet::new();
        let mut open = vec![from];
        while let Some(id) = open.pop() {
            if id == to {
                return true;
            }
            if !seen.insert(id) {
                continue;
            }
            open.extend(self.children(id).map(|(_, child)| child));
            if let Some(Region { kind: Kind::Alias { of, .. }, .. }) = self.regions.get(&id) {
                open.push(*of);
            }
        }
        false
    }

    /// Takes `child` out of where it is; does nothing if it is nowhere.
    ///
    /// # Errors
    /// [`SpaceError::Unknown`].
    pub fn unplace(&mut self, child: RegionId) -> Result<(), SpaceError> {
        if let Some(parent) = self.get_mut(child)?.parent.take() {
            self.get_mut(parent)?.children.retain(|c| c.id != child);
            self.moved = true;
        }
        Ok(())
    }

    /// Forgets a region that is nowhere, is shown by no alias and holds nothing.
    ///
    /// # Errors
    /// [`SpaceError::Placed`] otherwise.
    pub fn forget(&mut self, id: RegionId) -> Result<(), SpaceError> {
        let region = self.get(id)?;
        let shown = |r: &Region<D>| matches!(r.kind, Kind::Alias { of, .. } if of == id);
        if id == ROOT || region.parent.is_some() || !region.children.is_empty() || self.regions.values().any(shown) {
            return Err(SpaceError::Placed(id.0));
        }
        self.regions.remove(&id);
        Ok(())
    }

    /// Writes to the RAM of `id` are noted from now on, or no longer.
    ///
    /// # Errors
    /// [`SpaceError::Unknown`].
    pub fn set_log(&mut self, id: RegionId, log: bool) -> Result<(), SpaceError> {
        self.get_mut(id)?.log = log;
        self.moved = true;
        Ok(())
    }
}
