// SPDX-License-Identifier: Apache-2.0
//! Tiny guests: a few bytes of machine code, and the kernel files that carry them into a machine.
//!
//! Used by tests and benchmarks of `machine` and `tare`. Real CPUs and interpreted ones run them alike.

/// Machine code.
#[derive(Clone, Debug, Default)]
pub struct Code(Vec<u8>);

impl Code {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// These bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// mov dx, port; mov al, value; out dx, al (in 64-bit and in 32-bit code)
    pub fn out(&mut self, port: u16, value: u8) -> &mut Self {
        let [low, high] = port.to_le_bytes();
        self.bytes(&[0x66, 0xba, low, high, 0xb0, value, 0xee])
    }

    /// Writes `text` to the serial port.
    pub fn say(&mut self, text: &str) -> &mut Self {
        text.bytes().fold(self, |code, byte| code.out(0x3f8, byte))
    }

    /// Powers the machine off.
    pub fn power_off(&mut self) -> &mut Self {
        self.out(0x600, 5 << 2 | 1 << 5)
    }

    /// hlt, for ever
    pub fn halt(&mut self) -> &mut Self {
        self.bytes(&[0xf4, 0xeb, 0xfd])
    }

    /// mov ecx, count; L: out 0x80, al; dec ecx; jnz L
    pub fn out_loop(&mut self, count: u32) -> &mut Self {
        self.bytes(&[0xb9]).bytes(&count.to_le_bytes()).bytes(&[0xe6, 0x80, 0xff, 0xc9, 0x75, 0xfa])
    }

    /// The code itself.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// An ELF executable for x86_64 with this code as its one segment, at address `at`, entered at its start.
    #[must_use]
    pub fn elf(&self, at: u64) -> Vec<u8> {
        const OFFSET: usize = 4096;
        let len = self.0.len() as u64;
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file.extend([2u16, 62].map(u16::to_le_bytes).concat()); // executable, x86_64
        file.extend(1u32.to_le_bytes());
        file.extend([at, 64, 0].map(u64::to_le_bytes).concat()); // entry, program headers, no sections
        file.extend(0u32.to_le_bytes());
        file.extend([64u16, 56, 1, 0, 0, 0].map(u16::to_le_bytes).concat());
        file.extend([1u32, 5].map(u32::to_le_bytes).concat()); // PT_LOAD, read and execute
        file.extend([OFFSET as u64, at, at, len, len, 4096].map(u64::to_le_bytes).concat());
        file.resize(OFFSET, 0);
        file.extend(&self.0);
        file
    }

    /// A multiboot 1 kernel in a 32-bit ELF file, at address `at`, this code right after the header.
    #[must_use]
    pub fn multiboot(&self, at: u32) -> Vec<u8> {
        const OFFSET: usize = 4096;
        const HEADER: [u32; 3] = [0x1bad_b002, 0, 0u32.wrapping_sub(0x1bad_b002)];
        let len = size_of_val(&HEADER) as u32 + self.0.len() as u32;
        let mut file = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        file.extend([2u16, 3].map(u16::to_le_bytes).concat()); // executable, 80386
        let entry = at + size_of_val(&HEADER) as u32;
        file.extend([1, entry, 52, 0, 0].map(u32::to_le_bytes).concat());
        file.extend([52u16, 32, 1, 0, 0, 0].map(u16::to_le_bytes).concat());
        file.extend([1, OFFSET as u32, at, at, len, len, 5, 4096].map(u32::to_le_bytes).concat());
        file.resize(OFFSET, 0);
        file.extend(HEADER.map(u32::to_le_bytes).concat());
        file.extend(&self.0);
        file
    }
}

/// First page of virtio registers, with `transport=mmio`.
const REGISTERS: u32 = 0xe100_0000;
/// I/O APIC and local APIC.
const IOAPIC: u32 = 0xfec0_0000;
const LAPIC: u32 = 0xfee0_0000;

/// Places in the guest's memory.
const DESC: u32 = 0x30_0000;
const AVAIL: u32 = 0x30_0100;
const USED: u32 = 0x30_0200;
const HEADER: u32 = 0x30_0400;
const STATUS: u32 = 0x30_0600;
const DATA: u32 = 0x30_0800;
const DIRECTORY: u32 = 0x30_1000;

