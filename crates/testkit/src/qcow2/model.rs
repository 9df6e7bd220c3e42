// SPDX-License-Identifier: Apache-2.0
//! Naive models: [`Bytes`] is what a disk holds, [`Ledger`] is what it may hold after a power cut.

use super::history::{Step, word};

/// The content of a disk. After a discard a byte is what it was or zero, until it is written again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// What each byte is.
    pub content: Vec<u8>,
    /// Which bytes may as well be zero.
    pub loose: Vec<bool>,
}

impl Bytes {
    /// A disk with this content.
    #[must_use]
    pub fn new(content: Vec<u8>) -> Self {
        let loose = vec![false; content.len()];
        Self { content, loose }
    }

    /// Does a step.
    pub fn apply(&mut self, step: &Step) {
        let (at, len) = step.range();
        let range = at as usize..(at + len) as usize;
        match *step {
            Step::Read { .. } | Step::Flush => {}
            Step::Write { at, len, id } => {
                self.content[range.clone()].copy_from_slice(&super::history::fill(id, at, len));
                self.loose[range].fill(false);
            }
            Step::Zero { .. } => {
                self.content[range.clone()].fill(0);
                self.loose[range].fill(false);
            }
            Step::Discard { .. } => self.loose[range].fill(true),
        }
    }

    /// Another size; what is new is zero.
    pub fn resize(&mut self, size: u64) {
        self.content.resize(size as usize, 0);
        self.loose.resize(size as usize, false);
    }

    /// The first byte of `data`, read at `at`, that can't be.
    #[must_use]
    pub fn differs(&self, at: u64, data: &[u8]) -> Option<u64> {
        let start = at as usize;
        let content = &self.content[start..start + data.len()];
        if content == data {
            return None;
        }
        let bad = |i: usize| data[i] != content[i] && !(data[i] == 0 && self.loose[start + i]);
        (0..data.len()).find(|i| bad(*i)).map(|i| at + i as u64)
    }

    /// What it may hold as ranges of bytes, so that a test can write zeroes over them and know again.
    #[must_use]
    pub fn loose_ranges(&self) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        for (i, _) in self.loose.iter().enumerate().filter(|(_, l)| **l) {
            match ranges.last_mut() {
                Some((at, len)) if *at + *len == i as u64 => *len += 1,
                _ => ranges.push((i as u64, 1)),
            }
        }
        ranges
    }
}

const SECTOR: u64 = 512;
const NEVER: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Value {
    id: u32,
    begin: u64,
    end: u64,
    /// It may have come to nothing: a discard, a failed write.
    maybe: bool,
}

/// What each sector may hold at a moment, by the times at which requests were submitted and answered. Requests are whole
/// sectors, and two that touch the same sector never overlap in time.
#[derive(Clone, Debug)]
pub struct Ledger {
    sectors: Vec<Vec<Value>>,
    flushes: Vec<(u64, u64)>,
    /// Bytes of the disk, from when on, since when for sure.
    sizes: Vec<(u64, u64, u64)>,
}

impl Ledger {
    /// A disk whose sector `n` holds, durably, the content named `initial(n)`.
    pub fn new(size: u64, initial: impl Fn(u64) -> u32) -> Self {
        let value = |n| vec![Value { id: initial(n), begin: 0, end: 0, maybe: false }];
        Self { sectors: (0..size / SECTOR).map(value).collect(), flushes: Vec::new(), sizes: vec![(size, 0, 0)] }
    }

    /// A disk that holds this, durably: contents as `fill` makes them, each sector whole.
    ///
    /// # Errors
    /// The first sector that is none.
    pub fn of(content: &[u8]) -> Result<Self, String> {
        let names: Option<Vec<u32>> =
            content.chunks(SECTOR as usize).zip(0..).map(|(sector, n)| name_of(sector, n)).collect();
        let names = names.ok_or("a sector of no known content")?;
        Ok(Self::new(content.len() as u64, |n| names[n as usize]))
    }

    fn touched(&mut self, step: &Step) -> &mut [Vec<Value>] {
        let (at, len) = step.range();
        &mut self.sectors[(at / SECTOR) as usize..((at + len) / SECTOR) as usize]
    }

