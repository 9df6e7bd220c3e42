// SPDX-License-Identifier: Apache-2.0
//! Many interrupts to four vCPUs of a real KVM while vectors, destinations and masks change at random, counted on both sides: by
//! whoever raises a line, and by the guest's handlers. Each event has to come exactly once. For KVM's I/O APIC (24 pins), for
//! our own over KVM's local APICs (64 pins, ends of interrupts by KVM_EXIT_IOAPIC_EOI), and for MSI-X (64 vectors).
//!
//! The guest is a handler of three instructions for each vector, in `guest`; its vCPUs are threads here, so are the devices and
//! the driver that moves and masks. `scripts/stress` is the long run. Skipped with a message where there is no /dev/kvm, and the
//! pins also where it interprets guests: such a KVM forgets ends of interrupts. The lab has a real one. The paravirtual controller
//! has a test of its own, without KVM: `crates/irq/tests/stress.rs`.

mod chips;
mod guest;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use chips::{Chip, Kernel, Messages, Split};
use guest::Guest;
use kvm::probe;

/// vCPUs.
const CPUS: u8 = 4;
/// Each line has three vectors of its own; any vCPU knows them all.
const VECTORS: u8 = 3;
const FIRST: u8 = 0x30;
/// Without any progress for so long a vCPU hangs or an interrupt was lost.
const PATIENCE: Duration = Duration::from_secs(120);

fn events() -> u64 {
    std::env::var("TARE_STRESS").ok().and_then(|n| n.parse().ok()).unwrap_or(2_000)
}

/// Small, fast, and the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// What both sides count.
struct Counts {
    /// Raised, by line.
    sent: Vec<AtomicU64>,
    /// Devices that have not raised all of theirs.
    busy: AtomicU64,
}

/// Raises `events` interrupts, each on a line of which the last one has ended.
fn device(chip: &dyn Chip, counts: &Counts, (first, events): (u8, u64)) {
    let (mut random, mut left) = (Random(u64::from(first) + 11), events);
    let lines = u64::from(chip.lines());
    let mut progress = Instant::now();
    while left > 0 {
        let line = (random.below(lines) as u8 & !1) | first;
        let Some(sent) = counts.sent.get(usize::from(line)) else { continue };
        let taken = chip.guest().taken(line);
        assert!(taken <= sent.load(SeqCst), "line {line}: {taken} interrupts of {sent:?}");
        if chip.ended(line) == sent.load(SeqCst) {
            // Counted first: who sees the counts equal knows that nothing is under way.
            sent.fetch_add(1, SeqCst);
            chip.raise(line);
            left -= 1;
            progress = Instant::now();
            // Where there is one CPU for all, the driver has its turn, too.
            thread::yield_now();
        } else {
            assert!(progress.elapsed() < PATIENCE, "{left} events left and no line is ready: {}", state(chip, counts));
            thread::yield_now();
        }
    }
    counts.busy.fetch_sub(1, SeqCst);
}

/// Which lines have not had all of their interrupts.
fn state(chip: &dyn Chip, counts: &Counts) -> String {
    let sent = counts.sent.iter().map(|sent| sent.load(SeqCst));
    let open = (0..).zip(sent).filter(|(line, sent)| chip.ended(*line) != *sent || chip.guest().taken(*line) != *sent);
    open.map(|(line, sent)| {
        format!("line {line}: {sent} sent, {} taken, {} ended; ", chip.guest().taken(line), chip.ended(line))
    })
    .collect()
}

/// Masks, vectors and destinations.
fn move_about(chip: &dyn Chip, counts: &Counts) -> u64 {
    let (mut random, mut moves) = (Random(99), 0);
    while counts.busy.load(SeqCst) > 0 {
        let line = random.below(u64::from(chip.lines())) as u8;
        chip.mask(line, true);
        let quiet = || counts.sent.get(usize::from(line)).is_some_and(|sent| sent.load(SeqCst) == chip.ended(line));
        if random.below(3) > 0 && (!chip.waits_for_ends() || quiet()) {
            let vector = FIRST + line * VECTORS + random.below(u64::from(VECTORS)) as u8;
            chip.aim(line, vector, random.below(u64::from(CPUS)) as u8);
            moves += 1;
        }
        thread::yield_now();
        chip.mask(line, false);
    }
    moves
}

