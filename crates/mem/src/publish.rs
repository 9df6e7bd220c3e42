// SPDX-License-Identifier: Apache-2.0
//! One value that many threads read and hardly anybody replaces: readers take no lock and write no cache line that another
//! thread reads. `space` publishes its flat views through it; vCPU threads read them on each exit.
//!
//! Epochs, as in the kernel's RCU: a reader notes the epoch in a slot of its own for as long as it looks, a writer swaps the
//! pointer, moves the epoch on, and frees what it took out once no slot holds an older epoch. The barrier that this needs
//! between a reader's note and its look is the writer's to pay (`membarrier`), and only once for many updates. Chosen over
//! hazard pointers (a note for each pointer) and over generations cached by each reader (which needs `&mut` at each use).

use std::ptr;

#[cfg(loom)]
use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
#[cfg(loom)]
use loom::sync::{Arc, Mutex, MutexGuard};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::{Arc, Mutex, MutexGuard};

/// How many old values may wait before a writer pays for a barrier to free them.
const BATCH: usize = if cfg!(loom) { 1 } else { 32 };

/// What a reader says of itself: 0 outside, else the epoch at which it went in. A cache line of its own, and its neighbour.
#[repr(align(128))]
pub(crate) struct Slot {
    active: AtomicU64,
}

/// The epoch and all readers' slots.
#[repr(align(128))]
pub(crate) struct Domain {
    /// Read by every reader, moved by writers; never 0.
    epoch: AtomicU64,
    /// The kernel has no `membarrier` for us: readers pay for the barrier.
    fenced: AtomicBool,
    slots: Mutex<Vec<Arc<Slot>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind it is whole whenever a panic could be.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Domain {
    #[cfg(not(loom))]
    const fn new() -> Self {
        Self { epoch: AtomicU64::new(1), fenced: AtomicBool::new(false), slots: Mutex::new(Vec::new()) }
    }

    #[cfg(loom)]
    fn new() -> Self {
        Self { epoch: AtomicU64::new(1), fenced: AtomicBool::new(true), slots: Mutex::new(Vec::new()) }
    }

    /// A slot for one more reader, which is one thread at a time.
    pub(crate) fn register(&self) -> Arc<Slot> {
        let slot = Arc::new(Slot { active: AtomicU64::new(0) });
        lock(&self.slots).push(slot.clone());
        slot
    }

    /// The reader's side of the barrier: its note comes before its look.
    #[inline]
    fn light_barrier(&self) {
        if self.fenced.load(Ordering::Relaxed) {
            fence(Ordering::SeqCst);
        } else {
            std::sync::atomic::compiler_fence(Ordering::SeqCst);
        }
    }

    /// The writer's side: after it, each running reader has either shown its note or will see the new pointer.
    fn heavy_barrier(&self) {
        fence(Ordering::SeqCst);
        #[cfg(not(loom))]
        if !self.fenced.load(Ordering::Relaxed) {
            membarrier(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED);
        }
    }

    /// The oldest epoch that a reader is in; what was taken out at or before it can't be seen by anybody.
    fn oldest(&self) -> u64 {
        self.heavy_barrier();
        let active = |slot: &Arc<Slot>| slot.active.load(Ordering::Acquire);
        lock(&self.slots).iter().map(active).filter(|epoch| *epoch != 0).min().unwrap_or(u64::MAX)
    }
}

#[cfg(not(loom))]
fn membarrier(command: libc::c_int) -> bool {
    // SAFETY: the call takes numbers only and changes no memory of ours.
    unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) == 0 }
}

#[cfg(not(loom))]
type DomainRef = &'static Domain;
#[cfg(loom)]
type DomainRef = Arc<Domain>;

/// The process's readers.
#[cfg(not(loom))]
static DOMAIN: Domain = Domain::new();

/// A value behind an epoch-protected pointer.
pub struct Published<T: Send + Sync> {
    current: AtomicPtr<T>,
    /// What was taken out and when, oldest first. Its lock is the writers' own, too.
    retired: Mutex<Vec<(u64, Retired<T>)>>,
    domain: DomainRef,
}

/// A pointer from `Box::into_raw` that readers may still hold.
struct Retired<T>(*mut T);

