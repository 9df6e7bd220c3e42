// SPDX-License-Identifier: Apache-2.0
//! A guest with one block device, without PCI: memory, one queue, a face that counts interrupts.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::{EFD_NONBLOCK, EventFd, Gpa};
use block::{Disk, MemImage};
use mem::GuestRam;
pub use testkit::Rng;
use testkit::sink::RecordingLine;
use testkit::{Buf, GuestQueue};
use virtio::blk::Blk;
use virtio::device::{Activation, ActiveQueue, DeviceStatus, QueueIrq, VirtioDevice, status};
use virtio::features;

pub const IN: u32 = 0;
pub const OUT: u32 = 1;
pub const FLUSH: u32 = 4;
pub const GET_ID: u32 = 8;
pub const DISCARD: u32 = 11;
pub const WRITE_ZEROES: u32 = 13;

pub const OK: u8 = 0;
pub const IOERR: u8 = 1;
pub const UNSUPP: u8 = 2;

/// Entries of the queue.
pub const SIZE: u16 = 256;
const RAM: u64 = 24 << 20;
/// Where request memory starts; rings and indirect tables lie below.
const HEAP: u64 = 1 << 20;
const TABLES: u64 = 64 << 10;

pub fn header(kind: u32, sector: u64) -> Vec<u8> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0xaa; 4]);
    bytes.extend(sector.to_le_bytes());
    bytes
}

pub fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    let mut bytes = sector.to_le_bytes().to_vec();
    bytes.extend(sectors.to_le_bytes());
    bytes.extend(flags.to_le_bytes());
    bytes
}

/// What came back for a request.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply {
    pub status: u8,
    pub data: Vec<u8>,
    /// The used element's length.
    pub written: u32,
}

/// Where a sent request's writable bytes are, in order.
struct Sent {
    writable: Vec<(Gpa, u32)>,
}

pub struct Rig {
    pub ram: GuestRam,
    pub queue: GuestQueue,
    pub device: Blk,
    pub irq: Arc<RecordingLine>,
    pub status: Arc<DeviceStatus>,
    pub kick: EventFd,
    agreed: u64,
    sent: HashMap<u16, Sent>,
    replies: HashMap<u16, Reply>,
    heap: u64,
}

impl Rig {
    pub fn memory(size: usize) -> (Self, MemImage) {
        let image = MemImage::new(Rng::new(77).bytes(size));
        (Self::new(Disk::in_memory(&image, false), &spec::Disk::new("memory")), image)
    }

    /// A driver that takes all that is offered.
    pub fn new(disk: Disk, spec: &spec::Disk) -> Self {
        Self::of(Blk::new(disk, spec), features::TRANSPORT | u64::MAX >> 40)
    }

    pub fn with_features(disk: Disk, spec: &spec::Disk, agreed: u64) -> Self {
        Self::of(Blk::new(disk, spec), agreed)
    }

    pub fn of(device: Blk, wanted: u64) -> Self {
        let agreed = wanted & (device.features() | features::TRANSPORT);
        let ram = testkit::ram(RAM);
        let queue = GuestQueue::new(&ram, 0x1000, SIZE);
        let irq = Arc::new(RecordingLine::default());
        let status = Arc::new(DeviceStatus::new(irq.clone()));
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        let mut rig = Self {
            ram,
            queue,
            device,
            agreed,
            irq,
            status,
            kick,
            sent: HashMap::new(),
            replies: HashMap::new(),
            heap: HEAP,
        };
        rig.activate(agreed);
        rig
    }

    /// Hands the queue to the device, as the transport does at `DRIVER_OK`.
    pub fn activate(&mut self, agreed: u64) {
        let ring = self.queue.config().activate(&self.ram, agreed).unwrap();
        let irq = QueueIrq::new(self.irq.clone(), 0);
        let queues = vec![ActiveQueue { index: 0, ring, kick: self.kick.try_clone().unwrap(), irq }];
        let activation = Activation { ram: self.ram.clone(), features: agreed, queues, status: self.status.clone() };
        self.device.activate(activation).unwrap();
    }

    /// Resets the device and starts over with empty rings.
    pub fn restart(&mut self) {
        self.device.reset();
        self.queue = GuestQueue::new(&self.ram, 0x1000, SIZE);
        self.sent.clear();
        self.status = Arc::new(DeviceStatus::new(self.irq.clone()));
        self.activate(self.agreed);
    }

