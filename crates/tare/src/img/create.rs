// SPDX-License-Identifier: Apache-2.0
//! `tare img create`: new images, with the options of `qemu-img create`. `convert` makes its target here too.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use block::qcow2::format::header::Compression;
use block::qcow2::offline::{self, CreateOptions, Preallocation};
use block::{Format, Secret};

use super::args::{self, Options, Refusal, Word};
use super::image::{FORMATS, Gate, How, resolved, word};
use super::interrupt;
use crate::exit::reason;

pub const HELP: &str = "\
usage: tare img create [-f FORMAT] [-b BACKING -F FORMAT] [-o KEY=VALUE,...] [-q] [-u]
                       [--key=FILE] [--backing-key=FILE] FILE [SIZE]

Makes an image of SIZE bytes (a number, perhaps with k, M, G or T). With a backing file
the size may be left out: it is the backing file's.

  -f FORMAT    raw or qcow2 [raw]
  -b BACKING   what unwritten parts show; relative names start from FILE's folder
  -F FORMAT    of BACKING, needed with it
  -u           BACKING need not exist
  -q           no output
  -o KEY=VALUE,...
     raw:      size, preallocation=off|falloc|full
     qcow2:    size, cluster_size, refcount_bits, compat=0.10|1.1, extended_l2=on|off,
               lazy_refcounts=on|off, compression_type=zlib|zstd, data_file,
               data_file_raw=on|off, backing_file, backing_fmt,
               preallocation=off|metadata|falloc|full,
               encrypt.format=luks (with --key), encrypt.iter-time=MILLISECONDS
  --key=FILE   holds the new image's passphrase, and nothing else
  --backing-key=FILE  holds BACKING's

exit codes: 0 done; 1 failed; 130 interrupted, with no FILE left behind
";

/// What a new image is to be.
#[derive(Clone, Debug)]
pub struct Wish {
    /// `-f`, or `-O` of `convert`.
    pub format: Format,
    /// Bytes.
    pub size: Option<u64>,
    /// Everything else.
    options: CreateOptions,
    /// A qcow2 option was given.
    qcow2: Option<String>,
    /// It is to be encrypted.
    encrypt: bool,
}

impl Default for Wish {
    fn default() -> Self {
        Self { format: Format::Raw, size: None, options: CreateOptions::default(), qcow2: None, encrypt: false }
    }
}

