// SPDX-License-Identifier: Apache-2.0
//! Interrupt coalescing by a device: an interrupt waits until some requests are finished or some time has gone by since the first
//! of them, whichever comes first. One [`Coalescer`] for each queue, on the thread that serves it; no lock, no timer of its
//! own: who sleeps asks how long it may.
//!
//! The used ring shows finished requests at once all the same, so that a driver that polls sees no delay.

use std::time::Duration;

use crate::throttle::Clock;

/// What a queue's interrupts waited, for the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waited {
    /// Interrupts, or what would have been some, that were put off.
    pub times: u64,
    /// Nanoseconds from the first finished request to its interrupt, added up.
    pub ns: u64,
}

/// Decides when the interrupt of one queue goes out.
#[derive(Clone, Debug)]
pub struct Coalescer {
    /// Nanoseconds and requests; `None` puts nothing off.
    limits: Option<(u64, u32)>,
    clock: Clock,
    /// Requests finished since the last interrupt, and when the first of them was.
    finished: u32,
    since: u64,
}

impl Coalescer {
    /// As `spec` says; `None` puts nothing off.
    #[must_use]
    pub fn new(spec: Option<spec::Coalesce>, clock: Clock) -> Self {
        let limits = spec.map(|spec| (u64::from(spec.usec) * 1000, spec.frames));
        Self { limits, clock, finished: 0, since: 0 }
    }

    /// A request was finished: it is in the used ring.
    pub fn finish(&mut self) {
        if self.limits.is_none() {
            return;
        }
        if self.finished == 0 {
            self.since = self.clock.now();
        }
        self.finished = self.finished.saturating_add(1);
    }

    /// How long the interrupt has to wait yet; `None` when there is none to wait for, or nothing is put off.
    #[must_use]
    pub fn wait(&self) -> Option<Duration> {
        let (ns, frames) = self.limits.filter(|_| self.finished > 0)?;
        if self.finished >= frames {
            return Some(Duration::ZERO);
        }
        Some(Duration::from_nanos(ns.saturating_sub(self.clock.now().saturating_sub(self.since))))
    }

    /// Whether it is time to look if the driver wants an interrupt. If so, what it waited is in `waited`, and the next
    /// request is the first again.
    pub fn take(&mut self, waited: &mut Waited) -> bool {
        match self.wait() {
            Some(rest) if !rest.is_zero() => false,
            Some(_) => {
                waited.times += 1;
                waited.ns += self.clock.now().saturating_sub(self.since);
                self.finished = 0;
                true
            }
            // Without limits each look is in time; with them there is nothing to look for.
            None => self.limits.is_none(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn at(usec: u32, frames: u32) -> (Coalescer, Arc<AtomicU64>) {
        let clock = Arc::new(AtomicU64::new(1_000_000));
        (Coalescer::new(Some(spec::Coalesce { usec, frames }), Clock::Manual(clock.clone())), clock)
    }

    #[test]
    fn the_first_request_starts_the_time() {
        let (mut held, clock) = at(50, 8);
        let mut waited = Waited::default();
        assert!(held.wait().is_none() && !held.take(&mut waited), "nothing finished");
        held.finish();
        clock.fetch_add(30_000, Ordering::Relaxed);
        held.finish();
        assert_eq!(held.wait(), Some(Duration::from_micros(20)));
        assert!(!held.take(&mut waited));
        clock.fetch_add(20_000, Ordering::Relaxed);
        assert!(held.take(&mut waited) && !held.take(&mut waited));
        assert_eq!(waited, Waited { times: 1, ns: 50_000 });
        held.finish();
        assert_eq!(held.wait(), Some(Duration::from_micros(50)), "the time starts anew");
    }

    #[test]
    fn enough_requests_wait_for_nothing() {
        let (mut held, clock) = at(50, 3);
        let mut waited = Waited::default();
        for _ in 0..2 {
            held.finish();
            assert!(!held.take(&mut waited));
        }
        clock.fetch_add(1_000, Ordering::Relaxed);
        held.finish();
        assert_eq!(held.wait(), Some(Duration::ZERO));
        assert!(held.take(&mut waited));
        assert_eq!(waited, Waited { times: 1, ns: 1_000 });
    }

    #[test]
    fn without_limits_nothing_is_put_off() {
        let mut held = Coalescer::new(None, Clock::default());
        let mut waited = Waited::default();
        assert!(held.take(&mut waited));
        held.finish();
        assert!(held.take(&mut waited) && held.wait().is_none());
        assert_eq!(waited, Waited::default());
    }
}
