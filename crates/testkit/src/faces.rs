// SPDX-License-Identifier: Apache-2.0
//! The two faces of a virtio device as stock drivers use them: a PCI function, whose register blocks are found by the
//! capability list, and a page of registers.

use std::sync::Arc;

use irq::IrqLine;
use mem::GuestRam;
use pci::{COMMAND, PciDevice};
use virtio::device::VirtioDevice;
use virtio::transport::core::{Core, Ring};
use virtio::transport::mmio;
use virtio::{VirtioMmio, VirtioPci};

use crate::guest::{Face, Register};
use crate::sink::{RecordingLine, RecordingSink, RecordingVector};

/// Where a register block is: offset in the BAR and length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Offset in the BAR.
    pub at: u64,
    /// Bytes.
    pub len: u64,
}

/// A PCI function.
pub struct PciFace {
    /// The function.
    pub device: VirtioPci,
    /// Its vectors: queues in order or all queues', then configuration, as a driver here assigns them.
    pub vectors: Vec<Arc<RecordingVector>>,
    /// Common, notify, ISR and device blocks, by their capability type minus one.
    pub blocks: [Block; 4],
    /// Offset of the configuration-access capability.
    pub window: u16,
    /// Bytes between the notify addresses of two queues.
    pub notify_step: u32,
    /// The BAR of ports for kicks, and ports from one queue's to the next one's.
    pub ports: Option<(u8, u32)>,
    /// The last kick went to a port.
    by_port: bool,
    /// Offset of the MSI-X capability.
    pub msix: u16,
    /// Offset of the MSI-X table in the BAR.
    pub table: u64,
}

impl PciFace {
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
                    match kind {
                        2 if bar != 0 => {
                            assert!(self.ports.is_none() && self.notify_step == 0, "ports come first, and once");
                            assert_eq!(block.at, 0);
                            self.ports = Some((bar as u8, self.config(at + 16, 4)));
                        }
                        _ if bar != 0 => panic!("one BAR holds everything but kicks"),
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

    /// The vector of queue `index`.
    #[must_use]
    pub fn vector(&self, index: u16) -> u16 {
        let shared = self.vectors.len() <= usize::from(self.device.core().queue_count());
        if shared { 0 } else { index }
    }

    /// Interrupts of queue `index`, and of those that share its vector, so far.
    #[must_use]
    pub fn interrupts(&self, index: u16) -> usize {
        self.vectors.get(usize::from(self.vector(index))).map_or(0, |v| v.sent())
    }

    /// Configuration interrupts so far.
    #[must_use]
    pub fn config_interrupts(&self) -> usize {
        self.vectors.last().map_or(0, |v| v.sent())
    }

    /// Offset and width in the common block.
    const fn place(register: Register) -> (u64, usize) {
        match register {
            Register::OfferedWord => (0x00, 4),
            Register::Offered => (0x04, 4),
            Register::AcceptedWord => (0x08, 4),
            Register::Accepted => (0x0c, 4),
            Register::Status => (0x14, 1),
            Register::Generation => (0x15, 1),
            Register::Queue => (0x16, 2),
            Register::QueueMost | Register::QueueSize => (0x18, 2),
            Register::QueueReady => (0x1c, 2),
            Register::Ring(Ring::Desc, high) => (0x20 + 4 * high as u64, 4),
            Register::Ring(Ring::Avail, high) => (0x28 + 4 * high as u64, 4),
            Register::Ring(Ring::Used, high) => (0x30 + 4 * high as u64, 4),
        }
    }
}

impl Face for PciFace {
    #[allow(clippy::expect_used)] // tests only
    fn attach(device: Box<dyn VirtioDevice>, ram: &GuestRam) -> Self {
        let sink = RecordingSink::default();
        let device = VirtioPci::new(device, ram.clone(), &sink).expect("descriptors for a test device");
        let mut face = Self {
            device,
            vectors: sink.made(),
            blocks: [Block::default(); 4],
            window: 0,
            notify_step: 0,
            ports: None,
            by_port: false,
            msix: 0,
            table: 0,
        };
        face.find_capabilities();
        assert!(
            face.blocks.iter().all(|b| b.len != 0) && face.window != 0 && face.msix != 0,
            "a capability is missing"
        );
        face.device.place(0, 0xe000_0000);
        face.device.config_write(COMMAND, &[0x06, 0x04]);
        face
    }

    fn core(&self) -> &Core {
        self.device.core()
    }

    fn get(&mut self, register: Register) -> u32 {
        let (at, len) = Self::place(register);
        self.read(at, len)
    }

    fn set(&mut self, register: Register, value: u32) {
        let (at, len) = Self::place(register);
        if register == Register::QueueReady {
            // Each queue has a vector of its own, of the same number, or all share the first.
            let queue = self.read(0x16, 2) as u16;
            let vector = self.vector(queue);
            self.write(0x1a, 2, vector.into());
        }
        self.write(at, len, value);
    }

    fn read_config(&mut self, at: u64, data: &mut [u8]) {
        let base = self.blocks[3].at;
        self.device.bar_read(0, base + at, data);
    }

    fn write_config(&mut self, at: u64, data: &[u8]) {
        let base = self.blocks[3].at;
        self.device.bar_write(0, base + at, data);
    }

