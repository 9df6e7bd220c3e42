// SPDX-License-Identifier: Apache-2.0
//! The vhost-user-blk server under a client with a queue of its own: requests, a ring stopped and gone on with, clients one
//! after the other, and clients that say what can't be.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::thread::JoinHandle;

use base::news::News;
use base::{EFD_NONBLOCK, EventFd, Gpa};
use block::{Disk, MemImage};
use export::vhost_user::Server;
use mem::{GuestRam, SharedRange};
use testkit::{Buf, GuestQueue};
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};

const RAM: u64 = 1 << 20;
const DISK: usize = 1 << 20;
/// Where the guest's memory begins for the guest, and for the client.
const GUEST: u64 = 0x10_0000;
const USER: u64 = 0x7000_0000_0000;
const QUEUE: u16 = 64;
const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;

struct Served {
    _dir: tempfile::TempDir,
    socket: PathBuf,
    image: MemImage,
    stop: EventFd,
    server: Option<JoinHandle<Result<(), export::Error>>>,
}

impl Served {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("s");
        let image = MemImage::new((0..DISK).map(|i| (i / 512) as u8).collect());
        let mut spec = spec::Disk::new("memory");
        spec.serial = Some("tare-1".into());
        let server = Server::bind(&socket, Disk::in_memory(&image, false), &spec).unwrap();
        let stop = EventFd::new(0).unwrap();
        let theirs = stop.try_clone().unwrap();
        Self {
            _dir: dir,
            socket,
            image,
            stop,
            server: Some(std::thread::spawn(move || server.run(&theirs, &News::new().unwrap()))),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.stop.write(1).unwrap();
        let ended = self.server.take().unwrap().join().unwrap();
        assert!(ended.is_ok() || std::thread::panicking());
        assert!(!self.socket.exists());
    }
}

/// A client and its guest.
struct Client {
    front: Frontend,
    file: File,
    ram: GuestRam,
    queue: GuestQueue,
    kick: EventFd,
    call: EventFd,
}

impl Client {
    fn connect(served: &Served) -> Self {
        let file = tempfile::tempfile().unwrap();
        file.set_len(RAM).unwrap();
        let range = SharedRange { at: Gpa(GUEST), len: RAM, file: &file, offset: 0 };
        let ram = GuestRam::shared(&[range]).unwrap();
        let queue = GuestQueue::new(&ram, GUEST, QUEUE);
        let mut front = Frontend::connect(&served.socket, 8).unwrap();
        front.set_owner().unwrap();
        let offered = front.get_features().unwrap();
        front.set_features(offered & !(1 << 29)).unwrap();
        let features = front.get_protocol_features().unwrap();
        assert!(features.contains(VhostUserProtocolFeatures::CONFIG));
        front.set_protocol_features(features).unwrap();
        let (kick, call) = (EventFd::new(EFD_NONBLOCK).unwrap(), EventFd::new(0).unwrap());
        Self { front, file, ram, queue, kick, call }
    }

    fn start(&mut self, base: u16) {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST,
            memory_size: RAM,
            userspace_addr: USER,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        self.front.set_mem_table(&[region]).unwrap();
        let config = self.queue.config();
        let user = |at: Gpa| at.0 - GUEST + USER;
        self.front.set_vring_num(0, QUEUE).unwrap();
        let rings = VringConfigData {
            queue_max_size: QUEUE,
            queue_size: QUEUE,
            flags: 0,
            desc_table_addr: user(config.desc),
            used_ring_addr: user(config.used),
            avail_ring_addr: user(config.avail),
            log_addr: None,
        };
        self.front.set_vring_addr(0, &rings).unwrap();
        self.front.set_vring_base(0, base).unwrap();
        self.front.set_vring_call(0, &self.call).unwrap();
        self.front.set_vring_kick(0, &self.kick).unwrap();
        self.front.set_vring_enable(0, true).unwrap();
    }

