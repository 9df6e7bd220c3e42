// SPDX-License-Identifier: Apache-2.0
//! A device of registers behind the function: what the guest reads and writes, what of it reaches the device, and which
//! interrupts the host is asked for.

use std::os::fd::{OwnedFd, RawFd};
use std::sync::Mutex;

use irq::{LevelPin, MsiMessage, MsiVector, Resampled};

use super::*;

/// What a test sees of its device.
#[derive(Default)]
struct Seen {
    config: Vec<u8>,
    bar: Vec<u8>,
    /// Interrupts as they were asked for: kind, and how many.
    signals: Vec<(Interrupts, usize)>,
    resets: usize,
    /// Vectors that the host has left.
    vectors_left: usize,
    /// Interrupt pins that the host says it has.
    pins: u32,
    /// What unmasks the pin.
    unmasked_by: Vec<RawFd>,
}

#[derive(Clone, Default)]
struct Fake(Arc<Mutex<Seen>>);

impl Hardware for Fake {
    fn region(&self, index: u32) -> io::Result<Region> {
        let whole = |size: u64| Region { size, read: true, write: true, mappable: std::iter::once(0..size).collect() };
        Ok(match index {
            0 => whole(0x4000),
            2 => Region { mappable: Vec::new(), ..whole(32) },
            _ => Region::default(),
        })
    }
    fn read(&self, region: u32, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let seen = self.0.lock().unwrap();
        let from = if region == CONFIG { &seen.config } else { &seen.bar };
        data.copy_from_slice(
            from.get(offset as usize..offset as usize + data.len()).ok_or(io::ErrorKind::InvalidInput)?,
        );
        Ok(())
    }
    fn write(&self, region: u32, offset: u64, data: &[u8]) -> io::Result<()> {
        let seen = &mut *self.0.lock().unwrap();
        let to = if region == CONFIG { &mut seen.config } else { &mut seen.bar };
        let part = to.get_mut(offset as usize..offset as usize + data.len());
        part.ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(data);
        Ok(())
    }
    fn interrupts(&self, kind: Interrupts) -> io::Result<u32> {
        Ok(if kind == Interrupts::Pin { self.0.lock().unwrap().pins } else { 1 })
    }
    fn unmask_on(&self, fd: RawFd) -> io::Result<()> {
        self.0.lock().unwrap().unmasked_by.push(fd);
        Ok(())
    }
    fn signal(&self, kind: Interrupts, fds: &[RawFd]) -> io::Result<()> {
        let mut seen = self.0.lock().unwrap();
        assert!(fds.iter().all(|fd| *fd >= 100), "every interrupt has its eventfd");
        if fds.len() > seen.vectors_left {
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        seen.signals.push((kind, fds.len()));
        Ok(())
    }
    fn reset(&self) -> io::Result<()> {
        self.0.lock().unwrap().resets += 1;
        Ok(())
    }
    fn map(&self, _region: u32) -> io::Result<(OwnedFd, u64)> {
        let file = tempfile::tempfile()?;
        file.set_len(1 << 20)?;
        Ok((file.into(), 0))
    }
}

/// What a vector was told: routes, holds, notifications.
#[derive(Default)]
struct Vector {
    number: RawFd,
    routed: Mutex<Option<MsiMessage>>,
    held: Mutex<bool>,
    notified: Mutex<usize>,
}

impl MsiVector for Vector {
    fn route(&self, message: Option<MsiMessage>) -> io::Result<()> {
        *self.routed.lock().unwrap() = message;
        Ok(())
    }
    fn notify(&self) {
        *self.notified.lock().unwrap() += 1;
    }
    fn fd(&self) -> Option<RawFd> {
        Some(self.number)
    }
    fn hold(&self, held: bool) -> io::Result<()> {
        *self.held.lock().unwrap() = held;
        Ok(())
    }
    fn is_pending(&self) -> bool {
        *self.held.lock().unwrap()
    }
}

/// An input of an interrupt controller: how many are connected now, and how many ever were.
#[derive(Clone, Default)]
struct Input(Arc<Mutex<(usize, usize)>>);

impl LevelPin for Input {
    fn connect(&self) -> io::Result<Box<dyn Resampled>> {
        let mut now = self.0.lock().unwrap();
        *now = (now.0 + 1, now.1 + 1);
        Ok(Box::new(self.clone()))
    }
}

impl Resampled for Input {
    fn trigger(&self) -> RawFd {
        200
    }
    fn ended(&self) -> RawFd {
        201
    }
}

/// The one that is connected lets go; the one that connects is never dropped before it.
impl Drop for Input {
    fn drop(&mut self) {
        let mut now = self.0.lock().unwrap();
        now.0 = now.0.saturating_sub(1);
    }
}

#[derive(Default)]
struct Sink(Mutex<Vec<Arc<Vector>>>);

impl MsiSink for Sink {
    fn vectors(&self, count: u16) -> io::Result<Vec<Arc<dyn MsiVector>>> {
        let mut all = self.0.lock().unwrap();
        let new = (0..count).map(|n| Arc::new(Vector { number: 100 + RawFd::from(n), ..Vector::default() }));
        let new: Vec<Arc<Vector>> = new.collect();
        all.extend(new.iter().cloned());
        Ok(new.into_iter().map(|vector| vector as Arc<dyn MsiVector>).collect())
    }
}

const PM: usize = 0x40;
const MSI: usize = 0x50;
const EXPRESS: usize = 0x70;
const VENDOR: usize = 0xb0;
const FLR: usize = 0xc0;
const MSIX: usize = 0xd0;

/// An NVMe disk with everything that a list of capabilities can have.
fn config() -> Vec<u8> {
    let mut raw = vec![0u8; 256];
    let mut put = |at: usize, bytes: &[u8]| raw[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x00, &[0x36, 0x1b, 0x10, 0x00, 0x00, 0x00, 0x10, 0x00, 0x02, 0x02, 0x08, 0x01]);
    put(0x10, &[0x04]);
    put(0x18, &[0x01]);
    put(0x2c, &[0xf4, 0x1a, 0x00, 0x11]);
    put(0x34, &[PM as u8]);
    put(0x3c, &[11, 1]);
    put(PM, &[0x01, MSI as u8, 0x03, 0xc8, 0x00, 0x00, 0x00, 0x00]);
    put(MSI, &[0x05, EXPRESS as u8, 0x84, 0x01]);
    put(EXPRESS, &[0x10, VENDOR as u8, 0x02, 0x00, 0xc0, 0x8f, 0x00, 0x10, 0x30, 0x28, 0x00, 0x00, 0x11, 0x22]);
    put(VENDOR, &[0x09, FLR as u8, 0x0c, 0xaa, 1, 2, 3, 4, 5, 6, 7, 8]);
    put(FLR, &[0x13, MSIX as u8, 0x06, 0x03, 0x00, 0x00]);
    put(MSIX, &[0x11, 0x00, 0x09, 0x00, 0x00, 0x20, 0x00, 0x00, 0x00, 0x30, 0x00, 0x00]);
    raw
}

fn function_of(config: Vec<u8>) -> (Result<VfioPci, VfioError>, Fake, Sink) {
    let fake = Fake::default();
    *fake.0.lock().unwrap() = Seen { config, bar: vec![0xee; 0x4000], vectors_left: 64, ..Seen::default() };
    let sink = Sink::default();
    let opened = Opened { address: PciAddress::default(), hardware: Box::new(fake.clone()) };
    (VfioPci::new(opened, &sink, Arc::new(Input::default())), fake, sink)
}

/// One with an interrupt pin, at `input`.
fn pinned(input: &Input, config: Vec<u8>) -> (VfioPci, Fake) {
    let fake = Fake::default();
    *fake.0.lock().unwrap() = Seen { config, bar: vec![0; 0x4000], vectors_left: 64, pins: 1, ..Seen::default() };
    let opened = Opened { address: PciAddress::default(), hardware: Box::new(fake.clone()) };
    (VfioPci::new(opened, &Sink::default(), Arc::new(Input(input.0.clone()))).unwrap(), fake)
}

#[test]
fn the_pin_is_there_while_the_function_is_on_and_sends_no_messages() {
    let input = Input::default();
    let (mut function, fake) = pinned(&input, config());
    assert_eq!(read(&mut function, 0x3d, 1), 1);
    let connected = || input.0.lock().unwrap().0;
    let signals = |fake: &Fake| std::mem::take(&mut fake.0.lock().unwrap().signals);
    let command = |fake: &Fake| fake.0.lock().unwrap().config[4..6].to_vec();
    assert_eq!((connected(), command(&fake)), (0, vec![0x03, 0x04]), "not before there is a driver");
    write(&mut function, 4, 0x0006, 2);
    assert_eq!((connected(), signals(&fake)), (1, vec![(Interrupts::Pin, 1)]));
    assert_eq!((command(&fake), fake.0.lock().unwrap().unmasked_by.clone()), (vec![0x07, 0x00], vec![201]));
    // A mask is passed on, and no more than that.
    write(&mut function, 4, 0x0406, 2);
    assert_eq!((command(&fake), connected(), signals(&fake)), (vec![0x07, 0x04], 1, vec![]));
    write(&mut function, 4, 0x0006, 2);
    // The host has one kind at a time: the pin goes first, and comes back last.
    write(&mut function, MSIX + 2, 0x8000, 2);
    assert_eq!(signals(&fake), [(Interrupts::Pin, 0), (Interrupts::MsiX, 1)]);
    assert_eq!((command(&fake), connected()), (vec![0x07, 0x04], 0));
    write(&mut function, MSIX + 2, 0, 2);
    assert_eq!(signals(&fake), [(Interrupts::MsiX, 0), (Interrupts::Pin, 1)]);
    write(&mut function, MSI + 2, 0x0001, 2);
    assert_eq!(signals(&fake), [(Interrupts::Pin, 0), (Interrupts::Msi, 1)]);
    write(&mut function, MSI + 2, 0, 2);
    assert_eq!((signals(&fake), connected()), (vec![(Interrupts::Msi, 0), (Interrupts::Pin, 1)], 1));
    function.reset();
    assert_eq!((signals(&fake), connected(), command(&fake)), (vec![(Interrupts::Pin, 0)], 0, vec![0x03, 0x04]));
}

#[test]
fn a_pin_that_the_host_can_not_have_is_said_once() {
    let input = Input::default();
    let (mut function, fake) = pinned(&input, config());
    let news = Arc::new(News::new().unwrap());
    function.report_to(&news);
    fake.0.lock().unwrap().vectors_left = 0;
    for command in [0x0002, 0x0006, 0x0002] {
        write(&mut function, 4, command, 2);
    }
    let said = news.take();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].starts_with("device 0000:00:00.0: cannot switch its interrupts (pin), "), "{said:?}");
    assert_eq!(input.0.lock().unwrap().0, 0);
}

