// SPDX-License-Identifier: Apache-2.0
//! The way to `DRIVER_OK` and back: features, the order of status bits, queue sizes, queues that are not ready, rings that
//! are not in memory, and a reset at every step (virtio 1.2, 2.1 to 2.7 and 3.1).

use virtio::device::status;
use virtio::transport::core::Ring;
use virtio::{GuestFault, features};

use super::{RAM, READY, Subject, eventually, guest, job, queues, ram, start, works};
use crate::guest::{Face, Guest, Register};

pub fn check<F: Face>(subject: &Subject<'_>) {
    identity::<F>(subject);
    features_are_refused::<F>(subject);
    status_has_an_order::<F>(subject);
    queue_sizes::<F>(subject);
    settings_of_an_enabled_queue_stay::<F>(subject);
    nothing_happens_before_driver_ok::<F>(subject);
    queues_that_are_not_ready_stay_still::<F>(subject);
    rings_outside_memory::<F>(subject);
    reset_forgets::<F>(subject);
    reset_at_every_step::<F>(subject);
}

fn identity<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    assert_eq!(guest.face.core().kind(), subject.kind);
    assert!(guest.queue_count() > subject.busy_queue);
    for index in 0..=guest.queue_count() {
        guest.select(index);
        assert_eq!(guest.face.get(Register::QueueMost) != 0, index < guest.queue_count(), "queue {index}");
    }
}

fn features_are_refused<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    let offered = guest.offered();
    assert_eq!(offered & features::TRANSPORT, features::TRANSPORT);
    assert!(!guest.negotiate(offered & !features::VERSION_1), "no legacy drivers");
    assert_eq!(guest.face.core().last_fault(), Some(GuestFault::Features));
    // A refusal is not the end: the driver may take another set, and DRIVER_OK without FEATURES_OK is refused, too.
    guest.set_status(READY);
    assert_eq!(guest.status() & (status::FEATURES_OK | status::DRIVER_OK), 0);
    guest.accept(features::VERSION_1);
    guest.set_status(READY & !status::DRIVER_OK);
    assert_eq!(guest.status(), READY & !status::DRIVER_OK);
    for bit in 0..64 {
        if offered & 1 << bit == 0 {
            assert!(!guest.negotiate(features::VERSION_1 | 1 << bit), "bit {bit} was not offered");
        }
    }
    assert!(guest.negotiate(offered), "all that is offered can be had");
    assert!(guest.negotiate(features::VERSION_1), "and so can the least");
    guest.accept(u64::MAX);
    assert_eq!(guest.face.core().accepted(), features::VERSION_1, "agreed features stay");
    assert_eq!(guest.face.core().last_fault(), Some(GuestFault::LateSetting));
    for word in [2, 3, u32::MAX] {
        guest.face.set(Register::OfferedWord, word);
        assert_eq!(guest.face.get(Register::Offered), 0, "there are 64 features");
    }
    // Features past the 64th exist for nobody.
    guest.set_status(0);
    guest.set_status(status::ACKNOWLEDGE | status::DRIVER);
    guest.accept(features::VERSION_1);
    guest.face.set(Register::AcceptedWord, 2);
    guest.face.set(Register::Accepted, u32::MAX);
    assert_eq!(guest.face.core().accepted(), features::VERSION_1);
}

fn status_has_an_order<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    guest.set_status(status::DRIVER);
    assert_eq!(guest.status(), 0, "first acknowledge");
    guest.set_status(status::ACKNOWLEDGE | status::DRIVER | status::DRIVER_OK);
    assert_eq!(guest.status(), status::ACKNOWLEDGE | status::DRIVER, "no features, no driver");
    assert_eq!(guest.face.core().last_fault(), Some(GuestFault::StatusOrder));
    guest.set_status(status::FAILED);
    assert_eq!(guest.status(), status::ACKNOWLEDGE | status::DRIVER | status::FAILED, "bits are only added");
    guest.set_status(status::NEEDS_RESET);
    assert_eq!(guest.status() & status::NEEDS_RESET, 0, "a bit that is the device's to set");
    guest.set_status(0);
    assert_eq!(guest.status(), 0);
}

/// The size that the transport holds for a queue; one face has no register to read it from.
fn size<F: Face>(guest: &Guest<F>, index: u16) -> Option<u16> {
    guest.face.core().queue(index).map(|queue| queue.size)
}

