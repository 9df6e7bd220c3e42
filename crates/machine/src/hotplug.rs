// SPDX-License-Identifier: Apache-2.0
//! Memory that is plugged while the guest runs: where it lies, and how KVM (and whoever else listens to the address space)
//! follows the memory device. Called on the thread of the vCPU that kicked the device, under the device's lock.
//!
//! The region comes in pieces, each a region of the address space of its own, so that no slot that the guest uses is ever
//! taken away to be made larger. A piece is there while any block of it is plugged.

use std::io;
use std::sync::Arc;

use base::Gpa;
use mem::backing::ToPlug;
use mem::space::{RegionId, SpaceError};
use mem::{GuestRam, Hot};
use virtio::mem::{MemControl, Place};

use crate::bus::Function;
use crate::error::Error;
use crate::mmio_host::add_words;
use crate::spaces::Spaces;

/// Bytes of a block where pages allow: what KVM maps by one entry.
const BLOCK: u64 = 2 << 20;

/// Where the memory of `spec` that comes later lies, if there is any.
#[must_use]
pub fn to_plug(spec: &spec::Vm) -> Option<ToPlug> {
    let memory = &spec.memory;
    let size = memory.to_plug();
    let piece = mem::piece_to_plug(size);
    let at = mem::room_to_plug(memory.at_start(), piece);
    // A device that is passed through is told of whole pieces, and holds their pages. Blocks as large keep it from holding a
    // page that the host took back while the guest has another one there.
    let whole = (memory.boot.is_some() || !spec.vfio.is_empty()) && size.is_multiple_of(piece);
    let least = if whole { piece } else { BLOCK };
    (size > 0).then(|| ToPlug { at, size, block: least.max(memory.pages.bytes()) })
}

/// `cmdline` with what makes a Linux guest use memory as soon as it is plugged, which few distributions' user space does; unless
/// the user said what is to become of it. What may have to go again is kept for what can be moved out of the way.
#[must_use]
pub fn announce(cmdline: &str, spec: &spec::Vm) -> String {
    if spec.memory.to_plug() == 0 || cmdline.contains("memhp_default_state=") {
        return cmdline.to_owned();
    }
    let stays = spec.memory.hotplug == 0;
    add_words(cmdline, if stays { "memhp_default_state=online" } else { "memhp_default_state=online_movable" })
}

/// The pieces, and which of them are there.
pub struct Pieces {
    spaces: Spaces,
    hot: Arc<Hot>,
    /// Bytes of each but the last, which may be shorter.
    piece: u64,
    regions: Vec<(RegionId, bool)>,
    /// Blocks are made to exist when they are plugged: pages that are set aside may have run out.
    populate: bool,
}

impl Pieces {
    /// All pieces of what can be plugged of `ram`, none of them there; `None` if nothing can.
    ///
    /// # Errors
    /// [`Error::Space`].
    pub fn new(spec: &spec::Vm, spaces: &Spaces, ram: &GuestRam) -> Result<Option<Self>, Error> {
        let Some(hot) = ram.hot() else { return Ok(None) };
        let piece = mem::piece_to_plug(hot.size());
        let regions = spaces.make_pieces(ram, piece)?.into_iter().map(|region| (region, false)).collect();
        let populate = spec.memory.pages.are_reserved();
        Ok(Some(Self { spaces: spaces.clone(), hot: hot.clone(), piece, regions, populate }))
    }

    /// The memory.
    #[must_use]
    pub const fn hot(&self) -> &Arc<Hot> {
        &self.hot
    }

    /// Those that `len` bytes at `at` lie in: number and first address.
    fn of(&self, at: Gpa, len: u64) -> impl Iterator<Item = (usize, Gpa)> + use<> {
        let (start, piece) = (self.hot.start().0, self.piece);
        let from = at.0.saturating_sub(start);
        let numbers = from / piece..(from + len).div_ceil(piece);
        // There are at most 256.
        numbers.map(move |number| (number as usize, Gpa(start + number * piece)))
    }
}

impl Place for Pieces {
    fn plug(&mut self, at: Gpa, len: u64) -> io::Result<()> {
        if self.populate
            && let Err(why) = self.hot.populate(at, len)
        {
            // What there was of it is given back; where that fails, it was not there.
            let _ = self.hot.discard(at, len);
            return Err(why);
        }
        let missing: Vec<(usize, RegionId, Gpa)> = self
            .of(at, len)
            .filter_map(|(number, first)| match self.regions.get(number) {
                Some((region, false)) => Some((number, *region, first)),
                _ => None,
            })
            .collect();
        let places: Vec<(RegionId, Gpa)> = missing.iter().map(|(_, region, first)| (*region, *first)).collect();
        if let Err(why) = self.spaces.put_pieces(&places) {
            // As above.
            let _ = self.hot.discard(at, len);
            return Err(refused(why));
        }
        for (number, ..) in missing {
            self.regions.get_mut(number).into_iter().for_each(|(_, there)| *there = true);
        }
        Ok(())
    }

