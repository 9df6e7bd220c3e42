// SPDX-License-Identifier: Apache-2.0
//! `tare img commit`: writes what an image holds into its backing file, as `qemu-img commit` does.
//!
//! An open image keeps its backing file from being written, so the two are open in turn: a batch is read from the one, then
//! written to the other. A lock on the image alone, held all the while, keeps others from changing it in between.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use block::qcow2::format::header::{Crypt, Header};
use block::qcow2::offline::{self, CreateOptions, Image};
use block::{Disk, Extent, ExtentKind, Format, Op, Secret};

use super::args::{Options, Refusal, Word};
use super::image::{Gate, How, chain, resolved};
use super::interrupt;
use super::progress::Progress;
use super::pump::Pump;
use crate::exit::{complain, reason};

pub const HELP: &str = "\
usage: tare img commit [-f FORMAT] [-t CACHE] [-b BASE] [-d] [-p] [-q] [--key=FILE] FILE

Writes what a qcow2 image that nobody has open holds into its backing file, then empties
the image. Interrupted at any point, the image still shows what it did; do it again.

  -b BASE    a file further down the chain: it gets what FILE and all images between
             them hold, and FILE is not emptied; the images between show something else
             from then on, and should go
  -t CACHE   writeback, none or unsafe [writeback]
  -d         don't empty the image (it is about to be deleted)
  -p         progress, as percentages where no terminal shows a bar
  -q         no output

  --key=FILE   the passphrase of an encrypted image; again for those below

exit codes: 0 done; 1 failed; 130 interrupted
";

/// Bytes of one request, and requests of one batch.
const CHUNK: u64 = 1 << 20;
const BATCH: u16 = 64;

/// A range to be committed; zero or data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    offset: u64,
    len: u64,
    zero: bool,
}

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let mut how = How { gate: Gate::Any, format: Some(Format::Qcow2), ..How::default() };
    let mut files: Vec<PathBuf> = Vec::new();
    let (mut keep, mut progress, mut quiet, mut base) = (false, false, false, None);
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f') => how.take_format(options)?,
            Word::Short('t') => how.take_cache(options)?,
            Word::Short('b') => base = Some(options.value()?),
            Word::Short('d') => keep = true,
            Word::Long(name) if name == "key" => how.take_key(options)?,
            Word::Short('p') => progress = true,
            Word::Short('q') => quiet = true,
            Word::Short(_) | Word::Long(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    let file = options.one_file(files)?;
    let place = file.display();
    if how.format_of(&file) != Format::Qcow2 {
        return Err(Refusal::new(format!("only qcow2 images have backing files: {place}; there is nothing to commit")));
    }
    let lock = Image::open(&file, false).map_err(Refusal::new)?;
    let chain = chain(&file, Format::Qcow2)?;
    if chain.len() < 2 {
        return Err(Refusal::new(format!("the image has no backing file: {place}; there is nothing to commit")));
    }
    let depth = match &base {
        None => 1,
        Some(base) => depth_of(&file, Path::new(base), &chain)?,
    };
    // Emptied, it would show what the images between hold, which need not be what it showed.
    let keep = keep || base.is_some();
    let Some((below, format)) = chain.get(depth).cloned() else { return Err(options.unknown()) };
    interrupt::install().map_err(|e| Refusal::new(format!("no eventfd to be had, {}: this host", reason(&e))))?;
    let into = How { format: Some(format), keys: keys_below(&lock, &chain, depth, &how.keys)?, ..how.clone() };
    let top = How { readonly: true, ..how };
    let job = Job { top, file: &file, below: &below, depth: depth as u32, into };
    let size = lock.header().size;
    let bar = Progress::new(size, progress, quiet);
    if !job.all(size, &bar)? {
        return Ok(interrupt::CODE);
    }
    bar.finish();
    let header = lock.header().clone();
    let simple = lock.snapshots().is_ok_and(<[_]>::is_empty) && header.extensions.bitmaps.is_none();
    drop(lock);
    if !keep {
        empty(&file, &header, simple)?;
    }
    if !quiet {
        super::show("Image committed.\n");
    }
    Ok(0)
}

