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
