// SPDX-License-Identifier: Apache-2.0
//! Disks for other programs: servers that put a [`block::Disk`] on a Unix socket. `tare img serve` runs them.
//!
//! A client is as hostile as a guest: what it sends wrong ends its own connection or gets an error reply, and nothing else.

mod buffer;
pub mod nbd;
mod socket;
pub mod vhost_user;

pub use base::listen::Error;

/// Tells the user what a disk has to say while it is served.
fn tell(news: &base::news::News) {
    for line in news.take() {
        base::news::print(&line);
    }
}
