// SPDX-License-Identifier: Apache-2.0
//! Several handles of one disk, driven by one thread in a random order that a seed repeats: each submits, sleeps on its eventfd
//! and wakes as a thread of its own would. If all sleep for long and something is in flight, a wake-up was lost. Crash tests
//! play their histories on it; on memory disks only, where nothing takes time but the threads that unpack clusters.

use std::cell::Cell;
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use base::{EFD_NONBLOCK, EventFd};
use block::{Disk, RecordImage};

use super::history::Step;
use super::model::Ledger;
use super::player::{Answer, Flying, Notes, Player};
use super::rng::Rng;

#[derive(Debug)]
struct Member {
    player: Player,
    flying: Vec<Flying>,
    asleep: bool,
}

/// Handles and their users.
#[derive(Debug)]
pub struct Crew {
    members: Vec<Member>,
    /// A handle with nothing in flight still wakes when its eventfd is written to. Else its user is busy with other things.
    pub serve_idle: bool,
}

impl Crew {
    /// `handles` of `disk`, itself among them.
    ///
    /// # Errors
    /// As [`Disk::share`] and [`Disk::attach`].
    pub fn new(disk: Disk, handles: usize) -> io::Result<Self> {
        let mut disks = (1..handles).map(|_| disk.share()).collect::<io::Result<Vec<_>>>()?;
        disks.insert(0, disk);
        let member = |disk| {
            let player = Player::waking(disk, EventFd::new(EFD_NONBLOCK)?)?;
            Ok(Member { player, flying: Vec::new(), asleep: false })
        };
        let members = disks.into_iter().map(member).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { members, serve_idle: true })
    }

    /// Plays `steps` at the same time, each on any handle; marks the times in the log of `image` and notes them in `ledger`.
    ///
    /// # Errors
    /// Everyone sleeps and not all is answered.
    pub fn play(
        &mut self,
        steps: &[Step],
        rng: &mut Rng,
        image: &RecordImage,
        ledger: &mut Ledger,
        clock: &Cell<u64>,
    ) -> Result<Vec<Answer>, String> {
        let mut notes = Notes::new(image, clock);
        let answers = self.run(steps, rng, &mut notes);
        notes.tell(ledger);
        answers
    }

    fn run(&mut self, steps: &[Step], rng: &mut Rng, notes: &mut Notes<'_>) -> Result<Vec<Answer>, String> {
        let mut left: VecDeque<(u16, Step)> = (0..).zip(steps.iter().copied()).collect();
        let mut answers = Vec::new();
        while answers.len() < steps.len() {
            let able: Vec<usize> = (0..self.members.len()).filter(|i| self.able(*i)).collect();
            if (able.is_empty() || rng.one_in(2))
                && let Some((id, step)) = left.pop_front()
            {
                let member = rng.below(self.members.len() as u64) as usize;
                let member = &mut self.members[member];
                member.rise();
                let begun = notes.begin(&step);
                let mut flying = member.player.launch(id, step, rng);
                flying.begun = begun;
                member.flying.push(flying);
                continue;
            }
            if able.is_empty() && self.helped() {
                continue;
            }
            if able.is_empty() {
                let waiting: Vec<usize> = self.members.iter().map(|m| m.flying.len()).collect();
                let why = format!("a wake-up was lost: all sleep, with {waiting:?} requests in flight: {self:?}");
                // Closing them would wait for what never comes.
                std::mem::forget(std::mem::take(&mut self.members));
                return Err(why);
            }
            let member = *rng.pick(&able);
            for (begun, answer) in self.members[member].turn() {
                notes.end(begun, answer.result.is_ok());
                answers.push(answer);
            }
        }
        Ok(answers)
    }

    /// All sleep: whether one is woken after all, by a thread that unpacks a cluster for it. A minute is ages for that.
    fn helped(&mut self) -> bool {
        (0..60_000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            (0..self.members.len()).any(|i| self.able(i))
        })
    }

    /// Whether a member is awake, or wakes now.
    fn able(&mut self, index: usize) -> bool {
        let serve_idle = self.serve_idle;
        let member = &mut self.members[index];
        if member.flying.is_empty() && !serve_idle {
            return false;
        }
        if member.asleep && member.player.woken() {
            member.rise();
        }
        !member.asleep
    }

    /// Resizes the disk, on its first handle.
    ///
    /// # Errors
    /// As [`Disk::resize`].
    pub fn resize(&mut self, bytes: u64) -> io::Result<()> {
        self.members.first_mut().map_or(Ok(()), |m| m.player.disk.resize(bytes))
    }

    /// Closes all handles.
    pub fn end(self) {
        for member in self.members {
            drop(member.player.end());
        }
    }
}

impl Member {
    fn rise(&mut self) {
        if std::mem::take(&mut self.asleep) {
            self.player.disk.want_wake(false);
        }
    }

    /// Looks after the disk once, and goes to sleep if nothing has come.
    fn turn(&mut self) -> Vec<(u64, Answer)> {
        self.player.disk.commit();
        self.player.collect();
        if !self.player.answered() {
            self.player.disk.want_wake(true);
            self.player.collect();
            if self.player.answered() {
                self.player.disk.want_wake(false);
            } else {
                self.asleep = true;
            }
        }
        self.player.land(&mut self.flying).collect()
    }
}
