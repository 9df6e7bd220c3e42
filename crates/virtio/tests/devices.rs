// SPDX-License-Identifier: Apache-2.0
//! Every device through both faces, and what entropy and the transport do beyond the common checks.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex};

use base::Gpa;
use block::{Disk, MemImage};
use pci::PciDevice;
use testkit::conformance::{Subject, check};
use testkit::{Buf, Face, Guest, GuestQueue, MmioFace, PciFace, Register};
use virtio::blk::Blk;
use virtio::device::{VirtioDevice, status};
use virtio::{Activation, Console, DeviceStatus, Rng, features};

#[test]
fn entropy_conforms() {
    check(&Subject { make: &|| Box::new(Rng::new()), kind: 4, busy_queue: 0 });
}

#[test]
fn console_conforms() {
    let null = File::options().write(true).open("/dev/null").unwrap();
    let make = || Box::new(Console::new(&null, None).unwrap().0) as Box<dyn VirtioDevice>;
    check(&Subject { make: &make, kind: 3, busy_queue: 1 });
}

#[test]
fn block_conforms() {
    let make = || {
        let disk = Disk::in_memory(&MemImage::new(vec![0; 0x1_0000]), false);
        Box::new(Blk::new(disk, &spec::Disk::new("memory"))) as Box<dyn VirtioDevice>
    };
    check(&Subject { make: &make, kind: 2, busy_queue: 0 });
}

#[test]
fn block_with_several_queues_conforms() {
    for (threads, busy_queue) in [(spec::DiskThreads::PerQueue, 2), (spec::DiskThreads::Shared, 1)] {
        let make = || {
            let disk = Disk::in_memory(&MemImage::new(vec![0; 0x1_0000]), false);
            let spec = spec::Disk { queues: Some(3), threads, ..spec::Disk::new("memory") };
            Box::new(Blk::new(disk, &spec)) as Box<dyn VirtioDevice>
        };
        check(&Subject { make: &make, kind: 2, busy_queue });
    }
}

#[test]
fn a_resize_is_a_new_generation_and_a_configuration_interrupt() {
    resize::<PciFace>();
    resize::<MmioFace>();
}