#[test]
fn a_device_with_nothing_but_a_pin_will_do() {
    let mut raw = config();
    raw[0x34] = 0xf0;
    let (mut function, _) = pinned(&Input::default(), raw);
    assert_eq!((read(&mut function, 0x34, 1), read(&mut function, 0x3d, 1)), (0, 1));
}

fn function() -> (VfioPci, Fake, Sink) {
    let (function, fake, sink) = function_of(config());
    (function.unwrap(), fake, sink)
}

fn read(function: &mut VfioPci, at: usize, len: usize) -> u32 {
    let mut word = [0; 4];
    function.config_read(at as u16, &mut word[..len]);
    u32::from_le_bytes(word)
}

fn write(function: &mut VfioPci, at: usize, value: u32, len: usize) -> Effect {
    function.config_write(at as u16, &value.to_le_bytes()[..len])
}

#[test]
fn the_guest_sees_the_device_without_what_it_must_not_touch() {
    let (mut function, fake, _) = function();
    assert_eq!(read(&mut function, 0, 4), 0x0010_1b36);
    assert_eq!(read(&mut function, 8, 4), 0x0108_0202);
    assert_eq!(read(&mut function, 0x2c, 4), 0x1100_1af4);
    assert_eq!(read(&mut function, 0x3d, 1), 0, "no interrupt pin");
    let mut list = Vec::new();
    let mut at = read(&mut function, 0x34, 1) as usize;
    while at != 0 {
        list.push((read(&mut function, at, 1), at));
        at = read(&mut function, at + 1, 1) as usize;
    }
    assert_eq!(list, [(0x01, PM), (0x05, MSI), (0x10, EXPRESS), (0x09, VENDOR), (0x11, MSIX)], "no reset of its own");
    assert_eq!(read(&mut function, EXPRESS + 2, 2), 0x0092, "an integrated endpoint, version 2");
    assert_eq!(read(&mut function, EXPRESS + 4, 4), 0x8fc0, "no function level reset");
    assert_eq!(read(&mut function, EXPRESS + 12, 4), 0, "no link");
    assert_eq!(read(&mut function, MSIX, 4), 0x0009_0011);
    assert_eq!((read(&mut function, MSIX + 4, 4), read(&mut function, MSIX + 8, 4)), (0x2000, 0x3000));
    // Sizes are the device's.
    write(&mut function, 0x10, u32::MAX, 4);
    write(&mut function, 0x18, u32::MAX, 4);
    assert_eq!((read(&mut function, 0x10, 4), read(&mut function, 0x18, 4)), (0xffff_c004, 0xffff_ffe1));
    let command = |fake: &Fake| fake.0.lock().unwrap().config[4..6].to_vec();
    assert_eq!(command(&fake), [0x03, 0x04], "BARs answer, no pin, no DMA yet");
    write(&mut function, 4, 0x0006, 2);
    assert_eq!(command(&fake), [0x07, 0x04], "the guest's driver may do DMA");
    write(&mut function, 4, 0x0000, 2);
    assert_eq!(command(&fake), [0x03, 0x04], "the guest's decoding is its own affair");
    let device = fake.0.lock().unwrap().config.clone();
    for at in (0x40..256).step_by(4).filter(|at| !(VENDOR..VENDOR + 12).contains(at)) {
        write(&mut function, at, u32::MAX, 4);
        write(&mut function, at, 0, 4);
    }
    assert_eq!(fake.0.lock().unwrap().config, device, "nothing else reaches it");
}

