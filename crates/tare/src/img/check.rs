// SPDX-License-Identifier: Apache-2.0
//! `tare img check`: whether a qcow2 image's metadata is consistent, and its repair, as `qemu-img check` does.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use block::Format;
use block::qcow2::offline::{self, Image, Repair, Report};
use serde_json::{Map, Value, json};

use super::args::{Options, Refusal, Word};
use super::image::How;
use super::progress::Progress;

pub const HELP: &str = "\
usage: tare img check [-f FORMAT] [--output=human|json] [-p] [-q] [-r leaks|all | --repair] FILE

Checks a qcow2 image that nobody has open.

  -f FORMAT       qcow2, if the file's first bytes don't tell
  -p              progress, as percentages where no terminal shows a bar
  -q              no output, only the exit code
  -r leaks|all    repair leaked clusters, or everything that can be; --repair is -r all
  --output=json   as JSON

exit codes: 0 consistent, or so after the repair; 1 the check could not be done;
2 corruptions; 3 leaked clusters, no corruption; 63 the format can't be checked
";

const FAILED: u8 = 1;
const CORRUPT: u8 = 2;
const LEAKS: u8 = 3;
const UNCHECKABLE: u8 = 63;

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let mut how = How::default();
    let mut files: Vec<PathBuf> = Vec::new();
    let (mut json, mut progress, mut quiet, mut repair) = (false, false, false, None);
    while let Some(word) = options.next()? {
        match word {
            Word::Short('f') => how.take_format(options)?,
            Word::Short('p') => progress = true,
            Word::Short('q') => quiet = true,
            Word::Short('r') => {
                repair = Some(options.word("a repair", &[("leaks", Repair::Leaks), ("all", Repair::All)])?);
            }
            Word::Short('T') => how.take_cache(options)?,
            Word::Long(name) if name == "repair" => repair = Some(Repair::All),
            Word::Long(name) if name == "output" => {
                json = options.word("a kind of output", &[("human", false), ("json", true)])?;
            }
            Word::Short(_) | Word::Long(_) => return Err(options.unknown()),
            Word::File(path) => files.push(path),
        }
    }
    let file = options.one_file(files)?;
    if how.format_of(&file) != Format::Qcow2 && file.exists() {
        return Err(Refusal::with(UNCHECKABLE, format!("raw images have nothing to check: {}", file.display())));
    }
    let mut image = Image::open(&file, repair.is_some()).map_err(Refusal::new)?;
    let report = match repair {
        None => watched(&image, progress, quiet),
        Some(what) => image.repair(what),
    }
    .map_err(Refusal::new)?;
    if json {
        super::show(&format!("{:#}\n", as_json(&report, &file)));
    } else if !quiet {
        for message in &report.messages {
            // Standard error may be closed; the report goes on.
            let _ = writeln!(std::io::stderr(), "{message}");
        }
        super::show(&as_text(&report));
    }
    Ok(match &report {
        r if r.check_errors > 0 => FAILED,
        r if r.corruptions > 0 => CORRUPT,
        r if r.leaks > 0 => LEAKS,
        _ => 0,
    })
}

/// Checks, with a bar over the tables' bytes.
fn watched(image: &Image, progress: bool, quiet: bool) -> Result<Report, offline::Error> {
    let mut bar = None;
    let table = image.header().cluster_size();
    let mut last = 0;
    let report = image.check_telling(&mut |done, total| {
        bar.get_or_insert_with(|| Progress::new(total * table, progress, quiet)).add((done - last) * table);
        last = done;
    });
    bar.unwrap_or_else(|| Progress::new(0, progress, quiet)).finish();
    report
}

fn as_json(report: &Report, file: &Path) -> Value {
    let mut all = Map::new();
    all.insert("filename".into(), json!(file.to_string_lossy()));
    all.insert("format".into(), json!("qcow2"));
    all.insert("check-errors".into(), json!(report.check_errors));
    // As qemu-img: what is nought is left out.
    for (key, value) in [
        ("image-end-offset", report.image_end),
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("corruptions-fixed", report.corruptions_fixed),
        ("leaks-fixed", report.leaks_fixed),
        ("total-clusters", report.total_clusters),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
    ] {
        if value != 0 {
            all.insert(key.into(), json!(value));
        }
    }
    Value::Object(all)
}

fn as_text(report: &Report) -> String {
    let mut text = String::new();
    if report.corruptions_fixed + report.leaks_fixed > 0 {
        text += &format!(
            "The following inconsistencies were found and repaired:\n\n    {} leaked clusters\n    {} corruptions\n\n\
             Double checking the fixed image now...\n",
            report.leaks_fixed, report.corruptions_fixed
        );
    }
    if report.clean() {
        text += "No errors were found on the image.\n";
    }
    if report.corruptions > 0 {
        text += &format!(
            "\n{} errors were found on the image.\n\
             Data may be corrupted, or further writes to the image may corrupt it.\n",
            report.corruptions
        );
    }
    if report.leaks > 0 {
        text += &format!(
            "\n{} leaked clusters were found on the image.\n\
             This means waste of disk space, but no harm to data.\n",
            report.leaks
        );
    }
    if report.check_errors > 0 {
        text += &format!("\n{} internal errors have occurred during the check.\n", report.check_errors);
    }
    let (total, allocated) = (report.total_clusters, report.allocated_clusters);
    if total != 0 && allocated != 0 {
        let percent = |part: u64, of: u64| part as f64 * 100.0 / of as f64;
        text += &format!(
            "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters\n",
            percent(allocated, total),
            percent(report.fragmented_clusters, allocated),
            percent(report.compressed_clusters, allocated)
        );
    }
    if report.image_end > 0 {
        text += &format!("Image end offset: {}\n", report.image_end);
    }
    text
}
