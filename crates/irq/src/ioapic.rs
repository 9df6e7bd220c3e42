// SPDX-License-Identifier: Apache-2.0
//! An I/O APIC (Intel 82093AA, section 3.2) as a pure state machine: registers, what each pin sends and when, and what the end of
//! an interrupt at a local APIC means for it.
//!
//! `machine` answers accesses to its page with this, under its own lock, and sends what it is given. A guest reads and
//! writes each entry of an I/O APIC several times while it boots, so it matters how many there are: KVM's own has 24.
//!
//! Lines say "asserted", whatever the wire's voltage: an entry's polarity is kept and has no effect, as with KVM's own. An
//! 82093AA has no register for directed EOIs, and version 0x11 tells a guest so.

use crate::MsiMessage;

/// Register select: an offset into the page.
const SELECT: u64 = 0x00;
/// The selected register.
const WINDOW: u64 = 0x10;
const ID: u8 = 0;
const VERSION: u8 = 1;
const ARBITRATION: u8 = 2;
/// First half of the first entry.
const ENTRIES: u8 = 0x10;
/// What the version register says in its low byte.
const VERSION_11: u32 = 0x11;
/// The bits of an I/O APIC's id.
const ID_BITS: u32 = 0x0f00_0000;

const MASKED: u64 = 1 << 16;
const LEVEL: u64 = 1 << 15;
const REMOTE_IRR: u64 = 1 << 14;
const LOGICAL: u64 = 1 << 11;
/// What of an entry's lower half a guest sets: all but delivery status and remote IRR.
const WRITABLE_LOW: u64 = MASKED | LEVEL | 1 << 13 | LOGICAL | 0x7ff;
/// What of its upper half: the destination.
const WRITABLE_HIGH: u64 = 0xff << 56;
/// Delivery mode and vector.
const MODE_AND_VECTOR: u64 = 0x7ff;
/// Vectors below this one are exceptions: no local APIC takes them.
const FIRST_VECTOR: u64 = 16;
/// Where messages go.
const MSI_BASE: u64 = 0xfee0_0000;
/// A message of a level: it has one, and it is asserted.
const MSI_LEVEL: u32 = 1 << 15 | 1 << 14;

/// So many interrupts of one level in a row, its line asserted all the time, are a storm: a guest that ends them and does
/// nothing about them. (The kernel's own chip has the same figure.)
const STORM: u16 = 10_000;

/// What an entry delivers, bits 10:8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Fixed and lowest priority: a vector.
    Vector,
    /// SMI, NMI and INIT: signals of their own, always edges.
    Signal,
    /// ExtINT asks a PIC for its vector, and there is none; or a reserved mode.
    Nothing,
}

/// One entry of the redirection table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry(u64);

impl Entry {
    fn mode(self) -> Mode {
        match self.0 >> 8 & 7 {
            0 | 1 => Mode::Vector,
            2 | 4 | 5 => Mode::Signal,
            _ => Mode::Nothing,
        }
    }

    const fn has(self, bit: u64) -> bool {
        self.0 & bit != 0
    }

    const fn vector(self) -> u8 {
        self.0 as u8
    }

    /// Whether the pin's level counts, not its edges.
    fn is_level(self) -> bool {
        self.has(LEVEL) && self.mode() == Mode::Vector
    }

    /// What it sends; `None` while it is masked or programmed to send what nobody takes.
    fn message(self) -> Option<MsiMessage> {
        let sends = match self.mode() {
            Mode::Vector => u64::from(self.vector()) >= FIRST_VECTOR,
            Mode::Signal => true,
            Mode::Nothing => false,
        };
        if self.has(MASKED) || !sends {
            return None;
        }
        let logical = if self.has(LOGICAL) { 1 << 2 } else { 0 };
        let level = if self.is_level() { MSI_LEVEL } else { 0 };
        let data = (self.0 & MODE_AND_VECTOR) as u32 | level;
        Some(MsiMessage { address: MSI_BASE | (self.0 >> 56) << 12 | logical, data })
    }
}

/// What is at a pin.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    asserted: bool,
    /// How many of its interrupts have ended since it was not asserted.
    ends: u16,
}

/// What a write changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    /// The pin whose entry was written: what it sends and how it is triggered may be another now.
    pub pin: Option<u8>,
    /// What has to be sent for it at once.
    pub send: Option<MsiMessage>,
}

/// An I/O APIC.
#[derive(Debug)]
pub struct IoApic {
    select: u8,
    id: u32,
    entries: Vec<Entry>,
    lines: Vec<Line>,
}

impl IoApic {
    /// As after a reset, with 1 to 120 pins, all masked; more have no register numbers.
    #[must_use]
    pub fn new(pins: u8) -> Self {
        let pins = usize::from(pins.clamp(1, 120));
        Self { select: 0, id: 0, entries: vec![Entry(MASKED); pins], lines: vec![Line::default(); pins] }
    }

    /// Number of pins.
    #[must_use]
    pub fn pins(&self) -> u8 {
        self.entries.len() as u8
    }

