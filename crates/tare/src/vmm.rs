// SPDX-License-Identifier: Apache-2.0
//! The one place that calls `machine`. Everything above sees its outcome, its ledger and a [`Failure`].

use spec::Vm;

use crate::exit::{Exit, Failure};

/// How one start of the machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(dead_code)]
pub enum End {
    /// The guest reset itself.
    Reset,
    /// It is over: with this code, and this line if there is something to say.
    Over(Exit, Option<String>),
}

/// What one start of the machine weighed.
pub struct Weight {
    /// For people.
    pub table: String,
    /// For programs.
    pub json: Vec<u8>,
}

/// Starts the machine and comes back when the guest is over.
///
/// # Errors
/// [`Failure`]: a file can't be used, or the host or the monitor failed.
pub fn start(_vm: &Vm) -> Result<(End, Weight), Failure> {
    Err(Failure::monitor("no machine: this build; build one that has it"))
}