    /// `step` was submitted at `now`.
    pub fn begin(&mut self, step: &Step, now: u64) {
        let (id, maybe) = match *step {
            Step::Write { id, .. } => (id, false),
            Step::Zero { .. } => (0, false),
            Step::Discard { .. } => (0, true),
            Step::Flush => return self.flushes.push((now, NEVER)),
            Step::Read { .. } => return,
        };
        for sector in self.touched(step) {
            sector.push(Value { id, begin: now, end: NEVER, maybe });
        }
    }

    /// `step`, submitted at `begun`, was answered at `now`.
    pub fn end(&mut self, step: &Step, begun: u64, now: u64, ok: bool) {
        if *step == Step::Flush {
            if let Some(flush) = self.flushes.iter_mut().find(|f| f.0 == begun) {
                flush.1 = if ok { now } else { NEVER };
            }
            return;
        }
        for sector in self.touched(step) {
            if let Some(value) = sector.iter_mut().find(|v| v.begin == begun) {
                value.end = now;
                value.maybe |= !ok;
            }
        }
    }

    /// The disk is to get another size, at `now`, with nothing in flight.
    pub fn begin_resize(&mut self, bytes: u64, now: u64) {
        self.sizes.push((bytes, now, NEVER));
        let sectors = (bytes / SECTOR) as usize;
        for cut_off in self.sectors.iter_mut().skip(sectors) {
            cut_off.push(Value { id: 0, begin: now, end: NEVER, maybe: false });
        }
        let zero = || vec![Value { id: 0, begin: 0, end: 0, maybe: false }];
        self.sectors.resize_with(sectors.max(self.sectors.len()), zero);
    }

    /// The resize that was begun last was answered: what it did is durable, and all before it.
    pub fn end_resize(&mut self, now: u64, ok: bool) {
        let Some(size) = self.sizes.last_mut() else { return };
        if !ok {
            // The disk may have either size and, past the smaller one, zeroes.
            return;
        }
        size.2 = now;
        let begun = size.1;
        for sector in &mut self.sectors {
            if let Some(value) = sector.last_mut().filter(|v| v.begin == begun) {
                value.end = now;
            }
        }
        self.flushes.push((now, now));
    }

    /// The sizes that the disk may have if the power was cut at `now`.
    fn may_measure(&self, now: u64) -> &[(u64, u64, u64)] {
        let sure = self.sizes.iter().rposition(|s| s.2 <= now).unwrap_or(0);
        let begun = self.sizes.iter().rposition(|s| s.1 <= now).unwrap_or(0);
        &self.sizes[sure..=begun]
    }

    /// From which sector on a shrink that is under way at `now` may show anything: what the guest gave up is not the
    /// engine's to keep, nor to hide what lies below it before it is cut off.
    fn given_up(&self, now: u64) -> u64 {
        let sizes = self.may_measure(now);
        if sizes.len() < 2 { NEVER } else { sizes.iter().map(|s| s.0).min().unwrap_or(0) / SECTOR }
    }

    /// The names of the contents that sector `n` may hold if the power was cut at `now`.
    fn may_hold(&self, n: u64, flushed: u64, now: u64) -> impl Iterator<Item = u32> + '_ {
        let values = &self.sectors[n as usize];
        // What the last flush made sure of.
        let base = values.iter().rposition(|v| !v.maybe && v.end <= flushed).unwrap_or(0);
        values[base..].iter().filter(move |v| v.begin <= now).map(|v| v.id)
    }

    /// When the last flush began that was answered by `now`.
    fn flushed(&self, now: u64) -> u64 {
        self.flushes.iter().filter(|f| f.1 <= now).map(|f| f.0).max().unwrap_or(0)
    }

    /// Whether a disk with `content` may come out of a power cut at `now`.
    ///
    /// # Errors
    /// The first sector that can't be, and why.
    pub fn check(&self, content: &[u8], now: u64) -> Result<(), String> {
        let flushed = self.flushed(now);
        if !self.may_measure(now).iter().any(|s| s.0 == content.len() as u64) {
            return Err(format!("the disk has {} bytes, which is none of {:?}", content.len(), self.may_measure(now)));
        }
        let given_up = self.given_up(now);
        for (n, sector) in content.chunks(SECTOR as usize).enumerate() {
            let n = n as u64;
            let Some(found) = name_of(sector, n) else {
                return Err(format!("sector {n} is torn or strange: {:02x?}...", &sector[..sector.len().min(16)]));
            };
            if n < given_up && !self.may_hold(n, flushed, now).any(|id| id == found) {
                let may: Vec<u32> = self.may_hold(n, flushed, now).collect();
                return Err(format!(
                    "sector {n} holds {found}, which is none of {may:?} (time {now}, flushed {flushed})"
                ));
            }
        }
        Ok(())
    }
}

