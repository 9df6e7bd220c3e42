// SPDX-License-Identifier: Apache-2.0
//! The pool and its machines, in processes of their own where they are to be killed: nobody ever finds a byte that somebody
//! else left, whoever dies when.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use base::Gpa;
use spec::{Memory, Pages};

use super::*;
use crate::backing::back;
use crate::ram::GuestRam;
use crate::{MemError, Zeroing};

const PIECE: u64 = 2 << 20;
/// Of a pool.
const PIECES: u64 = 4;
/// Two pieces, the second one in part.
const GUEST: u64 = 3 << 20;
/// In which process of a test this is.
const ROLE: &str = "TARE_POOL_TEST_ROLE";

fn plan() -> PoolPlan {
    PoolPlan { size: PIECES * PIECE, piece: PIECE, pages: Pages::Small, zero: Zeroing::Sse2, threads: 2 }
}

/// A pool in this process, on a socket of its own.
fn pool(folder: &Path) -> (Pool, PathBuf) {
    let socket = folder.join("pool");
    let pool = Pool::new(plan()).unwrap();
    let serving = pool.clone();
    let listening = Pool::listen(&socket).unwrap();
    std::thread::spawn(move || serving.serve(listening));
    wait_until(|| UnixStream::connect(&socket).is_ok());
    wait_until(|| pool.stock().ready == PIECES * PIECE);
    (pool, socket)
}

fn wait_until(mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it never happens");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn memory(socket: &Path) -> Memory {
    Memory { size: GUEST, prealloc: spec::Prealloc::Pool, pool: Some(socket.into()), ..Memory::default() }
}

fn start(socket: &Path) -> Result<GuestRam, MemError> {
    // In two ranges, of which neither ends where a piece does.
    let ranges = [(Gpa(0), 0x20_3000), (Gpa(1 << 32), GUEST - 0x20_3000)];
    back(&ranges, None, &memory(socket)).map(|backed| backed.ram)
}

/// Leaves something in every page, the ends included.
fn fill(ram: &GuestRam) {
    for (at, len, _) in ram.regions() {
        for page in (0..len).step_by(4096) {
            ram.write_bytes(Gpa(at.0 + page), b"secret").unwrap();
        }
        ram.write(Gpa(at.0 + len - 1), 0x5a_u8).unwrap();
    }
}

/// Looks at every byte.
fn search(ram: &GuestRam) {
    let mut page = [0; 4096];
    for (at, len, _) in ram.regions() {
        for from in (0..len).step_by(page.len()) {
            ram.read_bytes(Gpa(at.0 + from), &mut page).unwrap();
            assert!(page.iter().all(|b| *b == 0), "somebody else's bytes at {:#x}", at.0 + from);
        }
    }
}

/// The searcher takes everything there is, one machine after the other. What a dead machine had asked for the pool may hear,
/// lend and take back only now.
fn search_all(pool: &Pool, socket: &Path) {
    let mut guests = None;
    wait_until(|| {
        wait_until(|| pool.stock().ready == PIECES * PIECE);
        guests = start(socket).ok().zip(start(socket).ok());
        guests.is_some()
    });
    let (one, other) = guests.unwrap();
    search(&one);
    search(&other);
}

#[test]
fn what_one_guest_left_no_other_finds() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, socket) = pool(folder.path());
    for _ in 0..5 {
        wait_until(|| pool.stock().ready == PIECES * PIECE);
        let ram = start(&socket).unwrap();
        search(&ram);
        fill(&ram);
        assert_eq!(pool.stock().lent, 2 * PIECE);
        drop(ram);
        search_all(&pool, &socket);
    }
}

#[test]
fn a_loan_ends_with_the_last_user_of_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, socket) = pool(folder.path());
    let ram = start(&socket).unwrap();
    let device = ram.clone();
    drop(ram);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(pool.stock().lent, 2 * PIECE, "a device still has it");
    fill(&device);
    drop(device);
    search_all(&pool, &socket);
}

