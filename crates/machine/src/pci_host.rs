// SPDX-License-Identifier: Apache-2.0
//! The PCI bus as the machine has it: which device answers at which address now, and which doorbells KVM answers itself.
//!
//! vCPU threads call it. A BAR access takes the map's read lock to find its device and then that device's own lock; the
//! map's write lock is taken only when the guest moves a BAR or switches decoding.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use base::{EventFd, Gpa, Hva};
use irq::MsiSink;
use kvm::{IoAddress, Vm};
use mem::GuestRam;
use pci::{Effect, PciBus, PciDevice};
use virtio::VirtioDevice;
use virtio::transport::pci::VirtioPci;

use crate::error::{Error, host};
use crate::layout::{ECAM, PCI_PORTS, PCI_WINDOW};
use crate::msi::KvmMsi;

/// A device on the bus, under its own lock.
type Function = Arc<Mutex<VirtioPci>>;

/// A BAR that answers, in memory or in port space.
struct Range {
    io: bool,
    start: u64,
    end: u64,
    slot: u8,
    bar: u8,
    device: Function,
}

/// A doorbell that KVM answers.
struct Doorbell {
    slot: u8,
    at: IoAddress,
    kick: EventFd,
}

/// The bus, its devices and where they are.
pub struct PciHost {
    vm: Vm,
    ram: GuestRam,
    msi: KvmMsi,
    bus: Mutex<PciBus>,
    devices: Vec<(u8, Function)>,
    /// Next free address of the BAR window, and next free port.
    next: u64,
    next_port: u64,
    map: RwLock<Vec<Range>>,
    doorbells: Mutex<Vec<Doorbell>>,
    /// Configuration space where the guest can read it without leaving.
    pages: Option<ConfigPages>,
}

/// A page of guest memory, read-only, for the configuration space of each function.
struct ConfigPages {
    memory: GuestRam,
    /// Slots on the bus in the order of their pages; `None` once a page is taken away.
    slots: Mutex<Vec<Option<u8>>>,
}

/// The host bridge's slot.
const HOST_BRIDGE: u8 = 0;
/// Bytes of a function's configuration space, and of its page.
const CONFIG_PAGE: u64 = 0x1000;
/// Of it, what may change.
const HEADER_AND_CAPABILITIES: u64 = 0x100;
/// First of KVM's memory slots for configuration space; RAM has the ones below.
const FIRST_CONFIG_SLOT: u32 = 16;

/// Where the guest sees the configuration space of function 0 of `slot`.
fn config_at(slot: u8) -> Gpa {
    Gpa(ECAM.0.0 + (u64::from(slot) << 15))
}