/// Whether the ends of interrupts can be relied on.
fn ends_are_reported() -> bool {
    let is_hardware = probe::ring_zero(Path::new("/dev/kvm"), PATIENCE).is_ok_and(|timed| timed.is_hardware());
    if !is_hardware {
        println!("skipped: no /dev/kvm, or one that interprets guests");
    }
    is_hardware
}

fn stress(name: &str, chip: Option<Arc<dyn Chip>>) {
    let Some(chip) = chip else { return };
    let lines = chip.lines();
    let counts = Arc::new(Counts { sent: (0..lines).map(|_| AtomicU64::new(0)).collect(), busy: AtomicU64::new(2) });
    let vcpus: Vec<_> = (0..CPUS)
        .map(|cpu| {
            let chip = chip.clone();
            thread::spawn(move || guest::run(chip.guest(), cpu, &|vector| chip.end(vector)))
        })
        .collect();
    chip.guest().wait_until_ready(CPUS);
    for line in 0..lines {
        chip.aim(line, FIRST + line * VECTORS, line % CPUS);
        chip.mask(line, false);
    }
    let devices: Vec<_> = [0, 1]
        .map(|first| {
            let (chip, counts) = (chip.clone(), counts.clone());
            thread::spawn(move || device(&*chip, &counts, (first, events() / 2)))
        })
        .into();
    let watch = {
        let counts = counts.clone();
        // A device that gave up must not leave the driver waiting for it.
        move |devices: Vec<thread::JoinHandle<()>>| {
            let failed = devices.into_iter().filter_map(|device| device.join().err()).count();
            counts.busy.store(0, SeqCst);
            failed
        }
    };
    let watcher = thread::spawn(move || watch(devices));
    let moves = move_about(&*chip, &counts);
    let failed = watcher.join().unwrap_or(1);
    let begun = Instant::now();
    while failed == 0 && !state(&*chip, &counts).is_empty() && begun.elapsed() < PATIENCE {
        thread::yield_now();
    }
    let open = state(&*chip, &counts);
    chip.guest().end(&vcpus);
    let panicked = vcpus.into_iter().filter_map(|vcpu| vcpu.join().err()).count();
    let sent: u64 = counts.sent.iter().map(|sent| sent.load(SeqCst)).sum();
    let taken: u64 = (0..lines).map(|line| chip.guest().taken(line)).sum();
    println!("{name}: {sent} interrupts sent over {lines} lines, {taken} taken, {moves} moves of vector and vCPU");
    assert_eq!((failed, panicked, open.as_str()), (0, 0, ""), "{name}");
    assert_eq!((taken, chip.guest().stray()), (sent, 0), "{name}: sent and taken, and vectors of no line");
    assert!(moves > 0, "{name}: nothing ever moved");
}

#[test]
fn pins_of_kvms_controller() {
    if !ends_are_reported() {
        return;
    }
    stress("kernel", Guest::new(Kernel::PREPARE).map(|guest| Arc::new(Kernel::new(guest)) as Arc<dyn Chip>));
}

#[test]
fn pins_of_our_controller_over_kvms_local_apics() {
    if !ends_are_reported() {
        return;
    }
    stress("split", Guest::new(Split::PREPARE).map(|guest| Arc::new(Split::new(guest)) as Arc<dyn Chip>));
}

#[test]
fn message_vectors_with_their_table() {
    stress("msi", Guest::new(Messages::PREPARE).map(|guest| Arc::new(Messages::new(guest)) as Arc<dyn Chip>));
}
