// SPDX-License-Identifier: Apache-2.0
//! A PCI function that the guest sees in place of the host's device.
//!
//! Configuration space is ours: identity and capabilities are copied where a guest may know of them, BARs and interrupts are
//! the guest's own, and only bus mastering and the bodies of vendors' capabilities reach the device. BARs reach it through
//! [`Direct`] parts, where the guest does not leave, and by system calls elsewhere. Every call comes with the function's
//! lock held, on a vCPU's thread or before there is one.

use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use base::mmap::Mmap;
use base::news::News;
use irq::{LevelPin, MsiSink};
use pci::msix::{self, Msix};
use pci::{
    BarKind, BarSpec, COMMAND, COMMAND_INTX_OFF, COMMAND_IO, COMMAND_MASTER, COMMAND_MEMORY, ConfigSpace, Effect,
    Identity, PciDevice, Placement,
};
use spec::PciAddress;

use crate::container::Opened;
use crate::error::VfioError;
use crate::intx::Intx;
use crate::layout::{CONFIG, Hardware, Interrupts, Region, direct_parts};
use crate::msi::{self, Msi};
use crate::msix::{Places, Table};

/// Capability ids (PCI Code and ID Assignment 1.11).
mod id {
    pub const POWER: u8 = 0x01;
    pub const VITAL_DATA: u8 = 0x03;
    pub const VENDOR: u8 = 0x09;
    pub const SUBSYSTEM: u8 = 0x0d;
    pub const EXPRESS: u8 = 0x10;
    pub const SATA: u8 = 0x12;
}

/// Message control of MSI: on.
const MSI_ON: u32 = 1;
/// Message control of MSI-X: on.
const MSIX_ON: u32 = 1 << 15;
/// Where the interrupt pin is said.
const PIN: usize = 0x3d;
/// From here on pages may be large.
const LARGE: u64 = 2 << 20;

/// A part of a BAR that the guest reaches without leaving.
pub struct Direct {
    /// BAR number.
    pub bar: u8,
    /// First byte of the BAR.
    pub offset: u64,
    /// The device's memory, mapped.
    pub map: Mmap,
}

struct Bar {
    number: u8,
    io: bool,
    region: Region,
}

/// A capability of the device, as it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    id: u8,
    at: usize,
    /// Bytes up to whatever comes next.
    room: usize,
}

/// A device of the host as a function of the guest's bus.
pub struct VfioPci {
    address: PciAddress,
    hardware: Box<dyn Hardware>,
    config: ConfigSpace,
    bars: Vec<Bar>,
    /// Bytes of configuration space that the device itself answers.
    live: Vec<Range<usize>>,
    hidden: Option<Places>,
    table: Option<Table>,
    msi: Option<Msi>,
    intx: Option<Intx>,
    /// Command register of the device, as it was written last.
    command: u16,
    news: Option<Arc<News>>,
}

