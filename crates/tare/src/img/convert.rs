// SPDX-License-Identifier: Apache-2.0
//! `tare img convert`: copies what a disk holds into a new image, as `qemu-img convert` does: sparse, parallel, and with
//! nothing left behind when it is interrupted. The new image is made beside its place and moved there when it is whole.

use std::fs;
use std::path::{Path, PathBuf};

use block::qcow2::offline;
use block::{Cache, Disk, Format, Op};

use super::args::{Options, Refusal, Word};
use super::copy::{self, Ended, Job};
use super::create::{self, Wish};
use super::image::{FORMATS, Gate, How};
use super::interrupt;
use super::pack::{self, Failed};
use super::progress::Progress;
use super::pump::Pump;
use crate::exit::reason;

pub const HELP: &str = "\
usage: tare img convert [-f FORMAT] [-O FORMAT] [-o OPTIONS] [-c] [-B BACKING -F FORMAT]
                        [-l SNAPSHOT] [-t CACHE] [-T CACHE] [-i AIO] [-m THREADS] [-n] [-p]
                        [-q] [-S SIZE] [-W] [--backing=GATE] [--key=FILE]
                        [--target-key=FILE] FILE TARGET

Copies the disk in FILE, backing files and all, into a new image. TARGET appears when it
is whole; interrupted by SIGINT or SIGTERM, there is none.

  -f FORMAT    of FILE: raw or qcow2; without it the file's first bytes tell
  -O FORMAT    of TARGET [raw]
  -o OPTIONS   of TARGET, see `tare img create --help`
  -c           compress (qcow2; by zlib, or zstd with -o compression_type=zstd)
  -B BACKING   TARGET stands on it and gets only what FILE itself holds; it must show
               what FILE's backing file shows; relative names start from TARGET's folder
  -F FORMAT    of BACKING, needed with it: raw or qcow2
  -l SNAPSHOT  copy this internal snapshot of FILE: an id, a name, or
               snapshot.id=ID or snapshot.name=NAME
  -t CACHE     for TARGET: writeback, none or unsafe [unsafe: not flushed, unless it
               takes the place of another]
  -T CACHE     for FILE: writeback, none or unsafe [writeback]
  -i AIO       auto, io_uring or threads [auto]
  -m THREADS   that copy, 1 to 16 [one for each CPU, at most 8]
  -n           TARGET is there and is overwritten in place; it has to be large enough
  -p           progress, as percentages where no terminal shows a bar
  -q           no progress
  -S SIZE      so many zeroes in a row are left out; 0 writes them all [4k]
  -W           accepted; writes are in no order anyway
  --target-key=FILE  as --key, for TARGET: with -o encrypt.format=luks, or with -n

exit codes: 0 done; 1 failed, with no TARGET left behind (but under -n); 130 interrupted
";

#[derive(Debug)]
struct Asked {
    from: How,
    to: How,
    wish: Wish,
    files: [PathBuf; 2],
    threads: usize,
    in_place: bool,
    compress: bool,
    snapshot: Option<String>,
    sparse: u64,
    progress: bool,
    quiet: bool,
}

fn parse(options: &mut Options<'_>) -> Result<Asked, Refusal> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut asked = Asked {
        from: How { readonly: true, ..How::default() },
        to: How { cache: Cache::Unsafe, ..How::default() },
        wish: Wish::default(),
        files: Default::default(),
        threads: cpus.min(8),
        in_place: false,
        compress: false,
        snapshot: None,
        sparse: 4096,
        progress: false,
        quiet: false,
    };
    let mut files = Vec::new();
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f') => asked.from.take_format(options)?,
            Word::Short('O') => asked.wish.format = options.word("an image format that tare knows", FORMATS)?,
            Word::Short('o') => asked.wish.take(&options.text()?)?,
            Word::Short('t') => asked.to.take_cache(options)?,
            Word::Short('T') => asked.from.take_cache(options)?,
            Word::Short('i') => {
                asked.from.take_aio(options)?;
                asked.to.aio = asked.from.aio;
            }
            Word::Short('m') => asked.threads = options.number(1..=16)? as usize,
            Word::Short('c') => asked.compress = true,
            Word::Short('B') => asked.wish.stand_on(options.value()?),
            Word::Short('F') => {
                asked.wish.backing_format(options.word("an image format that tare knows", FORMATS)?);
            }
            Word::Short('l') => asked.snapshot = Some(snapshot_name(options.text()?)),
            Word::Short('n') => asked.in_place = true,
            Word::Short('p') => asked.progress = true,
            Word::Short('q') => asked.quiet = true,
            Word::Short('W') => {}
            Word::Short('S') => asked.sparse = options.size()?,
            Word::Long(name) if name == "backing" => asked.from.take_gate(options)?,
            Word::Long(name) if name == "key" => asked.from.take_key(options)?,
            Word::Long(name) if name == "target-key" => asked.to.take_key(options)?,
            Word::Short(_) | Word::Long(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    asked.files = <[PathBuf; 2]>::try_from(files).map_err(|f| options.files(f.len(), "an image and a target"))?;
    if !asked.sparse.is_multiple_of(512) || asked.sparse > copy::CHUNK {
        return Err(Refusal::new(format!(
            "{} bytes of zeroes can't be looked for: -S; use a multiple of 512 up to 1M",
            asked.sparse
        )));
    }
    if asked.compress && (asked.wish.format != Format::Qcow2 || asked.in_place) {
        return Err(Refusal::new("only new qcow2 images can be compressed: -c; use -O qcow2, without -n"));
    }
    if asked.wish.has_backing() && (asked.wish.format != Format::Qcow2 || asked.in_place) {
        return Err(Refusal::new("only new qcow2 images get a backing file: -B; use -O qcow2, without -n"));
    }
    asked.to.format = Some(asked.wish.format);
    if !asked.in_place {
        asked.wish.lock_with(asked.to.keys.first(), "--target-key")?;
    }
    if asked.wish.has_backing() {
        // Named by the user, not by an image.
        asked.to.gate = Gate::Any;
    }
    Ok(asked)
}

