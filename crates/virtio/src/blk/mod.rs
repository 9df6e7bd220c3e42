// SPDX-License-Identifier: Apache-2.0
//! The virtio block device (virtio 1.2, 5.2): one disk of the `block` engine behind one or more queues, with a worker
//! thread for each queue or one for all of them.
//!
//! The walk of a request: the worker wakes from `Sleeper::sleep` → `Worker::turn` → `Queue::pop` and `Request::parse` →
//! `Disk::submit`; back `Disk::reap` → `Worker::finish` → `Queue::push_used` → `QueueIrq::notify`, once per batch.

mod config;
mod device;
mod request;
mod shared;
mod sleep;
mod stats;
mod worker;

pub use crate::throttle::{Clock, Throttle};
pub use config::feature::CONFIG_WCE;
pub use device::Blk;
pub use shared::BlkControl;
pub use stats::{BlkCounts, BlkStats};