/// Those of the chain's keys that open the image so far down it, and what lies below that.
fn keys_below(top: &Image, chain: &[(PathBuf, Format)], depth: usize, keys: &[Secret]) -> Result<Vec<Secret>, Refusal> {
    let (mut above, mut encrypted) = (usize::from(top.header().crypt != Crypt::None), 0);
    for (at, (path, _)) in chain.iter().enumerate().skip(1).filter(|(_, (_, format))| *format == Format::Qcow2) {
        let image = Image::open(path, false).map_err(Refusal::new)?;
        let one = usize::from(image.header().crypt != Crypt::None);
        *(if at < depth { &mut above } else { &mut encrypted }) += one;
    }
    if encrypted == 0 {
        return Ok(Vec::new());
    }
    let first = above.min(keys.len().saturating_sub(1));
    Ok(keys.get(first..).unwrap_or_default().to_vec())
}

/// How far below the top `base` is: named as the image above it names it, or as a path.
fn depth_of(file: &Path, base: &Path, chain: &[(PathBuf, Format)]) -> Result<usize, Refusal> {
    let real = |path: &Path| path.canonicalize().ok();
    let wanted = [resolved(file, base), base.to_owned()];
    let is = |path: &Path| wanted.iter().any(|w| w == path || (real(w).is_some() && real(w) == real(path)));
    let found = chain.iter().enumerate().skip(1).find(|(_, (path, _))| is(path)).map(|(depth, _)| depth);
    found.ok_or_else(|| {
        Refusal::new(format!(
            "`{}` is no backing file of the image: -b; `tare img info --backing-chain {}` lists them",
            base.display(),
            file.display()
        ))
    })
}

/// A commit under way.
struct Job<'a> {
    top: How,
    file: &'a Path,
    below: &'a Path,
    /// How many images down that is.
    depth: u32,
    into: How,
}

impl Job<'_> {
    /// Commits everything; `false` if interrupted.
    fn all(&self, size: u64, bar: &Progress) -> Result<bool, Refusal> {
        let mut below = self.into.open(self.below)?;
        if below.size() < size {
            below.resize(size).map_err(|e| self.failed(self.below, "growing it", &e))?;
        }
        drop(below);
        let mut at = 0;
        while at < size {
            if interrupt::asked() {
                return Ok(false);
            }
            let mut top = self.top.open(self.file)?;
            let (pieces, next) = self.plan(&mut top, at, size)?;
            let read = |e: io::Error| self.failed(self.file, "reading", &e);
            let bytes = move_all(&mut top, &pieces, Op::Read, Vec::new()).map_err(read)?;
            drop(top);
            if !pieces.is_empty() {
                let mut below = self.into.open(self.below)?;
                let write = |e: io::Error| self.failed(self.below, "writing", &e);
                move_all(&mut below, &pieces, Op::Write, bytes).map_err(write)?;
            }
            bar.add(next - at);
            at = next;
        }
        Ok(true)
    }

    fn failed(&self, path: &Path, what: &str, e: &io::Error) -> Refusal {
        Refusal::new(format!("{what} failed, {}: {}; the image shows what it did", reason(e), path.display()))
    }

    /// What the image, and those between, hold from `at` on, as much as a batch takes; and where the next one begins.
    fn plan(&self, top: &mut Disk, at: u64, size: u64) -> Result<(Vec<Piece>, u64), Refusal> {
        let window = (16 << 30).min(size - at);
        let extents = top.extents(at, window).map_err(|e| self.failed(self.file, "reading", &e))?;
        Ok(batch(&extents, self.depth, at + window))
    }
}

fn batch(extents: &[Extent], depth: u32, end: u64) -> (Vec<Piece>, u64) {
    let mut pieces = Vec::new();
    for extent in extents.iter().filter(|e| e.depth < depth) {
        // A hole up here is the end of an image between: zeroes, whatever is below.
        let zero = extent.kind != ExtentKind::Data;
        let (mut from, end) = (extent.offset, extent.offset + extent.len);
        while from < end {
            if pieces.len() == usize::from(BATCH) {
                return (pieces, from);
            }
            let len = if zero { (end - from).min(1 << 30) } else { (end - from).min(CHUNK) };
            pieces.push(Piece { offset: from, len, zero });
            from += len;
        }
    }
    (pieces, end)
}

