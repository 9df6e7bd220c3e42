// SPDX-License-Identifier: Apache-2.0
//! What every virtio device has to stand through both of its faces, whatever it does. A device's tests call [`check`] with
//! a way to make it.
//!
//! `setup`: the way to `DRIVER_OK` and back. `faults`: what a guest does wrong afterwards. `config`: the device's own
//! configuration space. `pci` and `mmio`: what only one of the faces has.

mod config;
mod faults;
mod mmio;
mod pci;
mod setup;

use std::time::{Duration, Instant};

use base::Gpa;
use mem::GuestRam;
use virtio::device::{VirtioDevice, status};
use virtio::features;

use crate::driver::{Buf, GuestQueue};
use crate::faces::{MmioFace, PciFace};
use crate::guest::{Face, Guest};

/// A driver's status bits once it runs.
const READY: u8 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
/// Bytes of guest memory in the checks.
const RAM: u64 = 0x10_0000;

/// What to check a device with.
pub struct Subject<'a> {
    /// Makes the device; called for each check.
    pub make: &'a dyn Fn() -> Box<dyn VirtioDevice>,
    /// Its virtio device id.
    pub kind: u16,
    /// A queue that the device empties without being asked from outside.
    pub busy_queue: u16,
}

/// Runs all checks, over PCI and over MMIO.
///
/// # Panics
/// When the device fails one.
pub fn check(subject: &Subject<'_>) {
    both::<PciFace>(subject);
    pci::check(subject);
    both::<MmioFace>(subject);
    mmio::check(subject);
}

/// The checks that do not depend on the face.
fn both<F: Face>(subject: &Subject<'_>) {
    setup::check::<F>(subject);
    faults::check::<F>(subject);
    config::check::<F>(subject);
}

/// Waits for `done`, which another thread brings about.
///
/// # Panics
/// When it does not happen within ten seconds.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < end, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn ram() -> GuestRam {
    crate::ram(RAM)
}

fn guest<F: Face>(subject: &Subject<'_>, ram: &GuestRam) -> Guest<F> {
    Guest::on((subject.make)(), ram)
}

/// A queue of 16 entries for each that the device has.
fn queues<F: Face>(guest: &mut Guest<F>, ram: &GuestRam) -> Vec<GuestQueue> {
    (0..guest.queue_count()).map(|i| GuestQueue::new(ram, 0x1000 + 0x1000 * u64::from(i), 16)).collect()
}

fn start<F: Face>(guest: &mut Guest<F>, queues: &[GuestQueue]) {
    let refs: Vec<&GuestQueue> = queues.iter().collect();
    guest.start(features::TRANSPORT, &refs);
    assert_eq!(guest.status(), READY);
}

/// A request that a device of this kind serves at once, as a chain of buffers that are filled already: a block read, a
/// packet to send, a line to print, bytes to fill, a block to plug.
fn job(kind: u16, ram: &GuestRam) -> Vec<Buf> {
    assert!(ram.write_bytes(Gpa(0x8000), &[0; 0x100]).is_ok(), "the request is in memory");
    match kind {
        1 => vec![Buf::read(0x8000, 12 + 60)],
        2 => vec![Buf::read(0x8000, 16), Buf::write(0x9000, 512), Buf::write(0xa000, 1)],
        3 => vec![Buf::read(0x8000, 16)],
        24 => vec![Buf::read(0x8000, 24), Buf::write(0x9000, 10)],
        _ => vec![Buf::write(0x8000, 64)],
    }
}

/// Sends a [`job`] to the busy queue and waits until it comes back.
fn works<F: Face>(subject: &Subject<'_>, guest: &mut Guest<F>, ram: &GuestRam, queue: &mut GuestQueue) {
    let head = queue.send(&job(subject.kind, ram));
    guest.kick(subject.busy_queue);
    let mut used = None;
    eventually("an answer", || {
        used = queue.used();
        used.is_some()
    });
    assert_eq!(used.map(|(head, _)| head), Some(head));
    assert_eq!(guest.status(), READY);
}
