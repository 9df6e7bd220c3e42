// SPDX-License-Identifier: Apache-2.0
//! The console: nothing lost, nothing out of order, nothing blocked, whatever the output does.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use base::Gpa;
use base::reactor::Reactor;
use mem::GuestRam;
use testkit::ops::random_bytes;
use testkit::{Buf, Guest, GuestQueue};
use virtio::console::TerminalSize;
use virtio::device::status;
use virtio::{Console, ConsolePort, features};

const AGREED: u64 = features::TRANSPORT;

struct Bench {
    ram: GuestRam,
    guest: Guest,
    port: ConsolePort,
    receive: GuestQueue,
    transmit: GuestQueue,
}

fn bench(output: &File) -> Bench {
    let ram = testkit::ram(0x20_0000);
    let (console, port) = Console::new(output, Some(TerminalSize { columns: 80, rows: 25 })).unwrap();
    let mut guest = Guest::new(Box::new(console), &ram);
    let receive = GuestQueue::new(&ram, 0x1000, 16);
    let transmit = GuestQueue::new(&ram, 0x2000, 64);
    guest.start(AGREED | 1, &[&receive, &transmit]);
    Bench { ram, guest, port, receive, transmit }
}

impl Bench {
    /// Puts `text` into memory at `at` and into the transmit ring.
    fn send(&mut self, at: u64, text: &[u8]) -> u16 {
        self.ram.write_bytes(Gpa(at), text).unwrap();
        self.transmit.send(&[Buf::read(at, text.len() as u32)])
    }

    fn kick(&mut self) {
        self.guest.kick(1);
    }

    /// What the main loop does: resumes what is ready.
    fn turn(&mut self, reactor: &mut Reactor) {
        let ready: Vec<_> = reactor.turn(Some(0)).unwrap().map(|r| r.token).collect();
        for token in ready {
            self.port.on_ready(token);
        }
    }
}