impl VfioPci {
    /// A function for an opened device, its messages from `sink` and its interrupt pin at `pin`. The device does nothing by
    /// itself yet.
    ///
    /// # Errors
    /// [`VfioError::Unfit`] for what can't be passed on, [`VfioError::Host`] when the host fails.
    pub fn new(opened: Opened, sink: &dyn MsiSink, pin: Arc<dyn LevelPin>) -> Result<Self, VfioError> {
        let Opened { address, hardware } = opened;
        let failed = |what: &str| VfioError::host(format!("{what} of {address}"), "the host's kernel log says more");
        let mut raw = [0u8; 256];
        for (at, word) in (0..).step_by(4).zip(raw.chunks_exact_mut(4)) {
            hardware.read(CONFIG, at, word).map_err(failed("read the configuration"))?;
        }
        let unfit = |why: &str, hint| VfioError::Unfit { address, why: why.to_owned(), hint };
        if raw[0x0e] & 0x7f != 0 {
            return Err(unfit("is a bridge", "name a device behind it"));
        }
        let mut config = ConfigSpace::new(identity(&raw));
        let bars = add_bars(&mut config, &raw, hardware.as_ref(), address)?;
        let mut out = Self {
            address,
            hardware,
            config,
            bars,
            live: Vec::new(),
            hidden: None,
            table: None,
            msi: None,
            intx: None,
            command: 0,
            news: None,
        };
        for found in capabilities(&raw) {
            out.add_capability(&raw, found, sink).map_err(failed("make interrupts"))?;
        }
        if (1..=4).contains(&raw[PIN]) && out.hardware.interrupts(Interrupts::Pin).is_ok_and(|count| count > 0) {
            // Whichever it has on the host: a single function of the guest's bus has the first.
            out.config.set_interrupt_pin(1);
            out.intx = Some(Intx::new(pin));
        }
        if out.table.is_none() && out.msi.is_none() && out.intx.is_none() {
            return Err(unfit("has neither MSI, MSI-X nor an interrupt pin", "name another device"));
        }
        out.follow_command().map_err(failed("switch on the BARs"))?;
        Ok(out)
    }

    /// What goes wrong with the device while the guest runs is said through `news`.
    pub fn report_to(&mut self, news: &Arc<News>) {
        self.news = Some(news.clone());
    }

    /// Where it is on the host.
    #[must_use]
    pub const fn address(&self) -> PciAddress {
        self.address
    }

    /// Maps the parts of its BARs that the guest may reach directly.
    ///
    /// # Errors
    /// [`VfioError::Host`].
    pub fn direct(&self) -> Result<Vec<Direct>, VfioError> {
        let mut out = Vec::new();
        for bar in self.bars.iter().filter(|bar| !bar.io) {
            let hidden = self.hidden.map(|places| places.hidden(bar.number)).unwrap_or_default();
            for part in direct_parts(&bar.region, &hidden) {
                let map = map(self.hardware.as_ref(), bar.number, &part);
                let what = format!("map BAR {} of {}", bar.number, self.address);
                let map = map.map_err(VfioError::host(what, "the host's kernel log says more"))?;
                out.push(Direct { bar: bar.number, offset: part.start, map });
            }
        }
        Ok(out)
    }

    /// Shows the guest a capability, if it is one that a guest may know of, at its own place.
    fn add_capability(&mut self, raw: &[u8; 256], found: Found, sink: &dyn MsiSink) -> io::Result<()> {
        let Found { id, at, room } = found;
        let place = at as u16;
        let body = |len: usize| raw.get(at + 2..at + len.min(room)).unwrap_or_default();
        match id {
            msi::CAPABILITY if self.msi.is_none() => {
                let control = u16::from_le_bytes([raw[at + 2], raw[at + 3]]);
                let most = self.hardware.interrupts(Interrupts::Msi)?;
                if most == 0 {
                    return Ok(());
                }
                let msi = Msi::new(place, control, sink.vectors(Msi::count(control))?);
                let (body, writable) = msi.capability();
                if body.len() + 2 <= room {
                    self.config.place_capability(place, id, &body, &writable);
                    self.msi = Some(msi);
                }
            }
            msix::CAPABILITY if self.table.is_none() && room >= 12 => {
                let Some(places) = Places::read(raw, at) else { return Ok(()) };
                let msix = Msix::new(sink.vectors(places.entries)?);
                let (body, writable) = msix.capability(places.table.0, places.table.1, 0);
                let mut body = body;
                body[6..].copy_from_slice(&(places.pending.1 | u32::from(places.pending.0)).to_le_bytes());
                self.config.place_capability(place, id, &body, &writable);
                self.hidden = Some(places);
                self.table = Some(Table::new(msix, place, &places));
            }
            id::POWER if room >= 8 => {
                // The device stays awake: in deep sleep its memory would be gone from under the guest. States are the
                // guest's word; no soft reset on the way back, no wake-up signals.
                let body = [raw[at + 2], raw[at + 3] & 0x07, 0x08, 0, 0, 0];
                self.config.place_capability(place, id, &body, &[0, 0, 0x03, 0]);
            }
            id::EXPRESS if room >= 0x14 => {
                let (body, writable) = express(body(0x3c));
                self.config.place_capability(place, id, &body, &writable);
            }
            id::VENDOR => {
                let len = usize::from(raw[at + 2]).clamp(3, room);
                self.config.place_capability(place, id, body(len), &[]);
                self.live.push(at + 2..(at + len).next_multiple_of(4).min(at + room));
            }
            id::VITAL_DATA if room >= 8 => {
                self.config.place_capability(place, id, body(8), &[]);
                self.live.push(at + 2..at + 8);
            }
            id::SUBSYSTEM | id::SATA if room >= 8 => self.config.place_capability(place, id, body(8), &[]),
            // What is left moves the device, its link or its power, or is for bridges.
            _ => {}
        }
        Ok(())
    }

