// SPDX-License-Identifier: Apache-2.0
//! Writing: in place where the cluster is ours alone, else into new clusters, with what belongs around the data.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use base::Seg;

use crate::disk::Op;
use crate::options::Cow;
use crate::qcow2::format::entry::{Mapping, Partial};
use crate::storage::buffer::{AlignedBuf, cut};
use crate::storage::zeroing::BLOCK;

use super::chain::Chain;
use super::fetch::Need;
use super::handle::Handle;
use super::image::{Image, Look};
use super::meta::{InFlight, Meta, host_of};
use super::read::{Extent, Found};
use super::task::{Kind, Parent, State, Tag, Task};

/// Most bytes allocated for one request at a time.
const LONGEST: u64 = 2 << 20;

/// What goes before or behind the data of an allocating write.
#[derive(Debug)]
enum Pad {
    /// Nothing: the file has zeroes there.
    Nothing,
    /// Zeroes, written with the data.
    Zeroes,
    /// Zeroes, whole blocks of them by `fallocate`.
    Beside,
    /// What was there before: in the head's buffer, or the tail's.
    Old,
}

/// Host clusters being filled for the first time.
#[derive(Debug)]
pub struct Alloc {
    task: u32,
    /// First guest cluster.
    cluster: u64,
    count: u64,
    /// Offset of the first host cluster.
    host: u64,
    /// The host clusters were set aside before.
    kept: bool,
    /// Guest bytes written: padding included, and the data alone.
    from: u64,
    to: u64,
    data: (u64, u64),
    segs: Vec<Seg>,
    head: Pad,
    tail: Pad,
    /// Old content for before and behind.
    bufs: (Option<AlignedBuf>, Option<AlignedBuf>),
    /// The head's buffer holds everything from `from` to `to`.
    one_buf: bool,
    /// Reads under way, then writes.
    left: u32,
    errno: i32,
}

/// Host clusters found for an allocation.
struct Place {
    cluster: u64,
    count: u64,
    host: u64,
    /// They were set aside before.
    kept: bool,
    /// The file has zeroes there.
    fresh: bool,
}

impl Alloc {
    /// Whether nothing goes around the data.
    fn bare(&self) -> bool {
        matches!((&self.head, &self.tail), (Pad::Nothing, Pad::Nothing))
    }

    /// Whether its one write covers its clusters whole.
    fn covers(&self, bits: u32) -> bool {
        let whole = (self.from, self.to) == (self.cluster << bits, (self.cluster + self.count) << bits);
        whole && !matches!((&self.head, &self.tail), (Pad::Beside, _) | (_, Pad::Beside))
    }

    /// The ranges of the padding that become zeroes by themselves: before the data and behind it.
    fn beside(&self) -> [(u64, u64); 2] {
        let is = |pad: &Pad| matches!(pad, Pad::Beside);
        let head = (self.from, self.data.0 & !(BLOCK - 1));
        let tail = (self.data.1.next_multiple_of(BLOCK), self.to);
        [if is(&self.head) { head } else { (0, 0) }, if is(&self.tail) { tail } else { (0, 0) }]
    }
}

/// The entry of a cluster whose slice is in a slot. For holders of the lock.
pub fn entry(image: &Image, cluster: u64) -> Option<Mapping> {
    match image.look(cluster) {
        Look::Is(mapping) => Some(mapping),
        _ => None,
    }
}

/// Where bytes of a guest cluster can be written in place: the host offset of the first, if all up to `end` can be.
pub(super) fn in_place(image: &Image, mapping: &Mapping, offset: u64, end: u64) -> Option<u64> {
    let within = offset & (image.layout.cluster_size() - 1);
    match *mapping {
        Mapping::Data { host, copied: true } => Some(host + within),
        Mapping::Partial(Partial { host: Some(host), copied: true, allocated, .. }) => {
            let bits = touched(image, offset, end);
            (allocated & bits == bits).then_some(host + within)
        }
        _ => None,
    }
}

