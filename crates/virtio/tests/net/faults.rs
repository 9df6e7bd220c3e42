// SPDX-License-Identifier: Apache-2.0
//! What a guest does wrong stops the device until a reset, and nothing else; every device check; random bytes as rings.

use std::cell::RefCell;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use testkit::Buf;
use testkit::conformance::{Subject, check};
use testkit::driver::{INDIRECT, NEXT, WRITE};
use virtio::device::VirtioDevice;
use virtio::net::Net;
use virtio::{GuestFault, features};

use crate::rig::*;

#[test]
fn network_conforms() {
    let peers = RefCell::new(Vec::new());
    let make = || {
        let (here, there) = UnixStream::pair().unwrap();
        peers.borrow_mut().push(here);
        let spec = spec::Net {
            fd: spec::Descriptors(vec![there.as_raw_fd() as u32]),
            mtu: Some(1400),
            ..spec::Net::default()
        };
        Box::new(Net::open(&spec, 0).unwrap()) as Box<dyn VirtioDevice>
    };
    check(&Subject { make: &make, kind: 1, busy_queue: 1 });
}

/// Does something to a queue of a fresh rig.
type Misdeed = fn(&mut Rig, usize);

const MISDEEDS: [(&str, GuestFault, Misdeed); 10] = [
    ("jump", GuestFault::AvailJump, |rig, q| rig.queues[q].set_avail_idx(300)),
    ("head", GuestFault::HeadRange, |rig, q| rig.queues[q].publish(999)),
    ("next", GuestFault::NextRange, |rig, q| {
        rig.queues[q].set_desc(0, 0x8000, 64, NEXT | write(q), 5000);
        rig.queues[q].publish(0);
    }),
    ("loop", GuestFault::ChainTooLong, |rig, q| {
        rig.queues[q].set_desc(0, 0x8000, 64, NEXT | write(q), 0);
        rig.queues[q].publish(0);
    }),
    ("address", GuestFault::BufferAddress, |rig, q| {
        rig.queues[q].set_desc(0, u64::MAX - 8, 64, write(q), 0);
        rig.queues[q].publish(0);
    }),
    ("nothing", GuestFault::ZeroLength, |rig, q| {
        rig.queues[q].set_desc(0, 0x8000, 0, write(q), 0);
        rig.queues[q].publish(0);
    }),
    ("order", GuestFault::ReadableAfterWritable, |rig, q| {
        rig.queues[q].set_desc(0, 0x8000, 64, NEXT | WRITE, 1);
        rig.queues[q].set_desc(1, 0x8000, 64, 0, 0);
        rig.queues[q].publish(0);
    }),
    ("nested", GuestFault::IndirectNested, |rig, q| {
        rig.queues[q].set_desc(0, 0x9000, 16, INDIRECT, 0);
        rig.queues[q].set_desc_at(base::Gpa(0x9000), 0x9000, 16, INDIRECT, 0);
        rig.queues[q].publish(0);
    }),
    ("indirect and next", GuestFault::IndirectWithNext, |rig, q| {
        rig.queues[q].set_desc(0, 0x9000, 16, INDIRECT | NEXT, 1);
        rig.queues[q].publish(0);
    }),
    ("ragged table", GuestFault::IndirectTable, |rig, q| {
        rig.queues[q].set_desc(0, 0x9000, 17, INDIRECT, 0);
        rig.queues[q].publish(0);
    }),
];

const fn write(queue: usize) -> u16 {
    if queue == RX { WRITE } else { 0 }
}

fn breaks(rig: &mut Rig, fault: GuestFault) {
    rig.until("a request for a reset", |rig| rig.is_broken());
    assert_eq!(rig.status.take_trouble().as_deref(), Some(fault.as_str()));
    rig.device.reset();
    assert_eq!(rig.device.stats().read().faults, 1);
}

#[test]
fn a_broken_queue_needs_a_reset_and_gets_over_it() {
    for queue in [RX, TX, CTRL] {
        for (name, fault, misdeed) in MISDEEDS {
            let (mut rig, mut peer) = Rig::user();
            misdeed(&mut rig, queue);
            rig.kick(queue);
            // The receive queue is looked at when there is something to receive.
            peer.send(&[1; 60]);
            breaks(&mut rig, fault);
            let (mut again, mut peer) = Rig::user();
            again.send(&[1; 60], &[]);
            again.kick(TX);
            assert_eq!(peer.receive(), [1; 60], "{name}");
        }
    }
}

#[test]
fn indirect_tables_without_the_feature_are_refused() {
    let (mut rig, _peer) = Rig::with(AGREED & !features::INDIRECT_DESC, None);
    rig.queues[TX].set_desc(0, 0x9000, 16, INDIRECT, 0);
    rig.queues[TX].publish(0);
    rig.kick(TX);
    breaks(&mut rig, GuestFault::IndirectRefused);
}

#[test]
fn a_packet_or_command_without_a_header_is_a_fault() {
    for (queue, bufs) in [
        (TX, vec![Buf::read(0x8000, 11)]),
        (TX, vec![Buf::write(0x8000, 100)]),
        (CTRL, vec![Buf::read(0x8000, 1), Buf::write(0x8000, 1)]),
        (CTRL, vec![Buf::read(0x8000, 3)]),
    ] {
        let (mut rig, _peer) = Rig::user();
        rig.queues[queue].send(&bufs);
        rig.kick(queue);
        breaks(&mut rig, GuestFault::NetLayout);
    }
}

/// Whatever is in the rings and whatever comes from the wire, the device answers, stops or waits, and can be reset.
#[test]
fn random_rings_are_survived() {
    let mut rng = Rng::new(11);
    for _ in 0..150 {
        let (mut rig, mut peer) = Rig::user();
        for _ in 0..40 {
            let queue = rng.below(3) as usize;
            match rng.below(8) {
                0..4 => {
                    let at = if rng.below(20) == 0 { rng.below(u64::MAX) } else { 0x8000 + rng.below(1 << 20) };
                    let (len, flags) =
                        (rng.below(3000) as u32, rng.below(8) as u16 & if rng.below(3) == 0 { 7 } else { 3 });
                    rig.queues[queue].set_desc(rng.below(64) as u16, at, len, flags, rng.below(66) as u16);
                }
                4..6 => rig.queues[queue].publish(rng.below(64) as u16),
                6 => rig.kick(queue),
                _ => {
                    let frame = frame(&mut rng);
                    let _ = std::io::Write::write(&mut peer.0, &Peer::frame(&frame[..frame.len().min(4000)]));
                }
            }
        }
        (0..3).for_each(|queue| rig.kick(queue));
        rig.device.reset();
    }
}
