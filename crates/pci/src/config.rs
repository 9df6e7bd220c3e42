// SPDX-License-Identifier: Apache-2.0
//! The 256 bytes of a type 0 configuration space (PCI Local Bus 3.0, 6.1), as bytes plus a mask of what software may
//! write. Owned by one function; no lock of its own.
//!
//! BAR sizing needs no code: the address bits below a BAR's size are not writable, so that writing all ones reads back
//! the size.

use crate::device::{Effect, Placement};

/// Offset of the command register.
pub const COMMAND: u16 = 0x04;
/// Command bit: answer to accesses of ports.
pub const COMMAND_IO: u16 = 1 << 0;
/// Command bit: answer to memory accesses.
pub const COMMAND_MEMORY: u16 = 1 << 1;
/// Command bit: may make accesses itself, messages included.
pub const COMMAND_MASTER: u16 = 1 << 2;
/// Command bit: no legacy interrupt.
pub const COMMAND_INTX_OFF: u16 = 1 << 10;

const STATUS: usize = 0x06;
const STATUS_CAPABILITIES: u8 = 1 << 4;
const CACHE_LINE: usize = 0x0c;
const BAR0: usize = 0x10;
const SUBSYSTEM: usize = 0x2c;
const CAPABILITIES: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
const FIRST_CAPABILITY: usize = 0x40;
const SIZE: usize = 256;

/// What a function says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// Revision.
    pub revision: u8,
    /// Class, subclass and programming interface, highest byte first: 0x01_80_00 is "other storage".
    pub class: u32,
    /// Subsystem vendor id.
    pub subsystem_vendor: u16,
    /// Subsystem id.
    pub subsystem: u16,
}

/// Which space a BAR is in, and how wide its address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Anywhere below 4 GiB.
    Memory32,
    /// Anywhere; takes the next BAR too.
    Memory64,
    /// Ports.
    Io,
}

/// One BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BarSpec {
    /// BAR number, 0 to 5 (0 to 4 for 64 bits).
    pub bar: u8,
    /// Space and address width.
    pub kind: BarKind,
    /// Bytes: a power of two, at least 16. Ports: 4 to 256 (6.2.5.1).
    pub size: u64,
    /// Reads have no side effects.
    pub prefetchable: bool,
}

/// A type 0 configuration space.
#[derive(Clone, Debug)]
pub struct ConfigSpace {
    bytes: [u8; SIZE],
    writable: [u8; SIZE],
    bars: Vec<BarSpec>,
    last_capability: usize,
    free: usize,
}

impl ConfigSpace {
    /// A function with neither BARs nor capabilities.
    #[must_use]
    pub fn new(id: Identity) -> Self {
        let mut space = Self {
            bytes: [0; SIZE],
            writable: [0; SIZE],
            bars: Vec::new(),
            last_capability: CAPABILITIES,
            free: FIRST_CAPABILITY,
        };
        space.set(0x00, &id.vendor.to_le_bytes());
        space.set(0x02, &id.device.to_le_bytes());
        let [programming, subclass, class, _] = id.class.to_le_bytes();
        space.set(0x08, &[id.revision, programming, subclass, class]);
        space.set(SUBSYSTEM, &id.subsystem_vendor.to_le_bytes());
        space.set(SUBSYSTEM + 2, &id.subsystem.to_le_bytes());
        space.allow(usize::from(COMMAND), &(COMMAND_MEMORY | COMMAND_MASTER | COMMAND_INTX_OFF).to_le_bytes());
        space.allow(CACHE_LINE, &[0xff]);
        space.allow(INTERRUPT_LINE, &[0xff]);
        space
    }

    /// Gives it an interrupt pin, 1 for INTA to 4 for INTD.
    pub fn set_interrupt_pin(&mut self, pin: u8) {
        self.set(INTERRUPT_LINE + 1, &[pin]);
    }

