// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! What a VM is: one set of plain structs that flags and `vm.toml` fill and `machine` builds from. No I/O here.
//!
//! `parse` reads the text forms (`1G`, `path=root.raw,readonly=on`), `check` says whether a description makes sense,
//! `cmdline` chooses the kernel's command line when the user gave none.

mod check;
mod cmdline;
mod coalesce;
mod command;
mod cpu_features;
mod cpu_model;
mod cpus;
mod error;
mod host_cpu;
mod memory;
mod net;
mod parse;
mod text;
mod vfio;
mod vm;

pub use check::{
    DEBUG_EXIT_PORTS, DEFAULT_QUEUES, MAX_CMDLINE, MAX_CPUS, MAX_DISKS, MAX_LOGICAL_BLOCK, MAX_PHYSICAL_BLOCK,
    MAX_QUEUES, MAX_SERIAL, MIN_BPS,
};
pub use coalesce::Coalesce;
pub use command::{Command, DiskInfo, Info, RemoveDevice, Reply, ResizeDisk, ResizeMemory};
pub use cpu_features::{CpuidBits, CpuidRegister, cpu_features, cpuid_bits};
pub use cpu_model::CpuModel;
pub use cpus::{Cpus, Topology};
pub use error::SpecError;
pub use host_cpu::{CpuPin, DisableExits, HostCpus, MAX_HALT_POLL};
pub use memory::{
    MAX_MEMORY, MAX_NODES, MAX_PREALLOC_THREADS, MIN_MEMORY, Memory, MemoryBacking, PLUG_UNIT, Pages, Prealloc,
};
pub use net::{Descriptors, MAX_NETS, Mac, Net, NetKind};
pub use parse::{FromText, Word, parse_on_off, parse_port, parse_size, show_size};
pub use text::{Said, said, said_each};
pub use vfio::{Iommu, MAX_VFIO, PciAddress, Vfio};
pub use vm::*;
