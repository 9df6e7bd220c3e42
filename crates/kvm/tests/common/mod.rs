// SPDX-License-Identifier: Apache-2.0
//! A guest of thirty bytes that writes to one page after another, in memory that is logged. For the tests of dirty tracking
//! and the benchmark of what its harvest costs.

#![allow(dead_code)]

use std::path::Path;

use base::mmap::Mmap;
use base::{Gpa, Hva};
use kvm::{Exit, Kvm, KvmError, Regs, Slot, Vcpu, Vm, flat_protected_mode};

/// The number of the logged slot.
pub const LOGGED: u32 = 1;
/// Where it is.
const AT: u64 = 256 << 20;
const CODE_AT: usize = 0x1000;
const WORDS_AT: usize = 0x2000;
/// `top: mov edi,[0x2000]; mov ecx,[0x2004]; mov edx,[0x2008]; l: mov byte [edi],1; add edi,edx; dec ecx; jnz l; out 0x80,al;
/// jmp top`
const CODE: [u8; 30] = [
    0x8b, 0x3d, 0x00, 0x20, 0x00, 0x00, 0x8b, 0x0d, 0x04, 0x20, 0x00, 0x00, 0x8b, 0x15, 0x08, 0x20, 0x00, 0x00, 0xc6,
    0x07, 0x01, 0x01, 0xd7, 0x49, 0x75, 0xf8, 0xe6, 0x80, 0xeb, 0xe2,
];

/// The guest.
pub struct Writer {
    /// Declared first, so that it goes before the memory.
    pub vcpu: Vcpu,
    /// Its machine.
    pub vm: Vm,
    low: Mmap,
    logged: Mmap,
}

impl Writer {
    /// A guest with `size` bytes of logged memory; `prepare` sees its machine before there is a vCPU. `None`, with a line,
    /// where there is no KVM for it.
    pub fn new(size: u64, prepare: impl FnOnce(&Vm) -> bool) -> Option<Self> {
        match Self::made(size, prepare) {
            Ok(Some(writer)) => Some(writer),
            Ok(None) => {
                println!("skipped: this host's KVM can't do it");
                None
            }
            Err(e) => {
                println!("skipped: {e}");
                None
            }
        }
    }

    fn made(size: u64, prepare: impl FnOnce(&Vm) -> bool) -> Result<Option<Self>, KvmError> {
        let host = |source| KvmError::Call { call: "mmap", source };
        let vm = Kvm::open(Path::new("/dev/kvm"))?.create_vm()?;
        if !prepare(&vm) {
            return Ok(None);
        }
        let low = Mmap::anonymous(0x3000).map_err(host)?;
        let logged = Mmap::anonymous(size as usize).map_err(host)?;
        logged.populate().map_err(host)?;
        let slot = |number, at, map: &Mmap, log| Slot {
            number,
            at: Gpa(at),
            size: map.len() as u64,
            host: Hva(map.as_ptr() as u64),
            readonly: false,
            log,
        };
        for slot in [slot(0, 0, &low, false), slot(LOGGED, AT, &logged, true)] {
            // SAFETY: both mappings go after the vCPU and the machine.
            unsafe { vm.set_slot(&slot) }?;
        }
        let vcpu = vm.create_vcpu(0)?;
        let mut sregs = vcpu.sregs()?;
        flat_protected_mode(&mut sregs);
        vcpu.set_sregs(&sregs)?;
        vcpu.set_regs(&Regs { rip: CODE_AT as u64, rflags: 2, ..Regs::default() })?;
        let mut writer = Self { vcpu, vm, low, logged };
        writer.poke(CODE_AT, &CODE);
        Ok(Some(writer))
    }

    /// The bitmap of the logged slot.
    pub fn dirty_bitmap(&self, bitmap: &mut [u64]) -> Result<(), KvmError> {
        // SAFETY: the slot is as large as its memory.
        unsafe { self.vm.dirty_bitmap(LOGGED, self.logged.len() as u64, bitmap) }
    }

    fn poke(&mut self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.low.len());
        // SAFETY: inside the mapping, and the vCPU, which this thread runs, stands still.
        unsafe { self.low.as_ptr().add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// The guest writes to `count` pages of logged memory, from page `first` on, each `stride` pages after the last.
    pub fn write(&mut self, first: u32, count: u32, stride: u32) {
        let words = [AT as u32 + first * 4096, count, stride * 4096];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.poke(WORDS_AT, &bytes);
        loop {
            match self.vcpu.run() {
                Ok(Exit::IoOut(0x80, _)) => return,
                Ok(Exit::Intr) => {}
                other => panic!("the guest left with {other:?}"),
            }
        }
    }
}
