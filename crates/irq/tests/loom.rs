// SPDX-License-Identifier: Apache-2.0
//! The paravirtual controller model-checked: guest, devices and doorbell as threads, in every order of their steps that loom
//! finds with a few preemptions. Each event is served exactly once, and no line is left waiting.
//!
//! loom orders only read-modify-writes of one word for all threads, so what several write is written by those, as it is in reality.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p irq --test loom --release`; without that flag there is nothing here.
#![cfg(loom)]
#![allow(clippy::unwrap_used)]

use irq::Vioapic;
use irq::vioapic::{Mode, OwnPages, Pages, reg};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst, fence};
use loom::thread;

const LINE: u8 = 3;
const BIT: u64 = 1 << LINE;

/// A local APIC of one vector, a doorbell's eventfd, and what the guest served.
struct World {
    vioapic: Vioapic<OwnPages>,
    pending: std::sync::Arc<AtomicBool>,
    rung: AtomicBool,
    served: AtomicUsize,
    /// What a level-triggered device has to say, or how often an edge-triggered one said something.
    status: AtomicU64,
    /// What the driver saw of it last.
    seen: AtomicU64,
}

impl World {
    fn new(mode: Mode) -> Arc<Self> {
        let pending = std::sync::Arc::new(AtomicBool::new(false));
        let apic = pending.clone();
        let send = move |_| {
            apic.swap(true, SeqCst);
            true
        };
        let vioapic = Vioapic::new(OwnPages::default(), mode, send);
        vioapic.write(reg::LINE + 8 * u64::from(LINE), &0x31u64.to_le_bytes());
        vioapic.write(reg::UNMASK, &BIT.to_le_bytes());
        Arc::new(Self {
            vioapic,
            pending,
            rung: AtomicBool::new(false),
            served: AtomicUsize::new(0),
            status: AtomicU64::new(0),
            seen: AtomicU64::new(0),
        })
    }

    fn irr(&self) -> u64 {
        let registers = self.vioapic.pages().registers();
        registers.get(reg::LEVEL) | (registers.get(reg::EVENT) ^ look(&self.vioapic.pages().guest().ack))
    }

    /// The guest's handler, as docs/vioapic.md has it for mode pv; `serve` is the device's driver.
    fn interrupt(&self, serve: impl Fn()) {
        if !self.pending.swap(false, SeqCst) {
            return;
        }
        let (registers, guest) = (self.vioapic.pages().registers(), self.vioapic.pages().guest());
        if look(&guest.mask) & BIT != 0 {
            return;
        }
        if self.irr() & BIT == 0 {
            return self.unmask();
        }
        guest.mask.fetch_or(BIT, SeqCst);
        if (registers.get(reg::EVENT) ^ look(&guest.ack)) & BIT != 0 {
            guest.ack.fetch_xor(BIT, SeqCst);
            fence(SeqCst);
        }
        serve();
        self.served.fetch_add(1, SeqCst);
        self.unmask();
    }

    fn unmask(&self) {
        self.vioapic.pages().guest().unmask.fetch_or(BIT, SeqCst);
        fence(SeqCst);
        if self.irr() & BIT != 0 {
            self.rung.swap(true, SeqCst);
        }
    }

    /// The handler by registers alone, for the modes in which writes leave the guest.
    fn interrupt_by_registers(&self) {
        if !self.pending.swap(false, SeqCst) {
            return;
        }
        if self.vioapic.pages().registers().get(reg::MASK) & BIT != 0 {
            return;
        }
        if self.vioapic.pages().registers().get(reg::ISR) & BIT == 0 {
            return self.vioapic.write(reg::UNMASK, &BIT.to_le_bytes());
        }
        self.vioapic.write(reg::MASK, &BIT.to_le_bytes());
        self.vioapic.write(reg::ACK, &BIT.to_le_bytes());
        self.see();
        self.served.fetch_add(1, SeqCst);
        self.vioapic.write(reg::UNMASK, &BIT.to_le_bytes());
    }

    fn event(&self) {
        self.status.fetch_add(1, SeqCst);
        self.vioapic.latch(BIT);
    }

    fn see(&self) {
        self.seen.store(look(&self.status), SeqCst);
    }

    fn answer_doorbell(&self) {
        if self.rung.swap(false, SeqCst) {
            self.vioapic.doorbell();
        }
    }

    /// Everything that is still under way, to its end.
    fn drain(&self, interrupt: impl Fn()) {
        for _ in 0..6 {
            self.answer_doorbell();
            interrupt();
        }
        assert!(!self.rung.load(SeqCst) && !self.pending.load(SeqCst));
    }
}

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.max_branches = 20_000;
    let model = std::sync::Arc::new(model);
    for by_writing in [false, true] {
        irq::sync::model::BY_WRITING.set(by_writing);
        let model = model.clone();
        builder.check(move || model());
    }
}

