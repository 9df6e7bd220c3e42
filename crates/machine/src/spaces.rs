// SPDX-License-Identifier: Apache-2.0
//! The machine's two address spaces, of memory and of ports: who answers where. KVM's slots and doorbells follow the first.
//!
//! `build` and the buses place regions, the guest's writes to configuration space move them; `dispatch` looks on each exit,
//! on the vCPU's thread, without a lock.

use std::any::Any;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use base::{Gpa, Hva};
use kvm::{IoAddress, Slot, Vm};
use mem::GuestRam;
use mem::space::{
    AddressSpace, Change, Doorbell, FlatDoorbell, FlatView, Kind, Listener, ListenerId, MemorySlot, ROOT, RegionId,
    SlotSink, Slots, SpaceError, Target, Tree,
};

use crate::error::Error;
use crate::layout::{ACPI_PORT, ECAM, IOAPIC, PCI_HOTPLUG_PORTS, PVPANIC_PORT, SERIAL_PORT};
use crate::legacy::{DebugExit, I8042_COMMAND, I8042_DATA};
use crate::timeline::{BOOT_PORT, DEBUG_PORT};

/// Who answers accesses to memory that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// Our I/O APIC.
    IoApic,
    /// The paravirtual interrupt controller.
    Vioapic,
    /// PCI configuration space.
    Ecam,
    /// A BAR of the PCI function with this index.
    Bar {
        /// Index in the bus's list.
        function: u8,
        /// BAR number.
        bar: u8,
    },
    /// The page of registers with this number.
    VirtioMmio(u8),
}

/// Who answers a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Port {
    /// The 16550.
    Serial,
    /// The i8042's data port.
    I8042Data,
    /// The i8042's command port.
    I8042Command,
    /// pvpanic.
    Pvpanic,
    /// ACPI's sleep and reset registers.
    Acpi,
    /// Plugging of PCI functions.
    PciHotplug,
    /// A marker.
    Marker,
    /// The debug exit.
    DebugExit,
    /// A BAR of the PCI function with this index.
    Bar {
        /// Index in the bus's list.
        function: u8,
        /// BAR number.
        bar: u8,
    },
}

/// A BAR's region, in the one address space or the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarRegion {
    /// Of memory.
    Memory(RegionId),
    /// Of ports.
    Ports(RegionId),
}

/// What is at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// RAM: a slot has it, or is just being made.
    Ram,
    /// A device; the access is at this byte of its region.
    Device(Device, u64),
    /// Nothing.
    Nobody,
}

/// The machine's address spaces. Cloning shares them.
#[derive(Clone)]
pub struct Spaces(Arc<Inner>);

struct Inner {
    memory: AddressSpace<Device>,
    ports: AddressSpace<Port>,
    /// All memory that was placed, kept for as long as a slot may show it: of pages with their regions, which may go.
    placed: Mutex<Vec<(Option<RegionId>, Owner)>>,
}

/// What keeps placed memory where it is.
pub type Owner = Arc<dyn Any + Send + Sync>;

impl Inner {
    fn keep(&self, region: Option<RegionId>, owner: Owner) {
        self.placed.lock().unwrap_or_else(PoisonError::into_inner).push((region, owner));
    }
}

/// What goes before what, where a guest puts a BAR over something else.
const BAR_PRIORITY: i32 = -1;
/// Pages of a device, over the device itself.
const PAGE_PRIORITY: i32 = 1;