    /// Adds a BAR. A BAR that does not fit the rules of [`BarSpec`] or overlaps another is a bug of the caller.
    ///
    /// # Panics
    /// On such a bug.
    pub fn add_bar(&mut self, spec: BarSpec) {
        let (wide, io) = (spec.kind == BarKind::Memory64, spec.kind == BarKind::Io);
        assert!(
            spec.size.is_power_of_two() && if io { (4..=256).contains(&spec.size) } else { spec.size >= 16 },
            "a BAR's size is a power of two from 16 up, of ports from 4 to 256"
        );
        assert!(wide || spec.size <= 1 << 31, "a 32-bit BAR is at most 2 GiB");
        assert!(spec.bar < if wide { 5 } else { 6 }, "there are six BARs");
        let at = BAR0 + usize::from(spec.bar) * 4;
        let mask = (!(spec.size - 1)).to_le_bytes();
        let len = if wide { 8 } else { 4 };
        for (byte, m) in self.writable.iter_mut().skip(at).take(len).zip(mask) {
            assert!(*byte == 0, "BARs overlap");
            *byte = m;
        }
        let kind = match spec.kind {
            BarKind::Memory32 => 0,
            BarKind::Memory64 => 0b100,
            BarKind::Io => 0b1,
        };
        self.set(at, &[kind | if spec.prefetchable && !io { 0b1000 } else { 0 }]);
        if io {
            self.writable[usize::from(COMMAND)] |= COMMAND_IO as u8;
        }
        self.bars.push(spec);
    }

    /// Appends a capability with `id` and `body` (what follows id and next pointer), of which the bits of `writable` may be
    /// written; gives its offset. A full space is a bug of the caller.
    ///
    /// # Panics
    /// When there is no room or `writable` is longer than `body`.
    pub fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> u16 {
        let at = self.free;
        self.place_capability(at as u16, id, body, writable);
        // at < 256, as asserted there.
        at as u16
    }

    /// Puts a capability at an offset of the caller's, a multiple of 4 from 0x40 on, behind those that are in the list
    /// already: for a function that looks like another one. One that does not fit is a bug of the caller.
    ///
    /// # Panics
    /// On such a bug.
    pub fn place_capability(&mut self, at: u16, id: u8, body: &[u8], writable: &[u8]) {
        let at = usize::from(at);
        let end = (at + 2 + body.len()).next_multiple_of(4);
        assert!(
            at >= FIRST_CAPABILITY && at.is_multiple_of(4),
            "capabilities stand at multiples of 4, past the header"
        );
        assert!(end <= SIZE && writable.len() <= body.len(), "no room for a capability");
        self.set(at, &[id, 0]);
        self.set(at + 2, body);
        self.allow(at + 2, writable);
        let link = if self.last_capability == CAPABILITIES { CAPABILITIES } else { self.last_capability + 1 };
        // at < 256, as asserted.
        self.set(link, &[at as u8]);
        let status = self.bytes[STATUS] | STATUS_CAPABILITIES;
        self.set(STATUS, &[status]);
        (self.last_capability, self.free) = (at, self.free.max(end));
    }

    /// Reads; bytes past the end read as zero.
    pub fn read(&self, offset: u16, data: &mut [u8]) {
        data.fill(0);
        let from = self.bytes.get(usize::from(offset)..).unwrap_or_default();
        for (out, byte) in data.iter_mut().zip(from) {
            *out = *byte;
        }
    }

    /// Writes what is writable and says what that changed.
    pub fn write(&mut self, offset: u16, data: &[u8]) -> Effect {
        let at = usize::from(offset);
        let (decoded, before) = (self.memory_enabled(), (self.io_enabled(), self.bar_bytes()));
        let fields = self.bytes.iter_mut().zip(&self.writable).skip(at);
        for ((byte, mask), new) in fields.zip(data) {
            *byte = (*byte & !mask) | (new & mask);
        }
        match self.memory_enabled() {
            now if now != decoded => Effect::Decode(now),
            _ if (self.io_enabled(), self.bar_bytes()) != before => Effect::Moved,
            _ => Effect::None,
        }
    }

    fn bar_bytes(&self) -> [u8; 24] {
        let mut bars = [0; 24];
        bars.copy_from_slice(&self.bytes[BAR0..BAR0 + 24]);
        bars
    }

    /// Whether memory decoding is on.
    #[must_use]
    pub fn memory_enabled(&self) -> bool {
        u16::from(self.bytes[usize::from(COMMAND)]) & COMMAND_MEMORY != 0
    }