/// Reads a word as the monitor's side does; see `irq::sync::look`.
fn look(word: &AtomicU64) -> u64 {
    if irq::sync::model::BY_WRITING.get() { word.fetch_or(0, SeqCst) } else { word.load(SeqCst) }
}

/// Two events while the guest serves, unmasks and rings, and the doorbell is answered.
#[test]
fn each_event_is_served_once() {
    check(|| {
        let world = World::new(Mode::Pv);
        let threads = [
            thread::spawn({
                let world = world.clone();
                move || (0..2).for_each(|_| world.event())
            }),
            thread::spawn({
                let world = world.clone();
                move || (0..2).for_each(|_| world.answer_doorbell())
            }),
        ];
        (0..2).for_each(|_| world.interrupt(|| world.see()));
        threads.into_iter().for_each(|t| t.join().unwrap());
        world.drain(|| world.interrupt(|| world.see()));
        assert_eq!(world.seen.load(SeqCst), 2, "an event was not seen");
        let counts = world.vioapic.counts();
        assert_eq!(counts.events + counts.merged, 2);
        assert_eq!(world.served.load(SeqCst) as u64, counts.events, "lost or doubled");
        assert_eq!(world.irr() & BIT, 0);
    });
}

/// The same by registers, for trap and ro-page.
#[test]
fn each_event_is_served_once_by_registers() {
    check(|| {
        let world = World::new(Mode::RoPage);
        let source = thread::spawn({
            let world = world.clone();
            move || (0..2).for_each(|_| world.event())
        });
        (0..2).for_each(|_| world.interrupt_by_registers());
        source.join().unwrap();
        world.drain(|| world.interrupt_by_registers());
        assert_eq!(world.seen.load(SeqCst), 2, "an event was not seen");
        let counts = world.vioapic.counts();
        assert_eq!(counts.events + counts.merged, 2);
        assert_eq!(world.served.load(SeqCst) as u64, counts.events, "lost or doubled");
    });
}

/// A level-triggered device has something to say twice; the guest's driver takes all of it each time and the line goes down.
#[test]
fn a_level_is_served_until_it_goes_down() {
    check(|| {
        let world = World::new(Mode::Pv);
        let serve = |world: &World| {
            world.status.swap(0, SeqCst);
            world.vioapic.release(LINE, &|| look(&world.status) != 0);
        };
        let device = thread::spawn({
            let world = world.clone();
            move || {
                for _ in 0..2 {
                    world.status.swap(1, SeqCst);
                    world.vioapic.assert(LINE);
                }
            }
        });
        (0..2).for_each(|_| world.interrupt(|| serve(&world)));
        device.join().unwrap();
        world.drain(|| world.interrupt(|| serve(&world)));
        assert_eq!((look(&world.status), world.irr() & BIT), (0, 0), "lost");
        assert!(matches!(world.served.load(SeqCst), 1 | 2));
    });
}

/// Another CPU of the guest disables the line and enables it again meanwhile.
#[test]
fn a_line_that_is_disabled_meanwhile_comes_back() {
    check(|| {
        let world = World::new(Mode::Pv);
        let threads = [
            thread::spawn({
                let world = world.clone();
                move || world.vioapic.latch(BIT)
            }),
            thread::spawn({
                let world = world.clone();
                move || {
                    // Through the register: whether an unmasking is under way is then the monitor's business.
                    world.vioapic.write(reg::MASK, &BIT.to_le_bytes());
                    world.unmask();
                    world.answer_doorbell();
                }
            }),
        ];
        world.interrupt(|| {});
        threads.into_iter().for_each(|t| t.join().unwrap());
        world.drain(|| world.interrupt(|| {}));
        assert_eq!(world.served.load(SeqCst) as u64, world.vioapic.counts().events, "lost or doubled");
        assert_eq!(world.irr() & BIT, 0);
    });
}

/// A CPU that sees no unmasking under way masks by the word alone, and the line stays masked.
#[test]
fn a_mask_after_an_unmasking_holds() {
    check(|| {
        let world = World::new(Mode::Pv);
        world.vioapic.pages().guest().unmask.fetch_or(BIT, SeqCst);
        let monitor = thread::spawn({
            let world = world.clone();
            move || world.vioapic.doorbell()
        });
        let guest = world.vioapic.pages().guest();
        let masked = look(&guest.unmask) & BIT == 0;
        if masked {
            guest.mask.fetch_or(BIT, SeqCst);
        }
        monitor.join().unwrap();
        assert!(!masked || look(&guest.mask) & BIT != 0, "unmasked behind the guest's back");
    });
}