impl Spaces {
    /// Address spaces for `vm`, with `ram` in them, each region at its own address.
    ///
    /// # Errors
    /// [`Error::Space`] when KVM takes no more slots.
    pub fn new(vm: &Vm, ram: &GuestRam) -> Result<Self, Error> {
        let inner = Inner {
            memory: AddressSpace::new(u64::MAX),
            ports: AddressSpace::new(1 << 16),
            placed: Mutex::new(Vec::new()),
        };
        let spaces = Self(Arc::new(inner));
        // SAFETY: `placed` keeps all memory for which there are slots, and every vCPU's thread keeps `placed`: regions of
        // memory are made here, in `make_pieces` and in `add_page` alone, which put the memory there first.
        let sink = unsafe { KvmSlots::new(vm) };
        spaces.0.memory.listen(Box::new(Slots::new(sink, vm.most_slots())))?;
        spaces.0.memory.listen(Box::new(Doorbells::new(vm, IoAddress::Mmio)))?;
        // A port space has no more than 2^16 ports.
        spaces.0.ports.listen(Box::new(Doorbells::new(vm, |at| IoAddress::Pio(at.0 as u16))))?;
        for (at, size, host) in ram.regions() {
            spaces.0.keep(None, Arc::new(ram.clone()));
            spaces.0.memory.change(|tree| {
                let region = tree.region(size, Kind::Ram(host))?;
                tree.place(ROOT, at.0, 0, region)
            })?;
        }
        Ok(spaces)
    }

    /// Has `listener` follow memory from now on; it is told of all there is first.
    ///
    /// # Errors
    /// The listener's.
    pub fn follow(&self, listener: Box<dyn Listener<Device>>) -> Result<ListenerId, SpaceError> {
        self.0.memory.listen(listener)
    }

    /// Has a listener follow no longer; it takes back what it did.
    ///
    /// # Errors
    /// The listener's, which is gone all the same.
    pub fn unfollow(&self, listener: ListenerId) -> Result<(), SpaceError> {
        self.0.memory.leave(listener)
    }

