// SPDX-License-Identifier: Apache-2.0
//! The PCI bus as the machine has it: its devices, and where their BARs are in the machine's address space, which follows
//! the guest's writes to configuration space.
//!
//! vCPU threads call it. A BAR access takes that one device's own lock; the bus's is for configuration space.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Gpa, Hva};
use irq::MsiSink;
use mem::GuestRam;
use mem::space::{Doorbell, Kind, RegionId};
use pci::{Effect, PciBus, PciDevice, Placement};
use vfio::VfioPci;
use virtio::VirtioDevice;
use virtio::transport::pci::VirtioPci;

use crate::error::{Error, host};
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

/// A device and its place on the bus.
struct OnBus {
    slot: u8,
    device: pci::Shared,
    bars: Vec<Bar>,
}

/// The bus, its devices and where they are.
pub struct PciHost {
    ram: GuestRam,
    msi: KvmMsi,
    spaces: Spaces,
    /// Configuration space as a region.
    ecam: RegionId,
    bus: Mutex<PciBus>,
    devices: Vec<OnBus>,
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
    pub fn new(spaces: &Spaces, ram: &GuestRam, msi: &KvmMsi) -> Result<Self, Error> {
        let high = high_window(ram);
        Ok(Self {
            ram: ram.clone(),
            msi: msi.clone(),
            spaces: spaces.clone(),
            ecam: spaces.add_ecam()?,
            bus: Mutex::new(PciBus::new()),
            devices: Vec::new(),
            next: PCI_WINDOW.0.0,
            next_port: PCI_PORTS.0.into(),
            high,
            next_high: high.0,
            pages: None,
        })
    }

    /// Whether there is nothing on the bus but its host bridge.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty()
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
        let bars = self.make_bars(&function, |bar| doorbells(&function, bar).map_err(host("copy an eventfd")))?;
        let device = Arc::new(Mutex::new(function));
        self.attach(device.clone(), bars)?;
        Ok(device)
    }

    /// As [`PciHost::add`], with a device of the host. What its BARs have mapped lies over them, where the guest reaches it
    /// without leaving.
    ///
    /// # Errors
    /// As there, [`Error::Vfio`] when the device can't be mapped, [`Error::Space`] where KVM has no slots left.
    pub fn add_vfio(&mut self, mut function: VfioPci) -> Result<(), Error> {
        self.place(&mut function)?;
        let bars = self.make_bars(&function, |_| Ok(Vec::new()))?;
        for direct in function.direct()? {
            let Some(bar) = bars.iter().find(|bar| bar.number == direct.bar) else { continue };
            let BarRegion::Memory(region) = bar.region else { continue };
            let (size, host) = (direct.map.len() as u64, Hva(direct.map.as_ptr() as u64));
            // SAFETY: the mapping goes along as its own owner; it is the device's memory, which is the guest's to use.
            unsafe { self.spaces.add_page(Arc::new(direct.map), size, Kind::Direct(host), (region, direct.offset)) }?;
        }
        self.attach(Arc::new(Mutex::new(function)), bars)
    }

    /// Messages for its devices.
    #[must_use]
    pub fn messages(&self) -> &KvmMsi {
        &self.msi
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
        function: &dyn PciDevice,
        bells: impl Fn(&Placement) -> Result<Vec<Doorbell>, Error>,
    ) -> Result<Vec<Bar>, Error> {
        // A bus has 32 slots.
        let index = self.devices.len() as u8;
        let make = |placement: Placement| {
            let place = (index, placement.bar);
            let region = self.spaces.make_bar(placement.io, placement.size, place, bells(&placement)?)?;
            Ok(Bar { number: placement.bar, region, at: Mutex::new(None) })
        };
        function.placements().into_iter().map(make).collect()
    }

    fn attach(&mut self, device: pci::Shared, bars: Vec<Bar>) -> Result<(), Error> {
        let slot = lock(&self.bus).attach(device.clone()).map_err(|e| Error::TooMuch(e.to_string()))?;
        self.devices.push(OnBus { slot, device, bars });
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
        let slots: Vec<u8> = std::iter::once(HOST_BRIDGE).chain(self.devices.iter().map(|d| d.slot)).collect();
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
        if self.devices.iter().any(|d| d.slot == slot && lock(&d.device).reads_have_effects()) {
            if let Some((_, region)) = mapped.take() {
                self.spaces.remove(region);
            }
        } else {
            copy_config(bus, slot, HEADER_AND_CAPABILITIES, &pages.memory, Gpa(page * CONFIG_PAGE));
        }
    }

    /// Reads from byte `offset` of BAR `bar` of the function with this index.
    pub fn bar_read(&self, function: u8, bar: u8, offset: u64, data: &mut [u8]) {
        match self.devices.get(usize::from(function)) {
            Some(on_bus) => lock(&on_bus.device).bar_read(bar, offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes there.
    pub fn bar_write(&self, function: u8, bar: u8, offset: u64, data: &[u8]) {
        if let Some(on_bus) = self.devices.get(usize::from(function)) {
            lock(&on_bus.device).bar_write(bar, offset, data);
        }
    }

    /// Takes over where the BARs of `slot` are now.
    fn follow(&self, slot: u8) {
        let Some(on_bus) = self.devices.iter().find(|d| d.slot == slot) else { return };
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
        for on_bus in &self.devices {
            lock(&on_bus.device).reset();
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
