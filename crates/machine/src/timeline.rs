// SPDX-License-Identifier: Apache-2.0
//! The boot as a timeline: moments of a run, and what had been spent up to each. `tare boot --explain` prints it.
//!
//! `build` notes its steps, vCPU threads the guest's start and its markers, the console's tap the lines by which a Linux
//! kernel says how far it is. Two ports are markers, as in other monitors: 0x3f0 takes 123 for "the guest has booted", and
//! 0x80 any byte. The lock is held to push one entry; a guest can't make the list longer than [`LIMIT`].

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use kvm::Stats;
use serde::Serialize;

use crate::ledger::plain;

/// The port that says "booted" (Firecracker's boot timer), and what is written to it.
pub const BOOT_PORT: u16 = 0x3f0;
/// See [`BOOT_PORT`].
pub const BOOTED: u8 = 123;
/// The port whose every value is a marker (a PC's diagnostic port).
pub const DEBUG_PORT: u16 = 0x80;
/// Most moments that are kept.
const LIMIT: usize = 64;

/// What had been spent when something was reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// What was reached.
    pub what: String,
    /// Nanoseconds since the monitor began to set up.
    pub ns: u64,
    /// The guest kernel's own clock in nanoseconds, where a line of its log has said so.
    pub guest_ns: Option<u64>,
    /// Exits of all vCPUs by kind; empty unless the timeline was asked for, and where KVM has no statistics.
    pub exits: BTreeMap<&'static str, u64>,
}

/// The moments of one run.
pub struct Timeline {
    begun: Instant,
    moments: Mutex<Vec<Moment>>,
    /// Where exits are read at each moment.
    stats: OnceLock<Vec<Stats>>,
    /// Values that [`DEBUG_PORT`] has seen, a bit each.
    seen: [AtomicU64; 4],
}

impl Timeline {
    /// An empty timeline that starts at `begun`.
    #[must_use]
    pub fn new(begun: Instant) -> Self {
        Self { begun, moments: Mutex::default(), stats: OnceLock::new(), seen: Default::default() }
    }

    /// Exits are noted too from now on, from these statistics of all vCPUs.
    pub fn count(&self, stats: Vec<Stats>) {
        // Called once; a second call would change nothing.
        let _ = self.stats.set(stats);
    }

    /// Notes that `what` is reached now.
    pub fn note(&self, what: &str) {
        self.note_line(what, None);
    }

    /// As [`Timeline::note`], by a line of the guest kernel's log that was stamped `guest_ns`.
    pub fn note_line(&self, what: &str, guest_ns: Option<u64>) {
        let ns = self.begun.elapsed().as_nanos() as u64;
        let exits = self.stats.get().map(|stats| by_kind(stats)).unwrap_or_default();
        let mut moments = self.moments.lock().unwrap_or_else(PoisonError::into_inner);
        if moments.len() < LIMIT {
            moments.push(Moment { what: what.to_owned(), ns, guest_ns, exits });
        }
    }

    /// The guest wrote `value` to [`BOOT_PORT`].
    pub fn boot_port(&self, value: u8) {
        if value == BOOTED {
            self.note("boot marker");
        }
    }

    /// The guest wrote `value` to [`DEBUG_PORT`]: the first of each value counts.
    pub fn debug_port(&self, value: u8) {
        let (word, bit) = (usize::from(value >> 6), 1u64 << (value & 63));
        if self.seen.get(word).is_some_and(|seen| seen.fetch_or(bit, Ordering::Relaxed) & bit == 0) {
            self.note(&format!("debug port {value:#04x}"));
        }
    }

    /// All moments in their order; taken.
    #[must_use]
    pub fn take(&self) -> Vec<Moment> {
        std::mem::take(&mut *self.moments.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// KVM's counters sorted into kinds that add up. `emulated` is what KVM answered by emulating the instruction: its own MMIO, and
/// on processors that don't say where the next instruction is, CPUID and MSRs too.
fn by_kind(stats: &[Stats]) -> BTreeMap<&'static str, u64> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for (name, value) in stats.iter().flat_map(|s| plain(&s.read())) {
        *sums.entry(name).or_default() += value;
    }
    let get = |name: &str| sums.get(name).copied().unwrap_or(0);
    let mut left = get("exits");
    let mut out = BTreeMap::from([("all", left)]);
    for (kind, count) in [
        ("pio", get("io_exits")),
        ("mmio", get("mmio_exits")),
        ("halt", get("halt_exits")),
        ("irq", get("irq_exits") + get("irq_window_exits")),
        ("fault", get("pf_taken")),
        ("emulated", get("insn_emulation").saturating_sub(get("mmio_exits"))),
        ("other", u64::MAX),
    ] {
        let count = count.min(left);
        left -= count;
        out.insert(kind, count);
    }
    out
}

/// Prints moments as a table: each row is what it took to get there from the row before.
pub struct Explained<'a>(pub &'a [Moment]);

const KINDS: [&str; 8] = ["all", "pio", "mmio", "emulated", "fault", "irq", "halt", "other"];

