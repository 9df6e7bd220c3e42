// SPDX-License-Identifier: Apache-2.0
//! The split queue against a driver that plays the guest: each fault, and the rules of notification.
#![allow(clippy::unwrap_used)]

use base::Gpa;
use mem::GuestRam;
use testkit::driver::{INDIRECT, NEXT, WRITE};
use testkit::{Buf, GuestQueue};
use virtio::queue::window;
use virtio::{Answer, Chain, GuestFault, Queue, features};

const SIZE: u16 = 8;

struct Bench {
    ram: GuestRam,
    driver: GuestQueue,
    queue: Queue,
    chain: Chain,
}

fn bench_with(agreed: u64) -> Bench {
    // 64 KiB at 0, a hole, 16 KiB at 128 KiB.
    let ram = GuestRam::anonymous(&[(Gpa(0), 0x1_0000), (Gpa(0x2_0000), 0x4000)]).unwrap();
    let driver = GuestQueue::new(&ram, 0x1000, SIZE);
    let queue = driver.config().activate(&ram, agreed).unwrap();
    Bench { ram, driver, queue, chain: Chain::new() }
}

fn bench() -> Bench {
    bench_with(features::TRANSPORT)
}

impl Bench {
    fn pop(&mut self) -> Result<bool, GuestFault> {
        self.queue.pop(&mut self.chain)
    }

    /// The fault is reported once, is answered by a reset request, and kills the queue.
    fn breaks_with(&mut self, fault: GuestFault) {
        assert_eq!(self.pop(), Err(fault));
        assert_eq!(fault.answer(), Answer::NeedsReset);
        self.driver.set_avail_idx(1000);
        assert_eq!(self.pop(), Ok(false), "dead");
        assert!(!self.queue.enable_kicks());
    }
}

/// Runs `make` on a fresh bench and expects `fault` from the first pop.
fn fault_of(fault: GuestFault, make: impl FnOnce(&mut Bench)) {
    let mut b = bench();
    make(&mut b);
    b.breaks_with(fault);
}

#[test]
fn a_chain_arrives_in_order_and_goes_back() {
    let mut b = bench();
    b.ram.write_bytes(Gpa(0x8000), b"hello ").unwrap();
    b.ram.write_bytes(Gpa(0x9000), b"guest").unwrap();
    let head =
        b.driver.send(&[Buf::read(0x8000, 6), Buf::read(0x9000, 5), Buf::write(0x2_3ff0, 16), Buf::write(0xa000, 1)]);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.head(), b.chain.readable().len(), b.chain.writable().len()), (head, 2, 2));
    assert_eq!((b.chain.readable_len(), b.chain.writable_len()), (11, 17));
    let mut text = [0; 20];
    assert_eq!(b.chain.read_at(0, &mut text), 11);
    assert_eq!(&text[..11], b"hello guest");
    assert_eq!(b.chain.read_at(4, &mut text[..4]), 4);
    assert_eq!(&text[..4], b"o gu");
    assert_eq!(b.chain.read_at(11, &mut text), 0);
    assert_eq!(b.chain.write_at(14, &[1, 2, 3, 4]), 3, "clipped at the end");
    let mut got = [0; 2];
    b.ram.read_bytes(Gpa(0x2_3ffe), &mut got).unwrap();
    assert_eq!(got, [1, 2]);
    assert_eq!(b.ram.read::<u8>(Gpa(0xa000)), Some(3));
    let mut cut = Vec::new();
    assert_eq!(window(b.chain.readable(), 5, 3, &mut cut), 3);
    assert_eq!(cut.iter().map(|s| s.len).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(b.pop(), Ok(false));
    b.queue.push_used(head, 17);
    assert_eq!(b.driver.used(), Some((head, 17)));
    assert_eq!(b.driver.used(), None);
}

#[test]
fn indirect_tables_may_end_a_chain_and_lie_crooked() {
    let mut b = bench();
    for table in [0x5001, 0x5004, 0x5000] {
        let head = b.driver.add_indirect(table, &[Buf::read(0x8000, 16), Buf::write(0x9000, 512)]).unwrap();
        b.driver.publish(head);
        assert_eq!(b.pop(), Ok(true), "table at {table:#x}");
        assert_eq!((b.chain.readable_len(), b.chain.writable_len()), (16, 512));
        b.queue.push_used(head, 0);
        b.driver.used();
    }
    // A direct buffer, then a table (2.7.5.3.2); the WRITE flag of the table's own descriptor means nothing.
    b.driver.set_desc(0, 0x8000, 4, NEXT, 1);
    b.driver.set_desc(1, 0x5000, 32, INDIRECT | WRITE, 0);
    b.driver.publish(0);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!((b.chain.readable_len(), b.chain.writable_len()), (20, 512));
    assert_eq!(b.chain.readable().len(), 2);
}

