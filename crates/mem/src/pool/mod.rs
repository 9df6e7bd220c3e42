// SPDX-License-Identifier: Apache-2.0
//! The pool: a service that keeps memory allocated and zeroed, and lends it to machines that start.
//!
//! A machine's monitor connects to the pool's socket, says how much it needs, and gets files in memory, which it maps; a
//! start no longer pays for zeroing. The connection is the loan: when the monitor says that it has unmapped everything, or
//! is dead, the pool takes the memory back, zeroes it, and lends it again. Nobody gets memory that was not zeroed since it
//! came back.

mod lent;
mod server;
#[cfg(test)]
mod tests;
mod wire;

pub use lent::Lent;
pub use server::{Pool, PoolPlan, Stock};
