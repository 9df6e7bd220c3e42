// SPDX-License-Identifier: Apache-2.0
//! Moves the data of one disk to another: several threads, each with handles of its own on both, each with several chunks
//! in flight. What reads as zeroes is neither read (where the source knows) nor written (where it is found out). Used by
//! `convert` and `commit`.

use std::io;
use std::sync::Mutex;
use std::sync::PoisonError;

use base::{EventFd, Seg};
use block::{AlignedBuf, Completion, Disk, ExtentKind, Op, Request};

use super::interrupt;
use super::progress::Progress;

/// Bytes of one read.
pub const CHUNK: u64 = 1 << 20;
/// Chunks in flight on each thread.
const SLOTS: u16 = 4;
/// Writes of one chunk at most; what is cut finer is written with the zeroes in between.
const RUNS: u16 = 128;
/// Extents are asked for so many bytes at a time.
pub const WINDOW: u64 = 64 << 30;

/// What to do.
pub struct Job<'a> {
    /// Zeroes shorter than this are written, 0: nothing is looked for. A multiple of 512.
    pub sparse: u64,
    /// Zeroes that the source knows of are written as data too; else, with `sparse` 0, they are zeroed.
    pub full: bool,
    /// Threads at most.
    pub threads: usize,
    /// Only what the so many topmost images of the source's chain hold, zeroes included; `None`: all.
    pub top: Option<u32>,
    /// The source is raw: its holes are its own, and zeroes.
    pub raw: bool,
    /// Told what is done.
    pub progress: &'a Progress,
}

/// What a range of the source asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The source says that they are zeroes.
    pub zero: bool,
}

/// Why a copy ended early.
#[derive(Debug)]
pub enum Ended {
    /// Reading failed there.
    Read(u64, io::Error),
    /// Writing failed there.
    Write(u64, io::Error),
    /// The host lacks something.
    Host(io::Error),
    /// A signal asked for it.
    Interrupted,
}

/// Copies all of `from` onto `to`, which is at least as long. `to` must read as zeroes unless `job.sparse` is 0.
///
/// # Errors
/// See [`Ended`]; the target holds some of the data then.
pub fn copy(from: &mut Disk, to: &mut Disk, job: &Job<'_>) -> Result<(), Ended> {
    let size = from.size().min(to.size());
    let mut at = 0;
    while at < size {
        let len = WINDOW.min(size - at);
        let pieces = plan(from, at, len, job).map_err(|e| Ended::Read(at, e))?;
        let moved: u64 = pieces.iter().map(|p| p.len).sum();
        job.progress.add(len - moved);
        run(from, to, pieces, job)?;
        at += len;
    }
    Ok(())
}

/// What is to be moved of a window, in pieces of at most a chunk that end on its multiples.
pub fn plan(from: &mut Disk, offset: u64, len: u64, job: &Job<'_>) -> io::Result<Vec<Piece>> {
    let mut pieces = Vec::new();
    for extent in from.extents(offset, len)? {
        let zero = extent.kind != ExtentKind::Data && !job.full;
        let wanted = match job.top {
            Some(top) => extent.depth < top && (extent.kind != ExtentKind::Hole || job.raw),
            None => !zero || job.sparse == 0,
        };
        if !wanted {
            continue;
        }
        let (mut at, end) = (extent.offset, extent.offset + extent.len);
        while at < end {
            let stop = if zero { end.min(at + (1 << 30)) } else { end.min((at / CHUNK + 1) * CHUNK) };
            pieces.push(Piece { offset: at, len: stop - at, zero });
            at = stop;
        }
    }
    Ok(merged(pieces))
}

/// Neighbours of one kind in one chunk become one piece.
fn merged(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut out: Vec<Piece> = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match out.last_mut() {
            Some(last)
                if !piece.zero && !last.zero && last.offset + last.len == piece.offset && piece.offset % CHUNK != 0 =>
            {
                last.len += piece.len;
            }
            _ => out.push(piece),
        }
    }
    out
}

fn run(from: &mut Disk, to: &mut Disk, pieces: Vec<Piece>, job: &Job<'_>) -> Result<(), Ended> {
    let threads = job.threads.min(pieces.len().div_ceil(usize::from(SLOTS)));
    let queue = Mutex::new(pieces.into_iter());
    let mut handles = Vec::new();
    for _ in 1..threads {
        // A disk that can't be shared is copied by one thread.
        let (Ok(a), Ok(b)) = (from.share(), to.share()) else { break };
        handles.push((a, b));
    }
    std::thread::scope(|scope| {
        let running: Vec<_> = handles
            .into_iter()
            .map(|(mut a, mut b)| {
                let queue = &queue;
                scope.spawn(move || Mover::new(&mut a, &mut b).map_err(Ended::Host)?.go(queue, job))
            })
            .collect();
        let mine = Mover::new(from, to).map_err(Ended::Host).and_then(|mut mover| mover.go(&queue, job));
        if mine.is_err() {
            // The others end when there is no more to take.
            queue.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
        }
        let theirs = running.into_iter().map(|thread| {
            thread.join().unwrap_or_else(|_| Err(Ended::Host(io::Error::other("a thread of the copy died"))))
        });
        theirs.fold(mine, |first, next| first.and(next))
    })
}

