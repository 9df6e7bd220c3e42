// SPDX-License-Identifier: Apache-2.0
//! A guest with one block device of several queues, without PCI: a face that counts interrupts by queue.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use base::{EFD_NONBLOCK, EventFd, Gpa};
use mem::GuestRam;
use testkit::conformance::eventually;
use testkit::{Buf, GuestQueue};
use virtio::blk::Blk;
use virtio::device::{Activation, ActiveQueue, DeviceStatus, QueueIrq, VirtioDevice};
use virtio::{Interrupt, features};

use crate::rig::header;

const SIZE: u16 = 64;
const RAM: u64 = 32 << 20;
/// Where the buffers of queue 0 start; each queue has as much as this.
const HEAP: u64 = 2 << 20;

/// Counts interrupts.
#[derive(Default)]
pub struct Face {
    pub queues: [AtomicUsize; 8],
    pub config: AtomicUsize,
}

impl Interrupt for Face {
    fn queue(&self, index: u16) {
        self.queues[usize::from(index)].fetch_add(1, Ordering::SeqCst);
    }

    fn config(&self) {
        self.config.fetch_add(1, Ordering::SeqCst);
    }
}

/// One queue as the guest has it.
pub struct Lane {
    pub queue: GuestQueue,
    pub kick: EventFd,
    /// By head: where the status byte is, and the data before it.
    sent: HashMap<u16, (u64, u64, usize)>,
    replies: HashMap<u16, (u8, Vec<u8>)>,
    heap: std::ops::Range<u64>,
    next: u64,
}

pub struct Several {
    pub ram: GuestRam,
    pub device: Blk,
    pub face: Arc<Face>,
    pub status: Arc<DeviceStatus>,
    pub lanes: Vec<Lane>,
    agreed: u64,
}

impl Several {
    pub fn new(device: Blk) -> Self {
        let ram = testkit::ram(RAM);
        let face = Arc::new(Face::default());
        let agreed = device.features() | features::TRANSPORT;
        let lanes = (0..device.queue_sizes().len() as u64).map(|i| Lane::new(&ram, i)).collect();
        let mut out = Self { status: Arc::new(DeviceStatus::new(face.clone())), ram, device, face, lanes, agreed };
        out.activate(&[]);
        out
    }

    /// Hands the queues to the device, but for some.
    pub fn activate(&mut self, without: &[u16]) {
        let queues = (0u16..).zip(&self.lanes).filter(|(index, _)| !without.contains(index));
        let queues = queues
            .map(|(index, lane)| ActiveQueue {
                index,
                ring: lane.queue.config().activate(&self.ram, self.agreed).unwrap(),
                kick: lane.kick.try_clone().unwrap(),
                irq: QueueIrq::new(self.face.clone(), index),
            })
            .collect();
        let status = self.status.clone();
        let activation = Activation { ram: self.ram.clone(), features: self.agreed, queues, status };
        self.device.activate(activation).unwrap();
    }

    /// Resets the device and starts over with empty rings.
    pub fn restart(&mut self) {
        self.device.reset();
        self.lanes = (0..self.lanes.len() as u64).map(|i| Lane::new(&self.ram, i)).collect();
        self.status = Arc::new(DeviceStatus::new(self.face.clone()));
        self.activate(&[]);
    }

    /// Publishes a request without kicking: header and `out` to read, `room` bytes and the status to write.
    pub fn publish(&mut self, lane: usize, kind: u32, sector: u64, out: &[u8], room: usize) -> u16 {
        let mut bytes = header(kind, sector);
        bytes.extend(out);
        self.lanes[lane].publish(&self.ram, &bytes, room)
    }

    pub fn kick(&self, lane: usize) {
        self.lanes[lane].kick.write(1).unwrap();
    }

    /// Waits for the answer: status and data.
    pub fn wait(&mut self, lane: usize, head: u16) -> (u8, Vec<u8>) {
        let Self { lanes, ram, .. } = self;
        eventually("the answer", || lanes[lane].answered(ram, head));
        lanes[lane].replies.remove(&head).unwrap()
    }

    /// Whether it was answered by now.
    pub fn answered(&mut self, lane: usize, head: u16) -> bool {
        self.lanes[lane].answered(&self.ram, head)
    }

    /// Answers that nobody has waited for, over all queues.
    pub fn answers(&mut self) -> usize {
        let ram = self.ram.clone();
        self.lanes.iter_mut().map(|lane| lane.collect(&ram)).sum()
    }

    /// Publishes, kicks and waits.
    pub fn ask(&mut self, lane: usize, kind: u32, sector: u64, out: &[u8], room: usize) -> (u8, Vec<u8>) {
        let head = self.publish(lane, kind, sector, out, room);
        self.kick(lane);
        self.wait(lane, head)
    }

    pub fn interrupts(&self, lane: usize) -> usize {
        self.face.queues[lane].load(Ordering::SeqCst)
    }
}

impl Lane {
    fn new(ram: &GuestRam, index: u64) -> Self {
        Self {
            queue: GuestQueue::new(ram, 0x1000 + 0x2000 * index, SIZE),
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            sent: HashMap::new(),
            replies: HashMap::new(),
            heap: HEAP * (index + 1)..HEAP * (index + 2),
            next: HEAP * (index + 1),
        }
    }

    fn publish(&mut self, ram: &GuestRam, bytes: &[u8], room: usize) -> u16 {
        let len = (bytes.len() + room + 1) as u64;
        if self.next + len > self.heap.end {
            assert!(self.sent.is_empty(), "memory is used again only when nothing is in flight");
            self.next = self.heap.start;
        }
        let (at, data) = (self.next, self.next + bytes.len() as u64);
        self.next += len;
        ram.write_bytes(Gpa(at), bytes).unwrap();
        let head = self.queue.send(&[Buf::read(at, bytes.len() as u32), Buf::write(data, room as u32 + 1)]);
        self.sent.insert(head, (data + room as u64, data, room));
        // An answer that nobody fetched is not this request's.
        self.replies.remove(&head);
        head
    }

    fn collect(&mut self, ram: &GuestRam) -> usize {
        while let Some((head, _)) = self.queue.used() {
            let (status, at, room) = self.sent.remove(&head).expect("the device gave back what it was given, once");
            let mut data = vec![0; room];
            ram.read_bytes(Gpa(at), &mut data).unwrap();
            self.replies.insert(head, (ram.read::<u8>(Gpa(status)).unwrap(), data));
        }
        self.replies.len()
    }

    fn answered(&mut self, ram: &GuestRam, head: u16) -> bool {
        self.collect(ram);
        self.replies.contains_key(&head)
    }
}

/// A description with these queues.
pub fn with_queues(queues: u16, threads: spec::DiskThreads) -> spec::Disk {
    spec::Disk { queues: Some(queues), threads, ..spec::Disk::new("memory") }
}

pub const BOTH: [spec::DiskThreads; 2] = [spec::DiskThreads::PerQueue, spec::DiskThreads::Shared];
