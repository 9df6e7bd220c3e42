// SPDX-License-Identifier: Apache-2.0
//! One history, two images made alike: tare plays it on one and QEMU on the other, and at each reopening they swap. Both
//! images must hold what the model holds and pass QEMU's check.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use block::qcow2::offline::Image;
use block::{Disk, Secret};
use testkit::qcow2::history::{Style, fill};
use testkit::qcow2::options::Backing;
use testkit::qcow2::reader::no_inflate;
use testkit::qcow2::{Bytes, History, Item, Layer, Player, Rng, Row, Step};

use super::tools::{Node, qemu_check_on, qemu_img, qemu_io, qemu_io_on, qemu_read_on};

/// Who plays a part of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Tare,
    Qemu,
}

/// An image, what lies below it and what they hold.
pub struct Twin {
    row: Row,
    dir: PathBuf,
    /// The images of the two engines.
    paths: [PathBuf; 2],
    backing: Vec<u8>,
    model: Bytes,
    snapshots: HashMap<u32, Bytes>,
    source: u32,
}

/// A part of a history between two openings, with what its reads must find.
struct Session {
    items: Vec<(Item, Vec<Option<Bytes>>)>,
}

pub fn style(row: &Row, batches: usize) -> Style {
    Style {
        size: row.size(),
        cluster: row.cluster(),
        grain: if row.cache() == block::Cache::None || row.encrypted() { 512 } else { 1 },
        longest: (row.cluster() * 3).clamp(16384, 3 << 20),
        batches,
        depth: 8,
        flush: 12,
        snapshots: if !row.snapshots() {
            0
        } else if row.refcount_bits() == 2 {
            // Going back to a snapshot counts its clusters once more for a moment.
            1
        } else {
            6
        },
        resize: row.resize(),
        reopen: true,
    }
}

