// SPDX-License-Identifier: Apache-2.0
//! What can keep a VM from starting, by what the user can do about it.

use std::io;

/// Why a VM did not start. Once it runs, everything that ends it is an [`crate::Outcome`].
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The host's KVM is missing, forbidden or refuses.
    #[error(transparent)]
    Kvm(#[from] kvm::KvmError),
    /// Guest memory could not be had.
    #[error(transparent)]
    Memory(#[from] mem::MemError),
    /// Something could not be put into the guest's address space.
    #[error("{0}: memory; give the machine less memory or fewer devices")]
    Space(#[from] mem::space::SpaceError),
    /// The kernel, initrd or command line is no good.
    #[error(transparent)]
    Boot(#[from] boot::BootError),
    /// A disk is missing, in use or unfit.
    #[error(transparent)]
    Disk(#[from] block::Error),
    /// A network device's other end is missing or unfit.
    #[error(transparent)]
    Net(#[from] virtio::net::NetError),
    /// A device of the host can't be passed on.
    #[error(transparent)]
    Vfio(#[from] vfio::VfioError),
    /// The VM asks for more than the host or tare offers.
    #[error("{0}")]
    TooMuch(String),
    /// The host refused something every VM needs.
    #[error("cannot {what}: {source}; see `tare doctor` for the host's limits")]
    Host {
        /// What was tried.
        what: &'static str,
        /// The host's reason.
        source: io::Error,
    },
}

/// Names what was tried for an I/O error.
pub(crate) fn host(what: &'static str) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Host { what, source }
}
