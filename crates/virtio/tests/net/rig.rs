// SPDX-License-Identifier: Apache-2.0
//! A guest with one network device, without PCI: memory, three queues, a face that counts interrupts; and the other end of a
//! `user` socket, played by the test.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::news::News;
use base::{EFD_NONBLOCK, EventFd, Gpa};
use mem::GuestRam;
pub use testkit::Rng;
use testkit::sink::RecordingLine;
use testkit::{Buf, GuestQueue};
use virtio::device::{Activation, ActiveQueue, DeviceStatus, QueueIrq, VirtioDevice, status};
use virtio::features;
use virtio::net::{HEADER, Net, feature};
use virtio::throttle::Clock;

pub const RX: usize = 0;
pub const TX: usize = 1;
pub const CTRL: usize = 2;
/// What the guest agrees on unless a test says otherwise.
pub const AGREED: u64 = features::TRANSPORT
    | feature::MRG_RXBUF
    | feature::STATUS
    | feature::CTRL_VQ
    | feature::CTRL_RX
    | feature::CTRL_MAC_ADDR
    | feature::MAC;

const RAM: u64 = 64 << 20;
/// Transmit buffers, then receive buffers; rings lie below.
const TX_HEAP: u64 = 1 << 20;
const RX_HEAP: u64 = 32 << 20;
const SECONDS: u64 = 20;

/// A frame: mostly short, sometimes as long as can be.
pub fn frame(rng: &mut Rng) -> Vec<u8> {
    let len = match rng.below(10) {
        0 => 14 + rng.below(65535 - 13),
        1..4 => 14 + rng.below(10),
        _ => 14 + rng.below(1500),
    };
    rng.bytes(len as usize)
}

/// A packet as the guest got it.
#[derive(Debug, PartialEq, Eq)]
pub struct Got {
    pub header: [u8; HEADER],
    pub frame: Vec<u8>,
}

pub struct Rig {
    pub ram: GuestRam,
    pub queues: Vec<GuestQueue>,
    pub device: Net,
    pub news: Arc<News>,
    pub irq: Arc<RecordingLine>,
    pub status: Arc<DeviceStatus>,
    kicks: Vec<EventFd>,
    agreed: u64,
    /// The control queue, which follows the pairs that the guest may use.
    ctrl: usize,
    /// Receive buffers by head.
    posted: HashMap<u16, Vec<Buf>>,
    tx_heap: u64,
    rx_heap: u64,
}

/// The other end of a `user` socket.
pub struct Peer(pub UnixStream);

impl Peer {
    pub fn frame(bytes: &[u8]) -> Vec<u8> {
        [&(bytes.len() as u32).to_be_bytes(), bytes].concat()
    }

    pub fn send(&mut self, frame: &[u8]) {
        self.0.write_all(&Self::frame(frame)).unwrap();
    }

    pub fn receive(&mut self) -> Vec<u8> {
        let mut len = [0; 4];
        self.0.read_exact(&mut len).unwrap();
        let mut frame = vec![0; u32::from_be_bytes(len) as usize];
        self.0.read_exact(&mut frame).unwrap();
        frame
    }
}

impl Rig {
    pub fn user() -> (Self, Peer) {
        Self::with(AGREED, None)
    }

