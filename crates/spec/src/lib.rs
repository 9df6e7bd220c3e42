// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! What a VM is: one set of plain structs that flags and `vm.toml` fill and `machine` builds from. No I/O here.

mod vm;

pub use vm::*;