    /// Sets the device's own command register. Its BARs always answer: the guest's are where the address space has them, and
    /// a BAR that is switched off under a guest's access ends the machine.
    fn follow_command(&mut self) -> io::Result<()> {
        let guest = self.config.get(COMMAND, 2) as u16;
        let pin = self.intx.as_ref().is_some_and(Intx::is_on);
        let mut wanted = COMMAND_MEMORY | guest & (COMMAND_MASTER | COMMAND_INTX_OFF);
        if self.bars.iter().any(|bar| bar.io) {
            wanted |= COMMAND_IO;
        }
        if !pin {
            wanted |= COMMAND_INTX_OFF;
        }
        if wanted == self.command {
            return Ok(());
        }
        self.command = wanted;
        let mut word = [0; 2];
        self.hardware.read(CONFIG, COMMAND.into(), &mut word)?;
        let ours = COMMAND_MEMORY | COMMAND_MASTER | COMMAND_INTX_OFF | COMMAND_IO;
        let command = u16::from_le_bytes(word) & !ours | wanted;
        self.hardware.write(CONFIG, COMMAND.into(), &command.to_le_bytes())
    }

    /// Whether the guest's driver uses the interrupt pin: it has switched the function on, and no messages. Whether the pin is
    /// masked is the command register's to say.
    fn wants_pin(&self) -> bool {
        let on = |at: u16, bit: u32| self.config.get(at, 2) & bit != 0;
        let msi = self.msi.as_ref().is_some_and(|msi| on(msi.control_at(), MSI_ON));
        let table = self.table.as_ref().is_some_and(|table| on(table.control_at(), MSIX_ON));
        let decodes = on(COMMAND, (COMMAND_MEMORY | COMMAND_IO | COMMAND_MASTER).into());
        decodes && !msi && !table
    }

    /// The bytes of an access at `offset` that the device answers itself.
    fn live_part(&self, offset: u16, len: usize) -> Option<Range<usize>> {
        let (start, end) = (usize::from(offset), usize::from(offset) + len);
        let live = self.live.iter().find(|live| live.start < end && start < live.end)?;
        Some(start.max(live.start) - start..end.min(live.end) - start)
    }

    /// Tells the user of something that the guest can't be told.
    fn check(&self, what: &str, result: io::Result<()>) {
        if let (Err(error), Some(news)) = (result, &self.news) {
            let hint = "the guest's driver will say that the device does not answer; the host's kernel log says more";
            news.say(format!("device {}: cannot {what}, {error}; {hint}", self.address));
        }
    }
}

impl PciDevice for VfioPci {
    fn config_read(&mut self, offset: u16, data: &mut [u8]) {
        self.config.read(offset, data);
        if let Some(part) = self.live_part(offset, data.len()) {
            let at = u64::from(offset) + part.start as u64;
            let bytes = data.get_mut(part).unwrap_or_default();
            if self.hardware.read(CONFIG, at, bytes).is_err() {
                bytes.fill(0xff);
            }
        }
        if let Some((at, bits)) = self.msi.as_ref().and_then(Msi::pending)
            && (at..at + 4).contains(&offset)
        {
            let bytes = bits.to_le_bytes();
            for (out, byte) in data.iter_mut().zip(bytes.iter().skip(usize::from(offset - at))) {
                *out = *byte;
            }
        }
    }