type Queue = Mutex<std::vec::IntoIter<Piece>>;

/// One thread's copy.
struct Mover<'d> {
    from: &'d mut Disk,
    to: &'d mut Disk,
    wake: EventFd,
    bytes: AlignedBuf,
    slots: [Slot; SLOTS as usize],
    free: Vec<u16>,
    reads: Vec<Completion>,
    writes: Vec<Completion>,
}

#[derive(Clone, Copy)]
struct Slot {
    piece: Piece,
    writes: u16,
}

impl<'d> Mover<'d> {
    fn new(from: &'d mut Disk, to: &'d mut Disk) -> io::Result<Self> {
        let bytes = AlignedBuf::large(usize::from(SLOTS) * CHUNK as usize)?;
        // Either disk's completions wake this thread.
        let wake = EventFd::new(0)?;
        from.attach(&wake)?;
        to.attach(&wake).inspect_err(|_| from.detach())?;
        from.want_wake(false);
        to.want_wake(false);
        let memory = [bytes.seg(0, bytes.len())];
        from.lend(&memory);
        to.lend(&memory);
        let none = Slot { piece: Piece { offset: 0, len: 0, zero: false }, writes: 0 };
        Ok(Self {
            from,
            to,
            wake,
            bytes,
            slots: [none; SLOTS as usize],
            free: (0..SLOTS).collect(),
            reads: Vec::new(),
            writes: Vec::new(),
        })
    }

    fn go(&mut self, queue: &Queue, job: &Job<'_>) -> Result<(), Ended> {
        let mut more = true;
        let mut outcome = Ok(());
        while more || self.free.len() < usize::from(SLOTS) {
            if more && interrupt::asked() {
                outcome = Err(Ended::Interrupted);
                more = false;
            }
            while more {
                let Some(slot) = self.free.pop() else { break };
                match queue.lock().unwrap_or_else(PoisonError::into_inner).next() {
                    Some(piece) => self.begin(slot, piece),
                    None => {
                        self.free.push(slot);
                        more = false;
                    }
                }
            }
            self.from.commit();
            self.to.commit();
            if let Err(ended) = self.step(job) {
                outcome = outcome.and(Err(ended));
                more = false;
            }
        }
        if outcome.is_err() {
            queue.lock().unwrap_or_else(PoisonError::into_inner).by_ref().for_each(drop);
        }
        outcome
    }

    fn range(&self, slot: u16, from: usize, len: usize) -> std::ops::Range<usize> {
        let at = usize::from(slot) * CHUNK as usize + from;
        at..at + len
    }

    fn seg(&self, slot: u16, from: usize, len: usize) -> Seg {
        let at = self.range(slot, from, len).start;
        self.bytes.seg(at, len)
    }

    fn begin(&mut self, slot: u16, piece: Piece) {
        if let Some(at) = self.slots.get_mut(usize::from(slot)) {
            *at = Slot { piece, writes: u16::from(piece.zero) };
        }
        let Piece { offset, len, zero } = piece;
        if zero {
            let op = Op::WriteZeroes { unmap: true };
            self.to.submit(&Request { id: slot * RUNS, op, offset, len, segs: &[] });
        } else {
            let segs = [self.seg(slot, 0, len as usize)];
            self.from.submit(&Request { id: slot, op: Op::Read, offset, len, segs: &segs });
        }
    }

