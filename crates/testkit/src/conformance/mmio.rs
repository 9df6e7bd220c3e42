// SPDX-License-Identifier: Apache-2.0
//! What only the MMIO face has (virtio 1.2, 4.2): its identity, registers of 32 bits and no others, one interrupt line with
//! a status to acknowledge, queues that may be taken back before the driver runs.

use virtio::device::status;
use virtio::{GuestFault, features};

use super::{READY, Subject, eventually, queues, ram, start, works};
use crate::driver::WRITE;
use crate::faces::MmioFace;
use crate::guest::{Face, Guest, Register};

pub fn check(subject: &Subject<'_>) {
    identity(subject);
    registers_are_words(subject);
    numbers_do_not_wrap(subject);
    interrupts_say_why(subject);
    queues_can_be_taken_back(subject);
}

fn guest(subject: &Subject<'_>, ram: &mem::GuestRam) -> Guest<MmioFace> {
    super::guest(subject, ram)
}

fn identity(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    let fixed = [(0x000, 0x7472_6976), (0x004, 2), (0x008, subject.kind.into()), (0x00c, 0x1af4)];
    // No shared memory regions, whichever is asked for; registers that only take are zero.
    let regions = [0x0b0, 0x0b4, 0x0b8, 0x0bc].map(|at| (at, u32::MAX));
    let taking = [0x014, 0x020, 0x024, 0x030, 0x038, 0x050, 0x064, 0x080, 0x0a4, 0x0ac, 0x0c0].map(|at| (at, 0));
    for region in [0, 1, 0xff, u32::MAX] {
        guest.set_register(0x0ac, region);
        for (at, value) in fixed.iter().chain(&regions).chain(&taking) {
            assert_eq!(guest.register(*at), *value, "register {at:#x}");
        }
    }
    for (at, value) in fixed {
        guest.set_register(at, !value);
        assert_eq!(guest.register(at), value);
    }
}

/// A part of a register is no register.
fn registers_are_words(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    assert!(guest.negotiate(features::TRANSPORT));
    let status = guest.status();
    for at in 0..0x100 {
        for len in [0, 1, 2, 3, 5, 8] {
            let mut bytes = [0xa5; 8];
            guest.device.read(at, &mut bytes[..len]);
            assert!(bytes[..len].iter().all(|byte| *byte == 0), "{len} bytes at {at:#x}");
            guest.device.write(at, &[0; 8][..len]);
            guest.device.write(at, &[1; 8][..len]);
        }
        if at % 4 != 0 {
            assert_eq!(guest.register(at), 0, "at {at:#x}");
            guest.set_register(at, 0);
            guest.set_register(at, u32::MAX);
        }
    }
    assert_eq!(guest.status(), status);
    assert_eq!(guest.core().accepted(), features::TRANSPORT);
    guest.select(0);
    assert_eq!(guest.register(0x044), 0);
    let mut past = [0xa5; 4];
    for at in [0x1000, 0x1_0000, u64::MAX - 3] {
        guest.device.read(at, &mut past);
        assert_eq!(past, [0; 4]);
        guest.device.write(at, &past);
    }
}

/// A number that is 32 bits wide is not cut to what the device keeps of it.
fn numbers_do_not_wrap(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest(subject, &ram);
    assert!(guest.negotiate(features::TRANSPORT));
    guest.set_register(0x030, 0x1_0000);
    assert_eq!((guest.register(0x034), guest.register(0x044)), (0, 0), "queue 65536 is not queue 0");
    guest.set_register(0x044, 1);
    guest.select(0);
    assert_eq!(guest.register(0x044), 0);
    let most = guest.register(0x034);
    guest.set_register(0x038, 0x1_0000 | (most / 2));
    assert_eq!(guest.core().queue(0).map(|q| u32::from(q.size)), Some(most), "a size is not cut");
    assert_eq!(guest.core().last_fault(), Some(GuestFault::QueueSize));
    for value in [2, 0x100, u32::MAX] {
        guest.set_register(0x044, value);
        assert_eq!(guest.register(0x044), 0, "ready is 0 or 1");
    }
    guest.set_register(0x070, 0x1_0000);
    assert_eq!(guest.status(), READY & !status::DRIVER_OK, "not every number that ends in zeroes is a reset");
    guest.set_register(0x050, 0x1_0000);
    assert_eq!(guest.status() & status::NEEDS_RESET, 0);
}

fn interrupts_say_why(subject: &Subject<'_>) {
    let ram = ram();
    let busy = subject.busy_queue;
    let mut guest = guest(subject, &ram);
    let mut queues = queues(&mut guest, &ram);
    start(&mut guest, &queues);
    assert_eq!((guest.line.pulses(), guest.register(0x60)), (0, 0));
    let queue = &mut queues[usize::from(busy)];
    works(subject, &mut guest, &ram, queue);
    eventually("the interrupt", || guest.line.pulses() == 1);
    assert_eq!(guest.register(0x60), 1, "used buffers");
    assert_eq!(guest.register(0x60), 1, "reading does not acknowledge");
    // A second reason is a second edge, though the first one stands.
    guest.core().shared_status().config_changed();
    assert_eq!((guest.line.pulses(), guest.register(0x60)), (2, 3));
    guest.set_register(0x64, 1);
    assert_eq!(guest.register(0x60), 2, "what was acknowledged goes, the rest stays");
    guest.set_register(0x64, 0xffff_fffc);
    assert_eq!(guest.register(0x60), 2, "bits that mean nothing acknowledge nothing");
    guest.set_register(0x60, 0);
    assert_eq!(guest.register(0x60), 2);
    guest.set_register(0x64, 2);
    assert_eq!((guest.register(0x60), guest.line.pulses()), (0, 2));
    // A driver that wants to be told again is.
    queue.set_used_event(queue.used_index());
    works(subject, &mut guest, &ram, queue);
    eventually("the next interrupt", || guest.register(0x60) == 1);
    queue.set_desc(0, u64::MAX - 8, 64, WRITE, 0);
    queue.publish(0);
    guest.kick(busy);
    eventually("a breakdown's interrupt", || guest.register(0x60) == 3);
    guest.set_status(0);
    assert_eq!(guest.register(0x60), 0, "a reset takes the reasons along");
}

/// `QueueReady` may go back to 0 until `DRIVER_OK`; then the driver reads that it did not.
fn queues_can_be_taken_back(subject: &Subject<'_>) {
    let ram = ram();
    let busy = subject.busy_queue;
    let mut guest = guest(subject, &ram);
    let mut queues = queues(&mut guest, &ram);
    assert!(guest.negotiate(features::TRANSPORT));
    let elsewhere = crate::GuestQueue::new(&ram, 0x2_0000, 8);
    guest.set_queue(busy, &elsewhere);
    assert_eq!(guest.register(0x044), 1);
    guest.set_register(0x044, 0);
    assert_eq!(guest.register(0x044), 0);
    guest.set_queue(busy, &queues[usize::from(busy)]);
    guest.face.set(Register::Status, READY.into());
    works(subject, &mut guest, &ram, &mut queues[usize::from(busy)]);
    guest.select(busy);
    guest.set_register(0x044, 0);
    assert_eq!(guest.register(0x044), 1);
    assert_eq!(guest.core().last_fault(), Some(GuestFault::LateSetting));
    works(subject, &mut guest, &ram, &mut queues[usize::from(busy)]);
}
