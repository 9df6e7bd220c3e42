// SPDX-License-Identifier: Apache-2.0
//! `tare img info`: what an image is, in the words and the JSON of `qemu-img info`.

use std::fmt::Write;
use std::fs::{self, File};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use block::Format;
use block::qcow2::format::bitmap;
use block::qcow2::format::header::{Compression, Crypt, Header};
use block::qcow2::offline::Image;
use serde_json::{Map, Value, json};

use super::args::{Options, Refusal, Word};
use super::image::{How, chain, resolved, word};
use super::snapshot;
use crate::exit::reason;

pub const HELP: &str = "\
usage: tare img info [-f FORMAT] [--output=human|json] [--backing-chain] FILE

Says what an image is: format, sizes, backing file, snapshots, bitmaps, options.

  -f FORMAT         raw or qcow2; without it the file's first bytes tell
  --backing-chain   the images below too
  --output=json     as JSON

exit codes: 0 done; 1 an image can't be opened
";

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let mut how = How::default();
    let mut files = Vec::new();
    let (mut json, mut all) = (false, false);
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f') => how.take_format(options)?,
            Word::Long(name) if name == "output" => {
                json = options.word("a kind of output", &[("human", false), ("json", true)])?;
            }
            Word::Long(name) if name == "backing-chain" => all = true,
            Word::Short(_) | Word::Long(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    let file = options.one_file(files)?;
    let format = how.format_of(&file);
    let chain = if all { chain(&file, format)? } else { vec![(file, format)] };
    let facts = chain.into_iter().map(|(path, format)| Facts::of(path, format)).collect::<Result<Vec<_>, _>>()?;
    let text = match (json, facts.as_slice()) {
        (true, [one]) if !all => format!("{:#}\n", one.json()),
        (true, many) => format!("{:#}\n", Value::Array(many.iter().map(Facts::json).collect())),
        (false, many) => many.iter().map(Facts::human).collect::<Vec<_>>().join("\n"),
    };
    super::show(&text);
    Ok(0)
}

/// What is known of one image.
struct Facts {
    path: PathBuf,
    size: u64,
    /// Bytes that the file takes on its file system.
    actual: u64,
    /// Present for qcow2.
    image: Option<Image>,
}

impl Facts {
    fn of(path: PathBuf, format: Format) -> Result<Self, Refusal> {
        let failed = |e: std::io::Error| {
            Refusal::new(format!("the image can't be opened, {}: {}; check the path", reason(&e), path.display()))
        };
        let meta = fs::metadata(&path).map_err(failed)?;
        if meta.is_dir() {
            return Err(Refusal::new(format!("a folder is no image: {}; give the path of one", path.display())));
        }
        let actual = meta.blocks() * 512;
        if format == Format::Qcow2 {
            let image = Image::open(&path, false).map_err(Refusal::new)?;
            return Ok(Self { size: image.header().size, path, actual, image: Some(image) });
        }
        // Of a block device too.
        let size = if meta.is_file() {
            meta.len()
        } else {
            File::open(&path).and_then(|mut f| f.seek(SeekFrom::End(0))).map_err(failed)?
        };
        Ok(Self { path, size: size.next_multiple_of(512), actual, image: None })
    }

    fn format(&self) -> &'static str {
        word(if self.image.is_some() { Format::Qcow2 } else { Format::Raw })
    }

    fn json(&self) -> Value {
        let mut all = Map::new();
        let mut put = |key: &str, value: Value| all.insert(key.to_owned(), value);
        put("filename", json!(self.path.to_string_lossy()));
        put("format", json!(self.format()));
        put("virtual-size", json!(self.size));
        put("actual-size", json!(self.actual));
        let Some(image) = &self.image else {
            put("dirty-flag", json!(false));
            return Value::Object(all);
        };
        let header = image.header();
        put("dirty-flag", json!(header.dirty()));
        put("cluster-size", json!(header.cluster_size()));
        if header.crypt != Crypt::None {
            put("encrypted", json!(true));
        }
        if let Some(name) = &header.backing {
            put("backing-filename", json!(name.to_string_lossy()));
            put("full-backing-filename", json!(resolved(&self.path, Path::new(name)).to_string_lossy()));
        }
        if let Some(format) = &header.extensions.backing_format {
            put("backing-filename-format", json!(format));
        }
        let list = image.snapshots().unwrap_or_default();
        if !list.is_empty() {
            put("snapshots", list.iter().map(snapshot::json).collect());
        }
        put(
            "format-specific",
            json!({
                "type": "qcow2",
                "data": specific(image).into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>(),
            }),
        );
        Value::Object(all)
    }

    fn human(&self) -> String {
        let mut text = format!(
            "image: {}\nfile format: {}\nvirtual size: {} ({} bytes)\ndisk size: {}\n",
            self.path.display(),
            self.format(),
            human_size(self.size),
            self.size,
            human_size(self.actual)
        );
        let Some(image) = &self.image else { return text };
        let header = image.header();
        if header.crypt != Crypt::None {
            text += "encrypted: yes\n";
        }
        // Writing to a String can't fail.
        let _ = writeln!(text, "cluster_size: {}", header.cluster_size());
        if let Some(name) = &header.backing {
            let full = resolved(&self.path, Path::new(name));
            let _ = write!(text, "backing file: {}", name.to_string_lossy());
            let path =
                if full.as_os_str() == name { String::new() } else { format!(" (actual path: {})", full.display()) };
            let _ = writeln!(text, "{path}");
        }
        if let Some(format) = &header.extensions.backing_format {
            let _ = writeln!(text, "backing file format: {format}");
        }
        let list = image.snapshots().unwrap_or_default();
        if !list.is_empty() {
            text += &snapshot::table(list);
        }
        text += "Format specific information:\n";
        for (key, value) in specific(image) {
            tell(&mut text, &key.replace('-', " "), &value, 1);
        }
        text
    }
}

