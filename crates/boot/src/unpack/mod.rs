// SPDX-License-Identifier: Apache-2.0
//! Unpacks a bzImage's payload straight into guest memory, in the monitor, so that the guest doesn't have to.
//!
//! `load` calls it. The decoders keep a window, of a few hundred KiB for most formats, and of what they ask for, for xz and
//! lzma; beyond it the kernel is never whole in our memory.

mod image;
mod input;
mod lz4;
mod lzo;
mod relocs;
mod stream;

use base::Gpa;
use mem::GuestRam;

use crate::BootError;
use crate::bzimage::{BzImage, MAX_KERNEL};
use crate::source::Source;
use image::Image;
use input::Input;

/// Takes decoded bytes in order, in pieces of any size.
type Sink<'a> = &'a mut dyn FnMut(&[u8]) -> Result<(), BootError>;

/// Compressions a bzImage may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Legacy LZ4 frames (`lz4 -l`).
    Lz4,
    /// A gzip member.
    Gzip,
    /// A zstd frame.
    Zstd,
    /// An xz stream.
    Xz,
    /// A file of the older LZMA tools.
    Lzma,
    /// A bzip2 stream.
    Bzip2,
    /// A file of lzop.
    Lzo,
    /// A format only the guest unpacks; its name.
    Other(&'static str),
}

impl Format {
    /// Tells it from the first bytes of the payload.
    #[must_use]
    pub fn of(start: &[u8]) -> Self {
        let magics: [(&[u8], Self); 8] = [
            (&lz4::MAGIC, Self::Lz4),
            (&[0x1f, 0x8b], Self::Gzip),
            (&[0xfd, b'7', b'z', b'X', b'Z', 0], Self::Xz),
            (&[0x28, 0xb5, 0x2f, 0xfd], Self::Zstd),
            (&[0x5d, 0, 0], Self::Lzma),
            (b"BZh", Self::Bzip2),
            (&lzo::MAGIC, Self::Lzo),
            (b"\x7fELF", Self::Other("no compression")),
        ];
        magics.iter().find(|(magic, _)| start.starts_with(magic)).map_or(Self::Other("unknown compression"), |m| m.1)
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Gzip => "gzip",
            Self::Zstd => "zstd",
            Self::Xz => "xz",
            Self::Lzma => "lzma",
            Self::Bzip2 => "bzip2",
            Self::Lzo => "lzo",
            Self::Other(name) => name,
        }
    }
}

/// Where an unpacked kernel shall lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Physical address of its first byte.
    pub at: u64,
    /// What to add to its virtual addresses; 0 leaves them and needs no relocation table.
    pub shift: u64,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The kernel is in guest memory; its first instruction.
    Done(Gpa),
    /// It can't be moved as asked, so the guest has to unpack it; why.
    LeaveToGuest(&'static str),
}

/// What comes of [`Format::Other`].
const OTHER: Outcome = Outcome::LeaveToGuest("tare does not unpack this compression");

