// SPDX-License-Identifier: Apache-2.0
//! Everything a power cut could leave, from the log of a `block::RecordImage` and those beside it: what was synced is there; of
//! each change since, any part, in units of 512 bytes and in any order.

use block::{Change, Event};

use super::rng::Rng;

const SECTOR: usize = 512;

/// How the changes that no sync covered fared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Luck {
    /// None reached the medium.
    None,
    /// All did.
    All,
    /// Each did or did not, as a whole.
    Some,
    /// Each of their sectors did or did not.
    Torn,
    /// Only one did, any of them.
    One,
    /// All but one did.
    AllButOne,
    /// All did, but in another order.
    Shuffled,
    /// Those of one file did, and of the others none.
    OneFile,
    /// Those up to some moment did, in the order in which they ended.
    Oldest,
    /// Those from some moment on did: the medium likes to write what came last first.
    Newest,
}

impl Luck {
    /// All kinds.
    pub const ALL: [Self; 10] = [
        Self::None,
        Self::All,
        Self::Some,
        Self::Torn,
        Self::One,
        Self::AllButOne,
        Self::Shuffled,
        Self::OneFile,
        Self::Oldest,
        Self::Newest,
    ];
}

/// Whether the host keeps its word.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Host {
    /// A sync that was answered is a sync.
    #[default]
    Honest,
    /// It answers syncs and does nothing. For tests of the tests: nothing can be safe on it.
    Deaf,
    /// One sync in two, the first of them, is nothing.
    HardOfHearing,
    /// A sync covers only what began before the last one.
    Late,
}

#[derive(Clone, Copy, Debug)]
struct Pending<'a> {
    file: usize,
    serial: u64,
    change: &'a Change,
    ended: bool,
}

/// Walks through a log; stands between two lines of it.
#[derive(Debug)]
pub struct Cuts<'a> {
    log: &'a [Event],
    at: usize,
    durable: Vec<Vec<u8>>,
    pending: Vec<Pending<'a>>,
    syncs: Vec<(u64, Vec<u64>)>,
    now: u64,
    host: Host,
    heard: u64,
    last: Vec<u64>,
}

impl<'a> Cuts<'a> {
    /// At the beginning of `log`, with what its files held then.
    #[must_use]
    pub fn new(start: Vec<Vec<u8>>, log: &'a [Event]) -> Self {
        Self::on(Host::Honest, start, log)
    }

    /// The same on a host that may lie.
    #[must_use]
    pub fn on(host: Host, start: Vec<Vec<u8>>, log: &'a [Event]) -> Self {
        let (pending, syncs, last) = (Vec::new(), Vec::new(), Vec::new());
        Self { log, at: 0, durable: start, pending, syncs, now: 0, host, heard: 0, last }
    }

    /// The last mark passed.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.now
    }

    /// The line of the log it stands before.
    #[must_use]
    pub fn line(&self) -> usize {
        self.at
    }

    /// Goes one line on; false at the end.
    pub fn step(&mut self) -> bool {
        let Some(event) = self.log.get(self.at) else { return false };
        self.at += 1;
        match event {
            Event::Mark(mark) => self.now = *mark,
            Event::Begin { file, serial, change: Change::Sync } => {
                let covered = self.covered(*file);
                self.syncs.push((*serial, covered));
            }
            Event::Begin { file, serial, change } => {
                self.pending.push(Pending { file: *file, serial: *serial, change, ended: false });
            }
            Event::End { serial } => self.end(*serial),
        }
        true
    }

    /// What a sync of a file that begins now makes durable.
    fn covered(&mut self, file: usize) -> Vec<u64> {
        let all: Vec<u64> = self.pending.iter().filter(|p| p.ended && p.file == file).map(|p| p.serial).collect();
        self.heard += 1;
        match self.host {
            Host::Honest => all,
            Host::Deaf => Vec::new(),
            Host::HardOfHearing if self.heard % 2 == 1 => Vec::new(),
            Host::HardOfHearing => all,
            Host::Late => {
                let old = std::mem::replace(&mut self.last, all.clone());
                all.into_iter().filter(|s| old.contains(s)).collect()
            }
        }
    }

    fn end(&mut self, serial: u64) {
        if let Some(sync) = self.syncs.iter().position(|s| s.0 == serial) {
            let covered = self.syncs.swap_remove(sync).1;
            for pending in self.pending.iter().filter(|p| covered.contains(&p.serial)) {
                if let Some(durable) = self.durable.get_mut(pending.file) {
                    apply(durable, pending.change, |_| true);
                }
            }
            self.pending.retain(|p| !covered.contains(&p.serial));
        } else if let Some(at) = self.pending.iter().position(|p| p.serial == serial) {
            // In the order in which they ended: of two that overlap the later one won.
            let mut done = self.pending.remove(at);
            done.ended = true;
            let first_open = self.pending.iter().position(|p| !p.ended).unwrap_or(self.pending.len());
            self.pending.insert(first_open, done);
        }
    }

    /// What a cut here could leave of the first file.
    #[must_use]
    pub fn image(&self, luck: Luck, rng: &mut Rng) -> Vec<u8> {
        self.files(luck, rng).into_iter().next().unwrap_or_default()
    }

    /// What a cut here could leave of each file.
    #[must_use]
    pub fn files(&self, luck: Luck, rng: &mut Rng) -> Vec<Vec<u8>> {
        let mut files = self.durable.clone();
        let chosen = rng.below(self.pending.len() as u64) as usize;
        let lucky = rng.below(files.len() as u64) as usize;
        let mut order: Vec<usize> = (0..self.pending.len()).collect();
        if luck == Luck::Shuffled {
            for i in (1..order.len()).rev() {
                order.swap(i, rng.below(i as u64 + 1) as usize);
            }
        }
        for i in order {
            let Pending { file, change, .. } = self.pending[i];
            let whole = match luck {
                Luck::None => false,
                Luck::All | Luck::Shuffled | Luck::Torn => true,
                Luck::Some => rng.one_in(2),
                Luck::One => i == chosen,
                Luck::AllButOne => i != chosen,
                Luck::OneFile => file == lucky,
                Luck::Oldest => i < chosen,
                Luck::Newest => i >= chosen,
            };
            if let (true, Some(bytes)) = (whole, files.get_mut(file)) {
                apply(bytes, change, |_| luck != Luck::Torn || rng.one_in(2));
            }
        }
        files
    }

    /// How many changes a cut here would put at stake.
    #[must_use]
    pub fn at_stake(&self) -> usize {
        self.pending.len()
    }
}

