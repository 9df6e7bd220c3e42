// SPDX-License-Identifier: Apache-2.0
//! Why a device can't be handed on, by what the user can do about it: one line each, saying what, where and what to do.

use std::io;

use spec::PciAddress;

/// Why a device can't be handed on.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// The host has no such device.
    #[error("this host has no PCI device {0}: --vfio; `tare passthrough list` shows those it has")]
    Missing(PciAddress),
    /// No IOMMU is in front of it.
    #[error(
        "{0} is in no IOMMU group: --vfio; switch the IOMMU on (VT-d or AMD-Vi in the firmware, and intel_iommu=on on the \
         command line of this host's kernel)"
    )]
    NoIommu(PciAddress),
    /// It belongs to another driver.
    #[error("{address} belongs to {owner}, not to vfio-pci: --vfio; `tare passthrough bind {address}` hands it over")]
    NotBound {
        /// The device.
        address: PciAddress,
        /// Its driver, or that it has none.
        owner: String,
    },
    /// Other devices of its group belong to the host.
    #[error(
        "{address} can't leave the host alone, group {group} has {others} too: --vfio; hand those over with \
         `tare passthrough bind`, or unbind them"
    )]
    Shared {
        /// The device.
        address: PciAddress,
        /// Its group.
        group: u32,
        /// What stands in the way, with drivers.
        others: String,
    },
    /// Somebody uses it.
    #[error("{address} is in use, {user}: {place}; {hint}")]
    InUse {
        /// The device.
        address: PciAddress,
        /// By whom or for what.
        user: String,
        /// The flag or command that met it.
        place: &'static str,
        /// What to do.
        hint: &'static str,
    },
    /// Something about the device that tare can't pass on.
    #[error("{address} {why}: --vfio; {hint}")]
    Unfit {
        /// The device.
        address: PciAddress,
        /// What it lacks.
        why: String,
        /// What to do.
        hint: &'static str,
    },
    /// The host refused something.
    #[error("cannot {what}: {source}; {hint}")]
    Host {
        /// What was tried, and for what.
        what: String,
        /// The host's reason.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
}

impl VfioError {
    /// Names what was tried, for an I/O error.
    pub(crate) fn host(what: impl Into<String>, hint: &'static str) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Host { what, source, hint }
    }
}
