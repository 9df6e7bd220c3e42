// SPDX-License-Identifier: Apache-2.0
//! The interrupt controllers of `stress`: how each is masked and aimed, and when one of its interrupts has ended.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd, Gsi};
use irq::MsiSink;
use kvm::{KvmError, Vm};
use pci::msix::{ENTRY_SIZE, Msix, MsixLine};

use super::guest::Guest;
use super::{FIRST, VECTORS};
use crate::ioapic::IoApicHost;
use crate::msi::KvmMsi;

/// Lines, where there is no reason for fewer.
const LINES: u8 = 64;
const MASKED: u32 = 1 << 16;
const LEVEL: u32 = 1 << 15;

/// A controller and the guest behind it.
pub trait Chip: Send + Sync {
    fn guest(&self) -> &Guest;
    fn lines(&self) -> u8;
    /// One event on `line`. Not before the last one has ended.
    fn raise(&self, line: u8);
    /// How many interrupts of `line` have come to their end.
    fn ended(&self, line: u8) -> u64 {
        self.guest().taken(line)
    }
    /// Whether a vector may change only when none of its interrupts waits for its end.
    fn waits_for_ends(&self) -> bool {
        true
    }
    fn mask(&self, line: u8, masked: bool);
    /// The line is masked meanwhile.
    fn aim(&self, line: u8, vector: u8, cpu: u8);
    /// KVM reports the end of an interrupt.
    fn end(&self, _vector: u8) {}
}

/// What an entry of an I/O APIC's table has in its lower half.
fn entries(lines: u8) -> Vec<Mutex<u32>> {
    (0..lines).map(|_| Mutex::new(MASKED | LEVEL)).collect()
}

/// Changes the lower half of an entry, and has it written.
fn change(entries: &[Mutex<u32>], line: u8, to: impl FnOnce(u32) -> u32, write: impl FnOnce(u8, u32)) {
    let Some(Ok(mut entry)) = entries.get(usize::from(line)).map(|entry| entry.lock()) else { panic!("line {line}") };
    *entry = to(*entry);
    write(0x10 + 2 * line, *entry);
}

/// KVM's I/O APIC, each pin with an irqfd that its interrupt's end releases.
pub struct Kernel {
    guest: Guest,
    entries: Vec<Mutex<u32>>,
    pins: Vec<(EventFd, EventFd, AtomicU64)>,
}

impl Kernel {
    pub const PREPARE: fn(&Vm) -> Result<bool, KvmError> = |vm| vm.create_irqchip().map(|()| true);
    const PINS: u8 = 24;

    pub fn new(guest: Guest) -> Self {
        let fd = || EventFd::new(EFD_CLOEXEC | EFD_NONBLOCK).unwrap_or_else(|e| panic!("eventfd: {e}"));
        let pins: Vec<_> = (0..Self::PINS)
            .map(|pin| {
                let (raise, ended) = (fd(), fd());
                let added = guest.vm.add_resampled_irqfd(&raise, &ended, Gsi(pin.into()));
                added.unwrap_or_else(|e| panic!("pin {pin}: {e}"));
                (raise, ended, AtomicU64::new(0))
            })
            .collect();
        Self { guest, entries: entries(Self::PINS), pins }
    }

    fn pin(&self, line: u8) -> &(EventFd, EventFd, AtomicU64) {
        self.pins.get(usize::from(line)).unwrap_or_else(|| panic!("no pin {line}"))
    }
}

impl Chip for Kernel {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn lines(&self) -> u8 {
        Self::PINS
    }

    fn raise(&self, line: u8) {
        self.pin(line).0.write(1).unwrap_or_else(|e| panic!("pin {line}: {e}"));
    }

    fn ended(&self, line: u8) -> u64 {
        let (_, ended, total) = self.pin(line);
        // More than one would be an interrupt that was doubled; it shows in the sum.
        let new = ended.read().unwrap_or(0);
        total.fetch_add(new, SeqCst) + new
    }

    fn mask(&self, line: u8, masked: bool) {
        let to = |entry: u32| (entry & !MASKED) | if masked { MASKED } else { 0 };
        change(&self.entries, line, to, |register, value| self.guest.write_ioapic(register, value));
    }

