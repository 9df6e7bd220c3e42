// SPDX-License-Identifier: Apache-2.0
//! What the ledger costs: the same guest of many exits with accounting on and off, in turn, and the ratio of the medians.
//!
//! `cargo run --release -p machine --example exit_cost [exits]`; runs on any /dev/kvm.
#![allow(clippy::unwrap_used)]

#[path = "../tests/common/mod.rs"]
mod common;

use machine::Accounting;

const ROUNDS: usize = 11;

fn main() {
    if !common::have_kvm() {
        return;
    }
    let exits: u32 = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(100_000);
    let mut code = common::Code::new();
    code.out_loop(exits).out(0x600, 0x34);
    let (mut on, mut off) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS * 2 {
        let (accounting, samples) =
            if round % 2 == 0 { (Accounting::On, &mut on) } else { (Accounting::Off, &mut off) };
        let (report, _) = common::run_with(&code, accounting, |_| {});
        let ledger = report.ledger;
        samples.push((ledger.wall_ns - ledger.setup_ns) as f64 / f64::from(exits));
    }
    let (on, off) = (median(&mut on), median(&mut off));
    println!("ns per exit, median of {ROUNDS}: ledger on {on:.0}, off {off:.0}, ratio {:.3}", on / off);
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
