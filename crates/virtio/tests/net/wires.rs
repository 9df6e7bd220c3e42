// SPDX-License-Identifier: Apache-2.0
//! A host's end that is slow, stalls, lies or goes, and a driver that goes in the middle of a packet.

use std::io::{Read, Write};
use std::time::Duration;

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use testkit::conformance::eventually;
use testkit::{Guest, GuestQueue};
use virtio::device::VirtioDevice;
use virtio::features;
use virtio::net::{Net, feature};

use crate::rig::*;

/// Publishes packets until the socket is full and the ring as well; gives their frames.
fn flood(rig: &mut Rig) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut rng = Rng::new(5);
    for round in 0..256 {
        let frame = rng.bytes(60 + round * 40);
        rig.send(&frame, &[12]);
        frames.push(frame);
        if rig.queues[TX].free() < 2 {
            break;
        }
    }
    rig.kick(TX);
    frames
}

#[test]
fn a_full_socket_holds_packets_back_and_loses_none() {
    let (mut rig, mut peer) = Rig::user();
    let frames = flood(&mut rig);
    let mut back = 0;
    rig.until("some packets' end", |rig| {
        back += rig.sent().len();
        back > 0
    });
    // Nothing moves any more once the socket is full, and the worker sleeps.
    let mut before = (0, u64::MAX);
    rig.until("the worker's sleep", |rig| {
        back += rig.sent().len();
        let now = (back, rig.wakes());
        std::thread::sleep(Duration::from_millis(20));
        std::mem::replace(&mut before, now) == now
    });
    assert!(back < frames.len(), "the socket took {} of {} packets", back, frames.len());
    assert!(rig.wakes() < 50, "a full socket is no reason to wake up: {}", rig.wakes());
    for (number, frame) in frames.iter().enumerate() {
        assert!(peer.receive() == *frame, "packet {number}");
    }
    rig.until("all packets' end", |rig| {
        back += rig.sent().len();
        back == frames.len()
    });
    rig.device.reset();
    let counts = rig.device.stats().read();
    assert_eq!((counts.sent, counts.sent_dropped), (frames.len() as u64, 0));
    assert!(rig.link_is_up() && rig.news.take().is_empty());
}

#[test]
fn a_guest_without_buffers_gets_its_packets_later_and_the_worker_sleeps() {
    let (mut rig, mut peer) = Rig::user();
    for number in 0..50u8 {
        peer.send(&[number; 100]);
    }
    let mut before = u64::MAX;
    rig.until("the worker's sleep", |rig| {
        std::thread::sleep(Duration::from_millis(20));
        let now = rig.wakes();
        std::mem::replace(&mut before, now) == now
    });
    assert!(rig.wakes() < 60, "{}", rig.wakes());
    for number in 0..50u8 {
        rig.post(&[64]);
        rig.post(&[64]);
        rig.kick(RX);
        assert_eq!(rig.receive().frame, [number; 100]);
    }
}

/// The guest's link is down, it was told, the user was told `words`, and packets go nowhere without being held.
fn is_down(rig: &mut Rig, words: &str) {
    rig.until("a link that is down", |rig| !rig.link_is_up());
    let news = rig.news.take();
    assert_eq!(news.len(), 1, "{news:?}");
    assert!(news[0].starts_with("net0: ") && news[0].contains(words) && news[0].contains("link is down"), "{news:?}");
    assert!(!rig.link_is_up());
    let mut back = rig.sent().len();
    let already = back;
    for _ in 0..10 {
        rig.send(&[1; 60], &[]);
    }
    rig.kick(TX);
    rig.until("the packets' end", |rig| {
        back += rig.sent().len();
        back >= already + 10
    });
    assert!(!rig.is_broken());
    assert_eq!(rig.command(&[0, 0, 1]), 0, "the device goes on");
    rig.restart();
    assert!(!rig.link_is_up(), "and so it is for the next driver");
    rig.send(&[1; 60], &[]);
    rig.kick(TX);
    rig.until("a packet's end", |rig| rig.sent().len() == 1);
}

#[test]
fn an_end_that_goes_is_a_link_that_is_down() {
    let (mut rig, peer) = Rig::user();
    drop(peer);
    is_down(&mut rig, "ended");
}

#[test]
fn the_driver_is_told_that_the_link_changed() {
    let (peer, there) = UnixStream::pair().unwrap();
    let spec = spec::Net { fd: spec::Descriptors(vec![there.as_raw_fd() as u32]), ..spec::Net::default() };
    let ram = testkit::ram(1 << 20);
    let device = Net::open(&spec, 0).unwrap();
    drop(there);
    let mut guest = Guest::new(Box::new(device), &ram);
    let queues: Vec<_> = (0..3).map(|i| GuestQueue::new(&ram, 0x1000 * (i + 1), 16)).collect();
    guest.start(features::TRANSPORT | feature::STATUS, &queues.iter().collect::<Vec<_>>());
    let generation = guest.read(0x15, 1);
    let mut status = [0; 2];
    guest.device_config(6, &mut status);
    assert_eq!((status, guest.config_interrupts()), ([1, 0], 0));
    drop(peer);
    eventually("a configuration interrupt", || guest.config_interrupts() == 1);
    assert_ne!(guest.read(0x15, 1), generation);
    guest.device_config(6, &mut status);
    assert_eq!(status, [0, 0]);
}