/// The id or name in what `-l` says.
fn snapshot_name(text: String) -> String {
    let cut = ["snapshot.id=", "snapshot.name="].iter().find_map(|key| text.strip_prefix(key)).map(str::to_owned);
    cut.unwrap_or(text)
}

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let mut asked = parse(options)?;
    let [from, to] = asked.files.clone();
    let format = asked.from.format_of(&from);
    if asked.snapshot.is_some() && format != Format::Qcow2 {
        return Err(Refusal::new(format!("only qcow2 images have snapshots: {}; leave -l out", from.display())));
    }
    let mut source = asked.from.open_at(&from, asked.snapshot.as_deref())?;
    interrupt::install().map_err(|e| Refusal::new(format!("no eventfd to be had, {}: this host", reason(&e))))?;
    asked.wish.size = Some(source.size());
    let device = fs::metadata(&to).is_ok_and(|m| !m.is_file());
    if asked.in_place || device {
        if device && asked.wish.format != Format::Raw {
            return Err(Refusal::new(format!("only raw disks go on a device: {}; use -O raw", to.display())));
        }
        return into(&asked, &mut source, &to, &to, false);
    }
    not_in_use(&from, &to)?;
    let keys = asked.to.keys.get(1..).unwrap_or_default().to_vec();
    let below = How { readonly: true, gate: Gate::Any, keys, ..How::default() };
    create::check_backing(&to, &mut asked.wish, below, false)?;
    let draft = Draft::beside(&to);
    let code = if asked.compress {
        packed(&asked, &mut source, &draft.0, &to)?
    } else {
        create::make(&draft.0, &asked.wish)?;
        into(&asked, &mut source, &draft.0, &to, true)?
    };
    if code == 0 {
        fs::rename(&draft.0, &to).map_err(|e| {
            Refusal::new(format!("the new image can't be put in its place, {}: {}", reason(&e), to.display()))
        })?;
    }
    Ok(code)
}

/// Copies the source onto the image at `path`, which messages call `name`.
fn into(asked: &Asked, source: &mut Disk, path: &Path, name: &Path, blank: bool) -> Result<u8, Refusal> {
    let mut target = asked.to.open(path)?;
    if target.size() < source.size() {
        return Err(Refusal::new(format!(
            "the target has {} bytes and the source {}: {}; make it larger first",
            target.size(),
            source.size(),
            name.display()
        )));
    }
    let progress = Progress::new(source.size(), asked.progress, asked.quiet);
    // What lies on a target that is not new, or below one, is no zeroes: all of the source is written.
    let sparse = if blank && !asked.wish.has_backing() { asked.sparse } else { 0 };
    let job = Job { sparse, ..job(asked, &progress) };
    if let Err(ended) = copy::copy(source, &mut target, &job) {
        return stopped(asked, name, ended);
    }
    let flush = |e| failed_at(name, 0, "the last flush", &e);
    Pump::new(&mut target, 1, 512).and_then(|mut pump| pump.one(Op::Flush, 0, 0)).map_err(flush)?;
    drop(target);
    settled(path, name)?;
    progress.finish();
    Ok(0)
}

