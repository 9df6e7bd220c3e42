// SPDX-License-Identifier: Apache-2.0
//! How a thread hears that something one of its requests waits for has happened, possibly on another thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::EventFd;

use super::unpack::Unpacked;

/// The news for one handle.
#[derive(Debug, Default)]
pub struct Inbox {
    news: Mutex<Vec<News>>,
    unpacked: Mutex<Vec<Unpacked>>,
    any: AtomicBool,
    wake: Mutex<Option<EventFd>>,
}

/// Something happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct News {
    /// The task that waited.
    pub task: u32,
    /// For flushes: how it ended, 0 or an error number. `None`: go on and look again.
    pub outcome: Option<i32>,
}

/// Someone who waits.
#[derive(Clone, Debug)]
pub struct Waiter {
    /// Where to tell.
    pub inbox: Arc<Inbox>,
    /// Which of its tasks.
    pub task: u32,
}

impl Waiter {
    /// Tells it to go on.
    pub fn go_on(self) {
        self.inbox.put(News { task: self.task, outcome: None });
    }

    /// Tells it how its flush ended.
    pub fn flushed(self, errno: i32) {
        self.inbox.put(News { task: self.task, outcome: Some(errno) });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inbox {
    fn put(&self, news: News) {
        lock(&self.news).push(news);
        self.tell();
    }

    /// A thread has unpacked a cluster for the handle.
    pub fn unpacked(&self, unpacked: Unpacked) {
        lock(&self.unpacked).push(unpacked);
        self.tell();
    }

    fn tell(&self) {
        if !self.any.swap(true, Ordering::SeqCst)
            && let Some(wake) = &*lock(&self.wake)
        {
            // The only failure is a full counter, and then the thread is awake anyway.
            let _ = wake.write(1);
        }
    }

    /// Where to write when news arrive.
    pub fn set_wake(&self, wake: Option<EventFd>) {
        *lock(&self.wake) = wake;
    }

    /// Whether the handle's thread can be woken.
    pub fn can_wake(&self) -> bool {
        lock(&self.wake).is_some()
    }

    /// Moves what there is to `news` and `unpacked`; cheap when there is nothing.
    pub fn take(&self, news: &mut Vec<News>, unpacked: &mut Vec<Unpacked>) {
        if self.any.load(Ordering::SeqCst) {
            // What is put from here on sets it again.
            self.any.store(false, Ordering::SeqCst);
            news.append(&mut lock(&self.news));
            unpacked.append(&mut lock(&self.unpacked));
        }
    }

    /// Whether there are news.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::SeqCst)
    }
}
