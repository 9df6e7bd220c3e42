// SPDX-License-Identifier: Apache-2.0
//! A storage that fails or holds chosen requests, for tests: each race and each error of the host can be staged one by one.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{EventFd, Seg};

use crate::disk::{Completion, Op, Request};

use super::Storage;

/// One staged fault.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Which operation it hits; a write-zeroes rule hits both kinds.
    pub op: Op,
    /// Hits only requests that touch one of these bytes; a flush touches all.
    pub range: std::ops::Range<u64>,
    /// Lets so many matching requests pass first.
    pub after: u32,
    /// Then hits so many.
    pub times: u32,
    /// What the request fails with; `None` holds it back until [`FaultPlan::release`].
    pub errno: Option<i32>,
}

impl Fault {
    /// Every `op` from now on fails with `errno`.
    #[must_use]
    pub fn every(op: Op, errno: i32) -> Self {
        Self { op, range: 0..u64::MAX, after: 0, times: u32::MAX, errno: Some(errno) }
    }

    fn hits(&self, request: &Request<'_>) -> bool {
        std::mem::discriminant(&self.op) == std::mem::discriminant(&request.op)
            && (request.op == Op::Flush
                || (request.offset < self.range.end && self.range.start < request.offset.saturating_add(request.len)))
    }
}

#[derive(Debug, Default)]
struct Stage {
    faults: Vec<Fault>,
    released: bool,
    wake: Option<EventFd>,
}

/// The faults of one disk; clones share them, so that a test can change them while the disk runs.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    stage: Arc<Mutex<Stage>>,
}

impl FaultPlan {
    /// No faults yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a fault.
    pub fn add(&self, fault: Fault) {
        self.lock().faults.push(fault);
    }

    /// Takes all faults away; held requests stay held.
    pub fn clear(&self) {
        self.lock().faults.clear();
    }

    /// Lets the held requests go on and wakes the disk's user.
    pub fn release(&self) {
        let mut stage = self.lock();
        stage.released = true;
        if let Some(wake) = &stage.wake {
            // The only failure is a full counter, and then the user is awake anyway.
            let _ = wake.write(1);
        }
    }

    /// The fate of a request: `None` lets it pass.
    fn verdict(&self, request: &Request<'_>) -> Option<Option<i32>> {
        let mut stage = self.lock();
        for fault in stage.faults.iter_mut().filter(|f| f.hits(request)) {
            if fault.after > 0 {
                fault.after -= 1;
            } else if fault.times > 0 {
                fault.times -= 1;
                return Some(fault.errno);
            }
        }
        None
    }
}

/// A request held back.
#[derive(Debug)]
struct Held {
    id: u16,
    op: Op,
    offset: u64,
    len: u64,
    segs: Vec<Seg>,
}

/// A storage with staged faults.
#[derive(Debug)]
pub struct FaultStorage {
    inner: Storage,
    plan: FaultPlan,
    held: Vec<Held>,
    /// Completions nobody has reaped yet.
    pub ready: Vec<Completion>,
}

impl FaultStorage {
    /// `inner` with the faults of `plan`.
    pub fn new(inner: Storage, plan: FaultPlan) -> Self {
        Self { inner, plan, held: Vec::new(), ready: Vec::new() }
    }

    /// The storage below.
    pub fn inner(&self) -> &Storage {
        &self.inner
    }

    /// See [`Storage::share`]: the plan is shared too.
    pub fn share(&self) -> Option<Self> {
        Some(Self::new(self.inner.share()?, self.plan.clone()))
    }

    /// See [`crate::Disk::attach`].
    pub fn attach(&mut self, wake: &EventFd) -> io::Result<()> {
        self.plan.lock().wake = Some(wake.try_clone()?);
        self.inner.attach(wake)
    }

    /// See [`crate::Disk::detach`]. What is held goes on first.
    pub fn detach(&mut self) {
        self.let_go();
        self.inner.detach();
    }

    /// Takes a request, or fails it, or holds it.
    pub fn submit(&mut self, request: &Request<'_>) {
        match self.plan.verdict(request) {
            None => self.inner.submit(request),
            Some(Some(errno)) => {
                self.ready.push(Completion { id: request.id, result: Err(io::Error::from_raw_os_error(errno)) });
            }
            Some(None) => {
                let Request { id, op, offset, len, segs } = *request;
                self.held.push(Held { id, op, offset, len, segs: segs.to_vec() });
            }
        }
    }

    fn let_go(&mut self) {
        for Held { id, op, offset, len, segs } in self.held.drain(..) {
            self.inner.submit(&Request { id, op, offset, len, segs: &segs });
        }
        self.inner.commit();
    }

    /// See [`crate::Disk::commit`].
    pub fn commit(&mut self) {
        self.inner.commit();
    }

    /// See [`crate::Disk::reap`].
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        if !self.held.is_empty() && std::mem::take(&mut self.plan.lock().released) {
            self.let_go();
        }
        done.append(&mut self.ready);
        self.inner.reap(done);
    }

    /// See [`crate::Disk::want_wake`].
    pub fn want_wake(&mut self, on: bool) {
        self.inner.want_wake(on);
    }

    /// See [`crate::Disk::engine`].
    pub fn engine(&self) -> &'static str {
        self.inner.engine()
    }
}