fn scratch() -> File {
    let path =
        std::env::temp_dir().join(format!("tare-console-{}-{:?}", std::process::id(), std::thread::current().id()));
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

fn contents(file: &mut File) -> Vec<u8> {
    let mut all = Vec::new();
    file.rewind().unwrap();
    file.read_to_end(&mut all).unwrap();
    all
}

fn pipe() -> (File, File) {
    let (reader, writer) = std::io::pipe().unwrap();
    (File::from(OwnedFd::from(reader)), File::from(OwnedFd::from(writer)))
}

#[test]
fn one_kick_takes_all_that_is_queued() {
    let mut file = scratch();
    let mut b = bench(&file);
    let heads: Vec<u16> = (0..20).map(|i| b.send(0x1_0000 + i * 64, format!("line {i}\n").as_bytes())).collect();
    b.kick();
    let expected: String = (0..20).map(|i| format!("line {i}\n")).collect();
    assert_eq!(contents(&mut file), expected.as_bytes());
    for head in heads {
        assert_eq!(b.transmit.used(), Some((head, 0)));
    }
    assert_eq!(b.guest.interrupts(1), 1);
    assert!(b.port.drain(Duration::ZERO));
}

#[test]
fn a_batch_is_one_write() {
    // A datagram socket keeps the borders between writes.
    let (here, there) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let mut b = bench(&File::from(OwnedFd::from(there)));
    for text in ["a", "batch ", "of ", "four"] {
        b.send(0x1_0000 + text.len() as u64 * 0x100, text.as_bytes());
    }
    b.kick();
    let mut got = [0; 64];
    let n = here.recv(&mut got).unwrap();
    assert_eq!(&got[..n], b"abatch of four");
}

#[test]
fn a_full_output_holds_the_guest_back_and_loses_nothing() {
    let (reader, writer) = pipe();
    let (socket, other) = UnixStream::pair().unwrap();
    let pairs = [(reader, writer), (File::from(OwnedFd::from(socket)), File::from(OwnedFd::from(other)))];
    for (mut reader, writer) in pairs {
        let mut b = bench(&writer);
        drop(writer);
        let mut reactor = Reactor::new().unwrap();
        for (fd, token) in b.port.sources() {
            reactor.add(&fd, token).unwrap();
        }
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        let mut seed = 0;
        while sent.len() < 3 << 20 {
            // Fill the ring, as a guest would that does not wait.
            while b.transmit.free() > 0 {
                let slot = seed % 64;
                let text = random_bytes(seed, 1 + (seed as usize * 997) % 15_000);
                b.send(0x4_0000 + slot * 0x4000, &text);
                sent.extend_from_slice(&text);
                seed += 1;
            }
            b.kick();
            b.turn(&mut reactor);
            let before = b.transmit.free();
            while b.transmit.used().is_some() {}
            if b.transmit.free() == before {
                // Full. A second kick neither blocks nor writes.
                b.kick();
                assert_eq!(b.transmit.used(), None);
                let mut part = vec![0; 50_000];
                let n = reader.read(&mut part).unwrap();
                got.extend_from_slice(&part[..n]);
            }
        }
        let rest = std::thread::spawn(move || {
            reader.read_to_end(&mut got).unwrap();
            got
        });
        assert!(b.port.drain(Duration::from_secs(20)), "the reader reads");
        drop(b);
        let got = rest.join().unwrap();
        assert_eq!((got.len(), got == sent), (sent.len(), true), "lengths, same bytes");
    }
}

#[test]
fn a_reset_keeps_what_a_slow_reader_has_not_read() {
    let (mut reader, writer) = pipe();
    let mut b = bench(&writer);
    drop(writer);
    let text = random_bytes(1, 100_000);
    b.send(0x4_0000, &text);
    b.kick();
    b.guest.set_status(0);
    assert_eq!(b.guest.status(), 0, "reset does not wait for the reader");
    // The next driver's output comes after it.
    b.transmit = GuestQueue::new(&b.ram, 0x2000, 64);
    b.receive = GuestQueue::new(&b.ram, 0x1000, 16);
    b.ram.write_bytes(Gpa(0x4_0000), &[0; 100_000]).unwrap();
    b.guest.start(AGREED, &[&b.receive, &b.transmit]);
    b.send(0x8_0000, b"again");
    b.kick();
    assert!(!b.port.drain(Duration::ZERO));
    let rest = std::thread::spawn(move || {
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        got
    });
    assert!(b.port.drain(Duration::from_secs(20)));
    drop(b);
    let got = rest.join().unwrap();
    assert_eq!((got.len(), got[..text.len()] == text, &got[text.len()..]), (text.len() + 5, true, &b"again"[..]));
}

#[test]
fn a_reader_that_left_costs_the_guest_nothing() {
    let (reader, writer) = pipe();
    let mut b = bench(&writer);
    drop((reader, writer));
    for round in 0..200 {
        let head = b.send(0x1_0000, b"to nobody");
        b.kick();
        assert_eq!(b.transmit.used(), Some((head, 0)), "round {round}");
    }
    assert_eq!(b.port.take_trouble().map(|e| e.kind()), Some(std::io::ErrorKind::BrokenPipe));
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut b = bench(&full);
    b.send(0x1_0000, b"no space");
    b.kick();
    assert!(b.transmit.used().is_some());
    assert!(b.port.take_trouble().is_some());
    assert_eq!(b.guest.status() & status::NEEDS_RESET, 0);
}

#[test]
fn the_output_stays_as_the_user_has_it() {
    let (_reader, writer) = pipe();
    // SAFETY: a plain query of a descriptor that `writer` keeps open.
    let flags = || unsafe { libc::fcntl(writer.as_raw_fd(), libc::F_GETFL) };
    let before = flags();
    let mut b = bench(&writer);
    b.send(0x1_0000, b"x");
    b.kick();
    assert_eq!(flags(), before);
    assert_eq!(before & libc::O_NONBLOCK, 0);
}

#[test]
fn input_waits_for_buffers_and_keeps_its_order() {
    let mut b = bench(&scratch());
    let text = random_bytes(7, 20_000);
    let (mut offered, mut got) = (0, Vec::new());
    let mut reactor = Reactor::new().unwrap();
    for (fd, token) in b.port.sources() {
        reactor.add(&fd, token).unwrap();
    }
    assert_eq!(b.port.input(&text[..100]), 100, "kept until the guest has buffers");
    offered += 100;
    offered += b.port.input(&text[offered..]);
    assert_eq!(offered, 4096, "but not without end");
    while got.len() < text.len() {
        for slot in 0..4 {
            if b.receive.free() > 1 {
                b.receive.send(&[Buf::write(0x1_0000 + slot * 0x200, 100), Buf::write(0x1_0100 + slot * 0x200, 77)]);
            }
        }
        b.guest.kick(0);
        let mut slot = 0;
        while let Some((_, len)) = b.receive.used() {
            let mut part = [0; 177];
            b.ram.read_bytes(Gpa(0x1_0000 + slot * 0x200), &mut part[..100]).unwrap();
            b.ram.read_bytes(Gpa(0x1_0100 + slot * 0x200), &mut part[100..]).unwrap();
            got.extend_from_slice(&part[..len as usize]);
            slot += 1;
        }
        let room: Vec<_> = reactor.turn(Some(0)).unwrap().map(|r| r.token).collect();
        if room.into_iter().any(|token| b.port.on_ready(token)) && offered < text.len() {
            offered += b.port.input(&text[offered..]);
        }
    }
    assert_eq!(got, text);
    assert!(b.guest.interrupts(0) > 0);
}

#[test]
fn an_idle_console_asks_for_no_kicks() {
    let mut b = bench(&scratch());
    b.receive.send(&[Buf::write(0x1_0000, 64)]);
    b.guest.kick(0);
    let asked = b.receive.avail_event();
    b.receive.send(&[Buf::write(0x1_0040, 64)]);
    assert_eq!(b.receive.avail_event(), asked, "the driver's index has passed it");
    assert_eq!(b.port.input(b"hi"), 2);
    assert_eq!(b.receive.used(), Some((0, 2)));
    assert_eq!(b.receive.avail_event(), asked);
}

#[test]
fn the_size_is_told_and_changes() {
    let mut b = bench(&scratch());
    let mut config = [0; 12];
    b.guest.device_config(0, &mut config);
    assert_eq!(config, [80, 0, 25, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    b.port.resize(TerminalSize { columns: 132, rows: 300 });
    assert_eq!(b.guest.config_interrupts(), 1);
    b.guest.device_config(0, &mut config[..4]);
    assert_eq!(config[..4], [132, 0, 44, 1]);
    let (plain, _port) = Console::new(&scratch(), None).unwrap();
    let mut guest = Guest::new(Box::new(plain), &b.ram);
    assert_eq!(guest.offered() & 1, 0, "no size known, none offered");
}

#[test]
fn buffers_the_wrong_way_round_go_back_empty() {
    let mut b = bench(&scratch());
    let head = b.transmit.send(&[Buf::write(0x1_0000, 64)]);
    b.kick();
    assert_eq!(b.transmit.used(), Some((head, 0)));
    let head = b.receive.send(&[Buf::read(0x1_0000, 64)]);
    let next = b.receive.send(&[Buf::write(0x1_0000, 64)]);
    assert_eq!(b.port.input(b"abc"), 3);
    assert_eq!(b.receive.used(), Some((head, 0)));
    assert_eq!(b.receive.used(), Some((next, 3)));
    assert_eq!(b.guest.status() & status::NEEDS_RESET, 0);
}
