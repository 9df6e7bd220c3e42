// SPDX-License-Identifier: Apache-2.0
//! What each packet becomes on its way out and in, and what the control queue answers.

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use testkit::Buf;
use virtio::device::VirtioDevice;
use virtio::features;
use virtio::net::{HEADER, feature};
use virtio::throttle::Clock;

use crate::rig::*;

fn header(buffers: u16) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[10..].copy_from_slice(&buffers.to_le_bytes());
    header
}

#[test]
fn a_packet_goes_out_whatever_its_pieces() {
    let (mut rig, mut peer) = Rig::user();
    let frame = Rng::new(1).bytes(200);
    for cuts in [vec![], vec![12], vec![1; 100], vec![11, 1, 1], vec![13], vec![50, 0, 70]] {
        let head = rig.send(&frame, &cuts);
        rig.kick(TX);
        assert_eq!(peer.receive(), frame, "{cuts:?}");
        rig.until("the packet's end", |rig| rig.sent() == [head]);
    }
    let longest = Rng::new(2).bytes(65535);
    rig.send(&longest, &[12, 9000, 9000]);
    rig.kick(TX);
    assert!(peer.receive() == longest);
}

#[test]
fn what_is_no_frame_is_dropped_and_the_next_goes_on() {
    let (mut rig, mut peer) = Rig::user();
    let heads = [rig.send(&[1; 13], &[]), rig.send(&[], &[]), rig.send(&vec![1; 65536], &[]), rig.send(&[2; 60], &[])];
    rig.kick(TX);
    assert_eq!(peer.receive(), [2; 60]);
    let mut back = Vec::new();
    rig.until("all packets' end", |rig| {
        back.extend(rig.sent());
        back.len() == 4
    });
    back.sort_unstable();
    let mut heads = heads.to_vec();
    heads.sort_unstable();
    assert_eq!(back, heads);
    rig.device.reset();
    let counts = rig.device.stats().read();
    assert_eq!((counts.sent, counts.sent_bytes, counts.sent_dropped, counts.faults), (1, 60, 3, 0));
}

#[test]
fn a_packet_comes_in_merged_over_as_many_buffers_as_it_takes() {
    let (mut rig, mut peer) = Rig::user();
    for (pieces, len, buffers) in [
        (vec![vec![1526u32]], 1514usize, 1u16),
        (vec![vec![100]; 3], 250, 3),
        (vec![vec![12]; 20], 100, 10),
        (vec![vec![1; 40]; 3], 50, 2),
        (vec![vec![5, 7, 20], vec![64]], 84, 2),
        (vec![vec![4096]; 17], 65535, 17),
    ] {
        for piece in &pieces {
            rig.post(piece);
        }
        rig.kick(RX);
        let frame = Rng::new(len as u64 + 7).bytes(len);
        peer.send(&frame);
        let got = rig.receive();
        assert_eq!(got.header, header(buffers), "{len} bytes in {pieces:?}");
        assert!(got.frame == frame, "{len} bytes in {pieces:?}");
        rig.restart();
    }
}

#[test]
fn without_merging_a_packet_is_one_buffers_or_dropped() {
    let (mut rig, mut peer) = Rig::with(AGREED & !feature::MRG_RXBUF, None);
    rig.post(&[500]);
    rig.post(&[12, 600]);
    rig.kick(RX);
    peer.send(&[1; 489]);
    peer.send(&[2; 488]);
    assert_eq!(rig.receive(), Got { header: header(1), frame: vec![2; 488] });
    peer.send(&[3; 600]);
    assert_eq!(rig.receive(), Got { header: header(1), frame: vec![3; 600] });
    rig.device.reset();
    assert_eq!(rig.device.stats().read().received_dropped, 1);
}

