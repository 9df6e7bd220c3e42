// SPDX-License-Identifier: Apache-2.0
//! `tare img bench`: times requests on an image as `qemu-img bench` does, with its options and its output, so that the two
//! can be run in turn. What it has beyond them: random offsets, and JSON.

use std::path::PathBuf;
use std::time::Instant;

use block::Op;

use super::args::{Options, Refusal, Word};
use super::image::How;
use super::pump::Pump;
use crate::exit::reason;

pub const HELP: &str = "\
usage: tare img bench [-c COUNT] [-d DEPTH] [-f FORMAT] [--flush-interval=N] [-i AIO]
                      [--no-drain] [-o OFFSET] [--pattern=BYTE] [-q] [-s SIZE] [-S STEP]
                      [--random[=SEED]] [-t CACHE] [-w] [--output=json]
                      [--backing=GATE] [--cow=MODE] [--key=FILE] [--l2-cache=SIZE]
                      [--zeros=WAY] FILE

Runs COUNT sequential (or random) requests on an image and prints how long they took.
The options are qemu-img's.

  -c COUNT             requests [75000]
  -d DEPTH             requests in flight [64]
  -f FORMAT            raw or qcow2; without it the file's first bytes tell
  --flush-interval=N   after N writes, wait for those in flight and flush
  --no-drain           flush without waiting for them
  -i AIO               auto, io_uring or threads [auto]
  -o OFFSET            the first request's place [0]
  --pattern=BYTE       what is written, 0 to 255 [0]
  -q                   no output
  -s SIZE              bytes of one request [4k]
  -S STEP              from one request to the next [SIZE]; wraps at the image's end
  --random[=SEED]      random multiples of SIZE instead of steps
  -t CACHE             writeback, none or unsafe [writeback]
  -w                   write; without it the requests read
  --output=json        the figures as JSON
  --cow=MODE           how qcow2 allocates: explicit, unallocated or zero-aware [zero-aware]
  --l2-cache=SIZE      for qcow2's tables [what the disk needs, at most 32M]
  --zeros=WAY          how it zeroes around data: write, fallocate, or auto, which measures [auto]

exit codes: 0 done; 1 a request failed or the image can't be opened
";

/// What was asked for.
#[derive(Clone, Debug)]
struct Asked {
    how: How,
    file: PathBuf,
    count: u64,
    depth: u16,
    size: u64,
    step: u64,
    offset: u64,
    random: Option<u64>,
    flush: Option<u64>,
    drain: bool,
    pattern: u8,
    write: bool,
    quiet: bool,
    json: bool,
}

