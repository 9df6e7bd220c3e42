// SPDX-License-Identifier: Apache-2.0
//! The PCI bus as the machine has it: which device answers at which address now, and which doorbells KVM answers itself.
//!
//! vCPU threads call it. A BAR access takes the map's read lock to find its device and then that device's own lock; the
//! map's write lock is taken only when the guest moves a BAR or switches decoding.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use base::{EventFd, Gpa};
use irq::MsiSink;
use kvm::{IoAddress, Vm};
use mem::GuestRam;
use pci::{Effect, PciBus, PciDevice};
use virtio::VirtioDevice;
use virtio::transport::pci::VirtioPci;

use crate::error::{Error, host};
use crate::layout::PCI_WINDOW;
use crate::msi::KvmMsi;

/// A device on the bus, under its own lock.
type Function = Arc<Mutex<VirtioPci>>;

/// A BAR that answers.
struct Range {
    start: u64,
    end: u64,
    slot: u8,
    bar: u8,
    device: Function,
}

/// A doorbell that KVM answers.
struct Doorbell {
    slot: u8,
    at: Gpa,
    kick: EventFd,
}

/// The bus, its devices and where they are.
pub struct PciHost {
    vm: Vm,
    ram: GuestRam,
    msi: KvmMsi,
    bus: Mutex<PciBus>,
    devices: Vec<(u8, Function)>,
    /// Next free address of the BAR window.
    next: u64,
    map: RwLock<Vec<Range>>,
    doorbells: Mutex<Vec<Doorbell>>,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PciHost {
    /// A bus with a host bridge and nothing else.
    #[must_use]
    pub fn new(vm: &Vm, ram: &GuestRam) -> Self {
        Self {
            vm: vm.clone(),
            ram: ram.clone(),
            msi: KvmMsi::new(vm.clone()),
            bus: Mutex::new(PciBus::new()),
            devices: Vec::new(),
            next: PCI_WINDOW.0.0,
            map: RwLock::new(Vec::new()),
            doorbells: Mutex::new(Vec::new()),
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
            let at = self.next.next_multiple_of(placement.size);
            function.place(placement.bar, at);
            self.next = at + placement.size;
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
        if let Some((slot, Effect::Moved | Effect::Decode(_))) = bus.ecam_write(offset, data) {
            self.follow(slot);
        }
    }

    /// Reads from the BAR at `at`; `false` if none is there.
    pub fn bar_read(&self, at: u64, data: &mut [u8]) -> bool {
        let Some((device, bar, offset)) = self.find(at) else { return false };
        lock(&device).bar_read(bar, offset, data);
        true
    }

    /// Writes to the BAR at `at`; `false` if none is there.
    pub fn bar_write(&self, at: u64, data: &[u8]) -> bool {
        let Some((device, bar, offset)) = self.find(at) else { return false };
        lock(&device).bar_write(bar, offset, data);
        true
    }

    fn find(&self, at: u64) -> Option<(Function, u8, u64)> {
        let map = self.map.read().unwrap_or_else(PoisonError::into_inner);
        let range = map.iter().find(|r| (r.start..r.end).contains(&at))?;
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
            map.push(Range { start: p.address, end, slot, bar: p.bar, device: device.clone() });
        }
        drop(map);
        let mut doorbells = lock(&self.doorbells);
        for old in doorbells.extract_if(.., |d| d.slot == slot) {
            // It was registered with the same arguments, so this can't fail.
            let _ = self.vm.remove_ioeventfd(&old.kick, IoAddress::Mmio(old.at));
        }
        if placed.is_empty() {
            return;
        }
        for (queue, kick) in function.kicks() {
            let (Some(at), Ok(kick)) = (function.notify_address(queue), kick.try_clone()) else { continue };
            // Where KVM has no room (or the guest put two BARs in one place), kicks reach `bar_write` and work as well.
            if self.vm.add_ioeventfd(&kick, IoAddress::Mmio(at)).is_ok() {
                doorbells.push(Doorbell { slot, at, kick });
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
