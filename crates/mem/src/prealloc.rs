// SPDX-License-Identifier: Apache-2.0
//! Making guest memory exist before the guest wants it: pages touched or populated, by one thread or by many that take
//! pieces from one counter, before the guest starts or while it runs.
//!
//! `machine` makes one [`Prealloc`] and decides who works on it: threads of its own, vCPU threads, or one in the background.

use std::arch::asm;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::ram::GuestRam;

/// What a thread takes at a time: large enough that threads seldom meet, small enough that all end together.
const PIECE: u64 = 64 << 20;
/// Least stride of touching; a huge page is touched more often than it has to be, which costs next to nothing.
const PAGE: usize = 4096;

/// How a piece is made to exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A write to each page, each a fault: what monitors did first.
    Touch,
    /// One `madvise(MADV_POPULATE_WRITE)`, and touching on kernels before 5.14.
    Populate,
}

/// Says whether the host has room for that many bytes more.
pub type Room = Box<dyn Fn(u64) -> io::Result<()> + Send + Sync>;

/// Memory that is being made ready. Shared by those who work on it.
pub struct Prealloc {
    /// Keeps the runs mapped.
    _ram: GuestRam,
    way: Way,
    /// Asked before each piece.
    room: Option<Room>,
    /// Address here and size of each run.
    runs: Vec<(u64, u64)>,
    total: u64,
    /// First byte of all runs, one after another, that nobody has taken yet.
    next: AtomicU64,
    done: AtomicU64,
    stop: AtomicBool,
    failed: Mutex<Option<io::Error>>,
}

impl Prealloc {
    /// All of `ram`, not yet begun.
    #[must_use]
    pub fn new(ram: &GuestRam, way: Way) -> Self {
        Self::of(ram, ram.regions().map(|(_, len, host)| (host.0, len)).collect(), way)
    }

    /// The first `len` bytes of what can be plugged of `ram`, not yet begun: all of it where there is less.
    #[must_use]
    pub fn of_hot(ram: &GuestRam, len: u64, way: Way) -> Self {
        Self::of(ram, ram.hot().map(|hot| (hot.host().0, len.min(hot.size()))).into_iter().collect(), way)
    }

    fn of(ram: &GuestRam, runs: Vec<(u64, u64)>, way: Way) -> Self {
        Self {
            _ram: ram.clone(),
            way,
            room: None,
            total: runs.iter().map(|(_, len)| len).sum(),
            runs,
            next: AtomicU64::new(0),
            done: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            failed: Mutex::new(None),
        }
    }

    /// The same, but whoever works on it asks `room` before each piece, and stops with its error: a limit that is met in a page
    /// fault has the kernel kill the process, without a word.
    #[must_use]
    pub fn asking(self, room: Room) -> Self {
        Self { room: Some(room), ..self }
    }

    /// Bytes in all.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Bytes that exist so far, by this.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Whoever works on it stops after the piece at hand.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Works until nothing is left to take. Any number of threads may, also while the guest runs: what memory holds does not
    /// change.
    pub fn work(&self) {
        self.work_telling(|_| ());
    }

    /// The same for one thread alone, which tells after each piece how many bytes exist, from the first one on.
    pub fn work_telling(&self, mut tell: impl FnMut(u64)) {
        while !self.stop.load(Ordering::Relaxed) {
            let from = self.next.fetch_add(PIECE, Ordering::Relaxed);
            if from >= self.total {
                return;
            }
            let len = PIECE.min(self.total - from);
            let room = self.room.as_ref().map_or(Ok(()), |room| room(len));
            if let Err(e) = room.and_then(|()| self.piece(from, len)) {
                self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                return self.stop();
            }
            tell(self.done());
        }
    }