fn queue_sizes<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    assert!(guest.negotiate(features::TRANSPORT));
    for index in 0..guest.queue_count() {
        guest.select(index);
        let most = guest.face.get(Register::QueueMost) as u16;
        assert!(most.is_power_of_two() && most <= 1024);
        assert_eq!(size(&guest, index), Some(most));
        for bad in [0, 3, most + 1, most * 2, 0x8000, u16::MAX] {
            guest.face.set(Register::QueueSize, bad.into());
            assert_eq!(size(&guest, index), Some(most), "size {bad} is refused");
            assert_eq!(guest.face.core().last_fault(), Some(GuestFault::QueueSize));
        }
        for good in [1, most / 2, most] {
            guest.face.set(Register::QueueSize, good.into());
            assert_eq!(size(&guest, index), Some(good));
        }
    }
    let past = guest.queue_count();
    for index in [past, 0x7fff, u16::MAX] {
        guest.select(index);
        let mut all = [Register::QueueMost, Register::QueueReady].map(|register| guest.face.get(register));
        assert_eq!(all, [0, 0], "a queue that is not there");
        guest.face.set(Register::QueueSize, 1);
        guest.face.set(Register::Ring(Ring::Desc, false), 0x1000);
        guest.face.set(Register::QueueReady, 1);
        guest.kick(index);
        all = [Register::QueueMost, Register::QueueReady].map(|register| guest.face.get(register));
        assert_eq!(all, [0, 0]);
    }
    assert_eq!(guest.status() & status::NEEDS_RESET, 0);
}

fn settings_of_an_enabled_queue_stay<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    let queues = queues(&mut guest, &ram);
    assert!(guest.negotiate(features::TRANSPORT));
    for (queue, index) in queues.iter().zip(0u16..) {
        guest.set_queue(index, queue);
        assert_eq!(guest.face.get(Register::QueueReady), 1);
        let before = guest.face.core().queue(index).copied();
        guest.face.set(Register::QueueSize, 1);
        for ring in [Ring::Desc, Ring::Avail, Ring::Used] {
            guest.face.set(Register::Ring(ring, false), 0x4000);
            guest.face.set(Register::Ring(ring, true), 7);
        }
        assert_eq!(guest.face.core().queue(index).copied(), before, "an enabled queue stays as it is");
        assert_eq!(guest.face.core().last_fault(), Some(GuestFault::LateSetting));
    }
}

/// The device takes nothing before `DRIVER_OK`, kicked or not, and serves what waits as soon as it is kicked after it.
fn nothing_happens_before_driver_ok<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let busy = subject.busy_queue;
    let mut guest = guest::<F>(subject, &ram);
    let mut queues = queues(&mut guest, &ram);
    assert!(guest.negotiate(features::TRANSPORT));
    guest.face.arm();
    for (queue, index) in queues.iter().zip(0u16..) {
        guest.set_queue(index, queue);
    }
    let queue = &mut queues[usize::from(busy)];
    let head = queue.send(&job(subject.kind, &ram));
    for _ in 0..3 {
        guest.kick(busy);
    }
    assert_eq!((queue.used_index(), guest.face.signalled(Some(busy))), (0, 0));
    guest.set_status(READY);
    guest.kick(busy);
    let mut used = None;
    eventually("the answer", || {
        used = queue.used();
        used.is_some()
    });
    assert_eq!(used.map(|(head, _)| head), Some(head));
    eventually("the interrupt", || guest.face.signalled(Some(busy)) != 0);
    assert_eq!(guest.face.signalled(None), 0, "nothing changed");
}

/// A queue that the driver did not enable is not touched, however often it is kicked, and the device lives.
fn queues_that_are_not_ready_stay_still<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let busy = subject.busy_queue;
    let mut guest = guest::<F>(subject, &ram);
    let mut queues = queues(&mut guest, &ram);
    for only_busy in [false, true] {
        assert!(guest.negotiate(features::TRANSPORT));
        guest.face.arm();
        for (queue, index) in queues.iter().zip(0u16..) {
            guest.describe_queue(index, queue);
        }
        if only_busy {
            let queue = crate::GuestQueue::new(&ram, 0x1000 + 0x1000 * u64::from(busy), 16);
            queues[usize::from(busy)] = queue;
            guest.set_queue(busy, &queues[usize::from(busy)]);
        }
        guest.set_status(READY);
        assert_eq!(guest.status(), READY);
        for index in 0..queues.len() as u16 + 2 {
            guest.kick(index);
        }
        if only_busy {
            works(subject, &mut guest, &ram, &mut queues[usize::from(busy)]);
        } else {
            let queue = &mut queues[usize::from(busy)];
            queue.send(&job(subject.kind, &ram));
            guest.kick(busy);
            // It is too late to enable a queue that DRIVER_OK found disabled.
            guest.set_queue(busy, queue);
            guest.kick(busy);
            assert_eq!(guest.face.core().last_fault(), Some(GuestFault::LateSetting));
        }
        guest.set_status(0);
        if !only_busy {
            assert!(queues.iter().all(|queue| queue.used_index() == 0), "a queue that is not enabled");
        }
    }
}

