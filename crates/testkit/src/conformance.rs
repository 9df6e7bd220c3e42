// SPDX-License-Identifier: Apache-2.0
//! What every virtio device has to stand through its PCI face, whatever it does. A device's tests call [`check`] with a
//! way to make it.

use std::time::{Duration, Instant};

use mem::GuestRam;
use pci::PciDevice;
use virtio::device::{VirtioDevice, status};
use virtio::{GuestFault, features};

use crate::driver::{Buf, GuestQueue, WRITE};
use crate::guest::Guest;

const READY: u8 = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK | status::DRIVER_OK;
const NO_VECTOR: u32 = 0xffff;

/// What to check a device with.
pub struct Subject<'a> {
    /// Makes the device; called for each check.
    pub make: &'a dyn Fn() -> Box<dyn VirtioDevice>,
    /// Its virtio device id.
    pub kind: u16,
    /// A queue that the device empties without being asked from outside.
    pub busy_queue: u16,
}

/// Runs all checks.
///
/// # Panics
/// When the device fails one.
pub fn check(subject: &Subject<'_>) {
    identity(subject);
    features_are_refused(subject);
    status_has_an_order(subject);
    queue_sizes(subject);
    vectors(subject);
    rings_outside_memory(subject);
    faults_need_a_reset(subject);
    reset_forgets(subject);
    window(subject);
    anything_may_be_read_and_written(subject);
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
    crate::ram(0x10_0000)
}

fn guest(subject: &Subject<'_>, ram: &GuestRam) -> Guest {
    Guest::new((subject.make)(), ram)
}

fn queues(guest: &mut Guest, ram: &GuestRam) -> Vec<GuestQueue> {
    (0..guest.queue_count()).map(|i| GuestQueue::new(ram, 0x1000 + 0x1000 * u64::from(i), 16)).collect()
}

fn start(guest: &mut Guest, queues: &[GuestQueue]) {
    let refs: Vec<&GuestQueue> = queues.iter().collect();
    guest.start(features::TRANSPORT, &refs);
    assert_eq!(guest.status(), READY);
}

fn identity(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    assert_eq!(guest.config(0, 4), u32::from(0x1040 + subject.kind) << 16 | 0x1af4);
    assert!(guest.config(8, 1) >= 1, "a modern device has revision 1 or more");
    assert_eq!(guest.config(0x3d, 1), 0, "no legacy interrupt");
    assert!(guest.queue_count() > subject.busy_queue);
    assert_eq!(guest.vectors.len(), usize::from(guest.queue_count()) + 1);
    let [common, notify, isr, device] = guest.blocks;
    assert!(common.len >= 0x38 && isr.len >= 1 && device.len >= 4);
    assert!(notify.len >= u64::from(guest.queue_count()) * u64::from(guest.notify_step));
    for index in 0..guest.queue_count() {
        let address = guest.device.notify_address(index).map(|a| a.0);
        assert_eq!(address, Some(0xe000_0000 + notify.at + u64::from(index) * 4));
    }
    assert_eq!(guest.device.notify_address(guest.device.core().queue_count()), None);
}

fn features_are_refused(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    let offered = guest.offered();
    assert_eq!(offered & features::TRANSPORT, features::TRANSPORT);
    assert!(!guest.negotiate(offered & !features::VERSION_1), "no legacy drivers");
    assert_eq!(guest.device.core().last_fault(), Some(GuestFault::Features));
    for bit in 0..64 {
        if offered & 1 << bit == 0 {
            assert!(!guest.negotiate(features::VERSION_1 | 1 << bit), "bit {bit} was not offered");
        }
    }
    assert!(guest.negotiate(offered), "all that is offered can be had");
    assert!(guest.negotiate(features::VERSION_1), "and so can the least");
    guest.write(8, 4, 0);
    guest.write(0x0c, 4, 0xffff_ffff);
    assert_eq!(guest.device.core().accepted(), features::VERSION_1, "agreed features stay");
    assert_eq!(guest.device.core().last_fault(), Some(GuestFault::LateSetting));
    guest.write(0, 4, 2);
    assert_eq!(guest.read(4, 4), 0, "there are 64 features");
}

