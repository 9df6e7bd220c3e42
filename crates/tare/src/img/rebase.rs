// SPDX-License-Identifier: Apache-2.0
//! `tare img rebase`: puts an image on another backing file, as `qemu-img rebase` does: by copying what differs first, or
//! under `-u` by changing the name alone.

use std::io;
use std::path::Path;

use block::qcow2::offline::Image;
use block::{Disk, Op};

use super::args::{Options, Refusal, Word};
use super::image::{FORMATS, Gate, How, resolved, word};
use super::interrupt;
use super::progress::Progress;
use super::pump::Pump;
use crate::exit::reason;

pub const HELP: &str = "\
usage: tare img rebase [-f FORMAT] [-t CACHE] [-T CACHE] [-p] [-q] [-u]
                       [--key=FILE] [--backing-key=FILE] -b BACKING [-F FORMAT] FILE

Puts a qcow2 image that nobody has open on another backing file. What the image shows
stays the same: where the old and the new backing file differ, the old one's data is
copied into the image first. The new name is written last, so that an interruption
leaves an image on its old backing file.

  -b BACKING   the new backing file; relative names start from FILE's folder; \"\" for none
  -F FORMAT    of BACKING, needed with it: raw or qcow2
  -u           change the name alone; BACKING must hold what the old one held
  -t, -T CACHE for FILE and for BACKING: writeback, none or unsafe [writeback]
  --key=FILE   holds the passphrase of FILE; again for those below it
  --backing-key=FILE  holds that of BACKING; again for those below it
  -p           progress, as percentages where no terminal shows a bar
  -q           no progress

exit codes: 0 done; 1 failed; 130 interrupted
";

/// Bytes of one read.
const CHUNK: u64 = 1 << 20;

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    // Where the images of the chain lie is the user's affair here.
    let mut how = How { gate: Gate::Any, ..How::default() };
    let mut below = How { gate: Gate::Any, readonly: true, ..How::default() };
    let mut files = Vec::new();
    let (mut backing, mut progress, mut quiet, mut name_only) = (None, false, false, false);
    while let Some(next) = options.next()? {
        match next {
            Word::Short('f') => how.take_format(options)?,
            Word::Short('F') => below.format = Some(options.word("an image format that tare knows", FORMATS)?),
            Word::Short('t') => how.take_cache(options)?,
            Word::Short('T') => below.take_cache(options)?,
            Word::Short('b') => backing = Some(options.value()?),
            Word::Short('p') => progress = true,
            Word::Short('q') => quiet = true,
            Word::Short('u') => name_only = true,
            Word::Long(name) if name == "key" => how.take_key(options)?,
            Word::Long(name) if name == "backing-key" => below.take_key(options)?,
            Word::Short(_) | Word::Long(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    let file = options.one_file(files)?;
    let backing = backing
        .ok_or_else(|| Refusal::new("no backing file: command line; name it with -b, or say -b \"\" for none"))?;
    let backing = (!backing.is_empty()).then_some(backing);
    if backing.is_some() && below.format.is_none() {
        return Err(Refusal::new(
            "the backing file's format is not said: command line; say it with -F raw or -F qcow2",
        ));
    }
    if !name_only {
        interrupt::install().map_err(|e| Refusal::new(format!("no eventfd to be had, {}: this host", reason(&e))))?;
        let new = backing.as_ref().map(|name| below.open(&resolved(&file, Path::new(name)))).transpose()?;
        let mut disk = how.open(&file)?;
        let bar = Progress::new(disk.size(), progress, quiet);
        let failed =
            |e: io::Error| Refusal::new(format!("the data can't be moved, {}: {}", reason(&e), file.display()));
        if !keep(&mut disk, new, &bar).map_err(failed)? {
            return Ok(interrupt::CODE);
        }
        bar.finish();
    }
    let mut image = Image::open(&file, true).map_err(Refusal::new)?;
    let named = backing.as_deref().map(|name| (name, below.format.map_or("raw", word)));
    image.set_backing(named).map_err(Refusal::new)?;
    Ok(0)
}

/// Copies into the image what it shows of its old chain and would not show of the new one; `false` if interrupted.
fn keep(disk: &mut Disk, mut new: Option<Disk>, progress: &Progress) -> io::Result<bool> {
    let size = disk.size();
    let mut at = 0;
    while at < size {
        let window = (64 * CHUNK).min(size - at);
        let extents = disk.extents(at, window)?;
        let mut pump = Pump::new(disk, 1, CHUNK as usize)?;
        let mut below = match &mut new {
            Some(new) => Some(Pump::new(new, 1, CHUNK as usize)?),
            None => None,
        };
        for extent in extents.iter().filter(|e| e.depth > 0 || e.kind == block::ExtentKind::Hole) {
            let (mut from, end) = (extent.offset, extent.offset + extent.len);
            while from < end {
                if interrupt::asked() {
                    return Ok(false);
                }
                let len = CHUNK.min(end - from);
                pump.one(Op::Read, from, len)?;
                if !same(&pump, below.as_mut(), from, len)? {
                    pump.one(Op::Write, from, len)?;
                }
                from += len;
            }
        }
        pump.one(Op::Flush, 0, 0)?;
        at += window;
        progress.add(window);
    }
    Ok(true)
}

/// Whether the new backing file shows what was just read.
fn same(pump: &Pump<'_>, below: Option<&mut Pump<'_>>, offset: u64, len: u64) -> io::Result<bool> {
    let shown = pump.buffer(0, len as usize);
    let Some(below) = below else { return Ok(super::copy::is_zero(shown)) };
    let there = below.disk().size().clamp(offset, offset + len) - offset;
    if there > 0 {
        below.one(Op::Read, offset, there)?;
    }
    let (head, tail) = shown.split_at(there as usize);
    Ok(head == below.buffer(0, there as usize) && super::copy::is_zero(tail))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_backing_file_and_its_format_go_together() {
        let says = |args: &[&str]| {
            let mut parser = lexopt::Parser::from_args(args);
            run(&mut Options::new(&mut parser, "rebase")).unwrap_err().message
        };
        assert!(says(&["-b", "x", "a"]).contains("say it with -F"));
        assert!(says(&["a"]).contains("name it with -b"));
        assert!(says(&["-b", ""]).contains("no image named"));
    }
}
