// SPDX-License-Identifier: Apache-2.0
//! Ways to fill memory with zeroes: the string instruction, and non-temporal stores of 16, 32 and 64 bytes, which leave the
//! caches to those who run. The pool's threads use them on memory that came back; `make bench-memory` compares them.

use std::arch::asm;
use std::time::{Duration, Instant};

use base::mmap::Mmap;

/// A way to write zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeroing {
    /// `rep stosb`, which the CPU makes as wide as it likes.
    Erms,
    /// 16 bytes a store, past the caches.
    Sse2,
    /// 32 bytes a store, past the caches.
    Avx2,
    /// 64 bytes a store, past the caches.
    Avx512,
}

/// Bytes that one turn of a loop writes.
const STRIDE: usize = 256;
/// How much [`Zeroing::fastest`] writes with each: more than caches hold, where the plain way would look best.
const TRIAL: usize = 128 << 20;

impl Zeroing {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Erms, Self::Sse2, Self::Avx2, Self::Avx512];

    /// The field's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Erms => "erms",
            Self::Sse2 => "sse2",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }

    /// Whether this CPU can do it.
    #[must_use]
    pub fn is_there(self) -> bool {
        match self {
            Self::Erms | Self::Sse2 => true,
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            Self::Avx512 => is_x86_feature_detected!("avx512f"),
        }
    }

    /// The one that is fastest here, measured in a tenth of a second or so; the plainest if there is no memory to measure with.
    #[must_use]
    pub fn fastest() -> Self {
        let Ok(mut scratch) = Mmap::anonymous(TRIAL) else { return Self::Erms };
        Self::Erms.fill(&mut scratch, 0, TRIAL);
        let mut timed = |way: Self| {
            let once = |_| {
                let begun = Instant::now();
                way.fill(&mut scratch, 0, TRIAL);
                begun.elapsed()
            };
            (0..2).map(once).min().unwrap_or(Duration::MAX)
        };
        Self::ALL.into_iter().filter(|way| way.is_there()).min_by_key(|way| timed(*way)).unwrap_or(Self::Erms)
    }

    /// Zeroes `len` bytes of `map` from `offset` on; what of it lies past the end is left out. Nobody else may count on what
    /// is there.
    pub fn fill(self, map: &mut Mmap, offset: usize, len: usize) {
        let offset = offset.min(map.len());
        let len = len.min(map.len() - offset);
        // SAFETY: offset + len is inside the mapping, which is writable while `map` is borrowed.
        unsafe { self.fill_raw(map.as_ptr().add(offset), len) };
    }

    /// Zeroes `len` bytes at `to`.
    ///
    /// # Safety
    /// They are mapped and writable, and no reference to them exists.
    unsafe fn fill_raw(self, to: *mut u8, len: usize) {
        let way = if self.is_there() { self } else { Self::Erms };
        // The wide stores want their alignment; pages have it, and the ends of anything else go the plain way.
        let head = to.align_offset(64).min(len);
        let body = if way == Self::Erms { 0 } else { (len - head) / STRIDE * STRIDE };
        // SAFETY: the three parts are inside `len` bytes; `way` is one that this CPU has; the middle is aligned and a
        // multiple of the stride.
        unsafe {
            stos(to, if body == 0 { len } else { head });
            if body > 0 {
                let from = to.add(head);
                match way {
                    Self::Avx512 => avx512(from, body),
                    Self::Avx2 => avx2(from, body),
                    Self::Sse2 | Self::Erms => sse2(from, body),
                }
                stos(from.add(body), len - head - body);
            }
        }
    }
}

/// # Safety
/// `len` bytes at `to` are writable.
unsafe fn stos(to: *mut u8, len: usize) {
    // SAFETY: as the caller promises; the direction flag is clear between calls by the ABI.
    unsafe {
        asm!("rep stosb", inout("rdi") to => _, inout("rcx") len => _, in("al") 0u8, options(nostack, preserves_flags));
    }
}

/// A loop of stores past the caches: zeroes the register with `$clear`, then writes it to each `$at` of a stride. `$after` is
/// for code around it that knows only SSE; the ABI's vector registers are given up, upper halves and all.
macro_rules! stream {
    ($to:expr, $len:expr, $clear:literal, $store:literal, $register:literal, [$($at:literal)*], $after:literal) => {
        asm!(
            $clear,
            "2:",
            $(concat!($store, " [rdi + ", $at, "], ", $register),)*
            "add rdi, 256",
            "sub rsi, 256",
            "jnz 2b",
            "sfence",
            $after,
            inout("rdi") $to => _,
            inout("rsi") $len => _,
            clobber_abi("C"),
            options(nostack),
        )
    };
}

/// # Safety
/// `len` bytes at `to` are writable; both are multiples: of 16 and of [`STRIDE`], and there is one stride at least.
unsafe fn sse2(to: *mut u8, len: usize) {
    // SAFETY: as the caller promises; every x86-64 has these.
    unsafe {
        stream!(
            to,
            len,
            "pxor xmm0, xmm0",
            "movntdq",
            "xmm0",
            [0 16 32 48 64 80 96 112 128 144 160 176 192 208 224 240],
            ""
        );
    }
}

/// # Safety
/// As [`sse2`], aligned to 32, on a CPU with AVX2.
unsafe fn avx2(to: *mut u8, len: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        stream!(
            to,
            len,
            "vpxor xmm0, xmm0, xmm0",
            "vmovntdq",
            "ymm0",
            [0 32 64 96 128 160 192 224],
            "vzeroupper"
        );
    }
}

/// # Safety
/// As [`sse2`], aligned to 64, on a CPU with AVX-512F.
unsafe fn avx512(to: *mut u8, len: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        stream!(to, len, "vpxord zmm0, zmm0, zmm0", "vmovntdq", "zmm0", [0 64 128 192], "vzeroupper");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn bytes(map: &Mmap) -> Vec<u8> {
        // SAFETY: the mapping is as long, and nobody writes to it meanwhile.
        unsafe { std::slice::from_raw_parts(map.as_ptr(), map.len()) }.to_vec()
    }

    #[test]
    fn each_way_zeroes_exactly_what_it_was_told() {
        for way in Zeroing::ALL.into_iter().filter(|way| way.is_there()) {
            for (offset, len) in [(0, 8192), (1, 8190), (63, 1), (64, 256), (65, 511), (100, 4096), (8191, 1), (5, 0)] {
                let mut map = Mmap::anonymous(8192).unwrap();
                // SAFETY: the mapping is writable and as long.
                unsafe { map.as_ptr().write_bytes(0xaa, 8192) };
                way.fill(&mut map, offset, len);
                let bytes = bytes(&map);
                let expected = |at: usize| if (offset..offset + len).contains(&at) { 0 } else { 0xaa };
                let wrong = (0..8192).find(|at| bytes[*at] != expected(*at));
                assert_eq!(wrong, None, "{} from {offset} for {len}", way.name());
            }
        }
        assert!(Zeroing::fastest().is_there());
    }

    #[test]
    fn what_lies_past_the_end_is_left_out() {
        let mut map = Mmap::anonymous(4096).unwrap();
        // SAFETY: the mapping is writable and as long.
        unsafe { map.as_ptr().write_bytes(0xaa, 4096) };
        Zeroing::Sse2.fill(&mut map, 4000, 1 << 20);
        Zeroing::Sse2.fill(&mut map, 1 << 20, 1);
        assert!(bytes(&map).iter().enumerate().all(|(at, b)| *b == if at < 4000 { 0xaa } else { 0 }));
    }
}
