// SPDX-License-Identifier: Apache-2.0
//! A guest's PCI driver for one virtio function: it finds the register blocks by the capability list, as a stock driver
//! does, and walks the steps of virtio 1.2, 3.1.

use std::sync::Arc;

use mem::GuestRam;
use pci::{COMMAND, PciDevice};
use virtio::VirtioPci;
use virtio::device::{VirtioDevice, status};

use crate::driver::GuestQueue;
use crate::sink::{RecordingSink, RecordingVector};

/// Where a register block is: offset in the BAR and length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Offset in the BAR.
    pub at: u64,
    /// Bytes.
    pub len: u64,
}

/// A driver and the function it drives.
pub struct Guest {
    /// The function.
    pub device: VirtioPci,
    /// Its vectors: queues in order, then configuration, as [`Guest::start`] assigns them.
    pub vectors: Vec<Arc<RecordingVector>>,
    /// Common, notify, ISR and device blocks, by their capability type minus one.
    pub blocks: [Block; 4],
    /// Offset of the configuration-access capability.
    pub window: u16,
    /// Bytes between the notify addresses of two queues.
    pub notify_step: u32,
    msix: u16,
    table: u64,
}

impl Guest {
    /// Puts `device` on the bus of a guest with `ram`, and finds its registers.
    ///
    /// # Panics
    /// When the host gives no descriptors or the function lacks a capability.
    #[must_use]
    #[allow(clippy::expect_used)] // tests only
    pub fn new(device: Box<dyn VirtioDevice>, ram: &GuestRam) -> Self {
        let sink = RecordingSink::default();
        let device = VirtioPci::new(device, ram.clone(), &sink).expect("descriptors for a test device");
        let mut guest = Self {
            device,
            vectors: sink.made(),
            blocks: [Block::default(); 4],
            window: 0,
            notify_step: 0,
            msix: 0,
            table: 0,
        };
        guest.find_capabilities();
        assert!(
            guest.blocks.iter().all(|b| b.len != 0) && guest.window != 0 && guest.msix != 0,
            "a capability is missing"
        );
        guest.device.place(0, 0xe000_0000);
        guest.device.config_write(COMMAND, &[0x06, 0x04]);
        guest
    }

    fn find_capabilities(&mut self) {
        let mut at = self.config(0x34, 1) as u16;
        for _ in 0..48 {
            if at == 0 {
                return;
            }
            match self.config(at, 1) {
                0x09 => {
                    let (kind, bar) = (self.config(at + 3, 1), self.config(at + 4, 1));
                    let block =
                        Block { at: u64::from(self.config(at + 8, 4)), len: u64::from(self.config(at + 12, 4)) };
                    assert_eq!(bar, 0, "one BAR holds everything");
                    match kind {
                        5 => self.window = at,
                        1..=4 => {
                            if kind == 2 {
                                self.notify_step = self.config(at + 16, 4);
                            }
                            self.blocks[kind as usize - 1] = block;
                        }
                        _ => panic!("capability type {kind}"),
                    }
                }
                0x11 => {
                    self.msix = at;
                    self.table = u64::from(self.config(at + 4, 4) & !7);
                }
                _ => {}
            }
            at = self.config(at + 1, 1) as u16;
        }
        panic!("the capability list has a loop");
    }

    /// Reads `len` bytes of configuration space.
    pub fn config(&mut self, at: u16, len: usize) -> u32 {
        let mut bytes = [0; 4];
        self.device.config_read(at, &mut bytes[..len]);
        u32::from_le_bytes(bytes)
    }

    /// Reads `len` bytes of the common block.
    pub fn read(&mut self, at: u64, len: usize) -> u32 {
        let mut bytes = [0; 4];
        let base = self.blocks[0].at;
        self.device.bar_read(0, base + at, &mut bytes[..len]);
        u32::from_le_bytes(bytes)
    }