    /// One request, waited for: its status byte.
    fn ask(&mut self, kind: u32, sector: u64, data: u32) -> u8 {
        const HEADER: u64 = GUEST + 0x8000;
        const STATUS: u64 = HEADER + 0x100;
        const DATA: u64 = GUEST + 0x1_0000;
        let header = [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat();
        self.ram.write_bytes(Gpa(HEADER), &header).unwrap();
        self.ram.write_bytes(Gpa(STATUS), &[0xff]).unwrap();
        let body = if kind == READ { Buf::write(DATA, data) } else { Buf::read(DATA, data) };
        let bufs = [Buf::read(HEADER, 16), body, Buf::write(STATUS, 1)];
        let bufs = if data == 0 { vec![bufs[0], bufs[2]] } else { bufs.to_vec() };
        let head = self.queue.send(&bufs);
        self.kick.write(1).unwrap();
        let (done, _) = loop {
            if let Some(used) = self.queue.used() {
                break used;
            }
            self.call.read().unwrap();
        };
        assert_eq!(done, head);
        self.ram.read::<u8>(Gpa(STATUS)).unwrap()
    }

    fn data(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_bytes(Gpa(GUEST + 0x1_0000), &mut bytes).unwrap();
        bytes
    }

    fn fill(&self, byte: u8, len: usize) {
        self.ram.write_bytes(Gpa(GUEST + 0x1_0000), &vec![byte; len]).unwrap();
    }
}

#[test]
fn requests_reach_the_disk_and_a_ring_goes_on_where_it_stopped() {
    let served = Served::new();
    let mut client = Client::connect(&served);
    let (_, config) = client.front.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).unwrap();
    assert_eq!(config[..8], (DISK as u64 / 512).to_le_bytes());
    client.start(0);
    assert_eq!(client.ask(READ, 3, 1024), 0);
    assert_eq!(client.data(1024), [[3; 512], [4; 512]].concat());
    client.fill(0xab, 4096);
    assert_eq!(client.ask(WRITE, 8, 4096), 0);
    assert_eq!(client.ask(FLUSH, 0, 0), 0);
    assert_eq!(client.ask(READ, DISK as u64 / 512, 512), 1, "past the end is an error of that request");
    assert_eq!(client.front.get_vring_base(0).unwrap(), 4);
    assert_eq!(served.image.to_vec()[4096..8192], [0xab; 4096]);
    client.start(4);
    assert_eq!(client.ask(READ, 8, 512), 0);
    assert_eq!(client.data(512), [0xab; 512]);
    drop(client);
    let mut next = Client::connect(&served);
    next.start(0);
    assert_eq!(next.ask(READ, 9, 512), 0);
    assert_eq!(next.data(512), [0xab; 512]);
}

#[test]
fn clients_that_say_what_cannot_be_are_left() {
    let served = Served::new();
    // Rings outside the memory, memory outside its file, a kick that is no eventfd, features nobody offered.
    let wrong: [fn(&mut Client); 4] = [
        |c| {
            let rings = VringConfigData {
                queue_max_size: QUEUE,
                queue_size: QUEUE,
                desc_table_addr: 0x666,
                ..Default::default()
            };
            let _ = c.front.set_vring_addr(0, &rings);
        },
        |c| {
            let region = VhostUserMemoryRegionInfo {
                guest_phys_addr: 0,
                memory_size: RAM * 2,
                userspace_addr: USER,
                mmap_offset: 0,
                mmap_handle: c.file.as_raw_fd(),
            };
            let _ = c.front.set_mem_table(&[region]);
        },
        |c| {
            let _ = c.front.set_vring_num(0, 3);
        },
        |c| {
            let _ = c.front.set_features(1 << 63);
        },
    ];
    for (i, say) in wrong.into_iter().enumerate() {
        let mut client = Client::connect(&served);
        say(&mut client);
        drop(client);
        let mut honest = Client::connect(&served);
        honest.start(0);
        assert_eq!(honest.ask(READ, 1, 512), 0, "after wrong {i}");
        assert_eq!(honest.data(512), [1; 512]);
    }
}