fn status_has_an_order(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    guest.set_status(status::DRIVER);
    assert_eq!(guest.status(), 0, "first acknowledge");
    guest.set_status(status::ACKNOWLEDGE | status::DRIVER | status::DRIVER_OK);
    assert_eq!(guest.status(), status::ACKNOWLEDGE | status::DRIVER, "no features, no driver");
    assert_eq!(guest.device.core().last_fault(), Some(GuestFault::StatusOrder));
    guest.set_status(status::FAILED);
    assert_eq!(guest.status(), status::ACKNOWLEDGE | status::DRIVER | status::FAILED, "bits are only added");
    guest.set_status(0);
    assert_eq!(guest.status(), 0);
}

fn queue_sizes(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    assert!(guest.negotiate(features::TRANSPORT));
    for index in 0..guest.queue_count() {
        guest.write(0x16, 2, index.into());
        let max = guest.read(0x18, 2);
        assert!(max.is_power_of_two() && max <= 1024);
        for bad in [0, 3, max * 2, max + 1, 0x8000] {
            guest.write(0x18, 2, bad);
            assert_eq!(guest.read(0x18, 2), max, "size {bad} is refused");
        }
        assert_eq!(guest.device.core().last_fault(), Some(GuestFault::QueueSize));
        guest.write(0x18, 2, 1);
        assert_eq!(guest.read(0x18, 2), 1);
        guest.write(0x18, 2, max);
        assert_eq!(guest.read(0x18, 2), max);
        assert_eq!(guest.read(0x1e, 2), u32::from(index), "each queue has its own notify address");
        guest.write(0x1c, 2, 1);
        guest.write(0x18, 2, 1);
        guest.write(0x20, 4, 0x4000);
        assert_eq!((guest.read(0x18, 2), guest.read(0x20, 4)), (max, 0), "an enabled queue stays as it is");
        guest.write(0x1c, 2, 0);
        assert_eq!(guest.read(0x1c, 2), 1, "a queue can't be disabled but by reset");
    }
    let past = u32::from(guest.queue_count());
    guest.write(0x16, 2, past);
    assert_eq!((guest.read(0x18, 2), guest.read(0x1a, 2)), (0, NO_VECTOR), "a queue that is not there");
    guest.write(0x18, 2, 1);
    guest.write(0x1c, 2, 1);
    assert_eq!(guest.read(0x1c, 2), 0);
}

fn vectors(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    let last = guest.vectors.len() as u32 - 1;
    for at in [0x10, 0x1a] {
        assert_eq!(guest.read(at, 2), NO_VECTOR);
        guest.write(at, 2, last);
        assert_eq!(guest.read(at, 2), last);
        guest.write(at, 2, last + 1);
        assert_eq!(guest.read(at, 2), NO_VECTOR, "a vector that is not there");
    }
    guest.enable_msix();
    assert!(guest.vectors.iter().all(|v| v.routes().len() == 1), "one route a vector");
}

fn rings_outside_memory(subject: &Subject<'_>) {
    let ram = ram();
    for (at, bad) in [(0x20, 0x10_0000u32), (0x20, 0x2008), (0x28, 0x2001), (0x30, 0x2002), (0x30, 0xf_fff0), (0x34, 1)]
    {
        let mut guest = guest(subject, &ram);
        let queues = queues(&mut guest, &ram);
        assert!(guest.negotiate(features::TRANSPORT));
        guest.enable_msix();
        guest.write(0x10, 2, guest.vectors.len() as u32 - 1);
        guest.write(0x16, 2, subject.busy_queue.into());
        guest.write(at, 4, bad);
        guest.write(0x16, 2, 0);
        for (queue, index) in queues.iter().zip(0u16..) {
            if index == subject.busy_queue {
                let config = queue.config();
                guest.write(0x16, 2, index.into());
                for (reg, ring) in [(0x20u64, config.desc), (0x28, config.avail), (0x30, config.used)] {
                    guest.write(reg, 4, ring.0 as u32);
                }
                guest.write(at, 4, bad);
                guest.write(0x1c, 2, 1);
            } else {
                guest.set_queue(index, queue);
            }
        }
        guest.set_status(READY);
        assert_eq!(guest.status(), READY | status::NEEDS_RESET, "register {at:#x} = {bad:#x}");
        assert_eq!(guest.config_interrupts(), 1);
        assert_eq!(guest.device.core().last_fault(), Some(GuestFault::RingAddress));
        guest.kick(subject.busy_queue);
        guest.set_status(0);
        assert_eq!(guest.status(), 0);
    }
}

