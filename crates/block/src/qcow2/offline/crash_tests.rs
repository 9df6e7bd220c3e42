// SPDX-License-Identifier: Apache-2.0
//! Edits with the power cut at every write: what was not synced may be on the medium in any part, sector by sector.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::super::format::entry::OFFSET_MASK;
use super::tests::{Dice, folder, qemu_img, scribble};
use super::*;

/// A file in memory that remembers every write and sync.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<(Vec<u8>, Vec<Event>)>>);

#[derive(Clone)]
enum Event {
    Write(u64, Vec<u8>),
    Size(u64),
    Sync,
}

fn apply(bytes: &mut Vec<u8>, event: &Event) {
    match event {
        Event::Write(at, data) => {
            let end = *at as usize + data.len();
            bytes.resize(bytes.len().max(end), 0);
            bytes[*at as usize..end].copy_from_slice(data);
        }
        Event::Size(size) => bytes.resize(*size as usize, 0),
        Event::Sync => {}
    }
}

impl Recorder {
    fn push(&self, event: Event) {
        let mut inner = self.0.lock().unwrap();
        apply(&mut inner.0, &event);
        inner.1.push(event);
    }
}

impl Medium for Recorder {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let inner = self.0.lock().unwrap();
        let there = inner.0.get(offset as usize..).unwrap_or_default();
        let len = there.len().min(buf.len());
        buf[..len].copy_from_slice(&there[..len]);
        Ok(len)
    }
    fn write_at(&self, buf: &[u8], offset: u64) -> io::Result<()> {
        self.push(Event::Write(offset, buf.to_vec()));
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        self.push(Event::Sync);
        Ok(())
    }
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.lock().unwrap().0.len() as u64)
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        self.push(Event::Size(size));
        Ok(())
    }
    fn as_medium(&self) -> &dyn Medium {
        self
    }
}

/// All that a user can see of an image: names, size, and what each snapshot and the disk map to which bytes.
fn face(bytes: &[u8]) -> Result<String, Error> {
    use super::super::format::entry::Mapping;
    let file = Recorder::default();
    file.0.lock().unwrap().0 = bytes.to_vec();
    let image = Image::on(Box::new(file), Path::new("a"), false)?;
    image.header.check_layout(bytes.len() as u64).map_err(Error::format(Path::new("a")))?;
    let report = image.check()?;
    if !report.clean() {
        return Error::refused(Path::new("a"), format!("{report:?}"));
    }
    let layout = image.layout();
    let mut out =
        format!("{} {:?} {:?}", image.header.size, image.header.backing, image.header.extensions.backing_format);
    let mut disks = vec![image.l1.clone()];
    for s in image.snapshots()? {
        out += &format!(" [{} {}]", s.id, s.name);
        disks.push(image.read_numbers(s.l1.offset, s.l1.count.into())?);
    }
    for l1 in disks {
        for (i, raw) in l1.iter().enumerate().filter(|(_, raw)| **raw != 0) {
            let table = image.read(raw & OFFSET_MASK, layout.cluster_size())?;
            for (raw, bitmap, j) in walk::entries(&layout, &table) {
                let mut mapping = layout.classify(raw, bitmap, 0).unwrap();
                let mut sum = 0;
                if let Mapping::Data { host, copied } = &mut mapping {
                    sum = image.read(*host, layout.cluster_size())?.iter().map(|b| u64::from(*b)).sum();
                    (*host, *copied) = (0, false);
                }
                out += &format!(" {i}.{j}: {mapping:?} {sum}");
            }
        }
        out += " |";
    }
    for b in image.bitmaps()? {
        let bits: u32 = image.bitmap_bits(&b.name)?.iter().map(|b| b.count_ones()).sum();
        out += &format!(" <{} {} {bits}>", b.name, b.flags);
    }
    Ok(out)
}

type Operation = Box<dyn Fn(&mut Image) -> Result<(), Error>>;

