// SPDX-License-Identifier: Apache-2.0
//! A tap as a wire: whole packets with their virtio header, between guest memory and the kernel without a copy of ours.
//! Opened where the device is made, used on the worker's thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use base::Seg;

use super::outbox::Outbox;
use super::wire::{NetError, Wire};
use super::{HEADER, feature, sys};
use crate::queue::copy_in;

/// A packet of a guest that takes large segments: header, Ethernet header, the largest IP packet.
const LARGE: usize = HEADER + 14 + 65535;
/// Ethernet header and a VLAN tag.
const LINK: usize = 18;

/// What every tap can do.
const FEATURES: u64 = feature::CSUM
    | feature::HOST_TSO4
    | feature::HOST_TSO6
    | feature::HOST_ECN
    | feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_ECN
    | feature::CTRL_GUEST_OFFLOADS;
/// What some can: features, and what to ask for.
const UDP: [(u64, libc::c_uint); 2] = [
    (feature::HOST_UFO | feature::GUEST_UFO, libc::TUN_F_UFO),
    (feature::HOST_USO | feature::GUEST_USO4 | feature::GUEST_USO6, libc::TUN_F_USO4 | libc::TUN_F_USO6),
];

/// A tap.
pub struct Tap {
    fd: OwnedFd,
    /// For the user.
    name: String,
    mtu: u16,
    features: u64,
    longest: usize,
    /// A packet that was read before there was room for it, and its length; 0: none.
    early: Vec<u8>,
    held: usize,
    /// What is read into it was too much.
    spill: [u8; 1],
    segs: Vec<Seg>,
    moved: u64,
}

impl Tap {
    /// Opens the tap called `name`, or makes one where the user may, for NIC `number`; with `several` one more queue of it.
    ///
    /// # Errors
    /// [`NetError::Tap`].
    pub fn open(number: usize, name: &str, mtu: u16, several: bool) -> Result<Self, NetError> {
        let hint = if several {
            "make it with `ip tuntap add NAME mode tap vnet_hdr multi_queue user YOU`, as root"
        } else {
            "make it with `ip tuntap add NAME mode tap vnet_hdr user YOU`, as root"
        };
        let bad = |source| NetError::Tap { number, name: name.to_owned(), source, hint };
        let file = sys::open_tap(name, several).map_err(bad)?;
        Self::new(file.into(), format!("tap {name}"), mtu).map_err(bad)
    }

    /// Uses the tap behind descriptor `fd`, which the user passed in.
    ///
    /// # Errors
    /// [`NetError::Descriptor`].
    pub fn adopt(number: usize, fd: u32, mtu: u16) -> Result<Self, NetError> {
        let bad = |want| NetError::Descriptor { number, fd, want };
        let own = sys::duplicate(fd).map_err(|_| bad("open"))?;
        match sys::adopt_tap(&own) {
            None => Err(bad("a tap")),
            Some(false) => Err(bad("a tap with IFF_VNET_HDR")),
            Some(true) => {
                Self::new(own, format!("the tap on descriptor {fd}"), mtu).map_err(|_| bad("usable as a tap"))
            }
        }
    }

    /// The name of its interface.
    pub fn interface(&self) -> Option<String> {
        sys::tap_name(&self.fd)
    }

    /// The queue of the tap.
    pub fn queue(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn new(fd: OwnedFd, name: String, mtu: u16) -> io::Result<Self> {
        sys::set_header(&fd, HEADER)?;
        let (early, segs) = (Vec::new(), Vec::new());
        let mut tap =
            Self { fd, name, mtu, features: FEATURES, longest: LARGE, early, held: 0, spill: [0], segs, moved: 0 };
        // Kernels differ in what they know of UDP.
        for (bits, flags) in UDP {
            if sys::set_offloads(&tap.fd, libc::TUN_F_CSUM | flags).is_ok() {
                tap.features |= bits;
            }
        }
        tap.accept_offloads(0)?;
        Ok(tap)
    }
}

impl Wire for Tap {
    fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn outbox(&self) -> Outbox {
        Outbox::packets()
    }

