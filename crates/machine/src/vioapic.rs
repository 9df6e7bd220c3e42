// SPDX-License-Identifier: Apache-2.0
//! The paravirtual interrupt controller in its machine (docs/vioapic.md): its pages in guest memory, its doorbell, its lines.
//!
//! vCPU threads bring accesses that leave the guest, device threads raise lines, and one thread, `vioapic`, waits for the
//! doorbell. All of them meet in the controller's own lock.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use base::mmap::Mmap;
use base::{EFD_CLOEXEC, EventFd, Gpa, Hva};
use irq::vioapic::{Counts, GuestWords, Mode, Pages, Registers};
use irq::{IrqLine, MsiMessage, Vioapic};
use kvm::Vm;
use mem::space::Kind;

use crate::error::{Error, host};
use crate::layout::VIOAPIC;
use crate::spaces::{Device, Spaces};

/// A page, and each of the three parts of the controller.
const PAGE: u64 = 0x1000;
/// What the doorbell's thread does in one stretch of time before it waits for the next.
const MOST_RINGS: u32 = 2000;
/// That stretch.
const STRETCH: Duration = Duration::from_millis(10);
/// Stack of the doorbell's thread.
const STACK: usize = 64 << 10;

/// Two pages: the registers, then the guest's words.
struct Mapped(Mmap);

impl Pages for Mapped {
    fn registers(&self) -> &Registers {
        // SAFETY: the mapping is two pages, zeroed at first, aligned and longer than the registers, which are atomics; it
        // lives as long as self, and nothing but atomics and the guest (by hardware, read only) ever touches it.
        unsafe { &*self.0.as_ptr().cast::<c_void>().cast::<Registers>() }
    }

    fn guest(&self) -> &GuestWords {
        // SAFETY: as above, for the second page; the guest writes it at any moment, which atomics allow for.
        unsafe { &*self.0.as_ptr().add(PAGE as usize).cast::<c_void>().cast::<GuestWords>() }
    }
}

/// Keeps a guest that rings without end from taking a host CPU for it: so many rings in a stretch of time, then a pause to
/// its end. What is written meanwhile is taken over after it.
struct Pace {
    begun: Instant,
    rings: u32,
}

impl Pace {
    /// One more ring at `now`: how long to wait before it is answered.
    fn ring(&mut self, now: Instant) -> Option<Duration> {
        let spent = now.saturating_duration_since(self.begun);
        if spent >= STRETCH {
            (self.begun, self.rings) = (now, 1);
            return None;
        }
        self.rings += 1;
        if self.rings <= MOST_RINGS {
            return None;
        }
        (self.begun, self.rings) = (now + (STRETCH - spent), 1);
        Some(STRETCH - spent)
    }
}

/// The doorbell and who answers it.
struct Doorbell {
    fd: Arc<EventFd>,
    over: AtomicBool,
}

/// The controller.
pub struct VioapicHost {
    chip: Arc<Vioapic<Mapped>>,
    doorbell: Arc<Doorbell>,
    thread: Option<JoinHandle<()>>,
    lines: AtomicU8,
}

/// A line as a device has it.
struct Line {
    chip: Arc<Vioapic<Mapped>>,
    number: u8,
}

impl IrqLine for Line {
    fn pulse(&self) {
        self.chip.assert(self.number);
    }

    fn release(&self, still: &dyn Fn() -> bool) {
        self.chip.release(self.number, still);
    }
}

