// SPDX-License-Identifier: Apache-2.0
//! vhost-net: the host's kernel serves a pair of queues. It gets the rings, the kicks and the interrupts, and moves packets
//! between guest memory and the tap without tare; what is left is the control queue and a look at the tap now and then.
//!
//! Called on the thread that makes the device and on the pair's worker. Not with rust-vmm's `vhost`: it opens the device
//! itself, and a descriptor that was passed in can't be given to it.

use std::fs::OpenOptions;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;

use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::reach::{MOST, Reaches, Run, VhostMemory};
use super::{feature, sys};
use crate::device::ActiveQueue;
use crate::features;

/// Where it is.
const PATH: &str = "/dev/vhost-net";

/// `struct vhost_vring_state`.
#[repr(C)]
struct State {
    index: u32,
    number: u32,
}

/// `struct vhost_vring_file`.
#[repr(C)]
struct File {
    index: u32,
    fd: RawFd,
}

/// `struct vhost_vring_addr`.
#[repr(C)]
struct Places {
    index: u32,
    flags: u32,
    desc: u64,
    used: u64,
    avail: u64,
    log: u64,
}

/// `struct vhost_memory_region`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    guest: u64,
    len: u64,
    host: u64,
    flags: u64,
}

/// `struct vhost_memory` with its regions.
#[repr(C)]
struct Memory {
    count: u32,
    padding: u32,
    regions: [Region; MOST],
}

/// The number of a request: `_IOW`, or `_IOR` and `_IOWR` with `read`.
const fn request(read: bool, write: bool, number: u8, len: usize) -> libc::c_ulong {
    (read as libc::c_ulong) << 31
        | (write as libc::c_ulong) << 30
        | (len as libc::c_ulong) << 16
        | 0xaf << 8
        | number as libc::c_ulong
}

const GET_FEATURES: libc::c_ulong = request(true, false, 0x00, size_of::<u64>());
const SET_FEATURES: libc::c_ulong = request(false, true, 0x00, size_of::<u64>());
const SET_OWNER: libc::c_ulong = request(false, false, 0x01, 0);
/// Its size is that of the head alone.
const SET_MEM_TABLE: libc::c_ulong = request(false, true, 0x03, 8);
const SET_VRING_NUM: libc::c_ulong = request(false, true, 0x10, size_of::<State>());
const SET_VRING_ADDR: libc::c_ulong = request(false, true, 0x11, size_of::<Places>());
const SET_VRING_BASE: libc::c_ulong = request(false, true, 0x12, size_of::<State>());
const GET_VRING_BASE: libc::c_ulong = request(true, true, 0x12, size_of::<State>());
const SET_VRING_KICK: libc::c_ulong = request(false, true, 0x20, size_of::<File>());
const SET_VRING_CALL: libc::c_ulong = request(false, true, 0x21, size_of::<File>());
const SET_VRING_ERR: libc::c_ulong = request(false, true, 0x22, size_of::<File>());
const SET_BACKEND: libc::c_ulong = request(false, true, 0x30, size_of::<File>());

/// One open vhost-net device.
struct Kernel(OwnedFd);

/// One open vhost-net device, which serves one pair of queues.
pub struct Vhost {
    kernel: Arc<Kernel>,
    features: u64,
}

