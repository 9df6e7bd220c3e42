// SPDX-License-Identifier: Apache-2.0
//! The memory device through both faces: what a driver may plug and unplug, what the host wants, and what a hostile one gets.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use base::Gpa;
use mem::{GuestRam, Hot};
use testkit::conformance::{Subject, check};
use testkit::{Buf, Face, Guest, GuestQueue, HOT, MmioFace, PciFace, Places, Register, hot_ram};
use virtio::device::{VirtioDevice, status};
use virtio::features;
use virtio::mem::{MemControl, MemDevice, feature};

/// Bytes of a block.
const BLOCK: u64 = 2 << 20;
const ACK: (u16, u16) = (0, 0);
const NACK: (u16, u16) = (1, 0);
const ERROR: (u16, u16) = (3, 0);

#[test]
fn memory_conforms() {
    let make = || {
        let hot = hot_ram(4).1;
        Box::new(MemDevice::new(hot.clone(), Box::new(Places::new(hot, None)), 0)) as Box<dyn VirtioDevice>
    };
    check(&Subject { make: &make, kind: 24, busy_queue: 0 });
}

/// A driver of a device over `blocks` blocks.
struct Driver<F: Face> {
    guest: Guest<F>,
    queue: GuestQueue,
    ram: GuestRam,
    hot: Arc<Hot>,
    control: MemControl,
}

impl<F: Face> Driver<F> {
    fn new(blocks: u64, wanted: u64, refuse: Option<u64>) -> Self {
        let (ram, hot) = hot_ram(blocks);
        let device = MemDevice::new(hot.clone(), Box::new(Places::new(hot.clone(), refuse)), wanted * BLOCK);
        let control = device.control();
        let mut guest = Guest::<F>::on(Box::new(device), &ram);
        let queue = GuestQueue::new(&ram, 0x1000, 16);
        guest.start(features::TRANSPORT | feature::UNPLUGGED_INACCESSIBLE, &[&queue]);
        Self { guest, queue, ram, hot, control }
    }

    /// Sends one request, byte for byte; gives the answer's kind and state.
    fn ask(&mut self, kind: u16, at: u64, blocks: u16) -> (u16, u16) {
        let mut bytes = [0xee; 24];
        bytes[..2].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&at.to_le_bytes());
        bytes[16..18].copy_from_slice(&blocks.to_le_bytes());
        self.ram.write_bytes(Gpa(0x8000), &bytes).unwrap();
        self.ram.write_bytes(Gpa(0x9000), &[0xee; 16]).unwrap();
        let head = self.queue.send(&[Buf::read(0x8000, 24), Buf::write(0x9000, 16)]);
        self.guest.kick(0);
        assert_eq!(self.queue.used(), Some((head, 10)));
        let word = |at: u64| self.ram.read::<u16>(Gpa(0x9000 + at)).unwrap();
        (word(0), word(8))
    }

    fn plug(&mut self, block: u64, blocks: u16) -> (u16, u16) {
        self.ask(0, HOT.0 + block * BLOCK, blocks)
    }

    fn unplug(&mut self, block: u64, blocks: u16) -> (u16, u16) {
        self.ask(1, HOT.0 + block * BLOCK, blocks)
    }

    fn state(&mut self, block: u64, blocks: u16) -> (u16, u16) {
        self.ask(3, HOT.0 + block * BLOCK, blocks)
    }

    /// Region, usable, plugged and requested, in blocks.
    fn config(&mut self) -> [u64; 4] {
        let mut bytes = [0; 56];
        self.guest.device_config(0, &mut bytes);
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!([word(0), word(8), word(16)], [BLOCK, 0, HOT.0], "block size, node, address");
        [24, 32, 40, 48].map(|at| word(at) / BLOCK)
    }

    fn want(&mut self, blocks: u64) {
        self.control.request(blocks * BLOCK).unwrap();
        self.guest.face.update_config();
    }
}

#[test]
fn blocks_come_and_go_within_what_is_wanted() {
    come_and_go::<PciFace>();
    come_and_go::<MmioFace>();
}