/// The subclusters of one cluster that `[offset, end)` touches, as bits.
fn touched(image: &Image, offset: u64, end: u64) -> u32 {
    let bits = image.layout.subcluster_bits();
    let mask = image.layout.cluster_size() - 1;
    let first = (offset & mask) >> bits;
    let last = ((end - 1) & mask) >> bits;
    (((1u64 << (last + 1)) - 1) & !((1u64 << first) - 1)) as u32
}

/// What is written around the data: the bounds, from what the first and the last cluster held before.
fn bounds(image: &Image, data: (u64, u64), first: &Mapping, last: &Mapping, kept: bool) -> (u64, u64) {
    let cluster = image.layout.cluster_size();
    let sub = 1u64 << image.layout.subcluster_bits();
    let unit = |old: &Mapping| match old {
        Mapping::Unallocated | Mapping::Zero { .. } => sub,
        Mapping::Partial(p) if kept || p.allocated == 0 => sub,
        _ => cluster,
    };
    let own = |old: &Mapping, at: u64| match old {
        Mapping::Partial(p) if kept => p.allocated & touched(image, at, at + 1) != 0,
        _ => false,
    };
    let (mut from, mut to) = (data.0 & !(unit(first) - 1), data.1.next_multiple_of(unit(last)));
    if own(first, data.0) {
        from = data.0;
    }
    if own(last, data.1 - 1) {
        to = data.1;
    }
    if image.layout.data_file {
        to = to.min(image.size()).max(data.1);
    }
    (from, to)
}

/// What the range reads as, for padding: `None` if it has to be read. The flag: nobody ever allocated anything there. Files
/// below are asked for holes only if `ask`.
fn zeroes(chain: &Chain, (cow, ask): (Cow, bool), mut from: u64, to: u64) -> Option<bool> {
    let mut virgin = true;
    while from < to {
        let Extent { found, len, place } = chain.find(0, from, to);
        match found {
            Found::Zero(said) => virgin &= !said,
            Found::At(file, host) if ask && cow == Cow::ZeroAware && place > 0 && !encrypted(chain, place) => {
                if chain.files.get(file).is_none_or(|f| f.hole_end(host) < host + len) {
                    return None;
                }
                virgin = false;
            }
            _ => return None,
        }
        from += len;
    }
    Some(virgin)
}

/// Whether a hole in the data of the image at a place is no zeroes.
fn encrypted(chain: &Chain, place: usize) -> bool {
    Handle::image_at(chain, place).is_some_and(|image| image.cipher.is_some())
}

