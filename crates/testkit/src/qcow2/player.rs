// SPDX-License-Identifier: Apache-2.0
//! Plays histories on a `block::Disk`: several requests in flight, each answer looked at. The thread that makes a [`Player`]
//! is the disk's user.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;

use base::{EventFd, Seg};
use block::{Completion, Disk, Op, RecordImage, Request};

use super::history::{Step, fill};
use super::model::Ledger;
use super::rng::Rng;

/// A disk and its user.
#[derive(Debug)]
pub struct Player {
    /// The disk.
    pub disk: Disk,
    wake: EventFd,
    done: BTreeMap<u16, io::Result<()>>,
}

/// Memory for a request: stays where it is until the request is done.
struct Area {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl std::fmt::Debug for Area {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Area").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Area {
    /// `skew` bytes past a page.
    fn new(len: usize, skew: usize) -> Self {
        let bytes = vec![0xee_u8; len + 8192];
        let start = bytes.as_ptr().align_offset(4096) + skew;
        Self { bytes, start, len }
    }

    fn data(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }

    /// The bytes as one to three segments.
    fn segs(&mut self, rng: &mut Rng) -> Vec<Seg> {
        let ptr = self.bytes.as_mut_ptr().wrapping_add(self.start);
        let mut cuts = vec![0, self.len];
        for _ in 0..rng.below(3) {
            cuts.push((rng.below(self.len as u64) as usize).next_multiple_of(512).min(self.len));
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts.windows(2).map(|w| Seg { ptr: ptr.wrapping_add(w[0]), len: w[1] - w[0] }).collect()
    }
}

/// A step, when it was submitted, when and how it was answered.
type Note = (Step, u64, Option<(u64, bool)>);

/// The times of steps: marked in the log of an image as they pass, given to a ledger afterwards.
#[derive(Debug)]
pub(super) struct Notes<'a> {
    image: &'a RecordImage,
    clock: &'a Cell<u64>,
    list: Vec<Note>,
}

/// Marks the next moment in the log of `image`; it.
pub fn tick(image: &RecordImage, clock: &Cell<u64>) -> u64 {
    clock.set(clock.get() + 1);
    image.mark(clock.get());
    clock.get()
}

impl<'a> Notes<'a> {
    pub(super) fn new(image: &'a RecordImage, clock: &'a Cell<u64>) -> Self {
        Self { image, clock, list: Vec::new() }
    }

    /// A step is about to be submitted.
    pub(super) fn begin(&mut self, step: &Step) -> u64 {
        let now = tick(self.image, self.clock);
        self.list.push((*step, now, None));
        now
    }

    /// The step that was submitted then has been answered.
    pub(super) fn end(&mut self, begun: u64, ok: bool) {
        let now = tick(self.image, self.clock);
        if let Some(note) = self.list.iter_mut().find(|n| n.1 == begun) {
            note.2 = Some((now, ok));
        }
    }

    pub(super) fn tell(self, ledger: &mut Ledger) {
        for (step, begun, end) in self.list {
            ledger.begin(&step, begun);
            if let Some((now, ok)) = end {
                ledger.end(&step, begun, now, ok);
            }
        }
    }
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct Flying {
    id: u16,
    step: Step,
    area: Area,
    /// When it was submitted, for those who note it.
    pub(super) begun: u64,
}

/// The answer to a step.
#[derive(Debug)]
pub struct Answer {
    /// To which.
    pub step: Step,
    /// How it ended.
    pub result: io::Result<()>,
    /// What a read has read.
    pub data: Vec<u8>,
}

impl Player {
    /// Attaches to `disk` on this thread.
    ///
    /// # Errors
    /// As [`Disk::attach`].
    pub fn new(disk: Disk) -> io::Result<Self> {
        Self::waking(disk, EventFd::new(0)?)
    }

    /// The same with this eventfd.
    ///
    /// # Errors
    /// As [`Disk::attach`].
    pub(super) fn waking(mut disk: Disk, wake: EventFd) -> io::Result<Self> {
        disk.attach(&wake)?;
        disk.want_wake(false);
        Ok(Self { disk, wake, done: BTreeMap::new() })
    }

