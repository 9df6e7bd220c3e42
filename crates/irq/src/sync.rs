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
