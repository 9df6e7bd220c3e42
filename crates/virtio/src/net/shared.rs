// SPDX-License-Identifier: Apache-2.0
//! What the device and its workers share: the configuration that may change, and where news for the user goes.
//!
//! Written by the workers, read under the function's lock by vCPU threads.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::news::News;

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
    news: Arc<News>,
    /// The last line: what several workers have to say is said once.
    last: String,
}

/// See above.
pub struct Shared(Mutex<State>);

impl Shared {
    /// A NIC with so many `pairs` of queues whose link is up.
    ///
    /// # Errors
    /// When the host has no descriptors left.
    pub fn new(mac: [u8; 6], mtu: u16, pairs: u16) -> io::Result<Self> {
        let news = Arc::new(News::new()?);
        Ok(Self(Mutex::new(State { mac, up: true, mtu, pairs, status: None, news, last: String::new() })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What there is to say goes to `news` from now on, what nobody has heard yet first.
    pub fn report_to(&self, news: &Arc<News>) {
        let before = std::mem::replace(&mut self.lock().news, Arc::clone(news));
        before.take().into_iter().for_each(|line| news.say(line));
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
        state.news.say(line);
    }
}