#[test]
fn a_crash_leaves_the_old_or_the_new_image() {
    let Some(dir) = folder() else { return };
    let (dir, mut dice) = (dir.path(), Dice(5));
    let mut cuts = 0;
    for (cluster, backing) in [("512", None), ("4096", Some("base")), ("65536", None), ("65536", Some("base"))] {
        let mut args = vec!["create", "-q", "-f", "qcow2", "-o"];
        let options = format!("cluster_size={cluster}");
        args.push(&options);
        if let Some(base) = backing {
            args.extend(["-u", "-F", "raw", "-b", base]);
        }
        args.extend(["a", "300k"]);
        qemu_img(dir, &args);
        if backing.is_none() {
            scribble(&mut dice, dir, "a", 300 << 10, 6);
            qemu_img(dir, &["snapshot", "-c", "first", "a"]);
            scribble(&mut dice, dir, "a", 300 << 10, 6);
        }
        let steps: Vec<Operation> = vec![
            Box::new(|i| i.snapshot_create("second")),
            Box::new(|i| i.bitmap_add("b1", None, false)),
            Box::new(|i| {
                i.resize(500 << 10, Some(0)).or_else(|_| i.set_backing(Some(("a much longer name".as_ref(), "raw"))))
            }),
            Box::new(|i| i.bitmap_add("b2", Some(512), true)),
            Box::new(|i| i.set_backing(Some(("other base".as_ref(), "qcow2")))),
            Box::new(|i| i.bitmap_remove("b2")),
            Box::new(|i| i.snapshot_apply("second")),
            Box::new(|i| i.bitmap_remove("b1")),
            Box::new(|i| i.snapshot_delete("second")),
            Box::new(|i| i.resize(100 << 10, Some(0))),
            Box::new(|i| i.set_backing(None)),
            Box::new(|i| i.amend(Amend { lazy_refcounts: Some(true) })),
        ];
        let mut bytes = std::fs::read(dir.join("a")).unwrap();
        for (n, step) in steps.iter().enumerate() {
            let what = format!("cluster {cluster} backing {backing:?} step {n}");
            let file = Recorder::default();
            file.0.lock().unwrap().0.clone_from(&bytes);
            let mut image = Image::on(Box::new(file.clone()), &PathBuf::from("a"), true).unwrap();
            step(&mut image).unwrap_or_else(|e| panic!("{what}: {e}"));
            let (after, events) = { file.0.lock().unwrap().clone() };
            let faces = [face(&bytes).unwrap(), face(&after).unwrap()];
            cuts += cut(&mut dice, &bytes, &events, &faces, &what);
            bytes = after;
        }
    }
    assert!(cuts > 300, "{cuts} cuts");
}

/// Cuts the power before and after each event, with any part of what was not synced on the medium.
fn cut(dice: &mut Dice, before: &[u8], events: &[Event], faces: &[String; 2], what: &str) -> u32 {
    let (mut safe, mut pending, mut cuts) = (before.to_vec(), Vec::new(), 0);
    let mut last = 0;
    for (n, event) in events.iter().enumerate() {
        match event {
            Event::Sync => {
                for e in pending.drain(..) {
                    apply(&mut safe, &e);
                }
            }
            other => pending.push(other.clone()),
        }
        for _ in 0..3 {
            let mut torn = safe.clone();
            for e in &pending {
                match e {
                    Event::Write(at, data) => {
                        for (i, sector) in data.chunks(512).enumerate().filter(|_| dice.roll(2) == 0) {
                            apply(&mut torn, &Event::Write(at + i as u64 * 512, sector.to_vec()));
                        }
                    }
                    e if dice.roll(2) == 0 => apply(&mut torn, e),
                    _ => {}
                }
            }
            let seen = face(&torn).unwrap_or_else(|e| panic!("{what}, event {n}: {e}"));
            let which = faces.iter().position(|f| *f == seen);
            assert!(which.is_some(), "{what}, event {n}: neither the old nor the new image:\n{seen}\n{faces:#?}");
            cuts += 1;
        }
        last = n;
    }
    assert_eq!(face(&safe).unwrap(), faces[1], "{what}: durable in the end, {last} events");
    cuts
}

/// Images with bytes changed anywhere in their tables are refused, checked, mended or edited, but never a panic or a hang.
#[test]
fn rubbish_is_survived() {
    let Some(dir) = folder() else { return };
    let (dir, mut dice) = (dir.path(), Dice(6));
    for options in ["cluster_size=512,refcount_bits=1", "cluster_size=4096", "cluster_size=16384,extended_l2=on"] {
        qemu_img(dir, &["create", "-q", "-f", "qcow2", "-o", options, "a", "200k"]);
        qemu_img(dir, &["bitmap", "--add", "a", "b0"]);
        scribble(&mut dice, dir, "a", 200 << 10, 6);
        if !options.ends_with("=1") {
            qemu_img(dir, &["snapshot", "-c", "first", "a"]);
        }
        let good = std::fs::read(dir.join("a")).unwrap();
        let header = Image::open(&dir.join("a"), false).unwrap().header().clone();
        let spots = [
            0,
            header.l1.offset,
            header.refcount_table.offset,
            header.snapshots.offset,
            header.extensions.bitmaps.map_or(0, |b| b.offset),
            u64::from_be_bytes(good[header.l1.offset as usize..][..8].try_into().unwrap()) & OFFSET_MASK,
        ];
        for _ in 0..150 {
            let mut bad = good.clone();
            for _ in 0..1 + dice.roll(4) {
                let spot = spots[dice.roll(spots.len() as u64) as usize] + dice.roll(200);
                let (at, value) = (spot as usize % bad.len(), dice.roll(256) as u8);
                bad[at] = if dice.roll(3) == 0 { 0xff } else { value };
            }
            let file = Recorder::default();
            file.0.lock().unwrap().0 = bad;
            let Ok(mut image) = Image::on(Box::new(file), &PathBuf::from("a"), true) else { continue };
            let _ = image.check();
            let _ = image.bitmap_bits("b0");
            let _ = match dice.roll(5) {
                0 => image.snapshot_create("x"),
                1 => image.snapshot_apply("first"),
                2 => image.snapshot_delete("first"),
                3 => image.bitmap_remove("b0"),
                _ => image.resize(100 << 10, None),
            };
            if image.repair(Repair::All).is_ok_and(|report| report.clean()) {
                assert!(image.check().unwrap().clean());
            }
        }
    }
}