/// A driver of a dozen steps (virtio 1.2, 3.1 and 4.2).
impl Code {
    /// 64-bit code that reads the first block of the first device, a disk, through its page of registers, waits until its
    /// interrupt is pending at the local APIC and says why, and writes the first eight bytes to the serial port.
    pub fn read_disk(&mut self) -> &mut Self {
        self.map_high(&[REGISTERS, IOAPIC, LAPIC]);
        // mov ebx, REGISTERS
        self.bytes(&[0xbb]).bytes(&REGISTERS.to_le_bytes());
        for (number, (at, len, flags)) in (0u32..).zip([(HEADER, 16, 1), (DATA, 512, 3), (STATUS, 1, 2)]) {
            let place = DESC + 16 * number;
            self.put(place, at).put(place + 8, len).put(place + 12, flags | (number + 1) << 16);
        }
        self.put(AVAIL, 1 << 16);
        // The local APIC on; pin 6, the first device's, is vector 0x31, edge triggered. The guest takes no interrupts: it
        // looks. Before the device runs, which may find the request without being kicked: a masked pin forgets its edge.
        self.put_high(LAPIC + 0xf0, 0x1ff);
        for (register, value) in [(0x1c, 0x31), (0x1d, 0)] {
            self.put_high(IOAPIC, register).put_high(IOAPIC + 0x10, value);
        }
        // Acknowledge, driver, VERSION_1, features agreed; queue 0 with four entries; ready; the kick.
        let steps = [(0x70, 1), (0x70, 3), (0x24, 1), (0x20, 1), (0x70, 0xb), (0x30, 0), (0x38, 4)];
        let rings = [(0x80, DESC), (0x90, AVAIL), (0xa0, USED), (0x44, 1), (0x70, 0xf), (0x50, 0)];
        for (register, value) in steps.into_iter().chain(rings) {
            self.set(register, value);
        }
        // mov edi, LAPIC; L: mov eax, [rdi + 0x210]; test eax, 1 << 17; jz L
        self.bytes(&[0xbf]).bytes(&LAPIC.to_le_bytes());
        self.bytes(&[0x8b, 0x87, 0x10, 2, 0, 0, 0xa9, 0, 0, 2, 0, 0x74, 0xf3]);
        // L: mov eax, [rbx + 0x60]; test al, 1; jz L
        self.bytes(&[0x8b, 0x83, 0x60, 0, 0, 0, 0xa8, 1, 0x74, 0xf6]);
        // mov esi, DATA; mov ecx, 8; mov dx, 0x3f8; L: lodsb; out dx, al; loop L
        self.bytes(&[0xbe]).bytes(&DATA.to_le_bytes());
        self.bytes(&[0xb9, 8, 0, 0, 0, 0x66, 0xba, 0xf8, 3, 0xac, 0xee, 0xe2, 0xfc])
    }

    /// 64-bit code that makes these places in the last GiB below 4 reachable: the page tables end with the first GiB.
    pub fn map_high(&mut self, places: &[u32]) -> &mut Self {
        for at in places {
            self.put(DIRECTORY + (at >> 21 & 511) * 8, (at & !0x1f_ffff) | 0x83);
        }
        // mov rax, cr3; mov rax, [rax]; and rax, -4096; then entry 3 of the PDPT leads to that directory, of large pages
        self.bytes(&[0x0f, 0x20, 0xd8, 0x48, 0x8b, 0, 0x48, 0x25, 0, 0xf0, 0xff, 0xff]);
        self.bytes(&[0xc7, 0x40, 24]).bytes(&(DIRECTORY | 3).to_le_bytes())
    }

    /// mov edi, at; mov dword ptr [rdi], value
    fn put_high(&mut self, at: u32, value: u32) -> &mut Self {
        self.bytes(&[0xbf]).bytes(&at.to_le_bytes()).bytes(&[0xc7, 7]).bytes(&value.to_le_bytes())
    }

    /// mov dword ptr [rbx + register], value
    fn set(&mut self, register: u32, value: u32) -> &mut Self {
        self.bytes(&[0xc7, 0x83]).bytes(&register.to_le_bytes()).bytes(&value.to_le_bytes())
    }

    /// mov dword ptr [at], value
    fn put(&mut self, at: u32, value: u32) -> &mut Self {
        self.bytes(&[0xc7, 0x04, 0x25]).bytes(&at.to_le_bytes()).bytes(&value.to_le_bytes())
    }
}
