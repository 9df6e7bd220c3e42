// SPDX-License-Identifier: Apache-2.0
//! How a driver finds and sets up a device: one state machine ([`core`]) behind thin faces ([`pci`], [`mmio`]).

pub mod core;
pub mod mmio;
pub mod pci;