/// Frames arrive whole and in order, however the stream is cut and whatever buffers there are.
#[test]
fn a_stream_in_odd_pieces_is_the_same_packets() {
    let mut rng = Rng::new(3);
    for _ in 0..6 {
        let (mut rig, peer) = Rig::user();
        let frames: Vec<_> = (0..40).map(|_| frame(&mut rng)).collect();
        let stream: Vec<u8> = frames.iter().flat_map(|f| Peer::frame(f)).collect();
        let mut pieces = Vec::new();
        let mut rest = &stream[..];
        while !rest.is_empty() {
            let most = if rng.below(3) == 0 { 8 } else { 20_000 };
            let (piece, tail) = rest.split_at((1 + rng.below(most) as usize).min(rest.len()));
            pieces.push(piece.to_vec());
            rest = tail;
        }
        let mut writer = peer.0.try_clone().unwrap();
        let writing = std::thread::spawn(move || pieces.iter().for_each(|piece| writer.write_all(piece).unwrap()));
        let mut got = Vec::new();
        rig.until("all frames", |rig| {
            while rig.queues[RX].free() > 8 {
                let pieces: Vec<u32> = (0..=rng.below(3)).map(|_| 12 + rng.below(2000) as u32).collect();
                rig.post(&pieces);
            }
            rig.kick(RX);
            got.extend(rig.received());
            got.len() == frames.len()
        });
        writing.join().unwrap();
        for (got, frame) in got.iter().zip(&frames) {
            assert!(got.frame == *frame && got.header[..10] == [0; 10]);
        }
        assert!(rig.received().is_empty());
    }
}

/// Both directions at once, in random order, against lists of frames.
#[test]
fn random_traffic_both_ways() {
    let (mut rig, mut peer) = Rig::user();
    let mut rng = Rng::new(4);
    let mut far = Peer(peer.0.try_clone().unwrap());
    let (out, mut sent) = ((0..400).map(|_| frame(&mut rng)).collect::<Vec<_>>(), 0);
    let expected = out.clone();
    let reading = std::thread::spawn(move || expected.iter().all(|frame| far.receive() == *frame));
    let incoming: Vec<_> = (0..400).map(|_| frame(&mut rng)).collect();
    let frames = incoming.clone();
    let writing = std::thread::spawn(move || frames.iter().for_each(|frame| peer.send(frame)));
    let (mut back, mut got) = (0, Vec::new());
    rig.until("all traffic", |rig| {
        while sent < out.len() && rig.queues[TX].free() > 8 {
            let cuts: Vec<usize> = (0..rng.below(6)).map(|_| 1 + rng.below(400) as usize).collect();
            rig.send(&out[sent], &cuts);
            sent += 1;
            if rng.below(3) == 0 {
                rig.kick(TX);
            }
        }
        while rig.queues[RX].free() > 4 {
            let len = 12 + rng.below(3000) as u32;
            rig.post(&[len]);
        }
        rig.kick(TX);
        rig.kick(RX);
        back += rig.sent().len();
        got.extend(rig.received());
        back == out.len() && got.len() == incoming.len()
    });
    writing.join().unwrap();
    assert!(reading.join().unwrap(), "what the guest sent arrived in order");
    assert!(got.iter().zip(&incoming).all(|(got, frame)| got.frame == *frame));
    rig.device.reset();
    let counts = rig.device.stats().read();
    assert_eq!((counts.sent, counts.received), (400, 400));
    assert_eq!(counts.sent_bytes, out.iter().map(|f| f.len() as u64).sum::<u64>());
    assert_eq!(counts.received_bytes, incoming.iter().map(|f| f.len() as u64).sum::<u64>());
    assert_eq!((counts.sent_dropped, counts.received_dropped), (0, 0));
}

