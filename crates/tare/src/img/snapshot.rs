// SPDX-License-Identifier: Apache-2.0
//! `tare img snapshot`: internal snapshots of a qcow2 image, as `qemu-img snapshot` handles them.

use std::fmt::Write;

use block::Format;
use block::qcow2::format::snapshot::Snapshot;
use block::qcow2::offline::Image;
use serde_json::{Value, json};

use super::args::{Options, Refusal, Word};
use super::image::How;
use super::info::human_size;

pub const HELP: &str = "\
usage: tare img snapshot [-q] [-l | -a NAME | -c NAME | -d NAME] FILE

Internal snapshots of a qcow2 image that nobody has open.

  -l        list them (what happens without any of these)
  -c NAME   take one
  -a NAME   go back to one; what was written since is lost
  -d NAME   delete one
  -q        no output

exit codes: 0 done; 1 failed, with nothing changed
";

enum Action {
    List,
    Apply(String),
    Create(String),
    Delete(String),
}

/// See [`HELP`].
pub fn run(options: &mut Options<'_>) -> Result<u8, Refusal> {
    let mut action = None;
    let mut files = Vec::new();
    while let Some(word) = options.next()? {
        let next = match word {
            Word::Short('l') => Action::List,
            Word::Short('a') => Action::Apply(options.text()?),
            Word::Short('c') => Action::Create(options.text()?),
            Word::Short('d') => Action::Delete(options.text()?),
            Word::Short('q') => continue,
            Word::Short('f') => {
                How::default().take_format(options)?;
                continue;
            }
            Word::Short(_) | Word::Long(_) => return Err(options.unknown()),
            Word::File(path) => {
                files.push(path);
                continue;
            }
        };
        if action.replace(next).is_some() {
            return Err(Refusal::new("more than one of -l, -a, -c and -d: command line; give one"));
        }
    }
    let file = options.one_file(files)?;
    if How::default().format_of(&file) != Format::Qcow2 && file.exists() {
        return Err(Refusal::new(format!("only qcow2 images have snapshots: {}; convert it first", file.display())));
    }
    let action = action.unwrap_or(Action::List);
    let mut image = Image::open(&file, !matches!(action, Action::List)).map_err(Refusal::new)?;
    match action {
        Action::List => {
            let list = image.snapshots().map_err(Refusal::new)?;
            if !list.is_empty() {
                super::show(&table(list));
            }
            Ok(())
        }
        Action::Apply(name) => image.snapshot_apply(&name),
        Action::Create(name) => image.snapshot_create(&name),
        Action::Delete(name) => image.snapshot_delete(&name),
    }
    .map_err(Refusal::new)?;
    Ok(0)
}

/// The list as `qemu-img` prints it; dates in UTC.
pub fn table(list: &[Snapshot]) -> String {
    let mut text = format!(
        "Snapshot list:\n{:<10}{:<17}{:>8}{:>20}{:>13}{:>11}\n",
        "ID", "TAG", "VM SIZE", "DATE", "VM CLOCK", "ICOUNT"
    );
    for s in list {
        let clock = s.vm_clock / 1_000_000;
        let seconds = clock / 1000;
        let clock = format!("{:02}:{:02}:{:02}.{:03}", seconds / 3600, seconds / 60 % 60, seconds % 60, clock % 1000);
        let icount = icount(s).map(|n| n.to_string()).unwrap_or_default();
        // Writing to a String can't fail.
        let _ = writeln!(
            text,
            "{:<9} {:<16} {:>8}{:>20}{clock:>13}{icount:>11}",
            s.id,
            s.name,
            human_size(s.vm_state),
            date(s.seconds.into())
        );
    }
    text
}

/// One snapshot as JSON.
pub fn json(s: &Snapshot) -> Value {
    let mut all = json!({
        "id": s.id,
        "name": s.name,
        "vm-state-size": s.vm_state,
        "date-sec": s.seconds,
        "date-nsec": s.nanoseconds,
        "vm-clock-sec": s.vm_clock / 1_000_000_000,
        "vm-clock-nsec": s.vm_clock % 1_000_000_000,
    });
    if let (Some(count), Some(members)) = (icount(s), all.as_object_mut()) {
        members.insert("icount".into(), json!(count));
    }
    all
}

fn icount(s: &Snapshot) -> Option<u64> {
    s.icount.filter(|n| *n != u64::MAX)
}

/// Seconds since 1970 as a date of the proleptic Gregorian calendar.
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Years from March on, so that the leap day is the last; 719468 days lie between 0000-03-01 and 1970-01-01.
    let z = days + 719_468;
    let era = z / 146_097;
    let day = z % 146_097;
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!(
        "{}-{month:02}-{of_month:02} {:02}:{:02}:{:02}",
        era * 400 + year + carry,
        rest / 3600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days() {
        assert_eq!(date(0), "1970-01-01 00:00:00");
        assert_eq!(date(951_782_399), "2000-02-28 23:59:59");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00");
        assert_eq!(date(1_795_309_456), "2026-11-22 01:04:16");
        assert_eq!(date(4_107_542_400), "2100-03-01 00:00:00");
    }
}