    fn notify(&mut self, index: u16) {
        // Any way will do: this one takes them in turn.
        self.by_port = !self.by_port;
        if let Some((bar, step)) = self.ports.filter(|_| self.by_port) {
            self.device.bar_write(bar, u64::from(index) * u64::from(step), &index.to_le_bytes());
            return;
        }
        let at = self.blocks[1].at + u64::from(index) * u64::from(self.notify_step);
        self.device.bar_write(0, at, &index.to_le_bytes());
    }

    fn arm(&mut self) {
        self.enable_msix();
        let last = self.vectors.len() as u32 - 1;
        self.write(0x10, 2, last);
    }

    fn signalled(&mut self, queue: Option<u16>) -> usize {
        queue.map_or_else(|| self.config_interrupts(), |index| self.interrupts(index))
    }

    fn update_config(&mut self) {
        self.device.update_config();
    }

    /// The BAR, then configuration space.
    fn raw(&mut self, offset: u64, data: &mut [u8], write: bool) {
        let size = virtio::transport::pci::BAR_SIZE;
        match offset.checked_sub(size) {
            None if write => self.device.bar_write(0, offset, data),
            None => self.device.bar_read(0, offset, data),
            Some(at) => {
                // The bus lets nothing else through.
                let len = if data.len() >= 4 { 4 } else { data.len().min(2) };
                let Some(data) = data.get_mut(..len).filter(|data| !data.is_empty()) else { return };
                let at = (at & 0xff) as u16 / len as u16 * len as u16;
                if write {
                    self.device.config_write(at, data);
                } else {
                    self.device.config_read(at, data);
                }
            }
        }
    }

    fn power_on(&mut self) {
        self.device.reset();
    }
}

/// A page of registers with an interrupt line.
pub struct MmioFace {
    /// The registers.
    pub device: VirtioMmio,
    /// The line; one that counts.
    pub line: Arc<RecordingLine>,
    /// Edges that were answered.
    served: usize,
    /// Answers that found used buffers, and answers that found a change.
    found: (usize, usize),
}

impl MmioFace {
    /// Reads the register at `at`.
    pub fn register(&mut self, at: u64) -> u32 {
        let mut bytes = [0; 4];
        self.device.read(at, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Writes the register at `at`.
    pub fn set_register(&mut self, at: u64, value: u32) {
        self.device.write(at, &value.to_le_bytes());
    }

    /// What an interrupt handler does: reads why, and acknowledges it.
    pub fn serve(&mut self) {
        let pulses = self.line.pulses();
        if pulses == self.served {
            return;
        }
        self.served = pulses;
        let why = self.register(0x60);
        self.set_register(0x64, why);
        self.found.0 += usize::from(why & 1 != 0);
        self.found.1 += usize::from(why & 2 != 0);
    }

    const fn place(register: Register) -> u64 {
        match register {
            Register::Offered => 0x010,
            Register::OfferedWord => 0x014,
            Register::Accepted => 0x020,
            Register::AcceptedWord => 0x024,
            Register::Queue => 0x030,
            Register::QueueMost => 0x034,
            Register::QueueSize => 0x038,
            Register::QueueReady => 0x044,
            Register::Status => 0x070,
            Register::Ring(Ring::Desc, high) => 0x080 + 4 * high as u64,
            Register::Ring(Ring::Avail, high) => 0x090 + 4 * high as u64,
            Register::Ring(Ring::Used, high) => 0x0a0 + 4 * high as u64,
            Register::Generation => 0x0fc,
        }
    }
}

impl Face for MmioFace {
    #[allow(clippy::expect_used)] // tests only
    fn attach(device: Box<dyn VirtioDevice>, ram: &GuestRam) -> Self {
        let line = Arc::new(RecordingLine::default());
        let device = VirtioMmio::new(device, ram.clone(), Arc::clone(&line) as Arc<dyn IrqLine>);
        Self { device: device.expect("descriptors for a test device"), line, served: 0, found: (0, 0) }
    }

    fn core(&self) -> &Core {
        self.device.core()
    }

    fn get(&mut self, register: Register) -> u32 {
        self.register(Self::place(register))
    }

    fn set(&mut self, register: Register, value: u32) {
        self.set_register(Self::place(register), value);
    }

    fn read_config(&mut self, at: u64, data: &mut [u8]) {
        self.device.read(0x100 + at, data);
    }

    fn write_config(&mut self, at: u64, data: &[u8]) {
        self.device.write(0x100 + at, data);
    }

    fn notify(&mut self, index: u16) {
        self.set_register(mmio::NOTIFY, index.into());
    }

    fn arm(&mut self) {}

    fn signalled(&mut self, queue: Option<u16>) -> usize {
        self.serve();
        if queue.is_some() { self.found.0 } else { self.found.1 }
    }

    fn update_config(&mut self) {
        self.device.update_config();
    }

    fn raw(&mut self, offset: u64, data: &mut [u8], write: bool) {
        // Most of the page is configuration that no device has.
        let offset = if offset < 0x8000 { offset & 0x1ff } else { offset };
        if write {
            self.device.write(offset, data);
        } else {
            self.device.read(offset, data);
        }
    }

    fn power_on(&mut self) {
        self.device.reset();
    }
}
