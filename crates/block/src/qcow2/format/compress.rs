// SPDX-License-Identifier: Apache-2.0
//! Compressed clusters: raw deflate ("zlib") and zstd, one cluster at a time, in and out of memory that the caller has.
//! Whatever the input says, no more than one cluster comes out and no window larger than that is kept. One of these serves
//! one thread and is used again for each cluster, since setting one up costs more than a cluster.
//!
//! Deflate has two readers: libdeflate takes three quarters of the time for a whole cluster, flate2 can stop early.

use flate2::{Compress, Decompress, FlushCompress, FlushDecompress, Status};

use super::FormatError;
use super::header::Compression;

/// Log2 of the deflate window written. QEMU's reader has a window of 4 KiB.
const DEFLATE_WINDOW: u8 = 12;
/// Zstd's usual level, which is QEMU's.
const ZSTD_LEVEL: i32 = 3;

/// Reads compressed clusters of one image.
#[derive(Debug)]
pub struct Decompressor(Reader);

#[derive(Debug)]
enum Reader {
    /// For a whole cluster, and for the start of one or more than one, made on first use.
    Zlib(Inflate, Option<Decompress>),
    Zstd(Zstd<zstd_safe::DCtx<'static>>),
}

/// Writes compressed clusters of one image.
#[derive(Debug)]
pub struct Compressor(Writer);

#[derive(Debug)]
enum Writer {
    /// And whether it left a stream unfinished, after which it can't be used again.
    Zlib(Compress, bool),
    Zstd(Zstd<zstd_safe::CCtx<'static>>),
}

/// A deflate stream as QEMU reads it.
fn deflate() -> Compress {
    Compress::new_with_window_bits(flate2::Compression::default(), false, DEFLATE_WINDOW)
}

/// libdeflate's reader, which has no `Debug`.
struct Inflate(libdeflater::Decompressor);

impl std::fmt::Debug for Inflate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Inflate")
    }
}

/// A context of libzstd, which has no `Debug`.
struct Zstd<C>(C);

impl<C> std::fmt::Debug for Zstd<C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Zstd")
    }
}

impl Decompressor {
    /// For images whose header says `kind`.
    ///
    /// # Errors
    /// No memory.
    pub fn new(kind: Compression) -> Result<Decompressor, FormatError> {
        Ok(Decompressor(match kind {
            Compression::Zlib => Reader::Zlib(Inflate(libdeflater::Decompressor::new()), None),
            Compression::Zstd => {
                let context = zstd_safe::DCtx::try_create();
                Reader::Zstd(Zstd(context.ok_or_else(|| FormatError::Unsupported("no memory for zstd".into()))?))
            }
        }))
    }

    /// Fills `cluster` from `data`, of which a tail may be something else (data ends somewhere in its last sector).
    ///
    /// # Errors
    /// The data is not a stream that holds exactly one cluster; what is in `cluster` then is of no use.
    pub fn run(&mut self, data: &[u8], cluster: &mut [u8]) -> Result<(), FormatError> {
        let made = match &mut self.0 {
            Reader::Zlib(Inflate(inflate), _) => match inflate.deflate_decompress(data, cluster) {
                Ok(made) => made,
                // QEMU takes a cluster's worth of a stream that goes on.
                Err(libdeflater::DecompressionError::InsufficientSpace) => return self.run_start(data, cluster),
                Err(e) => return failed(&e.to_string()),
            },
            Reader::Zstd(Zstd(context)) => {
                // The frame's own length, then all of it at once: so no window is kept, whatever the frame asks for.
                let frame = zstd_safe::find_frame_compressed_size(data).ok().and_then(|len| data.get(..len));
                let Some(frame) = frame else { return failed("no whole zstd frame") };
                context.decompress(cluster, frame).or_else(|code| failed(zstd_safe::get_error_name(code)))?
            }
        };
        full(made, cluster)
    }

    /// Fills `start` with the first bytes of the cluster that `data` holds. Only deflate can be stopped early: for zstd it is
    /// [`Decompressor::run`].
    ///
    /// # Errors
    /// As there.
    pub fn run_start(&mut self, data: &[u8], start: &mut [u8]) -> Result<(), FormatError> {
        let Reader::Zlib(_, inflate) = &mut self.0 else { return self.run(data, start) };
        let inflate = inflate.get_or_insert_with(|| Decompress::new_with_window_bits(false, 15));
        inflate.reset(false);
        inflate.decompress(data, start, FlushDecompress::Finish).or_else(|e| failed(&e.to_string()))?;
        full(inflate.total_out() as usize, start)
    }
}

fn failed<T>(why: &str) -> Result<T, FormatError> {
    FormatError::corrupt(format!("compressed data can't be unpacked: {why}"))
}

/// Whether so many bytes are all that was wanted.
fn full(made: usize, wanted: &[u8]) -> Result<(), FormatError> {
    if made == wanted.len() { Ok(()) } else { failed(&format!("{made} bytes instead of {}", wanted.len())) }
}

impl Compressor {
    /// For images whose header says `kind`.
    ///
    /// # Errors
    /// No memory.
    pub fn new(kind: Compression) -> Result<Compressor, FormatError> {
        Ok(Compressor(match kind {
            Compression::Zlib => Writer::Zlib(deflate(), false),
            Compression::Zstd => {
                let no_memory = || FormatError::Unsupported("no memory for zstd".into());
                let mut context = zstd_safe::CCtx::try_create().ok_or_else(no_memory)?;
                let level = zstd_safe::CParameter::CompressionLevel(ZSTD_LEVEL);
                context.set_parameter(level).map_err(|_| no_memory())?;
                Writer::Zstd(Zstd(context))
            }
        }))
    }

