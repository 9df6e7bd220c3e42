// SPDX-License-Identifier: Apache-2.0
//! Random valid chains, given back in any order, against a naive model of what the device should see; and random bytes,
//! which may do no harm.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;

use base::Gpa;
use mem::GuestRam;
use proptest::prelude::*;
use testkit::ops::random_bytes;
use testkit::{Buf, GuestQueue, blk_ops, console_ops, mem_ops, net_ops, rng_ops, virtqueue_ops};
use virtio::{Chain, features};

#[derive(Clone, Debug)]
enum Op {
    /// Send a chain: readable lengths, writable lengths, by an indirect table or not.
    Send(Vec<u16>, Vec<u16>, bool),
    /// Pop up to this many.
    Pop(u8),
    /// Give back the n-th chain in flight (modulo) with this length.
    Finish(u8, u32),
    /// Ask for an interrupt this far ahead (0: at the next), then ask the queue.
    Notify(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let lens = || proptest::collection::vec(1u16..2000, 0..5);
    prop_oneof![
        3 => (lens(), lens(), any::<bool>()).prop_map(|(r, w, i)| Op::Send(r, w, i)),
        3 => (1u8..6).prop_map(Op::Pop),
        3 => (any::<u8>(), any::<u32>()).prop_map(|(n, len)| Op::Finish(n, len)),
        1 => (0u8..6).prop_map(Op::Notify),
    ]
}

/// What the model knows of one chain.
#[derive(Clone, Debug)]
struct Sent {
    head: u16,
    bufs: Vec<Buf>,
}

fn run(ops: &[Op], log_size: u32, agreed: u64) -> Result<(), TestCaseError> {
    let ram = GuestRam::anonymous(&[(Gpa(0), 0x10_0000), (Gpa(0x20_0000), 0x1_0000)]).unwrap();
    let bases: Vec<(u64, u64)> = ram.regions().map(|(at, _, hva)| (at.0, hva.0)).collect();
    let host = |at: u64| if at < 0x20_0000 { bases[0].1 + at } else { bases[1].1 + at - 0x20_0000 };
    let mut driver = GuestQueue::new(&ram, 0x1000, 1 << log_size);
    let mut queue = driver.config().activate(&ram, agreed).unwrap();
    let mut chain = Chain::new();
    let (mut waiting, mut flying, mut returned) = (VecDeque::<Sent>::new(), Vec::<Sent>::new(), VecDeque::new());
    let (mut used, mut told, mut table) = (0u16, 0u16, 0u64);
    for op in ops {
        match op {
            Op::Send(reads, writes, indirect) => {
                let mut at = 0x1_0000 + u64::from(used % 7) * 0x1_0000;
                if reads.len() % 3 == 2 {
                    at = 0x20_0000;
                }
                let mut bufs = Vec::new();
                for (len, write) in reads.iter().map(|l| (*l, false)).chain(writes.iter().map(|l| (*l, true))) {
                    bufs.push(Buf { at: Gpa(at), len: len.into(), write });
                    at += u64::from(len) + 3;
                }
                if bufs.is_empty() || bufs.len() > 1 << log_size {
                    continue;
                }
                table = (table + 1) % 64;
                let head = if *indirect && agreed & features::INDIRECT_DESC != 0 {
                    driver.add_indirect(0xa_0000 + table * 0x100, &bufs)
                } else {
                    driver.add(&bufs)
                };
                if let Some(head) = head {
                    driver.publish(head);
                    waiting.push_back(Sent { head, bufs });
                }
            }
            Op::Pop(n) => {
                for _ in 0..*n {
                    let got = queue.pop(&mut chain);
                    let Some(sent) = waiting.pop_front() else {
                        prop_assert_eq!(got, Ok(false));
                        break;
                    };
                    prop_assert_eq!(got, Ok(true));
                    prop_assert_eq!(chain.head(), sent.head);
                    let seen = |write: bool| {
                        let segs = if write { chain.writable() } else { chain.readable() };
                        segs.iter().map(|s| (s.ptr as u64, s.len as u64)).collect::<Vec<_>>()
                    };
                    let meant = |write: bool| {
                        let bufs = sent.bufs.iter().filter(|b| b.write == write);
                        bufs.map(|b| (host(b.at.0), u64::from(b.len))).collect::<Vec<_>>()
                    };
                    prop_assert_eq!(seen(false), meant(false));
                    prop_assert_eq!(seen(true), meant(true));
                    flying.push(sent);
                }
            }
            Op::Finish(n, len) => {
                if flying.is_empty() {
                    continue;
                }
                let sent = flying.swap_remove(usize::from(*n) % flying.len());
                queue.push_used(sent.head, *len);
                used = used.wrapping_add(1);
                returned.push_back((sent.head, *len));
            }
            Op::Notify(ahead) => {
                let event = told.wrapping_add(u16::from(*ahead));
                driver.set_used_event(event);
                let passed = (0..used.wrapping_sub(told)).any(|i| told.wrapping_add(i) == event);
                let expected = if agreed & features::EVENT_IDX != 0 { passed } else { used != told };
                prop_assert_eq!(queue.needs_notification(), expected);
                told = used;
            }
        }
        prop_assert_eq!(usize::from(queue.in_flight()), flying.len());
        // The driver collects now and then, in the order of the used ring.
        if ops.len().is_multiple_of(2) || returned.len() > 2 {
            while let Some(expected) = returned.pop_front() {
                prop_assert_eq!(driver.used(), Some(expected));
            }
            prop_assert_eq!(driver.used(), None);
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn valid_chains_arrive_as_sent(
        ops in proptest::collection::vec(op(), 1..300),
        log_size in 0u32..7,
        event_idx in any::<bool>(),
        indirect in any::<bool>(),
    ) {
        let mut agreed = features::VERSION_1;
        if event_idx {
            agreed |= features::EVENT_IDX;
        }
        if indirect {
            agreed |= features::INDIRECT_DESC;
        }
        run(&ops, log_size, agreed)?;
    }
}

/// Inputs for the harnesses that the fuzz targets share; `TARE_FUZZ_RUNS` asks for more of them.
#[test]
fn random_bytes_do_no_harm() {
    let runs = std::env::var("TARE_FUZZ_RUNS").ok().and_then(|n| n.parse().ok()).unwrap_or(1280u64);
    for seed in 0..runs {
        let mut data = random_bytes(seed, 64 + (seed as usize * 37) % 2000);
        // Everything gets its share, with every set of features and behind both faces.
        data[0] = (seed / 5) as u8;
        [virtqueue_ops, blk_ops, net_ops, console_ops, rng_ops, mem_ops][(seed % 6) as usize](&data);
    }
}
