// SPDX-License-Identifier: Apache-2.0
//! What a guest does wrong to a running queue: buffers that are not in memory, chains and tables that make no sense,
//! indices out of this world. Each needs a reset, which brings the device back; the guest hears of it once.

use base::Gpa;
use mem::GuestRam;
use virtio::device::status;
use virtio::{GuestFault, features};

use super::{RAM, READY, Subject, eventually, guest, queues, ram, start, works};
use crate::driver::{Buf, GuestQueue, INDIRECT, NEXT, WRITE};
use crate::guest::Face;

/// One misdeed: its name, what it does to the queue and memory, and the fault it is.
type Misdeed = (&'static str, GuestFault, fn(&mut GuestQueue, &GuestRam));

/// Where indirect tables are written.
const TABLE: u64 = 0xc000;

fn one(queue: &mut GuestQueue, at: u64, len: u32, flags: u16, next: u16) {
    queue.set_desc(0, at, len, flags, next);
    queue.publish(0);
}

const MISDEEDS: &[Misdeed] = &[
    ("unmapped", GuestFault::BufferAddress, |q, _| one(q, RAM, 64, WRITE, 0)),
    ("past the end", GuestFault::BufferAddress, |q, _| one(q, RAM - 32, 64, WRITE, 0)),
    ("far away", GuestFault::BufferAddress, |q, _| one(q, 1 << 40, 64, 0, 0)),
    ("wrapped", GuestFault::BufferAddress, |q, _| one(q, u64::MAX - 8, 64, WRITE, 0)),
    ("longest", GuestFault::BufferAddress, |q, _| one(q, 0x8000, u32::MAX, WRITE, 0)),
    ("empty", GuestFault::ZeroLength, |q, _| one(q, 0x8000, 0, WRITE, 0)),
    ("loop of one", GuestFault::ChainTooLong, |q, _| one(q, 0x8000, 16, NEXT, 0)),
    ("loop of two", GuestFault::ChainTooLong, |q, _| {
        q.set_desc(1, 0x8000, 16, NEXT, 0);
        one(q, 0x8000, 16, NEXT, 1);
    }),
    ("next past the table", GuestFault::NextRange, |q, _| one(q, 0x8000, 16, NEXT, 16)),
    ("next far past it", GuestFault::NextRange, |q, _| one(q, 0x8000, 16, NEXT, u16::MAX)),
    ("read after write", GuestFault::ReadableAfterWritable, |q, _| {
        q.set_desc(1, 0x8000, 16, 0, 0);
        one(q, 0x8000, 16, WRITE | NEXT, 1);
    }),
    ("head past the table", GuestFault::HeadRange, |q, _| q.publish(16)),
    ("head far past it", GuestFault::HeadRange, |q, _| q.publish(u16::MAX)),
    ("index ahead", GuestFault::AvailJump, |q, _| q.set_avail_idx(17)),
    ("index behind", GuestFault::AvailJump, |q, _| q.set_avail_idx(u16::MAX)),
    ("index absurd", GuestFault::AvailJump, |q, _| q.set_avail_idx(0x8000)),
    ("table unmapped", GuestFault::IndirectTable, |q, _| one(q, RAM, 32, INDIRECT, 0)),
    ("table past the end", GuestFault::IndirectTable, |q, _| one(q, RAM - 16, 32, INDIRECT, 0)),
    ("table wrapped", GuestFault::IndirectTable, |q, _| one(q, u64::MAX - 15, 32, INDIRECT, 0)),
    ("table empty", GuestFault::IndirectTable, |q, _| one(q, TABLE, 0, INDIRECT, 0)),
    ("table ragged", GuestFault::IndirectTable, |q, _| one(q, TABLE, 24, INDIRECT, 0)),
    ("table and next", GuestFault::IndirectWithNext, |q, _| one(q, TABLE, 16, INDIRECT | NEXT, 1)),
    ("table in a table", GuestFault::IndirectNested, |q, _| {
        q.set_desc_at(Gpa(TABLE), TABLE, 16, INDIRECT, 0);
        one(q, TABLE, 16, INDIRECT, 0);
    }),
    ("loop in a table", GuestFault::ChainTooLong, |q, _| {
        q.set_desc_at(Gpa(TABLE), 0x8000, 16, NEXT, 0);
        one(q, TABLE, 16, INDIRECT, 0);
    }),
    ("next past a table", GuestFault::NextRange, |q, _| {
        q.set_desc_at(Gpa(TABLE), 0x8000, 16, NEXT, 1);
        one(q, TABLE, 16, INDIRECT, 0);
    }),
    ("buffer of a table", GuestFault::BufferAddress, |q, _| {
        q.set_desc_at(Gpa(TABLE), RAM - 1, 2, WRITE, 0);
        one(q, TABLE, 16, INDIRECT, 0);
    }),
    ("4 GiB in all", GuestFault::BufferAddress, |q, _| {
        q.set_desc(1, 0x8000, 0x8000_0000, WRITE, 0);
        one(q, 0x8000, 0x8000_0000, WRITE | NEXT, 1);
    }),
];

pub fn check<F: Face>(subject: &Subject<'_>) {
    each_needs_a_reset::<F>(subject);
    a_device_breaks_down_once::<F>(subject);
    tables_have_to_be_agreed::<F>(subject);
}

fn each_needs_a_reset<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let busy = usize::from(subject.busy_queue);
    let mut guest = guest::<F>(subject, &ram);
    for (round, (name, fault, misdeed)) in (1..).zip(MISDEEDS) {
        let mut broken = queues(&mut guest, &ram);
        start(&mut guest, &broken);
        misdeed(&mut broken[busy], &ram);
        guest.kick(subject.busy_queue);
        eventually(name, || guest.status() == READY | status::NEEDS_RESET);
        eventually("its interrupt", || guest.face.signalled(None) == round);
        let trouble = guest.face.core().shared_status().take_trouble();
        assert_eq!(trouble.as_deref(), Some(fault.as_str()), "{name}");
        assert_eq!(broken[busy].used(), None, "{name}: a broken queue gives nothing back");
        guest.set_status(0);
        assert_eq!(guest.status(), 0, "{name}: a reset brings it back");
        // And back means that it works.
        let mut sound = queues(&mut guest, &ram);
        start(&mut guest, &sound);
        works(subject, &mut guest, &ram, &mut sound[busy]);
        guest.set_status(0);
    }
    assert_eq!(guest.face.signalled(None), MISDEEDS.len(), "one interrupt for each breakdown");
}

