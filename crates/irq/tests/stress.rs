// SPDX-License-Identifier: Apache-2.0
//! Many interrupts over 64 lines to four CPUs at once, while vectors, destinations and masks change at random, counted on both
//! sides: by the controller that takes events, and by the drivers that see them. CPUs, devices and the doorbell are threads.
//!
//! `TARE_STRESS=10000000 cargo test -p irq --release --test stress` is the long run; without it there are fewer.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used)]

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;

use irq::vioapic::{LINES, Mode, OwnPages, Pages, reg};
use irq::{IoApic, MsiMessage, Vioapic};

const CPUS: usize = 4;
/// Each line has three vectors of its own; any CPU knows them all.
const VECTORS: u64 = 3;
const FIRST: u64 = 0x30;
/// Lines from this one on are level-triggered, in the paravirtual controller; in the I/O APIC all are.
const LEVELS: u8 = 32;

fn events() -> u64 {
    std::env::var("TARE_STRESS").ok().and_then(|n| n.parse().ok()).unwrap_or(40_000)
}

/// Small, fast, and the same each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

/// The local APICs: a bit for each vector that waits.
#[derive(Default)]
struct Apics([[AtomicU64; 4]; CPUS]);

impl Apics {
    fn send(&self, message: MsiMessage) -> bool {
        let (cpu, vector) = ((message.address >> 12 & 0xff) as usize, (message.data & 0xff) as usize);
        let Some(apic) = self.0.get(cpu) else { return false };
        apic[vector / 64].fetch_or(1 << (vector % 64), SeqCst);
        true
    }

    fn take(&self, cpu: usize) -> Option<u64> {
        self.0[cpu].iter().enumerate().find_map(|(index, word)| {
            let bits = word.load(SeqCst);
            if bits == 0 {
                return None;
            }
            let bit = bits.trailing_zeros();
            word.fetch_and(!(1 << bit), SeqCst);
            Some(index as u64 * 64 + u64::from(bit))
        })
    }

    fn idle(&self) -> bool {
        self.0.iter().flatten().all(|word| word.load(SeqCst) == 0)
    }
}

/// A controller with its guest's driver.
trait Driven: Send + Sync {
    /// A device has something to say on `line`; whether that is an interrupt of its own.
    fn raise(&self, line: u8);
    /// The device behind a level-triggered `line` has said everything.
    fn quiet(&self, line: u8, still: &dyn Fn() -> bool);
    /// The handler of `vector` on some CPU, under the line's lock.
    fn handle(&self, line: u8, vector: u64, serve: &mut dyn FnMut());
    /// Masks or unmasks, under the line's lock.
    fn mask(&self, line: u8, masked: bool);
    /// Another vector and destination, under the line's lock.
    fn aim(&self, line: u8, vector: u64, cpu: u64);
    /// What another thread has to do for it meanwhile.
    fn turn(&self) {}
    /// Whether nothing wants service.
    fn idle(&self) -> bool;
}

/// One line's device and what its driver saw.
#[derive(Default)]
struct Device {
    lock: Mutex<()>,
    posted: AtomicU64,
    seen: AtomicU64,
    asserted: AtomicBool,
    served: AtomicU64,
}

struct Paravirtual {
    chip: Vioapic<OwnPages>,
    mode: Mode,
    rung: AtomicBool,
}

impl Paravirtual {
    fn irr(&self) -> u64 {
        let registers = self.chip.pages().registers();
        registers.get(reg::LEVEL) | (registers.get(reg::EVENT) ^ self.chip.pages().guest().ack.load(SeqCst))
    }

    fn unmask(&self, bit: u64) {
        if self.mode != Mode::Pv {
            return self.chip.write(reg::UNMASK, &bit.to_le_bytes());
        }
        self.chip.pages().guest().unmask.fetch_or(bit, SeqCst);
        if self.irr() & bit != 0 {
            self.rung.store(true, SeqCst);
        }
    }
}

impl Driven for Paravirtual {
    fn raise(&self, line: u8) {
        if line >= LEVELS { self.chip.assert(line) } else { self.chip.latch(1 << line) }
    }

    fn quiet(&self, line: u8, still: &dyn Fn() -> bool) {
        self.chip.release(line, still);
    }

    fn handle(&self, line: u8, _: u64, serve: &mut dyn FnMut()) {
        let (bit, guest) = (1u64 << line, self.chip.pages().guest());
        if self.mode == Mode::Pv {
            if guest.mask.load(SeqCst) & bit != 0 {
                return;
            }
            if self.irr() & bit == 0 {
                return self.unmask(bit);
            }
            guest.mask.fetch_or(bit, SeqCst);
            if (self.chip.pages().registers().get(reg::EVENT) ^ guest.ack.load(SeqCst)) & bit != 0 {
                guest.ack.fetch_xor(bit, SeqCst);
            }
        } else {
            let shown = |at| {
                let mut word = [0; 8];
                self.chip.read(at, &mut word);
                u64::from_le_bytes(word) & bit != 0
            };
            if shown(reg::MASK) {
                return;
            }
            if !shown(reg::ISR) {
                return self.unmask(bit);
            }
            self.chip.write(reg::MASK, &bit.to_le_bytes());
            self.chip.write(reg::ACK, &bit.to_le_bytes());
        }
        serve();
        self.unmask(bit);
    }

