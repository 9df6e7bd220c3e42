// SPDX-License-Identifier: Apache-2.0
//! Rate limits of a device: a token bucket for bytes and one for requests. All queues of a disk draw from the same two,
//! those of a NIC from two for each direction, each queue from its own thread; a bucket is one atomic word, so nobody takes a
//! lock.
//!
//! A request goes ahead when each bucket holds at least one token, and is charged what it costs once its size is known. A
//! bucket may end below zero: a request larger than its bucket passes, and those after it wait until the debt is paid.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Fraction bits of the buckets' time, so that fast rates don't lose by rounding.
const FRACTION: u32 = 8;
/// Without a burst of its own a bucket holds what comes in a tenth of a second.
const TENTH: u64 = 10;

/// Where the throttle's time comes from.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The host's monotonic clock, from this moment on.
    Monotonic(Instant),
    /// Nanoseconds set by a test.
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// Nanoseconds since its start.
    #[must_use]
    pub fn now(&self) -> u64 {
        match self {
            Self::Monotonic(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Self::Manual(ns) => ns.load(Ordering::Acquire),
        }
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::Monotonic(Instant::now())
    }
}

/// A bucket that refills at a steady rate.
#[derive(Debug)]
struct Bucket {
    /// Tokens a second.
    rate: u64,
    /// How far `full_at` may lie ahead with one token left.
    most: u64,
    /// When the bucket is full again if nothing more is drawn, in 2^-8 ns.
    full_at: AtomicU64,
}

impl Bucket {
    /// A full bucket of `burst` tokens.
    fn new(rate: u64, burst: u64) -> Self {
        let mut bucket = Self { rate: rate.max(1), most: 0, full_at: AtomicU64::new(0) };
        bucket.most = bucket.time(burst.max(1)) - bucket.time(1);
        bucket
    }

    /// How long so many tokens take to come, in 2^-8 ns.
    fn time(&self, tokens: u64) -> u64 {
        let time = ((u128::from(tokens) * 1_000_000_000) << FRACTION) / u128::from(self.rate);
        u64::try_from(time).unwrap_or(u64::MAX)
    }

    /// How long until there is a token, in 2^-8 ns.
    fn wait(&self, now: u64) -> u64 {
        self.full_at.load(Ordering::Relaxed).saturating_sub(now).saturating_sub(self.most)
    }

    fn charge(&self, now: u64, tokens: u64) {
        let time = self.time(tokens);
        // The word stands for itself alone, so that no order beyond its own is needed.
        let _ = self
            .full_at
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |at| Some(at.max(now).saturating_add(time)));
    }
}

/// The limits of one device, or of one of its directions.
#[derive(Debug)]
pub struct Throttle {
    clock: Clock,
    bytes: Option<Bucket>,
    requests: Option<Bucket>,
}

impl Throttle {
    /// What `spec` asks for; `None` if it asks for nothing.
    #[must_use]
    pub fn new(spec: &spec::Throttle, clock: Clock) -> Option<Self> {
        let bucket = |rate: Option<u64>, burst: Option<u64>| {
            rate.map(|rate| Bucket::new(rate, burst.unwrap_or_else(|| rate.div_ceil(TENTH))))
        };
        let (bytes, requests) = (bucket(spec.bps, spec.bps_burst), bucket(spec.iops, spec.iops_burst));
        (bytes.is_some() || requests.is_some()).then_some(Self { clock, bytes, requests })
    }

    /// Nanoseconds of its clock.
    #[must_use]
    pub fn now(&self) -> u64 {
        self.clock.now()
    }

    /// How long the next request has to wait at time `now`; `None` if not at all.
    #[must_use]
    pub fn wait(&self, now: u64) -> Option<Duration> {
        let now = now << FRACTION;
        let wait = [&self.bytes, &self.requests].into_iter().flatten().map(|b| b.wait(now)).max().unwrap_or(0);
        (wait > 0).then(|| Duration::from_nanos(wait.div_ceil(1 << FRACTION)))
    }