    /// Whether decoding of ports is on.
    #[must_use]
    pub fn io_enabled(&self) -> bool {
        u16::from(self.bytes[usize::from(COMMAND)]) & COMMAND_IO != 0
    }

    /// The little-endian number of up to 4 bytes at `offset`.
    #[must_use]
    pub fn get(&self, offset: u16, len: usize) -> u32 {
        let mut word = [0; 4];
        for (out, byte) in word.iter_mut().zip(self.bytes.iter().skip(usize::from(offset)).take(len)) {
            *out = *byte;
        }
        u32::from_le_bytes(word)
    }

    /// Where each BAR is.
    #[must_use]
    pub fn placements(&self) -> Vec<Placement> {
        let (memory, ports) = (self.memory_enabled(), self.io_enabled());
        let placement = |spec: &BarSpec| {
            let io = spec.kind == BarKind::Io;
            let enabled = if io { ports } else { memory };
            let wide = spec.kind == BarKind::Memory64;
            Placement { bar: spec.bar, address: self.bar_address(spec), size: spec.size, io, wide, enabled }
        };
        self.bars.iter().map(placement).collect()
    }

    fn bar_address(&self, spec: &BarSpec) -> u64 {
        let at = (BAR0 + usize::from(spec.bar) * 4) as u16;
        let low = u64::from(self.get(at, 4));
        match spec.kind {
            BarKind::Memory32 => low & !0xf,
            BarKind::Memory64 => low & !0xf | u64::from(self.get(at + 4, 4)) << 32,
            BarKind::Io => low & !0x3,
        }
    }

    /// Sets a BAR's address, as firmware would; a BAR that is not there is ignored.
    pub fn place(&mut self, bar: u8, address: u64) {
        let Some(spec) = self.bars.iter().copied().find(|s| s.bar == bar) else { return };
        let at = (BAR0 + usize::from(bar) * 4) as u16;
        let len = if spec.kind == BarKind::Memory64 { 8 } else { 4 };
        self.write(at, &address.to_le_bytes()[..len]);
    }

    /// Clears all that software wrote: command, BARs and capabilities' writable bits.
    pub fn reset(&mut self) {
        for (byte, mask) in self.bytes.iter_mut().zip(&self.writable) {
            *byte &= !mask;
        }
    }

    fn set(&mut self, at: usize, data: &[u8]) {
        self.bytes[at..at + data.len()].copy_from_slice(data);
    }