    /// Makes a region for each `piece` of the memory of `ram` that comes and goes, lowest first; they are nowhere yet.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn make_pieces(&self, ram: &GuestRam, piece: u64) -> Result<Vec<RegionId>, Error> {
        let Some(hot) = ram.hot() else { return Ok(Vec::new()) };
        self.0.keep(None, Arc::new(ram.clone()));
        let host = hot.host().0;
        Ok(self.0.memory.change(|tree| {
            let pieces = (0..hot.size()).step_by(usize::try_from(piece).unwrap_or(usize::MAX));
            pieces.map(|at| tree.region(piece.min(hot.size() - at), Kind::Ram(Hva(host + at)))).collect()
        })?)
    }

    /// Puts pieces of memory that were made before where they are said to be, all at once.
    ///
    /// # Errors
    /// [`SpaceError::Refused`] when a listener can't follow: none is there then.
    pub fn put_pieces(&self, pieces: &[(RegionId, Gpa)]) -> Result<(), SpaceError> {
        self.0.memory.change(|tree| pieces.iter().try_for_each(|(piece, at)| tree.place(ROOT, at.0, 0, *piece)))
    }

    /// Takes pieces away, all at once.
    ///
    /// # Errors
    /// [`SpaceError::Refused`] when a listener can't follow: all are there then.
    pub fn take_pieces(&self, pieces: &[RegionId]) -> Result<(), SpaceError> {
        self.0.memory.change(|tree| pieces.iter().try_for_each(|piece| tree.unplace(*piece)))
    }

    /// Places a device of `size` bytes with its doorbells.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn add_device(&self, at: Gpa, size: u64, device: Device, bells: Vec<Doorbell>) -> Result<RegionId, Error> {
        Ok(self.0.memory.change(|tree| {
            let region = tree.device(size, Kind::Mmio(device), bells)?;
            tree.place(ROOT, at.0, 0, region)?;
            Ok(region)
        })?)
    }

    /// Makes BAR `bar` of the PCI function with index `function`, of ports if `io`; it is nowhere yet.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn make_bar(
        &self,
        io: bool,
        size: u64,
        (function, bar): (u8, u8),
        bells: Vec<Doorbell>,
    ) -> Result<BarRegion, Error> {
        Ok(if io {
            let kind = Kind::Mmio(Port::Bar { function, bar });
            BarRegion::Ports(self.0.ports.change(|tree| tree.device(size, kind, bells))?)
        } else {
            let kind = Kind::Mmio(Device::Bar { function, bar });
            BarRegion::Memory(self.0.memory.change(|tree| tree.device(size, kind, bells))?)
        })
    }

    /// Puts BARs where they are now, those of each address space at once; `None` is nowhere, and so is what lies past all
    /// addresses.
    pub fn move_bars(&self, bars: &[(BarRegion, Option<u64>)]) {
        let memory = bars.iter().filter_map(|(region, at)| match region {
            BarRegion::Memory(region) => Some((*region, *at)),
            BarRegion::Ports(_) => None,
        });
        let ports = bars.iter().filter_map(|(region, at)| match region {
            BarRegion::Ports(region) => Some((*region, *at)),
            BarRegion::Memory(_) => None,
        });
        let moved =
            self.0.memory.change(|tree| move_all(tree, memory)).and(self.0.ports.change(|t| move_all(t, ports)));
        if let Err(refused) = moved {
            // Only where a BAR has memory of a device in it, and KVM no slot for it: it stays where it was.
            base::news::print_beside_guest(&format!(
                "a BAR can't follow the guest, {refused}; give the machine fewer devices"
            ));
        }
    }

    /// Shows the guest `size` bytes of memory over a device's region, `at` bytes from its start.
    ///
    /// # Safety
    /// The memory of `kind` is mapped for as long as `owner` lives, and holds nothing that the guest may not see or, if it is
    /// RAM, write.
    ///
    /// # Errors
    /// [`Error::Space`] where KVM can't.
    pub unsafe fn add_page(
        &self,
        owner: Owner,
        size: u64,
        kind: Kind<Device>,
        place: (RegionId, u64),
    ) -> Result<RegionId, Error> {
        // SAFETY: as promised by the caller.
        unsafe { self.add_page_with(owner, size, kind, place, Vec::new()) }
    }

    /// [`Spaces::add_page`] with doorbells: those of the device below it are out of sight as long as it is there.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn add_page_with(
        &self,
        owner: Owner,
        size: u64,
        kind: Kind<Device>,
        (over, at): (RegionId, u64),
        bells: Vec<Doorbell>,
    ) -> Result<RegionId, Error> {
        // Before the first slot that shows it.
        let region = self.0.memory.change(|tree| tree.device(size, kind, bells))?;
        self.0.keep(Some(region), owner);
        self.0.memory.change(|tree| tree.place(over, at, PAGE_PRIORITY, region)).inspect_err(|_| {
            self.0.placed.lock().unwrap_or_else(PoisonError::into_inner).retain(|(other, _)| *other != Some(region));
            // It is nowhere.
            let _ = self.0.memory.change(|tree| tree.forget(region));
        })?;
        Ok(region)
    }

    /// Puts a page that was taken away back to the start of the device's region that it was over.
    ///
    /// # Errors
    /// [`Error::Space`] where KVM can't.
    pub fn put_back(&self, page: RegionId, over: RegionId) -> Result<(), Error> {
        Ok(self.0.memory.change(|tree| tree.place(over, 0, PAGE_PRIORITY, page))?)
    }

    /// Takes a region away; the device below it answers again.
    pub fn remove(&self, region: RegionId) {
        // A slot that KVM made a moment ago it takes back, too.
        let _ = self.0.memory.change(|tree| tree.unplace(region));
    }

    /// Takes BARs away for good, and the pages over them, whose memory goes with its last owner.
    ///
    /// # Errors
    /// [`SpaceError::Refused`] when KVM does not let go: all are there then.
    pub fn forget_bars(&self, bars: &[BarRegion], pages: &[RegionId]) -> Result<(), SpaceError> {
        let memory = bars.iter().filter_map(|bar| if let BarRegion::Memory(id) = bar { Some(*id) } else { None });
        let ports = bars.iter().filter_map(|bar| if let BarRegion::Ports(id) = bar { Some(*id) } else { None });
        self.0.memory.change(|tree| forget_all(tree, pages.iter().copied().chain(memory)))?;
        let mut placed = self.0.placed.lock().unwrap_or_else(PoisonError::into_inner);
        placed.retain(|(region, _)| region.is_none_or(|region| !pages.contains(&region)));
        drop(placed);
        self.0.ports.change(|tree| forget_all(tree, ports))
    }

    /// Places the registers through which functions are plugged.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn add_hotplug_ports(&self) -> Result<(), Error> {
        let (at, size) = PCI_HOTPLUG_PORTS;
        Ok(self.0.ports.change(|tree| {
            let region = tree.region(size, Kind::Mmio(Port::PciHotplug))?;
            tree.place(ROOT, at.into(), 0, region)
        })?)
    }

    /// Places an I/O APIC of our own.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn add_ioapic(&self) -> Result<(), Error> {
        self.add_device(IOAPIC.0, IOAPIC.1, Device::IoApic, Vec::new()).map(drop)
    }

    /// Places PCI configuration space.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn add_ecam(&self) -> Result<RegionId, Error> {
        self.add_device(ECAM.0, ECAM.1, Device::Ecam, Vec::new())
    }

    /// Places the ports.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn add_ports(&self, serial: bool, debug_exit: Option<DebugExit>) -> Result<(), Error> {
        Ok(self.0.ports.change(|tree| place_ports(tree, serial, debug_exit))?)
    }

    /// What is at `at` of memory.
    #[inline]
    #[must_use]
    pub fn memory_at(&self, at: u64) -> At {
        self.0.memory.read(|view| match view.find(at) {
            None => At::Nobody,
            Some(range) => match &range.target {
                Target::Mmio(device) => At::Device(*device, range.offset + (at - range.start)),
                Target::Rom(_, Some((device, first))) => At::Device(*device, first + (at - range.start)),
                Target::Ram(_) | Target::Direct(_) | Target::Rom(_, None) => At::Ram,
            },
        })
    }

    /// Who answers `port`, and at which byte of its region.
    #[inline]
    #[must_use]
    pub fn port_at(&self, port: u16) -> Option<(Port, u16)> {
        self.0.ports.read(|view| port_in(view, port))
    }
}

