// SPDX-License-Identifier: Apache-2.0
//! The engine that serves qcow2 images: `chain` opens, `handle` drives requests (`task`), `read`, `write` and `zero` find out where
//! their bytes are, `straight` passes on what needs no more than that, `cycle` puts metadata on disk in order, `cache`, `refs` and `meta` are what it works on.

mod cache;
pub mod chain;
mod cycle;
mod fetch;
pub mod handle;
mod image;
mod inbox;
mod mend;
mod meta;
mod past;
mod read;
mod refs;
mod side;
mod slab;
mod straight;
mod task;
mod tools;
mod unpack;
mod write;
mod zero;
