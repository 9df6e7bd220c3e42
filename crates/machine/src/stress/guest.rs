// SPDX-License-Identifier: Apache-2.0
//! The guest of `stress`: four vCPUs that halt, a handler for each vector that counts and ends the interrupt, and a mailbox through
//! which vCPU 0 writes registers of KVM's I/O APIC, which nobody but a guest can.
//!
//! Its memory is shared with the vCPUs as atomics; what its code needs is written before there is a vCPU.

use std::ffi::c_void;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::SeqCst};
use std::thread::{self, JoinHandle};

use base::mmap::Mmap;
use base::{Gpa, Hva};
use kvm::{CpuidEntry, Exit, Kvm, KvmError, Regs, Segment, Slot, Vcpu, Vm};

use super::{CPUS, FIRST, VECTORS};

const SIZE: usize = 2 << 20;
const PML4: usize = 0x1000;
const IDT: usize = 0x4000;
const GDT: usize = 0x5000;
/// A count for each line, in cache lines of their own.
const COUNTS: usize = 0x6000;
const READY: usize = 0x7000;
/// A write to the I/O APIC: non-zero when there is one, select, value.
const MAIL: usize = 0x7008;
const STRAY: usize = 0x7018;
const STOP: usize = 0x7020;
const CODE: usize = 0x8000;
const STUBS: usize = 0x9000;
const STUB: usize = 32;
const STACKS: usize = 0x10000;
/// The vector that wakes a vCPU and means nothing.
const WAKE: u8 = 0xf8;

/// The local APIC is at 0x200000 of the guest's addresses, the I/O APIC at 0x400000: within 32 bits, signed.
const START: [u8; 95] = [
    0xc7, 0x04, 0x25, 0xf0, 0x00, 0x20, 0x00, 0xff, 0x01, 0x00, 0x00, // mov dword [apic + 0xf0], 0x1ff
    0xc7, 0x04, 0x25, 0x50, 0x03, 0x20, 0x00, 0x00, 0x00, 0x01, 0x00, // mov dword [apic + 0x350], 0x10000
    0xb0, 0xff, 0xe6, 0x21, 0xe6, 0xa1, // mov al, 0xff; out 0x21, al; out 0xa1, al
    0xf0, 0x48, 0xff, 0x04, 0x25, 0x00, 0x70, 0x00, 0x00, // lock inc qword [READY]
    0xfb, // sti
    // again:
    0x83, 0x3c, 0x25, 0x20, 0x70, 0x00, 0x00, 0x00, // cmp dword [STOP], 0
    0x75, 0x3c, // jne stop
    0x85, 0xff, // test edi, edi
    0x75, 3,    // jnz mail
    0xf4, // hlt
    0xeb, 0xef, // jmp again
    // mail:
    0xf3, 0x90, // pause
    0x83, 0x3c, 0x25, 0x08, 0x70, 0x00, 0x00, 0x00, // cmp dword [MAIL], 0
    0x74, 0xe3, // je again
    0x8b, 0x0c, 0x25, 0x0c, 0x70, 0x00, 0x00, // mov ecx, [MAIL + 4]
    0x89, 0x0c, 0x25, 0x00, 0x00, 0x40, 0x00, // mov [ioapic], ecx
    0x8b, 0x0c, 0x25, 0x10, 0x70, 0x00, 0x00, // mov ecx, [MAIL + 8]
    0x89, 0x0c, 0x25, 0x10, 0x00, 0x40, 0x00, // mov [ioapic + 0x10], ecx
];
/// `mov dword [MAIL], 0; jmp again; stop: out 0x80, al; hlt`
const REST: [u8; 16] = [0xc7, 0x04, 0x25, 0x08, 0x70, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0xeb, 0xba, 0xe6, 0x80, 0xf4];

/// The machine and what it shares.
pub struct Guest {
    /// Before the memory, so that it goes first.
    vcpus: Vec<Mutex<Option<Vcpu>>>,
    pub vm: Vm,
    ram: Mmap,
    mail: Mutex<()>,
}

