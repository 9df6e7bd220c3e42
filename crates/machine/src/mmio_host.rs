// SPDX-License-Identifier: Apache-2.0
//! Virtio devices as pages of registers at fixed addresses: which device answers where, which line it has, and which
//! doorbells it has. Nothing here moves; vCPU threads take a device's own lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Gpa, Gsi};
use mem::GuestRam;
use mem::space::Doorbell;
use spec::MmioStatus;
use virtio::VirtioDevice;
use virtio::transport::mmio::{Hidden, NOTIFY, SIZE, Showing, VirtioMmio};

use crate::error::{Error, host};
use crate::layout::{VIRTIO_MMIO, VIRTIO_MMIO_GSIS, VIRTIO_MMIO_MOST};
use crate::lines::Lines;
use crate::spaces::{Device, Spaces};
use crate::status_page::StatusPage;

/// Virtio's numbers of network devices and disks.
const NET: u16 = 1;
const BLOCK: u16 = 2;

/// A device at its page, under its own lock.
pub type Registers = Arc<Mutex<VirtioMmio>>;

/// The devices, page after page.
pub struct MmioHost {
    ram: GuestRam,
    lines: Lines,
    spaces: Spaces,
    status: MmioStatus,
    devices: Vec<Registers>,
    /// The pin of each; `None` for those on a line of the paravirtual controller.
    gsis: Vec<Option<Gsi>>,
}

fn lock(device: &Registers) -> MutexGuard<'_, VirtioMmio> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Page and interrupt of device `number`.
fn place(number: usize) -> (Gpa, Gsi) {
    let gsi = VIRTIO_MMIO_GSIS[number % VIRTIO_MMIO_GSIS.len()];
    (Gpa(VIRTIO_MMIO.0 + number as u64 * SIZE), gsi)
}

/// The highest interrupt of `count` devices, if there are any.
#[must_use]
pub fn last_gsi(count: usize) -> Option<Gsi> {
    (0..count).map(|number| place(number).1).max_by_key(|gsi| gsi.0)
}

impl MmioHost {
    /// No devices yet.
    #[must_use]
    pub fn new(spaces: &Spaces, ram: &GuestRam, lines: Lines, status: MmioStatus) -> Self {
        Self { spaces: spaces.clone(), ram: ram.clone(), lines, status, devices: Vec::new(), gsis: Vec::new() }
    }

    /// Puts `device` at the next page and gives it as it is there.
    ///
    /// # Errors
    /// [`Error::TooMuch`] when there are no pages left, [`Error::Host`] when the host is out of descriptors or interrupts.
    pub fn add(&mut self, device: Box<dyn VirtioDevice>) -> Result<Registers, Error> {
        let number = self.devices.len();
        if number >= VIRTIO_MMIO_MOST {
            let what = format!("more than {VIRTIO_MMIO_MOST} virtio devices: give the VM fewer");
            return Err(Error::TooMuch(what));
        }
        let (at, gsi) = place(number);
        // Only devices that carry load: a guest whose kernel has no driver for the controller still has its console.
        let loaded = matches!(device.kind(), NET | BLOCK);
        let (line, gsi) = match loaded.then(|| self.lines.paravirtual(at)).flatten() {
            Some(line) => (line, None),
            None => (self.lines.pin(gsi)?, Some(gsi)),
        };
        let page = match self.status {
            MmioStatus::RoPage => Some(Arc::new(StatusPage::new(&self.spaces)?)),
            MmioStatus::Trap => None,
        };
        let shown: Arc<dyn Showing> = match &page {
            Some(page) => page.clone(),
            None => Arc::new(Hidden::default()),
        };
        let device = VirtioMmio::shown(device, self.ram.clone(), line, shown);
        let device = device.map_err(host("give a device its eventfds"))?;
        let mut bells = Vec::new();
        for (queue, kick) in device.kicks() {
            let fd = Arc::new(kick.try_clone().map_err(host("copy an eventfd"))?);
            bells.push(Doorbell { offset: NOTIFY, value: Some(queue.into()), fd });
        }
        // There are fewer than 256.
        let region = self.spaces.add_device(at, SIZE, Device::VirtioMmio(number as u8), bells.clone())?;
        if let Some(page) = page {
            page.place(region, Device::VirtioMmio(number as u8), bells);
        }
        let device = Arc::new(Mutex::new(device));
        self.devices.push(device.clone());
        self.gsis.push(gsi);
        Ok(device)
    }