fn parse(options: &mut Options<'_>) -> Result<Asked, Refusal> {
    let mut files = Vec::new();
    let mut step = None;
    let mut asked = Asked {
        how: How::default(),
        file: PathBuf::new(),
        count: 75_000,
        depth: 64,
        size: 4096,
        step: 0,
        offset: 0,
        random: None,
        flush: None,
        drain: true,
        pattern: 0,
        write: false,
        quiet: false,
        json: false,
    };
    while let Some(word) = options.next()? {
        match word {
            Word::Short('c') => asked.count = options.number(1..=u64::from(u32::MAX))?,
            Word::Short('d') => asked.depth = options.number(1..=4096)? as u16,
            Word::Short('f') => asked.how.take_format(options)?,
            Word::Short('i') => asked.how.take_aio(options)?,
            Word::Short('t') => asked.how.take_cache(options)?,
            Word::Short('o') => asked.offset = options.size()?,
            Word::Short('s') => asked.size = options.size()?,
            Word::Short('S') => step = Some(options.size()?),
            Word::Short('w') => asked.write = true,
            Word::Short('q') => asked.quiet = true,
            Word::Long(name) => match name.as_str() {
                "flush-interval" => asked.flush = Some(options.number(1..=u64::from(u32::MAX))?),
                "backing" => asked.how.take_gate(options)?,
                "key" => asked.how.take_key(options)?,
                "cow" => asked.how.take_cow(options)?,
                "zeros" => asked.how.take_zeros(options)?,
                "l2-cache" => asked.how.l2_cache = Some(options.size()?),
                "no-drain" => asked.drain = false,
                "pattern" => asked.pattern = options.number(0..=255)? as u8,
                "random" => asked.random = Some(options.optional_number()?.unwrap_or(1)),
                "output" => asked.json = options.word("a kind of output", &[("human", false), ("json", true)])?,
                _ => return Err(options.unknown()),
            },
            Word::Short(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    asked.file = options.one_file(files)?;
    asked.step = step.unwrap_or(asked.size);
    if asked.size == 0 || asked.size > 1 << 30 {
        return Err(Refusal::new(format!("requests of {} bytes can't be made: -s; use 1 to 1G", asked.size)));
    }
    if asked.flush.is_some() && !asked.write {
        return Err(Refusal::new("--flush-interval without -w: command line; only writes are flushed, add -w"));
    }
    if asked.flush.is_some_and(|n| n < u64::from(asked.depth)) {
        return Err(Refusal::new(format!(
            "--flush-interval is below the depth of {}: command line; make it at least that, or -d smaller",
            asked.depth
        )));
    }
    asked.how.readonly = !asked.write;
    Ok(asked)
}

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let asked = parse(options)?;
    let mut disk = asked.how.open(&asked.file)?;
    let place = asked.file.display();
    if asked.size > disk.size() {
        return Err(Refusal::new(format!("the image is smaller than one request: {place}; use a smaller -s")));
    }
    let slots = usize::from(asked.depth);
    let failed = |e: std::io::Error| Refusal::new(format!("the disk can't be used, {}: {place}", reason(&e)));
    let mut pump = Pump::new(&mut disk, slots, asked.size as usize).map_err(failed)?;
    for slot in 0..asked.depth {
        pump.buffer_mut(slot, asked.size as usize).fill(asked.pattern);
    }
    if !asked.quiet && !asked.json {
        announce(&asked);
    }
    let start = Instant::now();
    Run::new(&asked, pump.disk().size()).go(&mut pump)?;
    let seconds = start.elapsed().as_secs_f64();
    if asked.json {
        let figures = serde_json::json!({
            "count": asked.count,
            "depth": asked.depth,
            "size": asked.size,
            "write": asked.write,
            "engine": pump.disk().engine(),
            "seconds": seconds,
            "per-second": asked.count as f64 / seconds,
        });
        super::show(&format!("{figures:#}\n"));
    } else if !asked.quiet {
        super::show(&format!("Run completed in {seconds:3.3} seconds.\n"));
    }
    Ok(0)
}

fn announce(asked: &Asked) {
    let kind = if asked.write { "write" } else { "read" };
    let order = match asked.random {
        Some(seed) => format!("random offsets from seed {seed}"),
        None => format!("starting at offset {}, step size {}", asked.offset, asked.step),
    };
    let mut text = format!(
        "Sending {} {kind} requests, {} bytes each, {} in parallel ({order})\n",
        asked.count, asked.size, asked.depth
    );
    if let Some(every) = asked.flush {
        let drain = if asked.drain { "" } else { "undrained " };
        text += &format!("Sending flush every {every} {drain}requests\n");
    }
    super::show(&text);
}

/// A run under way.
struct Run<'a> {
    asked: &'a Asked,
    image: u64,
    offset: u64,
    random: u64,
    sent: u64,
    answered: u64,
    free: Vec<u16>,
    /// A flush was asked for and waits for the requests in flight, or is itself in flight.
    flushing: bool,
}

/// The slot of flushes lies past those of the requests.
fn flush_slot(asked: &Asked) -> u16 {
    asked.depth
}

impl<'a> Run<'a> {
    fn new(asked: &'a Asked, image: u64) -> Self {
        Self {
            asked,
            image,
            offset: asked.offset % image,
            random: asked.random.unwrap_or(1).max(1),
            sent: 0,
            answered: 0,
            free: (0..asked.depth).rev().collect(),
            flushing: false,
        }
    }

    fn next_offset(&mut self) -> u64 {
        if self.asked.random.is_some() {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            return self.random % (self.image / self.asked.size) * self.asked.size;
        }
        let offset = self.offset;
        self.offset = (self.offset + self.asked.step) % self.image;
        offset
    }

    fn go(&mut self, pump: &mut Pump<'_>) -> Result<(), Refusal> {
        let asked = self.asked;
        let op = if asked.write { Op::Write } else { Op::Read };
        let mut freed = Vec::new();
        while self.answered < asked.count || pump.in_flight() > 0 {
            while !self.flushing && self.sent < asked.count {
                let Some(slot) = self.free.pop() else { break };
                self.sent += 1;
                let offset = self.next_offset();
                pump.submit(slot, op, offset, asked.size);
            }
            let failed =
                |e: std::io::Error| Refusal::new(format!("a request failed, {}: {}", reason(&e), asked.file.display()));
            for done in pump.wait().map_err(failed)? {
                done.result.map_err(failed)?;
                freed.push(done.id);
            }
            for slot in freed.drain(..) {
                if slot == flush_slot(asked) {
                    self.flushing = false;
                    continue;
                }
                self.free.push(slot);
                self.answered += 1;
                if asked.flush.is_some_and(|every| self.answered.is_multiple_of(every)) {
                    self.flushing = true;
                }
            }
            let drained = self.free.len() == usize::from(asked.depth);
            if self.flushing
                && pump.in_flight() == usize::from(asked.depth) - self.free.len()
                && (drained || !asked.drain)
            {
                pump.submit(flush_slot(asked), Op::Flush, 0, 0);
                self.flushing = asked.drain;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn asked(args: &[&str]) -> Result<Asked, String> {
        let mut parser = lexopt::Parser::from_args(args);
        parse(&mut Options::new(&mut parser, "bench")).map_err(|r| r.message)
    }

    #[test]
    fn the_defaults_are_qemu_imgs() {
        let a = asked(&["x"]).unwrap();
        assert_eq!((a.count, a.depth, a.size, a.step, a.offset), (75_000, 64, 4096, 4096, 0));
        assert!(a.how.readonly && a.drain);
        let a = asked(&["-w", "-s", "64k", "-S", "1M", "--flush-interval=64", "x"]).unwrap();
        assert_eq!((a.size, a.step, a.flush), (64 << 10, 1 << 20, Some(64)));
        assert!(!a.how.readonly);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for (args, needle) in [
            (&["--flush-interval=100", "x"][..], "without -w"),
            (&["-w", "--flush-interval=2", "x"], "below the depth"),
            (&["-s", "0", "x"], "can't be made"),
            (&[], "no image named"),
            (&["x", "y"], "2 files named"),
            (&["-i", "native", "x"], "use auto, io_uring or threads"),
            (&["-Z", "x"], "unknown flag -Z"),
        ] {
            let message = asked(args).unwrap_err();
            assert!(message.contains(needle), "{message}");
        }
    }

    #[test]
    fn a_long_step_meets_every_block_once_before_any_twice() {
        let a = asked(&["-S", "20k", "x"]).unwrap();
        let mut run = Run::new(&a, 64 << 10);
        let mut seen: Vec<u64> = (0..16).map(|_| run.next_offset() / 4096).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..16).collect::<Vec<_>>());
    }
}
