// SPDX-License-Identifier: Apache-2.0
//! Each kind of request, each way to get it wrong, and each way to cut it into descriptors.

use block::{Disk, MemImage};
use testkit::Buf;
use virtio::device::VirtioDevice;
use virtio::features;

use crate::rig::*;

const DISK: usize = 64 << 10;

fn reply(status: u8, data: &[u8], written: u32) -> Reply {
    Reply { status, data: data.to_vec(), written }
}

#[test]
fn requests_do_what_they_say() {
    let (mut rig, image) = Rig::memory(DISK);
    let before = image.to_vec();
    assert_eq!(rig.request(IN, 3, &[], 1024), reply(OK, &before[1536..2560], 1025));
    assert_eq!(rig.request(OUT, 2, &[7; 512], 0), reply(OK, &[], 1));
    assert_eq!(image.to_vec()[1024..1536], [7; 512]);
    assert_eq!(rig.request(FLUSH, 0, &[], 0), reply(OK, &[], 1));
    assert_eq!(rig.request(DISCARD, 0, &range(8, 8, 0), 0), reply(OK, &[], 1));
    assert_eq!(rig.request(WRITE_ZEROES, 0, &range(16, 2, 0), 0), reply(OK, &[], 1));
    assert_eq!(rig.request(WRITE_ZEROES, 0, &range(18, 1, 1), 0), reply(OK, &[], 1));
    let after = image.to_vec();
    assert_eq!(after[16 * 512..19 * 512], [0; 3 * 512]);
    assert!(after[..1024] == before[..1024] && after[19 * 512..] == before[19 * 512..], "the rest is as it was");
    // Nothing at all is a legal amount.
    assert_eq!(rig.request(IN, 0, &[], 0), reply(OK, &[], 1));
    assert_eq!(rig.request(OUT, DISK as u64 / 512, &[], 0), reply(OK, &[], 1));
    assert_eq!(rig.request(DISCARD, 0, &range(0, 0, 0), 0), reply(OK, &[], 1));
    rig.device.reset();
    let counts = rig.device.stats().read();
    assert_eq!((counts.reads, counts.writes, counts.flushes, counts.discards), (2, 2, 1, 4));
    assert_eq!((counts.read_bytes, counts.write_bytes), (1024, 512));
    assert_eq!((counts.errors, counts.faults, counts.requests()), (0, 0, 9));
}

#[test]
fn the_serial_number_is_twenty_bytes() {
    let image = MemImage::new(vec![0; DISK]);
    let spec = spec::Disk { serial: Some("TARE-0123456789-too-long".into()), ..spec::Disk::new("memory") };
    let mut rig = Rig::new(Disk::in_memory(&image, false), &spec);
    assert_eq!(rig.request(GET_ID, 0, &[], 20), reply(OK, b"TARE-0123456789-too-", 21));
    let mut long = b"TARE-0123456789-too-".to_vec();
    long.extend([0xcc; 10]);
    assert_eq!(rig.request(GET_ID, 0, &[], 30), reply(OK, &long, 20), "what was not written is not claimed");
    assert_eq!(rig.request(GET_ID, 0, &[], 4), reply(OK, b"TARE", 5));
    assert_eq!(rig.request(GET_ID, 0, &[], 0), reply(OK, &[], 1));
    let (mut rig, _) = Rig::memory(DISK);
    assert_eq!(rig.request(GET_ID, 0, &[], 20), reply(OK, &[0; 20], 21));
}

