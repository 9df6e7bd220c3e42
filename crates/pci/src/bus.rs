// SPDX-License-Identifier: Apache-2.0
//! Bus 0: which function answers a configuration access, by ECAM (PCI Express 3.0, 7.2.2) or by ports 0xcf8 and 0xcfc
//! (PCI Local Bus 3.0, 3.2.2.3.2).
//!
//! `machine` keeps the bus behind one lock (the port pair has one address register for all vCPUs) and shares each function
//! with its MMIO dispatch, so that BAR accesses never take the bus lock.

use std::sync::{Arc, Mutex, PoisonError};

use crate::config::{ConfigSpace, Identity};
use crate::device::{Effect, PciDevice, Placement};

/// A function as the bus and `machine` share it.
pub type Shared = Arc<Mutex<dyn PciDevice>>;

/// Slots of the bus, the host bridge's included.
pub const SLOTS: u8 = 32;
/// Bytes of ECAM for one bus: 32 slots, 8 functions, 4 KiB each.
pub const ECAM_BUS_SIZE: u64 = 1 << 20;

/// First of the four ports of the address register.
const ADDRESS_PORT: u16 = 0xcf8;
/// First of the four ports of the data window.
const DATA_PORT: u16 = 0xcfc;

/// Why a device can't be put on the bus.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// All slots are taken.
    #[error("the PCI bus has no free slot; at most 31 devices fit, so give the VM fewer")]
    Full,
}

/// A bus with functions in some of its 32 slots.
pub struct PciBus {
    slots: Vec<Option<Shared>>,
    address: u32,
}

/// A function a guest can do nothing with, at 00:00.0, so that it believes in the bus.
pub struct HostBridge {
    config: ConfigSpace,
}

impl HostBridge {
    /// The bridge.
    #[must_use]
    pub fn new() -> Self {
        // Intel's id for a virtual PCIe host bridge: no driver of a guest binds to it, no quirk touches it.
        let id = Identity {
            vendor: 0x8086,
            device: 0x0d57,
            revision: 0,
            class: 0x06_00_00,
            subsystem_vendor: 0,
            subsystem: 0,
        };
        Self { config: ConfigSpace::new(id) }
    }
}

impl Default for HostBridge {
    fn default() -> Self {
        Self::new()
    }
}

impl PciDevice for HostBridge {
    fn config_read(&mut self, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
    }
    fn config_write(&mut self, offset: u16, data: &[u8]) -> Effect {
        self.config.write(offset, data);
        Effect::None
    }
    fn placements(&self) -> Vec<Placement> {
        Vec::new()
    }
    fn place(&mut self, _bar: u8, _address: u64) {}
    fn bar_read(&mut self, _bar: u8, _offset: u64, data: &mut [u8]) {
        data.fill(0);
    }
    fn bar_write(&mut self, _bar: u8, _offset: u64, _data: &[u8]) {}
    fn reset(&mut self) {
        self.config.reset();
    }
}

impl PciBus {
    /// A bus with nothing but the host bridge.
    #[must_use]
    pub fn new() -> Self {
        let mut slots: Vec<Option<Shared>> = vec![None; usize::from(SLOTS)];
        if let Some(first) = slots.first_mut() {
            *first = Some(Arc::new(Mutex::new(HostBridge::new())));
        }
        Self { slots, address: 0 }
    }

    /// Puts a function into the lowest free slot and gives the slot's number.
    ///
    /// # Errors
    /// [`Error::Full`] when there is none.
    pub fn attach(&mut self, device: Shared) -> Result<u8, Error> {
        let free = self.slots.iter_mut().zip(0u8..).find(|(slot, _)| slot.is_none());
        let (slot, number) = free.ok_or(Error::Full)?;
        *slot = Some(device);
        Ok(number)
    }

    /// Puts a function into `slot`.
    ///
    /// # Errors
    /// [`Error::Full`] when something is there, or there is no such slot.
    pub fn attach_at(&mut self, slot: u8, device: Shared) -> Result<(), Error> {
        let place = self.slots.get_mut(usize::from(slot)).filter(|place| place.is_none()).ok_or(Error::Full)?;
        *place = Some(device);
        Ok(())
    }

    /// Takes the function out of `slot`: nobody answers there from now on.
    pub fn detach(&mut self, slot: u8) -> Option<Shared> {
        self.slots.get_mut(usize::from(slot))?.take()
    }

    /// The function in `slot`.
    #[must_use]
    pub fn device(&self, slot: u8) -> Option<&Shared> {
        self.slots.get(usize::from(slot))?.as_ref()
    }

    /// All functions with their slots, the host bridge included.
    pub fn devices(&self) -> impl Iterator<Item = (u8, &Shared)> {
        self.slots.iter().zip(0u8..).filter_map(|(slot, number)| Some((number, slot.as_ref()?)))
    }

    /// Back to power-on for the bus and every function on it.
    pub fn reset(&mut self) {
        self.address = 0;
        for slot in self.slots.iter().flatten() {
            slot.lock().unwrap_or_else(PoisonError::into_inner).reset();
        }
    }

