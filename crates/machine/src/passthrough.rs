// SPDX-License-Identifier: Apache-2.0
//! Devices of the host in this machine: opened before anything else is made, then put on the bus, and all of the guest's
//! memory pinned for them once everything in it is in place.
//!
//! Called by `build` on the main thread. Whatever fails closes what was opened, and the devices are as they were.

use std::os::fd::RawFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvm::{VfioGroups, Vm};
use mem::space::SpaceError;
use vfio::{Container, Opened};

use crate::bus::Bus;
use crate::error::Error;
use crate::ready::{StartUp, nanoseconds};
use crate::registry::Registry;
use crate::spaces::Spaces;

/// The devices that a machine has of the host.
pub struct Passthrough {
    container: Container,
    /// Until they are on the bus.
    devices: Vec<Opened>,
    /// Kept, never looked at.
    groups: Option<VfioGroups>,
}

impl Passthrough {
    /// Opens the devices of `spec`, if it has any.
    ///
    /// # Errors
    /// [`Error::Vfio`]: what stands in the way.
    pub fn open(spec: &spec::Vm) -> Result<Option<Self>, Error> {
        if spec.vfio.is_empty() {
            return Ok(None);
        }
        let mut container = Container::open()?;
        let devices = spec.vfio.iter().map(|device| container.device(device.host)).collect::<Result<_, _>>()?;
        Ok(Some(Self { container, devices, groups: None }))
    }

    /// Puts the devices on `bus`, tells KVM, and goes to `registry` to be kept.
    ///
    /// # Errors
    /// [`Error::Vfio`] and [`Error::Kvm`].
    pub fn join(mut self, vm: &Vm, bus: &mut Bus, registry: &mut Registry) -> Result<(), Error> {
        let groups: Vec<RawFd> = self.container.groups().collect();
        self.groups = vm.tell_vfio_groups(&groups)?;
        let Some(news) = registry.news().cloned() else { return Ok(()) };
        for device in self.devices.drain(..) {
            bus.add_vfio(device, &news)?;
        }
        registry.keep(self);
        Ok(())
    }

    /// Pins all memory for the devices, and has them follow what becomes of it. `startup` hears what that took.
    ///
    /// # Errors
    /// [`Error::TooMuch`] where memory can't be pinned.
    pub fn pin(&self, spaces: &Spaces, startup: &mut StartUp) -> Result<(), Error> {
        let maps = self.container.maps()?;
        let (mapped, begun) = (maps.mapped(), Instant::now());
        if let Err(refused) = spaces.follow(Box::new(maps)) {
            return Err(pinned(&refused, mapped.load(Ordering::Relaxed)));
        }
        startup.pin_ns = nanoseconds(begun);
        // What is pinned exists.
        startup.ready = mapped.load(Ordering::Relaxed);
        Ok(())
    }
}

/// Why memory can't be pinned, after `done` bytes of it.
fn pinned(refused: &SpaceError, done: u64) -> Error {
    let SpaceError::Refused { source, .. } = refused else { return Error::TooMuch(format!("{refused}: --vfio")) };
    let hint = match (source.raw_os_error(), locked_limit()) {
        (Some(libc::ENOMEM), Some(limit)) => format!(
            "this process may lock {} MiB (ulimit -l): raise that to what the guest has and 64 MiB more, or ask for less \
             with --memory",
            limit >> 20
        ),
        (Some(libc::ENOMEM), None) => "the host has no more: ask for less with --memory".to_owned(),
        _ => "the host's kernel log says more".to_owned(),
    };
    Error::TooMuch(format!(
        "guest memory can't be pinned for devices after the first {} MiB, {source}: --vfio; {hint}",
        done >> 20
    ))
}

/// How much memory this process may lock, if that is limited.
fn locked_limit() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = text.lines().find(|line| line.starts_with("Max locked memory"))?;
    line.split_ascii_whitespace().nth(3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_was_hit_halfway_is_told_with_how_far_it_came() {
        let refused = |code| SpaceError::Refused {
            what: "give memory to devices",
            at: 3 << 30,
            source: std::io::Error::from_raw_os_error(code),
        };
        let said = pinned(&refused(libc::ENOMEM), 3 << 30).to_string();
        assert!(said.starts_with("guest memory can't be pinned for devices after the first 3072 MiB, "), "{said}");
        assert!(said.contains(": --vfio; ") && !said.contains('\n'), "{said}");
        assert!(pinned(&refused(libc::EINVAL), 0).to_string().ends_with("the host's kernel log says more"));
    }
}
