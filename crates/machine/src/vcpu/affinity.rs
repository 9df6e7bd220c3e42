// SPDX-License-Identifier: Apache-2.0
//! Sets of host CPUs: those that the monitor may use, and those that a vCPU's thread is pinned to. Called by `build`, which
//! refuses what can't be had, and by each vCPU's thread as it starts.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;

/// Enough for 8,192 CPUs, the most that Linux can be built for on x86.
const WORDS: usize = 128;

/// A set of host CPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuSet([u64; WORDS]);

impl CpuSet {
    /// The CPUs that the calling thread may run on, by its affinity and its cpuset.
    ///
    /// # Errors
    /// What the kernel says.
    pub fn allowed() -> io::Result<Self> {
        let mut set = Self([0; WORDS]);
        // SAFETY: the kernel writes at most the size given into the words, which are plain bits; 0 is the calling thread.
        let rc = unsafe { libc::sched_getaffinity(0, size_of_val(&set.0), set.0.as_mut_ptr().cast()) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(set) }
    }

    /// These CPUs; those past the largest number there can be are left out.
    pub fn of(cpus: &RangeInclusive<u16>) -> Self {
        let mut set = Self([0; WORDS]);
        for cpu in cpus.clone() {
            if let Some(word) = set.0.get_mut(usize::from(cpu) / 64) {
                *word |= 1 << (cpu % 64);
            }
        }
        set
    }

    /// Those that the kernel lists as `0-3,8`; `None` for an empty list, and for what is none.
    pub fn listed(text: &str) -> Option<Self> {
        let mut set = Self([0; WORDS]);
        for range in text.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let part = Self::of(&(first.parse().ok()?..=last.parse().ok()?));
            set.0.iter_mut().zip(part.0).for_each(|(word, more)| *word |= more);
        }
        Some(set)
    }

    /// Whether `cpu` is in it.
    pub fn contains(&self, cpu: u16) -> bool {
        self.0.get(usize::from(cpu) / 64).is_some_and(|word| word >> (cpu % 64) & 1 != 0)
    }

    /// Has the calling thread run on these CPUs alone.
    ///
    /// # Errors
    /// When the kernel lets it run on none of them.
    pub fn pin_self(&self) -> io::Result<()> {
        // SAFETY: the set is read for the size given; 0 is the calling thread.
        let rc = unsafe { libc::sched_setaffinity(0, size_of_val(&self.0), self.0.as_ptr().cast()) };
        if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl fmt::Display for CpuSet {
    /// `0-3,8`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        let mut next = 0;
        while let Some(first) = (next..WORDS as u16 * 64).find(|cpu| self.contains(*cpu)) {
            let end = (first..).find(|cpu| !self.contains(*cpu)).unwrap_or(first);
            match end - 1 {
                last if last == first => write!(f, "{comma}{first}")?,
                last => write!(f, "{comma}{first}-{last}")?,
            }
            (comma, next) = (",", end);
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn sets_show_as_ranges() {
        let mut set = CpuSet::of(&(3..=70));
        assert_eq!(set.to_string(), "3-70");
        assert!(
            set.contains(3) && set.contains(70) && !set.contains(2) && !set.contains(71) && !set.contains(u16::MAX)
        );
        assert_eq!(CpuSet::listed("3-70"), Some(set.clone()));
        assert_eq!((CpuSet::listed(""), CpuSet::listed("a")), (None, None));
        assert_eq!(CpuSet::listed("0-1,3,64-70").unwrap().to_string(), "0-1,3,64-70");
        set.0[0] = 0b1011;
        assert_eq!(set.to_string(), "0-1,3,64-70");
        assert_eq!(CpuSet::of(&(8191..=u16::MAX)).to_string(), "8191");
        assert_eq!(CpuSet([0; WORDS]).to_string(), "");
    }

    #[test]
    fn a_thread_stays_where_it_is_pinned() {
        let allowed = CpuSet::allowed().unwrap();
        let last = (0..8192).rev().find(|cpu| allowed.contains(*cpu)).unwrap();
        let one = CpuSet::of(&(last..=last));
        let pinned = std::thread::spawn(move || one.pin_self().map(|()| (one, CpuSet::allowed().unwrap())));
        let (one, now) = pinned.join().unwrap().unwrap();
        assert_eq!(now, one);
        assert_eq!(CpuSet::allowed().unwrap(), allowed, "nobody else is");
    }
}
