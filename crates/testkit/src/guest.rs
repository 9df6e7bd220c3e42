// SPDX-License-Identifier: Apache-2.0
//! A guest's driver for one virtio device: the steps of virtio 1.2, 3.1, over whichever face the device is behind. What
//! belongs to one face alone is reached through it: a [`Guest`] dereferences to its [`Face`].

use std::ops::{Deref, DerefMut};

use mem::GuestRam;
use virtio::device::{VirtioDevice, status};
use virtio::transport::core::{Core, Ring};

use crate::driver::GuestQueue;
use crate::faces::PciFace;

/// A register that both faces have, each in its own place and width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// Which 32 of the device's features to read.
    OfferedWord,
    /// The features offered.
    Offered,
    /// Which 32 of the driver's features to write.
    AcceptedWord,
    /// The features that the driver accepts.
    Accepted,
    /// Which queue the ones below are about.
    Queue,
    /// The largest size of the queue, 0 for none; to be read before a size is chosen.
    QueueMost,
    /// The size that the driver chose.
    QueueSize,
    /// Whether the queue is enabled.
    QueueReady,
    /// Half of a ring's address; `true` for the high one.
    Ring(Ring, bool),
    /// The status byte.
    Status,
    /// The configuration generation.
    Generation,
}

/// A virtio device behind one of the transports, as a driver reaches it.
pub trait Face: Sized {
    /// Puts `device` before a guest with `ram`, and finds its registers.
    fn attach(device: Box<dyn VirtioDevice>, ram: &GuestRam) -> Self;

    /// The state machine behind the registers.
    fn core(&self) -> &Core;

    /// Reads a register; 0 for one that this face does not show.
    fn get(&mut self, register: Register) -> u32;

    /// Writes a register.
    fn set(&mut self, register: Register, value: u32);

    /// Reads device configuration.
    fn read_config(&mut self, at: u64, data: &mut [u8]);

    /// Writes device configuration.
    fn write_config(&mut self, at: u64, data: &[u8]);

    /// Kicks queue `index`.
    fn notify(&mut self, index: u16);

    /// Lets interrupts through, where they don't come by themselves.
    fn arm(&mut self);

    /// Interrupts so far: a queue's, or with `None` those of the configuration. A face that does not tell queues apart counts
    /// all of them together.
    fn signalled(&mut self, queue: Option<u16>) -> usize;

    /// The device may have changed its configuration.
    fn update_config(&mut self);

    /// Reads (or writes) all that a guest can reach of the device, by a running offset.
    fn raw(&mut self, offset: u64, data: &mut [u8], write: bool);

    /// Back to power-on, by the bus.
    fn power_on(&mut self);
}

/// A driver and the device it drives.
pub struct Guest<F: Face = PciFace> {
    /// How it reaches the device.
    pub face: F,
}

impl Guest {
    /// Puts `device` on the PCI bus of a guest with `ram`, and finds its registers.
    ///
    /// # Panics
    /// When the host gives no descriptors or the function lacks a capability.
    #[must_use]
    pub fn new(device: Box<dyn VirtioDevice>, ram: &GuestRam) -> Self {
        Self::on(device, ram)
    }
}

impl<F: Face> Deref for Guest<F> {
    type Target = F;

    fn deref(&self) -> &F {
        &self.face
    }
}

impl<F: Face> DerefMut for Guest<F> {
    fn deref_mut(&mut self) -> &mut F {
        &mut self.face
    }
}

impl<F: Face> Guest<F> {
    /// Puts `device` before a guest with `ram`, behind the face that the type names.
    ///
    /// # Panics
    /// When the host gives no descriptors.
    #[must_use]
    pub fn on(device: Box<dyn VirtioDevice>, ram: &GuestRam) -> Self {
        Self { face: F::attach(device, ram) }
    }

    /// Reads device configuration.
    pub fn device_config(&mut self, at: u64, data: &mut [u8]) {
        self.face.read_config(at, data);
    }

    /// The status byte.
    pub fn status(&mut self) -> u8 {
        self.face.get(Register::Status) as u8
    }

    /// Writes the status byte.
    pub fn set_status(&mut self, status: u8) {
        self.face.set(Register::Status, status.into());
    }

    /// Features offered.
    pub fn offered(&mut self) -> u64 {
        self.face.set(Register::OfferedWord, 0);
        let low = u64::from(self.face.get(Register::Offered));
        self.face.set(Register::OfferedWord, 1);
        low | u64::from(self.face.get(Register::Offered)) << 32
    }

    /// Writes the driver's features.
    pub fn accept(&mut self, features: u64) {
        for (word, bits) in [(0, features as u32), (1, (features >> 32) as u32)] {
            self.face.set(Register::AcceptedWord, word);
            self.face.set(Register::Accepted, bits);
        }
    }

    /// Resets the device and accepts `features`; gives whether it agreed.
    pub fn negotiate(&mut self, features: u64) -> bool {
        self.set_status(0);
        self.set_status(status::ACKNOWLEDGE);
        self.set_status(status::ACKNOWLEDGE | status::DRIVER);
        self.accept(features);
        self.set_status(status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK);
        self.status() & status::FEATURES_OK != 0
    }

    /// Selects queue `index` for the registers that are about one queue.
    pub fn select(&mut self, index: u16) {
        self.face.set(Register::Queue, index.into());
    }

    /// Tells the device about queue `index`, which is not enabled yet.
    pub fn describe_queue(&mut self, index: u16, queue: &GuestQueue) {
        let config = queue.config();
        self.select(index);
        self.face.set(Register::QueueSize, config.size.into());
        for (ring, at) in [(Ring::Desc, config.desc), (Ring::Avail, config.avail), (Ring::Used, config.used)] {
            self.face.set(Register::Ring(ring, false), at.0 as u32);
            self.face.set(Register::Ring(ring, true), (at.0 >> 32) as u32);
        }
    }

    /// Tells the device about queue `index` and enables it, with a vector of its own where there are vectors.
    pub fn set_queue(&mut self, index: u16, queue: &GuestQueue) {
        self.describe_queue(index, queue);
        self.face.set(Register::QueueReady, 1);
    }

    /// Number of queues.
    pub fn queue_count(&mut self) -> u16 {
        self.face.core().queue_count()
    }

    /// All of 3.1: negotiates `features`, sets up `queues` from index 0 on and interrupts, and says `DRIVER_OK`.
    ///
    /// # Panics
    /// When the device refuses the features.
    pub fn start(&mut self, features: u64, queues: &[&GuestQueue]) {
        assert!(self.negotiate(features), "the device agrees to {features:#x}");
        self.face.arm();
        for (queue, index) in queues.iter().zip(0u16..) {
            self.set_queue(index, queue);
        }
        let status = self.face.core().status();
        self.set_status(status | status::DRIVER_OK);
    }

    /// Kicks queue `index` through its notify address.
    pub fn kick(&mut self, index: u16) {
        self.face.notify(index);
    }
}
