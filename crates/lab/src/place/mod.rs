// SPDX-License-Identifier: Apache-2.0
//! Where samples run: directly on this host, or in clones of the lab machine.
//!
//! The scheduler knows only the trait. A place gives the paths that a command template needs and runs one script to its end;
//! it is shared by all worker threads.

pub mod direct;
pub mod lab;
#[cfg(test)]
pub mod mock;

use std::time::Duration;

use anyhow::Result;

/// Paths and names on the machine where samples run.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    /// Guest kernel.
    pub kernel: String,
    /// Guest initrd.
    pub initrd: String,
    /// The root disk image.
    pub disk: String,
    /// The image is shared and has to be copied for each sample.
    pub copy_disk: bool,
    /// `root=` for the guest's kernel.
    pub root: String,
    /// A directory for samples, on the file system that also holds the guests' disks.
    pub work: String,
    /// The tare binary.
    pub tare: String,
}

/// What a report says about a place.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// "lab" or "direct".
    pub place: &'static str,
    /// What kind of time figures are in.
    pub time: &'static str,
    /// The method in a few sentences.
    pub statement: &'static str,
    /// What the method does not price.
    pub not_priced: &'static [&'static str],
    /// The machine samples run on, if it is not this host.
    pub machine: Option<String>,
    /// Kernel release of the guests.
    pub guest_kernel: Option<String>,
    /// Nothing else runs beside a sample there.
    pub alone: bool,
}

/// Where samples run.
pub trait Place: Sync {
    /// What a report says about it.
    fn facts(&self) -> Facts;
    /// Paths for command templates.
    fn paths(&self) -> &Paths;
    /// How many samples may run at once without disturbing each other's figures.
    fn lanes(&self) -> usize;
    /// Virtual CPUs of a guest: as many as the workloads' two threads find natively.
    fn cpus(&self) -> u32;
    /// Runs a bash script to its end and returns its standard output. `limit` is the time after which the script should
    /// have ended by itself, on the place's clock; a place may give up later than that, never earlier.
    fn run(&self, script: &str, limit: Duration) -> Result<String>;
}