impl Handle {
    /// Sends off what can be written of a task.
    pub(super) fn step_write(&mut self, index: u32, task: &mut Task) {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return };
        let start = task.cursor;
        let mut run: Option<u64> = None;
        while task.cursor < task.end {
            let cluster = task.cursor >> top.layout.cluster_bits;
            let end = task.end.min((cluster + 1) << top.layout.cluster_bits);
            let host = match top.look(cluster) {
                Look::Is(mapping) => in_place(top, &mapping, task.cursor, end),
                Look::Bad => {
                    top.lock().broke(top);
                    task.errno = libc::EIO;
                    return;
                }
                Look::Miss | Look::NoTable => None,
            };
            match (host, run) {
                (Some(host), None) => run = Some(host),
                (Some(host), Some(first)) if host == first + (task.cursor - start) => {}
                _ => break,
            }
            task.cursor = end;
        }
        let Some(host) = run else { return self.allocate(index, task, top) };
        // The slice that was just loaded may be the one that gives the image away.
        if top.broken.load(Ordering::Acquire) {
            task.errno = libc::EIO;
            return;
        }
        let mut segs = Vec::new();
        cut(&task.segs, start - task.offset, task.cursor - start, &mut segs);
        task.pending += 1;
        let file = chain.places.first().map_or(0, |p| p.data);
        self.issue(file, Tag::Part(index), Op::Write, host, task.cursor - start, &segs);
    }

    fn allocate(&mut self, index: u32, task: &mut Task, top: &Image) {
        let cluster = task.cursor >> top.layout.cluster_bits;
        let mut meta = top.lock();
        if top.broken.load(Ordering::Acquire) {
            task.errno = libc::EIO;
            return;
        }
        if let Some(other) = meta.in_flight.get_mut(&cluster) {
            if other.open {
                other.users += 1;
                let host = other.host;
                drop(meta);
                return self.join(index, task, top, host);
            }
            task.state = State::Parked;
            other.waiters.push(self.waiter(index));
            return;
        }
        if let Err(need) = meta.own_table(top, top.table_of(cluster)) {
            return self.lacks(index, task, (top, meta), need);
        }
        let (slice, _) = top.place(cluster);
        let Some(slot) = top.cache.find(slice) else {
            drop(meta);
            return self.load(index, task, 0, slice);
        };
        let Some(old) = entry(top, cluster) else {
            meta.broke(top);
            task.errno = libc::EIO;
            return;
        };
        let end = task.end.min((cluster + 1) << top.layout.cluster_bits);
        if in_place(top, &old, task.cursor, end).is_some() {
            // It became so since we looked.
            return;
        }
        // A request that is alone makes the file longer by its own write, if that ends where its clusters do.
        let alone = self.tasks.len() == 1 && meta.in_flight.is_empty() && meta.side.extends_cheaply();
        let place = match self.place_for(&mut meta, top, task, &old, !alone) {
            Ok(place) => place,
            Err(need) => return self.lacks(index, task, (top, meta), need),
        };
        let (bits, count) = (top.layout.cluster_bits, place.count);
        let data = (task.cursor, task.end.min((cluster + count) << bits));
        let last = entry(top, cluster + count - 1).unwrap_or(Mapping::Unallocated);
        let (from, to) = bounds(top, data, &old, &last, place.kept);
        let plan = |ask| self.plan(index, top, &place, (from, to, data), ask);
        let mut alloc = plan(false);
        let end = (place.host >> bits) + count;
        let short = !top.layout.data_file && meta.refs.as_ref().is_some_and(|refs| refs.short_of(end));
        let open = alloc.bare() && place.fresh && !short && !top.layout.extended && !top.layout.data_file;
        for i in 0..count {
            let host = place.host + (i << bits);
            let flight = InFlight { host, open, users: 1, published: false, waiters: Vec::new() };
            meta.in_flight.insert(cluster + i, flight);
            meta.pin(slot);
        }
        drop(meta);
        if !alloc.bare() {
            // Files are asked without the lock: nobody else changes these clusters now.
            alloc = plan(true);
        }
        let mut meta = (short && !alloc.covers(bits)).then(|| top.lock());
        if let Some(meta) = &mut meta
            && let Err(e) = meta.reach(end)
        {
            task.errno = e.raw_os_error().unwrap_or(libc::EIO);
            (cluster..cluster + count).for_each(|c| leave(meta, top, c, place.kept));
            return;
        }
        drop(meta);
        self.begin(task, alloc);
    }

    /// Where `task` goes on writing; `grow`: the file is to reach so far.
    fn place_for(&self, meta: &mut Meta, top: &Image, task: &Task, old: &Mapping, grow: bool) -> Result<Place, Need> {
        let bits = top.layout.cluster_bits;
        let cluster = task.cursor >> bits;
        match *old {
            Mapping::Zero { host: Some(host), copied: true }
            | Mapping::Partial(Partial { host: Some(host), copied: true, .. }) => {
                return Ok(Place { cluster, count: 1, host, kept: true, fresh: false });
            }
            _ => {}
        }
        let (slice, _) = top.place(cluster);
        let wanted = ((task.end - 1) >> bits) - cluster + 1;
        let most = wanted.min((LONGEST >> bits).max(1)).min(((slice + 1) << top.slice_bits()) - cluster);
        let also = |c: u64| {
            let plain = match entry(top, c) {
                Some(Mapping::Unallocated | Mapping::Compressed(_)) => true,
                Some(m) => !matches!(
                    m,
                    Mapping::Data { copied: true, .. }
                        | Mapping::Zero { host: Some(_), copied: true }
                        | Mapping::Partial(Partial { host: Some(_), copied: true, .. })
                ),
                None => false,
            };
            plain && !meta.in_flight.contains_key(&c)
        };
        let count = 1 + (1..most).take_while(|i| also(cluster + i)).count() as u64;
        if top.layout.data_file {
            let host = cluster << bits;
            let file = self.chain.places.first().map_or(0, |p| p.data);
            let hole = self.chain.files.get(file).map_or(0, |f| f.hole_end(host));
            meta.cycles.dirty = true;
            let fresh = top.cipher.is_none() && hole >= (cluster + count) << bits;
            return Ok(Place { cluster, count, host, kept: false, fresh });
        }
        let run = meta.alloc(count, grow)?;
        // Zeroes in the file are no zeroes of an encrypted disk.
        let fresh = run.fresh && top.cipher.is_none();
        Ok(Place { cluster, count: run.count, host: run.first << bits, kept: false, fresh })
    }

    /// Decides what goes around the data, as far as that is known, or after asking files where they have holes.
    fn plan(&self, task: u32, top: &Image, at: &Place, (from, to, data): (u64, u64, (u64, u64)), ask: bool) -> Alloc {
        let Place { cluster, count, host, kept, fresh } = *at;
        let hole = |from: u64, to: u64| {
            let file = self.chain.places.first().and_then(|p| self.chain.files.get(p.data));
            let start = host + (from - (cluster << top.layout.cluster_bits));
            ask && top.cipher.is_none() && file.is_some_and(|f| f.hole_end(start) >= start + (to - from))
        };
        let beside = |from: u64, to: u64| {
            let len = to.saturating_sub(from);
            ask && len > 0 && top.cipher.is_none() && self.roomy() && len >= top.zeros.least(top.cow == Cow::Explicit)
        };
        // The last two: the whole blocks in it.
        let pad = |from: u64, to: u64, first: u64, end: u64| {
            if from >= to {
                return Pad::Nothing;
            }
            match (zeroes(&self.chain, (top.cow, ask), from, to), top.cow) {
                (None, _) => Pad::Old,
                (Some(_), Cow::ZeroAware) | (Some(true), Cow::Unallocated) if fresh || hole(from, to) => Pad::Nothing,
                (Some(_), _) if beside(first, end) => Pad::Beside,
                (Some(_), _) => Pad::Zeroes,
            }
        };
        let head = pad(from, data.0, from, data.0 & !(BLOCK - 1));
        let tail = pad(data.1, to, data.1.next_multiple_of(BLOCK), to);
        let (from, to) = (
            if matches!(head, Pad::Nothing) { data.0 } else { from },
            if matches!(tail, Pad::Nothing) { data.1 } else { to },
        );
        Alloc {
            task,
            cluster,
            count,
            host,
            kept,
            from,
            to,
            data,
            segs: Vec::new(),
            head,
            tail,
            bufs: (None, None),
            one_buf: false,
            left: 0,
            errno: 0,
        }
    }

    /// Starts an allocation: reads what it needs of the old content, then writes.
    fn begin(&mut self, task: &mut Task, mut alloc: Alloc) {
        let (start, end) = alloc.data;
        cut(&task.segs, start - task.offset, end - start, &mut alloc.segs);
        task.pending += 1;
        task.cursor = end;
        let (old_head, old_tail) = (matches!(alloc.head, Pad::Old), matches!(alloc.tail, Pad::Old));
        let mut reads = Vec::new();
        let whole = alloc.to - alloc.from;
        alloc.one_buf = old_head && old_tail && end - start <= whole / 2;
        if alloc.one_buf {
            reads.push((alloc.from, alloc.to));
        } else {
            reads.extend(old_head.then_some((alloc.from, start)));
            reads.extend(old_tail.then_some((end, alloc.to)));
        }
        let mut bufs = Vec::new();
        for (from, to) in &reads {
            match self.buffer((to - from) as usize) {
                Ok(buf) => bufs.push(buf),
                Err(_) => alloc.errno = libc::ENOMEM,
            }
        }
        if alloc.errno != 0 {
            reads.clear();
        }
        alloc.left = reads.len() as u32;
        let jobs: Vec<_> = reads.iter().zip(&bufs).map(|((a, b), buf)| (*a, *b, buf.seg(0, buf.len()))).collect();
        let mut bufs = bufs.into_iter();
        if old_head {
            alloc.bufs.0 = bufs.next();
        }
        alloc.bufs.1 = bufs.next();
        let index = self.allocs.add(alloc);
        if jobs.is_empty() {
            return self.fill(index);
        }
        let size = self.top().map_or(0, Image::size);
        for (from, to, seg) in jobs {
            // Past the disk's end there are zeroes.
            let end = to.min(size).max(from);
            let segs = [seg];
            let mut wanted = Vec::new();
            cut(&segs, 0, end - from, &mut wanted);
            let mut beyond = Vec::new();
            cut(&segs, end - from, to - end, &mut beyond);
            crate::storage::buffer::fill_zero(&beyond);
            self.start(Kind::Read(0), from, end, wanted, Parent::Alloc(index), None);
        }
    }

    /// Old content was read.
    pub(super) fn old_read(&mut self, index: u32, errno: i32) {
        let Some(alloc) = self.allocs.get_mut(index) else { return };
        alloc.left = alloc.left.saturating_sub(1);
        if errno != 0 {
            alloc.errno = errno;
        }
        if alloc.left == 0 {
            self.fill(index);
        }
    }

    /// Writes the data and what goes around it, at once.
    fn fill(&mut self, index: u32) {
        let Some(mut alloc) = self.allocs.take(index) else { return };
        if alloc.errno != 0 {
            let errno = alloc.errno;
            self.allocs.put(index, alloc);
            return self.filled(index, errno);
        }
        let zeroes = alloc.beside();
        let from = if zeroes[0].1 > 0 { zeroes[0].1 } else { alloc.from };
        let to = if zeroes[1].1 > 0 { zeroes[1].0 } else { alloc.to };
        let (head, tail) = (alloc.data.0 - from, to - alloc.data.1);
        let mut segs = Vec::with_capacity(alloc.segs.len() + 2);
        match (&alloc.head, &alloc.bufs.0) {
            (Pad::Old, Some(buf)) => segs.push(buf.seg(0, head as usize)),
            _ => self.zero_segs(head, &mut segs),
        }
        segs.extend_from_slice(&alloc.segs);
        match (&alloc.tail, &alloc.bufs.0, &alloc.bufs.1) {
            (Pad::Old, Some(buf), _) if alloc.one_buf => {
                segs.push(buf.seg((alloc.data.1 - alloc.from) as usize, tail as usize));
            }
            (Pad::Old, _, Some(buf)) => segs.push(buf.seg(0, tail as usize)),
            _ => self.zero_segs(tail, &mut segs),
        }
        segs.retain(|s| s.len > 0);
        let bits = self.top().map_or(0, |t| t.layout.cluster_bits);
        let (first, host) = (alloc.cluster << bits, alloc.host);
        let zeroes = zeroes.into_iter().filter(|(_, end)| *end > 0);
        alloc.left = 1 + zeroes.clone().count() as u32;
        self.allocs.put(index, alloc);
        let file = self.chain.places.first().map_or(0, |p| p.data);
        for (from, to) in zeroes {
            let op = Op::WriteZeroes { unmap: false };
            self.issue(file, Tag::Fill(index), op, host + (from - first), to - from, &[]);
        }
        self.issue(file, Tag::Fill(index), Op::Write, host + (from - first), to - from, &segs);
    }

    /// A write of an allocation is done, or not; after the last one the table says so.
    pub(super) fn filled(&mut self, index: u32, errno: i32) {
        let Some(alloc) = self.allocs.get_mut(index) else { return };
        alloc.left = alloc.left.saturating_sub(1);
        if alloc.errno == 0 {
            alloc.errno = errno;
        }
        if alloc.left > 0 {
            return;
        }
        let Some(mut alloc) = self.allocs.remove(index) else { return };
        let errno = alloc.errno;
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return };
        let bits = top.layout.cluster_bits;
        let mut meta = top.lock();
        let end = (alloc.host >> bits) + alloc.count;
        if let Some(refs) = meta.refs.as_mut().filter(|_| errno == 0 && !top.layout.data_file && alloc.covers(bits)) {
            refs.reached(end);
        }
        for cluster in alloc.cluster..alloc.cluster + alloc.count {
            if errno == 0 {
                let (start, end) = (cluster << bits, (cluster + 1) << bits);
                // Where nothing is written around the data, the rest of its subclusters is zeroes in the file.
                publish(&mut meta, top, cluster, (alloc.from.max(start), alloc.to.min(end)));
            }
            leave(&mut meta, top, cluster, alloc.kept);
        }
        let wanted = meta.cycles.wanted && !meta.cycles.running;
        drop(meta);
        self.recycle(alloc.bufs.0.take());
        self.recycle(alloc.bufs.1.take());
        if wanted && errno == 0 && self.hold(alloc.task) {
            // One piece ends here and another begins: the cycle.
            return;
        }
        self.part_done(alloc.task, errno);
    }

    /// Writes data into a cluster that another request is allocating.
    fn join(&mut self, index: u32, task: &mut Task, top: &Image, host: u64) {
        let bits = top.layout.cluster_bits;
        let cluster = task.cursor >> bits;
        let end = task.end.min((cluster + 1) << bits);
        let mut segs = Vec::new();
        cut(&task.segs, task.cursor - task.offset, end - task.cursor, &mut segs);
        let (at, len) = (host + (task.cursor - (cluster << bits)), end - task.cursor);
        task.pending += 1;
        task.cursor = end;
        let file = self.chain.places.first().map_or(0, |p| p.data);
        self.issue(file, Tag::Join(index, cluster), Op::Write, at, len, &segs);
    }

    /// A joined write is done.
    pub(super) fn leave_cluster(&mut self, cluster: u64, errno: i32) {
        let chain = Arc::clone(&self.chain);
        let Some(top) = chain.top() else { return };
        let mut meta = top.lock();
        if errno == 0 {
            let bits = top.layout.cluster_bits;
            publish(&mut meta, top, cluster, (cluster << bits, (cluster + 1) << bits));
        }
        leave(&mut meta, top, cluster, false);
    }
}