/// Does those sectors of `change` for which `keep` says so.
fn apply(bytes: &mut Vec<u8>, change: &Change, mut keep: impl FnMut(u64) -> bool) {
    let (offset, len) = match change {
        Change::Write { offset, data } => (*offset as usize, data.len()),
        Change::Zeroes { offset, len } => (*offset as usize, *len as usize),
        Change::Resize(len) => {
            if keep(*len) {
                bytes.resize(*len as usize, 0);
            }
            return;
        }
        Change::Sync => return,
    };
    let mut at = offset;
    while at < offset + len {
        let end = (at + SECTOR - at % SECTOR).min(offset + len);
        if keep(at as u64) {
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            match change {
                Change::Write { data, .. } => bytes[at..end].copy_from_slice(&data[at - offset..end - offset]),
                _ => bytes[at..end].fill(0),
            }
        }
        at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(serial: u64, change: Change) -> Event {
        Event::Begin { file: 0, serial, change }
    }

    fn write(fill: u8) -> Change {
        Change::Write { offset: 0, data: vec![fill; 1024] }
    }

    #[test]
    fn only_what_ended_before_a_sync_began_is_safe_after_it() {
        let log = [
            begin(1, write(1)),
            Event::End { serial: 1 },
            begin(2, write(2)),
            begin(3, Change::Sync),
            Event::End { serial: 2 },
            Event::End { serial: 3 },
        ];
        let mut cuts = Cuts::new(vec![Vec::new()], &log);
        let rng = &mut Rng::new(1);
        cuts.step();
        assert_eq!(cuts.image(Luck::None, rng), []);
        assert_eq!(cuts.image(Luck::All, rng), [1; 1024]);
        while cuts.step() {}
        assert_eq!(cuts.image(Luck::None, rng), [1; 1024], "the second write was in flight when the sync began");
        assert_eq!(cuts.image(Luck::All, rng), [2; 1024]);
        let torn = (0..50).any(|_| {
            let image = cuts.image(Luck::Torn, rng);
            image[0] != image[600]
        });
        assert!(torn, "sectors fare alone");
        assert_eq!(cuts.at_stake(), 1);
        let mut deaf = Cuts::on(Host::Deaf, vec![Vec::new()], &log);
        while deaf.step() {}
        assert_eq!((deaf.image(Luck::None, rng), deaf.at_stake()), (Vec::new(), 2));
    }

    #[test]
    fn a_sync_is_of_one_file() {
        let log = [
            begin(1, write(1)),
            Event::End { serial: 1 },
            Event::Begin { file: 1, serial: 2, change: write(2) },
            Event::End { serial: 2 },
            begin(3, Change::Sync),
            Event::End { serial: 3 },
        ];
        let mut cuts = Cuts::new(vec![Vec::new(); 2], &log);
        while cuts.step() {}
        assert_eq!(cuts.files(Luck::None, &mut Rng::new(1)), [vec![1; 1024], Vec::new()]);
    }
}