#[test]
fn interrupts_come_only_where_they_are_wanted() {
    for agreed in [AGREED, AGREED & !features::EVENT_IDX] {
        let (mut rig, mut peer) = Rig::with(agreed, None);
        rig.queues[TX].set_used_event(0x7000);
        rig.queues[TX].suppress_interrupts(true);
        for _ in 0..20 {
            rig.send(&[1; 60], &[]);
            rig.kick(TX);
            peer.receive();
        }
        let mut back = 0;
        rig.until("the packets' end", |rig| {
            back += rig.sent().len();
            back == 20
        });
        assert_eq!(rig.irq.pulses(), 0, "the driver asked for none");
        rig.queues[TX].set_used_event(20);
        rig.queues[TX].suppress_interrupts(false);
        rig.send(&[1; 60], &[]);
        rig.kick(TX);
        rig.until("an interrupt", |rig| rig.irq.pulses() == 1);
        rig.post(&[2000]);
        rig.kick(RX);
        peer.receive();
        peer.send(&[1; 60]);
        rig.until("another", |rig| rig.irq.pulses() == 2);
    }
}

#[test]
fn kicks_are_wanted_only_when_the_device_waits_for_buffers() {
    let (mut rig, mut peer) = Rig::user();
    // It has seen that there are none, and asks for the first.
    peer.send(&[1; 60]);
    rig.until("a look at the empty ring", |rig| rig.queues[RX].avail_event() == 0);
    rig.post(&[4096]);
    rig.kick(RX);
    rig.receive();
    for _ in 0..40 {
        rig.post(&[4096]);
    }
    rig.kick(RX);
    for _ in 0..20 {
        peer.send(&[1; 60]);
        rig.receive();
    }
    let event = rig.queues[RX].avail_event();
    assert!(event < 41, "with buffers in store no kick is asked for: {event}");
    let (mut without, mut peer) = Rig::with(AGREED & !features::EVENT_IDX, None);
    for _ in 0..40 {
        without.post(&[4096]);
    }
    without.kick(RX);
    peer.send(&[1; 60]);
    without.receive();
    assert!(without.queues[RX].kicks_suppressed());
    assert!(!without.queues[TX].kicks_suppressed());
}

#[test]
fn commands_are_obeyed_or_refused() {
    let (mut rig, _peer) = Rig::user();
    let drawn = rig.config();
    assert_eq!((&drawn[..3], drawn[6], drawn[8]), (&[0x52, 0x54, 0][..], 1, 1));
    for (command, answer) in [
        (&[0u8, 0, 1][..], 0),
        (&[0, 1, 0], 0),
        (&[0, 2, 0], 1),
        (&[1, 0, 0, 0, 0, 0, 0, 0, 0, 0], 0),
        (&[1, 1, 0x02, 1, 2, 3, 4, 5], 0),
        (&[1, 1, 0x03, 1, 2, 3, 4, 6], 1),
        (&[1, 1, 0x02, 1, 2], 1),
        (&[4, 0, 1, 0], 1),
        (&[5, 0, 0, 0, 0, 0, 0, 0, 0, 0], 1),
        (&[200, 7], 1),
    ] {
        assert_eq!(rig.command(command), answer, "{command:?}");
    }
    assert_eq!(rig.config()[..6], [0x02, 1, 2, 3, 4, 5]);
    let mut byte = [0xee; 4];
    rig.device.read_config(10, &mut byte);
    assert_eq!(byte, [0, 0, 0xee, 0xee], "past its end nothing is written");
    rig.device.read_config(u64::MAX, &mut byte);
    assert_eq!(rig.device.kind(), 1);
}

#[test]
fn a_buffer_too_small_for_a_header_comes_back_empty() {
    let (mut rig, mut peer) = Rig::user();
    let small = rig.post(&[11]);
    let head = rig.queues[RX].send(&[Buf::read(0x8000, 100)]);
    rig.post(&[200]);
    rig.kick(RX);
    peer.send(&[9; 60]);
    let mut back = Vec::new();
    rig.until("three buffers", |rig| {
        back.extend(std::iter::from_fn(|| rig.queues[RX].used()));
        back.len() == 3
    });
    assert_eq!(back[..2], [(small, 0), (head, 0)]);
    assert_eq!(back[2].1, 72);
}