/// Says that guest bytes `[from, to)`, all of one cluster, are in the host cluster that is being filled.
fn publish(meta: &mut Meta, top: &Image, cluster: u64, (from, to): (u64, u64)) {
    let Some(flight) = meta.in_flight.get_mut(&cluster) else { return };
    if std::mem::replace(&mut flight.published, true) {
        return;
    }
    let host = flight.host;
    let (slice, _) = top.place(cluster);
    let (Some(slot), Some(old)) = (top.cache.find(slice), entry(top, cluster)) else { return };
    let mapping = if top.layout.extended {
        let bits = touched(top, from, to);
        let (allocated, zero) = match old {
            Mapping::Unallocated => (bits, 0),
            Mapping::Zero { .. } => (bits, !bits),
            Mapping::Partial(p) if host_of(&old) == Some(host) || p.allocated == 0 => {
                (p.allocated | bits, p.zero & !bits)
            }
            _ => (u32::MAX, 0),
        };
        if allocated == u32::MAX {
            Mapping::Data { host, copied: true }
        } else {
            Mapping::Partial(Partial { host: Some(host), copied: true, allocated, zero })
        }
    } else {
        Mapping::Data { host, copied: true }
    };
    meta.publish(top, slot, cluster, &mapping, &old);
}

/// One request less writes to a cluster being filled; the last one ends that.
fn leave(meta: &mut Meta, top: &Image, cluster: u64, kept: bool) {
    let Some(flight) = meta.in_flight.get_mut(&cluster) else { return };
    flight.users = flight.users.saturating_sub(1);
    if flight.users > 0 {
        return;
    }
    let Some(flight) = meta.in_flight.remove(&cluster) else { return };
    if !flight.published && !kept && !top.layout.data_file {
        meta.unalloc(flight.host >> top.layout.cluster_bits);
    }
    let (slice, _) = top.place(cluster);
    if let Some(slot) = top.cache.find(slice) {
        meta.unpin(slot);
    }
    for waiter in flight.waiters {
        waiter.go_on();
    }
}