fn resize<F: Face>() {
    let ram = testkit::ram(0x10_0000);
    let image = MemImage::new(vec![7; 0x1_0000]);
    let device = Blk::new(Disk::in_memory(&image, false), &spec::Disk::new("memory"));
    let control = device.control().unwrap();
    let mut guest = Guest::<F>::on(Box::new(device), &ram);
    let mut queue = GuestQueue::new(&ram, 0x1000, 16);
    guest.start(features::TRANSPORT, &[&queue]);
    let capacity = |guest: &mut Guest<F>| {
        let mut bytes = [0; 8];
        guest.device_config(0, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    let read = |guest: &mut Guest<F>, queue: &mut GuestQueue, sector: u64| {
        ram.write_bytes(Gpa(0x8000), &[[0; 8], sector.to_le_bytes()].concat()).unwrap();
        queue.send(&[Buf::read(0x8000, 16), Buf::write(0x9000, 513)]);
        guest.kick(0);
        testkit::conformance::eventually("the answer", || queue.used().is_some());
        ram.read::<u8>(Gpa(0x9000 + 512)).unwrap()
    };
    assert_eq!((capacity(&mut guest), read(&mut guest, &mut queue, 128)), (128, 1), "past the end");
    let first = guest.face.get(Register::Generation);

    for (bytes, why) in
        [(0x1_0000 - 512, "does not shrink"), (0x1_0000 + 100, "no multiple of the disk's block size, 512")]
    {
        let refused = control.resize(bytes).unwrap_err().to_string();
        assert!(refused.contains(why) && !refused.contains('\n'), "{refused}");
    }
    control.resize(0x1_0000).unwrap();
    guest.face.update_config();
    assert_eq!((guest.face.signalled(None), guest.face.get(Register::Generation)), (0, first), "nothing changed");

    control.resize(0x2_0000).unwrap();
    assert_eq!((image.len(), control.size()), (0x2_0000, 0x2_0000));
    assert_eq!(capacity(&mut guest), 128, "the driver sees it with the generation, not before");
    guest.face.update_config();
    assert_eq!(guest.face.signalled(None), 1);
    assert_eq!(capacity(&mut guest), 256);
    assert_ne!(guest.face.get(Register::Generation), first);
    assert_eq!(read(&mut guest, &mut queue, 128), 0, "the new sectors are there");
    assert_eq!(read(&mut guest, &mut queue, 256), 1, "and no more than these");
    // It outlives a reset of the device.
    guest.set_status(0);
    assert_eq!(capacity(&mut guest), 256);
    // A reset device tells nobody.
    control.resize(0x3_0000).unwrap();
    guest.face.update_config();
    assert_eq!((guest.face.signalled(None), capacity(&mut guest)), (1, 384));

    let device = Blk::new(Disk::in_memory(&MemImage::new(vec![7; 512]), true), &spec::Disk::new("memory"));
    assert_eq!(device.control().unwrap().resize(1024).unwrap_err().raw_os_error(), Some(30), "read-only");
}

#[test]
fn entropy_fills_what_it_says_it_fills() {
    let ram = testkit::ram(0x10_0000);
    let rng = Rng::new();
    let counters = Arc::clone(rng.counters());
    let mut guest = Guest::new(Box::new(rng), &ram);
    assert_eq!(guest.device.kicks().count(), 0, "its kicks come inline");
    let mut queue = GuestQueue::new(&ram, 0x1000, 16);
    guest.start(features::TRANSPORT, &[&queue]);
    let head = queue.send(&[Buf::write(0x8000, 64), Buf::write(0x9000, 100)]);
    guest.kick(0);
    assert_eq!(queue.used(), Some((head, 164)));
    assert_eq!(guest.interrupts(0), 1);
    let mut bytes = [0; 101];
    ram.read_bytes(Gpa(0x9000), &mut bytes).unwrap();
    assert!(bytes[..100].iter().any(|b| *b != 0), "a hundred zeroes are not random");
    assert_eq!(bytes[100], 0, "not a byte more");
    // A batch costs one interrupt; a huge request is answered in part, one without room with nothing.
    let heads = [
        queue.send(&[Buf::write(0x8000, 16)]),
        queue.send(&[Buf::write(0x2_0000, 0x2_0000)]),
        queue.send(&[Buf::read(0x8000, 16)]),
    ];
    queue.set_used_event(1);
    guest.kick(0);
    assert_eq!(heads.map(|_| queue.used().unwrap()), [(heads[0], 16), (heads[1], 0x1_0000), (heads[2], 0)]);
    assert_eq!(guest.interrupts(0), 2);
    assert_eq!(guest.status() & status::NEEDS_RESET, 0);
    let counts = counters.get();
    assert_eq!(
        (counts.requests, counts.bytes_to_guest, counts.kicks, counts.interrupts),
        (4, 164 + 16 + 0x1_0000, 2, 2)
    );
}

#[test]
fn a_queue_whose_driver_broke_it_is_not_listened_to_before_a_reset() {
    let ram = testkit::ram(0x10_0000);
    let mut guest = Guest::new(Box::new(Rng::new()), &ram);
    let mut queue = GuestQueue::new(&ram, 0x1000, 16);
    guest.start(features::TRANSPORT, &[&queue]);
    queue.send(&[Buf::write(0xffff_0000, 16)]);
    guest.kick(0);
    assert_eq!(guest.status() & status::NEEDS_RESET, status::NEEDS_RESET, "there is no memory");
    queue.send(&[Buf::write(0x8000, 16)]);
    guest.kick(0);
    assert_eq!((queue.used(), guest.interrupts(0)), (None, 0));
    guest.set_status(0);
    let mut queue = GuestQueue::new(&ram, 0x1000, 16);
    guest.start(features::TRANSPORT, &[&queue]);
    let head = queue.send(&[Buf::write(0x8000, 16)]);
    guest.kick(0);
    assert_eq!(queue.used(), Some((head, 16)));
}

#[test]
fn interrupts_wait_behind_a_mask() {
    let ram = testkit::ram(0x10_0000);
    let mut guest = Guest::new(Box::new(Rng::new()), &ram);
    let mut queue = GuestQueue::new(&ram, 0x1000, 16);
    guest.start(features::VERSION_1, &[&queue]);
    let control = 0x2000 + 12;
    guest.device.bar_write(0, control, &1u32.to_le_bytes());
    queue.send(&[Buf::write(0x8000, 64)]);
    guest.kick(0);
    assert_eq!(guest.interrupts(0), 0);
    let mut pending = [0; 8];
    guest.device.bar_read(0, 0x3000, &mut pending);
    assert_eq!(pending[0], 1);
    guest.device.bar_write(0, control, &0u32.to_le_bytes());
    assert_eq!(guest.interrupts(0), 1);
    assert_eq!(guest.vectors[0].routes().len(), 1, "masking alone changes no route");
}

#[test]
fn without_msix_the_isr_tells() {
    let ram = testkit::ram(0x10_0000);
    let mut guest = Guest::new(Box::new(Rng::new()), &ram);
    let mut queue = GuestQueue::new(&ram, 0x1000, 16);
    assert!(guest.negotiate(features::VERSION_1));
    guest.set_queue(0, &queue);
    guest.set_status(0xf);
    queue.send(&[Buf::write(0x8000, 64)]);
    guest.kick(0);
    let (mut isr, at) = ([0], guest.blocks[2].at);
    guest.device.bar_read(0, at, &mut isr);
    assert_eq!(isr, [1]);
    guest.device.bar_read(0, at, &mut isr);
    assert_eq!(isr, [0], "reading clears it");
}

/// A device that does nothing but show what it was given.
#[derive(Default)]
struct Probe {
    seen: Arc<Mutex<Vec<String>>>,
    status: Arc<Mutex<Option<Arc<DeviceStatus>>>>,
    fail: bool,
}

impl VirtioDevice for Probe {
    fn kind(&self) -> u16 {
        2
    }
    fn features(&self) -> u64 {
        1 << 9
    }
    fn queue_sizes(&self) -> &[u16] {
        &[256, 128, 64]
    }
    fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.iter_mut().zip([1, 2, 3, 4].iter().skip(offset as usize)).for_each(|(out, b)| *out = *b);
    }
    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.seen.lock().unwrap().push(format!("config {offset} {data:?}"));
    }
    fn activate(&mut self, a: Activation) -> io::Result<()> {
        let queues: Vec<_> = a.queues.iter().map(|q| (q.index, q.ring.size())).collect();
        self.seen.lock().unwrap().push(format!("activate {:#x} {queues:?}", a.features));
        *self.status.lock().unwrap() = Some(a.status);
        if self.fail { Err(io::Error::other("no threads left")) } else { Ok(()) }
    }
    fn reset(&mut self) {
        self.seen.lock().unwrap().push("reset".into());
    }
}