// SAFETY: it owns a T, which is Send; the pointer is dereferenced only to free it.
unsafe impl<T: Send> Send for Retired<T> {}

impl<T: Send + Sync> Published<T> {
    #[cfg(not(loom))]
    /// Publishes `value`.
    #[must_use]
    pub fn new(value: T) -> Self {
        // Any thread may ask; the kernel needs it once for a process, and where it has no such thing readers must do it. No
        // reader of this value exists yet, and a reader of an earlier one has found the same answer.
        if !membarrier(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) {
            DOMAIN.fenced.store(true, Ordering::SeqCst);
        }
        Self::within(&DOMAIN, value)
    }

    fn within(domain: DomainRef, value: T) -> Self {
        Self { current: AtomicPtr::new(Box::into_raw(Box::new(value))), retired: Mutex::new(Vec::new()), domain }
    }

    /// Looks at the current value. `look` must not wait for anything: writers may wait for it.
    #[cfg(not(loom))]
    #[inline]
    pub fn read<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        crate::readers::with(|slot| self.read_in(slot, look))
    }

    /// [`Published::read`] by the reader whose slot is `slot`: of this domain, and used by this thread alone.
    #[inline]
    fn read_in<R>(&self, slot: &Slot, look: impl FnOnce(&T) -> R) -> R {
        let nested = slot.active.load(Ordering::Relaxed) != 0;
        if !nested {
            slot.active.store(self.domain.epoch.load(Ordering::Acquire), Ordering::Relaxed);
            self.domain.light_barrier();
        }
        let _leave = Leave { slot, nested };
        let current = self.current.load(Ordering::Acquire);
        // SAFETY: the pointer came from `Box::into_raw`, and is freed only by `reclaim`, `Drop` or a writer that found no
        // slot with an epoch below the one at which it was taken out. Ours is noted before the load (the barrier above, and
        // the writer's): if the load found a pointer that is taken out later, our note is seen; if our epoch is the later
        // one, the acquiring load of it has shown us the newer pointer. `_leave` keeps the note until `look` is done.
        look(unsafe { &*current })
    }

    /// Puts `value` in place of the current one. Readers see the one or the other.
    pub fn publish(&self, value: T) {
        let mut retired = lock(&self.retired);
        let old = self.current.swap(Box::into_raw(Box::new(value)), Ordering::AcqRel);
        let stamp = self.domain.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        retired.push((stamp, Retired(old)));
        if retired.len() >= BATCH {
            self.reclaim(&mut retired);
        }
    }

    /// Waits until nobody looks at anything older than the current value, and frees all that was taken out. Must not be
    /// called from inside `read`.
    pub fn synchronize(&self) {
        let mut retired = lock(&self.retired);
        while !retired.is_empty() {
            self.reclaim(&mut retired);
            if !retired.is_empty() {
                pause();
            }
        }
    }

    /// Frees what nobody can look at any more.
    fn reclaim(&self, retired: &mut Vec<(u64, Retired<T>)>) {
        let oldest = self.domain.oldest();
        for (_, old) in retired.extract_if(.., |(stamp, _)| *stamp <= oldest) {
            // SAFETY: from `Box::into_raw`, taken out of `current` once and out of the list here; whoever could look at it
            // entered before `stamp`, and no slot has such an epoch.
            drop(unsafe { Box::from_raw(old.0) });
        }
    }
}

fn pause() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::yield_now();
}

impl<T: Send + Sync> Drop for Published<T> {
    fn drop(&mut self) {
        let current = self.current.swap(ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: from `Box::into_raw`; nobody can be in `read`, which borrows self.
        drop(unsafe { Box::from_raw(current) });
        for (_, old) in lock(&self.retired).drain(..) {
            // SAFETY: as above; each pointer is in the list once.
            drop(unsafe { Box::from_raw(old.0) });
        }
    }
}

/// Takes the note back, also when `look` panics.
struct Leave<'a> {
    slot: &'a Slot,
    nested: bool,
}

impl Drop for Leave<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.nested {
            self.slot.active.store(0, Ordering::Release);
        }
    }
}