    /// Reads configuration at byte `offset` of the ECAM range. What is not there reads as all ones.
    pub fn ecam_read(&self, offset: u64, data: &mut [u8]) {
        self.read(Target::from_ecam(offset), data);
    }

    /// Writes configuration at byte `offset` of the ECAM range; gives the slot and what changed, if a function is there.
    pub fn ecam_write(&mut self, offset: u64, data: &[u8]) -> Option<(u8, Effect)> {
        self.write(Target::from_ecam(offset), data)
    }

    /// Reads ports 0xcf8 to 0xcff.
    pub fn port_read(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        match port {
            ADDRESS_PORT if data.len() == 4 => data.copy_from_slice(&self.address.to_le_bytes()),
            DATA_PORT..=0xcff => self.read(Target::from_ports(self.address, port), data),
            _ => {}
        }
    }

    /// Writes ports 0xcf8 to 0xcff; gives the slot and what changed, if a function is there.
    pub fn port_write(&mut self, port: u16, data: &[u8]) -> Option<(u8, Effect)> {
        match (port, data) {
            (ADDRESS_PORT, &[a, b, c, d]) => {
                // Reserved bits, and the two below a dword, read as zero.
                self.address = u32::from_le_bytes([a, b, c, d]) & 0x80ff_fffc;
                None
            }
            (DATA_PORT..=0xcff, _) => self.write(Target::from_ports(self.address, port), data),
            _ => None,
        }
    }

    fn read(&self, target: Option<Target>, data: &mut [u8]) {
        data.fill(0xff);
        let Some((target, device)) = target.and_then(|t| Some((t, self.device(t.slot)?))) else { return };
        let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
        target.split(data.len(), |offset, range| {
            let Some(part) = data.get_mut(range) else { return };
            if offset < 256 { device.config_read(offset, part) } else { part.fill(0) }
        });
    }

    fn write(&mut self, target: Option<Target>, data: &[u8]) -> Option<(u8, Effect)> {
        let target = target?;
        let mut device = self.device(target.slot)?.lock().unwrap_or_else(PoisonError::into_inner);
        let mut effect = Effect::None;
        target.split(data.len(), |offset, range| {
            if let Some(part) = data.get(range).filter(|_| offset < 256) {
                effect = match (effect, device.config_write(offset, part)) {
                    (Effect::Decode(on), Effect::Moved | Effect::None) => Effect::Decode(on),
                    (Effect::Moved, Effect::None) => Effect::Moved,
                    (_, later) => later,
                };
            }
        });
        Some((target.slot, effect))
    }
}

impl Default for PciBus {
    fn default() -> Self {
        Self::new()
    }
}

/// A place in configuration space of bus 0, function 0.
#[derive(Clone, Copy)]
struct Target {
    slot: u8,
    offset: u16,
}

impl Target {
    fn from_ecam(offset: u64) -> Option<Self> {
        let (bus, slot, function) = (offset >> 20, offset >> 15 & 0x1f, offset >> 12 & 7);
        (bus == 0 && function == 0).then_some(Self { slot: slot as u8, offset: (offset & 0xfff) as u16 })
    }

    fn from_ports(address: u32, port: u16) -> Option<Self> {
        let (enabled, bus) = (address >> 31 == 1, address >> 16 & 0xff);
        let (slot, function) = (address >> 11 & 0x1f, address >> 8 & 7);
        let offset = (address & 0xfc) as u16 + (port & 3);
        (enabled && bus == 0 && function == 0).then_some(Self { slot: slot as u8, offset })
    }

