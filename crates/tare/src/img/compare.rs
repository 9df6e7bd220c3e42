// SPDX-License-Identifier: Apache-2.0
//! `tare img compare`: whether two images show a guest the same disk, as `qemu-img compare` does.

use std::io;
use std::path::{Path, PathBuf};

use block::{Disk, ExtentKind, Op};

use super::args::{Options, Refusal, Word};
use super::copy::is_zero;
use super::image::How;
use super::interrupt;
use super::progress::Progress;
use super::pump::Pump;
use crate::exit::reason;

pub const HELP: &str = "\
usage: tare img compare [-f FORMAT] [-F FORMAT] [-T CACHE] [-p] [-q] [-s]
                        [--backing=GATE] [--key=FILE] [--second-key=FILE] FILE1 FILE2

Says whether two images hold the same bytes. What one has and the other lacks must be
zeroes.

  -f, -F FORMAT   of the first and the second image: raw or qcow2; without it the
                  file's first bytes tell
  -T CACHE        writeback, none or unsafe [writeback]
  -p              progress, as percentages where no terminal shows a bar
  -q              no output, only the exit code
  --second-key=FILE  as --key, for the second image
  -s              strict: sizes and what is allocated must be the same too

exit codes: 0 identical; 1 different; 2 an image can't be opened; 3 an image can't be
read; 130 interrupted
";

const SAME: u8 = 0;
const DIFFERENT: u8 = 1;
const UNOPENED: u8 = 2;
const UNREAD: u8 = 3;

/// Bytes of one read, and reads at one time on each image.
const CHUNK: u64 = 1 << 20;
const SLOTS: u16 = 8;
/// Extents are asked for so many bytes at a time.
const WINDOW: u64 = 16 << 30;
/// Differences are told by the sector.
const SECTOR: usize = 512;

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let parsed = parse(options);
    let asked = match parsed {
        Err(refusal) if !refusal.help => return Err(refusal.coded(UNOPENED)),
        other => other?,
    };
    let say = |text: String| {
        if !asked.quiet {
            super::show(&text);
        }
    };
    let open = |how: &How, path: &Path| how.open(path).map_err(|e| e.coded(UNOPENED));
    let mut disks = [open(&asked.how[0], &asked.files[0])?, open(&asked.how[1], &asked.files[1])?];
    let [a, b] = [disks[0].size(), disks[1].size()];
    if a != b && asked.strict {
        say("Strict mode: Image size mismatch!\n".into());
        return Ok(DIFFERENT);
    }
    let failed = |e: io::Error| {
        let both = format!("{} and {}", asked.files[0].display(), asked.files[1].display());
        Refusal::with(UNREAD, format!("the images can't be compared, {}: {both}", reason(&e)))
    };
    interrupt::install().map_err(failed)?;
    let progress = Progress::new(a.max(b), asked.progress, asked.quiet);
    let verdict = judge(&mut disks, asked.strict, &progress).map_err(failed)?;
    progress.finish();
    // As qemu-img: not before what both have was found equal.
    let past_one = verdict == Verdict::Same || matches!(verdict, Verdict::Content(at) if at >= a.min(b));
    if a != b && past_one {
        say("Warning: Image size mismatch!\n".into());
    }
    match verdict {
        Verdict::Same => {
            say("Images are identical.\n".into());
            Ok(SAME)
        }
        Verdict::Content(at) => {
            say(format!("Content mismatch at offset {at}!\n"));
            Ok(DIFFERENT)
        }
        Verdict::Status(at) => {
            say(format!("Strict mode: Offset {at} block status mismatch!\n"));
            Ok(DIFFERENT)
        }
        Verdict::Interrupted => Ok(interrupt::CODE),
    }
}

struct Asked {
    how: [How; 2],
    files: [PathBuf; 2],
    progress: bool,
    quiet: bool,
    strict: bool,
}

