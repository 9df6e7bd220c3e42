// SPDX-License-Identifier: Apache-2.0
//! The PCI bus as the machine has it: its devices, and where their BARs are in the machine's address space, which follows
//! the guest's writes to configuration space.
//!
//! vCPU threads call it. A BAR access takes that one device's own lock; the bus's is for configuration space.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::news::News;
use base::{Gpa, Hva};
use irq::MsiSink;
use mem::GuestRam;
use mem::space::{Doorbell, Kind, RegionId};
use pci::{Effect, PciBus, PciDevice, Placement, SLOTS};
use spec::PciAddress;
use vfio::{Opened, VfioPci};
use virtio::VirtioDevice;
use virtio::transport::pci::VirtioPci;

use crate::error::{Error, host};
use crate::intx::PciPins;
use crate::layout::{PCI_PORTS, PCI_WINDOW, PCI_WINDOW_HIGH, high_window};
use crate::msi::KvmMsi;
use crate::spaces::{BarRegion, Device, Spaces};

/// A BAR as a region of the machine's memory or ports.
struct Bar {
    number: u8,
    region: BarRegion,
    /// Where it answers now.
    at: Mutex<Option<u64>>,
}

/// A device on the bus.
struct OnBus {
    device: pci::Shared,
    bars: Vec<Bar>,
    /// What lies over its BARs, and where it is on the host: of a device that is passed through.
    passed: Option<(PciAddress, Vec<RegionId>)>,
}

/// The bus, its devices and where they are.
pub struct PciHost {
    ram: GuestRam,
    msi: KvmMsi,
    pins: PciPins,
    spaces: Spaces,
    /// Configuration space as a region.
    ecam: RegionId,
    bus: Mutex<PciBus>,
    /// By slot. An access holds the lock of its one slot.
    slots: Vec<Mutex<Option<OnBus>>>,
    /// Functions may come and go while the guest runs.
    hotplug: bool,
    /// Next free address of the BAR window, and next free port.
    next: u64,
    next_port: u64,
    /// The window above high memory, and its next free address.
    high: Gpa,
    next_high: u64,
    /// Configuration space where the guest can read it without leaving.
    pages: Option<ConfigPages>,
}

/// A page of guest memory, read-only, for the configuration space of each function.
struct ConfigPages {
    memory: GuestRam,
    /// Slots on the bus in the order of their pages, and the pages' regions; `None` where there is no page any more.
    slots: Mutex<Vec<Option<(u8, RegionId)>>>,
}

/// BARs from here on go above high memory, where they can.
const LARGE_BAR: u64 = 16 << 20;
/// The host bridge's slot.
const HOST_BRIDGE: u8 = 0;
/// Bytes of a function's configuration space, and of its page.
const CONFIG_PAGE: u64 = 0x1000;
/// Of it, what may change.
const HEADER_AND_CAPABILITIES: u64 = 0x100;
/// Where the configuration space of function 0 of `slot` is in all of it.
fn config_at(slot: u8) -> u64 {
    u64::from(slot) << 15
}

