// SPDX-License-Identifier: Apache-2.0
//! The paravirtual I/O interrupt controller: 64 level-triggered lines, each with a vector and a destination of its own.
//! [docs/vioapic.md](../../../docs/vioapic.md) is its specification; this is what the monitor's side of it does.
//!
//! Device threads raise lines, vCPU threads access registers, the doorbell's thread takes over what the guest wrote into its
//! page. All of them hold the one lock of [`Vioapic`]; the guest, which writes its page at any moment, does not. What is
//! read from there is bits and nothing else: whatever they are, a line is sent at most once until it is unmasked.

use crate::MsiMessage;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering::SeqCst, fence, look, put, relock};

/// Lines of the controller.
pub const LINES: u8 = 64;
/// What the first register holds: "vioapic1", little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"vioapic1");

/// Offsets of the registers in their page.
pub mod reg {
    /// [`super::MAGIC`].
    pub const MAGIC: u64 = 0x00;
    /// [`super::Mode`] in the low half, the number of lines in the upper one.
    pub const MODE: u64 = 0x08;
    /// Lines that want service.
    pub const IRR: u64 = 0x10;
    /// Those of them that are not masked.
    pub const ISR: u64 = 0x18;
    /// Masked lines; a write adds to them.
    pub const MASK: u64 = 0x20;
    /// A write unmasks lines and ends their service.
    pub const UNMASK: u64 = 0x28;
    /// A write forgets the events of lines.
    pub const ACK: u64 = 0x30;
    /// A write is an event on lines.
    pub const RAISE: u64 = 0x38;
    /// Lines whose device asserts them.
    pub const LEVEL: u64 = 0x40;
    /// Flips with each event of a line; what differs from the guest's ACK is pending.
    pub const EVENT: u64 = 0x48;
    /// A write of anything puts the controller back into its first state.
    pub const RESET: u64 = 0x50;
    /// Vector and destination of line 0; eight bytes for each line.
    pub const LINE: u64 = 0x100;
    /// Address of the device behind line 0, or 0; eight bytes for each line.
    pub const DEVICE: u64 = 0x300;
    /// Bytes of registers.
    pub const SIZE: u64 = 0x500;
}

/// Number of 64-bit words in the page of registers.
const WORDS: usize = reg::SIZE as usize / 8;

/// How a guest reaches the registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Each access leaves to the monitor.
    Trap = 0,
    /// Reads are loads from a read-only page; writes leave.
    RoPage = 1,
    /// Also MASK, UNMASK and ACK are stores into a page, with a doorbell.
    Pv = 2,
}

/// The page of registers as the guest reads it. Only the monitor writes.
#[repr(C)]
#[derive(Debug)]
pub struct Registers([AtomicU64; WORDS]);

/// The page that the guest writes in mode pv; in the other modes the same words, out of its sight.
#[repr(C)]
#[derive(Debug, Default)]
pub struct GuestWords {
    /// Masked lines: the guest sets bits, the monitor clears what is unmasked.
    pub mask: AtomicU64,
    /// Lines to unmask: the guest sets bits, the monitor clears them once it has.
    pub unmask: AtomicU64,
    /// The guest's side of [`reg::EVENT`].
    pub ack: AtomicU64,
}

impl Default for Registers {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Registers {
    /// What the register at byte `offset` (a multiple of 8) shows; 0 where there is none.
    #[must_use]
    pub fn get(&self, offset: u64) -> u64 {
        self.0.get(offset as usize / 8).map_or(0, look)
    }

    fn set(&self, offset: u64, value: u64) {
        // Only what changes is stored: guests that read the page keep their cache lines.
        if let Some(word) = self.0.get(offset as usize / 8)
            && look(word) != value
        {
            put(word, value);
        }
    }
}

/// Where the two pages are.
pub trait Pages: Send + Sync {
    /// The registers.
    fn registers(&self) -> &Registers;
    /// The guest's words.
    fn guest(&self) -> &GuestWords;
}

/// Pages that no guest maps.
#[derive(Debug, Default)]
pub struct OwnPages {
    registers: Registers,
    guest: GuestWords,
}

impl Pages for OwnPages {
    fn registers(&self) -> &Registers {
        &self.registers
    }

