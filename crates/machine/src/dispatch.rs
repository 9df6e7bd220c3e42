// SPDX-License-Identifier: Apache-2.0
//! Answers an exit: asks the address spaces who is there, without a lock, and brings it the access. Called by vCPU threads;
//! each device's lock is taken here and nowhere else on this path.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use base::Gpa;
use mem::GuestRam;

use crate::bus::Bus;
use crate::control::Control;
use crate::ioapic::IoApicHost;
use crate::ledger::{Party, Reason};
use crate::legacy::{AcpiPorts, Ask, DebugExit, I8042_RESET, PVPANIC_CRASH_LOADED, PVPANIC_PANICKED, SerialPort};
use crate::passthrough::Passthrough;
use crate::pci_hotplug::PciHotplug;
use crate::spaces::{At, Device, Port, Spaces};
use crate::timeline::Timeline;
use crate::vioapic::VioapicHost;

/// Everything a vCPU thread needs to answer an exit.
pub struct Dispatch {
    control: Arc<Control>,
    timeline: Arc<Timeline>,
    serial: Option<Mutex<SerialPort>>,
    ioapic: Option<Arc<IoApicHost>>,
    vioapic: Option<Arc<VioapicHost>>,
    passthrough: Option<Arc<Passthrough>>,
    spaces: Spaces,
    ram: GuestRam,
    bus: Bus,
}

/// What an answered exit was, and what it asks for.
pub type Answered = (Reason, Party, Ask);

impl Dispatch {
    /// Puts the parts together; where each of them is, `spaces` and `ram` know.
    #[must_use]
    pub fn new(
        (control, timeline): (Arc<Control>, Arc<Timeline>),
        (spaces, ram): (Spaces, GuestRam),
        serial: Option<SerialPort>,
        bus: Bus,
    ) -> Self {
        Self {
            control,
            timeline,
            serial: serial.map(Mutex::new),
            ioapic: None,
            vioapic: None,
            passthrough: None,
            spaces,
            ram,
            bus,
        }
    }

    /// With an I/O APIC of our own.
    #[must_use]
    pub fn with_ioapic(mut self, ioapic: Option<Arc<IoApicHost>>) -> Self {
        self.ioapic = ioapic;
        self
    }

    /// With a paravirtual interrupt controller.
    #[must_use]
    pub fn with_vioapic(mut self, vioapic: Option<Arc<VioapicHost>>) -> Self {
        self.vioapic = vioapic;
        self
    }

    /// With devices of the host.
    #[must_use]
    pub fn with_passthrough(mut self, passthrough: Option<Arc<Passthrough>>) -> Self {
        self.passthrough = passthrough;
        self
    }

    /// The devices of the host, if there are any or may be.
    #[must_use]
    pub const fn passthrough(&self) -> Option<&Arc<Passthrough>> {
        self.passthrough.as_ref()
    }

    fn hotplug(&self) -> Option<&PciHotplug> {
        self.passthrough.as_ref().and_then(|passthrough| passthrough.hotplug())
    }

    /// The paravirtual interrupt controller, if there is one.
    #[must_use]
    pub fn vioapic(&self) -> Option<&VioapicHost> {
        self.vioapic.as_deref()
    }

    /// Where outcomes go.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Where moments go.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// The virtio devices.
    #[must_use]
    pub fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Runs `act` on the serial port, if there is one.
    pub fn with_serial(&self, act: impl FnOnce(&mut SerialPort)) {
        if let Some(serial) = &self.serial {
            act(&mut lock(serial));
        }
    }

    /// Answers a read of `port`. What nobody answers reads as all ones, as on a PC.
    pub fn port_read(&self, port: u16, data: &mut [u8]) -> Answered {
        let at = self.spaces.port_at(port);
        let party = match (at, data) {
            (Some((Port::Serial, offset)), [byte]) => {
                self.with_serial(|s| *byte = s.read(offset));
                Party::Serial
            }
            (Some((Port::I8042Data | Port::I8042Command, _)), data) => {
                // Status 0: nothing to read, ready for a command.
                data.fill(0);
                Party::I8042
            }
            (Some((Port::Pvpanic, _)), data) => {
                data.fill(PVPANIC_PANICKED | PVPANIC_CRASH_LOADED);
                Party::Pvpanic
            }
            (Some((Port::Acpi, _)), data) => {
                data.fill(0);
                Party::Acpi
            }
            (Some((Port::PciHotplug, offset)), data) => {
                data.fill(0);
                self.hotplug().into_iter().for_each(|registers| registers.read(offset, data));
                Party::Acpi
            }
            (Some((Port::DebugExit, _)), data) => {
                data.fill(0);
                Party::DebugExit
            }
            (Some((Port::Bar { function, bar }, offset)), data) => {
                self.bus.port_read((function, bar), offset, data).unwrap_or(Party::Nobody)
            }
            (_, data) => {
                data.fill(0xff);
                Party::Nobody
            }
        };
        (Reason::PioRead, party, Ask::Nothing)
    }