#[test]
fn sleep_is_told_and_not_done() {
    let (mut function, fake, _) = function();
    assert_eq!(read(&mut function, PM + 2, 2), 0x0003, "wakes nobody");
    write(&mut function, PM + 4, 3, 2);
    assert_eq!(read(&mut function, PM + 4, 2), 0x000b, "asleep, and will not be reset by waking");
    assert_eq!(fake.0.lock().unwrap().config[PM + 4], 0);
}

#[test]
fn a_vendors_capability_is_the_devices_own() {
    let (mut function, fake, _) = function();
    assert!(function.reads_have_effects());
    fake.0.lock().unwrap().config[VENDOR + 4..VENDOR + 8].copy_from_slice(&[9, 9, 9, 9]);
    assert_eq!(read(&mut function, VENDOR + 4, 4), 0x0909_0909);
    assert_eq!(read(&mut function, VENDOR, 4), 0xaa0c_0000 | (MSIX as u32) << 8 | 9, "but for the list");
    write(&mut function, VENDOR, 0x1122_3344, 4);
    write(&mut function, VENDOR + 8, 0x55, 1);
    let seen = fake.0.lock().unwrap();
    assert_eq!(
        &seen.config[VENDOR..VENDOR + 4],
        &[0x09, FLR as u8, 0x22, 0x11],
        "its head is not the guest's to write"
    );
    assert_eq!(seen.config[VENDOR + 8], 0x55);
}

