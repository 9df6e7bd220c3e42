// SPDX-License-Identifier: Apache-2.0
//! What the tests of this crate share: a seeded generator, requests that own their buffers, a user that drives a disk.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

pub mod tools;
pub mod twin;
pub mod watchdog;

use std::collections::HashMap;
use std::io;

use base::{EFD_NONBLOCK, EventFd, Seg};
use block::{Completion, Disk, Op, Request};

/// A small generator; the same seed gives the same test.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// Memory for requests: stays where it is until the request is done.
pub struct Buffer {
    bytes: Vec<u8>,
    skew: usize,
    len: usize,
}

impl Buffer {
    /// `len` bytes at an address that is `skew` past a multiple of 4096.
    pub fn new(len: usize, skew: usize) -> Self {
        let bytes = vec![0xee; len + 2 * 4096 + skew];
        let skew = bytes.as_ptr().align_offset(4096) + skew;
        Self { bytes, skew, len }
    }

    pub fn with(data: &[u8], skew: usize) -> Self {
        let mut buffer = Self::new(data.len(), skew);
        buffer.bytes[buffer.skew..][..data.len()].copy_from_slice(data);
        buffer
    }

    pub fn data(&self) -> &[u8] {
        &self.bytes[self.skew..][..self.len]
    }

    /// The bytes as one to four segments, cut at multiples of `step`.
    pub fn segs(&mut self, rng: &mut Rng, step: usize) -> Vec<Seg> {
        let start = self.bytes.as_mut_ptr().wrapping_add(self.skew);
        let units = self.len / step;
        let mut cuts = vec![0, self.len];
        if units > 1 {
            cuts.extend((0..rng.below(4)).map(|_| rng.below(units as u64) as usize * step));
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2).map(|w| Seg { ptr: start.wrapping_add(w[0]), len: w[1] - w[0] }).collect()
    }
}

/// A disk and its eventfd.
pub struct User {
    pub disk: Disk,
    pub wake: EventFd,
    done: HashMap<u16, io::Result<()>>,
}

impl User {
    pub fn new(mut disk: Disk) -> Self {
        let wake = EventFd::new(0).unwrap();
        disk.attach(&wake).unwrap();
        disk.want_wake(false);
        Self { disk, wake, done: HashMap::new() }
    }

    /// Not attached: synchronous.
    pub fn detached(disk: Disk) -> Self {
        Self { disk, wake: EventFd::new(EFD_NONBLOCK).unwrap(), done: HashMap::new() }
    }

    pub fn submit(&mut self, id: u16, op: Op, offset: u64, len: u64, segs: &[Seg]) {
        self.disk.submit(&Request { id, op, offset, len, segs });
    }

    fn collect(&mut self) {
        let mut done: Vec<Completion> = Vec::new();
        self.disk.reap(&mut done);
        for c in done {
            assert!(self.done.insert(c.id, c.result).is_none(), "request {} was answered twice", c.id);
        }
    }

    /// Commits and sleeps on the eventfd until request `id` is done.
    pub fn wait(&mut self, id: u16) -> io::Result<()> {
        self.disk.commit();
        loop {
            self.collect();
            if let Some(result) = self.done.remove(&id) {
                return result;
            }
            self.disk.want_wake(true);
            self.collect();
            if !self.done.contains_key(&id) {
                self.wake.read().unwrap();
            }
            self.disk.want_wake(false);
        }
    }

    pub fn read(&mut self, offset: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut buffer = Buffer::new(len, 0);
        let segs = buffer.segs(&mut Rng(1), len.max(1));
        self.submit(0, Op::Read, offset, len as u64, &segs);
        self.wait(0)?;
        Ok(buffer.data().to_vec())
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut buffer = Buffer::with(data, 0);
        let segs = buffer.segs(&mut Rng(1), data.len().max(1));
        self.submit(0, Op::Write, offset, data.len() as u64, &segs);
        self.wait(0)
    }

    pub fn flush(&mut self) -> io::Result<()> {
        self.submit(0, Op::Flush, 0, 0, &[]);
        self.wait(0)
    }
}

/// Makes `io_uring_setup` fail with `ENOSYS` on this thread and the threads it starts, as on a kernel without it.
pub fn forbid_io_uring() {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let ret = libc::BPF_RET | libc::BPF_K;
    let op = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        // The system call's number is the first word of what the filter sees.
        op(load, 0, 0, 0),
        op(equal, 0, 1, libc::SYS_io_uring_setup as u32),
        op(ret, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
        op(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: program and filter live through both calls, which only change what this thread may do.
    let rc = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program)
    };
    assert_eq!(rc, 0, "a seccomp filter can be set");
}

/// Random enough, and fast without optimisation.
pub fn quick(rng: &mut Rng, len: usize) -> Vec<u8> {
    let word = rng.next().to_le_bytes();
    let mut data = word.repeat(len.div_ceil(8));
    data.truncate(len);
    for sector in data.chunks_mut(512) {
        sector[..8].copy_from_slice(&rng.next().to_le_bytes());
    }
    data
}