fn come_and_go<F: Face>() {
    let mut driver = Driver::<F>::new(400, 0, None);
    assert_eq!(driver.config(), [400, 0, 0, 0]);
    assert_eq!((driver.plug(0, 1), driver.state(0, 1)), (ERROR, ERROR), "nothing is usable yet");
    driver.want(4);
    assert_eq!(driver.guest.face.signalled(None), 1, "the driver hears of it");
    assert_eq!(driver.config(), [400, 132, 0, 4]);
    assert_eq!((driver.plug(1, 2), driver.plug(1, 1), driver.plug(0, 2)), (ACK, ERROR, ERROR), "none is plugged twice");
    assert_eq!((driver.plug(3, 3), driver.plug(131, 2)), (NACK, ERROR), "more than is wanted; past what is usable");
    assert_eq!((driver.plug(131, 1), driver.config()), (ACK, [400, 132, 3, 4]));
    assert_eq!([driver.state(1, 2), driver.state(0, 2), driver.state(3, 100)], [(0, 0), (0, 2), (0, 1)]);

    let inside = Gpa(HOT.0 + 3 * BLOCK - 2);
    driver.ram.write(inside, 0x1234_u16).unwrap();
    assert!(driver.ram.write(Gpa(inside.0 + 1), 0u16).is_none(), "the next block is not there");
    assert_eq!((driver.unplug(2, 2), driver.unplug(2, 1), driver.unplug(2, 1)), (ERROR, ACK, ERROR));
    assert!(driver.ram.read::<u16>(inside).is_none());
    assert_eq!(driver.plug(2, 1), ACK);
    assert_eq!(driver.ram.read::<u16>(inside), Some(0), "the host had it back in between");

    // Less is wanted: nothing goes by itself, and nothing comes.
    driver.want(1);
    assert_eq!((driver.config(), driver.plug(0, 1)), ([400, 132, 3, 1], NACK));
    assert_eq!((driver.ask(2, 0, 0), driver.config()), (ACK, [400, 129, 0, 1]));
    assert_eq!((driver.state(0, 128), driver.plug(0, 1), driver.control.plugged()), ((0, 1), ACK, BLOCK));
}

#[test]
fn a_reset_of_the_device_takes_nothing_out() {
    let mut driver = Driver::<PciFace>::new(8, 8, None);
    assert_eq!(driver.plug(0, 3), ACK);
    driver.guest.set_status(0);
    assert_eq!(driver.config(), [8, 8, 3, 8]);
    driver.queue = GuestQueue::new(&driver.ram, 0x1000, 16);
    driver.guest.start(features::TRANSPORT, &[&driver.queue]);
    assert_eq!((driver.state(0, 3), driver.state(3, 5)), ((0, 0), (0, 1)));
}

#[test]
fn what_can_not_be_asked_for_is_an_error_and_changes_nothing() {
    let mut driver = Driver::<PciFace>::new(8, 8, None);
    assert_eq!(driver.plug(0, 2), ACK);
    for kind in [0, 1, 3] {
        for (at, blocks) in [
            (HOT.0, 0),
            (HOT.0 + 1, 1),
            (HOT.0 + 4096, 1),
            (HOT.0 - BLOCK, 1),
            (HOT.0, 9),
            (HOT.0 + 8 * BLOCK, 1),
            (HOT.0, u16::MAX),
            (0, 1),
            (u64::MAX, 1),
            (u64::MAX - BLOCK + 1, u16::MAX),
        ] {
            assert_eq!(driver.ask(kind, at, blocks), ERROR, "{kind} {at:#x} {blocks}");
        }
    }
    for kind in [4, 5, 0x100, u16::MAX] {
        assert_eq!(driver.ask(kind, HOT.0, 1), ERROR);
    }
    assert_eq!((driver.control.plugged(), driver.guest.status() & status::NEEDS_RESET), (2 * BLOCK, 0));

    // A request that is cut short, and one without room for its answer, which is not done.
    driver.ram.write_bytes(Gpa(0x8000), &[0; 24]).unwrap();
    driver.ram.write(Gpa(0x8008), HOT.0 + 2 * BLOCK).unwrap();
    driver.ram.write(Gpa(0x8010), 1u16).unwrap();
    let short = driver.queue.send(&[Buf::read(0x8000, 23), Buf::write(0x9000, 10)]);
    let roomless = driver.queue.send(&[Buf::read(0x8000, 24), Buf::write(0x9000, 9)]);
    let split = driver.queue.send(&[
        Buf::read(0x8000, 5),
        Buf::read(0x8005, 19),
        Buf::write(0x9100, 1),
        Buf::write(0x9101, 15),
    ]);
    driver.guest.kick(0);
    assert_eq!(driver.queue.used(), Some((short, 10)));
    assert_eq!(driver.ram.read::<u16>(Gpa(0x9000)), Some(3));
    assert_eq!((driver.queue.used(), driver.queue.used()), (Some((roomless, 0)), Some((split, 10))));
    assert_eq!((driver.ram.read::<u16>(Gpa(0x9100)), driver.control.plugged()), (Some(0), 3 * BLOCK));
}