/// Frames that the peer has by now, after the worker looked once more.
fn arrived(rig: &mut Rig, peer: &mut Peer) -> usize {
    let wakes = rig.wakes();
    rig.kick(TX);
    rig.until("the worker looks", |rig| {
        rig.wakes() > wakes + 1 || {
            rig.kick(TX);
            false
        }
    });
    peer.0.set_nonblocking(true).unwrap();
    let mut bytes = Vec::new();
    let end = peer.0.read_to_end(&mut bytes).unwrap_err();
    assert_eq!(end.kind(), std::io::ErrorKind::WouldBlock);
    peer.0.set_nonblocking(false).unwrap();
    assert_eq!(bytes.len() % 64, 0);
    bytes.len() / 64
}

/// Both directions are limited, each by tokens of its own; what has to wait is not lost.
#[test]
fn each_way_is_paid_in_its_own_tokens() {
    const SECOND: u64 = 1_000_000_000;
    let clock = Arc::new(AtomicU64::new(0));
    let limits = spec::Net { pps: Some(1), pps_burst: Some(3), ..spec::Net::default() };
    let (mut rig, mut peer) = Rig::limited(&limits, Clock::Manual(clock.clone()));
    for i in 0..10 {
        rig.send(&[i; 60], &[]);
        rig.post(&[2000]);
        peer.send(&[i; 60]);
    }
    rig.kick(RX);
    let (mut out, mut back) = (0, 0);
    for (now, tokens) in [(0, 3), (1, 4), (3, 6), (100, 9), (200, 10)] {
        clock.store(now * SECOND, Ordering::Release);
        while out < tokens {
            out += arrived(&mut rig, &mut peer);
        }
        assert_eq!(out + arrived(&mut rig, &mut peer), tokens, "at {now} s");
        rig.until("as many the other way", |rig| {
            back += rig.received().len();
            back == tokens
        });
    }
    rig.device.reset();
    let counts = rig.device.stats().read();
    assert_eq!((counts.sent, counts.received, counts.sent_dropped, counts.received_dropped), (10, 10, 0, 0));
    assert!(counts.throttled >= 2 && counts.throttled_ns > 0, "{counts:?}");
}

/// Interrupts of each queue wait for further packets, by a clock of the test's own; the packets do not.
#[test]
fn interrupts_wait_for_packets_and_packets_for_nothing() {
    let clock = Arc::new(AtomicU64::new(0));
    let limits = spec::Net { coalesce: Some(spec::Coalesce { usec: 100_000, frames: 4 }), ..spec::Net::default() };
    let (mut rig, mut peer) = Rig::limited(&limits, Clock::Manual(clock.clone()));
    let stats = rig.device.stats();
    let mut all = 0;
    // Published before the worker sleeps, so its look at the interrupts came before, too.
    let mut get = |rig: &mut Rig, count: u64| {
        all += count;
        for i in 0..count {
            rig.post(&[2000]);
            peer.send(&[i as u8; 60]);
        }
        rig.kick(RX);
        rig.until("the packets", |_| stats.read().received == all);
    };
    get(&mut rig, 3);
    assert_eq!(stats.read().interrupts, 0, "three of four, and the clock stands still");
    get(&mut rig, 1);
    rig.until("enough of them", |_| stats.read().interrupts == 1);
    get(&mut rig, 2);
    assert_eq!(stats.read().coalesced, 1);
    clock.store(100_000_000, Ordering::Release);
    rig.kick(RX);
    // Whether the driver wants one is its used_event's to say; here it stands where it was.
    rig.until("its time", |_| stats.read().coalesced == 2);
    let counts = stats.read();
    assert_eq!((counts.received, counts.coalesced, counts.coalesced_ns), (6, 2, 100_000_000));
}
