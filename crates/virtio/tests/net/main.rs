// SPDX-License-Identifier: Apache-2.0
//! The network device, driven through its queues by a played guest: what each packet becomes, right or wrong; random traffic
//! against plain lists of frames; a host's end that is slow, lies, stalls or goes.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod faults;
mod packets;
mod real;
mod rig;
mod wires;