/// Copies the first `len` bytes of the configuration space of `slot` to `at` in `memory`.
fn copy_config(bus: &mut PciBus, slot: u8, len: u64, memory: &GuestRam, at: Gpa) {
    for offset in (0..len).step_by(4) {
        let mut word = [0; 4];
        bus.ecam_read(config_at(slot) + offset, &mut word);
        // The page was made for as many bytes.
        let _ = memory.write_bytes(Gpa(at.0 + offset), &word);
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PciHost {
    /// A bus with a host bridge and nothing else, in `spaces`.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn new(spaces: &Spaces, ram: &GuestRam, (msi, pins): (&KvmMsi, PciPins)) -> Result<Self, Error> {
        let high = high_window(ram);
        Ok(Self {
            ram: ram.clone(),
            msi: msi.clone(),
            pins,
            spaces: spaces.clone(),
            ecam: spaces.add_ecam()?,
            bus: Mutex::new(PciBus::new()),
            slots: (0..SLOTS).map(|_| Mutex::new(None)).collect(),
            hotplug: false,
            next: PCI_WINDOW.0.0,
            next_port: PCI_PORTS.0.into(),
            high,
            next_high: high.0,
            pages: None,
        })
    }

    /// Whether there is nothing on the bus but its host bridge, and nothing will come.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        !self.hotplug && self.taken().is_empty()
    }

    /// From now on functions may come and go.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn allow_hotplug(&mut self) -> Result<(), Error> {
        self.hotplug = true;
        self.spaces.add_hotplug_ports()
    }

    /// The slots that devices are in, lowest first, the host bridge's not among them.
    fn taken(&self) -> Vec<u8> {
        (0..SLOTS).zip(&self.slots).filter(|(_, place)| lock(place).is_some()).map(|(slot, _)| slot).collect()
    }

    /// The slots that functions may come to or go from, a bit for each.
    #[must_use]
    pub fn hotplug_slots(&self) -> u32 {
        if !self.hotplug {
            return 0;
        }
        let stays = |place: &Mutex<Option<OnBus>>| lock(place).as_ref().is_some_and(|on_bus| on_bus.passed.is_none());
        let may = (0..SLOTS).zip(&self.slots).filter(|(slot, place)| *slot != HOST_BRIDGE && !stays(place));
        may.map(|(slot, _)| 1 << slot).sum()
    }

    /// The devices of the host on the bus, with their slots.
    #[must_use]
    pub fn passed(&self) -> Vec<(u8, PciAddress)> {
        let passed = |place: &Mutex<Option<OnBus>>| Some(lock(place).as_ref()?.passed.as_ref()?.0);
        (0..SLOTS).zip(&self.slots).filter_map(|(slot, place)| Some((slot, passed(place)?))).collect()
    }

    /// Puts `device` into the next slot, its BARs at the next addresses, and gives it as it is there.
    ///
    /// # Errors
    /// [`Error::TooMuch`] when the bus is full, [`Error::Host`] when the host is out of descriptors or interrupts.
    pub fn add(&mut self, device: Box<dyn VirtioDevice>) -> Result<Arc<Mutex<VirtioPci>>, Error> {
        let sink: &dyn MsiSink = &self.msi;
        let mut function =
            VirtioPci::new(device, self.ram.clone(), sink).map_err(host("give a device its interrupts"))?;
        self.place(&mut function)?;
        let slot = self.free_slot(0)?;
        let bars = self.make_bars(slot, &function, |bar| doorbells(&function, bar).map_err(host("copy an eventfd")))?;
        let device = Arc::new(Mutex::new(function));
        self.attach(slot, OnBus { device: device.clone(), bars, passed: None })?;
        Ok(device)
    }

    /// As [`PciHost::add`], with a device of the host.
    ///
    /// # Errors
    /// As there, [`Error::Vfio`] when the device can't be mapped, [`Error::Space`] where KVM has no slots left.
    pub fn add_vfio(&mut self, opened: Opened, news: &Arc<News>) -> Result<(), Error> {
        let slot = self.free_slot(0)?;
        let mut function = self.function(slot, opened, news)?;
        self.place(&mut function)?;
        self.plug(slot, function)
    }

    /// What an opened device is on this bus, in `slot`; what it has to say goes to `news`.
    ///
    /// # Errors
    /// [`Error::Vfio`].
    pub fn function(&self, slot: u8, opened: Opened, news: &Arc<News>) -> Result<VfioPci, Error> {
        let mut function = VfioPci::new(opened, &self.msi, self.pins.pin(slot))?;
        function.report_to(news);
        Ok(function)
    }

    /// The lowest slot that nothing is in and that `except` has no bit for.
    ///
    /// # Errors
    /// [`Error::TooMuch`].
    pub fn free_slot(&self, except: u32) -> Result<u8, Error> {
        let free = |slot: &u8| lock(&self.bus).device(*slot).is_none() && except >> slot & 1 == 0;
        (0..SLOTS).find(free).ok_or_else(|| Error::TooMuch(pci::Error::Full.to_string()))
    }

    /// Puts a device of the host into `slot`, its BARs where it says. What they have mapped lies over them, where the guest
    /// reaches it without leaving. One caller at a time.
    ///
    /// # Errors
    /// As [`PciHost::add_vfio`]; nothing of it is there then.
    pub fn plug(&self, slot: u8, function: VfioPci) -> Result<(), Error> {
        let address = function.address();
        let bars = self.make_bars(slot, &function, |_| Ok(Vec::new()))?;
        let mut pages = Vec::new();
        let mapped = self.map_direct(&function, &bars, &mut pages);
        let regions: Vec<BarRegion> = bars.iter().map(|bar| bar.region).collect();
        let device = Arc::new(Mutex::new(function));
        let on_bus = OnBus { device, bars, passed: Some((address, pages.clone())) };
        mapped.and_then(|()| self.attach(slot, on_bus)).inspect_err(|_| {
            // They are nowhere yet, so that nobody has to let go of them.
            let _ = self.spaces.forget_bars(&regions, &pages);
        })
    }

    fn map_direct(&self, function: &VfioPci, bars: &[Bar], pages: &mut Vec<RegionId>) -> Result<(), Error> {
        for direct in function.direct()? {
            let Some(bar) = bars.iter().find(|bar| bar.number == direct.bar) else { continue };
            let BarRegion::Memory(region) = bar.region else { continue };
            let (size, host) = (direct.map.len() as u64, Hva(direct.map.as_ptr() as u64));
            let (owner, kind) = (Arc::new(direct.map), Kind::Direct(host));
            // SAFETY: the mapping goes along as its own owner; it is the device's memory, which is the guest's to use.
            pages.push(unsafe { self.spaces.add_page(owner, size, kind, (region, direct.offset)) }?);
        }
        Ok(())
    }

    /// Takes the device of the host out of `slot` and closes it, wherever the guest has its BARs; where it was on the host.
    /// `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Space`] when KVM does not let go of its memory; it is there then.
    pub fn unplug(&self, slot: u8) -> Result<Option<PciAddress>, Error> {
        // The bus lock spans all of it, so that nobody moves what goes.
        let mut bus = lock(&self.bus);
        let Some(place) = self.slots.get(usize::from(slot)) else { return Ok(None) };
        let mut place = lock(place);
        let Some(on_bus) = &*place else { return Ok(None) };
        let Some((address, pages)) = &on_bus.passed else { return Ok(None) };
        let (address, regions): (_, Vec<BarRegion>) = (*address, on_bus.bars.iter().map(|bar| bar.region).collect());
        self.spaces.forget_bars(&regions, pages)?;
        bus.detach(slot);
        if let Some(pages) = &self.pages {
            for page in lock(&pages.slots).iter_mut().filter(|page| page.is_some_and(|(of, _)| of == slot)) {
                page.take().into_iter().for_each(|(_, region)| self.spaces.remove(region));
            }
        }
        let gone = place.take();
        drop((place, bus));
        // Nobody finds it any more, and nobody has to wait while it is reset and closed.
        if let Some(on_bus) = gone {
            lock(&on_bus.device).reset();
        }
        Ok(Some(address))
    }

    /// Gives the BARs of `function` the next addresses: large ones, where the function allows it, above high memory.
    fn place(&mut self, function: &mut dyn PciDevice) -> Result<(), Error> {
        let (low, ports) = (PCI_WINDOW.0.0 + PCI_WINDOW.1, u64::from(PCI_PORTS.1) + 1);
        for placement in function.placements() {
            let high = placement.wide && placement.size >= LARGE_BAR;
            let (next, end) = match (placement.io, high) {
                (true, _) => (&mut self.next_port, ports),
                (_, true) => (&mut self.next_high, self.high.0 + PCI_WINDOW_HIGH),
                _ => (&mut self.next, low),
            };
            let at = next.next_multiple_of(placement.size);
            if at.checked_add(placement.size).is_none_or(|last| last > end) {
                return Err(Error::TooMuch(format!(
                    "a BAR of {} MiB finds no room in the guest's address space: --vfio; give the machine fewer devices",
                    placement.size >> 20
                )));
            }
            function.place(placement.bar, at);
            *next = at + placement.size;
        }
        Ok(())
    }

    /// Regions for the BARs of `function`, which are nowhere yet.
    fn make_bars(
        &self,
        slot: u8,
        function: &dyn PciDevice,
        bells: impl Fn(&Placement) -> Result<Vec<Doorbell>, Error>,
    ) -> Result<Vec<Bar>, Error> {
        let make = |placement: Placement| {
            let place = (slot, placement.bar);
            let region = self.spaces.make_bar(placement.io, placement.size, place, bells(&placement)?)?;
            Ok(Bar { number: placement.bar, region, at: Mutex::new(None) })
        };
        function.placements().into_iter().map(make).collect()
    }

    fn attach(&self, slot: u8, on_bus: OnBus) -> Result<(), Error> {
        let Some(place) = self.slots.get(usize::from(slot)) else { return Ok(()) };
        let mut bus = lock(&self.bus);
        bus.attach_at(slot, on_bus.device.clone()).map_err(|e| Error::TooMuch(e.to_string()))?;
        *lock(place) = Some(on_bus);
        Ok(())
    }

    /// Reads configuration space at byte `offset` of the ECAM.
    pub fn config_read(&self, offset: u64, data: &mut [u8]) {
        lock(&self.bus).ecam_read(offset, data);
    }

    /// Writes configuration space, and follows what moved.
    pub fn config_write(&self, offset: u64, data: &[u8]) {
        // The bus lock spans the update so that two writes can't publish their maps in the wrong order.
        let mut bus = lock(&self.bus);
        let Some((slot, effect)) = bus.ecam_write(offset, data) else { return };
        if effect != Effect::None {
            self.follow(slot);
        }
        self.refresh(&mut bus, slot);
    }

    /// Lets the guest read the configuration space of all functions from read-only pages, without leaving: a guest that
    /// looks for capabilities reads each function some two hundred times. Call once all are there; where KVM can't do it,
    /// reads leave to the monitor as before.
    ///
    /// # Errors
    /// [`Error::Memory`] when the host has no memory for them.
    pub fn map_config(&mut self) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let slots: Vec<u8> = std::iter::once(HOST_BRIDGE).chain(self.taken()).collect();
        let memory = GuestRam::anonymous(&[(Gpa(0), slots.len() as u64 * CONFIG_PAGE)])?;
        let Some((_, _, host)) = memory.regions().next() else { return Ok(()) };
        let mut bus = lock(&self.bus);
        let mut mapped = Vec::with_capacity(slots.len());
        for (page, &slot) in (0u64..).zip(&slots) {
            let at = page * CONFIG_PAGE;
            copy_config(&mut bus, slot, CONFIG_PAGE, &memory, Gpa(at));
            let kind = Kind::Rom(Hva(host.0 + at), Device::Ecam, config_at(slot));
            let (owner, place) = (Arc::new(memory.clone()), (self.ecam, config_at(slot)));
            // SAFETY: the page is a part of `memory`; it holds what the guest may read of its devices.
            let page = unsafe { self.spaces.add_page(owner, CONFIG_PAGE, kind, place) };
            mapped.push(page.ok().map(|region| (slot, region)));
        }
        drop(bus);
        self.pages = Some(ConfigPages { memory, slots: Mutex::new(mapped) });
        Ok(())
    }

    /// The guest wrote to configuration space of `slot`: its page follows. A function whose driver goes through the window
    /// in configuration space loses its page, since reads have effects then.
    fn refresh(&self, bus: &mut PciBus, slot: u8) {
        let Some(pages) = &self.pages else { return };
        let mut slots = lock(&pages.slots);
        let mine = |s: &Option<(u8, RegionId)>| s.is_some_and(|(s, _)| s == slot);
        let Some((page, mapped)) = (0u64..).zip(slots.iter_mut()).find(|(_, s)| mine(s)) else { return };
        if bus.device(slot).is_some_and(|device| lock(device).reads_have_effects()) {
            if let Some((_, region)) = mapped.take() {
                self.spaces.remove(region);
            }
        } else {
            copy_config(bus, slot, HEADER_AND_CAPABILITIES, &pages.memory, Gpa(page * CONFIG_PAGE));
        }
    }

    /// Reads from byte `offset` of BAR `bar` of the function in `slot`.
    pub fn bar_read(&self, slot: u8, bar: u8, offset: u64, data: &mut [u8]) {
        match self.slots.get(usize::from(slot)).map(lock).as_deref() {
            Some(Some(on_bus)) => lock(&on_bus.device).bar_read(bar, offset, data),
            _ => data.fill(0xff),
        }
    }

    /// Writes there.
    pub fn bar_write(&self, slot: u8, bar: u8, offset: u64, data: &[u8]) {
        if let Some(Some(on_bus)) = self.slots.get(usize::from(slot)).map(lock).as_deref() {
            lock(&on_bus.device).bar_write(bar, offset, data);
        }
    }

    /// Takes over where the BARs of `slot` are now.
    fn follow(&self, slot: u8) {
        let Some(place) = self.slots.get(usize::from(slot)) else { return };
        let place = lock(place);
        let Some(on_bus) = &*place else { return };
        let placed = lock(&on_bus.device).placements();
        let mut moved = Vec::new();
        for bar in &on_bus.bars {
            let is = placed.iter().find(|p| p.bar == bar.number && p.enabled && p.address != 0).map(|p| p.address);
            let mut was = lock(&bar.at);
            if *was != is {
                *was = is;
                moved.push((bar.region, is));
            }
        }
        if !moved.is_empty() {
            self.spaces.move_bars(&moved);
        }
    }

    /// Stops all devices: work in flight is finished or dropped, threads end. The guest must not run any more.
    pub fn stop(&self) {
        for place in &self.slots {
            if let Some(on_bus) = &*lock(place) {
                lock(&on_bus.device).reset();
            }
        }
    }
}

/// The doorbells of `function` that lie in the BAR at `bar`.
fn doorbells(function: &VirtioPci, bar: &Placement) -> std::io::Result<Vec<Doorbell>> {
    let mut bells = Vec::new();
    for (queue, kick) in function.kicks() {
        let at = if bar.io {
            function.notify_port(queue).map(u64::from)
        } else {
            function.notify_address(queue).map(|bell| bell.0)
        };
        let offset = at.and_then(|at| at.checked_sub(bar.address)).filter(|offset| *offset < bar.size);
        let Some(offset) = offset else { continue };
        bells.push(Doorbell { offset, value: None, fd: Arc::new(kick.try_clone()?) });
    }
    Ok(bells)
}