    fn accept_offloads(&mut self, features: u64) -> io::Result<()> {
        let mut offloads = 0;
        // The kernel takes the others only with checksums.
        if features & feature::GUEST_CSUM != 0 {
            let pairs = [
                (feature::GUEST_CSUM, libc::TUN_F_CSUM),
                (feature::GUEST_TSO4, libc::TUN_F_TSO4),
                (feature::GUEST_TSO6, libc::TUN_F_TSO6),
                (feature::GUEST_ECN, libc::TUN_F_TSO_ECN),
                (feature::GUEST_UFO, libc::TUN_F_UFO),
                (feature::GUEST_USO4, libc::TUN_F_USO4),
                (feature::GUEST_USO6, libc::TUN_F_USO6),
            ];
            offloads = pairs.iter().filter(|(bit, _)| features & bit != 0).fold(0, |sum, (_, flag)| sum | flag);
            // Of these it takes both or none.
            let both = libc::TUN_F_USO4 | libc::TUN_F_USO6;
            if offloads & both != both {
                offloads &= !both;
            }
        }
        sys::set_offloads(&self.fd, offloads)?;
        let large = offloads & !libc::TUN_F_CSUM != 0;
        self.longest = if large { LARGE } else { HEADER + LINK + usize::from(self.mtu.max(1500)) };
        Ok(())
    }

    fn longest(&self) -> usize {
        self.longest
    }

    /// A tap does not say how long its next packet is. Where there is no room for any, it is read first and copied later.
    fn want(&mut self, room: usize) -> io::Result<usize> {
        if self.held == 0 {
            if room >= self.longest {
                return Ok(self.longest);
            }
            self.early.resize(LARGE, 0);
            let segs = [Seg { ptr: self.early.as_mut_ptr(), len: LARGE }];
            self.held = sys::read(&self.fd, &segs)?;
            self.moved += self.held as u64;
        }
        Ok(self.held)
    }

    fn receive(&mut self, room: &[Seg]) -> io::Result<usize> {
        if self.held > 0 {
            let held = std::mem::take(&mut self.held);
            return Ok(copy_in(room, 0, self.early.get(..held).unwrap_or_default()));
        }
        let len: usize = room.iter().map(|seg| seg.len).sum();
        self.segs.clear();
        self.segs.extend_from_slice(room);
        self.segs.push(Seg { ptr: self.spill.as_mut_ptr(), len: 1 });
        loop {
            let got = sys::read(&self.fd, &self.segs)?;
            self.moved += got as u64;
            // Longer than the guest said that it takes, or no packet: neither is for it.
            if (HEADER..=len).contains(&got) {
                return Ok(got);
            }
        }
    }

    fn skip(&mut self) {
        self.held = 0;
    }

    fn send(&mut self, out: &mut Outbox) -> io::Result<()> {
        while let Some(packet) = out.first() {
            match sys::write(&self.fd, packet) {
                Ok(bytes) => {
                    self.moved += bytes as u64;
                    out.finish_first(true);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Err(e),
                Err(e) if is_gone(&e) => return Err(e),
                // An interface that is down, or a header that the kernel does not like.
                Err(_) => out.finish_first(false),
            }
        }
        Ok(())
    }

    fn progress(&self) -> (u64, bool) {
        (self.moved, false)
    }

    fn suspend(&mut self, out: &mut Outbox) {
        out.clear();
    }

    fn epitaph(&mut self, error: &io::Error) -> String {
        if is_gone(error) { format!("{} is gone", self.name) } else { format!("{} failed, {error}", self.name) }
    }
}

/// The interface was removed, not just switched off.
fn is_gone(error: &io::Error) -> bool {
    let gone = [libc::EBADFD, libc::EBADF, libc::ENODEV, libc::ENXIO, libc::EFAULT];
    error.raw_os_error().is_some_and(|code| gone.contains(&code))
}