    fn unplug(&mut self, at: Gpa, len: u64) -> io::Result<()> {
        let end = self.hot.start().0 + self.hot.size();
        let empty: Vec<(usize, RegionId)> = self
            .of(at, len)
            .filter(|(_, first)| !self.hot.is_any_plugged(*first, self.piece.min(end - first.0)))
            .filter_map(|(number, _)| match self.regions.get(number) {
                Some((region, true)) => Some((number, *region)),
                _ => None,
            })
            .collect();
        let regions: Vec<RegionId> = empty.iter().map(|(_, region)| *region).collect();
        // Listeners made these, and take them back; one that does not keeps them, and nothing is given back under it.
        self.spaces.take_pieces(&regions).map_err(refused)?;
        for (number, _) in empty {
            self.regions.get_mut(number).into_iter().for_each(|(_, there)| *there = false);
        }
        self.hot.discard(at, len)
    }
}

fn refused(error: SpaceError) -> io::Error {
    match error {
        SpaceError::Refused { source, .. } => source,
        other => io::Error::other(other),
    }
}

/// The way to give a machine another size, and where its memory device is on the bus, which tells the guest.
#[derive(Clone)]
pub struct MemoryControl {
    control: MemControl,
    function: Function,
    /// Bytes that are there at all times.
    stays: u64,
}

impl MemoryControl {
    /// Of the device at `function`, beside `stays` bytes of other memory.
    #[must_use]
    pub const fn new(control: MemControl, function: Function, stays: u64) -> Self {
        Self { control, function, stays }
    }

    /// Bytes that the guest has now.
    #[must_use]
    pub fn actual(&self) -> u64 {
        self.stays + self.control.plugged()
    }

    /// Bytes that it is to have.
    #[must_use]
    pub fn wanted(&self) -> u64 {
        self.stays + self.control.requested()
    }

    /// Bytes that it can have.
    #[must_use]
    pub const fn most(&self) -> u64 {
        self.stays + self.control.most()
    }

    /// Tells the guest to have `bytes` of memory; it comes to have them in its own time.
    ///
    /// # Errors
    /// What can be wanted, in one line.
    pub fn resize(&self, bytes: u64) -> Result<(), String> {
        let Some(more) = bytes.checked_sub(self.stays) else {
            return Err(format!("{} MiB of its memory stay, and {} are less", self.stays >> 20, bytes >> 20));
        };
        self.control.request(more)?;
        self.function.update_config();
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::ready::{self, StartUp};
    use crate::spaces::At;

    #[test]
    fn a_piece_is_there_while_any_block_of_it_is() {
        let made = kvm::Kvm::open(std::path::Path::new("/dev/kvm")).and_then(|kvm| kvm.create_vm());
        let Ok(vm) = made else {
            println!("skipped: no KVM");
            return;
        };
        let mut spec = spec::Vm::new("k");
        spec.memory = spec::Memory { size: 16 << 20, hotplug: 384 << 20, ..spec::Memory::default() };
        let ram = ready::find(&spec, &mut StartUp::default()).unwrap();
        let spaces = Spaces::new(&vm, &ram).unwrap();
        let mut pieces = Pieces::new(&spec, &spaces, &ram).unwrap().unwrap();
        let hot = pieces.hot().clone();
        let at = |mib: u64| Gpa((6 << 30) + (mib << 20));
        let there = || [0, 127, 128, 255, 256, 383].map(|mib| spaces.memory_at(at(mib).0) == At::Ram);
        let mut turn = |plug: bool, mib: u64, len: u64| {
            // As the device does it: marks follow what comes, and go before what goes.
            if plug {
                pieces.plug(at(mib), len << 20).unwrap();
                hot.mark(at(mib), len << 20, true);
            } else {
                hot.mark(at(mib), len << 20, false);
                pieces.unplug(at(mib), len << 20).unwrap();
            }
            there()
        };
        assert_eq!(turn(true, 2, 2), [true, true, false, false, false, false]);
        assert_eq!(turn(true, 126, 4), [true, true, true, true, false, false], "over the edge of one");
        assert_eq!(turn(true, 382, 2), [true; 6]);
        assert_eq!(turn(false, 126, 4), [true, true, false, false, true, true]);
        assert_eq!(turn(false, 2, 2), [false, false, false, false, true, true]);
        assert_eq!(turn(true, 0, 382), [true; 6]);
        assert_eq!(turn(false, 0, 384), [false; 6]);
        assert_eq!(spaces.memory_at(at(384).0), At::Nobody);
    }

    #[test]
    fn the_kernel_is_told_what_to_do_with_memory_that_comes() {
        let mut vm = spec::Vm::new("k");
        assert_eq!((to_plug(&vm), announce("quiet", &vm).as_str()), (None, "quiet"));
        vm.memory.hotplug = 8 << 30;
        let room = ToPlug { at: Gpa(6 << 30), size: 8 << 30, block: 2 << 20 };
        assert_eq!(to_plug(&vm), Some(room));
        assert_eq!(announce("quiet -- -c x", &vm), "quiet memhp_default_state=online_movable -- -c x");
        assert_eq!(announce("memhp_default_state=offline", &vm), "memhp_default_state=offline");
        vm.memory = spec::Memory { size: 2 << 30, boot: Some(1 << 30), pages: spec::Pages::Huge1G, ..vm.memory };
        assert_eq!(to_plug(&vm), Some(ToPlug { size: 9 << 30, block: 1 << 30, ..room }));
        vm.memory.pages = spec::Pages::Small;
        assert_eq!(to_plug(&vm), Some(ToPlug { size: 9 << 30, block: 128 << 20, ..room }));
        vm.memory.hotplug = 0;
        assert_eq!(announce("", &vm), "memhp_default_state=online");
    }
}
