// SPDX-License-Identifier: Apache-2.0
//! What a PCI function is to the bus and to `machine`.
//!
//! A function is shared behind one mutex; every call comes from the thread of the vCPU that made the access, or from
//! `machine` before the first vCPU runs.

/// Where one BAR is, and whether it answers there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// BAR number, 0 to 5; of a 64-bit BAR the lower one.
    pub bar: u8,
    /// Guest physical address, or the first port where `io` says so; a multiple of `size`; 0 if never set.
    pub address: u64,
    /// Bytes or ports, a power of two.
    pub size: u64,
    /// In port space.
    pub io: bool,
    /// May be above 4 GiB.
    pub wide: bool,
    /// Decoding of its space is on, so that the BAR answers.
    pub enabled: bool,
}

/// What a configuration write changed outside the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// A BAR's address register changed, or the decoding of ports: ask [`PciDevice::placements`] again. While a guest sizes BARs this reports
    /// addresses that it does not mean; it means them once `enabled` is set.
    Moved,
    /// Memory decoding was switched on or off for all BARs: ask [`PciDevice::placements`] again.
    Decode(bool),
}

/// A single-function PCI device of type 0.
pub trait PciDevice: Send {
    /// Reads 1, 2 or 4 bytes of configuration at `offset`, which do not cross a dword and lie below 256.
    fn config_read(&mut self, offset: u16, data: &mut [u8]);

    /// Writes 1, 2 or 4 bytes of configuration; the same bounds.
    fn config_write(&mut self, offset: u16, data: &[u8]) -> Effect;

    /// All BARs as they are now.
    fn placements(&self) -> Vec<Placement>;

    /// Sets a BAR's address, as firmware would. Memory decoding is not touched.
    fn place(&mut self, bar: u8, address: u64);

    /// Reads from a BAR. Any length and offset; what is not there reads as zero.
    fn bar_read(&mut self, bar: u8, offset: u64, data: &mut [u8]);

    /// Writes to a BAR. Any length and offset; what can't be written is ignored.
    fn bar_write(&mut self, bar: u8, offset: u64, data: &[u8]);

    /// Whether reading configuration does more than reading, or gives what nobody wrote: what was read once must not stand
    /// in for the next read then.
    fn reads_have_effects(&self) -> bool {
        false
    }

    /// Back to the state after power-on: BARs unset, decoding off, the device behind it reset.
    fn reset(&mut self);
}
