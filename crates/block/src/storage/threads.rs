// SPDX-License-Identifier: Apache-2.0
//! The thread-pool back end, for kernels without io_uring and as the thing to compare with: a few threads that make plain
//! system calls. Started one by one as the load asks for them; they end with the pool.
//!
//! Locks: `queue` (jobs, worker to threads) and `done` (completions, threads to worker), each held for a push or a pop.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use base::{EventFd, Seg};

use crate::disk::{Completion, Op, Request};

use super::sys;

/// Most threads of one disk.
const MOST: usize = 8;
/// Their stacks; they call nothing deep.
const STACK: usize = 64 << 10;

#[derive(Debug)]
struct Job {
    id: u16,
    op: Op,
    offset: u64,
    len: u64,
    segs: Vec<Seg>,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle: usize,
    /// Emptied segment lists, used again.
    spare: Vec<Vec<Seg>>,
    stop: bool,
}

#[derive(Debug)]
struct Shared {
    file: Arc<File>,
    block_device: bool,
    queue: Mutex<Queue>,
    work: Condvar,
    done: Mutex<Vec<Completion>>,
    landed: Condvar,
    wake: EventFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics while holding these; if it did, the data is still whole.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pool for one disk.
#[derive(Debug)]
pub struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Submitted, not committed.
    batch: Vec<Job>,
    spare: Vec<Vec<Seg>>,
    in_flight: usize,
}

impl Threads {
    /// A pool for `file` with one thread; writes to `wake` when completions appear.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn new(file: &Arc<File>, block_device: bool, wake: &EventFd) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            file: Arc::clone(file),
            block_device,
            queue: Mutex::default(),
            work: Condvar::new(),
            done: Mutex::default(),
            landed: Condvar::new(),
            wake: wake.try_clone()?,
        });
        let mut pool = Self { shared, threads: Vec::new(), batch: Vec::new(), spare: Vec::new(), in_flight: 0 };
        pool.start_one()?;
        Ok(pool)
    }

    fn start_one(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let name = format!("blk-aio-{}", self.threads.len());
        let thread = std::thread::Builder::new().name(name).stack_size(STACK).spawn(move || shared.serve())?;
        self.threads.push(thread);
        Ok(())
    }

    /// Queues a request.
    pub fn submit(&mut self, request: &Request<'_>) {
        let mut segs = self.spare.pop().unwrap_or_default();
        segs.extend_from_slice(request.segs);
        self.in_flight += 1;
        self.batch.push(Job { id: request.id, op: request.op, offset: request.offset, len: request.len, segs });
    }

    /// Hands what is queued to the threads.
    pub fn commit(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let mut queue = lock(&self.shared.queue);
        queue.jobs.extend(self.batch.drain(..));
        self.spare.append(&mut queue.spare);
        let (waiting, idle) = (queue.jobs.len(), queue.idle);
        drop(queue);
        for _ in 0..waiting.min(idle) {
            self.shared.work.notify_one();
        }
        for _ in 0..waiting.saturating_sub(idle).min(MOST - self.threads.len().min(MOST)) {
            // There is at least one thread: if no more can be had, that one does it all.
            if self.start_one().is_err() {
                break;
            }
        }
    }

    /// Appends the completions there are.
    pub fn reap(&mut self, done: &mut Vec<Completion>) {
        let mut landed = lock(&self.shared.done);
        self.in_flight = self.in_flight.saturating_sub(landed.len());
        done.append(&mut landed);
    }

    /// Waits for all that is in flight.
    pub fn drain(&mut self, done: &mut Vec<Completion>) {
        self.commit();
        while self.in_flight > 0 {
            let landed = lock(&self.shared.done);
            let landed = self.shared.landed.wait_while(landed, |l| l.is_empty());
            drop(landed);
            self.reap(done);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        lock(&self.shared.queue).stop = true;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn serve(&self) {
        let mut queue = lock(&self.queue);
        loop {
            let Some(mut job) = queue.jobs.pop_front() else {
                if queue.stop {
                    return;
                }
                queue.idle += 1;
                queue = self.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle -= 1;
                continue;
            };
            drop(queue);
            let result = sys::execute(&self.file, self.block_device, job.op, job.offset, job.len, &job.segs);
            let mut done = lock(&self.done);
            let first = done.is_empty();
            done.push(Completion { id: job.id, result });
            drop(done);
            self.landed.notify_one();
            if first {
                // The only failure is a full counter, and then the worker is awake anyway.
                let _ = self.wake.write(1);
            }
            job.segs.clear();
            queue = lock(&self.queue);
            queue.spare.push(job.segs);
        }
    }
}