fn rings_outside_memory<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let (low, high) = (|ring| Register::Ring(ring, false), |ring| Register::Ring(ring, true));
    let mut bad = vec![(low(Ring::Desc), RAM as u32), (low(Ring::Desc), 0x2008), (low(Ring::Avail), 0x2001)];
    bad.extend([(low(Ring::Used), 0x2002), (low(Ring::Used), RAM as u32 - 16), (low(Ring::Avail), RAM as u32 - 8)]);
    bad.extend([(low(Ring::Desc), RAM as u32 - 16), (high(Ring::Used), 1), (high(Ring::Desc), u32::MAX)]);
    bad.extend([(low(Ring::Desc), 0xffff_fff0), (low(Ring::Avail), 0xffff_fffe), (high(Ring::Avail), 1 << 31)]);
    for (register, value) in bad {
        let mut guest = guest::<F>(subject, &ram);
        let queues = queues(&mut guest, &ram);
        assert!(guest.negotiate(features::TRANSPORT));
        guest.face.arm();
        for (queue, index) in queues.iter().zip(0u16..) {
            guest.describe_queue(index, queue);
            if index == subject.busy_queue {
                guest.face.set(register, value);
            }
            guest.face.set(Register::QueueReady, 1);
        }
        guest.set_status(READY);
        assert_eq!(guest.status(), READY | status::NEEDS_RESET, "{register:?} = {value:#x}");
        assert_eq!(guest.face.signalled(None), 1);
        assert_eq!(guest.face.core().last_fault(), Some(GuestFault::RingAddress));
        guest.kick(subject.busy_queue);
        guest.set_status(0);
        assert_eq!(guest.status(), 0);
    }
}

fn reset_forgets<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    let sizes: Vec<_> = (0..guest.queue_count()).map(|index| size(&guest, index)).collect();
    for _ in 0..3 {
        let queues = queues(&mut guest, &ram);
        start(&mut guest, &queues);
        guest.set_status(0);
        guest.set_status(0);
        assert_eq!(guest.status(), 0);
        assert_eq!(guest.face.core().accepted(), 0);
        for (index, most) in (0u16..).zip(&sizes) {
            guest.select(index);
            assert_eq!(size(&guest, index), *most);
            assert_eq!(guest.face.get(Register::QueueReady), 0);
            let rings = guest.face.core().queue(index).map(|q| q.desc.0 | q.avail.0 | q.used.0);
            assert_eq!(rings, Some(0));
        }
    }
    let queues = queues(&mut guest, &ram);
    start(&mut guest, &queues);
    guest.face.power_on();
    assert_eq!((guest.face.core().status(), guest.face.core().accepted()), (0, 0));
}

/// A reset at each step of the way, with requests in the ring or not, by the driver or by the bus; the next driver finds a
/// device that works.
fn reset_at_every_step<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let busy = usize::from(subject.busy_queue);
    for step in 0..9 {
        let mut guest = guest::<F>(subject, &ram);
        let mut queues = queues(&mut guest, &ram);
        let steps: [u8; 3] = [status::ACKNOWLEDGE, status::ACKNOWLEDGE | status::DRIVER, READY & !status::DRIVER_OK];
        for (number, bits) in steps.into_iter().enumerate().take(step) {
            if number == 2 {
                guest.accept(features::TRANSPORT);
            }
            guest.set_status(bits);
        }
        if step > 3 {
            guest.face.arm();
            guest.describe_queue(subject.busy_queue, &queues[busy]);
        }
        if step > 4 {
            guest.face.set(Register::QueueReady, 1);
        }
        if step > 5 {
            guest.set_status(READY);
        }
        if step > 6 {
            queues[busy].send(&job(subject.kind, &ram));
        }
        if step > 7 {
            guest.kick(subject.busy_queue);
        }
        guest.set_status(0);
        assert_eq!(guest.status(), 0, "step {step}");
        let seen = queues[busy].used_index();
        guest.kick(subject.busy_queue);
        assert_eq!(queues[busy].used_index(), seen, "a device that was reset touches nothing");
        let mut queues = super::queues(&mut guest, &ram);
        start(&mut guest, &queues);
        works(subject, &mut guest, &ram, &mut queues[busy]);
    }
}
