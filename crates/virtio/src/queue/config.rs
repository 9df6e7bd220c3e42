// SPDX-License-Identifier: Apache-2.0
//! A queue as the driver configures it through the transport; not yet trusted. Lives under the PCI function's lock.

use base::Gpa;
use mem::GuestRam;

use super::split::{Queue, Rings};
use crate::fault::GuestFault;
use crate::features;

/// Queue settings between reset and `DRIVER_OK`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueConfig {
    /// The largest size, as the device offers it.
    pub max_size: u16,
    /// The size the driver chose; starts as `max_size`.
    pub size: u16,
    /// The driver enabled the queue.
    pub enabled: bool,
    /// Descriptor table.
    pub desc: Gpa,
    /// Available ring ("driver area").
    pub avail: Gpa,
    /// Used ring ("device area").
    pub used: Gpa,
}

impl QueueConfig {
    /// A queue after reset.
    #[must_use]
    pub const fn new(max_size: u16) -> Self {
        Self { max_size, size: max_size, enabled: false, desc: Gpa(0), avail: Gpa(0), used: Gpa(0) }
    }

    /// Takes a size from the driver.
    ///
    /// # Errors
    /// [`GuestFault::QueueSize`] unless it is a power of two up to the offered size; the old size stays.
    pub fn set_size(&mut self, size: u16) -> Result<(), GuestFault> {
        if !size.is_power_of_two() || size > self.max_size {
            return Err(GuestFault::QueueSize);
        }
        self.size = size;
        Ok(())
    }

    /// Finds the rings in guest memory, once, and gives the live queue.
    ///
    /// # Errors
    /// [`GuestFault::RingAddress`] for rings misaligned or not wholly in one run of guest memory,
    /// [`GuestFault::QueueSize`] for a size that no driver could have set.
    pub fn activate(&self, ram: &GuestRam, agreed: u64) -> Result<Queue, GuestFault> {
        if !self.size.is_power_of_two() || self.size > self.max_size || self.max_size > super::MAX_SIZE {
            return Err(GuestFault::QueueSize);
        }
        let size = usize::from(self.size);
        let find = |at: Gpa, len: usize, align: u64| {
            if !at.0.is_multiple_of(align) {
                return None;
            }
            ram.seg(at, len).map(|seg| seg.ptr).filter(|ptr| (*ptr as u64).is_multiple_of(align))
        };
        // Both rings end in the event index of the other side, which is there whether or not EVENT_IDX is agreed.
        #[allow(clippy::cast_ptr_alignment)] // `find` checked it
        let rings = (|| {
            Some(Rings {
                desc: find(self.desc, size * 16, 16)?,
                avail: find(self.avail, size * 2 + 6, 2)?.cast(),
                used: find(self.used, size * 8 + 6, 4)?.cast(),
            })
        })();
        let rings = rings.ok_or(GuestFault::RingAddress)?;
        let (event_idx, indirect) = (agreed & features::EVENT_IDX != 0, agreed & features::INDIRECT_DESC != 0);
        // SAFETY: `find` got each pointer from `ram` with the length and alignment its ring has at this size.
        Ok(unsafe { Queue::from_rings(ram, rings, (self.size, self.max_size), event_idx, indirect) })
    }
}