    /// A guest whose packets cost tokens, by a clock of the test's own.
    pub fn limited(limits: &spec::Net, clock: Clock) -> (Self, Peer) {
        let (here, there) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(Duration::from_secs(SECONDS))).unwrap();
        let spec = spec::Net { fd: spec::Descriptors(vec![there.as_raw_fd() as u32]), ..limits.clone() };
        (Self::new(Net::open(&spec, 0).unwrap().with_clock(clock), AGREED), Peer(here))
    }

    pub fn with(agreed: u64, patience: Option<Duration>) -> (Self, Peer) {
        let (here, there) = UnixStream::pair().unwrap();
        here.set_read_timeout(Some(Duration::from_secs(SECONDS))).unwrap();
        let spec = spec::Net { fd: spec::Descriptors(vec![there.as_raw_fd() as u32]), ..spec::Net::default() };
        let mut device = Net::open(&spec, 0).unwrap();
        if let Some(patience) = patience {
            device = device.with_patience(patience);
        }
        (Self::new(device, agreed), Peer(here))
    }

    pub fn new(device: Net, agreed: u64) -> Self {
        let ram = testkit::ram(RAM);
        let irq = Arc::new(RecordingLine::default());
        let news = Arc::new(News::new().unwrap());
        let device = device.reporting_to(&news);
        let mut rig = Self {
            queues: Vec::new(),
            news,
            status: Arc::new(DeviceStatus::new(irq.clone())),
            irq,
            kicks: device.queue_sizes().iter().map(|_| EventFd::new(EFD_NONBLOCK).unwrap()).collect(),
            ctrl: if agreed & feature::MQ == 0 { CTRL } else { device.queue_sizes().len() - 1 },
            agreed,
            device,
            posted: HashMap::new(),
            tx_heap: TX_HEAP,
            rx_heap: RX_HEAP,
            ram,
        };
        rig.activate();
        rig
    }

    /// Hands empty rings to the device, as the transport does at `DRIVER_OK`.
    pub fn activate(&mut self) {
        self.queues = (0u64..)
            .zip(self.device.queue_sizes())
            .map(|(i, &size)| GuestQueue::new(&self.ram, 0x1_0000 * (i + 1), size))
            .collect();
        self.posted.clear();
        let queues = (0u16..).zip(&self.queues).zip(&self.kicks).map(|((index, queue), kick)| ActiveQueue {
            index,
            ring: queue.config().activate(&self.ram, self.agreed).unwrap(),
            kick: kick.try_clone().unwrap(),
            irq: QueueIrq::new(self.irq.clone(), index),
        });
        let queues = queues.collect();
        let (ram, status) = (self.ram.clone(), self.status.clone());
        self.device.activate(Activation { ram, features: self.agreed, queues, status }).unwrap();
    }

    pub fn restart(&mut self) {
        self.device.reset();
        self.activate();
    }

    pub fn kick(&self, queue: usize) {
        self.kicks[queue].write(1).unwrap();
    }

    /// Readable buffers that hold `bytes`, cut into pieces of the given lengths (the last takes the rest).
    pub fn readable(&mut self, bytes: &[u8], cuts: &[usize]) -> Vec<Buf> {
        let mut bufs = Vec::new();
        let mut rest = bytes;
        for &cut in cuts.iter().chain([&usize::MAX]) {
            let (piece, tail) = rest.split_at(cut.min(rest.len()));
            if !piece.is_empty() {
                if self.tx_heap + piece.len() as u64 + 8 > RX_HEAP {
                    self.tx_heap = TX_HEAP;
                }
                self.ram.write_bytes(Gpa(self.tx_heap), piece).unwrap();
                bufs.push(Buf::read(self.tx_heap, piece.len() as u32));
                self.tx_heap += piece.len() as u64 + 3;
            }
            rest = tail;
        }
        bufs
    }

    /// Publishes a packet of the guest without a kick.
    pub fn send(&mut self, frame: &[u8], cuts: &[usize]) -> u16 {
        let bytes = [&[0; HEADER], frame].concat();
        let bufs = self.readable(&bytes, cuts);
        self.queues[TX].send(&bufs)
    }

    /// Publishes a receive buffer of the given pieces without a kick.
    pub fn post(&mut self, pieces: &[u32]) -> u16 {
        let mut bufs = Vec::new();
        for &len in pieces {
            if self.rx_heap + u64::from(len) + 8 > RAM {
                self.rx_heap = RX_HEAP;
            }
            bufs.push(Buf::write(self.rx_heap, len));
            self.rx_heap += u64::from(len) + 5;
        }
        let head = self.queues[RX].send(&bufs);
        assert!(self.posted.insert(head, bufs).is_none());
        head
    }

    /// Packets of the guest that were given back by now; the device writes nothing to them.
    pub fn sent(&mut self) -> Vec<u16> {
        let mut heads = Vec::new();
        while let Some((head, written)) = self.queues[TX].used() {
            assert_eq!(written, 0);
            heads.push(head);
        }
        heads
    }

    fn buffer(&mut self) -> Option<Vec<u8>> {
        let (head, written) = self.queues[RX].used()?;
        let bufs = self.posted.remove(&head).expect("a buffer comes back once");
        let mut bytes = Vec::new();
        for buf in bufs {
            let mut piece = vec![0; buf.len as usize];
            self.ram.read_bytes(buf.at, &mut piece).unwrap();
            bytes.extend(piece);
        }
        assert!(written as usize <= bytes.len());
        bytes.truncate(written as usize);
        Some(bytes)
    }

    /// Packets that arrived by now, merged as their headers say.
    pub fn received(&mut self) -> Vec<Got> {
        let mut all = Vec::new();
        while let Some(mut bytes) = self.buffer() {
            assert!(bytes.len() >= HEADER, "a packet starts with its header");
            let header: [u8; HEADER] = bytes[..HEADER].try_into().unwrap();
            for _ in 1..u16::from_le_bytes([header[10], header[11]]) {
                let more = self.buffer().expect("all buffers of a packet are shown at once");
                assert!(!more.is_empty());
                bytes.extend(more);
            }
            all.push(Got { header, frame: bytes.split_off(HEADER) });
        }
        all
    }

    /// Waits for one packet.
    pub fn receive(&mut self) -> Got {
        let mut got = Vec::new();
        self.until("a packet", |rig| {
            got.extend(rig.received());
            !got.is_empty()
        });
        assert_eq!(got.len(), 1);
        got.remove(0)
    }

    /// Waits until `done` says so.
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            assert!(start.elapsed() < Duration::from_secs(SECONDS), "{what} did not happen");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Runs a command and gives its answer.
    pub fn command(&mut self, bytes: &[u8]) -> u8 {
        let mut bufs = self.readable(bytes, &[2]);
        self.ram.write_bytes(Gpa(0x8000), &[0xcc]).unwrap();
        bufs.push(Buf::write(0x8000, 1));
        let ctrl = self.ctrl;
        let head = self.queues[ctrl].send(&bufs);
        self.kick(ctrl);
        self.until("an answer", |rig| rig.queues[ctrl].used() == Some((head, 1)));
        let mut ack = [0; 1];
        self.ram.read_bytes(Gpa(0x8000), &mut ack).unwrap();
        ack[0]
    }

    pub fn config(&self) -> [u8; 12] {
        let mut config = [0xee; 12];
        self.device.read_config(0, &mut config);
        config
    }

    /// The link as the guest sees it.
    pub fn link_is_up(&self) -> bool {
        self.config()[6] == 1
    }

    pub fn is_broken(&self) -> bool {
        self.status.get() & status::NEEDS_RESET != 0
    }

    /// The device, reset, for another guest.
    pub fn into_device(mut self) -> Net {
        self.device.reset();
        self.device
    }

    pub fn wakes(&self) -> u64 {
        self.device.stats().read().wakes
    }
}
