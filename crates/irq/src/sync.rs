// SPDX-License-Identifier: Apache-2.0
//! The lock and the atomics of this crate: the standard library's, or loom's when a model check runs (`--cfg loom`), which
//! tries every order in which threads may see each other's steps.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, fence},
};
pub(crate) use std::sync::atomic::Ordering;
#[cfg(not(loom))]
pub(crate) use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicU64, fence},
};

/// Takes the lock, also after a thread that held it panicked: what it guards is whole between two statements.
pub(crate) fn relock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Whether a model check looks at words by writing to them; see [`look`].
#[cfg(loom)]
pub mod model {
    std::thread_local! {
        /// Of the model that runs on this thread.
        pub static BY_WRITING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
}

/// Reads a word that others write.
///
/// loom forgets a read once its own thread's next one follows, and then does not try the order that would show a race between
/// them. A read-modify-write that changes nothing is not forgotten, but never sees an old value: models run both ways.
pub(crate) fn look(word: &AtomicU64) -> u64 {
    #[cfg(loom)]
    if model::BY_WRITING.get() {
        return word.fetch_or(0, Ordering::SeqCst);
    }
    word.load(Ordering::SeqCst)
}

/// Stores a word that others look at; where they do that by writing, so does this, since loom orders nothing else.
pub(crate) fn put(word: &AtomicU64, value: u64) {
    #[cfg(loom)]
    if model::BY_WRITING.get() {
        word.swap(value, Ordering::SeqCst);
        return;
    }
    word.store(value, Ordering::SeqCst);
}
