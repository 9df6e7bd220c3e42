// SPDX-License-Identifier: Apache-2.0
//! The snapshot table: entries of varying length, each naming the L1 table that the disk had. Read and written by the offline
//! editor only; the engine leaves snapshots alone, since their clusters are protected by their refcounts.

use super::header::{MAX_L1_BYTES, Table};
use super::{FormatError, be16, be32, be64};

/// The most bytes that a snapshot table may have (QEMU's limit).
pub const MAX_TABLE_BYTES: u64 = 64 << 20;
/// Bytes of an entry before its extra data.
const FIXED: usize = 40;
/// Extra data written here: size of the machine's state, of the disk, instruction count.
const KNOWN_EXTRA: usize = 24;
/// The most extra data of an entry.
const MAX_EXTRA: usize = 1024;

/// One internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its L1 table; counts entries.
    pub l1: Table,
    /// Unique, by convention a number.
    pub id: String,
    /// What the user calls it.
    pub name: String,
    /// When it was taken, in seconds since 1970 …
    pub seconds: u32,
    /// … and nanoseconds.
    pub nanoseconds: u32,
    /// How long the guest had run, in nanoseconds.
    pub vm_clock: u64,
    /// Bytes of the saved machine, which lies behind the disk; 0 without one.
    pub vm_state: u64,
    /// Bytes of the disk then, if noted.
    pub disk_size: Option<u64>,
    /// Instructions executed, if counted.
    pub icount: Option<u64>,
    /// Extra data of later versions, kept as it is.
    pub unknown: Vec<u8>,
}

/// Reads `count` entries from `bytes` and says how many bytes they take.
///
/// # Errors
/// An entry that is cut off or out of the format's limits.
pub fn parse(bytes: &[u8], count: u32, cluster_bits: u32) -> Result<(Vec<Snapshot>, usize), FormatError> {
    let mut found = Vec::new();
    let mut at = 0;
    for number in 1..=count {
        let cut = || FormatError::Corrupt(format!("snapshot {number} of {count} is cut off"));
        let entry = bytes.get(at..).filter(|e| e.len() >= FIXED).ok_or_else(cut)?;
        let (id, name, extra) = (be16(entry, 12) as usize, be16(entry, 14) as usize, be32(entry, 36) as usize);
        if extra > MAX_EXTRA {
            return FormatError::corrupt(format!("snapshot {number} has {extra} bytes of extra data"));
        }
        let len = FIXED + extra + id + name;
        let entry = entry.get(..len).ok_or_else(cut)?;
        let l1 = Table { offset: be64(entry, 0), count: be32(entry, 8) };
        if u64::from(l1.count) * 8 > MAX_L1_BYTES
            || l1.offset & ((1 << cluster_bits) - 1) != 0
            || l1.offset > i64::MAX as u64 - MAX_L1_BYTES
        {
            return FormatError::corrupt(format!(
                "snapshot {number} has an L1 table of {} entries at {:#x}",
                l1.count, l1.offset
            ));
        }
        let text = |from: usize, len: usize| {
            let bytes = entry.get(from..from + len).unwrap_or_default();
            String::from_utf8(bytes.to_vec())
                .map_err(|_| FormatError::Unsupported(format!("the name of snapshot {number} is not UTF-8")))
        };
        let field = |from: usize| (extra >= from + 8 - FIXED).then(|| be64(entry, from));
        found.push(Snapshot {
            l1,
            id: text(FIXED + extra, id)?,
            name: text(FIXED + extra + id, name)?,
            seconds: be32(entry, 16),
            nanoseconds: be32(entry, 20),
            vm_clock: be64(entry, 24),
            vm_state: field(40).unwrap_or_else(|| u64::from(be32(entry, 32))),
            disk_size: field(48),
            icount: field(56).filter(|c| *c != u64::MAX),
            unknown: entry.get(FIXED + KNOWN_EXTRA..FIXED + extra).unwrap_or_default().to_vec(),
        });
        at = (at + len).next_multiple_of(8);
    }
    Ok((found, at))
}

/// The table's bytes.
pub fn serialize(snapshots: &[Snapshot]) -> Vec<u8> {
    let mut out = Vec::new();
    for s in snapshots {
        out.extend(s.l1.offset.to_be_bytes());
        out.extend(s.l1.count.to_be_bytes());
        out.extend((s.id.len() as u16).to_be_bytes());
        out.extend((s.name.len() as u16).to_be_bytes());
        out.extend(s.seconds.to_be_bytes());
        out.extend(s.nanoseconds.to_be_bytes());
        out.extend(s.vm_clock.to_be_bytes());
        out.extend(u32::try_from(s.vm_state).unwrap_or(0).to_be_bytes());
        let extra = if s.disk_size.is_some() { KNOWN_EXTRA + s.unknown.len() } else { 0 };
        out.extend((extra as u32).to_be_bytes());
        if let Some(size) = s.disk_size {
            out.extend(s.vm_state.to_be_bytes());
            out.extend(size.to_be_bytes());
            out.extend(s.icount.unwrap_or(u64::MAX).to_be_bytes());
            out.extend(&s.unknown);
        }
        out.extend(s.id.as_bytes());
        out.extend(s.name.as_bytes());
        out.resize(out.len().next_multiple_of(8), 0);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn snapshots() -> impl Strategy<Value = Vec<Snapshot>> {
        let one = ("[0-9]{1,3}", "\\PC{0,20}", any::<[u32; 4]>(), any::<bool>(), any::<bool>(), 0usize..9);
        prop::collection::vec(one, 0..6).prop_map(|all| {
            let make =
                |(id, name, n, sized, counted, unknown): (String, String, [u32; 4], bool, bool, usize)| Snapshot {
                    l1: Table { offset: u64::from(n[0]) << 16, count: n[1] >> 12 },
                    id,
                    name,
                    seconds: n[1],
                    nanoseconds: n[2],
                    vm_clock: u64::from(n[3]) << 9,
                    vm_state: u64::from(n[2]),
                    disk_size: sized.then(|| u64::from(n[0])),
                    icount: (sized && counted).then_some(7),
                    unknown: vec![n[3] as u8; if sized { unknown } else { 0 }],
                };
            all.into_iter().map(make).collect()
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(all in snapshots(), cut in 0usize..200, at in 0usize..500, value in any::<u8>()) {
            let mut bytes = serialize(&all);
            let (read, used) = parse(&bytes, all.len() as u32, 16).unwrap();
            prop_assert_eq!(&read, &all);
            prop_assert_eq!(used, bytes.len());
            if !bytes.is_empty() {
                let cut = bytes.len().saturating_sub(cut + 8);
                prop_assert!(parse(&bytes[..cut], all.len() as u32, 16).is_err());
                let at = at % bytes.len();
                bytes[at] = value;
                let _ = parse(&bytes, all.len() as u32, 16);
            }
        }
    }
}