    fn allow(&mut self, at: usize, mask: &[u8]) {
        self.writable[at..at + mask.len()].copy_from_slice(mask);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> ConfigSpace {
        let mut s = ConfigSpace::new(Identity {
            vendor: 0x1af4,
            device: 0x1042,
            revision: 1,
            class: 0x01_80_00,
            subsystem_vendor: 0x1af4,
            subsystem: 0x40,
        });
        s.add_bar(BarSpec { bar: 0, kind: BarKind::Memory64, size: 0x4000, prefetchable: false });
        s.add_bar(BarSpec { bar: 2, kind: BarKind::Memory32, size: 0x1000, prefetchable: true });
        s
    }

    fn word(s: &ConfigSpace, at: u16) -> u32 {
        let mut b = [0; 4];
        s.read(at, &mut b);
        u32::from_le_bytes(b)
    }

    #[test]
    fn identity_is_where_the_guest_looks_and_read_only() {
        let mut s = space();
        assert_eq!(word(&s, 0), 0x1042_1af4);
        assert_eq!(word(&s, 8), 0x0180_0001);
        assert_eq!(word(&s, 0x2c), 0x0040_1af4);
        assert_eq!(s.write(0, &[0xff; 4]), Effect::None);
        assert_eq!(word(&s, 0), 0x1042_1af4);
        assert_eq!(word(&s, 0x3c), 0, "no interrupt pin");
    }

    #[test]
    fn sizing_reads_back_the_size() {
        let mut s = space();
        assert_eq!(s.write(0x10, &u32::MAX.to_le_bytes()), Effect::Moved);
        s.write(0x14, &u32::MAX.to_le_bytes());
        s.write(0x18, &u32::MAX.to_le_bytes());
        s.write(0x1c, &u32::MAX.to_le_bytes());
        assert_eq!(word(&s, 0x10), 0xffff_c004);
        assert_eq!(word(&s, 0x14), 0xffff_ffff);
        assert_eq!(word(&s, 0x18), 0xffff_f008);
        assert_eq!(word(&s, 0x1c), 0, "an unused BAR has no size");
    }

    #[test]
    fn moves_and_decoding_are_reported_once() {
        let mut s = space();
        s.place(0, 0x1_2345_4000);
        s.place(2, 0xe000_1000);
        assert_eq!(s.write(0x10, &0x2345_4004u32.to_le_bytes()), Effect::None, "the same address again");
        assert_eq!(s.write(COMMAND, &[0x02, 0x00]), Effect::Decode(true));
        assert_eq!(s.write(COMMAND, &[0x06, 0x04]), Effect::None);
        assert_eq!(
            s.placements(),
            [
                Placement { bar: 0, address: 0x1_2345_4000, size: 0x4000, io: false, wide: true, enabled: true },
                Placement { bar: 2, address: 0xe000_1000, size: 0x1000, io: false, wide: false, enabled: true },
            ]
        );
        assert_eq!(s.write(0x11, &[0xc0]), Effect::Moved, "byte access");
        assert_eq!(s.placements()[0].address, 0x1_2345_c000);
        assert_eq!(s.write(COMMAND, &[0]), Effect::Decode(false));
        s.reset();
        assert_eq!(
            s.placements()[0],
            Placement { bar: 0, address: 0, size: 0x4000, io: false, wide: true, enabled: false }
        );
        assert_eq!(word(&s, 0x10), 4, "the kind of the BAR survives");
    }

    #[test]
    fn ports_have_a_switch_of_their_own() {
        let mut s = space();
        assert_eq!(s.write(COMMAND, &[1]), Effect::None, "without a BAR of ports there is nothing to switch");
        s.add_bar(BarSpec { bar: 3, kind: BarKind::Io, size: 8, prefetchable: false });
        s.write(0x1c, &u32::MAX.to_le_bytes());
        assert_eq!(word(&s, 0x1c), 0xffff_fff9);
        s.place(3, 0x1038);
        assert_eq!(word(&s, 0x1c), 0x1039);
        assert_eq!(s.write(COMMAND, &[1]), Effect::Moved);
        let ports = Placement { bar: 3, address: 0x1038, size: 8, io: true, wide: false, enabled: true };
        assert_eq!(s.placements()[2], ports);
        assert!(!s.placements()[0].enabled, "memory stays off");
        assert_eq!(s.write(COMMAND, &[2]), Effect::Decode(true));
        assert_eq!(s.placements()[2], Placement { enabled: false, ..ports });
    }

    #[test]
    fn capabilities_form_a_list() {
        let mut s = space();
        assert_eq!(word(&s, 0x34), 0);
        let a = s.add_capability(0x09, &[1, 2, 3, 4, 5], &[]);
        let b = s.add_capability(0x11, &[0xaa, 0xbb], &[0x00, 0x80]);
        assert_eq!((a, b), (0x40, 0x48));
        assert_eq!(word(&s, 0x34), 0x40);
        assert_eq!(word(&s, 0x04) >> 16 & 0x10, 0x10);
        assert_eq!(word(&s, 0x40), 0x0201_4809);
        assert_eq!(word(&s, 0x48), 0xbbaa_0011);
        s.write(0x4a, &[0x00, 0x00]);
        assert_eq!(word(&s, 0x48), 0x3baa_0011, "only the bit allowed changes");
        s.place_capability(0x80, 0x05, &[1; 10], &[]);
        s.place_capability(0x60, 0x01, &[2; 6], &[]);
        assert_eq!([word(&s, 0x48) >> 8 & 0xff, word(&s, 0x80), word(&s, 0x60)], [0x80, 0x0101_6005, 0x0202_0001]);
        assert_eq!(s.add_capability(0x10, &[0; 6], &[]), 0x8c, "past all of them");
    }
}
