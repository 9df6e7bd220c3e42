// SPDX-License-Identifier: Apache-2.0
//! vCPUs: what they know of themselves, how they start, and the loop that runs them.

pub mod affinity;
pub mod cpuid;
pub mod features;
pub mod host;
mod run;
pub mod setup;
pub mod topology;

pub use run::{Accounting, Before, Started, Stopped, spawn};