#[test]
fn a_device_gets_the_queues_that_were_enabled() {
    let ram = testkit::ram(0x10_0000);
    let probe = Probe::default();
    let seen = Arc::clone(&probe.seen);
    let mut guest = Guest::new(Box::new(probe), &ram);
    assert!(guest.negotiate(features::VERSION_1 | 1 << 9));
    guest.set_queue(2, &GuestQueue::new(&ram, 0x1000, 32));
    guest.set_queue(0, &GuestQueue::new(&ram, 0x4000, 256));
    guest.set_status(0xf);
    guest.set_status(0xf);
    let at = guest.blocks[3].at;
    guest.device.bar_write(0, at + 6, &[7, 8]);
    let mut config = [9; 8];
    guest.device_config(0, &mut config);
    assert_eq!(config, [1, 2, 3, 4, 0, 0, 0, 0]);
    guest.set_status(0);
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen, ["reset", "activate 0x100000200 [(0, 256), (2, 32)]", "config 6 [7, 8]", "reset"]);
}

/// The queues that KVM is to answer for, and a device that has none.
#[test]
fn a_page_of_registers_has_the_same_kicks() {
    let ram = testkit::ram(0x10_0000);
    let mut guest = Guest::<MmioFace>::on(Box::new(Probe::default()), &ram);
    let fds: Vec<_> = guest.device.kicks().map(|(i, fd)| (i, fd.try_clone().unwrap())).collect();
    assert_eq!(fds.iter().map(|(i, _)| *i).collect::<Vec<_>>(), [0, 1, 2]);
    guest.kick(1);
    guest.kick(1);
    guest.kick(3);
    assert_eq!(fds[1].1.read().unwrap(), 2);
    guest.kick(2);
    guest.set_status(0);
    assert!(fds[2].1.read().is_err(), "no stale kick for the next driver");
    let rng = Guest::<MmioFace>::on(Box::new(Rng::new()), &ram);
    assert_eq!(rng.device.kicks().count(), 0, "its kicks come inline");
}

#[test]
fn kicks_reach_their_eventfd_and_die_with_a_reset() {
    let ram = testkit::ram(0x10_0000);
    let mut guest = Guest::new(Box::new(Probe::default()), &ram);
    guest.kick(1);
    guest.kick(1);
    guest.kick(3);
    let fds: Vec<_> = guest.device.kicks().map(|(i, fd)| (i, fd.try_clone().unwrap())).collect();
    assert_eq!(fds.iter().map(|(i, _)| *i).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(fds[1].1.read().unwrap(), 2);
    guest.kick(2);
    guest.set_status(0);
    assert!(fds[2].1.read().is_err(), "no stale kick for the next driver");
}

#[test]
fn the_generation_moves_with_the_configuration() {
    generation::<PciFace>();
    generation::<MmioFace>();
}

fn generation<F: Face>() {
    let ram = testkit::ram(0x10_0000);
    let probe = Probe::default();
    let status = Arc::clone(&probe.status);
    let mut guest = Guest::<F>::on(Box::new(probe), &ram);
    guest.start(features::VERSION_1, &[]);
    let first = guest.face.get(Register::Generation);
    assert_eq!(guest.face.get(Register::Generation), first);
    status.lock().unwrap().as_ref().unwrap().config_changed();
    assert_eq!(guest.face.signalled(None), 1);
    let second = guest.face.get(Register::Generation);
    assert_ne!(second, first);
    assert_eq!(guest.face.get(Register::Generation), second);
}

#[test]
fn a_host_that_can_not_start_a_device_tells_the_guest() {
    unstarted::<PciFace>();
    unstarted::<MmioFace>();
}

fn unstarted<F: Face>() {
    let ram = testkit::ram(0x10_0000);
    let mut guest = Guest::<F>::on(Box::new(Probe { fail: true, ..Probe::default() }), &ram);
    guest.start(features::VERSION_1, &[]);
    assert_eq!(guest.status(), 0xf | status::NEEDS_RESET);
    assert_eq!(guest.face.signalled(None), 1);
    assert_eq!(guest.face.core().shared_status().take_trouble().as_deref(), Some("no threads left"));
}