/// Whatever the guest does next, the device stays as it broke, and answers nothing, until a reset.
fn a_device_breaks_down_once<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let busy = usize::from(subject.busy_queue);
    let mut guest = guest::<F>(subject, &ram);
    let mut queues = queues(&mut guest, &ram);
    start(&mut guest, &queues);
    let queue = &mut queues[busy];
    one(queue, u64::MAX - 8, 64, WRITE, 0);
    guest.kick(subject.busy_queue);
    eventually("a reset request", || guest.status() == READY | status::NEEDS_RESET);
    eventually("its interrupt", || guest.face.signalled(None) == 1);
    queue.send(&[Buf::write(0x8000, 64)]);
    for _ in 0..3 {
        guest.kick(subject.busy_queue);
        guest.set_status(READY);
        guest.set_status(READY | status::NEEDS_RESET);
    }
    assert_eq!(guest.status(), READY | status::NEEDS_RESET);
    assert_eq!(queue.used(), None);
    guest.set_status(0);
    assert_eq!((guest.status(), guest.face.signalled(None)), (0, 1));
}

fn tables_have_to_be_agreed<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    let mut queues = queues(&mut guest, &ram);
    let refs: Vec<&GuestQueue> = queues.iter().collect();
    guest.start(features::VERSION_1, &refs);
    let queue = &mut queues[usize::from(subject.busy_queue)];
    queue.set_desc_at(Gpa(TABLE), 0x8000, 64, WRITE, 0);
    one(queue, TABLE, 16, INDIRECT, 0);
    guest.kick(subject.busy_queue);
    eventually("a reset request", || guest.status() == READY | status::NEEDS_RESET);
    let trouble = guest.face.core().shared_status().take_trouble();
    assert_eq!(trouble.as_deref(), Some(GuestFault::IndirectRefused.as_str()));
}
