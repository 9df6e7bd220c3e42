// SPDX-License-Identifier: Apache-2.0
//! Watches over a wire: one that has to move and does not for a while shows as a link that is down. Owned by the worker.

use std::time::{Duration, Instant};

use super::shared::Shared;

/// How the wire does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// It moves, or has no reason to.
    Well,
    /// It has had to move since then and did not.
    Stuck(Instant),
    /// The same, for so long that the link is down.
    Stalled,
}

/// See above.
pub struct Watch {
    pace: Pace,
    moved: u64,
    /// How long the wire may stand still while it has to move.
    patience: Duration,
}

impl Watch {
    /// A wire that moves.
    pub fn new(patience: Duration) -> Self {
        Self { pace: Pace::Well, moved: 0, patience }
    }

    /// There is nothing to watch any more.
    pub fn end(&mut self) {
        self.pace = Pace::Well;
    }

    /// The wire has `moved` so many bytes; `waited_for`: somebody waits for it. Gives how long until the next look.
    pub fn look(&mut self, moved: u64, waited_for: bool, name: &str, shared: &Shared) -> Option<Duration> {
        let moves = moved != self.moved;
        self.moved = moved;
        let patience = self.patience;
        match self.pace {
            Pace::Stalled if moves => {
                shared.set_link(true, format!("{name}: the other end moves again; the guest's link is up"));
                self.pace = Pace::Well;
            }
            Pace::Stalled => {}
            _ if !waited_for => self.pace = Pace::Well,
            Pace::Well => self.pace = Pace::Stuck(Instant::now()),
            Pace::Stuck(_) if moves => self.pace = Pace::Stuck(Instant::now()),
            Pace::Stuck(since) if since.elapsed() >= patience => {
                let seconds = patience.as_secs();
                let line = format!(
                    "{name}: the other end has not moved for {seconds} s; the guest's link is down until it does"
                );
                shared.set_link(false, line);
                self.pace = Pace::Stalled;
            }
            Pace::Stuck(_) => {}
        }
        match self.pace {
            Pace::Stuck(since) => Some(patience.saturating_sub(since.elapsed())),
            Pace::Well | Pace::Stalled => None,
        }
    }
}
