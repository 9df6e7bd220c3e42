// SPDX-License-Identifier: Apache-2.0
//! One fuzz input for a whole device behind one of its faces: what a hostile guest writes into memory and registers, in
//! whatever order, while something happens at the host's end.
//!
//! `fuzz/fuzz_targets` has a target for each kind of device; `cargo test -p virtio --test queue_model` runs them on random
//! bytes. The first byte says which face (0x80), which features, and what the device is like; see [`crate::ops`].

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use base::Gpa;
use base::mmap::Mmap;
use block::{Disk, MemImage};
use mem::{GuestRam, Hot};
use virtio::blk::Blk;
use virtio::console::TerminalSize;
use virtio::device::{VirtioDevice, status};
use virtio::mem::{MemDevice, Place};
use virtio::net::{Net, feature};
use virtio::{Console, Rng};

use crate::driver::GuestQueue;
use crate::faces::{MmioFace, PciFace};
use crate::guest::{Face, Guest};
use crate::ops::{Input, scribble, setting};

/// What the guest and its driver are like.
struct Play {
    ram: GuestRam,
    agreed: u64,
    size: u16,
    mmio: bool,
}

impl Play {
    /// Reads the setting; gives also the bits that are left for the device: four of them.
    fn new(input: &mut Input<'_>) -> (Self, u8) {
        let first = input.0.first().copied().unwrap_or_default();
        let (agreed, size, ram) = setting(input);
        (Self { ram, agreed, size, mmio: first & 0x80 != 0 }, first & 0x0f)
    }

    /// Lets the guest play with `device` until the input ends; `outside` is what happens at the host's end.
    fn run(&self, input: &mut Input<'_>, device: Box<dyn VirtioDevice>, outside: impl FnMut(&mut Input<'_>) -> bool) {
        if self.mmio {
            self.turns(input, &mut Guest::<MmioFace>::on(device, &self.ram), outside);
        } else {
            self.turns(input, &mut Guest::<PciFace>::on(device, &self.ram), outside);
        }
    }

    fn turns<F: Face>(
        &self,
        input: &mut Input<'_>,
        guest: &mut Guest<F>,
        mut outside: impl FnMut(&mut Input<'_>) -> bool,
    ) {
        let count = guest.queue_count();
        let at = |index: u16| 0x1000 + u64::from(index) * 0x2000;
        let mut queues: Vec<_> = (0..count).map(|i| GuestQueue::new(&self.ram, at(i), self.size)).collect();
        let agreed = self.agreed & guest.offered();
        guest.start(agreed, &queues.iter().collect::<Vec<_>>());
        while !input.is_empty() {
            let op = input.u8();
            let which = usize::from(op >> 4) % queues.len().max(1);
            match op % 16 {
                0..9 => {
                    if let Some(queue) = queues.get_mut(which) {
                        scribble(op % 16, input, &self.ram, queue, self.size);
                    }
                }
                9..11 => guest.kick(which as u16),
                11 => {
                    if outside(input) {
                        guest.face.update_config();
                    }
                }
                12 | 13 => {
                    let (at, len) = (u64::from(input.u16() & 0x7fff), usize::from(input.u8() % 9));
                    let mut value = [0; 8];
                    if op % 16 == 13 {
                        value = u64::from(input.u32()).to_le_bytes();
                    }
                    guest.face.raw(at, &mut value[..len], op % 16 == 13);
                }
                14 => {
                    // A step of a driver, out of turn.
                    guest.set_status(input.u8());
                    guest.face.signalled(Some(which as u16));
                }
                _ => {
                    guest.negotiate(agreed);
                    guest.face.arm();
                    for (queue, index) in queues.iter().zip(0u16..) {
                        guest.set_queue(index, queue);
                    }
                    guest.set_status(0xf);
                }
            }
        }
        guest.face.power_on();
        assert_eq!(guest.face.core().status(), 0, "a reset always ends it");
        // Whatever happened, a driver that behaves gets its device back.
        assert!(guest.negotiate(agreed), "and it begins anew");
        guest.set_status(0xf);
        assert_eq!(guest.face.core().status() & !status::NEEDS_RESET, 0xf);
    }
}

/// Runs one input on a disk: writable or not, with one queue or three, and one thread or one a queue; its size changes.
///
/// # Panics
/// When the device does, or the host has no memory, descriptors or threads.
pub fn blk_ops(data: &[u8]) {
    let mut input = Input(data);
    let (play, like) = Play::new(&mut input);
    let disk = Disk::in_memory(&MemImage::new(vec![0x11; 64 * 512]), like & 1 != 0);
    let queues = if like & 2 == 0 { 1 } else { 3 };
    let threads = if like & 4 == 0 { spec::DiskThreads::PerQueue } else { spec::DiskThreads::Shared };
    let spec = spec::Disk { queues: Some(queues), threads, ..spec::Disk::new("memory") };
    let device = Blk::new(disk, &spec);
    let Ok(control) = device.control() else { panic!("descriptors for a test disk") };
    play.run(&mut input, Box::new(device), |input| {
        // A read-only disk refuses, and so does a disk to shrink.
        let _ = control.resize(u64::from(input.u8()) * 512);
        true
    });
}