impl Kernel {
    fn call<T>(&self, number: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        // SAFETY: each number carries the size of the struct that the kernel reads or writes, and each caller here passes one
        // of that size (a memory table is longer than its head and says by how much). The addresses within are guest memory
        // and its rings: `Service` keeps both mapped until the kernel has given them back.
        if unsafe { libc::ioctl(self.0.as_raw_fd(), number, std::ptr::from_mut(argument)) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl Reaches for Kernel {
    fn reach(&self, runs: &[Run]) -> io::Result<()> {
        let mut table = Memory { count: 0, padding: 0, regions: [Region::default(); MOST] };
        for run in runs {
            let slot = table.regions.get_mut(table.count as usize);
            let slot = slot.ok_or_else(|| io::Error::other("guest memory is in too many pieces"))?;
            *slot = Region { guest: run.guest.0, len: run.len, host: run.host.0, flags: 0 };
            table.count += 1;
        }
        self.call(SET_MEM_TABLE, &mut table)
    }
}

impl Vhost {
    /// Opens the host's.
    ///
    /// # Errors
    /// When it is not there, or not for this user.
    pub fn open() -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(PATH)?;
        Self::new(file.into())
    }

    /// Uses the one behind descriptor `fd`, which the user passed in.
    ///
    /// # Errors
    /// When it is none, or another process has it.
    pub fn adopt(fd: u32) -> io::Result<Self> {
        Self::new(sys::duplicate(fd)?)
    }

    fn new(fd: OwnedFd) -> io::Result<Self> {
        let mut vhost = Self { kernel: Arc::new(Kernel(fd)), features: 0 };
        let mut features = 0u64;
        vhost.call(GET_FEATURES, &mut features)?;
        if features & features::VERSION_1 == 0 {
            return Err(io::Error::other("it knows no virtio 1 devices"));
        }
        vhost.call(SET_OWNER, &mut ())?;
        vhost.features = features & (features::TRANSPORT | feature::MRG_RXBUF);
        Ok(vhost)
    }

    /// Whether everything that concerns the rings among `agreed` is something it knows.
    fn knows(&self, agreed: u64) -> bool {
        agreed & (features::TRANSPORT | feature::MRG_RXBUF) & !self.features == 0
    }

    fn call<T>(&self, number: libc::c_ulong, argument: &mut T) -> io::Result<()> {
        self.kernel.call(number, argument)
    }

    fn file(&self, number: libc::c_ulong, index: u32, fd: RawFd) -> io::Result<()> {
        self.call(number, &mut File { index, fd })
    }

    /// Hands queue `index` over, all but the tap.
    fn set_ring(&self, index: u32, queue: &ActiveQueue, call: RawFd, errors: RawFd) -> io::Result<()> {
        let at = queue.ring.places();
        self.call(SET_VRING_NUM, &mut State { index, number: at.size.into() })?;
        self.call(SET_VRING_BASE, &mut State { index, number: at.next.into() })?;
        let (desc, used, avail) = (at.desc.0, at.used.0, at.avail.0);
        self.call(SET_VRING_ADDR, &mut Places { index, flags: 0, desc, used, avail, log: 0 })?;
        self.file(SET_VRING_KICK, index, queue.kick.as_raw_fd())?;
        self.file(SET_VRING_CALL, index, call)?;
        self.file(SET_VRING_ERR, index, errors)
    }

    /// Takes queue `index` back; gives where it goes on.
    fn take_ring(&self, index: u32) -> io::Result<u16> {
        self.file(SET_BACKEND, index, -1)?;
        // Kicks and signals are tare's again; failing here would only cost a wake-up.
        for number in [SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ERR] {
            let _ = self.file(number, index, -1);
        }
        let mut state = State { index, number: 0 };
        self.call(GET_VRING_BASE, &mut state)?;
        Ok(state.number as u16)
    }
}

/// A queue that the kernel serves.
struct Lent {
    index: u32,
    queue: ActiveQueue,
    /// Where the kernel signals if it can't reach the guest itself.
    relay: Option<EventFd>,
}

/// A pair of queues in the kernel's hands.
pub struct Service {
    vhost: Vhost,
    lent: Vec<Lent>,
    /// The guest broke a ring: the kernel says so here.
    pub errors: EventFd,
    /// Keeps what the kernel was given mapped.
    _memory: Arc<VhostMemory>,
}

/// Why a pair was not taken; everything comes back.
pub struct NotTaken {
    /// As it was.
    pub vhost: Vhost,
    /// As they were.
    pub queues: Vec<ActiveQueue>,
    /// The host's reason.
    pub error: io::Error,
}

impl Service {
    /// Gives `queues` (receive and transmit, or one of them) of a driver that agreed on `agreed` to the kernel, which connects
    /// them with `tap`.
    ///
    /// # Errors
    /// [`NotTaken`].
    pub fn start(
        vhost: Vhost,
        memory: &Arc<VhostMemory>,
        agreed: u64,
        queues: Vec<ActiveQueue>,
        tap: RawFd,
    ) -> Result<Self, Box<NotTaken>> {
        let errors = match EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC) {
            Ok(errors) if vhost.knows(agreed) => errors,
            Ok(_) => {
                let error = io::Error::other("it lacks a feature that the driver wants");
                return Err(Box::new(NotTaken { vhost, queues, error }));
            }
            Err(error) => return Err(Box::new(NotTaken { vhost, queues, error })),
        };
        let lent = queues.into_iter().map(|queue| Lent { index: u32::from(queue.index % 2), queue, relay: None });
        let mut service = Self { vhost, lent: lent.collect(), errors, _memory: Arc::clone(memory) };
        match service.hand_over(memory, agreed, tap) {
            Ok(()) => Ok(service),
            Err(error) => {
                let (vhost, queues) = service.stop();
                Err(Box::new(NotTaken { vhost, queues, error }))
            }
        }
    }

    fn hand_over(&mut self, memory: &VhostMemory, agreed: u64, tap: RawFd) -> io::Result<()> {
        // The tap brings the virtio header itself.
        self.vhost.call(SET_FEATURES, &mut (agreed & self.vhost.features))?;
        memory.join(&self.vhost.kernel)?;
        for lent in &mut self.lent {
            let call = match lent.queue.irq.fd() {
                Some(fd) => fd,
                None => lent.relay.insert(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?).as_raw_fd(),
            };
            self.vhost.set_ring(lent.index, &lent.queue, call, self.errors.as_raw_fd())?;
        }
        for lent in &self.lent {
            self.vhost.file(SET_BACKEND, lent.index, tap)?;
            // A first look at what is there already; only a full counter refuses, and then it is being looked at.
            let _ = lent.queue.kick.write(1);
        }
        Ok(())
    }

    /// Where the kernel signals that queue 0 (receive) or 1 (transmit) has something for the driver, if tare has to say so.
    pub fn relays(&self) -> impl Iterator<Item = (u32, &EventFd)> {
        self.lent.iter().filter_map(|lent| Some((lent.index, lent.relay.as_ref()?)))
    }

    /// The kernel signalled for queue `index`.
    pub fn relay(&self, index: u32) {
        if let Some(lent) = self.lent.iter().find(|lent| lent.index == index) {
            lent.queue.irq.notify();
        }
    }

    /// Takes everything back. The queues go on where the kernel left them.
    pub fn stop(self) -> (Vhost, Vec<ActiveQueue>) {
        let Self { vhost, lent, .. } = self;
        let mut queues = Vec::with_capacity(lent.len());
        for Lent { index, mut queue, .. } in lent {
            // A ring that the kernel does not give back is not touched again.
            if let Ok(next) = vhost.take_ring(index) {
                queue.ring.resume_at(next);
                queues.push(queue);
            }
        }
        (vhost, queues)
    }
}