    /// A place for `len` bytes, `gap` bytes past the last.
    pub fn place(&mut self, len: usize, gap: u64) -> u64 {
        if self.heap + gap + len as u64 + 64 > RAM {
            assert!(self.sent.is_empty(), "memory is used again only when nothing is in flight");
            self.heap = HEAP;
        }
        let at = self.heap + gap;
        self.heap = at + len as u64;
        at
    }

    /// Readable buffers holding `bytes`, cut into pieces of the given lengths (the last takes the rest).
    pub fn readable(&mut self, bytes: &[u8], cuts: &[usize]) -> Vec<Buf> {
        let mut bufs = Vec::new();
        let mut rest = bytes;
        for &cut in cuts.iter().chain([&usize::MAX]) {
            let (piece, tail) = rest.split_at(cut.min(rest.len()));
            if !piece.is_empty() {
                let at = self.place(piece.len(), 3);
                self.ram.write_bytes(Gpa(at), piece).unwrap();
                bufs.push(Buf::read(at, piece.len() as u32));
            }
            rest = tail;
        }
        bufs
    }

    /// Writable buffers of `len` bytes in all, filled with 0xcc, cut like [`Self::readable`].
    pub fn writable(&mut self, len: usize, cuts: &[usize]) -> Vec<Buf> {
        let bufs = self.readable(&vec![0xcc; len], cuts);
        bufs.into_iter().map(|b| Buf { write: true, ..b }).collect()
    }

    /// Publishes a chain without kicking.
    pub fn publish(&mut self, bufs: &[Buf]) -> u16 {
        let head = self.queue.send(bufs);
        self.remember(head, bufs);
        head
    }

    /// The same with an indirect table.
    pub fn publish_indirect(&mut self, bufs: &[Buf]) -> u16 {
        // One table a head is enough: a head has one chain at a time. 64 descriptors each.
        assert!(bufs.len() <= 64);
        let free = self.queue.free() as u64;
        let head = self.queue.add_indirect(TABLES + free * 64 * 16, bufs).unwrap();
        self.queue.publish(head);
        self.remember(head, bufs);
        head
    }

    fn remember(&mut self, head: u16, bufs: &[Buf]) {
        let writable = bufs.iter().filter(|b| b.write).map(|b| (b.at, b.len)).collect();
        assert!(self.sent.insert(head, Sent { writable }).is_none());
    }

    pub fn kick(&self) {
        self.kick.write(1).unwrap();
    }

    /// Collects what the device gave back.
    pub fn collect(&mut self) {
        while let Some((head, written)) = self.queue.used() {
            let sent = self.sent.remove(&head).expect("the device gave back what it was given, once");
            let mut data = Vec::new();
            for (at, len) in sent.writable {
                let mut piece = vec![0; len as usize];
                self.ram.read_bytes(at, &mut piece).unwrap();
                data.extend(piece);
            }
            let status = data.pop().unwrap_or(0xff);
            self.replies.insert(head, Reply { status, data, written });
        }
    }

    /// Waits for the answer to `head`.
    pub fn wait(&mut self, head: u16) -> Reply {
        let start = Instant::now();
        loop {
            self.collect();
            if let Some(reply) = self.replies.remove(&head) {
                return reply;
            }
            assert!(start.elapsed() < Duration::from_secs(60), "no answer to {head}");
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Whether `head` was answered by now.
    pub fn answered(&mut self, head: u16) -> bool {
        self.collect();
        self.replies.contains_key(&head)
    }

    /// Publishes, kicks and waits.
    pub fn ask(&mut self, bufs: &[Buf]) -> Reply {
        let head = self.publish(bufs);
        self.kick();
        self.wait(head)
    }

    /// A whole request: header and `out` in one readable buffer, `room` bytes and the status in one writable.
    pub fn request(&mut self, kind: u32, sector: u64, out: &[u8], room: usize) -> Reply {
        let mut bytes = header(kind, sector);
        bytes.extend(out);
        let mut bufs = self.readable(&bytes, &[]);
        bufs.extend(self.writable(room + 1, &[]));
        self.ask(&bufs)
    }

    /// Waits until the device says that it needs a reset.
    pub fn wait_broken(&self) {
        let start = Instant::now();
        while self.status.get() & status::NEEDS_RESET == 0 {
            assert!(start.elapsed() < Duration::from_secs(60), "the device never gave up");
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}