#[test]
fn a_request_in_memory_that_it_takes_out_is_answered() {
    let mut driver = Driver::<PciFace>::new(4, 4, None);
    assert_eq!(driver.plug(0, 1), ACK);
    let mut bytes = [0; 24];
    bytes[0] = 1;
    bytes[8..16].copy_from_slice(&HOT.0.to_le_bytes());
    bytes[16] = 1;
    driver.ram.write_bytes(HOT, &bytes).unwrap();
    let head = driver.queue.send(&[Buf::read(HOT.0, 24), Buf::write(HOT.0 + 0x1000, 10)]);
    driver.guest.kick(0);
    assert_eq!(driver.queue.used(), Some((head, 10)));
    // The answer went where nobody finds it; the block is whole for the next who plugs it.
    assert!(!driver.hot.is_any_plugged(HOT, 4 * BLOCK));
    driver.queue.send(&[Buf::read(HOT.0, 24), Buf::write(0x9000, 10)]);
    driver.guest.kick(0);
    assert_ne!(driver.guest.status() & status::NEEDS_RESET, 0, "a buffer that is not plugged is no memory");
}

#[test]
fn a_host_that_has_no_more_says_so_and_the_driver_may_try_again() {
    let mut driver = Driver::<PciFace>::new(8, 8, Some(2));
    assert_eq!([driver.plug(0, 1), driver.plug(1, 1), driver.plug(1, 1)], [ACK, NACK, ACK]);
    assert_eq!(driver.control.plugged(), 2 * BLOCK);
    assert_eq!(driver.control.request(9 * BLOCK).unwrap_err(), "at most 16 MiB can be plugged");
    assert!(driver.control.request(BLOCK + 4096).unwrap_err().contains("blocks of 2 MiB"));
    assert_eq!((driver.control.requested(), driver.guest.face.get(Register::Generation)), (8 * BLOCK, 0));
}

/// Random requests against a plain set of blocks.
#[test]
fn whatever_is_asked_the_marks_are_those_of_a_plain_set() {
    let mut driver = Driver::<PciFace>::new(16, 10, None);
    let (mut set, mut wanted, mut rng) = ([false; 16], 10, testkit::Rng::new(7));
    for turn in 0..4000 {
        let (block, blocks) = (rng.below(18), rng.below(6) as u16);
        let range = block as usize..(block + u64::from(blocks)) as usize;
        let fits = blocks > 0 && range.end <= 16;
        let count = |set: &[bool; 16]| set.iter().filter(|b| **b).count() as u64;
        let part = if fits { &set[range.clone()] } else { &[] };
        let (all, any) = (part.iter().all(|b| *b), part.iter().any(|b| *b));
        match rng.below(40) {
            0..=17 => {
                let want = match (fits, any, count(&set) + u64::from(blocks) > wanted) {
                    (false, ..) | (_, true, _) => ERROR,
                    (.., true) => NACK,
                    _ => ACK,
                };
                assert_eq!(driver.plug(block, blocks), want, "turn {turn}");
                if want == ACK {
                    set[range].fill(true);
                }
            }
            18..=29 => {
                let want = if fits && all { ACK } else { ERROR };
                assert_eq!(driver.unplug(block, blocks), want, "turn {turn}");
                if want == ACK {
                    set[range].fill(false);
                }
            }
            30..=37 => {
                let want = match (fits, all, any) {
                    (false, ..) => ERROR,
                    (_, true, _) => (0, 0),
                    (.., true) => (0, 2),
                    _ => (0, 1),
                };
                assert_eq!(driver.state(block, blocks), want, "turn {turn}");
            }
            38 => {
                assert_eq!(driver.ask(2, 0, 0), ACK);
                set = [false; 16];
            }
            _ => {
                wanted = 1 + rng.below(16);
                driver.want(wanted);
            }
        }
        let marked: Vec<bool> = (0..16).map(|n| driver.hot.is_plugged(Gpa(HOT.0 + n * BLOCK), 1)).collect();
        assert_eq!((marked.as_slice(), driver.control.plugged()), (&set[..], count(&set) * BLOCK));
    }
}