    /// Cuts an access of `len` bytes into accesses of 1, 2 or 4 bytes that do not cross a dword.
    fn split(self, len: usize, mut each: impl FnMut(u16, std::ops::Range<usize>)) {
        let mut done = 0;
        while done < len {
            let at = usize::from(self.offset) + done;
            let room = (4 - at % 4).min(len - done);
            let step = if at.is_multiple_of(room.next_power_of_two()) && room.is_power_of_two() { room } else { 1 };
            let Ok(offset) = u16::try_from(at) else { return };
            each(offset, done..done + step);
            done += step;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::config::{BarKind, BarSpec, COMMAND};

    struct Plain(ConfigSpace);

    impl PciDevice for Plain {
        fn config_read(&mut self, offset: u16, data: &mut [u8]) {
            assert!(matches!(data.len(), 1 | 2 | 4) && usize::from(offset % 4) + data.len() <= 4 && offset < 256);
            self.0.read(offset, data);
        }
        fn config_write(&mut self, offset: u16, data: &[u8]) -> Effect {
            assert!(matches!(data.len(), 1 | 2 | 4) && usize::from(offset % 4) + data.len() <= 4 && offset < 256);
            self.0.write(offset, data)
        }
        fn placements(&self) -> Vec<Placement> {
            self.0.placements()
        }
        fn place(&mut self, bar: u8, address: u64) {
            self.0.place(bar, address);
        }
        fn bar_read(&mut self, _: u8, _: u64, _: &mut [u8]) {}
        fn bar_write(&mut self, _: u8, _: u64, _: &[u8]) {}
        fn reset(&mut self) {
            self.0.reset();
        }
    }

    fn plain() -> Shared {
        let id = Identity { vendor: 0x1234, device: 0x5678, revision: 9, class: 0, subsystem_vendor: 0, subsystem: 0 };
        let mut config = ConfigSpace::new(id);
        config.add_bar(BarSpec { bar: 0, kind: BarKind::Memory64, size: 0x1000, prefetchable: false });
        Arc::new(Mutex::new(Plain(config)))
    }

    fn ecam(slot: u64, offset: u64) -> u64 {
        slot << 15 | offset
    }

    #[test]
    fn both_ways_reach_the_same_function() {
        let mut bus = PciBus::new();
        assert_eq!(bus.attach(plain()), Ok(1));
        let mut word = [0; 4];
        bus.ecam_read(ecam(1, 0), &mut word);
        assert_eq!(u32::from_le_bytes(word), 0x5678_1234);
        assert_eq!(bus.port_write(0xcf8, &0x8000_0800u32.to_le_bytes()), None);
        bus.port_read(0xcf8, &mut word);
        assert_eq!(u32::from_le_bytes(word), 0x8000_0800);
        let mut half = [0; 2];
        bus.port_read(0xcfe, &mut half);
        assert_eq!(u16::from_le_bytes(half), 0x5678);
        bus.port_write(0xcf8, &0x8000_0804u32.to_le_bytes());
        assert_eq!(bus.port_write(0xcfc, &[2]), Some((1, Effect::Decode(true))));
        assert_eq!(bus.ecam_write(ecam(1, u64::from(COMMAND)), &[2, 0]), Some((1, Effect::None)), "already on");
    }

    #[test]
    fn what_is_not_there_reads_as_ones() {
        let mut bus = PciBus::new();
        bus.attach(plain()).unwrap();
        let absent = [ecam(2, 0), ecam(1, 0) | 1 << 12, ecam(1, 0) | 1 << 20, u64::MAX - 7];
        for offset in absent {
            let mut word = [0; 4];
            bus.ecam_read(offset, &mut word);
            assert_eq!(word, [0xff; 4], "{offset:#x}");
            assert_eq!(bus.ecam_write(offset, &[0; 4]), None);
        }
        let mut word = [0; 4];
        bus.ecam_read(ecam(1, 0x100), &mut word);
        assert_eq!(word, [0; 4], "no extended capabilities");
        bus.port_write(0xcf8, &0x0000_0800u32.to_le_bytes());
        bus.port_read(0xcfc, &mut word);
        assert_eq!(word, [0xff; 4], "the enable bit is off");
    }

    #[test]
    fn wide_and_crooked_accesses_are_split() {
        let mut bus = PciBus::new();
        bus.attach(plain()).unwrap();
        let mut wide = [0; 8];
        bus.ecam_read(ecam(1, 0), &mut wide);
        assert_eq!(&wide[..4], 0x5678_1234u32.to_le_bytes());
        let mut odd = [0; 4];
        bus.ecam_read(ecam(1, 1), &mut odd);
        assert_eq!(odd, [0x12, 0x78, 0x56, 0]);
        bus.ecam_read(ecam(1, 0xffe), &mut odd);
        assert_eq!(odd, [0; 4]);
        assert_eq!(bus.ecam_write(ecam(1, 0x10), &0x1_0000_1000u64.to_le_bytes()), Some((1, Effect::Moved)));
        let at = bus.device(1).unwrap().lock().unwrap().placements();
        assert_eq!(
            at,
            [Placement { bar: 0, address: 0x1_0000_1000, size: 0x1000, io: false, wide: true, enabled: false }]
        );
    }

    #[test]
    fn a_function_goes_and_another_one_takes_its_place() {
        let mut bus = PciBus::new();
        assert_eq!((bus.attach(plain()), bus.attach(plain())), (Ok(1), Ok(2)));
        assert!(bus.detach(1).is_some() && bus.detach(1).is_none() && bus.detach(200).is_none());
        let mut word = [0; 4];
        bus.ecam_read(ecam(1, 0), &mut word);
        assert_eq!(word, [0xff; 4]);
        assert_eq!(bus.attach_at(2, plain()), Err(Error::Full));
        assert_eq!((bus.attach_at(7, plain()), bus.attach_at(32, plain())), (Ok(()), Err(Error::Full)));
        bus.ecam_read(ecam(7, 0), &mut word);
        assert_eq!(u32::from_le_bytes(word), 0x5678_1234);
        assert_eq!(bus.attach(plain()), Ok(1));
    }

    #[test]
    fn the_bus_fills_up_and_resets() {
        let mut bus = PciBus::new();
        for slot in 1..SLOTS {
            assert_eq!(bus.attach(plain()), Ok(slot));
        }
        assert_eq!(bus.attach(plain()), Err(Error::Full));
        bus.ecam_write(ecam(31, 4), &[2]);
        bus.reset();
        assert!(bus.devices().all(|(_, d)| d.lock().unwrap().placements().iter().all(|p| !p.enabled)));
        assert_eq!(bus.devices().count(), 32);
    }
}
