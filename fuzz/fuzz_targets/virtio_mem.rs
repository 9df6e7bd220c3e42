// SPDX-License-Identifier: Apache-2.0
//! The memory device before a hostile guest, behind either face: rings full of anything, registers in any order, requests for
//! blocks that are not there, while the host changes its mind. The harness is `testkit::mem_ops`, which
//! `cargo test -p virtio --test queue_model` also runs on random bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| testkit::mem_ops(data));