    fn guest(&self) -> &GuestWords {
        &self.guest
    }
}

/// Sends messages; `false` when no local APIC took one. Called with the controller's lock held: must not wait.
pub trait Sender: Send + Sync {
    /// Sends `message` now.
    fn send(&self, message: MsiMessage) -> bool;
}

impl<F: Fn(MsiMessage) -> bool + Send + Sync> Sender for F {
    fn send(&self, message: MsiMessage) -> bool {
        self(message)
    }
}

/// What happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Events that became pending.
    pub events: u64,
    /// Events on lines that had one pending: the guest sees one interrupt for both.
    pub merged: u64,
    /// Messages sent.
    pub sent: u64,
    /// Messages that nobody took.
    pub refused: u64,
}

/// What only the monitor knows.
#[derive(Default)]
struct State {
    level: u64,
    event: u64,
    /// Sent, and not unmasked since.
    in_service: u64,
    /// Vector and destination of each line.
    lines: Vec<u64>,
    counts: Counts,
}

/// The controller.
pub struct Vioapic<P> {
    pages: P,
    mode: Mode,
    sender: Box<dyn Sender>,
    state: Mutex<State>,
}

const fn bit(line: u8) -> u64 {
    1 << (line % LINES)
}

/// Vectors below this one are exceptions.
const FIRST_VECTOR: u64 = 16;
/// The bits of a line's register that mean something: vector, and destination in the upper half.
const LINE_BITS: u64 = 0x0000_00ff_0000_00ff;

/// What a line sends, if it was told.
fn message(line: u64) -> Option<MsiMessage> {
    let (vector, destination) = (line & 0xff, line >> 32 & 0xff);
    (vector >= FIRST_VECTOR).then_some(MsiMessage { address: 0xfee0_0000 | destination << 12, data: vector as u32 })
}

impl<P: Pages> Vioapic<P> {
    /// In its first state: all lines masked, none with a vector. Messages go to `sender`.
    pub fn new(pages: P, mode: Mode, sender: impl Sender + 'static) -> Self {
        let lines = vec![0; usize::from(LINES)];
        let state = Mutex::new(State { lines, ..State::default() });
        let new = Self { pages, mode, sender: Box::new(sender), state };
        let registers = new.pages.registers();
        registers.set(reg::MAGIC, MAGIC);
        registers.set(reg::MODE, u64::from(LINES) << 32 | mode as u64);
        new.reset();
        new
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        relock(&self.state)
    }

    /// The pages.
    pub const fn pages(&self) -> &P {
        &self.pages
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }

    /// Says where the registers of the device behind `line` are, for the guest's driver to find.
    pub fn describe(&self, line: u8, address: u64) {
        self.pages.registers().set(reg::DEVICE + 8 * u64::from(line % LINES), address);
    }

    /// Back to the first state. Levels are the devices' and stay.
    pub fn reset(&self) {
        let mut state = self.lock();
        let guest = self.pages.guest();
        guest.mask.store(u64::MAX, SeqCst);
        guest.unmask.store(0, SeqCst);
        guest.ack.store(0, SeqCst);
        (state.event, state.in_service) = (0, 0);
        for line in 0..LINES {
            self.set_line(&mut state, line, 0);
        }
        self.settle(&mut state);
    }

    /// The device behind `line` asserts it from now on.
    pub fn assert(&self, line: u8) {
        let mut state = self.lock();
        state.level |= bit(line);
        self.settle(&mut state);
    }

    /// The device behind `line` no longer asserts it, unless `still` says that it does.
    pub fn release(&self, line: u8, still: &dyn Fn() -> bool) {
        let mut state = self.lock();
        state.level &= !bit(line);
        if still() {
            state.level |= bit(line);
        }
        // Its service, if it has begun, is ended by UNMASK alone: the driver that quiets a device is not done with the line.
        self.settle(&mut state);
    }

    /// An event on each of `lines`: pending until the guest acknowledges it.
    pub fn latch(&self, lines: u64) {
        let mut state = self.lock();
        // What the device did before is seen by a guest whose acknowledgement is not seen here.
        fence(SeqCst);
        let pending = state.event ^ look(&self.pages.guest().ack);
        let fresh = lines & !pending;
        state.event ^= fresh;
        state.counts.events += u64::from(fresh.count_ones());
        state.counts.merged += u64::from((lines & pending).count_ones());
        self.settle(&mut state);
    }