#[test]
fn wrong_requests_get_their_status_and_change_nothing() {
    let (mut rig, image) = Rig::memory(DISK);
    let before = image.to_vec();
    let last = DISK as u64 / 512;
    let too_long = (128 << 11) + 1;
    // What is asked for, at which sector, with which bytes, room for how many; and the answer.
    let table: &[(u32, u64, &[u8], usize, u8)] = &[
        (IN, last, &[], 512, IOERR),
        (IN, last - 1, &[], 1024, IOERR),
        (IN, u64::MAX, &[], 512, IOERR),
        (IN, u64::MAX / 512, &[], 512, IOERR),
        (IN, 0, &[], 511, IOERR),
        (IN, 0, &[], 513, IOERR),
        (OUT, last, &[1; 512], 0, IOERR),
        (OUT, last - 1, &[1; 1024], 0, IOERR),
        (OUT, u64::MAX / 512 + 1, &[1; 512], 0, IOERR),
        (OUT, 0, &[1; 100], 0, IOERR),
        (DISCARD, 0, &range(last, 1, 0), 0, IOERR),
        (DISCARD, 0, &range(u64::MAX, 1, 0), 0, IOERR),
        (DISCARD, 0, &range(0, u32::MAX, 0), 0, IOERR),
        (DISCARD, 0, &range(0, too_long, 0), 0, IOERR),
        (DISCARD, 0, &range(0, 1, 1), 0, UNSUPP),
        (DISCARD, 0, &range(0, 1, 2), 0, UNSUPP),
        (DISCARD, 0, &[0; 15], 0, IOERR),
        (DISCARD, 0, &[], 0, IOERR),
        (DISCARD, 0, &[0; 32], 0, IOERR),
        (WRITE_ZEROES, 0, &range(last - 1, 2, 0), 0, IOERR),
        (WRITE_ZEROES, 0, &range(0, 1, 2), 0, UNSUPP),
        (WRITE_ZEROES, 0, &range(0, 1, u32::MAX), 0, UNSUPP),
        (WRITE_ZEROES, 0, &[0; 17], 0, IOERR),
        (2, 0, &[], 0, UNSUPP),
        (10, 0, &[], 24, UNSUPP),
        (14, 0, &[0; 16], 0, UNSUPP),
        (u32::MAX, 0, &[], 0, UNSUPP),
    ];
    for (i, &(kind, sector, out, room, status)) in table.iter().enumerate() {
        let written = u32::from(room == 0);
        assert_eq!(rig.request(kind, sector, out, room), reply(status, &vec![0xcc; room], written), "row {i}");
    }
    assert!(image.to_vec() == before);
    assert_eq!(rig.status.get(), 0, "none of that breaks the device");
    rig.device.reset();
    assert_eq!(rig.device.stats().read().faults, table.len() as u64);
}

#[test]
fn a_read_only_disk_is_not_written() {
    let image = MemImage::new(vec![5; DISK]);
    let mut rig = Rig::new(Disk::in_memory(&image, true), &spec::Disk::new("memory"));
    assert_eq!(rig.request(OUT, 0, &[1; 512], 0), reply(IOERR, &[], 1));
    assert_eq!(rig.request(DISCARD, 0, &range(0, 1, 0), 0), reply(IOERR, &[], 1));
    assert_eq!(rig.request(WRITE_ZEROES, 0, &range(0, 1, 0), 0), reply(IOERR, &[], 1));
    assert_eq!(rig.request(IN, 0, &[], 512), reply(OK, &[5; 512], 513));
    assert_eq!(rig.request(FLUSH, 0, &[], 0), reply(OK, &[], 1));
    assert_eq!(image.to_vec(), vec![5; DISK]);
    assert_eq!(rig.device.features() & (1 << 5), 1 << 5, "RO is offered");
    assert_eq!(rig.device.features() & (1 << 9 | 1 << 13 | 1 << 14), 0, "and nothing that writes");
}