fn parse(options: &mut Options<'_>) -> Result<Asked, Refusal> {
    let mut how = [(); 2].map(|()| How { readonly: true, ..How::default() });
    let mut files = Vec::new();
    let (mut progress, mut quiet, mut strict) = (false, false, false);
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f') => how[0].take_format(options)?,
            Word::Short('F') => how[1].take_format(options)?,
            Word::Short('T') => {
                how[0].take_cache(options)?;
                how[1].cache = how[0].cache;
            }
            Word::Short('p') => progress = true,
            Word::Short('q') => quiet = true,
            Word::Short('s') => strict = true,
            Word::Long(name) if name == "backing" => {
                how[0].take_gate(options)?;
                how[1].gate = how[0].gate.clone();
            }
            Word::Long(name) if name == "key" => how[0].take_key(options)?,
            Word::Long(name) if name == "second-key" => how[1].take_key(options)?,
            Word::Short(_) | Word::Long(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    let files = <[PathBuf; 2]>::try_from(files).map_err(|f| options.files(f.len(), "two images"))?;
    Ok(Asked { how, files, progress, quiet, strict })
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Same,
    /// The first sector that differs.
    Content(u64),
    /// The first byte that is allocated in one and not in the other.
    Status(u64),
    Interrupted,
}

/// What is to be read: a range in which at least one image has data.
#[derive(Clone, Copy, Debug)]
struct Range {
    offset: u64,
    len: u64,
}

fn judge(disks: &mut [Disk; 2], strict: bool, progress: &Progress) -> io::Result<Verdict> {
    let size = disks[0].size().max(disks[1].size());
    let mut at = 0;
    while at < size {
        let len = WINDOW.min(size - at);
        let [a, b] = disks;
        let maps = [pieces(a, at, len)?, pieces(b, at, len)?];
        if strict && let Some(offset) = status_differs(&maps) {
            return Ok(Verdict::Status(offset));
        }
        let ranges = to_read(&maps, at, len);
        progress.add(len - ranges.iter().map(|r| r.len).sum::<u64>());
        let verdict = contents(disks, &ranges, progress)?;
        if verdict != Verdict::Same {
            return Ok(verdict);
        }
        at += len;
    }
    Ok(Verdict::Same)
}

/// One image's runs in a window: end, whether there is data, whether it is allocated.
fn pieces(disk: &mut Disk, offset: u64, len: u64) -> io::Result<Vec<(u64, bool, bool)>> {
    let end = disk.size().clamp(offset, offset + len);
    let mut runs: Vec<(u64, bool, bool)> = Vec::new();
    if end > offset {
        for extent in disk.extents(offset, end - offset)? {
            let data = extent.kind == ExtentKind::Data;
            let allocated = extent.kind != ExtentKind::Hole || extent.host_offset.is_some();
            runs.push((extent.offset + extent.len, data, allocated));
        }
    }
    if end < offset + len {
        runs.push((offset + len, false, false));
    }
    Ok(runs)
}

fn status_differs(maps: &[Vec<(u64, bool, bool)>; 2]) -> Option<u64> {
    let mut from = 0;
    let (mut i, mut j) = (0, 0);
    while let (Some(a), Some(b)) = (maps[0].get(i), maps[1].get(j)) {
        if a.2 != b.2 {
            return Some(from);
        }
        from = a.0.min(b.0);
        i += usize::from(a.0 == from);
        j += usize::from(b.0 == from);
    }
    None
}

/// The ranges with data in either, cut into chunks.
fn to_read(maps: &[Vec<(u64, bool, bool)>; 2], offset: u64, len: u64) -> Vec<Range> {
    let mut out: Vec<Range> = Vec::new();
    let (mut at, mut i, mut j) = (offset, 0, 0);
    while at < offset + len {
        let (Some(a), Some(b)) = (maps[0].get(i), maps[1].get(j)) else { break };
        let end = a.0.min(b.0);
        if a.1 || b.1 {
            let mut from = at;
            while from < end {
                let to = end.min((from / CHUNK + 1) * CHUNK);
                match out.last_mut() {
                    Some(last) if last.offset + last.len == from && from % CHUNK != 0 => last.len += to - from,
                    _ => out.push(Range { offset: from, len: to - from }),
                }
                from = to;
            }
        }
        at = end;
        i += usize::from(a.0 == end);
        j += usize::from(b.0 == end);
    }
    out
}

/// Reads the ranges of both images and compares them.
fn contents(disks: &mut [Disk; 2], ranges: &[Range], progress: &Progress) -> io::Result<Verdict> {
    let [a, b] = disks;
    let sizes = [a.size(), b.size()];
    let mut pumps = [Pump::new(a, SLOTS.into(), CHUNK as usize)?, Pump::new(b, SLOTS.into(), CHUNK as usize)?];
    for batch in ranges.chunks(SLOTS.into()) {
        if interrupt::asked() {
            return Ok(Verdict::Interrupted);
        }
        let there = |size: u64, r: &Range| size.clamp(r.offset, r.offset + r.len) - r.offset;
        for (pump, size) in pumps.iter_mut().zip(sizes) {
            for (slot, range) in (0..).zip(batch) {
                let len = there(size, range);
                if len > 0 {
                    pump.submit(slot, Op::Read, range.offset, len);
                }
            }
        }
        for pump in &mut pumps {
            while pump.in_flight() > 0 {
                for done in pump.wait()? {
                    done.result?;
                }
            }
        }
        for (slot, range) in (0..).zip(batch) {
            let [x, y] = [0, 1].map(|i: usize| pumps[i].buffer(slot, there(sizes[i], range) as usize));
            if let Some(at) = difference(x, y) {
                return Ok(Verdict::Content(range.offset + at as u64));
            }
            progress.add(range.len);
        }
    }
    Ok(Verdict::Same)
}

/// The first sector in which two runs differ; the shorter one goes on in zeroes.
fn difference(a: &[u8], b: &[u8]) -> Option<usize> {
    let (short, long) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    let (same, rest) = long.split_at(short.len());
    if short != same {
        let pairs = short.chunks(SECTOR).zip(same.chunks(SECTOR));
        return pairs.enumerate().find(|(_, (x, y))| x != y).map(|(i, _)| i * SECTOR);
    }
    let sector = rest.chunks(SECTOR).position(|sector| !is_zero(sector));
    sector.map(|i| short.len() + i * SECTOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_told_by_the_sector() {
        let (a, mut b) = (vec![7u8; 2048], vec![7u8; 2048]);
        assert_eq!(difference(&a, &b), None);
        b[1025] = 0;
        assert_eq!(difference(&a, &b), Some(1024));
        assert_eq!(difference(&a[..1024], &b), Some(1024));
        let mut long = a.clone();
        long.extend([0; 2048]);
        assert_eq!(difference(&a, &long), None);
        long[3583] = 1;
        assert_eq!(difference(&long, &a), Some(3072));
    }

    #[test]
    fn only_what_one_has_is_read() {
        let a = vec![(4096, true, true), (3 * CHUNK, false, false)];
        let b = vec![(CHUNK, false, true), (CHUNK + 512, true, true), (3 * CHUNK, false, false)];
        let maps = [a, b];
        let ranges: Vec<_> = to_read(&maps, 0, 3 * CHUNK).iter().map(|r| (r.offset, r.len)).collect();
        assert_eq!(ranges, [(0, 4096), (CHUNK, 512)]);
        assert_eq!(status_differs(&maps), Some(4096));
    }
}
