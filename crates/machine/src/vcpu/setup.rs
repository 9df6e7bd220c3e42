// SPDX-License-Identifier: Apache-2.0
//! The first register values of a vCPU: long mode for Linux's 64-bit entry, flat 32-bit protected mode for PVH and multiboot.
//!
//! Called by `build` for vCPU 0; the others wait for the guest's start-up IPI. The tables these registers point to are
//! written by `boot`. Follows Documentation/arch/x86/boot.rst ("64-bit Boot Protocol") and the PVH entry ABI.

use base::Gpa;
use boot::{Entry, MULTIBOOT_MAGIC};
use kvm::{CpuidEntry, KvmError, MsrEntry, Regs, Segment, Vcpu};

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// RFLAGS with interrupts off: only the bit that is always one.
const RFLAGS: u64 = 2;

const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// `MONITOR` and `MWAIT` are switched on.
const MISC_ENABLE_MWAIT: u64 = 1 << 18;
const MSR_MTRR_DEF_TYPE: u32 = 0x2ff;
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// Sets the registers of the boot vCPU.
///
/// # Errors
/// [`KvmError`].
pub fn boot_vcpu(vcpu: &Vcpu, entry: &Entry) -> Result<(), KvmError> {
    match *entry {
        Entry::Linux64 { rip, rsi, tables } => {
            let gdt = (tables.gdt, tables.gdt_limit);
            set_segments(vcpu, &Segments { code: 0x10, data: 0x18, task: 0x20, gdt, long: Some(tables.cr3) })?;
            vcpu.set_regs(&Regs { rip: rip.0, rsi: rsi.0, rflags: RFLAGS, ..Default::default() })
        }
        Entry::Pvh { rip, rbx, tables } => {
            let gdt = (tables.gdt, tables.gdt_limit);
            set_segments(vcpu, &Segments { code: 0x28, data: 0x18, task: 0x20, gdt, long: None })?;
            vcpu.set_regs(&Regs { rip: rip.0, rbx: rbx.0, rflags: RFLAGS, ..Default::default() })
        }
        Entry::Multiboot { rip, rbx, gdt, gdt_limit } => {
            set_segments(vcpu, &Segments { code: 8, data: 0x10, task: 0, gdt: (gdt, gdt_limit), long: None })?;
            let rax = u64::from(MULTIBOOT_MAGIC);
            vcpu.set_regs(&Regs { rip: rip.0, rax, rbx: rbx.0, rflags: RFLAGS, ..Default::default() })
        }
    }
}

/// MSRs that every vCPU starts with: fast strings, `MWAIT` where the guest has it, and write-back as the default memory type,
/// as firmware would leave them.
///
/// # Errors
/// [`KvmError`].
pub fn msrs(vcpu: &Vcpu, mwait: bool) -> Result<(), KvmError> {
    let misc = MISC_ENABLE_FAST_STRING | if mwait { MISC_ENABLE_MWAIT } else { 0 };
    let set = |index, data| MsrEntry { index, data, ..Default::default() };
    vcpu.set_msrs(&[set(MSR_MISC_ENABLE, misc), set(MSR_MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK)])
}

/// Extended state that every vCPU starts with: all that its CPUID table offers.
///
/// # Errors
/// [`KvmError`].
pub fn extended_state(vcpu: &Vcpu, table: &[CpuidEntry]) -> Result<(), KvmError> {
    match table.iter().find(|e| e.function == 0xd && e.index == 0) {
        Some(leaf) if leaf.eax != 0 => vcpu.set_xcr0(u64::from(leaf.edx) << 32 | u64::from(leaf.eax)),
        _ => Ok(()),
    }
}

/// The segments of a boot CPU: selectors, the table behind them and its limit, and the page tables where it starts in long
/// mode.
struct Segments {
    code: u16,
    data: u16,
    task: u16,
    gdt: (Gpa, u16),
    long: Option<Gpa>,
}

fn set_segments(vcpu: &Vcpu, segments: &Segments) -> Result<(), KvmError> {
    let mut sregs = vcpu.sregs()?;
    let long = segments.long.is_some();
    let code = Segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: segments.code,
        type_: 0xb,
        present: 1,
        s: 1,
        g: 1,
        l: u8::from(long),
        db: u8::from(!long),
        ..Default::default()
    };
    let data = Segment { selector: segments.data, type_: 3, l: 0, db: 1, ..code };
    sregs.cs = code;
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr = Segment { selector: segments.task, limit: 0x67, type_: 0xb, present: 1, ..Default::default() };
    (sregs.gdt.base, sregs.gdt.limit) = (segments.gdt.0.0, segments.gdt.1);
    (sregs.idt.base, sregs.idt.limit) = (0, 0);
    sregs.cr0 = CR0_PE | CR0_ET;
    if let Some(cr3) = segments.long {
        sregs.cr0 |= CR0_PG;
        sregs.cr3 = cr3.0;
        sregs.cr4 |= CR4_PAE;
        sregs.efer |= EFER_LME | EFER_LMA;
    }
    vcpu.set_sregs(&sregs)
}
