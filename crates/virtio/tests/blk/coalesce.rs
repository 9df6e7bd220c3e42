// SPDX-License-Identifier: Apache-2.0
//! Interrupts that wait for further requests, by a clock of the test's own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use block::{Disk, MemImage};
use testkit::conformance::eventually;
use virtio::blk::{Blk, Clock};
use virtio::device::VirtioDevice;

use crate::rig::{IN, OK};
use crate::several::{BOTH, Several, with_queues};

/// A disk of two queues whose interrupts wait a minute, or for `frames` requests.
fn coalesced(threads: spec::DiskThreads, frames: u32) -> (Several, Arc<AtomicU64>) {
    let mut spec = with_queues(2, threads);
    spec.coalesce = Some(spec::Coalesce { usec: 100_000, frames });
    let clock = Arc::new(AtomicU64::new(0));
    let disk = Disk::in_memory(&MemImage::new(vec![1; 256 << 10]), false);
    (Several::new(Blk::with_clock(disk, &spec, Clock::Manual(clock.clone()))), clock)
}

fn reads(rig: &mut Several, lane: usize, count: usize) {
    let heads: Vec<u16> = (0..count).map(|_| rig.publish(lane, IN, 0, &[], 512)).collect();
    rig.kick(lane);
    // They are there to see, interrupt or not.
    for head in heads {
        assert_eq!(rig.wait(lane, head).0, OK);
    }
}

#[test]
fn an_interrupt_waits_for_its_time_and_the_answers_do_not() {
    for threads in BOTH {
        let (mut rig, clock) = coalesced(threads, 100);
        reads(&mut rig, 0, 5);
        let wakes = rig.device.stats().read().wakes;
        rig.kick(0);
        rig.kick(1);
        let stats = rig.device.stats();
        eventually("the workers look again", || stats.read().wakes > wakes);
        assert_eq!((rig.interrupts(0), rig.interrupts(1)), (0, 0), "a fifth of the time of a clock that stands still");
        clock.store(100_000_000, Ordering::Release);
        rig.kick(0);
        eventually("the interrupt", || rig.interrupts(0) == 1);
        assert_eq!(rig.interrupts(1), 0, "each queue has its own");
        rig.device.reset();
        let counts = stats.read();
        assert_eq!((counts.interrupts, counts.coalesced, counts.coalesced_ns), (1, 1, 100_000_000));
    }
}

#[test]
fn enough_requests_have_their_interrupt_at_once() {
    for threads in BOTH {
        let (mut rig, _clock) = coalesced(threads, 4);
        reads(&mut rig, 1, 3);
        assert_eq!(rig.interrupts(1), 0);
        reads(&mut rig, 1, 1);
        eventually("the interrupt", || rig.interrupts(1) == 1);
        // What is put off at a reset is nobody's any more, and the next life begins without it.
        reads(&mut rig, 1, 2);
        rig.restart();
        reads(&mut rig, 1, 3);
        assert_eq!(rig.interrupts(1), 1, "three, not five");
    }
}