#[test]
fn framing_is_the_drivers_business() {
    let (mut rig, image) = Rig::memory(DISK);
    let before = image.to_vec();
    // Header in pieces, header and data in one buffer, a buffer a byte; status alone, with data, after a byte.
    let cuts: &[(&[usize], &[usize])] = &[
        (&[16], &[1024]),
        (&[1, 2, 3, 4, 5], &[1, 1, 1021]),
        (&[8, 20], &[1023]),
        (&[], &[]),
        (&[17], &[512, 512]),
        (&[15, 2, 511], &[1000, 24]),
        (&[1; 40], &[1; 60]),
    ];
    for (round, (out_cuts, in_cuts)) in cuts.iter().enumerate() {
        let head = rig.readable(&header(IN, 5), out_cuts);
        let tail = rig.writable(1025, in_cuts);
        let bufs: Vec<Buf> = head.into_iter().chain(tail).collect();
        assert_eq!(rig.ask(&bufs), reply(OK, &before[2560..3584], 1025), "read, cut {round}");

        let data = Rng::new(round as u64 + 1).bytes(1536);
        let mut bytes = header(OUT, 20);
        bytes.extend(&data);
        let mut bufs = rig.readable(&bytes, out_cuts);
        bufs.extend(rig.writable(1, &[]));
        assert_eq!(rig.ask(&bufs), reply(OK, &[], 1), "write, cut {round}");
        assert!(image.to_vec()[10240..11776] == data, "write, cut {round}");

        let mut bytes = header(WRITE_ZEROES, 0);
        bytes.extend(range(20, 3, 0));
        let mut bufs = rig.readable(&bytes, out_cuts);
        bufs.extend(rig.writable(1, &[]));
        let head = rig.publish_indirect(&bufs);
        rig.kick();
        assert_eq!(rig.wait(head), reply(OK, &[], 1), "zeroes, cut {round}");
        assert!(image.to_vec()[10240..11776].iter().all(|b| *b == 0), "zeroes, cut {round}");
    }
}

/// Each of these leaves no way to answer: the device stops and says so, after answering what it had before.
#[test]
fn requests_without_header_or_status_stop_the_device() {
    let shapes: &[fn(&mut Rig) -> Vec<Buf>] = &[
        |rig| rig.readable(&header(FLUSH, 0), &[]),
        |rig| rig.writable(513, &[]),
        |rig| [rig.readable(&header(IN, 0)[..15], &[]), rig.writable(513, &[])].concat(),
        |rig| [rig.readable(&[0], &[]), rig.writable(1, &[])].concat(),
    ];
    for (i, shape) in shapes.iter().enumerate() {
        let (mut rig, image) = Rig::memory(DISK);
        let before = image.to_vec();
        let good = [rig.readable(&header(IN, 0), &[]), rig.writable(513, &[])].concat();
        let first = rig.publish(&good);
        let bad = shape(&mut rig);
        let second = rig.publish(&bad);
        rig.kick();
        assert_eq!(rig.wait(first), reply(OK, &before[..512], 513), "shape {i}");
        rig.wait_broken();
        assert!(!rig.answered(second), "shape {i}");
        let third = rig.publish(&good);
        rig.kick();
        rig.device.reset();
        assert!(!rig.answered(third), "a broken device takes nothing more");
        let trouble = rig.status.take_trouble().unwrap();
        assert_eq!(trouble, "block request lacks a header or a status byte", "shape {i}");
        // And it comes back to life.
        rig.restart();
        assert_eq!(rig.request(IN, 0, &[], 512), reply(OK, &before[..512], 513), "shape {i}");
    }
}

#[test]
fn a_broken_ring_stops_the_device_and_a_reset_mends_it() {
    let (mut rig, image) = Rig::memory(DISK);
    let before = image.to_vec();
    // A head past the table.
    rig.queue.set_avail_entry(0, SIZE);
    rig.queue.set_avail_idx(1);
    rig.kick();
    rig.wait_broken();
    assert_eq!(rig.irq.pulses(), 0);
    rig.restart();
    assert_eq!(rig.request(IN, 1, &[], 512), reply(OK, &before[512..1024], 513));
    rig.device.reset();
    rig.device.reset();
    assert_eq!(rig.device.stats().read().faults, 1);
}