    /// The guest rang: takes over what it wrote into its page.
    pub fn doorbell(&self) {
        self.settle(&mut self.lock());
    }

    /// Shows the guest what there is, takes over what it unmasked, and sends what is due.
    ///
    /// The order is what makes it right. LEVEL and EVENT are stored before UNMASK is read, while a guest sets UNMASK before it
    /// reads them: one of the two sees the other. UNMASK's bits are cleared after MASK's, so that a guest that sees them
    /// cleared may mask again, and before a line is sent again, so that the next unmasking is not taken for this one. All
    /// that a guest may look at when it is interrupted is there before the message goes.
    fn settle(&self, state: &mut State) {
        let (registers, guest) = (self.pages.registers(), self.pages.guest());
        registers.set(reg::LEVEL, state.level);
        registers.set(reg::EVENT, state.event);
        fence(SeqCst);
        let ended = look(&guest.unmask);
        if ended != 0 {
            guest.mask.fetch_and(!ended, SeqCst);
            guest.unmask.fetch_and(!ended, SeqCst);
            state.in_service &= !ended;
        }
        let irr = state.level | (state.event ^ look(&guest.ack));
        let mask = look(&guest.mask);
        registers.set(reg::IRR, irr);
        registers.set(reg::ISR, irr & !mask);
        registers.set(reg::MASK, mask);
        let mut due = irr & !mask & !state.in_service;
        while due != 0 {
            let line = due.trailing_zeros() as u8;
            due &= due - 1;
            let Some(message) = state.lines.get(usize::from(line)).copied().and_then(message) else { continue };
            // Set before it is sent: a guest that answers at once must find its service begun.
            state.in_service |= bit(line);
            if self.sender.send(message) {
                state.counts.sent += 1;
            } else {
                state.in_service &= !bit(line);
                state.counts.refused += 1;
            }
        }
    }

    fn set_line(&self, state: &mut State, line: u8, value: u64) {
        if let Some(slot) = state.lines.get_mut(usize::from(line)) {
            *slot = value & LINE_BITS;
            self.pages.registers().set(reg::LINE + 8 * u64::from(line), *slot);
        }
    }

    /// Answers a read of the page: 4 or 8 bytes, aligned; anything else, and what is not there, reads as 0.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if !is_whole(offset, data.len()) {
            return;
        }
        if self.mode == Mode::Pv && matches!(offset & !7, reg::IRR | reg::ISR | reg::MASK) {
            // They change by the guest's own stores, too.
            self.doorbell();
        }
        let word = self.pages.registers().get(offset & !7).to_le_bytes();
        for (out, byte) in data.iter_mut().zip(word.iter().skip((offset & 7) as usize)) {
            *out = *byte;
        }
    }

    /// Answers a write to the page: 4 or 8 bytes, aligned; anything else is ignored, as are registers that only show.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if !is_whole(offset, data.len()) {
            return;
        }
        let shift = 8 * (offset & 7);
        let mut word = [0; 8];
        for (out, byte) in word.iter_mut().zip(data) {
            *out = *byte;
        }
        let value = u64::from_le_bytes(word) << shift;
        match offset & !7 {
            reg::RAISE => return self.latch(value),
            reg::RESET => return self.reset(),
            _ => {}
        }
        let mut state = self.lock();
        let guest = self.pages.guest();
        match offset & !7 {
            reg::MASK => {
                // What was to be unmasked before is, first.
                self.settle(&mut state);
                guest.mask.fetch_or(value, SeqCst);
            }
            reg::UNMASK => {
                guest.unmask.fetch_or(value, SeqCst);
            }
            reg::ACK => {
                let differs = (look(&guest.ack) ^ state.event) & value;
                guest.ack.fetch_xor(differs, SeqCst);
            }
            at @ reg::LINE..reg::DEVICE => {
                let line = ((at - reg::LINE) / 8) as u8;
                let written = if data.len() == 8 { u64::MAX } else { 0xffff_ffff << shift };
                let old = state.lines.get(usize::from(line)).copied().unwrap_or(0);
                self.set_line(&mut state, line, (old & !written) | value);
            }
            _ => return,
        }
        self.settle(&mut state);
    }
}

fn is_whole(offset: u64, len: usize) -> bool {
    matches!(len, 4 | 8) && offset.is_multiple_of(len as u64) && offset < reg::SIZE
}
