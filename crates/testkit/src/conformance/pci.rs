// SPDX-License-Identifier: Apache-2.0
//! What only the PCI face has (virtio 1.2, 4.1): its identity, a vector for each queue and one for the configuration, masks,
//! the window through configuration space, a reset by the bus.

use pci::{COMMAND, COMMAND_IO, PciDevice};
use virtio::device::status;
use virtio::features;

use super::{READY, Subject, eventually, job, queues, ram, start, works};
use crate::driver::WRITE;
use crate::faces::PciFace;
use crate::guest::{Face, Guest};

const NO_VECTOR: u32 = 0xffff;

pub fn check(subject: &Subject<'_>) {
    identity(subject);
    vectors(subject);
    each_interrupt_has_its_vector(subject);
    masked_interrupts_wait(subject);
    reset_by_the_bus(subject);
    window(subject);
}

fn guest(subject: &Subject<'_>, ram: &mem::GuestRam) -> Guest<PciFace> {
    super::guest(subject, ram)
}

fn identity(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    assert_eq!(guest.config(0, 4), u32::from(0x1040 + subject.kind) << 16 | 0x1af4);
    assert!(guest.config(8, 1) >= 1, "a modern device has revision 1 or more");
    assert_eq!(guest.config(0x3d, 1), 0, "no legacy interrupt");
    assert_eq!(guest.read(0x12, 2), u32::from(guest.core().queue_count()));
    assert!([1, guest.queue_count()].contains(&(guest.vectors.len() as u16 - 1)), "one each, or one for all queues");
    let [common, notify, isr, device] = guest.blocks;
    assert!(common.len >= 0x38 && isr.len >= 1 && device.len >= 4);
    assert!(notify.len >= u64::from(guest.queue_count()) * u64::from(guest.notify_step));
    for index in 0..guest.queue_count() {
        let address = guest.device.notify_address(index).map(|a| a.0);
        assert_eq!(address, Some(0xe000_0000 + notify.at + u64::from(index) * 4));
        guest.select(index);
        assert_eq!(guest.read(0x1e, 2), u32::from(index), "each queue has its own notify address");
        assert_eq!(guest.device.notify_port(index), None, "the BAR of ports is nowhere yet");
    }
    assert_eq!(guest.device.notify_address(guest.device.core().queue_count()), None);
    let Some((bar, step)) = guest.ports else { panic!("no BAR of ports") };
    guest.device.place(bar, 0x1040);
    let port = guest.device.placements().into_iter().find(|p| p.bar == bar);
    assert_eq!(port.map(|p| (p.address, p.io, p.enabled)), Some((0x1040, true, false)));
    assert!(port.is_some_and(|p| p.size >= u64::from(guest.queue_count()) * u64::from(step)));
    for index in 0..guest.queue_count() {
        assert_eq!(guest.device.notify_port(index), Some(0x1040 + index * step as u16));
    }
    assert_eq!(guest.device.notify_port(guest.device.core().queue_count()), None);
    guest.device.config_write(COMMAND, &COMMAND_IO.to_le_bytes());
    assert!(guest.device.placements().iter().all(|p| p.enabled == p.io));
    guest.device.place(bar, 0x1_0000);
    assert_eq!(guest.device.notify_port(0), None, "ports have sixteen bits");
}

fn vectors(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    let last = guest.vectors.len() as u32 - 1;
    for at in [0x10, 0x1a] {
        assert_eq!(guest.read(at, 2), NO_VECTOR);
        guest.write(at, 2, last);
        assert_eq!(guest.read(at, 2), last);
        for absent in [last + 1, 0x7ff, 0xfffe] {
            guest.write(at, 2, absent);
            assert_eq!(guest.read(at, 2), NO_VECTOR, "a vector that is not there");
        }
    }
    let past = guest.queue_count();
    guest.select(past);
    guest.write(0x1a, 2, 0);
    assert_eq!(guest.read(0x1a, 2), NO_VECTOR, "a queue that is not there has none");
    guest.enable_msix();
    assert!(guest.vectors.iter().all(|v| v.routes().len() == 1), "one route a vector");
}