#[test]
fn a_chain_may_be_as_long_as_the_queue() {
    let mut b = bench();
    let bufs: Vec<Buf> = (0..u64::from(SIZE)).map(|i| Buf::read(0x8000 + i * 16, 16)).collect();
    let head = b.driver.send(&bufs);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!(b.chain.readable().len(), 8);
    b.queue.push_used(head, 0);
    b.driver.used();
    let head = b.driver.add_indirect(0x5000, &bufs).unwrap();
    b.driver.publish(head);
    assert_eq!(b.pop(), Ok(true));
    assert_eq!(b.chain.readable().len(), 8);
}

#[test]
fn avail_jump() {
    fault_of(GuestFault::AvailJump, |b| b.driver.set_avail_idx(SIZE + 1));
    fault_of(GuestFault::AvailJump, |b| b.driver.set_avail_idx(u16::MAX));
    // A jump counts what is in flight: nobody has more chains out than the queue has descriptors.
    let mut b = bench();
    let head = b.driver.send(&[Buf::read(0x8000, 1)]);
    assert_eq!(b.pop(), Ok(true));
    for i in 1..=SIZE {
        b.driver.set_avail_entry(i, head);
    }
    b.driver.set_avail_idx(SIZE + 1);
    b.breaks_with(GuestFault::AvailJump);
}

#[test]
fn head_range() {
    fault_of(GuestFault::HeadRange, |b| b.driver.publish(SIZE));
    fault_of(GuestFault::HeadRange, |b| b.driver.publish(u16::MAX));
}

#[test]
fn head_reused() {
    let mut b = bench();
    let head = b.driver.send(&[Buf::read(0x8000, 1)]);
    b.driver.publish(head);
    assert_eq!(b.pop(), Ok(true));
    b.breaks_with(GuestFault::HeadReused);
}

#[test]
fn next_range() {
    fault_of(GuestFault::NextRange, |b| {
        b.driver.set_desc(0, 0x8000, 4, NEXT, SIZE);
        b.driver.publish(0);
    });
    fault_of(GuestFault::NextRange, |b| {
        b.driver.set_desc_at(Gpa(0x5000), 0x8000, 4, NEXT, 1);
        b.driver.set_desc(0, 0x5000, 16, INDIRECT, 0);
        b.driver.publish(0);
    });
}

#[test]
fn chain_too_long() {
    fault_of(GuestFault::ChainTooLong, |b| {
        b.driver.set_desc(3, 0x8000, 4, NEXT, 3);
        b.driver.publish(3);
    });
    fault_of(GuestFault::ChainTooLong, |b| {
        b.driver.set_desc(0, 0x8000, 4, NEXT, 1);
        b.driver.set_desc(1, 0x8000, 4, NEXT, 0);
        b.driver.publish(0);
    });
    fault_of(GuestFault::ChainTooLong, |b| {
        let bufs = [Buf::read(0x8000, 1); SIZE as usize + 1];
        let head = b.driver.add_indirect(0x5000, &bufs).unwrap();
        b.driver.publish(head);
    });
}

#[test]
fn buffer_address() {
    let bad = [
        (0xffff, 2),
        (0x1_0000, 1),
        (0x1_ffff, 4),
        (0x2_4000, 1),
        (u64::MAX, 1),
        (u64::MAX - 3, 0x8000),
        (0, u32::MAX),
    ];
    for (at, len) in bad {
        for flags in [0, WRITE] {
            fault_of(GuestFault::BufferAddress, |b| {
                b.driver.set_desc(0, at, len, flags, 0);
                b.driver.publish(0);
            });
        }
    }
}

#[test]
fn zero_length() {
    fault_of(GuestFault::ZeroLength, |b| {
        b.driver.send(&[Buf::read(0x8000, 4), Buf::write(0x8000, 0)]);
    });
}

#[test]
fn total_length() {
    // Two buffers of 2 GiB each; the memory is only reserved.
    let ram = GuestRam::anonymous(&[(Gpa(0), 0x8001_0000)]).unwrap();
    let mut driver = GuestQueue::new(&ram, 0x1000, SIZE);
    let mut queue = driver.config().activate(&ram, features::TRANSPORT).unwrap();
    let mut chain = Chain::new();
    driver.send(&[Buf::read(0x1_0000, 0x8000_0000), Buf::write(0x1_0000, 0x7fff_ffff)]);
    driver.send(&[Buf::read(0x1_0000, 0x8000_0000), Buf::write(0x1_0000, 0x8000_0000)]);
    assert_eq!(queue.pop(&mut chain), Ok(true));
    assert_eq!((chain.readable_len(), chain.writable_len()), (0x8000_0000, 0x7fff_ffff));
    assert_eq!(queue.pop(&mut chain), Err(GuestFault::TotalLength));
    assert_eq!(GuestFault::TotalLength.answer(), Answer::NeedsReset);
}

#[test]
fn readable_after_writable() {
    fault_of(GuestFault::ReadableAfterWritable, |b| {
        b.driver.send(&[Buf::read(0x8000, 4), Buf::write(0x8000, 4), Buf::read(0x8000, 4)]);
    });
}

