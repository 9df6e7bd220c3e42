// SPDX-License-Identifier: Apache-2.0
#![forbid(unsafe_code)]
//! The way to a machine that runs: HTTP on a Unix socket to [`spec::Command`] and back, and the client for it.
//!
//! The monitor's command line binds a [`Server`] and joins it to the machine with a function; `tare ctl` is the client. A
//! client is as hostile as a guest: sizes and times are bounded, and what it does wrong ends its own connection.

mod client;
mod http;
mod routes;
mod server;

pub use client::{ClientError, call};
pub use server::{Answer, Server, Serving};