    /// Answers a write of `port`.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Answered {
        let Some((who, offset)) = self.spaces.port_at(port) else {
            return (Reason::PioWrite, Party::Nobody, Ask::Nothing);
        };
        let (party, ask) = match (who, data) {
            (Port::Serial, bytes) => {
                // A string output to one port arrives as many bytes.
                self.with_serial(|s| bytes.iter().for_each(|b| s.write(offset, *b)));
                (Party::Serial, Ask::Nothing)
            }
            (Port::I8042Command, [I8042_RESET]) => (Party::I8042, Ask::Reset),
            (Port::I8042Data | Port::I8042Command, _) => (Party::I8042, Ask::Nothing),
            (Port::Pvpanic, [byte]) if byte & PVPANIC_PANICKED != 0 => (Party::Pvpanic, Ask::Panic),
            (Port::Acpi, [byte]) => (Party::Acpi, AcpiPorts::write(offset, *byte)),
            (Port::PciHotplug, data) => {
                // The guest goes on when the device has been closed: then its slot is empty.
                if let Some(passthrough) = &self.passthrough {
                    PciHotplug::write(offset, data).for_each(|slot| passthrough.eject(slot, &self.bus));
                }
                (Party::Acpi, Ask::Nothing)
            }
            (Port::Marker, [byte]) => (Party::Marker, Ask::Mark(port, *byte)),
            (Port::DebugExit, data) => (Party::DebugExit, DebugExit::write(data)),
            (Port::Bar { function, bar }, data) => {
                (self.bus.port_write((function, bar), offset, data).unwrap_or(Party::Nobody), Ask::Nothing)
            }
            _ => (Party::Nobody, Ask::Nothing),
        };
        (Reason::PioWrite, party, ask)
    }

    /// Answers a read that no memory slot answered.
    pub fn mmio_read(&self, at: u64, data: &mut [u8]) -> Answered {
        let party = match self.spaces.memory_at(at) {
            At::Device(Device::IoApic, offset) => self.ioapic.as_ref().map(|ioapic| {
                ioapic.read(offset, data);
                Party::IoApic
            }),
            At::Device(Device::Vioapic, offset) => self.vioapic.as_ref().map(|vioapic| {
                vioapic.read(offset, data);
                Party::Vioapic
            }),
            At::Device(device, offset) => self.bus.read(device, offset, data),
            // RAM that became a slot's after the guest left.
            At::Ram => self.ram.read_bytes(Gpa(at), data).ok().map(|()| Party::Kvm),
            At::Nobody => None,
        };
        let party = party.unwrap_or_else(|| {
            data.fill(0xff);
            Party::Nobody
        });
        (Reason::MmioRead, party, Ask::Nothing)
    }

    /// Answers a write that no memory slot answered.
    pub fn mmio_write(&self, at: u64, data: &[u8]) -> Answered {
        let party = match self.spaces.memory_at(at) {
            At::Device(Device::IoApic, offset) => self.ioapic.as_ref().map(|ioapic| {
                ioapic.write(offset, data);
                Party::IoApic
            }),
            At::Device(Device::Vioapic, offset) => self.vioapic.as_ref().map(|vioapic| {
                vioapic.write(offset, data);
                Party::Vioapic
            }),
            At::Device(device, offset) => self.bus.write(device, offset, data),
            At::Ram => self.ram.write_bytes(Gpa(at), data).ok().map(|()| Party::Kvm),
            At::Nobody => None,
        };
        (Reason::MmioWrite, party.unwrap_or(Party::Nobody), Ask::Nothing)
    }

    /// A local APIC ended the level-triggered interrupt of `vector`.
    pub fn interrupt_ended(&self, vector: u8) -> Answered {
        if let Some(pause) = self.ioapic.as_ref().and_then(|ioapic| ioapic.end(vector)) {
            thread::sleep(pause);
        }
        (Reason::Eoi, Party::IoApic, Ask::Nothing)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
