// SPDX-License-Identifier: Apache-2.0
//! Proof that the disk engine keeps what it was given: random histories from a seed, naive models of what a disk may hold,
//! a naive reader and checker of qcow2 that shares no line with the engine, every image a power cut could leave, and the
//! options of images in rows that cover each pair. Used by the tests of `block` and by fuzz targets.

pub mod counting;
pub mod crew;
pub mod cut;
pub mod history;
pub mod model;
pub mod options;
pub mod player;
pub mod reader;
pub mod rng;

pub use counting::Counting;
pub use crew::Crew;
pub use cut::Cuts;
pub use history::{Batch, History, Item, Step};
pub use model::{Bytes, Ledger};
pub use options::{Row, pairwise};
pub use player::Player;
pub use reader::Layer;
pub use rng::Rng;
