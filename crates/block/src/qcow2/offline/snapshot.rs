// SPDX-License-Identifier: Apache-2.0
//! Internal snapshots: taking, going back to and removing them. Each is one [`Edit`]: the counts of all clusters of an L1 table
//! rise or fall, and the commit gives the active tables the bits that go with the new counts.

use std::time::{SystemTime, UNIX_EPOCH};

use super::super::format::header::{MAX_SNAPSHOTS, Table};
use super::super::format::snapshot::Snapshot;
use super::edit::Edit;
use super::image::numbers;
use super::{Error, Image};

impl Image {
    /// Takes a snapshot of the disk's present content, with the next free number as its id.
    ///
    /// # Errors
    /// A name that is taken (as id or as name), an image that can't have snapshots, see [`Error`].
    pub fn snapshot_create(&mut self, name: &str) -> Result<(), Error> {
        if self.layout().data_file {
            return Error::refused(&self.path, "has an external data file, so it can't have internal snapshots");
        }
        if name.is_empty() || name.len() > usize::from(u16::MAX) {
            return Error::refused(&self.path, "a snapshot needs a name of 1 to 65535 bytes");
        }
        let present = self.snapshots()?;
        if present.iter().any(|s| s.name == name) {
            return Error::refused(&self.path, format!("has a snapshot named {name:?} already"));
        }
        if present.len() >= MAX_SNAPSHOTS as usize {
            return Error::refused(&self.path, format!("has {MAX_SNAPSHOTS} snapshots, which is the limit"));
        }
        let last = present.iter().filter_map(|s| s.id.parse::<u64>().ok()).max().unwrap_or(0);
        let id = last.saturating_add(1).to_string();
        let mut edit = Edit::begin(self)?;
        let l1 = edit.l1.clone();
        edit.count_tree(&l1, true)?;
        let offset = edit.store(&numbers(&l1))?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let snapshot = Snapshot {
            l1: Table { offset, count: l1.len() as u32 },
            id,
            name: name.to_owned(),
            seconds: u32::try_from(now.as_secs()).unwrap_or(u32::MAX),
            nanoseconds: now.subsec_nanos(),
            vm_clock: 0,
            vm_state: 0,
            disk_size: Some(edit.header.size),
            icount: None,
            unknown: Vec::new(),
        };
        edit.snapshots.push(snapshot);
        edit.commit()
    }

    /// Makes the disk what it was when snapshot `name` (an id or a name) was taken, its size too.
    ///
    /// # Errors
    /// No such snapshot, or see [`Error`].
    pub fn snapshot_apply(&mut self, name: &str) -> Result<(), Error> {
        let index = self.find_snapshot(name)?;
        let snapshot = self.snapshots()?[index].clone();
        super::bitmap::refuse_enabled(self, "going back to a snapshot changes the disk behind them")?;
        let size = snapshot.disk_size.unwrap_or(self.header.size);
        let needed = self.layout().l1_entries(size);
        if needed > u64::from(snapshot.l1.count) {
            return Error::refused(
                &self.path,
                format!("snapshot {name:?} is damaged: its L1 table is too short for its disk"),
            );
        }
        let mut edit = Edit::begin(self)?;
        let l1 = edit.image.read_numbers(snapshot.l1.offset, u64::from(snapshot.l1.count))?;
        let present = std::mem::replace(&mut edit.l1, l1.clone());
        edit.count_tree(&l1, true)?;
        edit.count_tree(&present, false)?;
        edit.header.size = size;
        if edit.l1.is_empty() {
            edit.l1.push(0);
        }
        edit.commit()
    }

    /// Removes snapshot `name` (an id or a name); what only it had becomes free.
    ///
    /// # Errors
    /// No such snapshot, or see [`Error`].
    pub fn snapshot_delete(&mut self, name: &str) -> Result<(), Error> {
        let index = self.find_snapshot(name)?;
        let mut edit = Edit::begin(self)?;
        let snapshot = edit.snapshots.remove(index);
        let l1 = edit.image.read_numbers(snapshot.l1.offset, u64::from(snapshot.l1.count))?;
        edit.count_tree(&l1, false)?;
        edit.release(snapshot.l1.offset, u64::from(snapshot.l1.count) * 8);
        edit.commit()
    }

    /// The place of a snapshot by its id, or else by its name.
    fn find_snapshot(&self, name: &str) -> Result<usize, Error> {
        let all = self.snapshots()?;
        let found = all.iter().position(|s| s.id == name).or_else(|| all.iter().position(|s| s.name == name));
        found.map_or_else(|| Error::refused(&self.path, format!("has no snapshot {name:?}")), Ok)
    }
}
