// SPDX-License-Identifier: Apache-2.0
//! Finding memory under contention: half of the threads look guest addresses up, half sync the dirty log of a slot again and
//! again, while regions come and go; with a lock for each listener, with one for all of them, and without a lock. One thread
//! does both in turn, and alone it only looks up.
//!
//! The model: QEMU held a lock for each KVM listener, since 6.1 one for all, over a slot's lookup and over a sync, which is
//! `KVM_GET_DIRTY_LOG` and a walk of the bitmap. A sync here copies and clears the bitmap of 1 GiB, all clean: no system call, no page to
//! protect, no TLB to flush, so it holds the lock for less than a monitor does. All three search the same view.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base::{Gpa, Hva};
use mem::space::{AddressSpace, FlatView, Kind, ROOT, RegionId, Tree};

use crate::steps::{instructions, pin};
use crate::{Options, promise};

/// Words of the bitmap of 1 GiB.
const BITMAP: usize = (1 << 30) / 4096 / 64;
/// Lookups between two syncs of a thread.
const BETWEEN: u64 = 1 << 16;
/// Addresses that a thread looks up, in turn; made beforehand, so that the time is the lookup's.
const ADDRESSES: usize = 1024;
/// How long each case is measured, how often, and how often until it was left alone by the rest of the machine. Who has a lock
/// gives it away late or early, so one window says little.
const WINDOW: Duration = Duration::from_millis(60);
const WINDOWS: usize = 9;
const TRIES: usize = 24;
/// A window counts as undisturbed while its threads waited less than this part of it for a CPU.
const WAITED: f64 = 0.1;
/// Bytes of a slot, and the stride of slots.
const SLOT: u64 = 1 << 20;

/// The three ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Locking {
    PerListener,
    Global,
    LockFree,
}

impl Locking {
    const ALL: [Self; 3] = [Self::PerListener, Self::Global, Self::LockFree];

