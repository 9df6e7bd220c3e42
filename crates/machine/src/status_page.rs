// SPDX-License-Identifier: Apache-2.0
//! A virtio device's registers in a page that the guest reads without leaving (`--mmio-status ro-page`): interrupt status,
//! features, queue sizes, configuration and its generation. Writes leave as before, since the slot is read-only.
//!
//! The device's own thread stores the interrupt status; everything else is stored on vCPU threads, under the device's lock. A
//! change that only the device's thread knows of takes the page away until a vCPU thread has brought it up to date.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::Hva;
use base::mmap::Mmap;
use mem::space::{Doorbell, Kind, RegionId};
use virtio::transport::mmio::{SIZE, Showing, Shown};

use crate::error::{Error, host};
use crate::spaces::{Device, Spaces};

/// Whether the guest has it.
#[derive(Default)]
struct State {
    /// The device's region and the page's, once they are.
    regions: Option<(RegionId, RegionId)>,
    mapped: bool,
    withdrawals: u64,
}

/// One device's page.
pub struct StatusPage {
    /// By itself, so that the address space, which keeps it, does not keep itself.
    memory: Arc<Mmap>,
    spaces: Spaces,
    state: Mutex<State>,
}

impl StatusPage {
    /// A page that will be in `spaces`.
    ///
    /// # Errors
    /// [`Error::Host`] when the host has no memory left.
    pub fn new(spaces: &Spaces) -> Result<Self, Error> {
        let memory = Mmap::anonymous(SIZE as usize).map_err(host("map a device's registers"))?;
        Ok(Self { memory: Arc::new(memory), spaces: spaces.clone(), state: Mutex::default() })
    }

    /// Shows the guest the page over the region of `device`, whose registers and doorbells it has. Where KVM can't, reads leave
    /// as before.
    pub fn place(&self, over: RegionId, device: Device, bells: Vec<Doorbell>) {
        let kind = Kind::Rom(Hva(self.memory.as_ptr() as u64), device, 0);
        // SAFETY: the memory is its own owner there; it holds what the guest may read of its device.
        let page = unsafe { self.spaces.add_page_with(self.memory.clone(), SIZE, kind, (over, 0), bells) };
        let mut state = self.lock();
        state.mapped = page.is_ok();
        state.regions = page.ok().map(|page| (over, page));
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Showing for StatusPage {
    fn page(&self) -> &Shown {
        // SAFETY: the mapping is a page, zeroed at first, aligned and longer than what is shown, which is atomics; it lives as
        // long as self at least, and nothing but those and the guest, which may only read, ever touches it.
        unsafe { &*self.memory.as_ptr().cast::<c_void>().cast::<Shown>() }
    }

    fn withdraw(&self) {
        let mut state = self.lock();
        state.withdrawals += 1;
        if let Some((_, page)) = state.regions.filter(|_| state.mapped) {
            // The lock is held meanwhile so that flag and address space agree.
            self.spaces.remove(page);
            state.mapped = false;
        }
    }

    fn withdrawals(&self) -> u64 {
        self.lock().withdrawals
    }

    fn publish(&self, withdrawals: u64) {
        let mut state = self.lock();
        if state.mapped || state.withdrawals != withdrawals {
            return;
        }
        if let Some((over, page)) = state.regions {
            state.mapped = self.spaces.put_back(page, over).is_ok();
        }
    }
}
