// SPDX-License-Identifier: Apache-2.0
//! What one request costs in the queue alone: pop, give back, ask for an interrupt. `cargo bench -p virtio --bench queue`
//! prints nanoseconds a request, the least of several rounds, for a chain of three buffers (a block request's shape), laid
//! out directly and by an indirect table. The driver's half is done outside the timed part.

use std::hint::black_box;
use std::time::{Duration, Instant};

use testkit::{Buf, GuestQueue};
use virtio::{Chain, Queue, features};

const SIZE: u16 = 256;
const ROUNDS: u32 = 2000;

fn batch(queue: &mut Queue, chain: &mut Chain, at_once: u16) -> Duration {
    let start = Instant::now();
    let mut left = at_once;
    while left > 0 {
        assert!(matches!(queue.pop(chain), Ok(true)), "the driver sent it");
        black_box(chain.readable());
        black_box(chain.writable());
        queue.push_used(chain.head(), 4097);
        left -= 1;
    }
    black_box(queue.needs_notification());
    black_box(queue.enable_kicks());
    start.elapsed()
}

fn measure(indirect: bool, at_once: u16) -> Option<f64> {
    let ram = testkit::ram(0x10_0000);
    let mut driver = GuestQueue::new(&ram, 0x1000, SIZE);
    let mut queue = driver.config().activate(&ram, features::TRANSPORT).ok()?;
    let mut chain = Chain::new();
    let bufs = [Buf::read(0x8000, 16), Buf::write(0x9000, 4096), Buf::write(0x8010, 1)];
    let mut best = f64::INFINITY;
    for round in 0..ROUNDS {
        for i in 0..at_once {
            let head =
                if indirect { driver.add_indirect(0x2_0000 + u64::from(i) * 64, &bufs) } else { driver.add(&bufs) };
            driver.publish(head?);
        }
        driver.set_used_event((round as u16).wrapping_mul(at_once));
        best = best.min(batch(&mut queue, &mut chain, at_once).as_nanos() as f64 / f64::from(at_once));
        while driver.used().is_some() {}
    }
    Some(best)
}

fn main() {
    for (name, indirect) in [("direct", false), ("indirect", true)] {
        for at_once in [1, 8, 64] {
            if let Some(ns) = measure(indirect, at_once) {
                println!("{name:8} {at_once:3} at once: {ns:6.1} ns a request");
            }
        }
    }
}
