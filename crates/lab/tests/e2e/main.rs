// SPDX-License-Identifier: Apache-2.0
//! End to end: stock kernels and a stock Debian under `tare`, in fresh copies of the lab machine, where `/dev/kvm` is real.
//!
//! `make e2e` runs them: each takes a minute or so, so `cargo test` alone leaves them out. They drive the release
//! programs as a user does and read what a user reads.

#![allow(clippy::expect_used, reason = "a test that cannot go on fails")]

mod backings;
mod boots;
mod disks;
mod endings;
mod hotplug;
mod iommufd;
mod kernels;
mod killed;
mod lab;
mod leftovers;
mod machine;
mod memory;
mod network;
mod passthrough;
mod profile;
mod refusals;
mod transports;
mod vioapic;
