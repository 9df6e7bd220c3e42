// SPDX-License-Identifier: Apache-2.0
//! Exits to the monitor by what was touched (a port, an address) and by the guest's instruction that did it.
//!
//! Kept only by a run whose timeline was asked for, by each vCPU thread for itself; `tare boot --explain` prints it.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::path::Path;

use serde::Serialize;

use crate::ledger::Reason;

/// Most places that are told apart; a guest can't make the table larger.
const LIMIT: usize = 8192;

/// Exits by reason, port or address, and instruction pointer.
#[derive(Debug, Default)]
pub struct Places {
    counts: HashMap<(Reason, u64, u64), u64>,
    /// Those that found the table full.
    elsewhere: u64,
}

/// One line of the account.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Why the guest left.
    pub reason: &'static str,
    /// The port or address it touched.
    pub at: u64,
    /// Its instruction pointer.
    pub rip: u64,
    /// How often.
    pub count: u64,
}

impl Places {
    /// Counts one exit.
    pub fn add(&mut self, reason: Reason, at: u64, rip: u64) {
        let room = self.counts.len() < LIMIT;
        match self.counts.get_mut(&(reason, at, rip)) {
            Some(count) => *count += 1,
            None if room => drop(self.counts.insert((reason, at, rip), 1)),
            None => self.elsewhere += 1,
        }
    }

    /// All of them, most frequent first.
    #[must_use]
    pub fn rows(&self) -> Vec<Place> {
        let row =
            |(&(reason, at, rip), &count): (&(Reason, u64, u64), &u64)| Place { reason: reason.name(), at, rip, count };
        let mut rows: Vec<Place> = self.counts.iter().map(row).collect();
        rows.sort_by_key(|p| (std::cmp::Reverse(p.count), p.reason, p.at, p.rip));
        if self.elsewhere > 0 {
            rows.push(Place { reason: "elsewhere", at: 0, rip: 0, count: self.elsewhere });
        }
        rows
    }
}

/// Names of the guest kernel's functions, from its `System.map` or `/proc/kallsyms`.
#[derive(Debug, Default)]
pub struct Symbols(BTreeMap<u64, String>);

impl Symbols {
    /// Reads such a file; lines that are something else are left out.
    ///
    /// # Errors
    /// When it can't be read.
    pub fn read(path: &Path) -> std::io::Result<Self> {
        Ok(Self::parse(&std::fs::read_to_string(path)?))
    }

    fn parse(text: &str) -> Self {
        let symbol = |line: &str| {
            let mut words = line.split_ascii_whitespace();
            let at = u64::from_str_radix(words.next()?, 16).ok()?;
            let kind = words.next()?;
            matches!(kind, "t" | "T" | "w" | "W").then_some((at, words.next()?.to_owned()))
        };
        Self(text.lines().filter_map(symbol).collect())
    }

    /// `function+offset`, or the bare address.
    #[must_use]
    pub fn name(&self, rip: u64) -> String {
        match self.0.range(..=rip).next_back() {
            Some((at, name)) if rip - at < 1 << 20 => format!("{name}+{:#x}", rip - at),
            _ => format!("{rip:#x}"),
        }
    }
}

/// The `most` most frequent places as a table.
#[must_use]
pub fn table(places: &[Place], symbols: &Symbols, most: usize) -> String {
    let mut out = format!("{:>10}  {:<10} {:<12} {}\n", "exits", "reason", "at", "instruction");
    for p in places.iter().take(most) {
        // Writing to a string can't fail.
        let _ =
            writeln!(out, "{:>10}  {:<10} {:<12} {}", p.count, p.reason, format!("{:#x}", p.at), symbols.name(p.rip));
    }
    let rest: u64 = places.iter().skip(most).map(|p| p.count).sum();
    if rest > 0 {
        let _ = writeln!(out, "{rest:>10}  at {} other places", places.len() - most);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_named_and_bounded() {
        let mut places = Places::default();
        for _ in 0..3 {
            places.add(Reason::PioRead, 0x3fd, 0xffff_ffff_8100_0010);
        }
        places.add(Reason::MmioWrite, 0xc000_0014, 0x1234);
        let rows = places.rows();
        assert_eq!((rows[0].reason, rows[0].at, rows[0].count), ("pio-read", 0x3fd, 3));
        let symbols = Symbols::parse(
            "ffffffff81000000 T wait_for_lsr\nffffffff81000008 d data\njunk\nffffffff81000040 t next [mod]\n",
        );
        assert_eq!(symbols.name(rows[0].rip), "wait_for_lsr+0x10");
        assert_eq!(symbols.name(0x1234), "0x1234");
        let text = table(&rows, &symbols, 1);
        assert!(text.contains("wait_for_lsr+0x10") && text.contains("1  at 1 other places"), "{text}");
        for rip in 0..2 * LIMIT as u64 {
            places.add(Reason::PioWrite, 1, rip);
        }
        let rows = places.rows();
        assert_eq!(rows.len(), LIMIT + 1);
        assert_eq!(rows.iter().map(|p| p.count).sum::<u64>(), 4 + 2 * LIMIT as u64);
    }
}
