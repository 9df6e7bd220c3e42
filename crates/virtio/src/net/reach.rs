// SPDX-License-Identifier: Apache-2.0
//! What of guest memory the host's kernel reaches for vhost-net: a table that follows the machine's address space, given to
//! every pair of queues that the kernel serves.
//!
//! A pair joins on its worker's thread; changes come from whoever changes the address space. The lock is held while the kernel
//! takes a table: a pair that joins at that moment must not be given the one before.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base::{Gpa, Hva};
use mem::GuestRam;
use mem::space::{Change, FlatView, Listener, SpaceError, Target};

/// Runs of memory that a kernel takes in a table, unless its administrator allowed more (`max_mem_regions` of vhost).
pub(super) const MOST: usize = 64;

/// A run of guest memory: where the guest has it, bytes, and where it is in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub guest: Gpa,
    pub len: u64,
    pub host: Hva,
}

/// Who is given tables.
pub(super) trait Reaches: Send + Sync {
    /// Reaches these runs, sorted and apart, and no others from now on.
    fn reach(&self, runs: &[Run]) -> io::Result<()>;
}

struct Inner {
    runs: Vec<Run>,
    joined: Vec<Weak<dyn Reaches>>,
}

/// The table, and who has it.
pub struct VhostMemory {
    inner: Mutex<Inner>,
    /// Keeps whatever is in the table mapped: nothing else is put there.
    ram: GuestRam,
}

impl VhostMemory {
    /// Of what is always there of `ram`, until [`VhostMemory::listener`] says more.
    #[must_use]
    pub fn new(ram: &GuestRam) -> Self {
        let runs = ram.regions().map(|(guest, len, host)| Run { guest, len, host }).collect();
        Self { inner: Mutex::new(Inner { runs: merged(runs), joined: Vec::new() }), ram: ram.clone() }
    }

    /// Has the table follow an address space.
    #[must_use]
    pub fn listener<D: Clone + Send>(self: &Arc<Self>) -> Box<dyn Listener<D>> {
        Box::new(Follower(Arc::clone(self)))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `who` reaches what there is, and what there will be while it lives.
    pub(super) fn join<R: Reaches + 'static>(&self, who: &Arc<R>) -> io::Result<()> {
        let mut inner = self.lock();
        who.reach(&inner.runs)?;
        // Also one that comes again.
        let weak: Weak<dyn Reaches> = Arc::<R>::downgrade(who);
        inner.joined.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&weak));
        inner.joined.push(weak);
        Ok(())
    }

    /// The runs of `view` that are this guest's memory.
    fn runs<D: Clone>(&self, view: &FlatView<D>) -> Vec<Run> {
        let hot = self.ram.hot().map(|hot| (hot.size(), hot.host()));
        let mapped: Vec<(u64, Hva)> = self.ram.regions().map(|(_, len, host)| (len, host)).chain(hot).collect();
        let ours = |host: Hva, len: u64| {
            mapped.iter().any(|(size, start)| host >= *start && host.0 - start.0 <= size.saturating_sub(len))
        };
        let run = |range: &mem::space::FlatRange<D>| match range.target {
            Target::Ram(host) if ours(host, range.size) => Some(Run { guest: Gpa(range.start), len: range.size, host }),
            _ => None,
        };
        merged(view.ranges().iter().filter_map(run).collect())
    }

    /// Everybody has `runs` from now on, or, after a failure, what they had.
    fn replace(&self, runs: Vec<Run>) -> io::Result<()> {
        let mut inner = self.lock();
        if inner.runs == runs {
            return Ok(());
        }
        if runs.len() > MOST {
            return Err(io::Error::other(format!(
                "vhost-net takes {MOST} pieces of memory, and these are {}: take vhost=on out",
                runs.len()
            )));
        }
        let joined: Vec<Arc<dyn Reaches>> = inner.joined.iter().filter_map(Weak::upgrade).collect();
        for (done, who) in joined.iter().enumerate() {
            if let Err(why) = who.reach(&runs) {
                // A table that each had a moment ago; a kernel that refuses it now leaves no better way.
                for before in joined.iter().take(done) {
                    let _ = before.reach(&inner.runs);
                }
                return Err(why);
            }
        }
        inner.runs = runs;
        Ok(())
    }
}

/// Neighbours in both places are one run.
fn merged(runs: Vec<Run>) -> Vec<Run> {
    let mut out: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        match out.last_mut() {
            Some(last) if last.guest.0 + last.len == run.guest.0 && last.host.0 + last.len == run.host.0 => {
                last.len += run.len;
            }
            _ => out.push(run),
        }
    }
    out
}

struct Follower(Arc<VhostMemory>);

impl<D: Clone + Send> Listener<D> for Follower {
    fn apply(&mut self, change: &Change<'_, D>) -> Result<(), SpaceError> {
        let is_ram = |range: &&mem::space::FlatRange<D>| matches!(range.target, Target::Ram(_));
        let Some(first) = change.added.iter().chain(&change.removed).copied().find(is_ram) else { return Ok(()) };
        let refused = |source| SpaceError::Refused { what: "show memory to vhost-net", at: first.start, source };
        self.0.replace(self.0.runs(change.view)).map_err(refused)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