/// Unpacks the payload of `kernel` to `to`. RAM there must be `init_size` bytes long and zero.
///
/// # Errors
/// [`BootError::Malformed`] for a damaged payload, what reading says.
pub fn unpack(ram: &GuestRam, kernel: &Source<'_>, bz: &BzImage, to: Placement) -> Result<Outcome, BootError> {
    let mut magic = [0; 6];
    if bz.payload_len < 16 {
        return Ok(Outcome::LeaveToGuest("its header names no payload"));
    }
    kernel.read(bz.payload, &mut magic, "payload")?;
    let format = Format::of(&magic);
    if matches!(format, Format::Other(_)) {
        // Nothing else in the payload is looked at: what its last bytes mean only its own unpacker knows.
        return Ok(OTHER);
    }
    let end = bz.payload + bz.payload_len - 4;
    let mut size = [0; 4];
    kernel.read(end, &mut size, "payload size")?;
    let size = u64::from(u32::from_le_bytes(size));
    if size > MAX_KERNEL {
        return Err(kernel.malformed(format!("its payload claims to be {size} bytes unpacked")));
    }
    let mut image = Image::new(ram, kernel, bz, to, size);
    let input = Input::new(kernel, bz.payload, end);
    match format {
        Format::Lz4 => lz4::decode(input, &mut |bytes| image.push(bytes))?,
        Format::Lzo => lzo::decode(input, &mut |bytes| image.push(bytes))?,
        Format::Gzip | Format::Xz | Format::Lzma | Format::Bzip2 => {
            stream::decode(format, input, &mut |bytes| image.push(bytes))?;
        }
        Format::Zstd => stream::zstd(kernel, bz.payload, &mut |bytes| image.push(bytes))?,
        Format::Other(_) => return Ok(OTHER),
    }
    image.finish()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use std::path::Path;

    pub(crate) use super::lz4::tests::Dice;
    use super::*;
    use crate::zero_page::bare_header;
    use crate::{Decompress, Entry, Guest};
    use vm_memory::ByteValued;

    const PREF: u64 = 0x100_0000;
    const INIT_SIZE: u32 = 0x20_0000;

    /// A kernel with one word for each kind of relocation, and its table.
    pub(crate) fn inner() -> Vec<u8> {
        let mut code = vec![0x90; 9000];
        code[16..20].copy_from_slice(&0x8100_0010u32.to_le_bytes());
        code[32..36].copy_from_slice(&0x7000_0000u32.to_le_bytes());
        code[48..56].copy_from_slice(&0xffff_ffff_8100_0030u64.to_le_bytes());
        code[4096..8192].fill(0);
        let mut out = crate::elf::tests::build(PREF + 8, &[(PREF, &code, 500), (PREF + 0x10_0000, &[3; 77], 0)], None);
        for word in [0, 0x8100_0030, 0, 0x8100_0020, 0, 0x8100_0010u32] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// A bzImage around `kernel`, packed as lz4.
    pub(crate) fn bzimage(kernel: &[u8]) -> Vec<u8> {
        bzimage_of(kernel, lz4::tests::store(kernel))
    }

    /// A bzImage around `kernel`, which is packed in `payload`.
    fn bzimage_of(kernel: &[u8], mut payload: Vec<u8>) -> Vec<u8> {
        payload.extend_from_slice(&(kernel.len() as u32).to_le_bytes());
        let mut header = bare_header();
        header.setup_sects = 1;
        header.jump = 0x6a_eb;
        header.version = 0x20f;
        header.xloadflags = 1;
        header.payload_offset = 0x300;
        header.payload_length = payload.len() as u32;
        header.pref_address = PREF;
        header.init_size = INIT_SIZE;
        let code_len = (0x300 + payload.len()).next_multiple_of(16);
        header.syssize = code_len as u32 / 16;
        let mut out = vec![0; 1024];
        out[0x1f1..0x1f1 + header.as_slice().len()].copy_from_slice(header.as_slice());
        out.resize(1024 + 0x300, 0xcc);
        out.extend_from_slice(&payload);
        out.resize(1024 + code_len, 0);
        out
    }

    fn unpacked(file: &[u8], to: Placement) -> (GuestRam, Result<Outcome, BootError>) {
        let ram = GuestRam::anonymous(&[(Gpa(0), 64 << 20)]).unwrap();
        let source = Source::memory("kernel", Path::new("k"), file);
        let bz = BzImage::parse(&source, file).unwrap();
        let outcome = unpack(&ram, &source, &bz, to);
        (ram, outcome)
    }

    #[test]
    fn a_moved_kernel_has_every_listed_word_moved_and_no_other() {
        let to = Placement { at: 0x200_0000, shift: 0x60_0000 };
        let (ram, outcome) = unpacked(&bzimage(&inner()), to);
        assert_eq!(outcome.unwrap(), Outcome::Done(Gpa(0x200_0008)));
        let word = |o: u64| ram.read::<u32>(Gpa(to.at + o)).unwrap();
        assert_eq!((word(16), word(32)), (0x8160_0010, 0x6fa0_0000));
        assert_eq!(ram.read::<u64>(Gpa(to.at + 48)), Some(0xffff_ffff_8160_0030));
        assert_eq!((word(20), word(4096), word(8192)), (0x9090_9090, 0, 0x9090_9090));
        assert_eq!(word(0x10_0000), 0x0303_0303);
        assert_eq!(ram.read::<u64>(Gpa(PREF)), Some(0), "nothing where it is linked");
    }

    fn gzip(bytes: &[u8]) -> Vec<u8> {
        let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        std::io::Write::write_all(&mut packer, bytes).unwrap();
        packer.finish().unwrap()
    }

    fn zstd(bytes: &[u8]) -> Vec<u8> {
        let mut packed = vec![0; zstd_safe::compress_bound(bytes.len())];
        let len = zstd_safe::compress(&mut packed[..], bytes, 3).unwrap();
        packed.truncate(len);
        packed
    }

    fn xz(bytes: &[u8]) -> Vec<u8> {
        let mut options = lzma_rust2::XzOptions::with_preset(1);
        options.set_check_sum_type(lzma_rust2::CheckType::Crc32);
        let mut packer = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
        std::io::Write::write_all(&mut packer, bytes).unwrap();
        packer.finish().unwrap()
    }

    fn lzma(bytes: &[u8]) -> Vec<u8> {
        let options = lzma_rust2::LzmaOptions::with_preset(1);
        // As the kernel's build does it, from a pipe: the length is not in the header.
        let mut packer = lzma_rust2::LzmaWriter::new_use_header(Vec::new(), &options, None).unwrap();
        std::io::Write::write_all(&mut packer, bytes).unwrap();
        packer.finish().unwrap()
    }

    fn bzip2(bytes: &[u8]) -> Vec<u8> {
        let mut packer = ::bzip2::write::BzEncoder::new(Vec::new(), ::bzip2::Compression::fast());
        std::io::Write::write_all(&mut packer, bytes).unwrap();
        packer.finish().unwrap()
    }

    /// As lzop does it, in blocks of 200 bytes; those of one byte are packed, as four of it and a match, the rest are stored.
    fn lzop(bytes: &[u8]) -> Vec<u8> {
        let mut out = b"\x89LZO\0\r\n\x1a\n\x10\x30\x20\xa0\x09\x40\x03\x09\0\0\0\x03".to_vec();
        out.extend_from_slice(&[&[0; 12][..], &[6], b"kernel", &[0; 4]].concat());
        for block in bytes.chunks(200) {
            let one = block.len() == 200 && block.iter().all(|b| *b == block[0]);
            let run = [21, block[0], block[0], block[0], block[0], 0x20, 196 - 33, 0, 0, 17, 0, 0];
            let packed = if one { &run[..] } else { block };
            for word in [block.len() as u32, packed.len() as u32, 0] {
                out.extend_from_slice(&word.to_be_bytes());
            }
            if one {
                // The other checksum.
                out.extend_from_slice(&[0; 4]);
            }
            out.extend_from_slice(packed);
        }
        out.extend_from_slice(&[0; 4]);
        out
    }

    /// The output of a program that packs its input; `None` where it is not installed.
    fn packed_by(program: &str, arguments: &[&str], bytes: &[u8]) -> Option<Vec<u8>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernel");
        std::fs::write(&path, bytes).unwrap();
        let out = std::process::Command::new(program).args(arguments).arg("-c").arg(&path).output().ok()?;
        assert!(out.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&out.stderr));
        Some(out.stdout)
    }

    /// What the kernel's own build calls, with the options that it gives (scripts/Makefile.lib, scripts/xz_wrap.sh).
    #[test]
    fn what_the_tools_of_a_kernel_build_pack_is_unpacked() {
        let to = Placement { at: PREF, shift: 0 };
        let mut kernel = inner();
        // Calls, whose targets the x86 filter of xz rewrites.
        for at in (100..4000).step_by(5) {
            kernel[0x1000 + at] = 0xe8;
            kernel[0x1001 + at..0x1005 + at].copy_from_slice(&(at as u32 * 3).to_le_bytes());
        }
        let (plain, outcome) = unpacked(&bzimage(&kernel), to);
        assert_eq!(outcome.unwrap(), Outcome::Done(Gpa(PREF + 8)));
        let tools: [(&str, &[&str]); 5] = [
            ("xz", &["--check=crc32", "--x86", "--lzma2=dict=128MiB"]),
            ("lzma", &["-9"]),
            ("bzip2", &["-9"]),
            ("gzip", &["-n", "-9"]),
            ("lzop", &["-9"]),
        ];
        for (program, arguments) in tools {
            let Some(packed) = packed_by(program, arguments, &kernel) else {
                println!("skipped: no {program} here");
                continue;
            };
            let (ram, outcome) = unpacked(&bzimage_of(&kernel, packed), to);
            assert_eq!(outcome.unwrap(), Outcome::Done(Gpa(PREF + 8)), "{program}");
            let (mut want, mut got) = (vec![0; INIT_SIZE as usize], vec![0; INIT_SIZE as usize]);
            plain.read_bytes(Gpa(PREF), &mut want).unwrap();
            ram.read_bytes(Gpa(PREF), &mut got).unwrap();
            assert!(want == got, "{program}");
        }
    }

    #[test]
    fn a_window_past_reason_is_refused_in_one_line() {
        let mut packed = lzma(&inner());
        packed[1..5].copy_from_slice(&0xc000_0000_u32.to_le_bytes());
        let (_, outcome) = unpacked(&bzimage_of(&inner(), packed), Placement { at: PREF, shift: 0 });
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("window") && text.contains("let the guest unpack it") && !text.contains('\n'), "{text}");
    }

    #[test]
    fn each_compression_gives_the_same_kernel() {
        let to = Placement { at: PREF, shift: 0 };
        let (plain, outcome) = unpacked(&bzimage(&inner()), to);
        assert_eq!(outcome.unwrap(), Outcome::Done(Gpa(PREF + 8)));
        for pack in [gzip, zstd, xz, lzma, bzip2, lzop] {
            let (ram, outcome) = unpacked(&bzimage_of(&inner(), pack(&inner())), to);
            assert_eq!(outcome.unwrap(), Outcome::Done(Gpa(PREF + 8)));
            let (mut want, mut got) = (vec![0; INIT_SIZE as usize], vec![0; INIT_SIZE as usize]);
            plain.read_bytes(Gpa(PREF), &mut want).unwrap();
            ram.read_bytes(Gpa(PREF), &mut got).unwrap();
            assert!(want == got);
        }
    }

    /// Kernels of all other compressions start by unpacking themselves, whatever their payload ends with.
    #[test]
    fn other_compressions_are_the_guests_own() {
        let others: [(&[u8], &str); 2] = [(b"\x7fELF\x02\x01", "no compression"), (b"others", "unknown compression")];
        let platform = crate::platform::tests::platform();
        for (magic, name) in others {
            let file = bzimage_of(&[], [magic, &[0xff; 30]].concat());
            for decompress in [Decompress::Guest, Decompress::Monitor] {
                let ram = GuestRam::anonymous(&[(Gpa(0), 64 << 20)]).unwrap();
                let kernel = Source::memory("kernel", Path::new("k"), &file);
                let guest = Guest { kernel, initrd: None, cmdline: "", args: "", decompress, seed: Some(1) };
                let loaded = crate::load(&ram, &guest, &platform).unwrap();
                assert!(loaded.how.starts_with(&format!("bzImage, {name}, unpacked by the guest (")), "{}", loaded.how);
                assert!(matches!(loaded.entry, Entry::Linux64 { rip: Gpa(at), .. } if at == PREF + 0x200));
                let mut code = vec![0; file.len() - 1024];
                ram.read_bytes(Gpa(PREF), &mut code).unwrap();
                assert!(code == file[1024..], "{name}: the whole image is where it unpacks itself from");
            }
        }
    }

    #[test]
    fn damage_in_any_byte_is_an_error_and_never_a_panic() {
        let to = Placement { at: PREF, shift: 0 };
        for pack in [gzip, zstd, xz, lzma, bzip2, lzop] {
            let good = bzimage_of(&inner(), pack(&inner()));
            for at in (1024 + 0x300..good.len()).step_by(7) {
                let mut bad = good.clone();
                bad[at] ^= 0x55;
                if let (_, Err(e)) = unpacked(&bad, to) {
                    assert!(!e.to_string().contains('\n'));
                }
            }
            let packed = pack(&inner());
            let (_, outcome) = unpacked(&bzimage_of(&inner(), packed[..packed.len() / 2].to_vec()), to);
            assert!(outcome.is_err(), "cut in half");
        }
    }

    #[test]
    fn an_unknown_table_leaves_it_to_the_guest_unless_nothing_is_to_move() {
        let mut kernel = inner();
        kernel.truncate(kernel.len() - 3);
        let moved = Placement { at: PREF, shift: 0x20_0000 };
        assert!(matches!(unpacked(&bzimage(&kernel), moved).1.unwrap(), Outcome::LeaveToGuest(_)));
        let still = Placement { at: PREF, shift: 0 };
        assert_eq!(unpacked(&bzimage(&kernel), still).1.unwrap(), Outcome::Done(Gpa(PREF + 8)));
    }

    #[test]
    fn a_relocation_outside_the_kernel_is_damage() {
        let mut kernel = inner();
        let end = kernel.len();
        kernel[end - 4..].copy_from_slice(&0x8120_0000u32.to_le_bytes());
        let err = unpacked(&bzimage(&kernel), Placement { at: PREF, shift: 1 << 21 }).1.unwrap_err().to_string();
        assert!(err.contains("relocation table points outside"), "{err}");
    }

    #[test]
    fn sizes_that_lie_are_damage() {
        let good = bzimage(&inner());
        let still = Placement { at: PREF, shift: 0 };
        let at = 1024 + 0x300 + 4 + 4;
        let tail = at + good[at..].len() - 20;
        let mut size_at = 0;
        for o in tail..good.len() - 3 {
            if good[o..o + 4] == (inner().len() as u32).to_le_bytes() {
                size_at = o;
            }
        }
        for (size, word) in
            [(inner().len() as u32 - 1, "more than"), (inner().len() as u32 + 1, "unpacks to"), (u32::MAX, "claims")]
        {
            let mut bad = good.clone();
            bad[size_at..size_at + 4].copy_from_slice(&size.to_le_bytes());
            let err = unpacked(&bad, still).1.unwrap_err().to_string();
            assert!(err.contains(word), "{err}");
        }
    }
}
