// SPDX-License-Identifier: Apache-2.0
//! Copies a disk into a new image of compressed clusters: several threads read and compress, each with a handle of its own
//! on the source, and the calling thread writes what they made in the order of the disk. Used by `convert -c`.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{io, iter};

use block::qcow2::format::compress::Compressor;
use block::qcow2::format::header::Compression;
use block::qcow2::offline::{self, Packer};
use block::{Disk, Op};

use super::copy::{self, CHUNK, Ended, Job, Piece, WINDOW};
use super::interrupt;
use super::pump::Pump;

/// What is compressed and not yet written is at most so many pieces of each thread.
const AHEAD: usize = 4;
/// How often the writer looks whether it is to end, while nothing comes.
const LOOK: Duration = Duration::from_millis(100);

/// Why a packed copy ended early.
#[derive(Debug)]
pub enum Failed {
    /// The copy.
    Copy(Ended),
    /// The new image.
    Image(offline::Error),
}

impl From<offline::Error> for Failed {
    fn from(error: offline::Error) -> Self {
        Failed::Image(error)
    }
}

/// Some clusters in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    first: u64,
    count: u64,
    /// The source says that they are zeroes, and the new image is to say so too.
    zero: bool,
}

/// What became of a cluster.
enum Made {
    Nothing,
    Zero,
    Stream(Vec<u8>),
    Plain(Vec<u8>),
}

/// What the threads share.
struct Shared<'j> {
    runs: Vec<Run>,
    shape: Shape,
    job: &'j Job<'j>,
    state: Mutex<State>,
    turn: Condvar,
}

/// The new image, as far as the threads have to know it.
#[derive(Clone, Copy)]
struct Shape {
    cluster: u64,
    /// Bytes of the disk.
    size: u64,
    compression: Compression,
    /// Zeroes are written as such, since there may be something below them.
    zeroes: bool,
    /// The image can say that a cluster is zero.
    flag: bool,
}

#[derive(Default)]
struct State {
    /// The run that is taken next.
    next: usize,
    /// Runs that were written.
    written: usize,
    made: BTreeMap<usize, Vec<Made>>,
    failed: Option<Ended>,
    over: bool,
}

/// Copies all of `from`, or what `job` says of it, into an image of clusters of so many bytes.
///
/// # Errors
/// See [`Failed`]; the image is of no use then.
pub fn pack(
    from: &mut Disk,
    packer: &mut Packer<'_>,
    (cluster, compression): (u64, Compression),
    job: &Job<'_>,
) -> Result<(), Failed> {
    let size = from.size();
    let shape = Shape { cluster, size, compression, zeroes: job.top.is_some(), flag: packer.has_zeroes() };
    let mut at = 0;
    let mut next = 0;
    while at < size {
        let len = WINDOW.min(size - at);
        let pieces = copy::plan(from, at, len, job).map_err(|e| Failed::Copy(Ended::Read(at, e)))?;
        let runs = runs(&pieces, shape, &mut next);
        let clusters = runs.iter().map(|r| r.count).sum::<u64>() * cluster;
        job.progress.add(len.saturating_sub(clusters));
        window(from, packer, runs, shape, job)?;
        at += len;
    }
    Ok(())
}

/// The clusters that pieces touch, each once; those before `next` are done.
fn runs(pieces: &[Piece], shape: Shape, next: &mut u64) -> Vec<Run> {
    let Shape { cluster, size, .. } = shape;
    let most = (CHUNK / cluster).max(1);
    let mut out: Vec<Run> = Vec::new();
    let mut add = |first: u64, end: u64, zero: bool| {
        let mut first = first.max(*next);
        *next = end.max(*next);
        while first < end {
            match out.last_mut() {
                Some(last) if last.zero == zero && last.first + last.count == first && (zero || last.count < most) => {
                    let count = if zero { end - first } else { (end - first).min(most - last.count) };
                    last.count += count;
                    first += count;
                }
                _ => {
                    out.push(Run { first, count: 1, zero });
                    first += 1;
                }
            }
        }
    };
    for piece in pieces {
        let (start, end) = (piece.offset, piece.offset + piece.len);
        let (first, last) = (start / cluster, end.div_ceil(cluster));
        if piece.zero && shape.flag {
            // What is not zero all over is read.
            let whole = (start.div_ceil(cluster), if end == size { last } else { end / cluster });
            add(first, whole.0.min(last), false);
            add(whole.0, whole.1, true);
            add(whole.1.max(whole.0), last, false);
        } else {
            add(first, last, false);
        }
    }
    out
}

fn window(from: &mut Disk, packer: &mut Packer<'_>, runs: Vec<Run>, shape: Shape, job: &Job<'_>) -> Result<(), Failed> {
    let wanted = job.threads.min(runs.len()).max(1);
    // A disk that can't be shared is read by one thread.
    let mut handles: Vec<Disk> = iter::repeat_with(|| from.share()).take(wanted - 1).map_while(Result::ok).collect();
    let shared = Shared { runs, shape, job, state: Mutex::default(), turn: Condvar::new() };
    std::thread::scope(|scope| {
        for disk in handles.iter_mut().chain(iter::once(from)) {
            let shared = &shared;
            scope.spawn(move || shared.work(disk));
        }
        let outcome = shared.write(packer);
        shared.lock().over = true;
        shared.turn.notify_all();
        outcome
    })
}

