// SPDX-License-Identifier: Apache-2.0
//! Any bytes as a kernel, through `boot::fuzz::fuzz_kernel`: loaded or refused with an error, never a panic.
#![no_main]

use std::sync::OnceLock;

use base::Gpa;
use mem::GuestRam;

/// Guest memory, mapped once: what a kernel left there is of no meaning to the next.
static RAM: OnceLock<GuestRam> = OnceLock::new();

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let ram = RAM.get_or_init(|| match GuestRam::anonymous(&[(Gpa(0), 32 << 20)]) {
        Ok(ram) => ram,
        Err(error) => panic!("no guest memory: {error}"),
    });
    boot::fuzz::fuzz_kernel(ram, data);
});