/// The passphrase of encrypted images, and QEMU's word for it.
const KEY: &str = "open sesame";
const SECRET: [&str; 2] = ["--object", "secret,id=s0,data=open sesame"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

impl Twin {
    pub fn new(row: Row, dir: &Path, seed: u64) -> Result<Self, String> {
        let rng = &mut Rng::new(seed);
        let size = row.size();
        let paths = [dir.join("a.qcow2"), dir.join("b.qcow2")];
        let mut twin = Self {
            row,
            dir: dir.to_path_buf(),
            paths,
            backing: Vec::new(),
            model: Bytes::default(),
            snapshots: HashMap::new(),
            source: 0,
        };
        let below = twin.make_backing(rng)?;
        let mut content = twin.backing.clone();
        content.resize(size as usize, 0);
        twin.model = Bytes::new(content);
        let mut first = Vec::new();
        if row.start() > 0 {
            for n in 0..6_u8 {
                let whole = size / row.cluster();
                let at = rng.below(whole) * row.cluster();
                let packed = row.start() == 2 && n < 4;
                let len = if packed { row.cluster() } else { 512 * (1 + rng.below(row.cluster() / 512)) };
                let range = at as usize..(at + len) as usize;
                if packed {
                    // A cluster is compressed once only; a pattern can be.
                    if first.iter().any(|c: &String| c.contains(&format!(" {at} "))) {
                        continue;
                    }
                    first.push(format!("write -c -P {} {at} {len}", n + 1));
                    twin.model.content[range].fill(n + 1);
                } else {
                    first.push(twin.write_from_file(at, len, 1));
                    twin.model.content[range].copy_from_slice(&fill(1, at, len));
                }
            }
        }
        for path in twin.paths.clone() {
            let mut words = row.words(&path.with_extension("data"));
            let size = size.to_string();
            let mut create = vec!["create", "-q", "-f", "qcow2"];
            if row.encrypted() {
                words += ",encrypt.format=luks,encrypt.key-secret=s0,encrypt.iter-time=10";
                create.extend(SECRET);
            }
            create.extend(["-o", &words]);
            if let Some((file, format)) = &below {
                create.extend(["-b", text(file), "-F", format]);
            }
            create.extend([text(&path), &size]);
            qemu_img(&create)?;
            if !first.is_empty() {
                qemu_io_on(&twin.node(&path), &first)?;
            }
        }
        Ok(twin)
    }

    /// The image at `path` in QEMU's words.
    fn node(&self, path: &Path) -> Node {
        if !self.row.encrypted() {
            return Node::plain(path, "qcow2");
        }
        // What lies below is found as the image names it.
        Node::encrypted(&[(path, "luks", KEY)])
    }

    fn write_from_file(&mut self, at: u64, len: u64, id: u32) -> String {
        self.source += 1;
        let source = self.dir.join(format!("source-{}", self.source));
        std::fs::write(&source, fill(id, at, len)).unwrap();
        format!("write -s {} {at} {len}", text(&source))
    }

    /// Makes what lies below; the file and its format.
    fn make_backing(&mut self, rng: &mut Rng) -> Result<Option<(PathBuf, &'static str)>, String> {
        let size = self.row.size();
        let kind = self.row.backing();
        let len = match kind {
            Backing::None => return Ok(None),
            Backing::Shorter => size * 2 / 3 / 512 * 512 + 512,
            Backing::Longer => size + (1 << 20),
            _ => size,
        };
        // Data, zeroes that are written and holes, in pieces of other sizes than clusters.
        let mut content = vec![0; len as usize];
        let mut at = 0;
        while at < len {
            let piece = (512 * (1 + rng.below(200))).min(len - at);
            if rng.one_in(2) {
                content[at as usize..(at + piece) as usize].copy_from_slice(&fill(1, at, piece));
            }
            at += piece;
        }
        let raw = self.dir.join("base.raw");
        std::fs::write(&raw, &content).unwrap();
        let top = self.dir.join("base.qcow2");
        let options = *rng.pick(&["cluster_size=4096", "cluster_size=65536", "cluster_size=65536,extended_l2=on"]);
        match kind {
            Backing::Qcow2 | Backing::Longer => {
                qemu_img(&["convert", "-q", "-f", "raw", "-O", "qcow2", "-o", options, text(&raw), text(&top)])?;
            }
            Backing::Chain => {
                let below = self.dir.join("middle.qcow2");
                // Named as a user would: relative to the image that names it.
                for (image, base, format) in [(&below, "base.raw", "raw"), (&top, "middle.qcow2", "qcow2")] {
                    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, "-b", base, "-F", format, text(image)])?;
                    let mut commands = Vec::new();
                    for _ in 0..4 {
                        let len = 512 * (1 + rng.below(100));
                        let at = rng.below((size - len) / 512) * 512;
                        let range = at as usize..(at + len) as usize;
                        if rng.one_in(2) {
                            commands.push(self.write_from_file(at, len, 2));
                            content[range].copy_from_slice(&fill(2, at, len));
                        } else {
                            commands.push(format!("write -z {at} {len}"));
                            content[range].fill(0);
                        }
                    }
                    qemu_io(image, "qcow2", &commands)?;
                }
            }
            _ => {}
        }
        self.backing = content;
        Ok(Some(if matches!(kind, Backing::Raw | Backing::Shorter) { (raw, "raw") } else { (top, "qcow2") }))
    }

    /// Plays `history`: `engines` on the two images, swapped at each reopening.
    pub fn play(&mut self, history: &History, mut engines: [Engine; 2], rng: &mut Rng) -> Result<(), String> {
        let mut session = Session { items: Vec::new() };
        for item in history.items.iter().chain([&Item::Reopen]) {
            match item {
                Item::Batch(steps) => {
                    let expected = steps.iter().map(|s| self.expected(s)).collect();
                    session.items.push((item.clone(), expected));
                    steps.iter().for_each(|s| self.model.apply(s));
                }
                Item::Resize(size) => {
                    session.items.push((item.clone(), Vec::new()));
                    self.model.resize(*size);
                }
                Item::Reopen => {
                    for (engine, path) in engines.iter().zip(self.paths.clone()) {
                        match engine {
                            Engine::Tare => self.tare(&path, &session, rng)?,
                            Engine::Qemu => self.qemu(&path, &session)?,
                        }
                        self.judge(&path).map_err(|e| format!("after {engine:?}: {e}"))?;
                    }
                    session.items.clear();
                    engines.swap(0, 1);
                }
                Item::SnapshotCreate(n) => {
                    self.snapshots_alike(engines, "-c", *n)?;
                    self.snapshots.insert(*n, self.model.clone());
                }
                Item::SnapshotApply(n) => {
                    self.snapshots_alike(engines, "-a", *n)?;
                    self.model = self.snapshots[n].clone();
                }
                Item::SnapshotDelete(n) => {
                    self.snapshots_alike(engines, "-d", *n)?;
                    self.snapshots.remove(n);
                }
            }
        }
        self.compare()
    }

    fn expected(&self, step: &Step) -> Option<Bytes> {
        let Step::Read { at, len } = *step else { return None };
        let range = at as usize..(at + len) as usize;
        Some(Bytes { content: self.model.content[range.clone()].to_vec(), loose: self.model.loose[range].to_vec() })
    }

    /// Each engine does to its image, while it is closed, what `qemu-img snapshot` calls `what`.
    fn snapshots_alike(&self, engines: [Engine; 2], what: &str, n: u32) -> Result<(), String> {
        for (engine, path) in engines.iter().zip(&self.paths) {
            match engine {
                Engine::Tare => {
                    let (mut image, name) = (Image::open(path, true).map_err(|e| e.to_string())?, format!("s{n}"));
                    let done = match what {
                        "-c" => image.snapshot_create(&name),
                        "-a" => image.snapshot_apply(&name),
                        _ => image.snapshot_delete(&name),
                    };
                    done.map_err(|e| format!("snapshot {what} s{n}: {e}"))?;
                }
                Engine::Qemu => self.qemu_snapshot(path, what, n)?,
            }
        }
        Ok(())
    }

    fn qemu_snapshot(&self, path: &Path, what: &str, n: u32) -> Result<(), String> {
        let (node, name) = (self.node(path), format!("s{n}"));
        // It knows no -f.
        let words = node.words().into_iter().filter(|w| !matches!(*w, "-f" | "qcow2")).collect::<Vec<_>>();
        qemu_img(&[&["snapshot", "-q", what, &name], &words[..]].concat()).map(drop)
    }

    fn qemu(&mut self, path: &Path, session: &Session) -> Result<(), String> {
        let mut commands = Vec::new();
        for (item, _) in &session.items {
            match item {
                Item::Batch(steps) => {
                    for step in steps {
                        commands.push(match *step {
                            Step::Read { at, len } => format!("read -q {at} {len}"),
                            Step::Write { at, len, id } => self.write_from_file(at, len, id),
                            Step::Zero { at, len, unmap: false } => format!("write -z {at} {len}"),
                            Step::Zero { at, len, unmap: true } => format!("write -z -u {at} {len}"),
                            Step::Discard { at, len } => format!("discard {at} {len}"),
                            Step::Flush => "flush".into(),
                        });
                    }
                }
                Item::Resize(size) => commands.push(format!("truncate {size}")),
                _ => {}
            }
        }
        if commands.is_empty() { Ok(()) } else { qemu_io_on(&self.node(path), &commands).map(drop) }
    }

    fn tare(&self, path: &Path, session: &Session, rng: &mut Rng) -> Result<(), String> {
        let mut rest = &session.items[..];
        // What can't be done while the disk is open is done while it is not.
        while let Some(size) = self.tare_open(path, &mut rest, rng)? {
            self.resize_closed(path, size, rng)?;
        }
        Ok(())
    }

    fn resize_closed(&self, path: &Path, size: u64, rng: &mut Rng) -> Result<(), String> {
        if rng.one_in(2) {
            let below = (self.row.backing() != Backing::None).then_some(self.backing.len() as u64);
            let mut image = Image::open(path, true).map_err(|e| e.to_string())?;
            match image.resize(size, below) {
                Ok(()) => return Ok(()),
                // What it refuses, it refuses for good reason; QEMU's tool has it then.
                Err(e) if ["raw data file", "can't be extended"].iter().any(|why| e.to_string().contains(why)) => {}
                Err(e) => return Err(format!("resize to {size} while closed: {e}")),
            }
        }
        let size = size.to_string();
        qemu_img(&[&["resize", "-q", "--shrink"], &self.node(path).words()[..], &[&size]].concat()).map(drop)
    }

    /// Plays what it can of `rest` in one opening; a size means that the disk is to get it before it goes on.
    fn tare_open(
        &self,
        path: &Path,
        rest: &mut &[(Item, Vec<Option<Bytes>>)],
        rng: &mut Rng,
    ) -> Result<Option<u64>, String> {
        let mut options = self.row.options(path);
        options.qcow2.keys.extend(self.row.encrypted().then(|| Secret::new(KEY.into())));
        let disk = Disk::open(&options).map_err(|e| format!("tare can't open it: {e}"))?;
        let handles = self.row.handles();
        let mut disks = Vec::new();
        for _ in 1..handles {
            disks.push(disk.share().map_err(|e| format!("it can't be shared: {e}"))?);
        }
        disks.push(disk);
        let (arrived, errors) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let refused = Mutex::new(None);
        let items = *rest;
        std::thread::scope(|scope| {
            for (n, disk) in disks.into_iter().enumerate() {
                let (arrived, errors, refused, mut rng) = (&arrived, &errors, &refused, Rng::new(rng.next()));
                scope.spawn(move || {
                    let mut player = Player::new(disk).unwrap();
                    for (at, (item, expected)) in items.iter().enumerate() {
                        let done = catch_unwind(AssertUnwindSafe(|| {
                            play_share(&mut player, item, expected, (n, handles as usize), &mut rng)
                        }));
                        match (done, item) {
                            (Ok(Ok(())), _) => {}
                            (Ok(Err(why)), Item::Resize(size)) if why.contains("tare img resize") => {
                                *refused.lock().unwrap() = Some((at + 1, *size));
                            }
                            (Ok(Err(why)), _) => errors.lock().unwrap().push(why),
                            (Err(_), _) => errors.lock().unwrap().push("the engine panicked".into()),
                        }
                        arrived.fetch_add(1, Ordering::SeqCst);
                        player.serve_until(|| arrived.load(Ordering::SeqCst) >= (at + 1) * handles as usize);
                        if matches!(item, Item::Resize(_)) && refused.lock().unwrap().is_some() {
                            break;
                        }
                    }
                    drop(player.end());
                });
            }
        });
        if let Some(first) = errors.into_inner().unwrap().first() {
            return Err(first.clone());
        }
        let Some((done, size)) = refused.into_inner().unwrap() else { return Ok(None) };
        *rest = &items[done..];
        Ok(Some(size))
    }

    /// Whether an image is sound and holds what the model holds, in all its snapshots.
    fn judge(&self, path: &Path) -> Result<(), String> {
        let leaks = qemu_check_on(&self.node(path))?;
        if leaks > 0 {
            return Err(format!("{leaks} leaked clusters after a clean end"));
        }
        let bytes = std::fs::read(path).unwrap();
        let data = std::fs::read(path.with_extension("data")).ok();
        let layer = Layer::open(&bytes, data.as_deref())?;
        let check = layer.check();
        if !check.corruptions.is_empty() || check.leaks > 0 {
            return Err(format!("the naive checker: {} leaks, {:?}", check.leaks, check.corruptions.first()));
        }
        if layer.size != self.model.content.len() as u64 {
            return Err(format!("{} bytes, not {}", layer.size, self.model.content.len()));
        }
        let content = if self.row.start() == 2 || self.row.encrypted() {
            qemu_read_on(&self.node(path), path, layer.size)?
        } else {
            layer.read(&self.backing, &no_inflate)?
        };
        if let Some(at) = self.model.differs(0, &content) {
            return Err(format!("byte {at} ({at:#x}) of {} is wrong", path.display()));
        }
        if self.row.data_file() == 2 {
            let raw = data.unwrap_or_default();
            if let Some(at) = self.model.differs(0, &raw[..raw.len().min(self.model.content.len())]) {
                return Err(format!("byte {at} of the raw data file is wrong"));
            }
        }
        Ok(())
    }

    /// Makes what discards left open the same, then lets QEMU compare the two images; and each snapshot is what it was.
    fn compare(&mut self) -> Result<(), String> {
        let zeroes: Vec<String> =
            self.model.loose_ranges().iter().map(|(at, len)| format!("write -z {at} {len}")).collect();
        for path in &self.paths {
            if !zeroes.is_empty() {
                qemu_io_on(&self.node(path), &zeroes)?;
            }
        }
        if self.row.encrypted() {
            let [a, b] = [&self.paths[0], &self.paths[1]].map(|path| self.node(path));
            qemu_img(&[&["compare", "-q"], &a.words()[..], &b.words()[3..]].concat())?;
        } else {
            qemu_img(&["compare", "-q", "-f", "qcow2", "-F", "qcow2", text(&self.paths[0]), text(&self.paths[1])])?;
        }
        let mut named: Vec<_> = self.snapshots.drain().collect();
        named.sort_by_key(|n| n.0);
        for (n, model) in named {
            self.model = model;
            for path in &self.paths {
                self.qemu_snapshot(path, "-a", n)?;
                self.judge(path).map_err(|e| format!("snapshot s{n}: {e}"))?;
            }
        }
        Ok(())
    }
}

/// What falls to one of several handles.
fn play_share(
    player: &mut Player,
    item: &Item,
    expected: &[Option<Bytes>],
    (n, handles): (usize, usize),
    rng: &mut Rng,
) -> Result<(), String> {
    let steps = match item {
        Item::Batch(steps) => steps,
        Item::Resize(size) if n == 0 => {
            if std::env::var("TARE_TRACE").is_ok() {
                eprintln!("resize {size}");
            }
            return player.disk.resize(*size).map_err(|e| format!("resize to {size}: {e}"));
        }
        _ => return Ok(()),
    };
    let mine: Vec<Step> = steps.iter().skip(n).step_by(handles).copied().collect();
    if std::env::var("TARE_TRACE").is_ok() {
        eprintln!("handle {n}: {mine:?}");
    }
    for answer in player.play(&mine, rng) {
        answer.result.map_err(|e| format!("{:?} failed: {e}", answer.step))?;
        let Some(at) = steps.iter().position(|s| *s == answer.step) else { continue };
        if let Some(expected) = &expected[at]
            && let Some(at) = expected.differs(0, &answer.data)
        {
            return Err(format!("{:?}: byte {at} of it is wrong", answer.step));
        }
    }
    Ok(())
}