    /// Reads at byte `offset` of the page. Registers are 32 bits wide; what is not there reads as 0.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        let value = match offset {
            SELECT => u32::from(self.select),
            WINDOW => self.register(),
            _ => 0,
        };
        data.fill(0);
        for (out, byte) in data.iter_mut().zip(value.to_le_bytes()) {
            *out = byte;
        }
    }

    /// Writes at byte `offset` of the page.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Written {
        let mut word = [0; 4];
        for (out, byte) in word.iter_mut().zip(data) {
            *out = *byte;
        }
        match offset {
            SELECT => self.select = word[0],
            WINDOW => return self.set_register(u32::from_le_bytes(word)),
            _ => {}
        }
        Written::default()
    }

    /// What `pin` sends; `None` while it is masked, or programmed to send nothing that anybody would take.
    #[must_use]
    pub fn message(&self, pin: u8) -> Option<MsiMessage> {
        self.entries.get(usize::from(pin))?.message()
    }

    /// Whether the level of `pin` counts, masked or not: then [`IoApic::set_line`] says when to send, else each edge sends.
    #[must_use]
    pub fn is_level(&self, pin: u8) -> bool {
        self.entries.get(usize::from(pin)).is_some_and(|entry| entry.is_level())
    }

    /// What the level of `pin` sends or, if it is masked, would send.
    #[must_use]
    pub fn level_message(&self, pin: u8) -> Option<MsiMessage> {
        let entry = self.entries.get(usize::from(pin)).filter(|entry| entry.is_level())?;
        Entry(entry.0 & !MASKED).message()
    }

    /// The line of `pin` is asserted from now on, or no longer; gives what has to be sent for it. An edge is sent if the line
    /// was not asserted before; one at a masked pin is forgotten (3.2.4), while a level waits for its mask.
    pub fn set_line(&mut self, pin: u8, asserted: bool) -> Option<MsiMessage> {
        let index = usize::from(pin);
        let line = self.lines.get_mut(index)?;
        let edge = asserted && !line.asserted;
        *line = Line { asserted, ends: if asserted { line.ends } else { 0 } };
        let entry = *self.entries.get(index)?;
        if entry.is_level() { self.service(index) } else { entry.message().filter(|_| edge) }
    }

    /// A local APIC ended the interrupt of `vector`: every level pin that waited for it may send again. Gives each such pin,
    /// and what it has to send if its line is asserted still, to `each`. Says whether that is a storm, once in so many ends:
    /// who ended the interrupt should wait before it goes on.
    pub fn end(&mut self, vector: u8, mut each: impl FnMut(u8, Option<MsiMessage>)) -> bool {
        let mut storm = false;
        for index in 0..self.entries.len() {
            let Some(entry) = self.entries.get_mut(index) else { break };
            if entry.is_level() && entry.has(REMOTE_IRR) && entry.vector() == vector {
                entry.0 &= !REMOTE_IRR;
                each(index as u8, self.service(index));
                if let Some(line) = self.lines.get_mut(index).filter(|line| line.asserted) {
                    line.ends = (line.ends + 1) % STORM;
                    storm |= line.ends == 0;
                }
            }
        }
        storm
    }

    /// The pins that wait for the end of an interrupt of `vector`, lowest first.
    pub fn waiting(&self, vector: u8) -> impl Iterator<Item = u8> + '_ {
        let waits = move |entry: &Entry| entry.is_level() && entry.has(REMOTE_IRR) && entry.vector() == vector;
        (0u8..).zip(&self.entries).filter(move |(_, entry)| waits(entry)).map(|(pin, _)| pin)
    }

    /// No local APIC took what `pin` sent last: it waits for no end, and is sent again when its line or its entry changes.
    pub fn refused(&mut self, pin: u8) {
        if let Some(entry) = self.entries.get_mut(usize::from(pin)) {
            entry.0 &= !REMOTE_IRR;
        }
    }

    /// Sends the level of a pin if there is one to send and the last one has ended.
    fn service(&mut self, index: usize) -> Option<MsiMessage> {
        let asserted = self.lines.get(index)?.asserted;
        let entry = self.entries.get_mut(index)?;
        if !asserted || !entry.is_level() || entry.has(REMOTE_IRR) {
            return None;
        }
        let message = entry.message()?;
        entry.0 |= REMOTE_IRR;
        Some(message)
    }

    /// The selected entry and whether its upper half is meant.
    fn entry(&self) -> Option<(usize, bool)> {
        let index = usize::from(self.select.checked_sub(ENTRIES)?);
        (index / 2 < self.entries.len()).then_some((index / 2, index % 2 == 1))
    }

    fn register(&self) -> u32 {
        match (self.select, self.entry()) {
            (_, Some((index, high))) => {
                let entry = self.entries.get(index).map_or(MASKED, |entry| entry.0);
                (if high { entry >> 32 } else { entry }) as u32
            }
            // The arbitration id is loaded whenever the id is written (3.2.3).
            (ID | ARBITRATION, _) => self.id,
            (VERSION, _) => VERSION_11 | (u32::from(self.pins()) - 1) << 16,
            _ => 0,
        }
    }

    fn set_register(&mut self, value: u32) -> Written {
        if self.select == ID {
            self.id = value & ID_BITS;
            return Written::default();
        }
        let Some((index, high)) = self.entry() else { return Written::default() };
        let Some(entry) = self.entries.get_mut(index) else { return Written::default() };
        if high {
            entry.0 = (entry.0 & !WRITABLE_HIGH & !(0xffff_ffff << 32)) | (u64::from(value) << 32 & WRITABLE_HIGH);
        } else {
            entry.0 = (entry.0 & !WRITABLE_LOW) | (u64::from(value) & WRITABLE_LOW);
            // Nothing but a level waits for its end; guests switch to edges and back to get out of a wait.
            if !entry.is_level() {
                entry.0 &= !REMOTE_IRR;
            }
        }
        Written { pin: Some(index as u8), send: self.service(index) }
    }
}