fn forget_all<D: Clone>(tree: &mut Tree<D>, mut regions: impl Iterator<Item = RegionId>) -> Result<(), SpaceError> {
    regions.try_for_each(|region| {
        tree.unplace(region)?;
        tree.forget(region)
    })
}

fn move_all<D: Clone>(
    tree: &mut Tree<D>,
    bars: impl Iterator<Item = (RegionId, Option<u64>)> + Clone,
) -> Result<(), SpaceError> {
    for (region, _) in bars.clone() {
        tree.unplace(region)?;
    }
    for (region, at) in bars {
        let Some(at) = at else { continue };
        match tree.place(ROOT, at, BAR_PRIORITY, region) {
            Err(SpaceError::Outside { .. }) | Ok(()) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn place_ports(tree: &mut Tree<Port>, serial: bool, debug_exit: Option<DebugExit>) -> Result<(), SpaceError> {
    let mut ports = vec![
        (I8042_DATA, 1, Port::I8042Data, 0),
        (I8042_COMMAND, 1, Port::I8042Command, 0),
        (PVPANIC_PORT, 1, Port::Pvpanic, 0),
        (ACPI_PORT, 3, Port::Acpi, 0),
        (BOOT_PORT, 1, Port::Marker, 0),
        (DEBUG_PORT, 1, Port::Marker, 0),
    ];
    if serial {
        ports.push((SERIAL_PORT, 8, Port::Serial, 0));
    }
    // Wherever the user puts it, it takes no port that has a meaning.
    ports.extend(debug_exit.map(|exit| (exit.first(), spec::DEBUG_EXIT_PORTS.into(), Port::DebugExit, -1)));
    for (at, size, port, priority) in ports {
        let region = tree.region(size, Kind::Mmio(port))?;
        tree.place(ROOT, at.into(), priority, region)?;
    }
    Ok(())
}

#[inline]
fn port_in(view: &FlatView<Port>, port: u16) -> Option<(Port, u16)> {
    let range = view.find(port.into())?;
    let Target::Mmio(who) = range.target else { return None };
    // A port space has as many bytes.
    Some((who, (range.offset + (u64::from(port) - range.start)) as u16))
}

/// KVM's slots, as `mem` asks for them.
struct KvmSlots(Vm);

impl KvmSlots {
    /// # Safety
    /// Memory in the address space that this follows stays mapped for as long as a vCPU of `vm` may run, and holds nothing
    /// that the guest may not see.
    unsafe fn new(vm: &Vm) -> Self {
        Self(vm.clone())
    }
}

impl SlotSink for KvmSlots {
    fn set(&mut self, number: u32, slot: &MemorySlot) -> io::Result<()> {
        let MemorySlot { at, size, host, readonly, log } = *slot;
        // SAFETY: what `new` demands.
        unsafe { self.0.set_slot(&Slot { number, at, size, host, readonly, log }) }.map_err(io::Error::from)
    }

    fn remove(&mut self, number: u32, slot: &MemorySlot) -> io::Result<()> {
        self.0.remove_slot(number, slot.at).map_err(io::Error::from)
    }
}

/// Doorbells that KVM answers. Where it has no room, or the guest put two BARs in one place, kicks reach the device's
/// registers and work as well.
struct Doorbells {
    vm: Vm,
    /// What KVM calls a place in this address space.
    space: fn(Gpa) -> IoAddress,
    answered: Vec<FlatDoorbell>,
}

impl Doorbells {
    fn new(vm: &Vm, space: fn(Gpa) -> IoAddress) -> Self {
        Self { vm: vm.clone(), space, answered: Vec::new() }
    }
}

impl<D> Listener<D> for Doorbells {
    fn apply(&mut self, change: &Change<'_, D>) -> Result<(), SpaceError> {
        for gone in &change.unbelled {
            let same = |bell: &mut FlatDoorbell| {
                bell.at == gone.at && bell.value == gone.value && Arc::ptr_eq(&bell.fd, &gone.fd)
            };
            for bell in self.answered.extract_if(.., same) {
                // It was registered with the same arguments, so this can't fail.
                let _ = self.vm.remove_ioeventfd(&bell.fd, (self.space)(bell.at), bell.value);
            }
        }
        for new in &change.belled {
            if self.vm.add_ioeventfd(&new.fd, (self.space)(new.at), new.value).is_ok() {
                self.answered.push((*new).clone());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_port_has_its_answer() {
        let ports = AddressSpace::new(1 << 16);
        ports.change(|tree| place_ports(tree, true, Some(DebugExit::new(0xf4).unwrap()))).unwrap();
        let who = |port| ports.read(|view| port_in(view, port));
        assert_eq!(
            [who(0x3f7), who(0x3f8), who(0x3ff), who(0x400)],
            [None, Some((Port::Serial, 0)), Some((Port::Serial, 7)), None]
        );
        assert_eq!(
            [who(0x60), who(0x61), who(0x64)],
            [Some((Port::I8042Data, 0)), None, Some((Port::I8042Command, 0))]
        );
        assert_eq!([who(0x600), who(0x602), who(0x603)], [Some((Port::Acpi, 0)), Some((Port::Acpi, 2)), None]);
        assert_eq!([who(0xf3), who(0xf4), who(0xf7)], [None, Some((Port::DebugExit, 0)), Some((Port::DebugExit, 3))]);
        assert_eq!(
            [who(0x80), who(0x3f0), who(0x505)],
            [Some((Port::Marker, 0)), Some((Port::Marker, 0)), Some((Port::Pvpanic, 0))]
        );
        assert_eq!([who(0), who(0xffff)], [None, None]);
    }
}
