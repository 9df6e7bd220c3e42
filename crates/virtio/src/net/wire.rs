// SPDX-License-Identifier: Apache-2.0
//! What the host's end of a NIC is to the worker, and why there may be none.
//!
//! The worker owns its wire; nothing here waits: a call that would gives [`io::ErrorKind::WouldBlock`], and the worker comes
//! again when the descriptor is ready. Any other error means that the wire is gone for good.

use std::io;
use std::os::fd::RawFd;

use base::Seg;

use super::outbox::Outbox;

/// The host's end of a NIC. Packets are those of a guest: a virtio header of [`super::HEADER`] bytes, then a frame.
pub trait Wire: Send {
    /// What is ready when there is a packet or room for one.
    fn fd(&self) -> RawFd;

    /// Device features that this wire can stand for, offloads among them.
    fn features(&self) -> u64;

    /// An outbox as this wire wants its packets.
    fn outbox(&self) -> Outbox;

    /// The driver takes packets with these of the offloads in [`super::feature::GUEST_OFFLOADS`].
    ///
    /// # Errors
    /// When the host refuses them.
    fn accept_offloads(&mut self, features: u64) -> io::Result<()>;

    /// Bytes of room that are enough for any packet.
    fn longest(&self) -> usize;

    /// Bytes of room that the next packet takes, if there is one, where there is room for `room` now.
    ///
    /// # Errors
    /// `WouldBlock`: there is none.
    fn want(&mut self, room: usize) -> io::Result<usize>;

    /// Receives the next packet into `room`, which holds what [`Wire::want`] asked for; gives its length. A stream that has
    /// only a part of it keeps its place and wants the same room again.
    ///
    /// # Errors
    /// `WouldBlock`: the (rest of the) packet is not there yet.
    fn receive(&mut self, room: &[Seg]) -> io::Result<usize>;

    /// Forgets the packet that [`Wire::want`] spoke of, or the rest of it.
    fn skip(&mut self);

    /// Sends what `out` holds.
    ///
    /// # Errors
    /// `WouldBlock`: not all of it.
    fn send(&mut self, out: &mut Outbox) -> io::Result<()>;

    /// Bytes moved so far, both ways, and whether a packet is received in part.
    fn progress(&self) -> (u64, bool);

    /// The driver goes: guest memory may not be touched any more, whatever is half done.
    fn suspend(&mut self, out: &mut Outbox);

    /// What to tell the user after `error` ended the wire.
    fn epitaph(&mut self, error: &io::Error) -> String;
}

/// Why a NIC can't be made.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// passt can't be started.
    #[error("passt can't be started, {source}: net{number}; install the package passt, or use kind=tap")]
    Passt {
        /// Which NIC.
        number: usize,
        /// The host's reason.
        source: io::Error,
    },
    /// The tap can't be used.
    #[error("tap {name} can't be used, {source}: net{number}; {hint}")]
    Tap {
        /// Which NIC.
        number: usize,
        /// The tap's name, or its descriptor.
        name: String,
        /// The host's reason.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// A descriptor that was passed in is not what it should be.
    #[error("descriptor {fd} is not {want}: net{number}; open it in the program that starts tare")]
    Descriptor {
        /// Which NIC.
        number: usize,
        /// The descriptor.
        fd: u32,
        /// What it should be.
        want: &'static str,
    },
    /// The host is out of descriptors.
    #[error("eventfd can't be made, {source}: net{number}; see `tare doctor` for the host's limits")]
    Host {
        /// Which NIC.
        number: usize,
        /// The host's reason.
        source: io::Error,
    },
}
