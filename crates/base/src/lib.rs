// SPDX-License-Identifier: Apache-2.0
//! The ground floor: units as types, eventfds, descriptors' modes, the epoll reactor, listening sockets, mmap RAII, lines for the user and borrowed I/O segments.
//!
//! Every other room may use this one; it uses none of them.

pub mod escape;
pub mod fd;
pub mod listen;
pub mod mmap;
pub mod news;
pub mod reactor;
mod resident;
pub mod sched;
pub mod segs;
pub mod units;

pub use resident::forget_code;
pub use segs::Seg;
pub use units::{Gpa, Gsi, Hva, SECTOR_SIZE, Sector};
pub use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
