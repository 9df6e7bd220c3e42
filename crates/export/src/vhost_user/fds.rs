// SPDX-License-Identifier: Apache-2.0
//! Descriptors that a client sent: taken for eventfds only if they are.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};

use base::EventFd;

/// The file as the eventfd it has to be.
pub fn eventfd(file: File) -> Option<EventFd> {
    let kind = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    if kind.to_str() != Some("anon_inode:[eventfd]") {
        return None;
    }
    // SAFETY: the descriptor is open, was just given up by its only owner, and is an eventfd.
    Some(unsafe { EventFd::from_raw_fd(file.into_raw_fd()) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_eventfds_are_taken_for_some() {
        assert!(eventfd(tempfile::tempfile().unwrap()).is_none());
        let one = EventFd::new(base::EFD_NONBLOCK).unwrap();
        one.write(3).unwrap();
        // SAFETY: the descriptor was just given up by its owner.
        let file = unsafe { File::from_raw_fd(one.into_raw_fd()) };
        assert_eq!(eventfd(file).unwrap().read().unwrap(), 3);
    }
}
