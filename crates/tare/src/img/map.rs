// SPDX-License-Identifier: Apache-2.0
//! `tare img map`: how the bytes of a disk are kept, as `qemu-img map` tells it.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use block::{Disk, Extent, ExtentKind, Format};

use super::args::{Options, Refusal, Word};
use super::image::{How, chain};
use crate::exit::reason;

pub const HELP: &str = "\
usage: tare img map [-f FORMAT] [--backing=GATE] [--key=FILE] [--start-offset=N] [--max-length=N]
                    [--output=human|json] FILE

Lists the runs of a disk's bytes: where data lies in which file of the chain, and, as
JSON, what reads as zeroes too.

exit codes: 0 done; 1 the image can't be opened or read, or (human output) holds
compressed or encrypted data, which lies nowhere as it is
";

/// Extents are asked for so many bytes at a time.
const WINDOW: u64 = 16 << 30;

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let mut how = How { readonly: true, ..How::default() };
    let mut files = Vec::new();
    let (mut json, mut start, mut most) = (false, 0, u64::MAX);
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f') => how.take_format(options)?,
            Word::Long(name) => match name.as_str() {
                "output" => json = options.word("a kind of output", &[("human", false), ("json", true)])?,
                "start-offset" => start = options.size()?,
                "backing" => how.take_gate(options)?,
                "key" => how.take_key(options)?,
                "max-length" => most = options.size()?,
                _ => return Err(options.unknown()),
            },
            Word::Short(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    let file = options.one_file(files)?;
    let mut disk = how.open(&file)?;
    if start > disk.size() {
        return Err(Refusal::new(format!("the disk ends at {}: --start-offset; use less", disk.size())));
    }
    let end = disk.size().min(start.saturating_add(most));
    let runs = extents(&mut disk, start, end).map_err(|e| {
        Refusal::new(format!("the image can't be mapped, {}: {}; see `tare img check`", reason(&e), file.display()))
    })?;
    drop(disk);
    super::show(&if json { as_json(&runs) } else { as_table(&runs, &chain(&file, how.format_of(&file))?)? });
    Ok(0)
}

/// All extents of a range, neighbours that mean the same joined.
fn extents(disk: &mut Disk, start: u64, end: u64) -> std::io::Result<Vec<Extent>> {
    let mut runs: Vec<Extent> = Vec::new();
    let mut at = start;
    while at < end {
        let len = WINDOW.min(end - at);
        for extent in disk.extents(at, len)? {
            match runs.last_mut() {
                Some(last) if joins(last, &extent) => last.len += extent.len,
                _ => runs.push(extent),
            }
        }
        at += len;
    }
    Ok(runs)
}

fn joins(a: &Extent, b: &Extent) -> bool {
    let places = match (a.host_offset, b.host_offset) {
        (Some(x), Some(y)) => x.checked_add(a.len) == Some(y),
        (None, None) => true,
        _ => false,
    };
    (a.kind, a.depth, a.compressed) == (b.kind, b.depth, b.compressed) && a.offset + a.len == b.offset && places
}

fn as_json(runs: &[Extent]) -> String {
    let mut text = String::from("[");
    for (i, run) in runs.iter().enumerate() {
        let data = run.kind == ExtentKind::Data;
        let present = run.kind != ExtentKind::Hole || run.host_offset.is_some();
        let offset = run.host_offset.map(|at| format!(", \"offset\": {at}")).unwrap_or_default();
        // Writing to a String can't fail.
        let _ = write!(
            text,
            "{}{{ \"start\": {}, \"length\": {}, \"depth\": {}, \"present\": {present}, \"zero\": {}, \"data\": {data}{offset}}}",
            if i == 0 { "" } else { ",\n" },
            run.offset,
            run.len,
            run.depth,
            !data,
        );
    }
    text + "]\n"
}

fn as_table(runs: &[Extent], chain: &[(PathBuf, Format)]) -> Result<String, Refusal> {
    let mut text = format!("{:<16}{:<16}{:<16}File\n", "Offset", "Length", "Mapped to");
    let hex = |n: u64| if n == 0 { "0".to_owned() } else { format!("{n:#x}") };
    for run in runs.iter().filter(|run| run.kind == ExtentKind::Data) {
        let Some(at) = run.host_offset.filter(|_| !run.compressed) else {
            return Err(Refusal::new(
                "compressed or encrypted clusters lie nowhere as they are: map; use --output=json",
            ));
        };
        let file = chain.get(run.depth as usize).map_or_else(|| Path::new("?"), |(path, _)| path.as_path());
        let _ = writeln!(text, "{:<16}{:<16}{:<16}{}", hex(run.offset), hex(run.len), hex(at), file.display());
    }
    Ok(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn run(offset: u64, len: u64, kind: ExtentKind, host_offset: Option<u64>) -> Extent {
        Extent { offset, len, kind, depth: 0, host_offset, compressed: false }
    }

    #[test]
    fn the_words_are_qemu_imgs() {
        let runs = [
            run(0, 4096, ExtentKind::Data, Some(0)),
            run(4096, 512, ExtentKind::Hole, Some(4096)),
            run(4608, 512, ExtentKind::Hole, None),
        ];
        assert_eq!(
            as_json(&runs),
            "[{ \"start\": 0, \"length\": 4096, \"depth\": 0, \"present\": true, \"zero\": false, \"data\": true, \"offset\": 0},\n\
             { \"start\": 4096, \"length\": 512, \"depth\": 0, \"present\": true, \"zero\": true, \"data\": false, \"offset\": 4096},\n\
             { \"start\": 4608, \"length\": 512, \"depth\": 0, \"present\": false, \"zero\": true, \"data\": false}]\n"
        );
        assert_eq!(
            as_table(&runs, &[("a.raw".into(), Format::Raw)]).unwrap(),
            "Offset          Length          Mapped to       File\n0               0x1000          0               a.raw\n"
        );
        let packed = Extent { compressed: true, host_offset: None, ..runs[0] };
        assert!(as_table(&[packed], &[]).is_err());
        assert!(joins(&runs[0], &run(4096, 1, ExtentKind::Data, Some(4096))));
        assert!(!joins(&runs[0], &run(4096, 1, ExtentKind::Data, Some(9))));
    }
}