    /// How it went, once nobody works on it any more.
    ///
    /// # Errors
    /// Why the host gave no more.
    pub fn result(&self) -> io::Result<()> {
        match self.failed.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(e) => Err(e),
            None => Ok(()),
        }
    }

    /// Makes `len` bytes from `from` on exist, counted over all runs.
    fn piece(&self, mut from: u64, mut len: u64) -> io::Result<()> {
        for &(host, size) in &self.runs {
            if from >= size {
                from -= size;
                continue;
            }
            let part = len.min(size - from);
            self.part((host + from) as *mut u8, part as usize)?;
            self.done.fetch_add(part, Ordering::Relaxed);
            (from, len) = (0, len - part);
            if len == 0 {
                break;
            }
        }
        Ok(())
    }

    fn part(&self, at: *mut u8, len: usize) -> io::Result<()> {
        if self.way == Way::Populate {
            // SAFETY: the range is part of a run of `_ram`, which is mapped while self lives; contents stay as they are.
            let rc = unsafe { libc::madvise(at.cast(), len, libc::MADV_POPULATE_WRITE) };
            if rc == 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            // Old kernels know no such advice; then each page is written to.
            if error.raw_os_error() != Some(libc::EINVAL) {
                return Err(error);
            }
        }
        for offset in (0..len).step_by(PAGE) {
            // SAFETY: inside the range, as above. One atomic instruction, since the guest may be running; written out, since
            // a compiler may leave out an `or` with nothing.
            unsafe {
                let byte = at.add(offset);
                asm!("lock or byte ptr [{byte}], 0", byte = in(reg) byte, options(nostack));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use base::Gpa;

    /// Pages of `ram` that exist.
    fn resident(ram: &GuestRam) -> u64 {
        ram.regions()
            .map(|(_, len, host)| {
                let mut pages = vec![0u8; (len / 4096) as usize];
                // SAFETY: the range is mapped, and there is a byte for each of its pages.
                let rc = unsafe { libc::mincore(host.0 as *mut libc::c_void, len as usize, pages.as_mut_ptr()) };
                assert_eq!(rc, 0);
                pages.iter().filter(|p| **p & 1 != 0).count() as u64
            })
            .sum()
    }

    #[test]
    fn every_page_exists_and_holds_what_it_held() {
        for way in [Way::Touch, Way::Populate] {
            let ram = GuestRam::anonymous(&[(Gpa(0), 66 << 20), (Gpa(1 << 32), 3 << 20)]).unwrap();
            ram.write(Gpa(0x1234), 0xabcd_u16).unwrap();
            let work = Prealloc::new(&ram, way);
            std::thread::scope(|scope| {
                for _ in 0..3 {
                    scope.spawn(|| work.work());
                }
            });
            work.result().unwrap();
            assert_eq!((work.done(), work.total()), (69 << 20, 69 << 20));
            assert_eq!(resident(&ram), (69 << 20) / 4096, "{way:?}");
            assert_eq!(ram.read::<u16>(Gpa(0x1234)), Some(0xabcd));
        }
    }

    #[test]
    fn what_can_be_plugged_becomes_ready_from_its_start_on() {
        let behind = base::mmap::Mmap::anonymous(256 << 20).unwrap();
        let hot = crate::Hot::new(Gpa(1 << 33), behind, 2 << 20, false).unwrap();
        let ram = GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap().with_hot(hot).unwrap();
        let (work, mut told) = (Prealloc::of_hot(&ram, 150 << 20, Way::Populate), Vec::new());
        work.work_telling(|done| told.push(done >> 20));
        work.result().unwrap();
        assert_eq!((told, work.total() >> 20), (vec![64, 128, 150], 150));
        assert_eq!(Prealloc::of_hot(&ram, 1 << 40, Way::Touch).total(), 256 << 20);
    }

    #[test]
    fn a_limit_that_is_met_halfway_ends_it_with_its_reason() {
        let ram = GuestRam::anonymous(&[(Gpa(0), 256 << 20)]).unwrap();
        let left = AtomicU64::new(130 << 20);
        let room = move |len: u64| {
            let less = |left: u64| left.checked_sub(len);
            let took = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            took.map(drop).map_err(|left| io::Error::other(format!("{} MiB are left", left >> 20)))
        };
        let work = Prealloc::new(&ram, Way::Populate).asking(Box::new(room));
        std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(|| work.work()))));
        assert_eq!(work.result().unwrap_err().to_string(), "2 MiB are left");
        assert_eq!(
            (work.done(), resident(&ram)),
            (128 << 20, (128 << 20) / 4096),
            "what is there stays, and no more comes"
        );
    }

    #[test]
    fn what_is_stopped_ends_early() {
        let ram = GuestRam::anonymous(&[(Gpa(0), 1 << 20)]).unwrap();
        let work = Prealloc::new(&ram, Way::Populate);
        work.stop();
        work.work();
        assert_eq!(work.done(), 0);
    }
}