    /// Reads registers of device `number` from byte `offset` on.
    pub fn read(&self, number: u8, offset: u64, data: &mut [u8]) {
        match self.devices.get(usize::from(number)) {
            Some(device) => lock(device).read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Writes there.
    pub fn write(&self, number: u8, offset: u64, data: &[u8]) {
        if let Some(device) = self.devices.get(usize::from(number)) {
            lock(device).write(offset, data);
        }
    }

    /// Stops all devices: work in flight is finished or dropped, threads end. The guest must not run any more.
    pub fn stop(&self) {
        for device in &self.devices {
            lock(device).reset();
        }
    }

    /// The devices for the ACPI tables: those on pins. The others are the paravirtual controller's to announce.
    #[must_use]
    pub fn described(&self) -> Vec<boot::VirtioMmio> {
        let pins = self.gsis.iter().enumerate().filter_map(|(number, gsi)| Some((place(number).0, (*gsi)?)));
        pins.map(|(at, gsi)| boot::VirtioMmio { at, len: SIZE as u32, gsi }).collect()
    }
}

/// `cmdline` with `devices` announced in it, for a kernel that reads no tables: before the `--` that ends the kernel's part.
/// A kernel that reads both finds each device once, the second time its page is taken. As it was if there is no room for
/// all of them.
#[must_use]
pub fn announce(cmdline: &str, devices: &[boot::VirtioMmio]) -> String {
    let words = devices.iter().map(|d| format!("virtio_mmio.device={}K@{:#x}:{}", d.len >> 10, d.at.0, d.gsi.0));
    add_words(cmdline, &words.collect::<Vec<_>>().join(" "))
}

/// `cmdline` with further `words` for the kernel, before what is its first program's; as it is where they don't fit.
#[must_use]
pub fn add_words(cmdline: &str, words: &str) -> String {
    if words.is_empty() || cmdline.len() + 1 + words.len() > spec::MAX_CMDLINE {
        return cmdline.to_owned();
    }
    let end = cmdline
        .split_inclusive(char::is_whitespace)
        .try_fold(0, |at, word| if word.trim_end() == "--" { Err(at) } else { Ok(at + word.len()) });
    match end {
        Err(at) => format!("{}{words} {}", &cmdline[..at], &cmdline[at..]),
        Ok(_) => format!("{cmdline} {words}").trim_start().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Vec<boot::VirtioMmio> {
        let places = (0..2).map(place);
        places.map(|(at, gsi)| boot::VirtioMmio { at, len: SIZE as u32, gsi }).collect()
    }

    #[test]
    fn the_command_line_names_page_and_interrupt() {
        let words = "virtio_mmio.device=4K@0xe1000000:6 virtio_mmio.device=4K@0xe1001000:9";
        assert_eq!(announce("quiet ro", &two()), format!("quiet ro {words}"));
        assert_eq!(announce("", &two()), words);
        assert_eq!(announce("quiet -- sh -- x", &two()), format!("quiet {words} -- sh -- x"));
        assert_eq!(announce("-- sh", &two()), format!("{words} -- sh"));
        assert_eq!(announce("a--b --c", &two()), format!("a--b --c {words}"));
        assert_eq!(announce("quiet", &[]), "quiet");
        let long = "x".repeat(spec::MAX_CMDLINE - words.len() - 1);
        assert_eq!(announce(&long, &two()).len(), spec::MAX_CMDLINE);
        let longer = format!("{long}x");
        assert_eq!(announce(&longer, &two()), longer, "the tables have to do");
    }

    #[test]
    fn lines_are_shared_once_all_are_taken() {
        let gsis: Vec<u32> = (0..VIRTIO_MMIO_MOST).map(|number| place(number).1.0).collect();
        assert_eq!((last_gsi(0), last_gsi(1), last_gsi(14)), (None, Some(Gsi(6)), Some(Gsi(23))));
        assert_eq!(gsis[..14], [6, 9, 10, 11, 14, 16, 17, 18, 19, 20, 21, 22, 23, 6]);
        assert!(!gsis.contains(&crate::layout::SERIAL_GSI.0) && !gsis.contains(&crate::layout::ACPI_EVENT_GSI.0));
    }
}