#[test]
fn messages_of_a_table_are_the_guests_and_the_hosts_interrupts_grow_with_them() {
    let (mut function, fake, sink) = function();
    let signals = |fake: &Fake| std::mem::take(&mut fake.0.lock().unwrap().signals);
    let entry = |function: &mut VfioPci, n: u64, masked: u32| {
        for (field, value) in [(0u64, 0xfee0_1000), (4, 0), (8, 0x40 + n as u32), (12, masked)] {
            function.bar_write(0, 0x2000 + n * 16 + field, &u32::to_le_bytes(value));
        }
    };
    // As Linux does: on and masked, entries written, unmasked.
    write(&mut function, MSIX + 2, 0xc000, 2);
    assert_eq!(signals(&fake), [(Interrupts::MsiX, 1)]);
    entry(&mut function, 0, 1);
    write(&mut function, MSIX + 2, 0x8000, 2);
    entry(&mut function, 0, 0);
    assert_eq!(signals(&fake), []);
    let table = sink.0.lock().unwrap().iter().skip(4).cloned().collect::<Vec<_>>();
    assert_eq!(table.len(), 10);
    let message = |n: u64| Some(MsiMessage { address: 0xfee0_1000, data: 0x40 + n as u32 });
    assert_eq!((*table[0].routed.lock().unwrap(), *table[0].held.lock().unwrap()), (message(0), false));
    entry(&mut function, 1, 0);
    assert_eq!(signals(&fake), [(Interrupts::MsiX, 0), (Interrupts::MsiX, 2)]);
    entry(&mut function, 2, 0);
    entry(&mut function, 3, 0);
    assert_eq!(signals(&fake), [(Interrupts::MsiX, 0), (Interrupts::MsiX, 4)], "twice as many at a time");
    assert_eq!(*table[0].notified.lock().unwrap(), 2, "what came in between is looked for");
    entry(&mut function, 9, 0);
    assert_eq!(signals(&fake), [(Interrupts::MsiX, 0), (Interrupts::MsiX, 10)], "and no more than there are");
    // A mask keeps what comes, and shows it.
    entry(&mut function, 0, 1);
    assert!(*table[0].held.lock().unwrap());
    let mut bits = [0; 8];
    function.bar_read(0, 0x3000, &mut bits);
    assert_eq!(bits[0] & 1, 1);
    let mut word = [0; 4];
    function.bar_read(0, 0x2008, &mut word);
    assert_eq!(word, [0x40, 0, 0, 0], "the table is the guest's own");
    assert_eq!(fake.0.lock().unwrap().bar[0x2008], 0xee, "and not the device's");
    function.bar_write(0, 0x1000, &[7, 0, 0, 0]);
    function.bar_read(0, 0x1000, &mut word);
    assert_eq!((word, fake.0.lock().unwrap().bar[0x1000]), ([7, 0, 0, 0], 7), "other registers are");
    write(&mut function, MSIX + 2, 0, 2);
    assert_eq!(signals(&fake), [(Interrupts::MsiX, 0)]);
}