#[test]
fn an_end_that_goes_in_the_middle_of_packets_is_too() {
    let (mut rig, mut peer) = Rig::user();
    rig.post(&[4096]);
    rig.kick(RX);
    peer.0.write_all(&[0, 0, 1, 0, 7, 7, 7]).unwrap();
    flood(&mut rig);
    drop(peer);
    rig.until("a link that is down", |rig| !rig.link_is_up());
    let mut back = 0;
    rig.until("all packets' end", |rig| {
        back += rig.sent().len();
        rig.queues[TX].free() == 256
    });
    assert!(rig.received().is_empty());
}

#[test]
fn an_end_that_lies_is_a_link_that_is_down() {
    for len in [0u32, 13, 65536, u32::MAX] {
        let (mut rig, mut peer) = Rig::user();
        rig.post(&[4096]);
        rig.kick(RX);
        peer.0.write_all(&len.to_be_bytes()).unwrap();
        is_down(&mut rig, &format!("frame of {len} bytes"));
        assert!(rig.received().is_empty());
    }
}

#[test]
fn an_end_that_stalls_takes_the_link_down_until_it_moves() {
    let (mut rig, mut peer) = Rig::with(AGREED, Some(Duration::from_millis(30)));
    let frames = flood(&mut rig);
    rig.until("a link that is down", |rig| !rig.link_is_up());
    for frame in &frames {
        assert!(peer.receive() == *frame, "nothing was lost");
    }
    rig.until("a link that is up", |rig| rig.link_is_up());
    let news = rig.news.take();
    assert!(news.len() == 2 && news[0].contains("has not moved") && news[1].contains("link is up"), "{news:?}");
}

#[test]
fn an_end_that_stalls_within_a_frame_does_too() {
    let (mut rig, mut peer) = Rig::with(AGREED, Some(Duration::from_millis(30)));
    rig.post(&[4096]);
    rig.kick(RX);
    let frame = Peer::frame(&[5; 300]);
    peer.0.write_all(&frame[..100]).unwrap();
    rig.until("a link that is down", |rig| !rig.link_is_up());
    peer.0.write_all(&frame[100..]).unwrap();
    rig.until("a link that is up", |rig| rig.link_is_up());
    assert_eq!(rig.receive().frame, [5; 300]);
}

#[test]
fn a_guest_that_does_not_receive_is_no_stall_of_the_other_end() {
    let (mut rig, mut peer) = Rig::with(AGREED, Some(Duration::from_millis(10)));
    peer.send(&[1; 60]);
    std::thread::sleep(Duration::from_millis(100));
    assert!(rig.link_is_up());
    rig.post(&[100]);
    rig.kick(RX);
    assert_eq!(rig.receive().frame, [1; 60]);
    assert!(rig.news.take().is_empty());
}

/// A driver that goes in the middle of packets leaves the stream whole for the next one.
#[test]
fn a_reset_in_the_middle_of_packets_keeps_the_stream_in_step() {
    let mut rng = Rng::new(6);
    for _ in 0..20 {
        let (mut rig, mut peer) = Rig::user();
        let frames = flood(&mut rig);
        rig.post(&[4096]);
        rig.kick(RX);
        let cut = Peer::frame(&[7; 1000]);
        let at = 1 + rng.below(cut.len() as u64 - 1) as usize;
        peer.0.write_all(&cut[..at]).unwrap();
        rig.until("some packets' end", |rig| !rig.sent().is_empty());
        rig.restart();
        // What was in guest memory may be anything by now.
        rig.ram.write_bytes(base::Gpa(1 << 20), &vec![0xdd; 16 << 20]).unwrap();
        rig.post(&[4096]);
        rig.kick(RX);
        peer.0.write_all(&cut[at..]).unwrap();
        peer.send(&[8; 99]);
        let got = rig.receive();
        let got = if got.frame == [7; 1000] {
            // It had not been begun.
            rig.post(&[4096]);
            rig.kick(RX);
            rig.receive()
        } else {
            got
        };
        assert_eq!(got.frame, [8; 99]);
        rig.send(&[9; 77], &[]);
        rig.kick(TX);
        let mut arrived = 0;
        loop {
            let frame = peer.receive();
            if frame == [9; 77] {
                break;
            }
            assert!(frame == frames[arrived], "packet {arrived} is whole");
            arrived += 1;
        }
        assert!(arrived < frames.len());
        peer.0.set_nonblocking(true).unwrap();
        assert!(peer.0.read(&mut [0; 1]).is_err(), "and nothing else is there");
    }
}