/// Copies the first `len` bytes of the configuration space of `slot` to `at` in `memory`.
fn copy_config(bus: &mut PciBus, slot: u8, len: u64, memory: &GuestRam, at: Gpa) {
    for offset in (0..len).step_by(4) {
        let mut word = [0; 4];
        bus.ecam_read((u64::from(slot) << 15) + offset, &mut word);
        // The page was made for as many bytes.
        let _ = memory.write_bytes(Gpa(at.0 + offset), &word);
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PciHost {
    /// A bus with a host bridge and nothing else.
    #[must_use]
    pub fn new(vm: &Vm, ram: &GuestRam, msi: &KvmMsi) -> Self {
        Self {
            vm: vm.clone(),
            ram: ram.clone(),
            msi: msi.clone(),
            bus: Mutex::new(PciBus::new()),
            devices: Vec::new(),
            next: PCI_WINDOW.0.0,
            next_port: PCI_PORTS.0.into(),
            map: RwLock::new(Vec::new()),
            doorbells: Mutex::new(Vec::new()),
            pages: None,
        }
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
        for placement in function.placements() {
            let next = if placement.io { &mut self.next_port } else { &mut self.next };
            let at = next.next_multiple_of(placement.size);
            function.place(placement.bar, at);
            *next = at + placement.size;
        }
        let function = Arc::new(Mutex::new(function));
        let slot = lock(&self.bus).attach(function.clone()).map_err(|e| Error::TooMuch(e.to_string()))?;
        self.devices.push((slot, function.clone()));
        Ok(function)
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
        let slots: Vec<u8> = std::iter::once(HOST_BRIDGE).chain(self.devices.iter().map(|(slot, _)| *slot)).collect();
        let memory = GuestRam::anonymous(&[(Gpa(0), slots.len() as u64 * CONFIG_PAGE)])?;
        let Some((_, _, host)) = memory.regions().next() else { return Ok(()) };
        let mut bus = lock(&self.bus);
        let mut mapped = Vec::with_capacity(slots.len());
        for (page, &slot) in (0u32..).zip(&slots) {
            let at = u64::from(page) * CONFIG_PAGE;
            copy_config(&mut bus, slot, CONFIG_PAGE, &memory, Gpa(at));
            let (page, host) = (FIRST_CONFIG_SLOT + page, Hva(host.0 + at));
            // SAFETY: the page is a part of `memory`, which `self` keeps until no vCPU runs any more; it holds what the
            // guest may read of its devices.
            let done = unsafe { self.vm.set_slot(page, config_at(slot), CONFIG_PAGE, host, true) };
            mapped.push(done.is_ok().then_some(slot));
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
        let Some((page, mapped)) = (0u32..).zip(slots.iter_mut()).find(|(_, s)| **s == Some(slot)) else { return };
        if self.devices.iter().any(|(s, device)| *s == slot && lock(device).window_in_use()) {
            // SAFETY: a slot of no bytes needs no memory.
            let _ = unsafe { self.vm.set_slot(FIRST_CONFIG_SLOT + page, config_at(slot), 0, Hva(0), true) };
            *mapped = None;
        } else {
            let at = Gpa(u64::from(page) * CONFIG_PAGE);
            copy_config(bus, slot, HEADER_AND_CAPABILITIES, &pages.memory, at);
        }
    }

    /// Reads from the BAR at `at`; `false` if none is there.
    pub fn bar_read(&self, at: IoAddress, data: &mut [u8]) -> bool {
        let Some((device, bar, offset)) = self.find(at) else { return false };
        lock(&device).bar_read(bar, offset, data);
        true
    }

    /// Writes to the BAR at `at`; `false` if none is there.
    pub fn bar_write(&self, at: IoAddress, data: &[u8]) -> bool {
        let Some((device, bar, offset)) = self.find(at) else { return false };
        lock(&device).bar_write(bar, offset, data);
        true
    }

    fn find(&self, at: IoAddress) -> Option<(Function, u8, u64)> {
        let (io, at) = match at {
            IoAddress::Mmio(at) => (false, at.0),
            IoAddress::Pio(port) => (true, port.into()),
        };
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let range = map.iter().find(|r| r.io == io && (r.start..r.end).contains(&at))?;
        Some((range.device.clone(), range.bar, at - range.start))
    }

    /// Takes over where the BARs of `slot` are now: the map, and the doorbells that KVM answers.
    fn follow(&self, slot: u8) {
        let Some((_, device)) = self.devices.iter().find(|(s, _)| *s == slot) else { return };
        let function = lock(device);
        let placed: Vec<_> = function.placements().into_iter().filter(|p| p.enabled && p.address != 0).collect();
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        map.retain(|r| r.slot != slot);
        for p in &placed {
            let Some(end) = p.address.checked_add(p.size) else { continue };
            map.push(Range { io: p.io, start: p.address, end, slot, bar: p.bar, device: device.clone() });
        }
        drop(map);
        let mut doorbells = lock(&self.doorbells);
        for old in doorbells.extract_if(.., |d| d.slot == slot) {
            // It was registered with the same arguments, so this can't fail.
            let _ = self.vm.remove_ioeventfd(&old.kick, old.at);
        }
        let (memory, ports) = (placed.iter().any(|p| !p.io), placed.iter().any(|p| p.io));
        for (queue, kick) in function.kicks() {
            let at = function.notify_address(queue).filter(|_| memory).map(IoAddress::Mmio);
            let port = function.notify_port(queue).filter(|_| ports).map(IoAddress::Pio);
            for at in at.into_iter().chain(port) {
                let Ok(kick) = kick.try_clone() else { continue };
                // Where KVM has no room (or the guest put two BARs in one place), kicks reach `bar_write` and work as well.
                if self.vm.add_ioeventfd(&kick, at).is_ok() {
                    doorbells.push(Doorbell { slot, at, kick });
                }
            }
        }
    }

    /// Stops all devices: work in flight is finished or dropped, threads end. The guest must not run any more.
    pub fn stop(&self) {
        for (_, device) in &self.devices {
            lock(device).reset();
        }
    }
}
