// SPDX-License-Identifier: Apache-2.0
//! Opens an image as it was when an internal snapshot was taken: the snapshot's L1 table and size take the place of the
//! header's. For reading only. Called while a chain is opened.

use std::io;
use std::path::Path;

use crate::error::Error;
use crate::qcow2::format::header::{Header, Table};
use crate::qcow2::format::snapshot;
use crate::storage::Storage;

use super::side;

/// Turns `header` into that of the snapshot called `name`, by its id or else by its name. `at` is where the image is, the
/// name, and whether it was to be written.
///
/// # Errors
/// No such snapshot, one that is damaged, or what the host says.
pub fn look_back(
    storage: &mut Storage,
    header: &mut Header,
    file_len: u64,
    (path, name, writable): (&Path, &str, bool),
) -> Result<(), Error> {
    let refused = |what: String| Err(Error::Unsupported(path.to_owned(), what));
    if writable {
        return refused("a snapshot can only be read; open it readonly=on".into());
    }
    let failed = |source: io::Error| Error::Io { path: path.to_owned(), what: "read its snapshots", source };
    let Table { offset, count } = header.snapshots;
    let most = file_len.saturating_sub(offset).min(snapshot::MAX_TABLE_BYTES);
    // Most tables are small: the first cluster will do, or else as much as there may be.
    let mut all = Vec::new();
    for len in [most.min(header.cluster_size().max(65_536)), most].into_iter().filter(|_| count > 0) {
        let bytes = side::read(storage, offset, usize::try_from(len).unwrap_or(0), file_len).map_err(failed)?;
        match snapshot::parse(&bytes, count, header.cluster_bits) {
            Ok((found, _)) => {
                all = found;
                break;
            }
            Err(_) if len < most => {}
            Err(e) => return refused(e.to_string()),
        }
    }
    let found = all.iter().find(|s| s.id == name).or_else(|| all.iter().find(|s| s.name == name));
    let Some(found) = found else { return refused(format!("it has no snapshot {name:?}")) };
    header.l1 = found.l1;
    header.size = found.disk_size.unwrap_or(header.size);
    if header.layout().l1_entries(header.size) > u64::from(found.l1.count) {
        return refused(format!("its snapshot {name:?} is damaged: its L1 table is too short for its disk"));
    }
    if found.l1.offset.saturating_add(u64::from(found.l1.count) * 8) > file_len {
        return refused(format!("its snapshot {name:?} is damaged: its L1 table is past the end of the file"));
    }
    Ok(())
}