impl Wish {
    /// Takes the value of `-o`.
    pub fn take(&mut self, text: &str) -> Result<(), Refusal> {
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, "on"));
            self.set(key, value)?;
        }
        Ok(())
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), Refusal> {
        let bad = |want: &str| Refusal::new(format!("`{value}` is not what {key} takes: -o; use {want}"));
        let size = || args::size(value).ok_or_else(|| bad("bytes, or a number with k, M, G or T"));
        let on = || match value {
            "on" => Ok(true),
            "off" => Ok(false),
            _ => Err(bad("on or off")),
        };
        if !matches!(key, "size" | "preallocation") {
            self.qcow2.get_or_insert_with(|| key.to_owned());
        }
        let o = &mut self.options;
        match key {
            "size" => self.size = Some(size()?),
            "cluster_size" => o.cluster_size = size()?,
            "refcount_bits" => o.refcount_bits = value.parse().map_err(|_| bad("1, 2, 4, 8, 16, 32 or 64"))?,
            "compat" => {
                o.version = match value {
                    "0.10" | "v2" => 2,
                    "1.1" | "v3" => 3,
                    _ => return Err(bad("0.10 or 1.1")),
                }
            }
            "extended_l2" => o.extended_l2 = on()?,
            "lazy_refcounts" => o.lazy_refcounts = on()?,
            "compression_type" => {
                o.compression = match value {
                    "zlib" => Compression::Zlib,
                    "zstd" => Compression::Zstd,
                    _ => return Err(bad("zlib or zstd")),
                }
            }
            "data_file" => o.data_file = Some(value.into()),
            "data_file_raw" => o.data_file_raw = on()?,
            "backing_file" => o.backing = Some(value.into()),
            "backing_fmt" => o.backing_format = Some(value.to_owned()),
            "encrypt.format" if value == "luks" => self.encrypt = true,
            "encrypt.format" => return Err(bad("luks")),
            // Not measured: about a thousand rounds of key derivation take a millisecond.
            "encrypt.iter-time" => {
                let rounds = value.parse::<u32>().ok().and_then(|ms| ms.checked_mul(1000));
                o.rounds = rounds.filter(|n| *n > 0).ok_or_else(|| bad("milliseconds, such as 1000"))?;
            }
            "preallocation" => {
                o.preallocation = match value {
                    "off" => Preallocation::Off,
                    "metadata" => Preallocation::Metadata,
                    "falloc" => Preallocation::Falloc,
                    "full" => Preallocation::Full,
                    _ => return Err(bad("off, metadata, falloc or full")),
                }
            }
            _ => return Err(Refusal::new(format!("unknown option `{key}`: -o; see `tare img create --help`"))),
        }
        Ok(())
    }

    /// Encrypts the new image with `key`, which the flag `flag` gave, if it is to be encrypted.
    ///
    /// # Errors
    /// One of the two is missing.
    pub fn lock_with(&mut self, key: Option<&Secret>, flag: &str) -> Result<(), Refusal> {
        match (self.encrypt, key) {
            (true, None) => Err(Refusal::new(format!(
                "no passphrase for the new image: -o encrypt.format=luks; name a file that holds it with {flag}=FILE"
            ))),
            (false, Some(_)) => Err(Refusal::new(format!(
                "the new image is not to be encrypted: {flag}; say -f qcow2 (or -O qcow2) and -o encrypt.format=luks, or leave it out"
            ))),
            (_, key) => {
                self.options.encryption = key.cloned();
                Ok(())
            }
        }
    }

    /// Whether the new image stands on another.
    pub fn has_backing(&self) -> bool {
        self.options.backing.is_some()
    }

    /// Makes the new image stand on `name`.
    pub fn stand_on(&mut self, name: OsString) {
        self.qcow2.get_or_insert_with(|| "-b".into());
        self.options.backing = Some(name);
    }

    /// The format of what the new image stands on.
    pub fn backing_format(&mut self, format: Format) {
        self.options.backing_format = Some(word(format).to_owned());
    }

    /// What a qcow2 image is to be.
    pub fn qcow2_options(&self) -> CreateOptions {
        CreateOptions { size: self.size.unwrap_or(0), ..self.options.clone() }
    }
}

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let mut wish = Wish::default();
    let mut files = Vec::new();
    let (mut quiet, mut unchecked) = (false, false);
    let (mut own, mut below) = (How::default(), How { readonly: true, gate: Gate::Any, ..How::default() });
    while let Some(next) = options.next()? {
        match next {
            Word::Short('f') => wish.format = options.word("an image format that tare knows", FORMATS)?,
            Word::Short('o') => wish.take(&options.text()?)?,
            Word::Short('b') => wish.stand_on(options.value()?),
            Word::Short('F') => wish.backing_format(options.word("an image format that tare knows", FORMATS)?),
            Word::Short('q') => quiet = true,
            Word::Short('u') => unchecked = true,
            Word::Long(name) if name == "key" => own.take_key(options)?,
            Word::Long(name) if name == "backing-key" => below.take_key(options)?,
            Word::Short(_) | Word::Long(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    let path = match files.len() {
        1 | 2 => files.remove(0),
        n => return Err(options.files(n, "an image and its size")),
    };
    if let Some(size) = files.pop() {
        let text = size.to_string_lossy();
        let bytes = args::size(&text).ok_or_else(|| {
            Refusal::new(format!(
                "`{text}` is not a size: command line; write bytes, or a number with k, M, G or T, such as 512M"
            ))
        })?;
        wish.size = Some(bytes);
    }
    wish.lock_with(own.keys.first(), "--key")?;
    check_backing(&path, &mut wish, below, unchecked)?;
    if wish.size.is_none() {
        return Err(Refusal::new(format!("no size: {}; say one, such as 10G", path.display())));
    }
    if wish.options.preallocation != Preallocation::Off {
        gone_if_interrupted(&path)?;
    }
    make(&path, &wish)?;
    if !quiet {
        super::show(&announcement(&path, &wish));
    }
    Ok(0)
}

/// From now on a signal removes what is being made, which may take long, and ends the process.
fn gone_if_interrupted(path: &Path) -> Result<(), Refusal> {
    let failed = |e| Refusal::new(format!("no signal can be waited for, {}: this host", reason(&e)));
    interrupt::install().map_err(failed)?;
    let path = path.to_owned();
    let watch = move || {
        while !interrupt::asked() {
            std::thread::sleep(Duration::from_millis(20));
        }
        if fs::metadata(&path).is_ok_and(|m| m.is_file()) {
            let _ = fs::remove_file(&path);
        }
        std::process::exit(interrupt::CODE.into());
    };
    std::thread::Builder::new().name("signals".into()).spawn(watch).map(drop).map_err(failed)
}

/// Looks at the backing file: it must open, and lends its size.
///
/// # Errors
/// One line: no format, or a file that can't be opened.
pub fn check_backing(path: &Path, wish: &mut Wish, mut below: How, unchecked: bool) -> Result<(), Refusal> {
    let Some(backing) = &wish.options.backing else { return Ok(()) };
    let Some(format) = &wish.options.backing_format else {
        return Err(Refusal::new(
            "the backing file's format is not said: command line; say it with -F raw or -F qcow2",
        ));
    };
    below.format = FORMATS.iter().find(|(word, _)| word == format).map(|(_, f)| *f);
    if unchecked {
        return Ok(());
    }
    let file = resolved(path, Path::new(backing));
    let disk = below.open(&file)?;
    wish.size.get_or_insert(disk.size());
    Ok(())
}

/// Makes the image; one that is there already is overwritten unless someone has it open.
///
/// # Errors
/// One line.
pub fn make(path: &Path, wish: &Wish) -> Result<(), Refusal> {
    let size = wish.size.unwrap_or(0);
    match wish.format {
        Format::Qcow2 => offline::create(path, &wish.qcow2_options()).map_err(Refusal::new),
        Format::Raw => match &wish.qcow2 {
            Some(key) => Err(Refusal::new(format!(
                "raw images have no option `{key}`: command line; leave it out, or use qcow2"
            ))),
            None => make_raw(path, size, wish.options.preallocation),
        },
    }
}

fn make_raw(path: &Path, size: u64, preallocation: Preallocation) -> Result<(), Refusal> {
    let failed =
        |e: std::io::Error| Refusal::new(format!("the image can't be made, {}: {}", reason(&e), path.display()));
    if preallocation == Preallocation::Metadata {
        return Err(Refusal::new("raw images have no metadata: -o preallocation; use off, falloc or full"));
    }
    if fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() >= 512) {
        // Locked by a guest, or another tool: not ours to empty.
        How { format: Some(Format::Raw), ..How::default() }.open(path).map(drop)?;
    }
    let file = File::options().write(true).create(true).truncate(true).open(path).map_err(failed)?;
    let size = size.next_multiple_of(512);
    file.set_len(size).map_err(failed)?;
    if preallocation != Preallocation::Off {
        // Written zeroes are reserved space on every file system; what reserving alone saves is time.
        let zeroes = vec![0; 1 << 20];
        let mut at = 0;
        while at < size {
            let len = (size - at).min(zeroes.len() as u64);
            file.write_all_at(zeroes.get(..len as usize).unwrap_or_default(), at).map_err(failed)?;
            at += len;
        }
    }
    Ok(())
}

/// What `qemu-img` says.
fn announcement(path: &Path, wish: &Wish) -> String {
    let size = wish.size.unwrap_or(0).next_multiple_of(512);
    let mut text = format!("Formatting '{}', fmt={}", path.display(), word(wish.format));
    if wish.format == Format::Raw {
        return text + &format!(" size={size}\n");
    }
    let o = &wish.options;
    let switch = |on: bool| if on { "on" } else { "off" };
    let compression = if o.compression == Compression::Zstd { "zstd" } else { "zlib" };
    text += &format!(" cluster_size={} extended_l2={}", o.cluster_size, switch(o.extended_l2));
    text += &format!(" compression_type={compression} size={size}");
    if let (Some(backing), Some(format)) = (&o.backing, &o.backing_format) {
        text += &format!(" backing_file={} backing_fmt={format}", backing.display());
    }
    text + &format!(" lazy_refcounts={} refcount_bits={}\n", switch(o.lazy_refcounts), o.refcount_bits)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::super::image::looked_for;
    use super::*;

    #[test]
    fn options_are_read_and_the_wrong_ones_named() {
        let mut wish = Wish { format: Format::Qcow2, ..Wish::default() };
        wish.take("cluster_size=2M,extended_l2,lazy_refcounts=off,compat=1.1,size=1.5G").unwrap();
        assert_eq!((wish.options.cluster_size, wish.size), (2 << 20, Some(3 << 29)));
        assert!(wish.options.extended_l2 && !wish.options.lazy_refcounts);
        let says = |text: &str| Wish::default().take(text).unwrap_err().message;
        assert!(says("colour=red").contains("unknown option `colour`"));
        assert!(says("compat=7").contains("use 0.10 or 1.1"));
        assert!(says("extended_l2=perhaps").contains("use on or off"));
    }

    #[test]
    fn raw_images_are_holes_unless_asked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.raw");
        make(&path, &Wish { size: Some(1_000_000), ..Wish::default() }).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().len(), 1_000_448);
        assert_eq!(looked_for(&path), Format::Raw);
        let mut wish = Wish { size: Some(512), ..Wish::default() };
        wish.take("cluster_size=4k").unwrap();
        assert!(make(&path, &wish).unwrap_err().message.contains("no option `cluster_size`"));
    }
}