#[test]
fn indirect_refused() {
    let mut b = bench_with(features::VERSION_1);
    let head = b.driver.add_indirect(0x5000, &[Buf::read(0x8000, 1)]).unwrap();
    b.driver.publish(head);
    b.breaks_with(GuestFault::IndirectRefused);
}

#[test]
fn indirect_nested() {
    fault_of(GuestFault::IndirectNested, |b| {
        b.driver.set_desc_at(Gpa(0x5000), 0x5000, 16, INDIRECT, 0);
        b.driver.set_desc(0, 0x5000, 16, INDIRECT, 0);
        b.driver.publish(0);
    });
}

#[test]
fn indirect_with_next() {
    fault_of(GuestFault::IndirectWithNext, |b| {
        b.driver.set_desc_at(Gpa(0x5000), 0x8000, 16, 0, 0);
        b.driver.set_desc(0, 0x5000, 16, INDIRECT | NEXT, 1);
        b.driver.publish(0);
    });
}

#[test]
fn indirect_table() {
    for (at, len) in [(0x5000, 0), (0x5000, 15), (0x5000, 40), (0xfff8, 16), (u64::MAX - 7, 16)] {
        fault_of(GuestFault::IndirectTable, |b| {
            b.driver.set_desc(0, at, len, INDIRECT, 0);
            b.driver.publish(0);
        });
    }
}

#[test]
fn answers_of_faults_outside_the_queue() {
    use GuestFault as F;
    for fault in [F::Features, F::StatusOrder, F::QueueSize, F::LateSetting] {
        assert_eq!(fault.answer(), Answer::Ignore);
    }
    assert_eq!((F::RingAddress.answer(), F::NoRoom.answer()), (Answer::NeedsReset, Answer::GiveBack));
}

#[test]
fn a_head_that_is_not_out_is_not_given_back() {
    let mut b = bench();
    for head in [0, 7, 8, 1023, 1024, u16::MAX] {
        b.queue.push_used(head, 1);
    }
    assert_eq!(b.driver.used(), None);
    let head = b.driver.send(&[Buf::read(0x8000, 1)]);
    b.pop().unwrap();
    b.queue.push_used(head, 0);
    b.queue.push_used(head, 0);
    assert_eq!((b.driver.used_index(), b.queue.in_flight()), (1, 0));
}

#[test]
fn without_event_idx_flags_say_it() {
    let mut b = bench_with(features::VERSION_1);
    let turn = |b: &mut Bench| {
        let head = b.driver.send(&[Buf::read(0x8000, 1)]);
        assert_eq!(b.pop(), Ok(true));
        b.queue.push_used(head, 0);
        b.driver.used();
        b.queue.needs_notification()
    };
    assert!(turn(&mut b));
    assert!(!b.queue.needs_notification(), "nothing new");
    b.driver.suppress_interrupts(true);
    assert!(!turn(&mut b));
    b.driver.suppress_interrupts(false);
    assert!(turn(&mut b));
    b.queue.disable_kicks();
    assert!(b.driver.kicks_suppressed());
    assert!(!b.queue.enable_kicks());
    assert!(!b.driver.kicks_suppressed());
    b.driver.send(&[Buf::read(0x8000, 1)]);
    assert!(b.queue.enable_kicks(), "work came meanwhile");
}

#[test]
fn with_event_idx_indexes_say_it_across_the_wrap() {
    let mut b = bench();
    // The naive rule: tell the driver iff the index it named is among those passed since it was last told.
    let (mut told, mut index) = (0u16, 0u16);
    for round in 0..33_500u32 {
        let batch = round % 3 + 1;
        let event = index.wrapping_add((round % 5) as u16).wrapping_sub(1);
        b.driver.set_used_event(event);
        for _ in 0..batch {
            let head = b.driver.send(&[Buf::read(0x8000, 1)]);
            assert_eq!(b.pop(), Ok(true));
            b.queue.push_used(head, 0);
            assert_eq!(b.driver.used(), Some((head, 0)));
            index = index.wrapping_add(1);
        }
        let expected = (0..index.wrapping_sub(told)).any(|i| told.wrapping_add(i) == event);
        assert_eq!(b.queue.needs_notification(), expected, "round {round}");
        told = index;
        assert!(!b.queue.enable_kicks());
        assert_eq!(b.driver.avail_event(), index);
    }
}

#[test]
fn a_chain_keeps_its_memory() {
    let mut b = bench();
    b.driver.send(&[Buf::read(0x8000, 4)]);
    b.ram.write_bytes(Gpa(0x8000), b"kept").unwrap();
    b.pop().unwrap();
    let Bench { ram, driver, queue, chain } = b;
    drop((ram, driver, queue));
    let mut text = [0; 4];
    chain.read_at(0, &mut text);
    assert_eq!(&text, b"kept");
}
