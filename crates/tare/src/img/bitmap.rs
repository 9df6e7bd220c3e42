// SPDX-License-Identifier: Apache-2.0
//! `tare img bitmap`: persistent dirty bitmaps of a qcow2 image, as `qemu-img bitmap` handles them.

use std::path::PathBuf;

use block::qcow2::offline::{Error, Image};

use super::args::{Options, Refusal, Word};
use super::image::How;

pub const HELP: &str = "\
usage: tare img bitmap (--merge SOURCE | --add | --remove | --clear | --enable |
                       --disable)... [-b FILE2] [-g GRANULARITY] FILE BITMAP

Persistent dirty bitmaps of a qcow2 image that nobody has open. The actions are done in
the order they are given in.

  --add            make an empty one; enabled, unless --disable follows
  --remove         delete it
  --clear          empty it
  --enable         writers keep it from now on
  --disable        they don't
  --merge SOURCE   adds what SOURCE marks
  -b FILE2         the image that SOURCE is in [FILE]
  -g GRANULARITY   bytes of one bit, for --add: a power of two, 512 to 2G [64k]

exit codes: 0 done; 1 failed
";

enum Action {
    Add,
    Remove,
    Clear,
    Enable(bool),
    Merge(String),
}

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let mut actions = Vec::new();
    let mut words: Vec<PathBuf> = Vec::new();
    let (mut granularity, mut other) = (None, None);
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f' | 'F') => How::default().take_format(options)?,
            Word::Short('g') => granularity = Some(options.size()?),
            Word::Short('b') => other = Some(PathBuf::from(options.value()?)),
            Word::Long(name) => actions.push(match name.as_str() {
                "add" => Action::Add,
                "remove" => Action::Remove,
                "clear" => Action::Clear,
                "enable" => Action::Enable(true),
                "disable" => Action::Enable(false),
                "merge" => Action::Merge(options.text()?),
                _ => return Err(options.unknown()),
            }),
            Word::Short(_) => return Err(options.unknown()),
            Word::File(path) => words.push(path),
        }
    }
    let [file, name] =
        <[PathBuf; 2]>::try_from(words).map_err(|w| options.files(w.len(), "an image and the bitmap's name"))?;
    if actions.is_empty() {
        return Err(Refusal::new(
            "nothing to do: command line; say --add, --remove, --clear, --enable, --disable or --merge",
        ));
    }
    if granularity.is_some() && !actions.iter().any(|a| matches!(a, Action::Add)) {
        return Err(Refusal::new("-g without --add: command line; only new bitmaps have their granularity set"));
    }
    let name = name.to_string_lossy();
    let mut image = Image::open(&file, true).map_err(Refusal::new)?;
    for action in actions {
        act(&mut image, &name, &action, granularity, other.as_ref()).map_err(Refusal::new)?;
    }
    Ok(0)
}

fn act(
    image: &mut Image,
    name: &str,
    action: &Action,
    granularity: Option<u64>,
    other: Option<&PathBuf>,
) -> Result<(), Error> {
    match (action, other) {
        (Action::Add, _) => image.bitmap_add(name, granularity, true),
        (Action::Remove, _) => image.bitmap_remove(name),
        (Action::Clear, _) => image.bitmap_clear(name),
        (Action::Enable(on), _) => image.bitmap_enable(name, *on),
        (Action::Merge(source), None) => image.bitmap_merge(source, name),
        (Action::Merge(source), Some(path)) => {
            let from = Image::open(path, false)?;
            let bits = from.bitmap_bits(source)?;
            let granularity = from.bitmaps()?.iter().find(|b| b.name == *source).map_or(0, |b| 1 << b.granularity_bits);
            image.bitmap_merge_bits(&bits, granularity, name)
        }
    }
}
