// SPDX-License-Identifier: Apache-2.0
//! The paravirtual interrupt controller before a hostile guest: registers and shared words in any order, and lines at any moment. The
//! harness is `testkit::vioapic_ops`, which `cargo test -p testkit` also runs on random bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| testkit::vioapic_ops(data));