    /// Draws one request of `bytes` bytes.
    pub fn charge(&self, now: u64, bytes: u64) {
        let now = now << FRACTION;
        if let Some(bucket) = &self.bytes {
            bucket.charge(now, bytes);
        }
        if let Some(bucket) = &self.requests {
            bucket.charge(now, 1);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn throttle(bps: Option<u64>, bps_burst: Option<u64>, iops: Option<u64>, iops_burst: Option<u64>) -> Throttle {
        let spec = spec::Throttle { bps, bps_burst, iops, iops_burst };
        Throttle::new(&spec, Clock::Manual(Arc::default())).unwrap()
    }

    /// Serves requests of `bytes` from a queue that is never empty until `end`; gives how many.
    fn serve(throttle: &Throttle, from: u64, end: u64, bytes: u64) -> u64 {
        let (mut now, mut served) = (from, 0);
        loop {
            match throttle.wait(now) {
                None => {
                    throttle.charge(now, bytes);
                    served += 1;
                }
                Some(wait) => now += u64::try_from(wait.as_nanos()).unwrap(),
            }
            if now >= end {
                return served;
            }
        }
    }

    #[test]
    fn nothing_asked_for_is_no_throttle() {
        assert!(Throttle::new(&spec::Throttle::default(), Clock::default()).is_none());
    }

    #[test]
    fn a_burst_then_the_rate() {
        let t = throttle(None, None, Some(100), Some(7));
        assert_eq!(serve(&t, 0, 1, 0), 7, "the bucket is full at first");
        assert_eq!(t.wait(1).map(|w| w.as_nanos()), Some(u128::from(SECOND / 100 - 1)));
        assert_eq!(serve(&t, 1, 10 * SECOND + 1, 0), 1000);
        // Idle time fills the bucket to its size and no further.
        assert_eq!(serve(&t, 100 * SECOND, 100 * SECOND + 1, 0), 7);
    }

    #[test]
    fn a_burst_of_its_own_is_a_tenth_of_a_second() {
        assert_eq!(serve(&throttle(None, None, Some(1000), None), 0, 1, 0), 100);
        assert_eq!(serve(&throttle(None, None, Some(5), None), 0, 1, 0), 1, "at least one");
        assert_eq!(serve(&throttle(Some(1 << 20), None, None, None), 0, 1, 4096), 26, "the last takes what is left");
    }

    #[test]
    fn bytes_and_requests_hold_both() {
        let t = throttle(Some(1 << 20), Some(4096), Some(100), Some(1));
        let small = serve(&t, 0, 10 * SECOND, 512);
        assert!((1000..=1001).contains(&small), "{small} small ones: requests are what limits");
        let t = throttle(Some(1 << 20), Some(4096), Some(100), Some(1));
        let large = serve(&t, 0, 10 * SECOND, 1 << 20);
        assert!((10..=11).contains(&large), "{large} large ones: bytes are what limits");
    }

    #[test]
    fn a_request_larger_than_the_bucket_passes_and_is_paid_for() {
        let t = throttle(Some(1000), Some(10), None, None);
        assert_eq!(t.wait(0), None);
        t.charge(0, 5000);
        // 4990 tokens of debt, and one to go on with.
        assert_eq!(t.wait(0), Some(Duration::from_millis(4991)));
        assert_eq!(t.wait(4991 * SECOND / 1000), None);
    }

    #[test]
    fn fast_rates_are_not_rounded_away() {
        for iops in [3, 7, 999, 333_333, 7_000_000] {
            let t = throttle(None, None, Some(iops), Some(1));
            let seconds = if iops > 1000 { 1 } else { 100 };
            let served = serve(&t, 0, seconds * SECOND, 0);
            let wanted = iops * seconds;
            assert!(served.abs_diff(wanted) <= wanted / 100 + 1, "{served} of {wanted}");
        }
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let t = throttle(Some(1), Some(u64::MAX), Some(u64::MAX), Some(u64::MAX));
        for _ in 0..10 {
            t.charge(u64::MAX >> FRACTION, u64::MAX);
        }
        let _ = t.wait(u64::MAX);
        let t = throttle(Some(1), Some(1), None, None);
        t.charge(0, u64::MAX);
        assert!(t.wait(0).is_some());
    }

    #[test]
    fn queues_draw_from_one_bucket() {
        let t = throttle(None, None, Some(1), Some(1000));
        let served = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while t.wait(0).is_none() {
                        t.charge(0, 0);
                        served.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        let served = served.into_inner();
        assert!((1000..=1003).contains(&served), "{served}: each queue may run ahead by one, as debt");
        assert!(t.wait(0).unwrap() >= Duration::from_secs(served - 999), "and it is paid back");
    }
}