    /// Compresses `cluster` into `out` and returns the bytes used; `None` if it doesn't fit, which says that the cluster
    /// should be kept as it is. `out` may be as long as the cluster less one byte; with [`Compressor::room`] for it, noise takes
    /// less time.
    pub fn run(&mut self, cluster: &[u8], out: &mut [u8]) -> Option<usize> {
        let made = match &mut self.0 {
            Writer::Zlib(stream, spoilt) => {
                if std::mem::take(spoilt) {
                    *stream = deflate();
                } else {
                    stream.reset();
                }
                match stream.compress(cluster, out, FlushCompress::Finish) {
                    Ok(Status::StreamEnd) => usize::try_from(stream.total_out()).ok(),
                    _ => {
                        *spoilt = true;
                        None
                    }
                }
            }
            Writer::Zstd(Zstd(context)) => context.compress2(out, cluster).ok(),
        };
        made.filter(|len| *len < cluster.len())
    }

    /// Bytes in which a cluster ends up whatever it holds, noise included.
    pub fn room(cluster: usize) -> usize {
        cluster + cluster / 4 + 64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KINDS: [Compression; 2] = [Compression::Zlib, Compression::Zstd];

    /// Compressible, not constant.
    fn text(len: usize, seed: u64) -> Vec<u8> {
        (0..len as u64).map(|i| ((i * i).wrapping_mul(seed | 1) >> 7) as u8 & 0x1f).collect()
    }

    #[test]
    fn what_is_packed_is_unpacked() {
        for kind in KINDS {
            let (mut pack, mut unpack) = (Compressor::new(kind).unwrap(), Decompressor::new(kind).unwrap());
            for bits in [9, 12, 16, 17] {
                let cluster = text(1 << bits, bits);
                let mut out = vec![0x55; (1 << bits) - 1];
                let len = pack.run(&cluster, &mut out).unwrap();
                assert!(len < cluster.len());
                let mut back = vec![0xaa; 1 << bits];
                unpack.run(&out, &mut back).unwrap();
                assert!(back == cluster, "with what follows the stream");
                back.fill(0);
                unpack.run(&out[..len], &mut back).unwrap();
                assert!(back == cluster, "without");
                assert!(unpack.run(&out[..len / 2], &mut back).is_err(), "cut off");
                if kind == Compression::Zlib {
                    let mut start = vec![0; (1 << bits) / 3];
                    unpack.run_start(&out[..len], &mut start).unwrap();
                    assert!(start == cluster[..start.len()], "its start");
                    unpack.run(&out[..len], &mut start).unwrap();
                    assert!(start == cluster[..start.len()], "a stream that goes on");
                    assert!(unpack.run_start(&out[..len / 2], &mut back).is_err(), "cut off");
                }
                assert!(unpack.run(&out[..len], &mut back[..100]).is_err() || kind == Compression::Zlib);
                assert!(unpack.run(&out[..len], &mut vec![0; (1 << bits) + 1]).is_err(), "too little comes out");
            }
        }
    }

    #[test]
    fn noise_is_not_packed() {
        let mut state = 1u64;
        let noise: Vec<u8> = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .take(65_536)
        .collect();
        for kind in KINDS {
            assert_eq!(Compressor::new(kind).unwrap().run(&noise, &mut vec![0; 65_535]), None);
        }
    }

    #[test]
    fn noise_spoils_nothing_that_comes_after_it() {
        // Small clusters of noise, many times: what is left of one must not get in the way of the next.
        for (kind, room) in [(KINDS[0], 511), (KINDS[0], Compressor::room(512)), (KINDS[1], 511)] {
            let (mut pack, mut unpack) = (Compressor::new(kind).unwrap(), Decompressor::new(kind).unwrap());
            let mut state = 7u64;
            let mut out = vec![0; room];
            for round in 0..600 {
                let noise: Vec<u8> = std::iter::repeat_with(|| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 56) as u8
                })
                .take(512)
                .collect();
                assert_eq!(pack.run(&noise, &mut out), None, "round {round}");
                let cluster = text(512, round);
                let len = pack.run(&cluster, &mut out).unwrap();
                let mut back = vec![0; 512];
                unpack.run(&out[..len], &mut back).unwrap();
                assert!(back == cluster, "round {round}");
            }
        }
    }

    #[test]
    fn bombs_fill_one_cluster_and_no_more() {
        let zeros = vec![0u8; 4 << 20];
        for kind in KINDS {
            let mut bomb = vec![0; 1 << 16];
            let len = Compressor::new(kind).unwrap().run(&zeros, &mut bomb).unwrap();
            let mut cluster = vec![1u8; 65_536];
            let outcome = Decompressor::new(kind).unwrap().run(&bomb[..len], &mut cluster);
            assert!(outcome.is_err() || cluster.iter().all(|b| *b == 0));
        }
    }

    proptest! {
        #[test]
        fn rubbish_is_refused_or_read(data in prop::collection::vec(any::<u8>(), 0..600), zstd in any::<bool>(), flip in 0usize..4000) {
            let kind = KINDS[usize::from(zstd)];
            let mut unpack = Decompressor::new(kind).unwrap();
            let mut cluster = vec![0; 4096];
            let _ = unpack.run(&data, &mut cluster);
            let (packed, mut out) = (text(4096, 3), vec![0; 4095]);
            let len = Compressor::new(kind).unwrap().run(&packed, &mut out).unwrap();
            out[flip % len] ^= 1 << (flip % 8);
            let _ = unpack.run(&out[..len], &mut cluster);
            out[flip % len] ^= 1 << (flip % 8);
            unpack.run(&out[..len], &mut cluster).unwrap();
            prop_assert!(cluster == packed, "none the worse for it");
        }
    }
}
