// SPDX-License-Identifier: Apache-2.0
//! The lab machine: a Linux with a real KVM under a software CPU, for hosts without hardware virtualization.
//!
//! [`snapshot::Snapshot::get`] makes everything once (`image` cooks `recipe`, `qemu` boots it, `cache` keeps it);
//! [`clone::run`] runs one job in a fresh copy, for samples; [`standing::Standing`] is the one that stays, for hands and
//! functional tests. `kernel` is one that a machine has instead of the guests' own. `mend` works around a fault of the software CPU; `session` talks to the agent inside through shared memory, `qmp` to QEMU.

pub mod cache;
pub mod cli;
pub mod clone;
pub mod image;
pub mod kernel;
pub mod mend;
pub mod module;
pub mod process;
pub mod qemu;
pub mod qmp;
pub mod recipe;
pub mod session;
pub mod snapshot;
pub mod standing;

/// Told what is being done, and how far it is where that is known (0 to 1).
pub type Progress<'a> = &'a dyn Fn(&str, Option<f64>);