impl fmt::Display for Explained<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>10} {:>10} {:>8}", "at ms", "took ms", "exits")?;
        for kind in &KINDS[1..] {
            write!(f, " {kind:>11}")?;
        }
        writeln!(f, "  until")?;
        let ms = |ns: u64| ns as f64 / 1e6;
        let mut last = &Moment::default();
        for m in self.0 {
            write!(f, "{:>10.1} {:>10.1}", ms(m.ns), ms(m.ns.saturating_sub(last.ns)))?;
            for (index, kind) in KINDS.iter().enumerate() {
                let get = |moment: &Moment| moment.exits.get(kind).copied().unwrap_or(0);
                let count = get(m).saturating_sub(get(last));
                if index == 0 { write!(f, " {count:>8}")? } else { write!(f, " {count:>11}")? }
            }
            writeln!(f, "  {}", m.what)?;
            last = m;
        }
        let parts = parts(self.0);
        if !parts.is_empty() {
            let parts: Vec<String> = parts.iter().map(|(name, ns)| format!("{name} {:.1} ms", ms(*ns))).collect();
            writeln!(f, "in short: {}", parts.join(", "))?;
        }
        Ok(())
    }
}

/// Names of the moments that [`parts`] looks for.
pub const GUEST_STARTS: &str = "the guest starts";
/// See [`GUEST_STARTS`].
pub const FIRST_LINE: &str = "kernel: first line";
/// See [`GUEST_STARTS`].
pub const UNPACKING: &str = "initrd: being unpacked";
/// See [`GUEST_STARTS`].
pub const UNPACKED: &str = "initrd: unpacked";
/// See [`GUEST_STARTS`].
pub const USER_SPACE: &str = "user space starts";
/// See [`GUEST_STARTS`].
pub const USER_LINE: &str = "user space: first line";

/// The boot in four or five parts, by the guest's own clock where its log has stamps: a console shows lines late, and the
/// kernel's clock starts when the kernel does, after whatever unpacked it.
#[must_use]
pub fn parts(moments: &[Moment]) -> Vec<(&'static str, u64)> {
    let at = |what: &str| moments.iter().find(|m| m.what == what);
    let Some(start) = at(GUEST_STARTS) else { return Vec::new() };
    // No line is seen before it is stamped, so the earliest sight bounds when the guest's clock was 0.
    let zero = moments.iter().filter_map(|m| m.ns.checked_sub(m.guest_ns.filter(|g| *g > 0)?)).min();
    let mut out = vec![("monitor", start.ns)];
    let Some(zero) = zero else { return out };
    let time = |m: &Moment| m.guest_ns.map_or(m.ns, |g| zero + g);
    out.push(("before the kernel's clock", zero.saturating_sub(start.ns)));
    let Some(user) = at(USER_SPACE).map(time) else { return out };
    let initrd = match (at(UNPACKING), at(UNPACKED)) {
        (Some(begin), Some(end)) => time(end).saturating_sub(time(begin)),
        _ => 0,
    };
    out.push(("kernel", user.saturating_sub(zero).saturating_sub(initrd)));
    out.push(("initrd", initrd));
    if let Some(line) = at(USER_LINE).or_else(|| at("boot marker")) {
        out.push(("user space", time(line).saturating_sub(user)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(what: &str, ms: u64, guest_ms: Option<u64>) -> Moment {
        Moment {
            what: what.to_owned(),
            ns: ms * 1_000_000,
            guest_ns: guest_ms.map(|g| g * 1_000_000),
            ..Moment::default()
        }
    }

    #[test]
    fn parts_follow_the_guests_clock() {
        let moments = [
            moment("kernel loaded", 3, None),
            moment(GUEST_STARTS, 5, None),
            moment(FIRST_LINE, 300, Some(0)),
            moment(UNPACKING, 400, Some(200)),
            moment(UNPACKED, 410, Some(205)),
            moment(USER_SPACE, 950, Some(800)),
            moment(USER_LINE, 960, None),
        ];
        let want =
            [("monitor", 5), ("before the kernel's clock", 145), ("kernel", 795), ("initrd", 5), ("user space", 10)];
        assert_eq!(parts(&moments), want.map(|(name, ms)| (name, ms * 1_000_000)));
        let text = Explained(&moments).to_string();
        assert!(text.contains("in short: monitor 5.0 ms, before the kernel's clock 145.0 ms"), "{text}");
        assert_eq!(text.lines().count(), 9);
    }

    #[test]
    fn a_guest_that_says_nothing_has_a_monitor_part() {
        assert_eq!(parts(&[moment(GUEST_STARTS, 5, None)]), [("monitor", 5_000_000)]);
        assert_eq!(parts(&[]), []);
    }

    #[test]
    fn a_guest_can_not_fill_the_list() {
        let timeline = Timeline::new(Instant::now());
        for value in (0..=255).chain(0..=255) {
            timeline.debug_port(value);
        }
        for value in [0, BOOTED] {
            timeline.boot_port(value);
        }
        let moments = timeline.take();
        assert_eq!(moments.len(), LIMIT);
        assert_eq!((moments[0].what.as_str(), moments[63].what.as_str()), ("debug port 0x00", "debug port 0x3f"));
    }

    #[test]
    fn the_boot_marker_is_one_value() {
        let timeline = Timeline::new(Instant::now());
        timeline.boot_port(1);
        timeline.boot_port(BOOTED);
        assert_eq!(timeline.take().iter().map(|m| m.what.as_str()).collect::<Vec<_>>(), ["boot marker"]);
    }
}