/// The name of what sector `n` holds, if it is a content as `fill` makes it.
fn name_of(sector: &[u8], n: u64) -> Option<u32> {
    let head = u64::from_le_bytes(sector.get(..8)?.try_into().ok()?);
    let id = if head == 0 { 0 } else { u32::try_from(head & 0x0000_ffff_ffff_ffff).ok()? };
    let words = sector.chunks_exact(8).zip(n * 64..);
    words.into_iter().all(|(have, w)| have == word(id, w).to_le_bytes()).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::super::history::fill;
    use super::*;

    #[test]
    fn a_cut_keeps_what_was_flushed_and_any_of_what_was_not() {
        let mut ledger = Ledger::new(1024, |_| 1);
        let write = |id| Step::Write { at: 0, len: 512, id };
        for (id, t) in [(2, 1), (3, 3)] {
            ledger.begin(&write(id), t);
            ledger.end(&write(id), t, t + 1, true);
        }
        let holds = |ledger: &Ledger, id, now| {
            let content: Vec<u8> = [fill(id, 0, 512), fill(1, 512, 512)].concat();
            ledger.check(&content, now).is_ok()
        };
        assert!(holds(&ledger, 1, 4) && holds(&ledger, 2, 4) && holds(&ledger, 3, 4) && !holds(&ledger, 4, 4));
        assert!(!holds(&ledger, 3, 2), "not written yet");
        ledger.begin(&Step::Flush, 5);
        ledger.end(&Step::Flush, 5, 6, true);
        assert!(holds(&ledger, 2, 5) && !holds(&ledger, 2, 6) && holds(&ledger, 3, 6));
        ledger.begin(&Step::Discard { at: 0, len: 512 }, 7);
        ledger.end(&Step::Discard { at: 0, len: 512 }, 7, 8, true);
        ledger.begin(&Step::Flush, 9);
        ledger.end(&Step::Flush, 9, 10, true);
        assert!(holds(&ledger, 3, 10) && holds(&ledger, 0, 10) && !holds(&ledger, 1, 10));
    }

    #[test]
    fn a_resize_is_all_or_nothing() {
        let mut ledger = Ledger::new(1024, |_| 1);
        ledger.begin_resize(512, 1);
        let (long, short) = ([fill(1, 0, 512), fill(1, 512, 512)].concat(), fill(1, 0, 512));
        assert!(ledger.check(&long, 1).is_ok() && ledger.check(&short, 1).is_ok());
        ledger.end_resize(2, true);
        assert!(ledger.check(&long, 2).is_err() && ledger.check(&short, 2).is_ok());
        ledger.begin_resize(1536, 3);
        let grown = [fill(1, 0, 512), vec![0; 1024]].concat();
        assert!(ledger.check(&grown, 3).is_ok() && ledger.check(&short, 3).is_ok() && ledger.check(&short, 2).is_ok());
        ledger.end_resize(4, true);
        assert!(ledger.check(&grown, 4).is_ok() && ledger.check(&short, 4).is_err());
        assert!(ledger.check(&[long, vec![0; 512]].concat(), 4).is_err(), "what was cut off does not come back");
    }

    #[test]
    fn bytes_follow_steps() {
        let mut bytes = Bytes::new(vec![7; 2048]);
        bytes.apply(&Step::Discard { at: 512, len: 512 });
        assert_eq!(bytes.differs(0, &[7; 2048]), None);
        assert_eq!(bytes.differs(512, &[0; 512]), None);
        assert_eq!(bytes.differs(512, &[1; 512]), Some(512));
        assert_eq!(bytes.loose_ranges(), [(512, 512)]);
        bytes.apply(&Step::Write { at: 513, len: 511, id: 5 });
        assert_eq!(bytes.loose_ranges(), [(512, 1)]);
        assert_eq!(bytes.differs(513, &fill(5, 513, 511)), None);
    }
}
