// SPDX-License-Identifier: Apache-2.0
//! Puts a kernel, its initrd, its command line and its firmware tables into guest memory.
//!
//! `machine` calls [`load`] once, before any vCPU runs, from the thread that builds the VM. Kernels, initrds and command
//! lines are hostile input: each fault is one [`BootError`], never a panic and never an allocation the input chose.

#![forbid(unsafe_code)]

mod acpi;
mod bzimage;
mod cmdline;
mod e820;
mod elf;
mod error;
pub mod fuzz;
mod initrd;
mod kaslr;
mod layout;
mod load;
mod long_mode;
mod multiboot;
mod platform;
mod pvh;
mod reset_vector;
mod source;
mod unpack;
mod zero_page;

use base::Gpa;

pub use error::BootError;
pub use layout::{ACPI_START, CMDLINE, GDT, PAGE_TABLES, START_INFO, ZERO_PAGE};
pub use load::load;
pub use multiboot::MAGIC as MULTIBOOT_MAGIC;
pub use platform::{Ecam, Node, Pci, PciHotplug, Platform, PmPorts, Serial, VirtioMmio};
pub use source::Source;

/// Who unpacks a compressed kernel and a compressed initrd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Decompress {
    /// The guest does, with the code in its own image ("before").
    Guest,
    /// tare does, straight into guest memory, whenever it knows the format; else the guest. Keeps KASLR. An initrd is
    /// unpacked only if it then takes no more than a quarter of RAM.
    #[default]
    Monitor,
}

/// What to start. RAM must read as zero, as fresh memory does: zeros in the kernel are not written.
#[derive(Debug)]
pub struct Guest<'a> {
    /// bzImage, ELF or multiboot 1.
    pub kernel: Source<'a>,
    /// Initial RAM disk.
    pub initrd: Option<Source<'a>>,
    /// Linux's command line, without a terminating NUL.
    pub cmdline: &'a str,
    /// The command line of a multiboot kernel, after its own name.
    pub args: &'a str,
    /// Who unpacks the kernel and the initrd.
    pub decompress: Decompress,
    /// Fresh random bits for KASLR when tare unpacks; `None` loads at the default address, as `nokaslr` does.
    pub seed: Option<u64>,
}

/// How the boot CPU starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// 64-bit Linux boot protocol: long mode, paging on with `tables`, CS = 0x10, DS/ES/SS = 0x18, interrupts off.
    Linux64 {
        /// First instruction.
        rip: Gpa,
        /// The zero page, for RSI.
        rsi: Gpa,
        /// Page tables and GDT, already in guest memory.
        tables: LongMode,
    },
    /// PVH: 32-bit protected mode, paging off, flat segments, interrupts off, EBP = EDI = ESI = 0.
    Pvh {
        /// First instruction, for EIP.
        rip: Gpa,
        /// `hvm_start_info`, for EBX.
        rbx: Gpa,
        /// GDT, already in guest memory; its page tables are not used. CS = 0x28, others 0x18, TR = 0x20.
        tables: LongMode,
    },
    /// Multiboot 1: 32-bit protected mode, paging off, flat segments, interrupts off, EAX = [`MULTIBOOT_MAGIC`].
    Multiboot {
        /// First instruction, for EIP.
        rip: Gpa,
        /// The multiboot information, for EBX.
        rbx: Gpa,
        /// GDT, already in guest memory: CS = 0x08, others 0x10.
        gdt: Gpa,
        /// Its limit, for GDTR.
        gdt_limit: u16,
    },
}

/// Tables for the boot CPU in guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LongMode {
    /// Top-level page table; identity maps the first `mapped` bytes with 2 MiB pages.
    pub cr3: Gpa,
    /// Bytes mapped, a multiple of 1 GiB.
    pub mapped: u64,
    /// Global descriptor table: 0x10 64-bit code, 0x18 data, 0x20 busy TSS (base 0, limit 0x67), 0x28 32-bit code.
    pub gdt: Gpa,
    /// Its limit, for GDTR.
    pub gdt_limit: u16,
}

/// What was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// How to start it.
    pub entry: Entry,
    /// One line for the user's timeline: format, compression, who unpacked it; the same of the initrd, if there is one.
    pub how: String,
    /// Where the kernel image lies: first byte and length in bytes, its bss included.
    pub kernel: (Gpa, u64),
    /// Where the initrd lies.
    pub initrd: Option<(Gpa, u64)>,
}