    fn config_write(&mut self, offset: u16, data: &[u8]) -> Effect {
        if let Some(part) = self.live_part(offset, data.len()) {
            let at = u64::from(offset) + part.start as u64;
            // A device that refuses has the guest read what it likes.
            let _ = self.hardware.write(CONFIG, at, data.get(part).unwrap_or_default());
        }
        let effect = self.config.write(offset, data);
        // The pin goes before messages come, and comes when they are gone: the host has one kind at a time.
        let pin = self.wants_pin();
        if let Some(intx) = self.intx.as_mut().filter(|intx| intx.is_on() && !pin) {
            let done = intx.switch_off(self.hardware.as_ref());
            self.check("switch its interrupts (pin)", done);
        }
        // MSI goes before MSI-X: a driver that changes over switches one off first.
        let msi_off = self.msi.as_mut().map(|msi| msi.follow(self.hardware.as_ref(), &self.config));
        self.check("switch its interrupts (MSI)", msi_off.unwrap_or(Ok(())));
        let done = self.table.as_mut().map(|table| {
            let control = self.config.get(table.control_at(), 2) as u16;
            table.set_control(self.hardware.as_ref(), control)
        });
        self.check("switch its interrupts (MSI-X)", done.unwrap_or(Ok(())));
        if let Some(intx) = self.intx.as_mut().filter(|intx| intx.is_off() && pin) {
            let done = intx.switch_on(self.hardware.as_ref());
            self.check("switch its interrupts (pin)", done);
        }
        let done = self.follow_command();
        self.check("switch bus mastering", done);
        effect
    }

    fn placements(&self) -> Vec<Placement> {
        self.config.placements()
    }

    fn place(&mut self, bar: u8, address: u64) {
        self.config.place(bar, address);
    }

    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]) {
        if self.table.as_ref().is_some_and(|table| table.read(bar, offset, data)) {
            return;
        }
        if self.hardware.read(bar.into(), offset, data).is_err() {
            data.fill(0xff);
        }
    }

    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]) {
        let hardware = self.hardware.as_ref();
        match self.table.as_mut().and_then(|table| table.write(hardware, bar, offset, data)) {
            Some(done) => self.check("give it more interrupts", done),
            // As on real hardware, nobody hears of a write that went nowhere.
            None => drop(self.hardware.write(bar.into(), offset, data)),
        }
    }

    fn reads_have_effects(&self) -> bool {
        !self.live.is_empty() || self.msi.as_ref().is_some_and(|msi| msi.pending().is_some())
    }

    /// The device stops doing DMA and interrupting, and is as after power-on, as far as it can be.
    fn reset(&mut self) {
        self.config.reset();
        // It stops doing DMA first.
        let _ = self.follow_command();
        if let Some(intx) = &mut self.intx {
            let _ = intx.switch_off(self.hardware.as_ref());
        }
        if let Some(table) = &mut self.table {
            table.reset(self.hardware.as_ref());
        }
        if let Some(msi) = &mut self.msi {
            msi.reset(self.hardware.as_ref());
        }
        let _ = self.hardware.reset();
        // A reset may have taken what was written.
        self.command = 0;
        let _ = self.follow_command();
    }
}

fn identity(raw: &[u8; 256]) -> Identity {
    let word = |at: usize| u16::from_le_bytes([raw[at], raw[at + 1]]);
    Identity {
        vendor: word(0x00),
        device: word(0x02),
        revision: raw[0x08],
        class: u32::from_le_bytes([raw[0x09], raw[0x0a], raw[0x0b], 0]),
        subsystem_vendor: word(0x2c),
        subsystem: word(0x2e),
    }
}