/// Runs one input on a network device on one end of a socket; what comes from outside is bytes on the other.
///
/// # Panics
/// As [`blk_ops`].
pub fn net_ops(data: &[u8]) {
    let mut input = Input(data);
    let (mut play, like) = Play::new(&mut input);
    let Ok((mut peer, wire)) = UnixStream::pair() else { panic!("a socket pair") };
    let spec = spec::Net {
        fd: spec::Descriptors(u32::try_from(wire.as_raw_fd()).into_iter().collect()),
        ..spec::Net::default()
    };
    let Ok(device) = Net::open(&spec, 0) else { panic!("a device on a socket") };
    play.agreed |= feature::CTRL_VQ | feature::CTRL_RX | feature::CTRL_MAC_ADDR;
    play.agreed |= if like & 1 == 0 { feature::MRG_RXBUF } else { 0 };
    play.run(&mut input, Box::new(device), |input| {
        let (len, lie) = (usize::from(input.u16() & 0x7ff), input.u8());
        let mut bytes = vec![lie; len];
        if lie != 0 {
            bytes.splice(..0, (len as u32).to_be_bytes());
        }
        // The device may be slow, or gone after a lie.
        let _ = peer.set_nonblocking(true).and_then(|()| peer.write(&bytes));
        false
    });
}

/// Runs one input on a console whose output takes everything, or is full for good.
///
/// # Panics
/// As [`blk_ops`].
pub fn console_ops(data: &[u8]) {
    let mut input = Input(data);
    let (play, like) = Play::new(&mut input);
    // A pipe that nobody empties gets full and stays so.
    let (_reader, writer) = if like & 1 != 0 { pipe() } else { (None, File::options().write(true).open("/dev/null")) };
    let Ok(writer) = writer else { panic!("descriptors for a test console") };
    let size = (like & 2 != 0).then_some(TerminalSize { columns: 80, rows: 25 });
    let Ok((console, mut port)) = Console::new(&writer, size) else { panic!("descriptors for a test console") };
    play.run(&mut input, Box::new(console), |input| {
        let what = input.u8();
        let bytes = vec![0x55; usize::from(input.u8()) * 8];
        assert!(port.input(&bytes) <= bytes.len());
        port.on_ready(u64::from(what & 1));
        if what & 2 != 0 {
            port.resize(TerminalSize { columns: u16::from(what), rows: 1 });
        }
        false
    });
}

/// Runs one input on the entropy device.
///
/// # Panics
/// As [`blk_ops`].
pub fn rng_ops(data: &[u8]) {
    let mut input = Input(data);
    let (play, _) = Play::new(&mut input);
    play.run(&mut input, Box::new(Rng::new()), |_| false);
}

/// What a memory device asks of its machine, done at once, or refused every so many times.
pub struct Places {
    hot: Arc<Hot>,
    refuse: Option<u64>,
    asked: u64,
}

impl Places {
    /// Over `hot`; the host has no more each `refuse`-th time, if ever.
    #[must_use]
    pub const fn new(hot: Arc<Hot>, refuse: Option<u64>) -> Self {
        Self { hot, refuse, asked: 0 }
    }
}

impl Place for Places {
    fn plug(&mut self, at: Gpa, len: u64) -> io::Result<()> {
        assert!(!self.hot.is_any_plugged(at, len), "nothing is plugged twice");
        self.asked += 1;
        if self.refuse.is_some_and(|each| self.asked.is_multiple_of(each)) {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        Ok(())
    }

    fn unplug(&mut self, at: Gpa, len: u64) -> io::Result<()> {
        assert!(!self.hot.is_any_plugged(at, len), "nobody finds it any more");
        self.hot.discard(at, len)
    }
}

/// Where [`hot_ram`] has memory to plug.
pub const HOT: Gpa = Gpa(0x1_0000_0000);

/// Guest memory of 1 MiB, and `blocks` blocks of 2 MiB to plug, from [`HOT`] on.
///
/// # Panics
/// When the host has none.
#[must_use]
#[allow(clippy::expect_used)] // a test without memory can only stop
pub fn hot_ram(blocks: u64) -> (GuestRam, Arc<Hot>) {
    let behind = Mmap::anonymous((blocks << 21) as usize).expect("memory for a test guest");
    let hot = Hot::new(HOT, behind, 2 << 20, false).expect("whole blocks");
    let ram = crate::ram(0x10_0000).with_hot(hot).expect("memory past the rest");
    let hot = ram.hot().expect("it was just put there").clone();
    (ram, hot)
}

/// Runs one input on the memory device, whose host changes its mind and may run out of memory. Whatever the driver does, what
/// is plugged is what it was granted.
///
/// # Panics
/// As [`blk_ops`].
pub fn mem_ops(data: &[u8]) {
    let mut input = Input(data);
    let (mut play, like) = Play::new(&mut input);
    let (ram, hot) = hot_ram(200);
    play.ram = ram;
    let refuse = (like & 1 != 0).then_some(3);
    let device = MemDevice::new(hot.clone(), Box::new(Places::new(hot.clone(), refuse)), 16 << 21);
    let control = device.control();
    // A request that makes sense is where the first chain of a driver that behaves would have it.
    let request = [&[0u8; 8][..], &HOT.0.to_le_bytes(), &[2, 0, 0, 0, 0, 0, 0, 0]].concat();
    let _ = play.ram.write_bytes(Gpa(0x8000), &request);
    let mut most = control.requested();
    play.run(&mut input, Box::new(device), |input| {
        let _ = control.request(u64::from(input.u8()) << 21);
        most = most.max(control.requested());
        let marked = (0..200).filter(|block| hot.is_plugged(Gpa(HOT.0 + (block << 21)), 1)).count() as u64;
        assert_eq!(marked << 21, control.plugged(), "what is counted is what is marked");
        assert!(control.plugged() <= most, "and no more than was ever granted");
        true
    });
}

/// A pipe.
fn pipe() -> (Option<OwnedFd>, io::Result<File>) {
    let Ok((reader, writer)) = io::pipe() else { return (None, Err(io::ErrorKind::Other.into())) };
    (Some(reader.into()), Ok(File::from(OwnedFd::from(writer))))
}
