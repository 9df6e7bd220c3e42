// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! PCI as a guest sees it: configuration space, BARs, capabilities, MSI-X, and one bus with a host bridge at 00:00.0.
//!
//! `virtio` puts devices on it; `machine` owns the dispatch of ports, ECAM and BAR ranges and follows what the guest moves.

mod bus;
mod config;
mod device;
pub mod msix;

pub use bus::{ECAM_BUS_SIZE, Error, HostBridge, PciBus, SLOTS, Shared};
pub use config::{
    BarKind, BarSpec, COMMAND, COMMAND_INTX_OFF, COMMAND_IO, COMMAND_MASTER, COMMAND_MEMORY, ConfigSpace, Identity,
};
pub use device::{Effect, PciDevice, Placement};