/// The BARs, as the device has them and of the same sizes, at no address.
fn add_bars(
    config: &mut ConfigSpace,
    raw: &[u8; 256],
    hardware: &dyn Hardware,
    address: PciAddress,
) -> Result<Vec<Bar>, VfioError> {
    let mut bars = Vec::new();
    let mut next = 0u8;
    while next < 6 {
        let number = next;
        next += 1;
        let low = raw[0x10 + usize::from(number) * 4];
        let (io, wide) = (low & 1 != 0, low & 0b111 == 0b100 && number < 5);
        let region = hardware.region(number.into());
        let what = format!("ask for BAR {number} of {address}");
        let region = region.map_err(VfioError::host(what, "the host's kernel log says more"))?;
        if wide {
            next += 1;
        }
        // Ports past 256 and slivers of memory are none that the standard knows.
        if region.size < if io { 4 } else { 16 } || io && region.size > 256 {
            continue;
        }
        if !region.size.is_power_of_two() || !wide && region.size > 1 << 31 {
            let why = format!("has a BAR of {:#x} bytes", region.size);
            return Err(VfioError::Unfit { address, why, hint: "name another device" });
        }
        let kind = match (io, wide) {
            (true, _) => BarKind::Io,
            (_, true) => BarKind::Memory64,
            _ => BarKind::Memory32,
        };
        config.add_bar(BarSpec { bar: number, kind, size: region.size, prefetchable: !io && low & 8 != 0 });
        bars.push(Bar { number, io, region });
    }
    Ok(bars)
}

/// The list of capabilities, in its order; one that runs in circles or leaves the space ends there.
fn capabilities(raw: &[u8; 256]) -> Vec<Found> {
    let mut found: Vec<Found> = Vec::new();
    let mut at = usize::from(raw[0x34] & !3);
    if raw[0x06] & 0x10 == 0 {
        return found;
    }
    while (0x40..=0xfc).contains(&at) && !found.iter().any(|f| f.at == at) {
        found.push(Found { id: raw[at], at, room: 0 });
        at = usize::from(raw[at + 1] & !3);
    }
    let starts: Vec<usize> = found.iter().map(|f| f.at).collect();
    for one in &mut found {
        one.room = starts.iter().copied().filter(|at| *at > one.at).min().unwrap_or(256) - one.at;
    }
    found
}

/// The PCI Express capability (PCIe 5.0, 7.5.3) as the guest may see it: an endpoint of the root complex, since that is
/// where it is on the guest's bus, without a link, and without a reset of its own. Device control is the guest's to write and
/// goes nowhere: payloads and ordering are the host's.
fn express(body: &[u8]) -> (Vec<u8>, Vec<u8>) {
    const INTEGRATED: u8 = 9 << 4;
    let mut body = body.to_vec();
    let mut writable = vec![0; body.len().min(0x0a)];
    body[0] = body[0] & 0x0f | INTEGRATED;
    body[1] &= !1;
    // Capabilities: no function level reset (bit 28). Control: as after power-on. Status: nothing seen.
    body[5] &= !0x10;
    for byte in body.iter_mut().skip(6) {
        *byte = 0;
    }
    writable[6..8].copy_from_slice(&[0xff, 0x7f]);
    (body, writable)
}

/// Maps a part of BAR `bar`; large ones so that the host can use large pages.
fn map(hardware: &dyn Hardware, bar: u8, part: &Range<u64>) -> io::Result<Mmap> {
    let size = part.end - part.start;
    let len = usize::try_from(size).map_err(io::Error::other)?;
    let (file, at) = hardware.map(bar.into())?;
    let map = Mmap::reserved(len, if size < LARGE { 4096 } else { LARGE as usize })?;
    map.put(0, len, Some((file.as_raw_fd(), at + part.start)), libc::MAP_SHARED)?;
    Ok(map)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
#[path = "device_tests.rs"]
mod tests;