fn each_interrupt_has_its_vector(subject: &Subject<'_>) {
    let ram = ram();
    let busy = subject.busy_queue;
    let mut guest = guest(subject, &ram);
    let mut queues = queues(&mut guest, &ram);
    start(&mut guest, &queues);
    let queue = &mut queues[usize::from(busy)];
    works(subject, &mut guest, &ram, queue);
    eventually("the queue's interrupt", || guest.interrupts(busy) == 1);
    let sent = |guest: &Guest| guest.vectors.iter().map(|v| v.sent()).collect::<Vec<_>>();
    let mut expected = vec![0; guest.vectors.len()];
    expected[usize::from(guest.vector(busy))] = 1;
    assert_eq!(sent(&guest), expected, "and nobody else's");
    queue.set_desc(0, u64::MAX - 8, 64, WRITE, 0);
    queue.publish(0);
    guest.kick(busy);
    eventually("the configuration's interrupt", || guest.config_interrupts() == 1);
    if let Some(last) = expected.last_mut() {
        *last = 1;
    }
    assert_eq!(sent(&guest), expected);
}

/// A message that is masked, by its vector or by the function, is pending until the mask goes, and is sent once.
fn masked_interrupts_wait(subject: &Subject<'_>) {
    let ram = ram();
    let busy = subject.busy_queue;
    for by_function in [false, true] {
        let mut guest = guest(subject, &ram);
        let mut queues = queues(&mut guest, &ram);
        start(&mut guest, &queues);
        let (table, msix) = (guest.table, guest.msix);
        let mask = |guest: &mut Guest, on: bool| {
            if by_function {
                let control = if on { 0xc000u16 } else { 0x8000 };
                guest.device.config_write(msix + 2, &control.to_le_bytes());
            } else {
                let at = table + 16 * u64::from(guest.vector(busy)) + 12;
                guest.device.bar_write(0, at, &u32::from(on).to_le_bytes());
            }
        };
        mask(&mut guest, true);
        let pending = |guest: &mut Guest| {
            let mut bits = [0; 8];
            guest.device.bar_read(0, 0x3000, &mut bits);
            u64::from_le_bytes(bits) >> guest.vector(busy) & 1
        };
        assert_eq!(pending(&mut guest), 0);
        works(subject, &mut guest, &ram, &mut queues[usize::from(busy)]);
        eventually("a pending message", || pending(&mut guest) == 1);
        assert_eq!(guest.interrupts(busy), 0);
        mask(&mut guest, false);
        assert_eq!((guest.interrupts(busy), pending(&mut guest)), (1, 0));
        assert_eq!(guest.vectors[usize::from(guest.vector(busy))].routes().len(), 1, "masking alone changes no route");
        // A reset with a message pending forgets it.
        mask(&mut guest, true);
        let queue = &mut queues[usize::from(busy)];
        queue.set_used_event(queue.used_index());
        queue.send(&job(subject.kind, &ram));
        guest.kick(busy);
        eventually("a pending message", || pending(&mut guest) == 1);
        guest.device.reset();
        mask(&mut guest, false);
        assert_eq!((guest.interrupts(busy), pending(&mut guest)), (1, 0));
    }
}

fn reset_by_the_bus(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    let queues = queues(&mut guest, &ram);
    start(&mut guest, &queues);
    guest.device.reset();
    assert_eq!(guest.config(4, 2) & 7, 0, "decoding is off");
    assert!(guest.device.placements().iter().all(|p| p.address == 0 && !p.enabled));
    assert_eq!((guest.status(), guest.read(0x10, 2)), (0, NO_VECTOR));
    for index in 0..guest.queue_count() {
        guest.select(index);
        assert_eq!((guest.read(0x1a, 2), guest.read(0x1c, 2)), (NO_VECTOR, 0));
    }
    // A driver's reset takes the vectors back, too.
    start(&mut guest, &queues);
    guest.set_status(0);
    assert_eq!((guest.read(0x10, 2), guest.read(0x1a, 2)), (NO_VECTOR, NO_VECTOR));
    // A queue that was enabled stays so until a reset.
    assert!(guest.negotiate(features::TRANSPORT));
    guest.set_queue(0, &queues[0]);
    guest.write(0x1c, 2, 0);
    assert_eq!(guest.read(0x1c, 2), 1);
    guest.set_status(READY);
    assert_eq!(guest.status(), READY);
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