    fn mask(&self, line: u8, masked: bool) {
        if masked { self.chip.write(reg::MASK, &(1u64 << line).to_le_bytes()) } else { self.unmask(1 << line) }
    }

    fn aim(&self, line: u8, vector: u64, cpu: u64) {
        self.chip.write(reg::LINE + 8 * u64::from(line), &(cpu << 32 | vector).to_le_bytes());
    }

    fn turn(&self) {
        if self.rung.swap(false, SeqCst) {
            self.chip.doorbell();
        }
    }

    fn idle(&self) -> bool {
        self.irr() == 0 && !self.rung.load(SeqCst)
    }
}

/// The I/O APIC as a guest drives one without directed EOIs; it changes vectors only between an end and the next interrupt.
struct Pins {
    chip: Mutex<(IoApic, Vec<u64>)>,
    apics: Arc<Apics>,
    moves: [AtomicU64; LINES as usize],
}

impl Pins {
    fn write(&self, line: u8, entry: impl FnOnce(&mut u64)) {
        let mut chip = self.chip.lock().unwrap();
        let (apic, entries) = &mut *chip;
        let value = &mut entries[usize::from(line)];
        entry(value);
        // The upper half first, masked meanwhile, as Linux does it.
        for (register, half) in [(0x11, *value >> 32), (0x10, *value & 0xffff_ffff)] {
            apic.write(0, &[register + 2 * line]);
            if let Some(message) = apic.write(0x10, &(half as u32).to_le_bytes()).send {
                assert!(self.apics.send(message));
            }
        }
    }
}

impl Driven for Pins {
    fn raise(&self, line: u8) {
        let sent = self.chip.lock().unwrap().0.set_line(line, true);
        sent.map(|message| assert!(self.apics.send(message))).unwrap_or_default();
    }

    fn quiet(&self, line: u8, still: &dyn Fn() -> bool) {
        let mut chip = self.chip.lock().unwrap();
        if !still() {
            assert_eq!(chip.0.set_line(line, false), None);
        }
    }

    fn handle(&self, line: u8, vector: u64, serve: &mut dyn FnMut()) {
        serve();
        let mut again = Vec::new();
        self.chip.lock().unwrap().0.end(vector as u8, |_, send| again.extend(send));
        again.into_iter().for_each(|message| assert!(self.apics.send(message)));
        let wanted = self.moves[usize::from(line)].swap(0, SeqCst);
        if wanted == 0 {
            return;
        }
        // Masked first, so that nothing is sent between the look and the change; the line's lock keeps others from the mask.
        let mut masked = 0;
        self.write(line, |entry| masked = std::mem::replace(entry, *entry | 0x1_0000) & 0x1_0000);
        let waits = {
            let mut chip = self.chip.lock().unwrap();
            chip.0.write(0, &[0x10 + 2 * line]);
            let mut low = [0; 4];
            chip.0.read(0x10, &mut low);
            low[1] & 1 << 6 != 0
        };
        self.write(line, |entry| {
            let aimed = if waits { *entry & !0x1_0000 } else { (*entry & 0x8000) | (wanted & !(1 << 63)) };
            *entry = aimed | masked;
        });
    }

    fn mask(&self, line: u8, masked: bool) {
        self.write(line, |entry| *entry = (*entry & !0x1_0000) | u64::from(masked) << 16);
    }

    fn aim(&self, line: u8, vector: u64, cpu: u64) {
        self.moves[usize::from(line)].store(1 << 63 | cpu << 56 | vector, SeqCst);
    }

    fn idle(&self) -> bool {
        let mut chip = self.chip.lock().unwrap();
        (0..LINES).all(|line| {
            chip.0.write(0, &[0x10 + 2 * line]);
            let mut low = [0; 4];
            chip.0.read(0x10, &mut low);
            low[1] & 1 << 6 == 0
        })
    }
}