/// Copies the source into a new compressed image at `path`, which messages call `name`.
fn packed(asked: &Asked, source: &mut Disk, path: &Path, name: &Path) -> Result<u8, Refusal> {
    let progress = Progress::new(source.size(), asked.progress, asked.quiet);
    let job = job(asked, &progress);
    let options = asked.wish.qcow2_options();
    let kind = (options.cluster_size, options.compression);
    let lazy = asked.to.cache == Cache::Unsafe;
    let made = offline::create_packed(path, &options, lazy, |packer| pack::pack(source, packer, kind, &job));
    match made {
        Ok(()) => {}
        Err(Failed::Copy(ended)) => return stopped(asked, name, ended),
        Err(Failed::Image(e)) => return Err(Refusal::new(e)),
    }
    settled(path, name)?;
    progress.finish();
    Ok(0)
}

/// What is to be copied, and by how many.
fn job<'p>(asked: &Asked, progress: &'p Progress) -> Job<'p> {
    let raw = asked.from.format_of(&asked.files[0]) == Format::Raw;
    let top = asked.wish.has_backing().then_some(1);
    Job { sparse: asked.sparse, full: asked.sparse == 0, threads: asked.threads, top, raw, progress }
}

fn failed_at(path: &Path, at: u64, what: &str, e: &std::io::Error) -> Refusal {
    Refusal::new(format!("{what} failed at {at}, {}: {}", reason(e), path.display()))
}

/// How the command ends when the copy did not come to its end.
fn stopped(asked: &Asked, name: &Path, ended: Ended) -> Result<u8, Refusal> {
    Err(match ended {
        Ended::Interrupted => return Ok(interrupt::CODE),
        Ended::Read(at, e) => failed_at(&asked.files[0], at, "reading", &e),
        Ended::Write(at, e) => failed_at(name, at, "writing", &e),
        Ended::Host(e) => Refusal::new(format!("the copy can't be made, {}: this host", reason(&e))),
    })
}

/// An image that takes another's place is durable first, whatever the cache mode: else a crash could lose both.
fn settled(path: &Path, name: &Path) -> Result<(), Refusal> {
    if path != name && name.exists() {
        let synced = fs::File::open(path).and_then(|file| file.sync_all());
        synced.map_err(|e| failed_at(name, 0, "the last flush", &e))?;
    }
    Ok(())
}

/// The image under construction; gone unless it was moved to its place.
struct Draft(PathBuf);

impl Draft {
    fn beside(target: &Path) -> Self {
        let name = target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let short: String = name.chars().take(60).collect();
        Self(target.with_file_name(format!(".{short}.{}.part", std::process::id())))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Not there any more when all went well.
        let _ = fs::remove_file(&self.0);
    }
}

/// Refuses a target that someone uses, the source itself included: it would be replaced under them.
fn not_in_use(from: &Path, to: &Path) -> Result<(), Refusal> {
    use std::os::unix::fs::MetadataExt;
    let Ok(there) = fs::metadata(to) else { return Ok(()) };
    if fs::metadata(from).is_ok_and(|m| (m.dev(), m.ino()) == (there.dev(), there.ino())) {
        return Err(Refusal::new(format!("source and target are one file: {}; choose another target", to.display())));
    }
    if there.len() >= 512 {
        How { format: Some(Format::Raw), ..How::default() }.open(to).map(drop)?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_makes_no_sense_is_refused() {
        let asked = |args: &[&str]| {
            let mut parser = lexopt::Parser::from_args(args);
            parse(&mut Options::new(&mut parser, "convert")).map_err(|r| r.message)
        };
        let good = asked(&["-O", "qcow2", "-S", "64k", "-m", "2", "a", "b"]).unwrap();
        assert_eq!((good.sparse, good.threads, good.to.format), (64 << 10, 2, Some(Format::Qcow2)));
        assert!(asked(&["a"]).unwrap_err().contains("an image and a target"));
        assert!(asked(&["-S", "100", "a", "b"]).unwrap_err().contains("multiple of 512"));
        assert!(asked(&["-c", "a", "b"]).unwrap_err().contains("only new qcow2 images can be compressed"));
        assert!(asked(&["-c", "-n", "-O", "qcow2", "a", "b"]).unwrap_err().contains("without -n"));
        assert!(asked(&["-B", "x", "-F", "raw", "a", "b"]).unwrap_err().contains("get a backing file"));
        let good = asked(&["-c", "-l", "snapshot.id=7", "-O", "qcow2", "-B", "x", "-F", "raw", "a", "b"]).unwrap();
        assert_eq!((good.compress, good.snapshot.as_deref(), good.wish.has_backing()), (true, Some("7"), true));
        assert_eq!(snapshot_name("daily".into()), "daily");
        assert!(asked(&["-O", "vmdk", "a", "b"]).unwrap_err().contains("use raw or qcow2"));
    }
}
