// SPDX-License-Identifier: Apache-2.0
//! One direction of a pair of queues under its rate limits, if it has any. Owned by the pair's worker; the buckets are those of
//! the whole device.

use std::sync::Arc;
use std::time::Duration;

use super::stats::NetCounts;
use crate::throttle::Throttle;

/// See above.
#[derive(Default)]
pub struct Limit {
    throttle: Option<Arc<Throttle>>,
    /// Since when the next packet waits.
    since: Option<u64>,
}

impl Limit {
    /// Under `throttle`.
    pub fn new(throttle: Option<Arc<Throttle>>) -> Self {
        Self { throttle, since: None }
    }

    /// How long the next packet has to wait; `None` if not at all.
    pub fn wait(&mut self, counts: &mut NetCounts) -> Option<Duration> {
        let throttle = self.throttle.as_ref()?;
        let now = throttle.now();
        let wait = throttle.wait(now);
        match (wait, self.since) {
            (Some(_), None) => {
                counts.throttled += 1;
                self.since = Some(now);
            }
            (None, Some(since)) => {
                counts.throttled_ns += now.saturating_sub(since);
                self.since = None;
            }
            _ => {}
        }
        wait
    }

    /// A frame of `bytes` bytes goes.
    pub fn charge(&self, bytes: usize) {
        if let Some(throttle) = &self.throttle {
            throttle.charge(throttle.now(), bytes as u64);
        }
    }
}