fn stress(driven: Arc<dyn Driven>, apics: Arc<Apics>, is_level: fn(u8) -> bool) -> (u64, Vec<u64>) {
    let devices: Arc<Vec<Device>> = Arc::new((0..LINES).map(|_| Device::default()).collect());
    let over = Arc::new(AtomicBool::new(false));
    let sources_left = Arc::new(AtomicUsize::new(2));
    let mut threads = Vec::new();
    for cpu in 0..CPUS {
        let (driven, apics, devices, over) = (driven.clone(), apics.clone(), devices.clone(), over.clone());
        threads.push(thread::spawn(move || {
            while !over.load(SeqCst) {
                let Some(vector) = apics.take(cpu) else {
                    thread::yield_now();
                    continue;
                };
                let line = ((vector - FIRST) / VECTORS) as u8;
                let device = &devices[usize::from(line)];
                let _guard = device.lock.lock().unwrap();
                driven.handle(line, vector, &mut || {
                    if is_level(line) {
                        device.asserted.swap(false, SeqCst);
                        device.seen.store(device.posted.load(SeqCst), SeqCst);
                        driven.quiet(line, &|| device.asserted.load(SeqCst));
                    } else {
                        device.seen.store(device.posted.load(SeqCst), SeqCst);
                    }
                    device.served.fetch_add(1, SeqCst);
                });
            }
        }));
    }
    for seed in [11, 12] {
        let (driven, devices, left) = (driven.clone(), devices.clone(), sources_left.clone());
        threads.push(thread::spawn(move || {
            let mut random = Random(seed);
            for n in 0..events() / 2 {
                let line = (random.next() % u64::from(LINES)) as u8;
                let device = &devices[usize::from(line)];
                device.posted.fetch_add(1, SeqCst);
                device.asserted.store(true, SeqCst);
                driven.raise(line);
                if n % 16 == 0 {
                    thread::yield_now();
                }
            }
            left.fetch_sub(1, SeqCst);
        }));
    }
    // Affinity, vectors and masks.
    let mut random = Random(99);
    while sources_left.load(SeqCst) > 0 {
        let line = (random.next() % u64::from(LINES)) as u8;
        let _guard = devices[usize::from(line)].lock.lock().unwrap();
        match random.next() % 3 {
            0 => {
                driven.mask(line, true);
                driven.turn();
                driven.mask(line, false);
            }
            _ => driven.aim(
                line,
                FIRST + u64::from(line) * VECTORS + random.next() % VECTORS,
                random.next() % CPUS as u64,
            ),
        }
        drop(_guard);
        driven.turn();
        thread::yield_now();
    }
    let quiet = || {
        let held: Vec<_> = devices.iter().map(|device| device.lock.lock().unwrap()).collect();
        driven.turn();
        let idle = apics.idle() && driven.idle();
        drop(held);
        idle
    };
    while !quiet() {
        thread::yield_now();
    }
    over.store(true, SeqCst);
    threads.into_iter().for_each(|t| t.join().unwrap());
    for (line, device) in devices.iter().enumerate() {
        assert_eq!(device.seen.load(SeqCst), device.posted.load(SeqCst), "line {line}: something was not seen");
    }
    let posted = devices.iter().map(|device| device.posted.load(SeqCst)).sum();
    (posted, devices.iter().map(|device| device.served.load(SeqCst)).collect())
}

fn paravirtual(mode: Mode) {
    let apics = Arc::new(Apics::default());
    let to = apics.clone();
    let chip = Vioapic::new(OwnPages::default(), mode, move |message| to.send(message));
    let driven = Arc::new(Paravirtual { chip, mode, rung: AtomicBool::new(false) });
    for line in 0..LINES {
        driven.aim(line, FIRST + u64::from(line) * VECTORS, 0);
        driven.mask(line, false);
    }
    let (posted, served) = stress(driven.clone(), apics, |line| line >= LEVELS);
    let counts = driven.chip.counts();
    let edges: u64 = served.iter().take(usize::from(LEVELS)).sum();
    assert_eq!(edges, counts.events, "{mode:?}: an event was lost or doubled: {counts:?}");
    println!("{mode:?}: {posted} events on both kinds of lines; {} of {edges} edges apart, {counts:?}", counts.events);
}

#[test]
fn by_registers_that_all_leave() {
    paravirtual(Mode::Trap);
}

#[test]
fn by_registers_read_from_a_page() {
    paravirtual(Mode::RoPage);
}

#[test]
fn by_words_and_a_doorbell() {
    paravirtual(Mode::Pv);
}

#[test]
fn by_the_io_apic() {
    let apics = Arc::new(Apics::default());
    let chip = Mutex::new((IoApic::new(LINES), vec![0; usize::from(LINES)]));
    let driven = Arc::new(Pins { chip, apics: apics.clone(), moves: std::array::from_fn(|_| AtomicU64::new(0)) });
    for line in 0..LINES {
        driven.write(line, |entry| *entry = 0x8000 | (FIRST + u64::from(line) * VECTORS));
    }
    let (posted, served) = stress(driven, apics, |_| true);
    println!("I/O APIC: {posted} events, served {} times", served.iter().sum::<u64>());
}
