// SPDX-License-Identifier: Apache-2.0
//! The disk engine: storages (inline system calls, io_uring, threads, memory) below, formats (raw) above.
//!
//! It knows byte ranges and borrowed segments, never virtio, guest memory or KVM, so tools and fuzzers can use it alone.
//! `virtio::blk` drives one [`Disk`] from one worker thread; nothing here is shared between threads, so nothing is locked
//! on the way of a request (the thread pool's queue and the test storages excepted).

mod disk;
mod error;
mod lock;
mod open;
mod options;
pub mod qcow2;
mod raw;
mod storage;
mod voice;

pub use disk::{Completion, Disk, Extent, ExtentKind, Limits, Op, Request};
pub use error::Error;
pub use options::{Aio, BackingGate, Cache, Cow, Format, Options, Qcow2Options, Secret, Zeros};
pub use storage::buffer::AlignedBuf;
pub use storage::faults::{Fault, FaultPlan};
pub use storage::mem::MemImage;
pub use storage::record::{Change, Event, RecordImage};
