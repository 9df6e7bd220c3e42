// SPDX-License-Identifier: Apache-2.0
//! The virtio block device (virtio 1.2, 5.2): one queue, one worker thread, one disk of the `block` engine.
//!
//! The walk of a request: the worker wakes from `kick.read` → `Worker::turn` → `Queue::pop` and `Request::parse` →
//! `Disk::submit`; back `Disk::reap` → `Worker::finish` → `Queue::push_used` → `QueueIrq::notify`, once per batch.

mod device;
mod request;
mod stats;
mod worker;

pub use device::Blk;
pub use stats::{BlkCounts, BlkStats};