impl Guest {
    /// A guest whose interrupt chips `prepare` makes. `None`, with a line, where there is no KVM for it.
    pub fn new(prepare: fn(&Vm) -> Result<bool, KvmError>) -> Option<Self> {
        match Self::made(prepare) {
            Ok(Some(guest)) => Some(guest),
            Ok(None) => {
                println!("skipped: this host's KVM can't do it");
                None
            }
            Err(error) => {
                println!("skipped: {error}");
                None
            }
        }
    }

    fn made(prepare: fn(&Vm) -> Result<bool, KvmError>) -> Result<Option<Self>, KvmError> {
        let kvm = Kvm::open(Path::new("/dev/kvm"))?;
        let vm = kvm.create_vm()?;
        if !prepare(&vm)? {
            return Ok(None);
        }
        let ram = Mmap::anonymous(SIZE).map_err(|source| KvmError::Call { call: "mmap", source })?;
        let slot = Slot {
            number: 0,
            at: Gpa(0),
            size: SIZE as u64,
            host: Hva(ram.as_ptr() as u64),
            readonly: false,
            log: false,
        };
        // SAFETY: the mapping goes after the vCPUs and the machine, and holds nothing but what is written below.
        unsafe { vm.set_slot(&slot) }?;
        let mut guest = Self { vcpus: Vec::new(), vm, ram, mail: Mutex::new(()) };
        guest.write_code();
        let cpuid = kvm.supported_cpuid()?;
        for cpu in 0..CPUS {
            let vcpu = guest.vcpu(cpu, &cpuid)?;
            guest.vcpus.push(Mutex::new(Some(vcpu)));
        }
        Ok(Some(guest))
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= SIZE);
        // SAFETY: inside the mapping, aligned, and nothing but atomics and the guest touches it.
        unsafe { &*self.ram.as_ptr().add(at).cast::<c_void>().cast::<AtomicU64>() }
    }

    fn half(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= SIZE);
        // SAFETY: as above.
        unsafe { &*self.ram.as_ptr().add(at).cast::<c_void>().cast::<AtomicU32>() }
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        for (index, chunk) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.word(at + 8 * index).store(u64::from_le_bytes(word), SeqCst);
        }
    }

    /// Page tables, descriptors, handlers, and what a vCPU does between interrupts.
    fn write_code(&self) {
        self.word(PML4).store(PML4 as u64 + 0x1003, SeqCst);
        self.word(PML4 + 0x1000).store(PML4 as u64 + 0x2003, SeqCst);
        for (index, page) in [0x83, 0xfee0_0093, 0xfec0_0093].into_iter().enumerate() {
            self.word(PML4 + 0x2000 + 8 * index).store(page, SeqCst);
        }
        self.word(GDT + 8).store(0x00af_9b00_0000_ffff, SeqCst);
        self.word(GDT + 16).store(0x00cf_9300_0000_ffff, SeqCst);
        self.put(CODE, &[&START[..], &REST[..]].concat());
        for vector in 0..=255u8 {
            let at = STUBS + usize::from(vector) * STUB;
            let gate = (at as u64 & 0xffff) | 8 << 16 | 0x8e << 40 | (at as u64 >> 16) << 48;
            self.word(IDT + 16 * usize::from(vector)).store(gate, SeqCst);
            let line = vector.checked_sub(FIRST).map(|from| usize::from(from / VECTORS)).filter(|line| *line < 64);
            let count = line.map_or(STRAY, |line| COUNTS + 64 * line) as u32;
            let mut stub = Vec::new();
            if vector != WAKE {
                // lock inc qword [count]
                stub.extend([0xf0, 0x48, 0xff, 0x04, 0x25]);
                stub.extend(count.to_le_bytes());
            }
            if vector < 32 {
                // cli; out 0x80, al; hlt
                stub.extend([0xfa, 0xe6, 0x80, 0xf4]);
            } else {
                // mov dword [apic + 0xb0], 0; iretq
                stub.extend([0xc7, 0x04, 0x25, 0xb0, 0x00, 0x20, 0x00, 0, 0, 0, 0, 0x48, 0xcf]);
            }
            self.put(at, &stub);
        }
    }

    fn vcpu(&self, cpu: u8, cpuid: &[CpuidEntry]) -> Result<Vcpu, KvmError> {
        let vcpu = self.vm.create_vcpu(cpu.into())?;
        vcpu.set_cpuid(cpuid)?;
        let mut sregs = vcpu.sregs()?;
        let code =
            Segment { limit: 0xffff_ffff, selector: 8, type_: 0xb, present: 1, s: 1, g: 1, l: 1, ..Segment::default() };
        let data = Segment { selector: 16, type_: 3, l: 0, db: 1, ..code };
        sregs.cs = code;
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        sregs.tr = Segment { limit: 0x67, type_: 0xb, present: 1, ..Segment::default() };
        (sregs.gdt.base, sregs.gdt.limit) = (GDT as u64, 23);
        (sregs.idt.base, sregs.idt.limit) = (IDT as u64, 0xfff);
        (sregs.cr0, sregs.cr3) = (1 << 31 | 1 << 4 | 1, PML4 as u64);
        sregs.cr4 |= 1 << 5;
        sregs.efer |= 1 << 8 | 1 << 10;
        vcpu.set_sregs(&sregs)?;
        let stack = STACKS as u64 + (u64::from(cpu) + 1) * 0x1000;
        let role = u64::from(cpu == 0);
        vcpu.set_regs(&Regs { rip: CODE as u64, rsp: stack, rdi: role, rflags: 2, ..Regs::default() })?;
        vcpu.set_runnable(true)?;
        Ok(vcpu)
    }

    /// How many interrupts of `line` were handled.
    pub fn taken(&self, line: u8) -> u64 {
        self.word(COUNTS + 64 * usize::from(line)).load(SeqCst)
    }

    /// Interrupts whose vectors belong to no line, and exceptions.
    pub fn stray(&self) -> u64 {
        self.word(STRAY).load(SeqCst)
    }

    /// Waits until `cpus` vCPUs take interrupts.
    pub fn wait_until_ready(&self, cpus: u8) {
        while self.word(READY).load(SeqCst) < cpus.into() {
            assert_eq!(self.stray(), 0, "an exception");
            thread::yield_now();
        }
    }

    /// Has vCPU 0 write a register of the I/O APIC; it has when this returns.
    pub fn write_ioapic(&self, register: u8, value: u32) {
        let _guard = self.mail.lock();
        self.half(MAIL + 4).store(register.into(), SeqCst);
        self.half(MAIL + 8).store(value, SeqCst);
        self.half(MAIL).store(1, SeqCst);
        while self.half(MAIL).load(SeqCst) != 0 && self.stray() == 0 {
            thread::yield_now();
        }
    }

    /// Ends the vCPUs, whose threads these are.
    pub fn end<T>(&self, threads: &[JoinHandle<T>]) {
        self.half(STOP).store(1, SeqCst);
        for (cpu, thread) in threads.iter().enumerate() {
            while !thread.is_finished() {
                let address = 0xfee0_0000 | (cpu as u64) << 12;
                drop(self.vm.signal_msi(address, WAKE.into()));
                thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
}

/// A vCPU's thread: until the guest ends. Ends of interrupts that KVM reports go to `ended`.
pub fn run(guest: &Guest, cpu: u8, ended: &dyn Fn(u8)) {
    let slot = guest.vcpus.get(usize::from(cpu)).and_then(|slot| slot.lock().ok()?.take());
    let Some(mut vcpu) = slot else { panic!("no vCPU {cpu}") };
    loop {
        match vcpu.run() {
            Ok(Exit::IoOut(0x80, _)) => return,
            Ok(Exit::IoapicEoi(vector)) => ended(vector),
            Ok(Exit::IoOut(..) | Exit::Intr) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            other => panic!("vCPU {cpu} left with {other:?}"),
        }
    }
}