    /// Writes `len` bytes of the common block.
    pub fn write(&mut self, at: u64, len: usize, value: u32) {
        let base = self.blocks[0].at;
        self.device.bar_write(0, base + at, &value.to_le_bytes()[..len]);
    }

    /// Reads device configuration.
    pub fn device_config(&mut self, at: u64, data: &mut [u8]) {
        let base = self.blocks[3].at;
        self.device.bar_read(0, base + at, data);
    }

    /// The status byte.
    pub fn status(&mut self) -> u8 {
        self.read(0x14, 1) as u8
    }

    /// Writes the status byte.
    pub fn set_status(&mut self, status: u8) {
        self.write(0x14, 1, status.into());
    }

    /// Features offered.
    pub fn offered(&mut self) -> u64 {
        self.write(0, 4, 0);
        let low = u64::from(self.read(4, 4));
        self.write(0, 4, 1);
        low | u64::from(self.read(4, 4)) << 32
    }

    /// Resets the device and accepts `features`; gives whether it agreed.
    pub fn negotiate(&mut self, features: u64) -> bool {
        self.set_status(0);
        self.set_status(status::ACKNOWLEDGE);
        self.set_status(status::ACKNOWLEDGE | status::DRIVER);
        self.write(8, 4, 0);
        self.write(0x0c, 4, features as u32);
        self.write(8, 4, 1);
        self.write(0x0c, 4, (features >> 32) as u32);
        self.set_status(status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK);
        self.status() & status::FEATURES_OK != 0
    }

    /// Switches MSI-X on with all vectors unmasked.
    pub fn enable_msix(&mut self) {
        for index in 0..self.vectors.len() as u64 {
            let at = self.table + 16 * index;
            self.device.bar_write(0, at, &0xfee0_0000u64.to_le_bytes());
            self.device.bar_write(0, at + 8, &(0x40 + index as u32).to_le_bytes());
            self.device.bar_write(0, at + 12, &0u32.to_le_bytes());
        }
        let at = self.msix + 2;
        self.device.config_write(at, &0x8000u16.to_le_bytes());
    }

    /// Tells the device about queue `index` and enables it with its own vector.
    pub fn set_queue(&mut self, index: u16, queue: &GuestQueue) {
        let config = queue.config();
        self.write(0x16, 2, index.into());
        self.write(0x18, 2, config.size.into());
        for (at, ring) in [(0x20, config.desc), (0x28, config.avail), (0x30, config.used)] {
            self.write(at, 4, ring.0 as u32);
            self.write(at + 4, 4, (ring.0 >> 32) as u32);
        }
        self.write(0x1a, 2, index.into());
        self.write(0x1c, 2, 1);
    }

    /// Number of queues.
    pub fn queue_count(&mut self) -> u16 {
        self.read(0x12, 2) as u16
    }

    /// All of 3.1: negotiates `features`, sets up `queues` from index 0 on, MSI-X, and says `DRIVER_OK`.
    ///
    /// # Panics
    /// When the device refuses the features.
    pub fn start(&mut self, features: u64, queues: &[&GuestQueue]) {
        assert!(self.negotiate(features), "the device agrees to {features:#x}");
        self.enable_msix();
        self.write(0x10, 2, self.vectors.len() as u32 - 1);
        for (queue, index) in queues.iter().zip(0u16..) {
            self.set_queue(index, queue);
        }
        self.set_status(self.device.core().status() | status::DRIVER_OK);
    }

    /// Kicks queue `index` through its notify address.
    pub fn kick(&mut self, index: u16) {
        let at = self.blocks[1].at + u64::from(index) * u64::from(self.notify_step);
        self.device.bar_write(0, at, &index.to_le_bytes());
    }

    /// Interrupts of queue `index` so far.
    #[must_use]
    pub fn interrupts(&self, index: u16) -> usize {
        self.vectors.get(usize::from(index)).map_or(0, |v| v.sent())
    }

    /// Configuration interrupts so far.
    #[must_use]
    pub fn config_interrupts(&self) -> usize {
        self.vectors.last().map_or(0, |v| v.sent())
    }
}