    /// Takes what either disk has done, waiting for the first.
    fn step(&mut self, job: &Job<'_>) -> Result<(), Ended> {
        if self.free.len() == usize::from(SLOTS) {
            return Ok(());
        }
        self.reap();
        if self.reads.is_empty() && self.writes.is_empty() {
            self.from.want_wake(true);
            self.to.want_wake(true);
            self.reap();
            if self.reads.is_empty() && self.writes.is_empty() {
                match self.wake.read() {
                    Err(e) if e.kind() != io::ErrorKind::Interrupted => return Err(Ended::Host(e)),
                    _ => {}
                }
            }
            self.from.want_wake(false);
            self.to.want_wake(false);
            self.reap();
        }
        let mut outcome = Ok(());
        for done in std::mem::take(&mut self.reads) {
            match done.result {
                Ok(()) => self.write(done.id, job),
                Err(e) => {
                    outcome = Err(Ended::Read(self.piece(done.id).offset, e));
                    self.free.push(done.id);
                }
            }
        }
        for done in std::mem::take(&mut self.writes) {
            let slot = done.id / RUNS;
            if let Err(e) = done.result {
                outcome = Err(Ended::Write(self.piece(slot).offset, e));
            }
            let Some(at) = self.slots.get_mut(usize::from(slot)) else { continue };
            at.writes -= 1;
            if at.writes == 0 {
                job.progress.add(at.piece.len);
                self.free.push(slot);
            }
        }
        outcome
    }

    fn reap(&mut self) {
        self.from.reap(&mut self.reads);
        self.to.reap(&mut self.writes);
    }

    fn piece(&self, slot: u16) -> Piece {
        self.slots.get(usize::from(slot)).map_or(Piece { offset: 0, len: 0, zero: false }, |s| s.piece)
    }

    /// Writes what is not zero of a chunk that was read.
    fn write(&mut self, slot: u16, job: &Job<'_>) {
        let piece = self.piece(slot);
        let data = self.bytes.bytes().get(self.range(slot, 0, piece.len as usize)).unwrap_or_default();
        let runs = data_runs(data, job.sparse as usize, usize::from(RUNS));
        if let Some(at) = self.slots.get_mut(usize::from(slot)) {
            at.writes = runs.len() as u16;
        }
        if runs.is_empty() {
            job.progress.add(piece.len);
            self.free.push(slot);
        }
        for (i, (from, len)) in runs.into_iter().enumerate() {
            let segs = [self.seg(slot, from, len)];
            let (id, offset) = (slot * RUNS + i as u16, piece.offset + from as u64);
            self.to.submit(&Request { id, op: Op::Write, offset, len: len as u64, segs: &segs });
        }
    }
}

impl Drop for Mover<'_> {
    fn drop(&mut self) {
        // Both must be done with the buffers before they go.
        self.from.detach();
        self.to.detach();
    }
}

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Pieces of a fixed size: what the compiler makes wide moves of.
    let (words, tail) = bytes.as_chunks::<64>();
    tail.iter().all(|b| *b == 0) && words.iter().all(|w| *w == [0; 64])
}

/// The runs (start, length) of `data` that hold anything, where zeroes count from `sparse` bytes on (in units of that
/// length); one run for all of it when `sparse` is 0, and at most `most` runs.
fn data_runs(data: &[u8], sparse: usize, most: usize) -> Vec<(usize, usize)> {
    if sparse == 0 {
        return vec![(0, data.len())];
    }
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (i, unit) in data.chunks(sparse).enumerate() {
        if is_zero(unit) {
            continue;
        }
        let at = i * sparse;
        let full = runs.len() == most;
        match runs.last_mut() {
            Some((from, len)) if *from + *len == at || full => *len = at + unit.len() - *from,
            _ => runs.push((at, unit.len())),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_cover_what_is_there_and_little_else() {
        let mut data = vec![0u8; 64 << 10];
        assert!(data_runs(&data, 4096, 128).is_empty());
        assert_eq!(data_runs(&data, 0, 128), [(0, 64 << 10)]);
        data[5000] = 1;
        data[12_288] = 1;
        data[65_535] = 1;
        assert_eq!(data_runs(&data, 4096, 128), [(4096, 4096), (12_288, 4096), (61_440, 4096)]);
        assert_eq!(data_runs(&data, 4096, 2), [(4096, 4096), (12_288, 53_248)]);
        data[8192] = 1;
        assert_eq!(data_runs(&data[..9000], 4096, 9), [(4096, 4904)]);
    }

    #[test]
    fn zeroes_are_told_at_any_length() {
        for len in [0, 1, 63, 64, 65, 4096] {
            let mut data = vec![0u8; len];
            assert!(is_zero(&data));
            if let Some(last) = data.last_mut() {
                *last = 1;
                assert!(!is_zero(&data));
            }
        }
    }

    #[test]
    fn pieces_merge_inside_a_chunk_only() {
        let piece = |offset, len, zero| Piece { offset, len, zero };
        let given = vec![piece(0, 4096, false), piece(4096, CHUNK - 4096, false), piece(CHUNK, 512, false)];
        assert_eq!(merged(given), [piece(0, CHUNK, false), piece(CHUNK, 512, false)]);
        let apart = vec![piece(0, 512, false), piece(512, 512, true), piece(2048, 512, false)];
        assert_eq!(merged(apart.clone()), apart);
    }
}