/// What only qcow2 images have, in qemu-img's order.
fn specific(image: &Image) -> Vec<(&'static str, Value)> {
    let header: &Header = image.header();
    let mut all = vec![("compat", json!(if header.version == 2 { "0.10" } else { "1.1" }))];
    let kind = if header.compression == Compression::Zstd { "zstd" } else { "zlib" };
    all.push(("compression-type", json!(kind)));
    if header.version >= 3 {
        all.push(("lazy-refcounts", json!(header.lazy_refcounts())));
        let bitmaps = image.bitmaps().unwrap_or_default();
        if !bitmaps.is_empty() {
            all.push(("bitmaps", bitmaps.iter().map(bitmap_facts).collect()));
        }
    }
    all.push(("refcount-bits", json!(header.width.bits())));
    if header.version >= 3 {
        if let Some(name) = &header.extensions.data_file {
            all.push(("data-file", json!(name.to_string_lossy())));
            all.push(("data-file-raw", json!(header.raw_data_file())));
        }
        all.push(("corrupt", json!(header.corrupt())));
        all.push(("extended-l2", json!(header.layout().extended)));
    }
    all
}

fn bitmap_facts(map: &bitmap::Bitmap) -> Value {
    let flags: Vec<&str> = [(bitmap::IN_USE, "in-use"), (bitmap::AUTO, "auto")]
        .into_iter()
        .filter(|(bit, _)| map.flags & bit != 0)
        .map(|(_, word)| word)
        .collect();
    json!({ "flags": flags, "name": map.name, "granularity": 1u64 << map.granularity_bits })
}

/// One fact on lines of its own, indented by its depth.
fn tell(text: &mut String, key: &str, value: &Value, depth: usize) {
    let indent = "    ".repeat(depth);
    let _ = match value {
        Value::Array(items) => {
            let _ = writeln!(text, "{indent}{key}:");
            for (i, item) in items.iter().enumerate() {
                tell(text, &format!("[{i}]"), item, depth + 1);
            }
            Ok(())
        }
        Value::Object(members) => {
            let _ = writeln!(text, "{indent}{key}:");
            for name in ["flags", "name", "granularity"] {
                if let Some(member) = members.get(name) {
                    tell(text, name, member, depth + 1);
                }
            }
            Ok(())
        }
        Value::String(word) => writeln!(text, "{indent}{key}: {word}"),
        other => writeln!(text, "{indent}{key}: {other}"),
    };
}

/// Bytes as qemu-img prints them: three digits and a unit.
pub fn human_size(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit < 6 {
        value /= 1024.0;
        unit += 1;
    }
    let places = match value {
        v if v >= 99.95 || v == 0.0 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 => 2,
        _ => 3,
    };
    let digits = format!("{value:.places$}");
    let digits = if digits.contains('.') { digits.trim_end_matches('0').trim_end_matches('.') } else { &digits };
    format!("{digits} {}B", UNITS.get(unit).unwrap_or(&""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (1024, "1 KiB"),
            (200_704, "196 KiB"),
            (10 << 20, "10 MiB"),
            (3 << 29, "1.5 GiB"),
            (1_234_567, "1.18 MiB"),
            (1 << 62, "4 EiB"),
        ] {
            assert_eq!(human_size(bytes), text, "{bytes}");
        }
    }
}
