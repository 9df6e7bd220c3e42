// SPDX-License-Identifier: Apache-2.0
//! The part of a transport that every face shares: status, features, queue settings, configuration, reset (virtio 1.2,
//! 2.1 to 2.4 and 3.1). Called by a face under its function's lock, on the thread of the vCPU that touched a register.

use std::io;
use std::sync::Arc;

use base::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd, Gpa};
use mem::GuestRam;

use crate::device::{Activation, ActiveQueue, DeviceStatus, Interrupt, QueueIrq, VirtioDevice, status};
use crate::fault::GuestFault;
use crate::features;
use crate::queue::{MAX_SIZE, QueueConfig};

/// Which of a queue's three rings an address is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    /// Descriptor table.
    Desc,
    /// Available ring.
    Avail,
    /// Used ring.
    Used,
}

const fn feature_word(features: u64, word: u32) -> u32 {
    match word {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

/// A device and the driver's dealings with it.
pub struct Core {
    device: Box<dyn VirtioDevice>,
    ram: GuestRam,
    face: Arc<dyn Interrupt>,
    status: Arc<DeviceStatus>,
    queues: Vec<QueueConfig>,
    kicks: Vec<EventFd>,
    inline: u64,
    offered: u64,
    accepted: u64,
    active: bool,
    last_fault: Option<GuestFault>,
}

impl Core {
    /// `device` on `ram`, signalling through `face`.
    ///
    /// # Errors
    /// When the host has no descriptors left for the kick eventfds.
    pub fn new(device: Box<dyn VirtioDevice>, ram: GuestRam, face: Arc<dyn Interrupt>) -> io::Result<Self> {
        let queues: Vec<QueueConfig> = device.queue_sizes().iter().map(|&max| QueueConfig::new(max)).collect();
        debug_assert!(queues.iter().all(|q| q.max_size.is_power_of_two() && q.max_size <= MAX_SIZE));
        let kicks = queues.iter().map(|_| EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)).collect::<io::Result<_>>()?;
        Ok(Self {
            status: Arc::new(DeviceStatus::new(Arc::clone(&face))),
            inline: device.inline_queues(),
            offered: device.features() | features::TRANSPORT,
            device,
            ram,
            face,
            queues,
            kicks,
            accepted: 0,
            active: false,
            last_fault: None,
        })
    }

    /// Virtio device id.
    #[must_use]
    pub fn kind(&self) -> u16 {
        self.device.kind()
    }

    /// Features offered, transport bits included.
    #[must_use]
    pub const fn offered(&self) -> u64 {
        self.offered
    }

    /// The 32 features offered that a driver selects with `word`: 0 for the low ones, 1 for the high ones.
    #[must_use]
    pub const fn offered_word(&self, word: u32) -> u32 {
        feature_word(self.offered, word)
    }

    /// Of the features that the driver wrote, those that it selects with `word`.
    #[must_use]
    pub const fn accepted_word(&self, word: u32) -> u32 {
        feature_word(self.accepted, word)
    }

    /// Features as the driver wrote them.
    #[must_use]
    pub const fn accepted(&self) -> u64 {
        self.accepted
    }

    /// The driver accepts 32 features: the low ones for `word` 0, the high ones for 1; others don't exist.
    pub fn accept(&mut self, word: u32, bits: u32) {
        if self.status() & status::FEATURES_OK != 0 {
            return self.note(GuestFault::LateSetting);
        }
        match word {
            0 => self.accepted = (self.accepted & !0xffff_ffff) | u64::from(bits),
            1 => self.accepted = (self.accepted & 0xffff_ffff) | u64::from(bits) << 32,
            _ => {}
        }
    }

    /// The status byte.
    #[must_use]
    pub fn status(&self) -> u8 {
        self.status.get()
    }

    /// What threads of the device share with this transport.
    #[must_use]
    pub const fn shared_status(&self) -> &Arc<DeviceStatus> {
        &self.status
    }

    /// The last thing the driver did wrong towards the transport, for logs and tests.
    #[must_use]
    pub const fn last_fault(&self) -> Option<GuestFault> {
        self.last_fault
    }

    fn note(&mut self, fault: GuestFault) {
        self.last_fault = Some(fault);
    }

    /// The driver writes the status byte: 0 resets, other bits are added once their turn has come. A bit that is refused
    /// reads back as 0.
    pub fn set_status(&mut self, wanted: u8) {
        use status::{ACKNOWLEDGE, DRIVER, DRIVER_OK, FAILED, FEATURES_OK};
        if wanted == 0 {
            return self.reset();
        }
        let new = wanted & !self.status.get();
        for (bit, needs) in [(ACKNOWLEDGE, 0), (DRIVER, ACKNOWLEDGE), (FEATURES_OK, ACKNOWLEDGE | DRIVER), (FAILED, 0)]
        {
            if new & bit == 0 {
            } else if self.status.get() & needs != needs {
                self.note(GuestFault::StatusOrder);
            } else if bit == FEATURES_OK && !self.features_agree() {
                self.note(GuestFault::Features);
            } else {
                self.status.set(bit);
            }
        }
        if new & DRIVER_OK != 0 {
            if self.status.get() & FEATURES_OK == 0 {
                self.note(GuestFault::StatusOrder);
            } else {
                self.start();
            }
        }
    }

    const fn features_agree(&self) -> bool {
        self.accepted & !self.offered == 0 && self.accepted & features::VERSION_1 != 0
    }

    fn start(&mut self) {
        self.status.set(status::DRIVER_OK);
        let mut queues = Vec::with_capacity(self.queues.len());
        for ((config, kick), index) in self.queues.iter().zip(&self.kicks).zip(0u16..) {
            if !config.enabled {
                continue;
            }
            let ring = match config.activate(&self.ram, self.accepted) {
                Ok(ring) => ring,
                Err(fault) => {
                    self.last_fault = Some(fault);
                    return self.status.needs_reset(fault);
                }
            };
            match kick.try_clone() {
                Ok(kick) => {
                    queues.push(ActiveQueue { index, ring, kick, irq: QueueIrq::new(Arc::clone(&self.face), index) });
                }
                Err(why) => return self.status.host_failed(&why),
            }
        }
        self.active = true;
        let (ram, status) = (self.ram.clone(), Arc::clone(&self.status));
        if let Err(why) = self.device.activate(Activation { ram, features: self.accepted, queues, status }) {
            self.status.host_failed(&why);
        }
    }

    /// Stops the device and forgets all that the driver set up.
    pub fn reset(&mut self) {
        self.device.reset();
        self.active = false;
        self.status.clear();
        self.accepted = 0;
        for queue in &mut self.queues {
            *queue = QueueConfig::new(queue.max_size);
        }
        for kick in &self.kicks {
            // Drop a kick that nobody answered, so that the next driver does not start with it.
            let _ = kick.read();
        }
    }

    /// Number of queues.
    #[must_use]
    pub fn queue_count(&self) -> u16 {
        // A device has a handful of queues; `queue_sizes` is ours, not the guest's.
        self.queues.len() as u16
    }

    /// Settings of queue `index`.
    #[must_use]
    pub fn queue(&self, index: u16) -> Option<&QueueConfig> {
        self.queues.get(usize::from(index))
    }

    /// The queues that the device does not want kicked inline, each with its eventfd, to bind an ioeventfd for.
    pub fn kicks(&self) -> impl Iterator<Item = (u16, &EventFd)> {
        (0..self.queue_count()).filter_map(|index| Some((index, self.kick_fd(index)?)))
    }

    /// Settings of queue `index` if the driver may still change them.
    fn open_queue(&mut self, index: u16) -> Option<&mut QueueConfig> {
        let late = self.active || self.queue(index).is_some_and(|q| q.enabled);
        if late {
            self.note(GuestFault::LateSetting);
            return None;
        }
        self.queues.get_mut(usize::from(index))
    }

    /// The driver chooses the size of queue `index`.
    pub fn set_queue_size(&mut self, index: u16, size: u16) {
        if let Some(Err(fault)) = self.open_queue(index).map(|q| q.set_size(size)) {
            self.note(fault);
        }
    }

    /// The driver says where half of a ring's address is: the low 32 bits, or the high ones.
    pub fn set_ring(&mut self, index: u16, ring: Ring, high: bool, bits: u32) {
        let Some(queue) = self.open_queue(index) else { return };
        let at = match ring {
            Ring::Desc => &mut queue.desc,
            Ring::Avail => &mut queue.avail,
            Ring::Used => &mut queue.used,
        };
        let bits = u64::from(bits);
        *at = Gpa(if high { (at.0 & 0xffff_ffff) | bits << 32 } else { (at.0 & !0xffff_ffff) | bits });
    }

    /// The driver enables queue `index`.
    pub fn enable_queue(&mut self, index: u16) {
        if let Some(queue) = self.open_queue(index) {
            queue.enabled = true;
        }
    }

    /// The driver takes queue `index` back, which it may until it says that it is ready; from then on only a reset does.
    pub fn disable_queue(&mut self, index: u16) {
        if self.active {
            return self.note(GuestFault::LateSetting);
        }
        if let Some(queue) = self.queues.get_mut(usize::from(index)) {
            queue.enabled = false;
        }
    }

    /// The eventfd of queue `index`, for an ioeventfd; none for a queue that the device wants kicked inline.
    #[must_use]
    pub fn kick_fd(&self, index: u16) -> Option<&EventFd> {
        if self.is_inline(index) { None } else { self.kicks.get(usize::from(index)) }
    }

    const fn is_inline(&self, index: u16) -> bool {
        index < 64 && self.inline & 1 << index != 0
    }

    /// The driver kicked queue `index` in a way that reached the monitor.
    pub fn kick(&mut self, index: u16) {
        if self.is_inline(index) {
            self.device.on_kick(index);
        } else if let Some(kick) = self.kicks.get(usize::from(index)) {
            // Only a counter at its limit refuses, and then the kick is pending anyway.
            let _ = kick.write(1);
        }
    }

    /// Reads device configuration; what is not there reads as zero.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        self.device.read_config(offset, data);
    }

    /// Writes device configuration.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.device.write_config(offset, data);
    }

    /// The device may have changed its configuration: the driver sees it from here on, and hears of it.
    pub fn update_config(&mut self) {
        if self.device.update_config() {
            self.status.config_changed();
        }
    }

    /// The configuration generation.
    #[must_use]
    pub fn generation(&self) -> u8 {
        self.status.generation()
    }
}