    pub(super) fn collect(&mut self) {
        let mut done: Vec<Completion> = Vec::new();
        self.disk.reap(&mut done);
        for c in done {
            let twice = self.done.insert(c.id, c.result);
            assert!(twice.is_none(), "request {} was answered twice", c.id);
        }
    }

    /// Sleeps until a request is answered.
    fn sleep(&mut self) {
        self.disk.want_wake(true);
        self.collect();
        if self.done.is_empty() {
            // A failure to sleep only costs another turn.
            let _ = self.wake.read();
        }
        self.disk.want_wake(false);
    }

    /// Serves the disk until `done` says so: another handle's request may wait for what this one has begun.
    pub fn serve_until(&mut self, done: impl Fn() -> bool) {
        while !done() {
            self.disk.want_wake(false);
            self.collect();
            self.disk.commit();
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
    }

    pub(super) fn launch(&mut self, id: u16, step: Step, rng: &mut Rng) -> Flying {
        let (at, len) = step.range();
        let skew = if rng.one_in(4) { rng.below(600) as usize } else { 0 };
        let mut area = match step {
            Step::Read { .. } => Area::new(len as usize, skew),
            Step::Write { id, .. } => {
                let mut area = Area::new(len as usize, skew);
                area.bytes[area.start..area.start + area.len].copy_from_slice(&fill(id, at, len));
                area
            }
            _ => Area::new(0, 0),
        };
        let op = match step {
            Step::Read { .. } => Op::Read,
            Step::Write { .. } => Op::Write,
            Step::Zero { unmap, .. } => Op::WriteZeroes { unmap },
            Step::Discard { .. } => Op::Discard,
            Step::Flush => Op::Flush,
        };
        let segs = if matches!(op, Op::Read | Op::Write) { area.segs(rng) } else { Vec::new() };
        self.disk.submit(&Request { id, op, offset: at, len, segs: &segs });
        Flying { id, step, area, begun: 0 }
    }

    /// Plays `steps` at the same time and gives their answers, in the order in which they came.
    pub fn play(&mut self, steps: &[Step], rng: &mut Rng) -> Vec<Answer> {
        self.run(steps, rng)
    }

    fn run(&mut self, steps: &[Step], rng: &mut Rng) -> Vec<Answer> {
        let mut flying: Vec<Flying> = Vec::new();
        let mut answers = Vec::new();
        for (id, step) in (0..).zip(steps) {
            flying.push(self.launch(id, *step, rng));
        }
        self.disk.commit();
        while !flying.is_empty() {
            self.collect();
            if self.done.is_empty() {
                self.sleep();
            }
            answers.extend(self.land(&mut flying).map(|(_, answer)| answer));
        }
        answers
    }

    /// The answers that have come to those in flight, and when they were submitted.
    pub(super) fn land<'a>(&mut self, flying: &'a mut Vec<Flying>) -> impl Iterator<Item = (u64, Answer)> + use<'a> {
        std::mem::take(&mut self.done).into_iter().map(|(id, result)| {
            let Some(at) = flying.iter().position(|f| f.id == id) else {
                panic!("an answer to request {id}, which nobody asked");
            };
            let f = flying.swap_remove(at);
            (f.begun, Answer { step: f.step, result, data: f.area.data().to_vec() })
        })
    }

    /// Whether there are answers that nobody has looked at.
    pub(super) fn answered(&self) -> bool {
        !self.done.is_empty()
    }

    /// Whether its eventfd was written to since the last time; for one made by [`Player::waking`].
    pub(super) fn woken(&self) -> bool {
        self.wake.read().is_ok()
    }

    /// Reads a range.
    ///
    /// # Errors
    /// The disk's.
    pub fn read(&mut self, at: u64, len: u64) -> io::Result<Vec<u8>> {
        let mut answers = self.play(&[Step::Read { at, len }], &mut Rng::new(1));
        match answers.pop() {
            Some(answer) => answer.result.map(|()| answer.data),
            None => Ok(Vec::new()),
        }
    }

    /// Plays one step.
    ///
    /// # Errors
    /// The disk's.
    pub fn one(&mut self, step: Step) -> io::Result<()> {
        self.play(&[step], &mut Rng::new(1)).pop().map_or(Ok(()), |a| a.result)
    }

    /// Gives the disk back, detached.
    #[must_use]
    pub fn end(mut self) -> Disk {
        self.disk.detach();
        self.disk
    }
}