#[test]
fn more_than_there_is_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, socket) = pool(folder.path());
    let held = [start(&socket).unwrap(), start(&socket).unwrap()];
    let said = start(&socket).err().unwrap().to_string();
    assert!(
        said.starts_with("the memory pool has 0 MiB free, the guest needs 3 MiB") && !said.contains('\n'),
        "{said}"
    );
    let fallback = Memory { fallback: true, ..memory(&socket) };
    let backed = back(&[(Gpa(0), GUEST)], None, &fallback).unwrap();
    assert!(backed.fell_back.unwrap().contains("since fallback=on"));
    search(&backed.ram);
    drop(held);
    search_all(&pool, &socket);
    let said = start(&folder.path().join("nobody")).err().unwrap().to_string();
    assert!(said.contains("no memory pool answers") && said.contains("tare memory-pool"), "{said}");
}

#[test]
fn strangers_get_nothing_and_take_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, socket) = pool(folder.path());
    for bytes in [&b""[..], b"GET / HTTP/1.0\r\n\r\n1234567890", &[0; 24], &[0xff; 100]] {
        let mut stranger = UnixStream::connect(&socket).unwrap();
        // The pool may have hung up already.
        let _ = stranger.write_all(bytes);
    }
    let huge = Memory { size: 1 << 40, ..memory(&socket) };
    assert!(back(&[(Gpa(0), 1 << 40)], None, &huge).is_err());
    search_all(&pool, &socket);
}

#[test]
fn nobody_can_make_the_memory_shorter() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, socket) = pool(folder.path());
    let mut lent = Lent::ask(&socket, GUEST).unwrap();
    for file in lent.take_files() {
        let file = std::fs::File::from(file);
        assert!(file.set_len(0).is_err() && file.set_len(PIECE * 2).is_err());
    }
    drop(lent);
    search_all(&pool, &socket);
}

/// This test program again, as somebody who can be killed.
fn process(role: &str, socket: &Path) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "pool::tests::another_process", "--ignored", "--nocapture"]);
    command.env(ROLE, role).env("TARE_POOL_TEST_SOCKET", socket);
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// Waits until the process says that it has begun.
fn begun(child: &mut Child) {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.is_ok_and(|line| line.contains("begun"))), "it has begun");
}

#[test]
#[ignore = "not a test: the other process of those that kill one"]
fn another_process() {
    let (Ok(role), Some(socket)) = (std::env::var(ROLE), std::env::var_os("TARE_POOL_TEST_SOCKET")) else { return };
    let socket = PathBuf::from(socket);
    if role == "pool" {
        let pool = Pool::new(plan()).unwrap();
        pool.wait(|_| ());
        println!("begun");
        pool.serve(Pool::listen(&socket).unwrap()).unwrap();
    }
    println!("begun");
    loop {
        if let Ok(ram) = start(&socket) {
            search(&ram);
            fill(&ram);
            fill(&ram);
        }
    }
}

#[test]
fn machines_killed_at_any_moment_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let (pool, socket) = pool(folder.path());
    for round in 0..20 {
        let mut guest = process("guest", &socket);
        begun(&mut guest);
        // From the middle of asking to the middle of filling, and in between two.
        std::thread::sleep(Duration::from_micros(round * 731 % 9000));
        assert!(guest.try_wait().unwrap().is_none(), "it found nothing that made it end");
        guest.kill().unwrap();
        guest.wait().unwrap();
        search_all(&pool, &socket);
    }
}

#[test]
fn a_pool_killed_at_any_moment_takes_no_machine_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("pool");
    for round in 0..8u64 {
        let mut pool = process("pool", &socket);
        begun(&mut pool);
        wait_until(|| UnixStream::connect(&socket).is_ok());
        wait_until(|| start(&socket).is_ok());
        let ram = (0..1000).find_map(|_| start(&socket).ok()).unwrap();
        fill(&ram);
        let starting = std::thread::spawn({
            let socket = socket.clone();
            move || loop {
                match start(&socket) {
                    Ok(ram) => search(&ram),
                    Err(MemError::Pool { what, .. }) if what.contains("MiB free") => {}
                    Err(e) => return e.to_string(),
                }
            }
        });
        std::thread::sleep(Duration::from_micros(round * 1377 % 8000));
        pool.kill().unwrap();
        pool.wait().unwrap();
        let said = starting.join().unwrap();
        let known = ["no memory pool answers", "did not lend the memory, it ended"];
        assert!(known.iter().any(|k| said.contains(k)) && !said.contains('\n'), "{said}");
        let mut bytes = [0; 6];
        ram.read_bytes(Gpa(4096), &mut bytes).unwrap();
        assert_eq!(&bytes, b"secret", "a machine that runs keeps what it has");
    }
}
