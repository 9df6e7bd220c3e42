// SPDX-License-Identifier: Apache-2.0
//! The smallest user space: an initrd with one program that says it is there, waits a second, and powers off.
//!
//! The boot suite measures kernel and monitor; a distribution's initrd would add a second of unpacking that is the same
//! for all. The program is 64-bit machine code without a library, made here so that no compiler or package is needed.
//! Stock kernels have virtio as modules, so for a virtio console the initrd brings them and the program loads them.

/// What the program prints first: the line that ends the measured boot.
const READY: &[u8] = b"@@lab ready\n";
/// What it prints before it powers off.
const DONE: &[u8] = b"@@lab done\n";

/// The modules a virtio console needs over PCI and as registers, in order, below the kernel's module directory.
pub const CONSOLE_MODULES: &[&str] = &[
    "drivers/virtio/virtio_ring.ko",
    "drivers/virtio/virtio.ko",
    "drivers/virtio/virtio_pci_legacy_dev.ko",
    "drivers/virtio/virtio_pci_modern_dev.ko",
    "drivers/virtio/virtio_pci.ko",
    "drivers/virtio/virtio_mmio.ko",
    "drivers/char/virtio_console.ko",
];

/// Where the ELF file is loaded.
const BASE: u64 = 0x40_0000;
/// ELF header and one program header.
const HEADERS: u64 = 64 + 56;

const SYS_WRITE: u32 = 1;
const SYS_OPEN: u32 = 2;
const SYS_DUP2: u32 = 33;
const SYS_PAUSE: u32 = 34;
const SYS_NANOSLEEP: u32 = 35;
const SYS_REBOOT: u32 = 169;
const SYS_FINIT_MODULE: u32 = 313;

