// SPDX-License-Identifier: Apache-2.0
//! Puts the rooms together into a VM that runs: memory, interrupt chips, devices, vCPUs, the main loop and the ledger.
//!
//! The only room that sees both `kvm` and devices. The CLI calls [`run`]; everything else here serves that call.

mod build;
mod bus;
mod console;
mod control;
mod dispatch;
mod error;
mod hotplug;
mod intx;
mod ioapic;
mod layout;
mod ledger;
mod legacy;
mod lines;
mod mmio_host;
mod msi;
mod passthrough;
mod pci_host;
mod pci_hotplug;
mod places;
mod ready;
mod registry;
mod remote;
mod room;
mod run;
mod signals;
mod spaces;
mod status_page;
#[cfg(test)]
mod stress;
mod tap;
mod timeline;
mod timer;
mod vcpu;
mod vioapic;

pub use build::host_cpu_features;
pub use console::ConsoleIo;
pub use control::Outcome;
pub use error::Error;
pub use ledger::{DeviceLedger, ExitRow, Ledger, MemoryLedger, VcpuLedger};
pub use places::{Place, Symbols, table as places_table};
pub use ready::StartUp;
pub use remote::{Controls, Remote};
pub use run::{Report, run, run_explained, run_remote, run_with};
pub use timeline::{Explained, GUEST_STARTS, Moment, parts};
pub use vcpu::Accounting;
