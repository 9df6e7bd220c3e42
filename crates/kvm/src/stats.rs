// SPDX-License-Identifier: Apache-2.0
//! KVM's binary statistics descriptor (`KVM_GET_STATS_FD`, Linux 5.14): named counters of a VM or a vCPU, without debugfs.
//!
//! Read by the ledger at the end of a run, and by anyone who asks in between. A malformed block reads as no counters.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;

/// `KVM_GET_STATS_FD`: `_IO(0xae, 0xce)`.
const KVM_GET_STATS_FD: libc::c_ulong = 0xaece;
/// Bytes of `kvm_stats_header`: flags, name size, descriptor count, and three offsets.
const HEADER: usize = 24;
/// Bytes of `kvm_stats_desc` before its name.
const DESC: usize = 16;
/// More descriptors or longer names than any kernel has are not believed.
const LIMIT: usize = 4096;

/// How a counter moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatKind {
    /// Only grows.
    Cumulative,
    /// Goes up and down.
    Instant,
    /// Highest seen.
    Peak,
    /// A histogram with equal or doubling buckets.
    Histogram,
}

/// What a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatUnit {
    /// Events.
    None,
    /// Bytes, scaled by the exponent.
    Bytes,
    /// Seconds, scaled by the exponent (10^-9 for nanoseconds).
    Seconds,
    /// Cycles.
    Cycles,
    /// Yes or no.
    Boolean,
}

/// One counter and its value or buckets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatValue {
    /// The kernel's name for it.
    pub name: String,
    /// How it moves.
    pub kind: StatKind,
    /// What it counts.
    pub unit: StatUnit,
    /// One value, or the buckets of a histogram.
    pub values: Vec<u64>,
}

/// The statistics of one VM or vCPU.
pub struct Stats {
    file: File,
}

impl Stats {
    pub(crate) fn open(fd: &impl AsRawFd) -> Option<Self> {
        // SAFETY: the ioctl takes no argument.
        let raw = unsafe { libc::ioctl(fd.as_raw_fd(), KVM_GET_STATS_FD, 0) };
        if raw < 0 {
            return None;
        }
        // SAFETY: raw is a fresh descriptor that nobody else owns.
        Some(Self { file: unsafe { File::from_raw_fd(raw) } })
    }

    /// All counters now. Empty if the kernel's block can't be understood.
    #[must_use]
    pub fn read(&self) -> Vec<StatValue> {
        self.try_read().unwrap_or_default()
    }

    fn try_read(&self) -> Option<Vec<StatValue>> {
        let mut header = [0u8; HEADER];
        self.file.read_exact_at(&mut header, 0).ok()?;
        let name_size = u32_at(&header, 4)? as usize;
        let count = u32_at(&header, 8)? as usize;
        let (desc_at, data_at) = (u64::from(u32_at(&header, 16)?), u64::from(u32_at(&header, 20)?));
        if name_size > LIMIT || count > LIMIT {
            return None;
        }
        let mut descs = vec![0u8; (DESC + name_size) * count];
        self.file.read_exact_at(&mut descs, desc_at).ok()?;
        descs.chunks_exact(DESC + name_size).map(|desc| self.value(desc, data_at)).collect()
    }

    fn value(&self, desc: &[u8], data_at: u64) -> Option<StatValue> {
        let flags = u32_at(desc, 0)?;
        let size = usize::from(u16::from_le_bytes(desc.get(6..8)?.try_into().ok()?));
        let offset = u64::from(u32_at(desc, 8)?);
        let name = desc.get(DESC..)?;
        let name = name.split(|&b| b == 0).next().unwrap_or(name);
        let mut raw = vec![0u8; size.min(LIMIT) * 8];
        self.file.read_exact_at(&mut raw, data_at + offset).ok()?;
        Some(StatValue {
            name: String::from_utf8_lossy(name).into_owned(),
            kind: match flags & 0xf {
                0 => StatKind::Cumulative,
                1 => StatKind::Instant,
                2 => StatKind::Peak,
                _ => StatKind::Histogram,
            },
            unit: match (flags >> 4) & 0xf {
                1 => StatUnit::Bytes,
                2 => StatUnit::Seconds,
                3 => StatUnit::Cycles,
                4 => StatUnit::Boolean,
                _ => StatUnit::None,
            },
            values: raw.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect(),
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}
