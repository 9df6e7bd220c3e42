// SPDX-License-Identifier: Apache-2.0
//! Rings full of anything, and a list of operations on a queue by itself. The harness is `testkit::virtqueue_ops`, which
//! `cargo test -p virtio --test queue_model` also runs on random bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| testkit::virtqueue_ops(data));
