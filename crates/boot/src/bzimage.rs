// SPDX-License-Identifier: Apache-2.0
//! The bzImage header (Documentation/arch/x86/boot.rst), read with distrust: where its parts lie and what it can do.

use linux_loader::bootparam::{LOADED_HIGH, XLF_KERNEL_64, setup_header};
use vm_memory::ByteValued;

use crate::source::Source;
use crate::{BootError, cmdline};

/// Where the setup header starts in the file and in the zero page.
pub const HEADER: usize = 0x1f1;
/// Bytes of a file that are looked at to tell what it is.
pub const PROBE: usize = HEADER + size_of::<setup_header>();
/// First protocol with a 64-bit entry.
const PROTOCOL_64: u16 = 0x20c;
/// Offset of the 64-bit entry from the start of the protected-mode part.
pub const ENTRY_64: u64 = 0x200;
/// Largest kernel believed in, unpacked: an inner image past 1 GiB can't be addressed by the kernel's own code model.
pub const MAX_KERNEL: u64 = 1 << 30;

/// A bzImage whose parts are known to lie inside its file.
#[derive(Clone, Copy, Debug)]
pub struct BzImage {
    /// Its header as the zero page wants it.
    pub header: setup_header,
    /// File offset of the protected-mode part.
    pub code: u64,
    /// Length of that part in bytes.
    pub code_len: u64,
    /// File offset of the compressed kernel.
    pub payload: u64,
    /// Its length in bytes, the unpacked size at its end included; 0 if the header names none.
    pub payload_len: u64,
    /// Address it is meant to run at.
    pub pref: u64,
    /// Bytes it needs from there on until it reads the memory map.
    pub init_size: u64,
}

/// Whether `head` (the first [`PROBE`] bytes) starts a bzImage or another image with the Linux setup header.
#[must_use]
pub fn is(head: &[u8]) -> bool {
    head.get(0x1fe..0x200) == Some(&[0x55, 0xaa]) && head.get(0x202..0x206) == Some(b"HdrS")
}

impl BzImage {
    /// Reads the header of `kernel`, whose first bytes are `head`.
    ///
    /// # Errors
    /// [`BootError::Truncated`], [`BootError::Malformed`], or [`BootError::Unsupported`] for kernels with no 64-bit entry.
    pub fn parse(kernel: &Source<'_>, head: &[u8]) -> Result<Self, BootError> {
        kernel.within(0, PROBE as u64, "setup header")?;
        let mut header = head
            .get(HEADER..PROBE)
            .and_then(setup_header::from_slice)
            .copied()
            .ok_or_else(|| kernel.malformed("its setup header is unreadable"))?;
        let unsupported = |what: String, hint| Err(BootError::Unsupported { path: kernel.path().into(), what, hint });
        let version = header.version;
        if version < PROTOCOL_64 {
            let what = format!("boot protocol {}.{:02} is older than 2.12", version >> 8, version & 0xff);
            return unsupported(what, "use a 64-bit kernel of Linux 3.8 or later");
        }
        if header.xloadflags & XLF_KERNEL_64 == 0 {
            return unsupported("it has no 64-bit entry".into(), "use a kernel built for x86_64");
        }
        if header.loadflags & LOADED_HIGH == 0 {
            return unsupported("it is a zImage".into(), "use a bzImage");
        }
        let end = 0x202 + (header.jump >> 8) as usize;
        if end < 0x268 {
            return Err(kernel.malformed(format!("its setup header ends at {end:#x}, before init_size")));
        }
        if end < PROBE {
            header.kernel_info_offset = 0;
        }
        let sectors = if header.setup_sects == 0 { 4 } else { u64::from(header.setup_sects) };
        let code = (sectors + 1) * 512;
        let code_len = u64::from(header.syssize) * 16;
        if code_len <= ENTRY_64 {
            return Err(kernel.malformed(format!("its protected-mode part has {code_len} bytes")));
        }
        kernel.within(code, code_len, "protected-mode part")?;
        let (offset, payload_len) = (u64::from(header.payload_offset), u64::from(header.payload_length));
        if offset + payload_len > code_len {
            return Err(kernel.malformed("its payload lies outside its protected-mode part"));
        }
        let image = Self {
            header,
            code,
            code_len,
            payload: code + offset,
            payload_len,
            pref: header.pref_address,
            init_size: u64::from(header.init_size),
        };
        image.check_place(kernel)?;
        Ok(image)
    }

    /// Whether the addresses make sense by themselves; whether RAM is there is asked later.
    fn check_place(&self, kernel: &Source<'_>) -> Result<(), BootError> {
        let align = u64::from(self.header.kernel_alignment);
        let (pref, size) = (self.pref, self.init_size);
        if !align.is_power_of_two() || pref % align.max(4096) != 0 {
            return Err(kernel.malformed(format!("its address {pref:#x} does not fit its alignment {align:#x}")));
        }
        if !(0x10_0000..mem::LOW_END).contains(&pref) || size < self.code_len || size > MAX_KERNEL {
            return Err(kernel.malformed(format!("it asks for {size} bytes at {pref:#x}")));
        }
        Ok(())
    }

    /// Longest command line it takes, without the NUL.
    #[must_use]
    pub fn cmdline_max(&self) -> u64 {
        let max = self.header.cmdline_size;
        u64::from(if max == 0 { cmdline::DEFAULT_MAX } else { max })
    }
}