#[test]
fn messages_without_a_table_count_up() {
    let (mut function, fake, sink) = function();
    assert_eq!(read(&mut function, MSI, 4), 0x0184_0000 | (EXPRESS as u32) << 8 | 5, "four, 64 bits, masks");
    write(&mut function, MSI + 4, 0xfee0_2000, 4);
    write(&mut function, MSI + 12, 0x61, 2);
    write(&mut function, MSI + 16, 0b10, 4);
    write(&mut function, MSI + 2, 0x0021, 2);
    assert_eq!(fake.0.lock().unwrap().signals, [(Interrupts::Msi, 4)]);
    let vectors = sink.0.lock().unwrap();
    let data: Vec<_> = vectors.iter().take(4).map(|v| v.routed.lock().unwrap().unwrap().data).collect();
    assert_eq!(data, [0x60, 0x61, 0x62, 0x63]);
    let held: Vec<_> = vectors.iter().take(4).map(|v| *v.held.lock().unwrap()).collect();
    assert_eq!(held, [false, true, false, false]);
    assert_eq!(read(&mut function, MSI + 20, 4), 0b10, "pending");
    write(&mut function, MSI + 2, 0x0001, 2);
    write(&mut function, MSI + 2, 0x0000, 2);
    let kinds: Vec<_> = fake.0.lock().unwrap().signals.iter().map(|(_, count)| *count).collect();
    assert_eq!(kinds, [4, 0, 1, 0]);
    assert!(vectors.iter().take(4).all(|v| v.routed.lock().unwrap().is_none()));
}

#[test]
fn a_host_without_interrupts_left_is_said_once_and_ends_nothing() {
    let (mut function, fake, _) = function();
    let news = Arc::new(News::new().unwrap());
    function.report_to(&news);
    fake.0.lock().unwrap().vectors_left = 0;
    write(&mut function, MSIX + 2, 0x8000, 2);
    let said = news.take();
    assert!(said[0].starts_with("device 0000:00:00.0: cannot switch its interrupts (MSI-X), "), "{said:?}");
    fake.0.lock().unwrap().vectors_left = 1;
    write(&mut function, MSIX + 2, 0x8000, 2);
    assert_eq!(fake.0.lock().unwrap().signals, [(Interrupts::MsiX, 1)], "a driver that tries again gets them");
}

#[test]
fn registers_are_direct_but_for_the_table_and_a_reset_takes_everything_back() {
    let (mut function, fake, _) = function();
    let parts = function.direct().unwrap();
    let parts: Vec<_> = parts.iter().map(|part| (part.bar, part.offset, part.map.len())).collect();
    assert_eq!(parts, [(0, 0, 0x2000)]);
    write(&mut function, 4, 0x0006, 2);
    write(&mut function, MSIX + 2, 0x8000, 2);
    function.reset();
    let seen = fake.0.lock().unwrap();
    assert_eq!((seen.config[4], seen.resets), (0x03, 1));
    assert_eq!(seen.signals.last(), Some(&(Interrupts::MsiX, 0)));
}

#[test]
fn what_can_not_be_passed_on_is_said() {
    let said = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut raw = config();
        change(&mut raw);
        function_of(raw).0.err().map(|error| error.to_string()).unwrap_or_default()
    };
    assert!(said(&|raw| raw[0x0e] = 1).contains("is a bridge"));
    assert!(said(&|raw| raw[0x34] = 0xf0).contains("neither MSI, MSI-X nor an interrupt pin"));
    assert_eq!(said(&|raw| raw[VENDOR + 1] = PM as u8), "", "a list that runs in circles ends");
    assert_eq!(said(&|raw| raw[VENDOR + 2] = 0xff), "", "a length past its room is cut");
}