/// Reads the pieces into memory, or writes them from it and makes them durable.
fn move_all(disk: &mut Disk, pieces: &[Piece], op: Op, mut bytes: Vec<Vec<u8>>) -> io::Result<Vec<Vec<u8>>> {
    let mut pump = Pump::new(disk, pieces.len().max(1), CHUNK as usize)?;
    for (slot, piece) in (0..).zip(pieces) {
        match (op, piece.zero) {
            (Op::Read, true) => {}
            (Op::Read, false) => pump.submit(slot, Op::Read, piece.offset, piece.len),
            (_, true) => pump.submit(slot, Op::WriteZeroes { unmap: true }, piece.offset, piece.len),
            (_, false) => {
                let from = bytes.get(usize::from(slot)).map(Vec::as_slice).unwrap_or_default();
                pump.buffer_mut(slot, from.len()).copy_from_slice(from);
                pump.submit(slot, Op::Write, piece.offset, piece.len);
            }
        }
    }
    while pump.in_flight() > 0 {
        for done in pump.wait()? {
            done.result?;
        }
    }
    if op == Op::Read {
        let lens = pieces.iter().map(|p| if p.zero { 0 } else { p.len as usize });
        bytes = (0..).zip(lens).map(|(slot, len)| pump.buffer(slot, len).to_vec()).collect();
    } else {
        pump.one(Op::Flush, 0, 0)?;
    }
    Ok(bytes)
}

/// Puts an empty image of the same kind in the image's place; one with more in it than data stays as it is.
fn empty(file: &Path, header: &Header, simple: bool) -> Result<(), Refusal> {
    if !simple || header.crypt != Crypt::None || header.extensions.data_file.is_some() {
        complain(&format!(
            "the image is not emptied, since it has snapshots, bitmaps, encryption or a data file: {}; its data is committed",
            file.display()
        ));
        return Ok(());
    }
    let options = CreateOptions {
        size: header.size,
        cluster_size: header.cluster_size(),
        refcount_bits: header.width.bits(),
        version: header.version,
        extended_l2: header.layout().extended,
        lazy_refcounts: header.lazy_refcounts(),
        compression: header.compression,
        backing: header.backing.clone(),
        backing_format: header.extensions.backing_format.clone(),
        ..CreateOptions::default()
    };
    let name = file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    let draft =
        file.with_file_name(format!(".{}.{}.part", name.chars().take(60).collect::<String>(), std::process::id()));
    let placed = offline::create(&draft, &options).map_err(Refusal::new).and_then(|()| {
        let old = fs::metadata(file);
        old.and_then(|old| {
            fs::set_permissions(&draft, old.permissions())?;
            std::os::unix::fs::chown(&draft, Some(old.uid()), Some(old.gid()))?;
            fs::rename(&draft, file)
        })
        .map_err(|e| {
            Refusal::new(format!(
                "the image can't be emptied, {}: {}; its data is committed",
                reason(&e),
                file.display()
            ))
        })
    });
    if placed.is_err() {
        let _ = fs::remove_file(&draft);
    }
    placed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_ends_where_the_next_begins() {
        let extent =
            |offset, len, kind, depth| Extent { offset, len, kind, depth, host_offset: None, compressed: false };
        let extents = [
            extent(0, 70 * CHUNK, ExtentKind::Data, 0),
            extent(70 * CHUNK, CHUNK, ExtentKind::Data, 1),
            extent(71 * CHUNK, CHUNK, ExtentKind::Zero, 0),
        ];
        let (pieces, next) = batch(&extents, 1, 72 * CHUNK);
        assert_eq!((pieces.len(), next), (64, 64 * CHUNK));
        let (pieces, next) = batch(&extents[1..], 1, 72 * CHUNK);
        let last = Piece { offset: 71 * CHUNK, len: CHUNK, zero: true };
        assert_eq!((pieces, next), (vec![last], 72 * CHUNK));
        let (pieces, _) = batch(&extents[1..], 2, 72 * CHUNK);
        assert_eq!(pieces, [Piece { offset: 70 * CHUNK, len: CHUNK, zero: false }, last]);
    }
}
