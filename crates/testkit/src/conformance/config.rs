// SPDX-License-Identifier: Apache-2.0
//! The device's configuration space and all other registers: read and written at every offset and width, in every state.

use virtio::device::status;

use super::{READY, Subject, guest, queues, ram, start, works};
use crate::guest::{Face, Guest, Register};

/// More bytes than any configuration space here has.
const SPACE: u64 = 0x100;

pub fn check<F: Face>(subject: &Subject<'_>) {
    every_width_reads_the_same::<F>(subject);
    what_is_read_only_stays::<F>(subject);
    the_generation_stands_still::<F>(subject);
    anything_may_be_read_and_written::<F>(subject);
}

/// Whether a driver may write byte `at` of the configuration of a device of this kind, which is then not part of what has
/// to stay: a disk's `writeback` (virtio 1.2, 5.2.4).
const fn writable(kind: u16, at: u64) -> bool {
    kind == 2 && at == 32
}

fn whole<F: Face>(guest: &mut Guest<F>) -> Vec<u8> {
    let mut bytes = vec![0xa5; SPACE as usize];
    for (at, byte) in (0..).zip(&mut bytes) {
        guest.device_config(at, std::slice::from_mut(byte));
    }
    bytes
}

fn every_width_reads_the_same<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    for running in [false, true] {
        if running {
            let queues = queues(&mut guest, &ram);
            start(&mut guest, &queues);
        }
        let bytes = whole(&mut guest);
        for width in 1..=8 {
            for at in 0..bytes.len() - width {
                let mut got = [0xa5; 8];
                guest.device_config(at as u64, &mut got[..width]);
                assert_eq!(got[..width], bytes[at..at + width], "{width} bytes at {at}");
                assert!(got[width..].iter().all(|byte| *byte == 0xa5));
            }
        }
        let mut past = [0xa5; 8];
        guest.device_config(SPACE - 8, &mut past);
        assert_eq!(past, [0; 8], "past its end are zeroes");
    }
}

fn what_is_read_only_stays<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    let fresh = whole(&mut guest);
    for running in [false, true] {
        let mut queues = queues(&mut guest, &ram);
        if running {
            start(&mut guest, &queues);
        }
        let before = whole(&mut guest);
        for fill in [0xffu8, 0, 0x5a] {
            for width in [1, 2, 3, 4, 8] {
                for at in 0..SPACE {
                    guest.face.write_config(at, &[fill; 8][..width]);
                }
            }
        }
        let after = whole(&mut guest);
        for (at, (was, is)) in (0..).zip(before.iter().zip(&after)) {
            assert!(was == is || writable(subject.kind, at), "byte {at} was {was:#x} and is {is:#x}");
        }
        if running {
            works(subject, &mut guest, &ram, &mut queues[usize::from(subject.busy_queue)]);
        }
        guest.set_status(0);
        assert_eq!(whole(&mut guest), fresh, "a reset brings back what a driver may write");
    }
}

fn the_generation_stands_still<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    let queues = queues(&mut guest, &ram);
    start(&mut guest, &queues);
    let generation = guest.face.get(Register::Generation);
    whole(&mut guest);
    guest.face.update_config();
    assert_eq!(guest.face.get(Register::Generation), generation, "nothing changed, no new generation");
    assert_eq!(guest.face.signalled(None), 0, "and nothing to tell");
    // What changes is told once, and the generation moves once, however often it is read.
    guest.face.core().shared_status().config_changed();
    assert_eq!(guest.face.signalled(None), 1);
    let next = guest.face.get(Register::Generation);
    assert_ne!(next, generation);
    assert_eq!(guest.face.get(Register::Generation), next);
}

fn anything_may_be_read_and_written<F: Face>(subject: &Subject<'_>) {
    let ram = ram();
    let mut guest = guest::<F>(subject, &ram);
    let mut queues = queues(&mut guest, &ram);
    start(&mut guest, &queues);
    let everywhere = || (0..0x4200).chain([u64::MAX - 7, u64::MAX, 1 << 32, 1 << 63]);
    let mut bytes = [0xa5; 8];
    for offset in everywhere() {
        for len in [0, 1, 2, 3, 4, 8] {
            guest.face.raw(offset, &mut bytes[..len], false);
        }
    }
    assert_eq!(guest.status(), READY, "reading harms nothing");
    works(subject, &mut guest, &ram, &mut queues[usize::from(subject.busy_queue)]);
    for fill in [0u8, 1, 0xff, 0x40] {
        for offset in everywhere() {
            for len in [0, 1, 2, 3, 4, 8] {
                guest.face.raw(offset, &mut [fill; 8][..len], true);
            }
        }
    }
    guest.set_status(0);
    assert_eq!(guest.status() & !status::NEEDS_RESET, 0);
}