impl Shared<'_> {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what the threads make, in order.
    fn write(&self, packer: &mut Packer<'_>) -> Result<(), Failed> {
        for (index, run) in self.runs.iter().enumerate() {
            let mut state = self.lock();
            let made = loop {
                if interrupt::asked() {
                    return Err(Failed::Copy(Ended::Interrupted));
                }
                if let Some(ended) = state.failed.take() {
                    return Err(Failed::Copy(ended));
                }
                if let Some(made) = state.made.remove(&index) {
                    break made;
                }
                state = self.turn.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            };
            state.written = index + 1;
            drop(state);
            self.turn.notify_all();
            if run.zero {
                (run.first..run.first + run.count).try_for_each(|cluster| packer.zero(cluster))?;
            }
            for (cluster, made) in (run.first..).zip(made) {
                match made {
                    Made::Nothing => {}
                    Made::Zero => packer.zero(cluster)?,
                    Made::Stream(bytes) => packer.stream(cluster, &bytes)?,
                    Made::Plain(bytes) => packer.plain(cluster, &bytes)?,
                }
            }
            self.job.progress.add(run.count * self.shape.cluster);
        }
        Ok(())
    }

    /// One thread: takes runs, reads and compresses them, until there are no more.
    fn work(&self, disk: &mut Disk) {
        if let Err(ended) = self.try_work(disk) {
            self.lock().failed.get_or_insert(ended);
            self.turn.notify_all();
        }
    }

    fn try_work(&self, disk: &mut Disk) -> Result<(), Ended> {
        let Shape { cluster, compression, .. } = self.shape;
        let most = (CHUNK / cluster).max(1) * cluster;
        let mut pump = Pump::new(disk, 1, most as usize).map_err(Ended::Host)?;
        let mut compressor = Compressor::new(compression).map_err(|e| Ended::Host(io::Error::other(e.to_string())))?;
        let mut room = vec![0; Compressor::room(cluster as usize)];
        while let Some((index, run)) = self.take() {
            let made = if run.zero { Vec::new() } else { self.make(run, &mut pump, &mut compressor, &mut room)? };
            self.lock().made.insert(index, made);
            self.turn.notify_all();
        }
        Ok(())
    }

    /// The next run, once it is not too far ahead of the writer.
    fn take(&self) -> Option<(usize, Run)> {
        let mut state = self.lock();
        loop {
            let index = state.next;
            let run = *self.runs.get(index)?;
            if state.over || state.failed.is_some() {
                return None;
            }
            if index < state.written + AHEAD * self.job.threads {
                state.next += 1;
                return Some((index, run));
            }
            state = self.turn.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn make(
        &self,
        run: Run,
        pump: &mut Pump<'_>,
        compressor: &mut Compressor,
        room: &mut [u8],
    ) -> Result<Vec<Made>, Ended> {
        let Shape { cluster, size, .. } = self.shape;
        let start = run.first * cluster;
        let whole = (run.count * cluster) as usize;
        let len = (size - start).min(whole as u64) as usize;
        pump.one(Op::Read, start, len as u64).map_err(|e| Ended::Read(start, e))?;
        // The disk may end inside its last cluster.
        pump.buffer_mut(0, whole).get_mut(len..).unwrap_or_default().fill(0);
        let clusters = pump.buffer(0, whole).chunks_exact(cluster as usize);
        Ok(clusters.map(|bytes| self.squeeze(bytes, compressor, room)).collect())
    }

    fn squeeze(&self, bytes: &[u8], compressor: &mut Compressor, room: &mut [u8]) -> Made {
        if self.job.sparse > 0 && copy::is_zero(bytes) {
            match (self.shape.zeroes, self.shape.flag) {
                (false, _) => return Made::Nothing,
                (true, true) => return Made::Zero,
                (true, false) => {}
            }
        }
        match compressor.run(bytes, room).and_then(|len| room.get(..len)) {
            Some(stream) => Made::Stream(stream.to_vec()),
            None => Made::Plain(bytes.to_vec()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cluster_comes_once_and_in_order() {
        let shape = Shape { cluster: 4096, size: 100_000, compression: Compression::Zlib, zeroes: true, flag: true };
        let piece = |offset, len, zero| Piece { offset, len, zero };
        let pieces =
            [piece(0, 5000, false), piece(5000, 500, true), piece(6000, 20_000, true), piece(96_000, 4000, true)];
        let run = |first, count, zero| Run { first, count, zero };
        let mut next = 0;
        assert_eq!(
            runs(&pieces, shape, &mut next),
            [run(0, 2, false), run(2, 4, true), run(6, 1, false), run(23, 1, false), run(24, 1, true)]
        );
        assert_eq!(next, 25);
        let old = Shape { flag: false, ..shape };
        assert_eq!(runs(&pieces[3..], old, &mut 0), [run(23, 2, false)]);
        let long = [piece(0, 4096 * 300, false)];
        let cut = runs(&long, Shape { size: 4096 * 300, ..shape }, &mut 0);
        assert_eq!(cut, [run(0, 256, false), run(256, 44, false)]);
    }
}
