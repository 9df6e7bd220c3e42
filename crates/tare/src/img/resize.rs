// SPDX-License-Identifier: Apache-2.0
//! `tare img resize`: makes an image longer or shorter, as `qemu-img resize` does.

use std::path::PathBuf;

use super::args::{self, Options, Refusal, Word};
use super::image::How;
use super::interrupt;
use crate::exit::reason;

pub const HELP: &str = "\
usage: tare img resize [-f FORMAT] [--shrink] [-q] [--backing=GATE] [--key=FILE] FILE [+|-]SIZE

Makes an image that nobody has open SIZE bytes long, or by SIZE longer or shorter. What
is added reads as zeroes.

  -f FORMAT   raw or qcow2; without it the file's first bytes tell
  --shrink    allow cutting off data
  -q          no output

exit codes: 0 done; 1 failed
";

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let mut how = How::default();
    let mut words: Vec<PathBuf> = Vec::new();
    let (mut shrink, mut quiet, mut less) = (false, false, None);
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f') => how.take_format(options)?,
            Word::Short('q') => quiet = true,
            // A size like -5M looks like options.
            Word::Short(digit @ '0'..='9') => less = Some(format!("{digit}{}", options.rest())),
            Word::Long(name) if name == "shrink" => shrink = true,
            Word::Long(name) if name == "backing" => how.take_gate(options)?,
            Word::Long(name) if name == "key" => how.take_key(options)?,
            Word::Short(_) | Word::Long(_) => return Err(options.unknown()),
            Word::File(path) => words.push(path),
        }
    }
    let (change, text) = match (less, words.len()) {
        (Some(text), 1) => (-1, text),
        (None, 2) => {
            let text = words.pop().map(|w| w.to_string_lossy().into_owned()).unwrap_or_default();
            text.strip_prefix('+').map_or((0, text.clone()), |more| (1, more.to_owned()))
        }
        (_, n) => return Err(options.files(n, "an image and a size")),
    };
    let by = args::size(&text).ok_or_else(|| {
        Refusal::new(format!(
            "`{text}` is not a size: command line; write bytes, or a number with k, M, G or T, such as 512M"
        ))
    })?;
    let file = words.pop().unwrap_or_default();
    let mut disk = how.open(&file)?;
    let place = file.display();
    let old = disk.size();
    let new = match change {
        0 => Some(by),
        1 => old.checked_add(by),
        _ => old.checked_sub(by),
    };
    let new = new
        .and_then(|n| n.checked_next_multiple_of(512))
        .filter(|n| *n >= 512 && i64::try_from(*n).is_ok())
        .ok_or_else(|| {
            Refusal::new(format!("the image would have no size that can be: {place}; it has {old} bytes now"))
        })?;
    if new < old && !shrink {
        return Err(Refusal::new(format!(
            "{} bytes would be cut off: {place}; use --shrink if they may be",
            old - new
        )));
    }
    if new != old {
        // The first Ctrl-C waits for the end: half a resize would leave clusters that nobody uses.
        interrupt::install().map_err(|e| Refusal::new(format!("no eventfd to be had, {}: this host", reason(&e))))?;
        disk.resize(new).map_err(|e| Refusal::new(format!("the image can't be resized, {}: {place}", reason(&e))))?;
    }
    if !quiet {
        super::show("Image resized.\n");
    }
    Ok(0)
}