/// The initrd: a newc cpio archive with `/init`, its console and the modules to load first. With modules the program
/// speaks on `/dev/hvc0`, without on the kernel's console.
pub fn initrd(modules: &[Vec<u8>]) -> Vec<u8> {
    let mut out = Vec::new();
    entry(&mut out, "dev", 0o040_755, (0, 0), &[]);
    entry(&mut out, "dev/console", 0o020_600, (5, 1), &[]);
    entry(&mut out, "dev/hvc0", 0o020_600, (229, 0), &[]);
    for (index, module) in modules.iter().enumerate() {
        entry(&mut out, &name(index), 0o100_644, (0, 0), module);
    }
    entry(&mut out, "init", 0o100_755, (0, 0), &program(modules.len()));
    entry(&mut out, "TRAILER!!!", 0, (0, 0), &[]);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

/// A newc cpio archive of folders (no content) and files.
pub fn archive(members: &[(&str, Option<&[u8]>)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, content) in members {
        entry(
            &mut out,
            name,
            if content.is_some() { 0o100_644 } else { 0o040_755 },
            (0, 0),
            content.unwrap_or_default(),
        );
    }
    entry(&mut out, "TRAILER!!!", 0, (0, 0), &[]);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

/// The file of a module in the initrd.
fn name(index: usize) -> String {
    format!("module{index}")
}

/// One archive member.
fn entry(out: &mut Vec<u8>, name: &str, mode: u32, device: (u32, u32), data: &[u8]) {
    let (inode, links) = (out.len() as u32, 1);
    let fields = [inode, mode, 0, 0, links, 0, data.len() as u32, 0, 0, device.0, device.1, name.len() as u32 + 1, 0];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08x}").as_bytes());
    }
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// The program as a static ELF file.
fn program(modules: usize) -> Vec<u8> {
    // Code refers to the data behind it, whose place depends on the code's length: assemble twice.
    let length = assemble(modules, 0).code.len() as u64;
    let Program { code, data, .. } = assemble(modules, BASE + HEADERS + length);
    let size = HEADERS + (code.len() + data.len()) as u64;
    let mut out = Vec::new();
    out.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    for half in [2u16, 0x3e] {
        out.extend_from_slice(&half.to_le_bytes());
    }
    out.extend_from_slice(&1u32.to_le_bytes());
    for word in [BASE + HEADERS, 64, 0] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.extend_from_slice(&0u32.to_le_bytes());
    for half in [64u16, 56, 1, 0, 0, 0] {
        out.extend_from_slice(&half.to_le_bytes());
    }
    // PT_LOAD, readable and executable, the whole file.
    out.extend_from_slice(&1u32.to_le_bytes());
    out.extend_from_slice(&5u32.to_le_bytes());
    for word in [0, BASE, BASE, size, size, 0x1000] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    out.extend_from_slice(&code);
    out.extend_from_slice(&data);
    out
}

/// Machine code and the data behind it.
struct Program {
    code: Vec<u8>,
    data: Vec<u8>,
    data_at: u64,
}

/// What the program does, with its data at `data_at`.
fn assemble(modules: usize, data_at: u64) -> Program {
    let mut p = Program { code: Vec::new(), data: Vec::new(), data_at };
    let nothing = p.put(b"\0");
    for index in 0..modules {
        let path = p.put(format!("/{}\0", name(index)).as_bytes());
        p.call(SYS_OPEN, [path, 0, 0]);
        p.call_with_result(SYS_FINIT_MODULE, [nothing, 0]);
    }
    if modules > 0 {
        // The port may appear a little later than its driver: try every millisecond.
        let path = p.put(b"/dev/hvc0\0");
        let millisecond = p.put(&[0u64.to_le_bytes(), 1_000_000u64.to_le_bytes()].concat());
        let again = p.code.len();
        p.call(SYS_NANOSLEEP, [millisecond, 0, 0]);
        p.call(SYS_OPEN, [path, 2, 0]);
        // test eax, eax; js again
        p.code.extend_from_slice(&[0x85, 0xc0]);
        p.jump(0x78, again);
        p.call_with_result(SYS_DUP2, [1, 0]);
    }
    let (ready, done) = (p.put(READY), p.put(DONE));
    let second = p.put(&[1u64.to_le_bytes(), 0u64.to_le_bytes()].concat());
    p.call(SYS_WRITE, [1, ready, READY.len() as u32]);
    p.call(SYS_NANOSLEEP, [second, 0, 0]);
    p.call(SYS_WRITE, [1, done, DONE.len() as u32]);
    // LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_POWER_OFF
    p.call(SYS_REBOOT, [0xfee1_dead, 672_274_793, 0x4321_fedc]);
    let pause = p.code.len();
    p.call(SYS_PAUSE, [0, 0, 0]);
    p.jump(0xeb, pause);
    p
}

impl Program {
    /// Adds data and gives its address.
    fn put(&mut self, bytes: &[u8]) -> u32 {
        let at = self.data_at + self.data.len() as u64;
        self.data.extend_from_slice(bytes);
        at as u32
    }

    /// `mov eax, number; mov edi, …; mov esi, …; mov edx, …; syscall`
    fn call(&mut self, number: u32, arguments: [u32; 3]) {
        self.load(&[(0xbf, arguments[0])]);
        self.finish_call(number, [arguments[1], arguments[2]]);
    }

    /// As [`Program::call`], with the last call's result as the first argument: `mov edi, eax`.
    fn call_with_result(&mut self, number: u32, rest: [u32; 2]) {
        self.code.extend_from_slice(&[0x89, 0xc7]);
        self.finish_call(number, rest);
    }

    fn finish_call(&mut self, number: u32, rest: [u32; 2]) {
        self.load(&[(0xb8, number), (0xbe, rest[0]), (0xba, rest[1])]);
        self.code.extend_from_slice(&[0x0f, 0x05]);
    }

    fn load(&mut self, registers: &[(u8, u32)]) {
        for (opcode, value) in registers {
            self.code.push(*opcode);
            self.code.extend_from_slice(&value.to_le_bytes());
        }
    }

    /// A short jump to an earlier place in the code.
    fn jump(&mut self, opcode: u8, target: usize) {
        let back = self.code.len() + 2 - target;
        self.code.extend_from_slice(&[opcode, (back as u8).wrapping_neg()]);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn field(bytes: &[u8], at: usize, size: usize) -> u64 {
        bytes[at..at + size].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    fn find(bytes: &[u8], what: &[u8]) -> usize {
        bytes.windows(what.len()).position(|window| window == what).unwrap()
    }

    #[test]
    fn the_program_is_an_elf_file_whose_code_names_its_data() {
        for modules in [0, 6] {
            let program = program(modules);
            assert_eq!(&program[..4], b"\x7fELF");
            assert_eq!(field(&program, 24, 8), BASE + HEADERS, "entry");
            assert_eq!(field(&program, 64 + 32, 8), program.len() as u64, "the segment is the file");
            for text in [READY, DONE] {
                // mov esi, address of the text
                let mut load = vec![0xbe];
                load.extend_from_slice(&((BASE as usize + find(&program, text)) as u32).to_le_bytes());
                assert!(find(&program, &load) < find(&program, text));
            }
            let ends = [1u64.to_le_bytes(), 0u64.to_le_bytes()].concat();
            assert!(program.ends_with(&ends), "one second");
            let count = program.windows(5).filter(|w| w == b"\xb8\x39\x01\0\0").count();
            assert_eq!(count, modules, "one finit_module for each");
        }
    }

    #[test]
    fn jumps_go_back_to_where_they_should() {
        let code = assemble(0, 0x40_1000).code;
        let (jump, target) = (code.len() - 2, code.len() - 2 - 22);
        assert_eq!(code[jump], 0xeb);
        assert_eq!(jump as i64 + 2 + i64::from(code[jump + 1] as i8), target as i64);
        assert_eq!(&code[target..target + 10], &[0xbf, 0, 0, 0, 0, 0xb8, 34, 0, 0, 0], "edi = 0, eax = pause");
        let code = assemble(1, 0x40_1000).code;
        let jump = find(&code, &[0x85, 0xc0, 0x78]) + 2;
        let target = (jump as i64 + 2 + i64::from(code[jump + 1] as i8)) as usize;
        assert_eq!(code[target], 0xbf);
        assert_eq!(&code[target + 5..target + 10], &[0xb8, 35, 0, 0, 0], "nanosleep");
    }

    #[test]
    fn the_archive_has_its_members_at_aligned_places() {
        let archive = initrd(&[vec![7; 5]]);
        assert_eq!(archive.len() % 512, 0);
        let (mut at, mut names) = (0, Vec::new());
        loop {
            assert_eq!(&archive[at..at + 6], b"070701");
            let hex = |index: usize| {
                let start = at + 6 + index * 8;
                usize::from_str_radix(std::str::from_utf8(&archive[start..start + 8]).unwrap(), 16).unwrap()
            };
            let (size, name) = (hex(6), hex(11));
            let text = std::str::from_utf8(&archive[at + 110..at + 110 + name - 1]).unwrap();
            names.push(text.to_owned());
            let data = (at + 110 + name).next_multiple_of(4);
            if text == "init" {
                assert_eq!(&archive[data..data + size], program(1));
            }
            if text == "TRAILER!!!" {
                break;
            }
            at = (data + size).next_multiple_of(4);
        }
        assert_eq!(names, ["dev", "dev/console", "dev/hvc0", "module0", "init", "TRAILER!!!"]);
    }
}
