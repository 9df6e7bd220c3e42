// SPDX-License-Identifier: Apache-2.0
//! Who answers an exit: ports and addresses to devices. Called by vCPU threads; each device's lock is taken here and
//! nowhere else on this path.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bus::Bus;
use crate::control::Control;
use crate::ioapic::IoApicHost;
use crate::layout::{ACPI_PORT, IOAPIC, PVPANIC_PORT, SERIAL_PORT};
use crate::ledger::{Party, Reason};
use crate::legacy::{
    AcpiPorts, Ask, DebugExit, I8042_COMMAND, I8042_DATA, I8042_RESET, PVPANIC_CRASH_LOADED, PVPANIC_PANICKED,
    SerialPort,
};
use crate::timeline::{BOOT_PORT, DEBUG_PORT, Timeline};
use crate::vioapic::VioapicHost;

/// Everything a vCPU thread needs to answer an exit.
pub struct Dispatch {
    control: Arc<Control>,
    timeline: Arc<Timeline>,
    serial: Option<Mutex<SerialPort>>,
    ioapic: Option<Arc<IoApicHost>>,
    vioapic: Option<Arc<VioapicHost>>,
    debug_exit: Option<DebugExit>,
    bus: Bus,
}

/// What an answered exit was, and what it asks for.
pub type Answered = (Reason, Party, Ask);

const SERIAL_LAST: u16 = SERIAL_PORT + 7;
const ACPI_LAST: u16 = ACPI_PORT + 2;

impl Dispatch {
    /// Puts the parts together.
    #[must_use]
    pub fn new(control: Arc<Control>, timeline: Arc<Timeline>, serial: Option<SerialPort>, bus: Bus) -> Self {
        Self { control, timeline, serial: serial.map(Mutex::new), ioapic: None, vioapic: None, debug_exit: None, bus }
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

    /// The paravirtual interrupt controller, if there is one.
    #[must_use]
    pub fn vioapic(&self) -> Option<&VioapicHost> {
        self.vioapic.as_deref()
    }

    /// With a port that ends the machine.
    #[must_use]
    pub fn with_debug_exit(mut self, port: Option<DebugExit>) -> Self {
        self.debug_exit = port;
        self
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
        let party = match (port, data) {
            (SERIAL_PORT..=SERIAL_LAST, [byte]) if self.serial.is_some() => {
                self.with_serial(|s| *byte = s.read(port - SERIAL_PORT));
                Party::Serial
            }
            (I8042_DATA | I8042_COMMAND, data) => {
                // Status 0: nothing to read, ready for a command.
                data.fill(0);
                Party::I8042
            }
            (PVPANIC_PORT, data) => {
                data.fill(PVPANIC_PANICKED | PVPANIC_CRASH_LOADED);
                Party::Pvpanic
            }
            (ACPI_PORT..=ACPI_LAST, data) => {
                data.fill(0);
                Party::Acpi
            }
            (port, data) if self.ends_at(port) => {
                data.fill(0);
                Party::DebugExit
            }
            (port, data) => self.bus.port_read(port, data).unwrap_or_else(|| {
                data.fill(0xff);
                Party::Nobody
            }),
        };
        (Reason::PioRead, party, Ask::Nothing)
    }

    /// Answers a write of `port`.
    pub fn port_write(&self, port: u16, data: &[u8]) -> Answered {
        let (party, ask) = match (port, data) {
            (SERIAL_PORT..=SERIAL_LAST, bytes) if self.serial.is_some() => {
                // A string output to one port arrives as many bytes.
                self.with_serial(|s| bytes.iter().for_each(|b| s.write(port - SERIAL_PORT, *b)));
                (Party::Serial, Ask::Nothing)
            }
            (I8042_COMMAND, [I8042_RESET]) => (Party::I8042, Ask::Reset),
            (I8042_DATA | I8042_COMMAND, _) => (Party::I8042, Ask::Nothing),
            (PVPANIC_PORT, [byte]) if byte & PVPANIC_PANICKED != 0 => (Party::Pvpanic, Ask::Panic),
            (ACPI_PORT..=ACPI_LAST, [byte]) => (Party::Acpi, AcpiPorts::write(port - ACPI_PORT, *byte)),
            (BOOT_PORT | DEBUG_PORT, [byte]) => (Party::Marker, Ask::Mark(port, *byte)),
            (port, data) if self.ends_at(port) => (Party::DebugExit, DebugExit::write(data)),
            (port, data) => (self.bus.port_write(port, data).unwrap_or(Party::Nobody), Ask::Nothing),
        };
        (Reason::PioWrite, party, ask)
    }

    fn ends_at(&self, port: u16) -> bool {
        self.debug_exit.is_some_and(|exit| exit.has(port))
    }

    /// Answers a read outside RAM.
    pub fn mmio_read(&self, at: u64, data: &mut [u8]) -> Answered {
        let vioapic = |data: &mut [u8]| self.vioapic.as_ref()?.read(at, data).then_some(Party::Vioapic);
        let party = self.ioapic_read(at, data).or_else(|| vioapic(data)).or_else(|| self.bus.read(at, data));
        let party = party.unwrap_or_else(|| {
            data.fill(0xff);
            Party::Nobody
        });
        (Reason::MmioRead, party, Ask::Nothing)
    }

    /// Answers a write outside RAM.
    pub fn mmio_write(&self, at: u64, data: &[u8]) -> Answered {
        let vioapic = || self.vioapic.as_ref()?.write(at, data).then_some(Party::Vioapic);
        let party = self.ioapic_write(at, data).or_else(vioapic).or_else(|| self.bus.write(at, data));
        (Reason::MmioWrite, party.unwrap_or(Party::Nobody), Ask::Nothing)
    }

    /// A local APIC ended the level-triggered interrupt of `vector`.
    pub fn interrupt_ended(&self, vector: u8) -> Answered {
        if let Some(ioapic) = &self.ioapic {
            ioapic.end(vector);
        }
        (Reason::Eoi, Party::IoApic, Ask::Nothing)
    }

    fn ioapic_at(&self, at: u64) -> Option<(&IoApicHost, u64)> {
        let offset = at.checked_sub(IOAPIC.0.0).filter(|offset| *offset < IOAPIC.1)?;
        Some((self.ioapic.as_ref()?, offset))
    }

    fn ioapic_read(&self, at: u64, data: &mut [u8]) -> Option<Party> {
        let (ioapic, offset) = self.ioapic_at(at)?;
        ioapic.read(offset, data);
        Some(Party::IoApic)
    }

    fn ioapic_write(&self, at: u64, data: &[u8]) -> Option<Party> {
        let (ioapic, offset) = self.ioapic_at(at)?;
        ioapic.write(offset, data);
        Some(Party::IoApic)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
