// SPDX-License-Identifier: Apache-2.0
//! A disk before a hostile guest, behind either face: rings full of anything, registers in any order. The harness is
//! `testkit::blk_ops`, which `cargo test -p virtio --test queue_model` also runs on random bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| testkit::blk_ops(data));