impl VioapicHost {
    /// A controller in `mode` for the machine `vm`.
    ///
    /// # Errors
    /// [`Error::Host`] when the host has no memory, descriptor or thread left, [`Error::Kvm`] when KVM refuses its pages.
    pub fn new((vm, spaces): (&Vm, &Spaces), mode: spec::Vioapic) -> Result<Self, Error> {
        let memory = Mmap::anonymous(2 * PAGE as usize).map_err(host("map the interrupt controller's pages"))?;
        let (registers, words) = (memory.as_ptr() as u64, memory.as_ptr() as u64 + PAGE);
        let sender = {
            let vm = vm.clone();
            move |message: MsiMessage| vm.signal_msi(message.address, message.data).unwrap_or(false)
        };
        let word = match mode {
            spec::Vioapic::Trap => Mode::Trap,
            spec::Vioapic::RoPage => Mode::RoPage,
            spec::Vioapic::Pv => Mode::Pv,
        };
        let chip = Arc::new(Vioapic::new(Mapped(memory), word, sender));
        let fd = EventFd::new(EFD_CLOEXEC).map_err(host("make an eventfd"))?;
        let fd = Arc::new(fd);
        let bell = mem::space::Doorbell { offset: 2 * PAGE, value: None, fd: fd.clone() };
        let bells = if word == Mode::Pv { vec![bell] } else { Vec::new() };
        let region = spaces.add_device(VIOAPIC.0, VIOAPIC.1, Device::Vioapic, bells)?;
        if word != Mode::Trap {
            let kind = Kind::Rom(Hva(registers), Device::Vioapic, 0);
            // SAFETY: the page belongs to `chip`. It holds what the guest may read.
            unsafe { spaces.add_page(chip.clone(), PAGE, kind, (region, 0)) }?;
        }
        let doorbell = Arc::new(Doorbell { fd, over: AtomicBool::new(false) });
        let mut thread = None;
        if word == Mode::Pv {
            // SAFETY: as above; the guest may write this one.
            unsafe { spaces.add_page(chip.clone(), PAGE, Kind::Ram(Hva(words)), (region, PAGE)) }?;
            let (chip, doorbell) = (chip.clone(), doorbell.clone());
            let run = move || answer(&chip, &doorbell);
            let spawned = std::thread::Builder::new().name("vioapic".to_owned()).stack_size(STACK).spawn(run);
            thread = Some(spawned.map_err(host("start a thread for the interrupt controller"))?);
        }
        Ok(Self { chip, doorbell, thread, lines: AtomicU8::new(0) })
    }

    /// The next line, for the device whose registers are at `at`; `None` when all are taken.
    #[must_use]
    pub fn line(&self, at: Gpa) -> Option<Arc<dyn IrqLine>> {
        let number = self.lines.fetch_add(1, Ordering::Relaxed);
        if number >= irq::vioapic::LINES {
            return None;
        }
        self.chip.describe(number, at.0);
        Some(Arc::new(Line { chip: self.chip.clone(), number }))
    }

    /// Answers a read at byte `offset` of its pages.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        // The other pages are the guest's to write, or a doorbell: nothing to read.
        self.chip.read(offset, data);
    }

    /// Answers a write at byte `offset` of its pages.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if offset >= 2 * PAGE {
            self.chip.doorbell();
        } else {
            self.chip.write(offset, data);
        }
    }

    /// What happened so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.chip.counts()
    }
}

impl Drop for VioapicHost {
    fn drop(&mut self) {
        self.doorbell.over.store(true, Ordering::Release);
        // The counter is far from its limit: its thread takes all of it each time.
        let _ = self.doorbell.fd.write(1);
        if let Some(thread) = self.thread.take() {
            // It holds nothing that could be lost.
            let _ = thread.join();
        }
    }
}

/// The thread `vioapic`.
fn answer(chip: &Vioapic<Mapped>, doorbell: &Doorbell) {
    let mut pace = Pace { begun: Instant::now(), rings: 0 };
    loop {
        // Interrupted by a signal: nothing was taken.
        if doorbell.fd.read().is_err() {
            continue;
        }
        if doorbell.over.load(Ordering::Acquire) {
            return;
        }
        if let Some(pause) = pace.ring(Instant::now()) {
            std::thread::sleep(pause);
        }
        chip.doorbell();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_storm_of_rings_gets_a_pause_and_no_more() {
        let begun = Instant::now();
        let at = |us: u64| begun + Duration::from_micros(us);
        let mut pace = Pace { begun, rings: 0 };
        assert!((0..MOST_RINGS).all(|_| pace.ring(at(1000)).is_none()));
        assert_eq!(pace.ring(at(4000)), Some(Duration::from_millis(6)));
        assert!((0..MOST_RINGS - 1).all(|_| pace.ring(at(10_000)).is_none()), "a new stretch");
        assert_eq!(pace.ring(at(10_000)), Some(STRETCH));
        assert_eq!(pace.ring(at(90_000)), None);
    }
}