    fn aim(&self, line: u8, vector: u8, cpu: u8) {
        self.guest.write_ioapic(0x11 + 2 * line, u32::from(cpu) << 24);
        let to = |entry: u32| (entry & !0xff) | u32::from(vector);
        change(&self.entries, line, to, |register, value| self.guest.write_ioapic(register, value));
    }
}

/// Our own I/O APIC. A device is quiet once KVM reports the end of its interrupt.
pub struct Split {
    guest: Guest,
    chip: IoApicHost,
    entries: Vec<Mutex<u32>>,
    ended: Vec<AtomicU64>,
    select: Mutex<()>,
}

impl Split {
    pub const PREPARE: fn(&Vm) -> Result<bool, KvmError> = |vm| vm.split_irqchip(LINES);

    pub fn new(guest: Guest) -> Self {
        let chip = IoApicHost::new(LINES, &KvmMsi::new(guest.vm.clone(), Some(LINES)));
        let ended = (0..LINES).map(|_| AtomicU64::new(0)).collect();
        Self { guest, chip, entries: entries(LINES), ended, select: Mutex::new(()) }
    }

    fn write(&self, register: u8, value: u32) {
        let _guard = self.select.lock();
        self.chip.write(0, &[register]);
        self.chip.write(0x10, &value.to_le_bytes());
    }
}

impl Chip for Split {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn lines(&self) -> u8 {
        LINES
    }

    fn raise(&self, line: u8) {
        self.chip.raise(line, 1);
    }

    fn ended(&self, line: u8) -> u64 {
        self.ended.get(usize::from(line)).map_or(0, |ended| ended.load(SeqCst))
    }

    fn mask(&self, line: u8, masked: bool) {
        let to = |entry: u32| (entry & !MASKED) | if masked { MASKED } else { 0 };
        change(&self.entries, line, to, |register, value| self.write(register, value));
    }

    fn aim(&self, line: u8, vector: u8, cpu: u8) {
        self.write(0x11 + 2 * line, u32::from(cpu) << 24);
        let to = |entry: u32| (entry & !0xff) | u32::from(vector);
        change(&self.entries, line, to, |register, value| self.write(register, value));
    }

    fn end(&self, vector: u8) {
        let line = vector.saturating_sub(FIRST) / VECTORS;
        self.chip.release(line, 1, &|| false);
        // Each device here is released at the end of its interrupt: no line storms.
        let _ = self.chip.end(vector);
        if let Some(ended) = self.ended.get(usize::from(line)) {
            ended.fetch_add(1, SeqCst);
        }
    }
}

/// Vectors of a PCI function's MSI-X table.
pub struct Messages {
    guest: Guest,
    table: Mutex<Msix>,
    lines: Arc<[MsixLine]>,
}

impl Messages {
    pub const PREPARE: fn(&Vm) -> Result<bool, KvmError> = |vm| vm.split_irqchip(24);

    pub fn new(guest: Guest) -> Self {
        let sink = KvmMsi::new(guest.vm.clone(), Some(24));
        let vectors = sink.vectors(LINES.into()).unwrap_or_else(|e| panic!("vectors: {e}"));
        let mut table = Msix::new(vectors);
        let lines = table.lines();
        table.set_control(1 << 15);
        Self { guest, table: Mutex::new(table), lines }
    }

    fn write(&self, line: u8, field: u64, value: u32) {
        let Ok(mut table) = self.table.lock() else { panic!("the table's lock") };
        table.write_table(u64::from(line) * ENTRY_SIZE + field, &value.to_le_bytes());
    }
}

impl Chip for Messages {
    fn guest(&self) -> &Guest {
        &self.guest
    }

    fn lines(&self) -> u8 {
        LINES
    }

    fn raise(&self, line: u8) {
        assert!(self.lines.get(usize::from(line)).is_some_and(MsixLine::notify), "MSI-X is on");
    }

    fn waits_for_ends(&self) -> bool {
        false
    }

    fn mask(&self, line: u8, masked: bool) {
        self.write(line, 12, masked.into());
    }

    fn aim(&self, line: u8, vector: u8, cpu: u8) {
        self.write(line, 0, 0xfee0_0000 | u32::from(cpu) << 12);
        self.write(line, 8, vector.into());
    }
}