/// A slot for the calling thread, of the process's domain.
#[cfg(not(loom))]
pub(crate) fn register() -> Arc<Slot> {
    DOMAIN.register()
}

#[cfg(all(test, loom))]
#[allow(clippy::unwrap_used)]
mod model {
    use super::*;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    /// Poisons itself when dropped, so that a look at a freed value is seen; loom sees the race itself as well.
    struct Watched {
        number: u64,
        alive: Arc<AtomicUsize>,
        freed: Arc<AtomicBool>,
    }

    impl Watched {
        fn new(number: u64, alive: &Arc<AtomicUsize>) -> Self {
            alive.fetch_add(1, Ordering::SeqCst);
            Self { number, alive: alive.clone(), freed: Arc::new(AtomicBool::new(false)) }
        }
    }

    impl Drop for Watched {
        fn drop(&mut self) {
            self.freed.store(true, Ordering::SeqCst);
            self.alive.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_reader_sees_one_whole_value_that_is_not_freed() {
        loom::model(|| {
            let domain = Arc::new(Domain::new());
            let alive = Arc::new(AtomicUsize::new(0));
            let value = Arc::new(Published::within(domain.clone(), Watched::new(1, &alive)));
            let reader = {
                let (value, slot) = (value.clone(), domain.register());
                thread::spawn(move || {
                    let look = |v: &Watched| {
                        let freed = v.freed.clone();
                        assert!(!freed.load(Ordering::SeqCst), "freed before the look");
                        thread::yield_now();
                        assert!(!freed.load(Ordering::SeqCst), "freed under the look");
                        v.number
                    };
                    let first = value.read_in(&slot, look);
                    let second = value.read_in(&slot, look);
                    assert!(first <= second, "a reader never goes back");
                })
            };
            value.publish(Watched::new(2, &alive));
            reader.join().unwrap();
            value.synchronize();
            assert_eq!(alive.load(Ordering::SeqCst), 1, "only the current value is left");
            let slot = domain.register();
            assert_eq!(value.read_in(&slot, |v| v.number), 2);
        });
    }

    #[test]
    fn two_readers_and_two_updates() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let domain = Arc::new(Domain::new());
            let alive = Arc::new(AtomicUsize::new(0));
            let value = Arc::new(Published::within(domain.clone(), Watched::new(1, &alive)));
            let readers: Vec<_> = (0..2)
                .map(|_| {
                    let (value, slot) = (value.clone(), domain.register());
                    thread::spawn(move || {
                        value.read_in(&slot, |v| {
                            let freed = v.freed.clone();
                            thread::yield_now();
                            assert!(!freed.load(Ordering::SeqCst), "freed under the look");
                        });
                    })
                })
                .collect();
            value.publish(Watched::new(2, &alive));
            value.publish(Watched::new(3, &alive));
            readers.into_iter().for_each(|r| r.join().unwrap());
            value.synchronize();
            assert_eq!(alive.load(Ordering::SeqCst), 1);
        });
    }
}

#[cfg(all(test, not(loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// Two halves that are equal while the value lives.
    struct Pair(u64, u64, Arc<AtomicUsize>);

    impl Drop for Pair {
        fn drop(&mut self) {
            self.1 = !self.0;
            self.2.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn readers_see_whole_values_and_all_old_ones_are_freed() {
        let alive = Arc::new(AtomicUsize::new(0));
        let pair = |n| {
            alive.fetch_add(1, Ordering::SeqCst);
            Pair(n, n, alive.clone())
        };
        let value = Published::new(pair(0));
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut last = 0;
                    while !done.load(Ordering::Relaxed) {
                        let (a, b) = value.read(|p| {
                            assert!(value.read(|later| later.0) >= p.0, "a look within a look");
                            (p.0, p.1)
                        });
                        assert!(a == b && a >= last);
                        last = a;
                    }
                });
            }
            for n in 1..2000 {
                value.publish(pair(n));
                if n % 100 == 0 {
                    std::thread::yield_now();
                }
            }
            done.store(true, Ordering::Relaxed);
        });
        value.synchronize();
        assert_eq!(alive.load(Ordering::SeqCst), 1);
        drop(value);
        assert_eq!(alive.load(Ordering::SeqCst), 0);
    }
}