fn faults_need_a_reset(subject: &Subject<'_>) {
    let ram = ram();
    let busy = subject.busy_queue;
    let mut guest = guest(subject, &ram);
    for round in 0..3 {
        let mut queues = queues(&mut guest, &ram);
        start(&mut guest, &queues);
        if let Some(queue) = queues.get_mut(usize::from(busy)) {
            queue.set_desc(0, u64::MAX - 8, 64, WRITE, 0);
            queue.publish(0);
            guest.kick(busy);
            eventually("a reset request", || guest.status() == READY | status::NEEDS_RESET);
            eventually("its interrupt", || guest.config_interrupts() == round + 1);
            assert_eq!(queue.used(), None, "a broken queue gives nothing back");
            // The device is dead to the guest, but not to us.
            queue.send(&[Buf::write(0x8000, 64)]);
            guest.kick(busy);
            guest.kick(busy);
        }
        guest.set_status(0);
        assert_eq!(guest.status(), 0, "reset brings it back");
    }
    assert_eq!(guest.config_interrupts(), 3, "one interrupt for each breakdown");
}

fn reset_forgets(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    let mut sizes = Vec::new();
    for index in 0..guest.queue_count() {
        guest.write(0x16, 2, index.into());
        sizes.push(guest.read(0x18, 2));
    }
    for by_bus in [false, true, false] {
        let queues = queues(&mut guest, &ram);
        start(&mut guest, &queues);
        if by_bus {
            guest.device.reset();
            assert_eq!(guest.config(4, 2) & 7, 0, "decoding is off");
            assert!(guest.device.placements().iter().all(|p| p.address == 0 && !p.enabled));
        } else {
            guest.set_status(0);
            guest.set_status(0);
        }
        assert_eq!((guest.status(), guest.read(0x10, 2)), (0, NO_VECTOR));
        assert_eq!(guest.device.core().accepted(), 0);
        for (index, size) in sizes.iter().enumerate() {
            guest.write(0x16, 2, index as u32);
            assert_eq!(guest.read(0x18, 2), *size);
            assert_eq!((guest.read(0x1a, 2), guest.read(0x1c, 2)), (NO_VECTOR, 0));
            assert!([0x20, 0x24, 0x28, 0x2c, 0x30, 0x34].iter().all(|at| guest.read(*at, 4) == 0));
        }
    }
}

fn window(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    let at = guest.window;
    let mut access = |offset: u32, len: u32, write: Option<u32>| {
        guest.device.config_write(at + 4, &[0]);
        guest.device.config_write(at + 8, &offset.to_le_bytes());
        guest.device.config_write(at + 12, &len.to_le_bytes());
        if let Some(value) = write {
            guest.device.config_write(at + 16, &value.to_le_bytes());
        }
        let mut bytes = [0; 4];
        guest.device.config_read(at + 16, &mut bytes);
        u32::from_le_bytes(bytes)
    };
    let acknowledge = u32::from(status::ACKNOWLEDGE);
    assert_eq!(access(0x14, 1, Some(acknowledge)), acknowledge);
    assert_eq!(access(0x14, 1, Some(0)), 0);
    assert_eq!(access(0, 4, Some(1)), 1);
    assert_eq!(access(4, 4, None) & 1, 1, "VERSION_1 is the first of the high features");
    for (offset, len) in [(0x15, 2), (0, 3), (0, 8), (0, 0), (0xffff_fffc, 4)] {
        assert_eq!(access(offset, len, Some(0xffff_ffff)), 0, "offset {offset:#x} length {len}");
    }
}

fn anything_may_be_read_and_written(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    let queues = queues(&mut guest, &ram);
    start(&mut guest, &queues);
    let generation = guest.read(0x15, 1);
    let mut bytes = [0xa5; 8];
    for offset in (0..0x4100).chain([u64::MAX - 7, 1 << 32]) {
        for len in [0, 1, 2, 3, 4, 8] {
            guest.device.bar_read(0, offset, &mut bytes[..len]);
            guest.device.bar_read(3, offset, &mut bytes[..len]);
        }
    }
    assert_eq!(guest.read(0x15, 1), generation, "nothing changed, no new generation");
    assert_eq!(guest.status(), READY);
    for fill in [0u8, 1, 0xff] {
        for offset in (0..0x4100).chain([u64::MAX - 7, 1 << 32]) {
            for len in [0, 1, 2, 3, 4, 8] {
                guest.device.bar_write(0, offset, &[fill; 8][..len]);
                guest.device.bar_write(3, offset, &[fill; 8][..len]);
            }
        }
    }
    guest.set_status(0);
    assert_eq!(guest.status(), 0);
}
