// SPDX-License-Identifier: Apache-2.0
//! One fuzz input: ring contents and a list of operations on a queue, read from raw bytes; `device_ops` goes on to whole
//! devices.
//!
//! `fuzz/fuzz_targets/virtqueue.rs` feeds it what the fuzzer finds, and a test feeds it random bytes. It panics when a
//! law of the queue is broken: a segment outside guest memory, a head given twice, more work than the queue holds.

use base::{Gpa, Seg};
use mem::GuestRam;
use virtio::{Chain, Queue, QueueConfig, features};

use crate::driver::GuestQueue;

const LOW: u64 = 0x1_0000;
const HIGH_AT: u64 = 0x2_0000;
const HIGH: u64 = 0x4000;

/// The input, a few bytes at a time; zeroes at its end.
pub(crate) struct Input<'a>(pub &'a [u8]);

impl Input<'_> {
    pub(crate) fn u8(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes([self.u8(), self.u8()])
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    /// Mostly an address in or near memory, sometimes anything.
    pub(crate) fn address(&mut self) -> u64 {
        match self.u8() {
            0..240 => u64::from(self.u16()) + if self.u8() & 7 == 0 { HIGH_AT } else { 0 },
            _ => u64::from(self.u32()) << 32 | u64::from(self.u32()),
        }
    }

    /// Mostly a short length, sometimes anything.
    pub(crate) fn len(&mut self) -> u32 {
        match self.u8() {
            0..200 => u32::from(self.u8()),
            200..250 => u32::from(self.u8()) * 16,
            _ => self.u32(),
        }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Runs one input on a queue by itself.
///
/// # Panics
/// When the code under test breaks a law, or the host has no memory.
pub fn virtqueue_ops(data: &[u8]) {
    let mut input = Input(data);
    let (agreed, size, ram) = setting(&mut input);
    queue_ops(&mut input, &ram, agreed, size);
}

/// What every input begins with: a byte for the features and one for the queues' size; and memory with a hole in it.
pub(crate) fn setting(input: &mut Input<'_>) -> (u64, u16, GuestRam) {
    let what = input.u8();
    let mut agreed = features::VERSION_1;
    if what & 0x10 != 0 {
        agreed |= features::EVENT_IDX;
    }
    if what & 0x20 != 0 {
        agreed |= features::INDIRECT_DESC;
    }
    let size = 1u16 << (input.u8() % 7);
    let regions = [(Gpa(0), LOW), (Gpa(HIGH_AT), HIGH)];
    let Ok(ram) = GuestRam::anonymous(&regions) else { panic!("memory for a test guest") };
    (agreed, size, ram)
}

/// Something the guest does to memory; `op` says what.
pub(crate) fn scribble(op: u8, input: &mut Input<'_>, ram: &GuestRam, queue: &mut GuestQueue, size: u16) {
    match op % 8 {
        0..=2 => {
            let (index, at, len) = (u16::from(input.u8()) % size, input.address(), input.len());
            let (flags, next) = (u16::from(input.u8() & 7), u16::from(input.u8()) % (size + 2));
            queue.set_desc(index, at, len, flags, next);
        }
        3 => {
            let (place, at, len) = (u64::from(input.u16() & 0xfff0), input.address(), input.len());
            let (flags, next) = (u16::from(input.u8() & 7), u16::from(input.u8() & 0x1f));
            queue.set_desc_at(Gpa(place), at, len, flags, next);
        }
        4 | 5 => queue.publish(u16::from(input.u8()) % (size + 1)),
        6 => {
            let idx = input.u16();
            queue.set_avail_idx(idx);
        }
        _ => {
            let (at, value) = (input.address(), input.u32());
            let _ = ram.write_bytes(Gpa(at), &value.to_le_bytes());
        }
    }
}

fn queue_ops(input: &mut Input<'_>, ram: &GuestRam, agreed: u64, size: u16) {
    let mut driver = GuestQueue::new(ram, 0x1000, size);
    let mut config = driver.config();
    if input.u8() & 7 == 0 {
        config = QueueConfig {
            desc: Gpa(input.address()),
            avail: Gpa(input.address()),
            used: Gpa(input.address()),
            ..config
        };
    }
    let Ok(mut queue) = config.activate(ram, agreed) else { return };
    let (mut chain, mut out) = (Chain::new(), Vec::new());
    while !input.is_empty() {
        let op = input.u8();
        match op % 16 {
            0..10 => scribble(op % 16, input, ram, &mut driver, size),
            10..12 => drain(&mut queue, &mut chain, &mut out, ram),
            12 => {
                if let Some(head) = out.pop() {
                    queue.push_used(head, input.len());
                }
            }
            13 => {
                // Any head: one that is out is given back, any other is ignored.
                let head = u16::from(input.u8());
                queue.push_used(head, 1);
                out.retain(|o| *o != head);
            }
            14 => {
                queue.needs_notification();
            }
            _ => {
                if op & 0x10 == 0 {
                    queue.enable_kicks();
                } else {
                    queue.disable_kicks();
                }
            }
        }
        assert!(queue.in_flight() <= queue.size(), "more in flight than the queue holds");
    }
}

fn drain(queue: &mut Queue, chain: &mut Chain, out: &mut Vec<u16>, ram: &GuestRam) {
    let mut broken = false;
    for turn in 0.. {
        assert!(turn <= queue.size(), "a queue gives no more chains than it holds");
        match queue.pop(chain) {
            Ok(true) => {}
            Ok(false) => return,
            Err(_) => {
                assert!(!broken, "a fault is reported once");
                broken = true;
                continue;
            }
        }
        assert!(!broken, "a broken queue gives nothing");
        assert!(!out.contains(&chain.head()), "a head is out twice");
        out.push(chain.head());
        check_chain(chain, ram);
    }
}

fn check_chain(chain: &Chain, ram: &GuestRam) {
    let segs: Vec<Seg> = chain.readable().iter().chain(chain.writable()).copied().collect();
    assert!(!segs.is_empty() && segs.len() <= 64, "{} segments", segs.len());
    for seg in &segs {
        let (at, len) = (seg.ptr as u64, seg.len as u64);
        let inside = ram.regions().any(|(_, size, hva)| at >= hva.0 && at + len <= hva.0 + size);
        assert!(inside && len != 0, "{seg:?} is outside guest memory");
    }
    let sum = |segs: &[Seg]| base::segs::total_len(segs);
    assert_eq!(sum(chain.readable()), u64::from(chain.readable_len()));
    assert_eq!(sum(chain.writable()), u64::from(chain.writable_len()));
    let mut bytes = [0; 64];
    let got = chain.read_at(3, &mut bytes);
    assert_eq!(got, (chain.readable_len().saturating_sub(3) as usize).min(64));
    let put = chain.write_at(chain.writable_len().saturating_sub(1), &bytes);
    assert_eq!(put, usize::from(chain.writable_len() != 0));
}

/// Random bytes that are the same for the same seed (a 64-bit xorshift), for running the harness without a fuzzer.
#[must_use]
pub fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}