    const fn name(self) -> &'static str {
        match self {
            Self::PerListener => "per-listener",
            Self::Global => "global",
            Self::LockFree => "lock-free",
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Two listeners' tables, as KVM has one for memory and one for system management mode, and the log that is synced.
struct Table {
    locking: Locking,
    space: AddressSpace<u32>,
    /// The region that comes and goes.
    moving: RegionId,
    views: [Mutex<FlatView<u32>>; 2],
    log: Vec<AtomicU64>,
    /// Where the log goes; a lock of its own, which lookups never take.
    harvest: Mutex<Vec<u64>>,
}

impl Table {
    fn new(locking: Locking, slots: u64) -> Option<Self> {
        let space = AddressSpace::new(1 << 52);
        let moving = space
            .change(|tree: &mut Tree<u32>| {
                for slot in 0..slots {
                    // A hole between any two, so that none merge.
                    let ram = tree.region(SLOT - 4096, Kind::Ram(Hva(0x7000_0000_0000 + slot * SLOT)))?;
                    tree.place(ROOT, slot * SLOT, 0, ram)?;
                }
                let moving = tree.region(4096, Kind::Mmio(1))?;
                tree.place(ROOT, 1 << 50, 0, moving)?;
                Ok(moving)
            })
            .ok()?;
        let view = || Mutex::new(space.read(Clone::clone));
        let views = [view(), view()];
        let log = (0..BITMAP).map(|_| AtomicU64::new(0)).collect();
        Some(Self { locking, space, moving, views, log, harvest: Mutex::new(vec![0; BITMAP]) })
    }

    #[inline]
    fn lookup(&self, listener: usize, at: Gpa) -> Option<Hva> {
        match self.locking {
            Locking::LockFree => self.space.read(|view| view.translate(at, 8)),
            Locking::Global => lock(&self.views[0]).translate(at, 8),
            Locking::PerListener => lock(&self.views[listener % 2]).translate(at, 8),
        }
    }

    fn sync(&self, listener: usize) {
        let harvest = || {
            let mut to = lock(&self.harvest);
            for (to, from) in to.iter_mut().zip(&self.log) {
                *to |= from.swap(0, Ordering::Relaxed);
            }
        };
        match self.locking {
            Locking::LockFree => harvest(),
            Locking::Global => {
                let _slots = lock(&self.views[0]);
                harvest();
            }
            Locking::PerListener => {
                let _slots = lock(&self.views[listener % 2]);
                harvest();
            }
        }
    }

    /// The region goes somewhere else.
    fn update(&self, turn: u64) {
        let moved = self.space.change(|tree| {
            tree.unplace(self.moving)?;
            tree.place(ROOT, (1 << 50) + turn % 2 * 4096, 0, self.moving)
        });
        black_box(moved.is_ok());
        if self.locking != Locking::LockFree {
            let fresh = self.space.read(Clone::clone);
            for view in &self.views {
                lock(view).clone_from(&fresh);
            }
        }
    }
}

/// Nanoseconds that the calling thread has waited for a CPU while it could have run.
fn waited() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_ascii_whitespace().nth(1).and_then(|ns| ns.parse().ok()).unwrap_or(0)
}

/// Lookups a second of the threads that look up, together, and whether each thread had the CPU that it wanted.
fn rate(table: &Table, threads: usize, slots: u64, contended: bool) -> (f64, bool) {
    let (stop, count, waits) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (stop, count, waits) = (&stop, &count, &waits);
            scope.spawn(move || {
                pin(thread);
                let (mut done, addresses, before) = (0u64, addresses(thread as u64, slots), waited());
                let syncs = contended && threads > 1 && thread % 2 == 1;
                while syncs && !stop.load(Ordering::Relaxed) {
                    table.sync(thread / 2);
                }
                while !stop.load(Ordering::Relaxed) {
                    for gpa in &addresses {
                        black_box(table.lookup(thread / 2, *gpa));
                    }
                    done += ADDRESSES as u64;
                    if contended && threads == 1 && done % BETWEEN == 0 {
                        table.sync(thread);
                    }
                }
                count.fetch_add(done, Ordering::Relaxed);
                waits.fetch_add(waited() - before, Ordering::Relaxed);
            });
        }
        let mut turn = 0;
        while begun.elapsed() < WINDOW {
            std::thread::sleep(Duration::from_millis(5));
            if contended {
                turn += 1;
                table.update(turn);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    let took = begun.elapsed();
    let waited = Duration::from_nanos(waits.load(Ordering::Relaxed)).as_secs_f64() / threads as f64;
    (count.load(Ordering::Relaxed) as f64 / took.as_secs_f64(), waited < took.as_secs_f64() * WAITED)
}

/// What a thread looks up.
fn addresses(thread: u64, slots: u64) -> Vec<Gpa> {
    let mut at = thread * 7919;
    let mut address = || {
        at = at.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Gpa((at >> 33) % slots * SLOT + (at >> 20) % 4096 * 8)
    };
    (0..ADDRESSES).map(|_| address()).collect()
}

/// The windows of one case: those that were undisturbed, and others that count only where there are none.
#[derive(Default)]
struct Windows {
    undisturbed: Vec<f64>,
    others: Vec<f64>,
}

impl Windows {
    /// The mean; `~` marks one that was disturbed.
    fn show(&self) -> String {
        format!("{:.2}{}", self.mean() / 1e6, if self.undisturbed.is_empty() { "~" } else { "" })
    }

    /// All that was looked up in all that time: a lock favours one side for a while, then the other.
    fn mean(&self) -> f64 {
        let all = if self.undisturbed.is_empty() { &self.others } else { &self.undisturbed };
        all.iter().sum::<f64>() / all.len() as f64
    }
}

/// Instructions of one lookup that finds no other thread in its way.
fn steps(table: &Table, slots: u64) -> Option<f64> {
    let addresses = addresses(0, slots);
    // The thread has its slot among readers from here on.
    black_box(table.lookup(0, addresses.first().copied()?));
    let looking = instructions(|| {
        for gpa in &addresses {
            black_box(table.lookup(0, *gpa));
        }
    })?;
    let empty = instructions(|| {
        for gpa in &addresses {
            black_box(*gpa);
        }
    })?;
    Some(looking.saturating_sub(empty) as f64 / ADDRESSES as f64)
}

const CASES: [(usize, bool); 7] = [(1, false), (1, true), (2, true), (4, true), (8, true), (16, true), (64, true)];

pub fn run(options: &Options) {
    println!(
        "\nlookups, millions a second (mean of windows in which no thread waited for a CPU; ~ where there were none): one\n\
         thread alone; then threads, of which half sync dirty logs, while regions move; and instructions of each, alone"
    );
    println!(
        "    {:>6} {:<13} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "slots", "locking", "alone", "1", "2", "4", "8", "16", "64", "instr."
    );
    for slots in [1u64, 32, 509, 32_764] {
        let tables: Vec<Table> = Locking::ALL.into_iter().filter_map(|locking| Table::new(locking, slots)).collect();
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let mut windows: Vec<[Windows; CASES.len()]> = tables.iter().map(|_| Default::default()).collect();
        for (case, (threads, contended)) in CASES.into_iter().enumerate() {
            let wanted = WINDOWS.max(options.rounds);
            for turn in 0..TRIES.max(wanted) {
                let enough = |of: &[Windows; CASES.len()]| of[case].undisturbed.len() >= wanted;
                let crowded = threads > cpus && turn >= wanted;
                if crowded || windows.iter().all(enough) {
                    break;
                }
                for (table, windows) in tables.iter().zip(&mut windows) {
                    let (rate, undisturbed) = rate(table, threads, slots, contended);
                    let windows = &mut windows[case];
                    if undisturbed { windows.undisturbed.push(rate) } else { windows.others.push(rate) }
                }
            }
        }
        for (table, windows) in tables.iter().zip(&windows) {
            let row: Vec<String> = windows.iter().map(|w| format!("{:>8}", w.show())).collect();
            let steps = steps(table, slots).map_or("-".to_owned(), |steps| format!("{steps:.1}"));
            println!("    {slots:>6} {:<13} {} {steps:>8}", table.locking.name(), row.join(" "));
        }
        if let [_, global, free] = windows.as_slice() {
            let ratio = |case: usize| free[case].mean() / global[case].mean();
            promise(&format!("lock-free beside global, 2 contending threads, {slots} slots"), ratio(2), 20.0);
            promise(&format!("lock-free beside global, alone, {slots} slots"), ratio(0), 1.0);
        }
    }
}
