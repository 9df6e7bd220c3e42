// SPDX-License-Identifier: Apache-2.0
//! Skeleton.

/// The PCI bus.
#[derive(Default)]
pub struct PciHost {}

impl PciHost {
    pub fn config_read(&self, _offset: u64, data: &mut [u8]) { data.fill(0xff) }
    pub fn config_write(&self, _offset: u64, _data: &[u8]) {}
    pub fn bar_read(&self, _at: u64, _data: &mut [u8]) -> bool { false }
    pub fn bar_write(&self, _at: u64, _data: &[u8]) -> bool { false }
    pub fn new(_spec: &spec::Vm, _vm: &kvm::Vm, _ram: &mem::GuestRam, _io: &crate::console::ConsoleIo) -> Result<Self, crate::error::Error> { Ok(Self{}) }
    pub fn input(&self, _b: &[u8]) {}
    pub fn stop(&self) -> Vec<crate::ledger::DeviceLedger> { Vec::new() }
}