#[test]
fn one_interrupt_a_batch_and_none_that_nobody_wants() {
    // Without EVENT_IDX the driver says by a flag whether it wants interrupts.
    let image = MemImage::new(vec![0; DISK]);
    let agreed = features::TRANSPORT & !features::EVENT_IDX;
    let mut rig = Rig::with_features(Disk::in_memory(&image, false), &spec::Disk::new("memory"), agreed);
    rig.queue.suppress_interrupts(true);
    assert_eq!(rig.request(FLUSH, 0, &[], 0).status, OK);
    rig.device.reset();
    assert_eq!(rig.irq.pulses(), 0);
    assert_eq!(rig.device.stats().read().interrupts, 0);

    // Twenty requests behind one kick, wanted or not: at most one interrupt, and all answered.
    let (mut rig, _) = Rig::memory(DISK);
    let mut heads = Vec::new();
    for _ in 0..20 {
        let bufs = [rig.readable(&header(IN, 0), &[]), rig.writable(513, &[])].concat();
        heads.push(rig.queue.add(&bufs).unwrap());
    }
    let entries: Vec<u16> = heads.clone();
    for (i, head) in entries.iter().enumerate() {
        rig.queue.set_avail_entry(i as u16, *head);
    }
    rig.queue.set_avail_idx(20);
    rig.kick();
    let start = std::time::Instant::now();
    while rig.queue.used_index() != 20 {
        assert!(start.elapsed().as_secs() < 20, "all are answered");
        std::thread::yield_now();
    }
    rig.device.reset();
    let counts = rig.device.stats().read();
    assert_eq!((counts.reads, counts.interrupts, rig.irq.pulses()), (20, 1, 1));
}

#[test]
fn the_configuration_space_says_what_the_disk_is() {
    let (rig, _) = Rig::memory(DISK);
    let device = &rig.device;
    let mut config = [0xee; 64];
    device.read_config(0, &mut config);
    assert_eq!(config[..8], (DISK as u64 / 512).to_le_bytes(), "capacity");
    assert_eq!(config[12..16], 254u32.to_le_bytes(), "seg_max: a chain of 256 less header and status");
    assert_eq!(config[20..24], 512u32.to_le_bytes(), "blk_size");
    assert_eq!(config[34..36], 1u16.to_le_bytes(), "num_queues");
    assert_eq!(config[36..40], (128u32 << 11).to_le_bytes(), "max_discard_sectors");
    assert_eq!(config[40..44], 1u32.to_le_bytes(), "max_discard_seg");
    assert_eq!(config[44..48], 1u32.to_le_bytes(), "discard_sector_alignment");
    assert_eq!(config[52..56], 1u32.to_le_bytes(), "max_write_zeroes_seg");
    assert_eq!(config[56], 1, "write_zeroes_may_unmap");
    assert_eq!(config[60..], [0xee; 4], "past the end nothing is written");
    let mut part = [0; 4];
    device.read_config(20, &mut part);
    assert_eq!(u32::from_le_bytes(part), 512);
    device.read_config(u64::MAX, &mut part);
    assert_eq!(u32::from_le_bytes(part), 512, "nor from nowhere");
    assert_eq!((device.kind(), device.queue_sizes()), (2, &[256][..]));
    let offered = device.features();
    for bit in [2, 6, 9, 10, 13, 14] {
        assert_eq!(offered >> bit & 1, 1, "feature {bit}");
    }
    assert_eq!(offered >> 5 & 1, 0, "not read-only");
    let image = MemImage::new(vec![0; DISK]);
    let spec = spec::Disk { cache: spec::Cache::Unsafe, ..spec::Disk::new("memory") };
    let rig = Rig::new(Disk::in_memory(&image, false), &spec);
    assert_eq!(rig.device.features() >> 9 & 1, 0, "cache=unsafe wants no flushes");
}
