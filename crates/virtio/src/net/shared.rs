// SPDX-License-Identifier: Apache-2.0
//! What the device, its worker and the main loop share: the configuration that may change, and news for the user.
//!
//! Written by the worker, read under the function's lock by vCPU threads and by the main thread through [`NetPort`].

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::device::DeviceStatus;

/// Bytes of the configuration space up to and with `mtu` (5.1.4).
pub const CONFIG_LEN: usize = 12;

/// Written by the workers and the device.
struct State {
    mac: [u8; 6],
    up: bool,
    mtu: u16,
    pairs: u16,
    status: Option<Arc<DeviceStatus>>,
    news: Vec<String>,
    /// The last line: what several workers have to say is said once.
    last: String,
}

/// See above.
pub struct Shared {
    state: Mutex<State>,
    event: EventFd,
}

impl Shared {
    /// A NIC with so many `pairs` of queues whose link is up.
    ///
    /// # Errors
    /// When the host has no descriptors left.
    pub fn new(mac: [u8; 6], mtu: u16, pairs: u16) -> io::Result<Self> {
        let state = State { mac, up: true, mtu, pairs, status: None, news: Vec::new(), last: String::new() };
        Ok(Self { state: Mutex::new(state), event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)? })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver is ready, or gone.
    pub fn attach(&self, status: Option<Arc<DeviceStatus>>) {
        self.lock().status = status;
    }

    /// The configuration space as the driver reads it.
    pub fn config(&self) -> [u8; CONFIG_LEN] {
        let state = self.lock();
        let mut config = [0; CONFIG_LEN];
        config[..6].copy_from_slice(&state.mac);
        config[6] = state.up.into();
        config[8..10].copy_from_slice(&state.pairs.to_le_bytes());
        config[10..].copy_from_slice(&state.mtu.to_le_bytes());
        config
    }

    /// The driver chose its address.
    pub fn set_mac(&self, mac: [u8; 6]) {
        self.lock().mac = mac;
    }

    /// The link went up or down: the driver is told, and `line` is for the user.
    pub fn set_link(&self, up: bool, line: String) {
        let mut state = self.lock();
        if state.up != up {
            state.up = up;
            if let Some(status) = &state.status {
                status.config_changed();
            }
        }
        drop(state);
        self.tell(line);
    }

    /// `line` is for the user.
    pub fn tell(&self, line: String) {
        let mut state = self.lock();
        if state.last == line {
            return;
        }
        state.last.clone_from(&line);
        state.news.push(line);
        drop(state);
        // Only a full counter refuses, and then it is readable anyway.
        let _ = self.event.write(1);
    }
}

/// The main loop's end of a NIC: what it has to tell the user.
#[derive(Clone)]
pub struct NetPort(pub(super) Arc<Shared>);

impl NetPort {
    /// Whether the guest's link is up.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.0.lock().up
    }

    /// The lines that came since the last call, oldest first.
    #[must_use]
    pub fn take_news(&self) -> Vec<String> {
        // Empty already if nothing came.
        let _ = self.0.event.read();
        std::mem::take(&mut self.0.lock().news)
    }
}

impl AsRawFd for NetPort {
    /// Readable when there is news.
    fn as_raw_fd(&self) -> RawFd {
        self.0.event.as_raw_fd()
    }
}
