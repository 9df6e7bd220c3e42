// SPDX-License-Identifier: Apache-2.0
//! What is behind guest memory on the host, as its description says: nothing with a name, a memfd, a file, pages that the
//! host has set aside. Called once by `machine`, before anything has touched the memory: what is decided here holds from the
//! first touch on (huge pages above all).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use base::Gpa;
use base::mmap::{Advice, Mmap};
use spec::{Memory, MemoryBacking, Pages, show_size};

use crate::hot::Hot;
use crate::layout::nodes;
use crate::pool::Lent;
use crate::ram::{GuestRam, MemError};

/// Guest memory that has its backing.
pub struct Backed {
    /// The memory.
    pub ram: GuestRam,
    /// Small pages took the place of those asked for: what to tell the user.
    pub fell_back: Option<String>,
}

/// Memory that can be plugged: where, how much, in blocks of what size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ToPlug {
    /// First address.
    pub at: Gpa,
    /// Bytes.
    pub size: u64,
    /// Bytes of a block.
    pub block: u64,
}

/// Guest memory for `ranges`, with room `to_plug` more, as `memory` says: [`Memory::at_start`] and [`Memory::to_plug`] bytes.
///
/// # Errors
/// [`MemError`] with what to do. Nothing is left behind then.
pub fn back(ranges: &[(Gpa, u64)], to_plug: Option<ToPlug>, memory: &Memory) -> Result<Backed, MemError> {
    let plain = |ranges, memory| plain(ranges, to_plug, memory);
    let tried = match &memory.pool {
        Some(socket) => from_pool(ranges, memory.size, socket),
        None => plain(ranges, memory),
    };
    match tried {
        Err(why) if memory.fallback && (memory.pool.is_some() || memory.pages.are_reserved()) => {
            let other = Memory { pages: Pages::Transparent, pool: None, fallback: false, ..memory.clone() };
            let fell_back = Some(format!("{why}; going on with memory in transparent huge pages, since fallback=on"));
            Ok(Backed { fell_back, ..plain(ranges, &other)? })
        }
        other => other,
    }
}

fn plain(ranges: &[(Gpa, u64)], to_plug: Option<ToPlug>, memory: &Memory) -> Result<Backed, MemError> {
    if memory.pages.are_reserved() {
        enough_huge_pages(memory)?;
    }
    let file = open(memory)?;
    let mut parts = Vec::with_capacity(ranges.len());
    let mut offset = 0;
    for &(at, size) in ranges {
        parts.push((at, run(at, size, file.as_ref().map(|f| (f.as_raw_fd(), offset)), memory, 0)?));
        offset += size;
    }
    let plain = file.is_none()
        && !memory.is_shared()
        && !memory.pages.are_reserved()
        && memory.host_node.is_none()
        && memory.host_nodes.is_empty();
    bind(&parts, ranges, memory)?;
    let mut ram = GuestRam::of(parts, None, plain)?;
    if let Some(ToPlug { at, size, block }) = to_plug {
        // Pages that are set aside are taken when a block is plugged, which may fail then, and no sooner.
        let place = file.as_ref().map(|f| (f.as_raw_fd(), offset));
        let behind = run(at, size, place, memory, libc::MAP_NORESERVE)?;
        if let Some(&node) = memory.host_nodes.first() {
            // It is the first node's.
            behind.bind_to_node(node).map_err(|source| MemError::Node { node, source })?;
        }
        ram = ram.with_hot(Hot::new(at, behind, block, memory.is_shared())?)?;
    }
    Ok(Backed { ram, fell_back: None })
}

/// Has the memory of each of the guest's nodes come from the host's node that is named for it.
fn bind(parts: &[(Gpa, Mmap)], ranges: &[(Gpa, u64)], memory: &Memory) -> Result<(), MemError> {
    for (&node, own) in memory.host_nodes.iter().zip(nodes(ranges, &memory.node_sizes())) {
        for (at, len) in own {
            let part = parts.iter().find(|(first, map)| (first.0..first.0 + map.len() as u64).contains(&at.0));
            let Some((first, map)) = part else { continue };
            // Both lie in the mapping.
            let (from, len) = ((at.0 - first.0) as usize, len as usize);
            map.bind_part_to_node(from, len, node).map_err(|source| MemError::Node { node, source })?;
        }
    }
    Ok(())
}

/// One run of memory with its backing and its advice.
fn run(
    at: Gpa,
    size: u64,
    file: Option<(RawFd, u64)>,
    memory: &Memory,
    further: libc::c_int,
) -> Result<Mmap, MemError> {
    let refused = |source| MemError::Map { size, source };
    let len = usize::try_from(size).map_err(|_| MemError::Layout(format!("{at} of {size} bytes")))?;
    let align = usize::try_from(memory.pages.bytes().max(2 << 20)).unwrap_or(2 << 20);
    let map = Mmap::reserved(len, align).map_err(refused)?;
    map.put(0, len, file, flags(memory, file.is_some()) | further).map_err(refused)?;
    advise(&map, memory)?;
    Ok(map)
}

/// Flags of `mmap` for it.
fn flags(memory: &Memory, is_file: bool) -> libc::c_int {
    let sharing = if memory.is_shared() { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
    let huge = match memory.pages {
        // The file says so itself.
        _ if is_file => 0,
        Pages::Transparent | Pages::Small => libc::MAP_NORESERVE,
        Pages::Huge2M => libc::MAP_HUGETLB | libc::MAP_HUGE_2MB,
        Pages::Huge1G => libc::MAP_HUGETLB | libc::MAP_HUGE_1GB,
    };
    sharing | huge
}

/// What has to be said before the first touch.
fn advise(map: &Mmap, memory: &Memory) -> Result<(), MemError> {
    match memory.pages {
        // Hints: a kernel without them, and a file that can't, go on with small pages, which the start-up table shows.
        Pages::Transparent => drop(map.advise(Advice::HugePages)),
        Pages::Small => drop(map.advise(Advice::NoHugePages)),
        Pages::Huge2M | Pages::Huge1G => {}
    }
    if let Some(node) = memory.host_node {
        map.bind_to_node(node).map_err(|source| MemError::Node { node, source })?;
    }
    if memory.ksm {
        map.advise(Advice::Mergeable).map_err(|source| MemError::Backing {
            what: "this kernel merges no pages".to_owned(),
            place: "memory.ksm",
            source,
            hint: "take ksm=on out, or use a kernel with CONFIG_KSM",
        })?;
    }
    Ok(())
}

/// The file behind it, if there is one.
fn open(memory: &Memory) -> Result<Option<File>, MemError> {
    let file = match (memory.backing, &memory.path) {
        (MemoryBacking::Anonymous, _) => return Ok(None),
        (MemoryBacking::File, Some(path)) => return open_path(path, memory.most()).map(Some),
        _ => memfd(memory.pages).map_err(|source| MemError::Backing {
            what: "no file in memory can be had".to_owned(),
            place: "memory.backing",
            source,
            hint: "use backing=anonymous, or free some memory on the host",
        })?,
    };
    let size = memory.most();
    file.set_len(size).map_err(|source| MemError::Map { size, source })?;
    Ok(Some(file))
}

fn open_path(path: &Path, size: u64) -> Result<File, MemError> {
    let refused = |what: &str, source: io::Error, hint| MemError::Backing {
        what: format!("{} {what}", path.display()),
        place: "memory.path",
        source,
        hint,
    };
    let mut how = OpenOptions::new();
    how.read(true).write(true);
    let file = if path.is_dir() { how.custom_flags(libc::O_TMPFILE).mode(0o600) } else { how.create(true).mode(0o600) };
    let file = file.open(path).map_err(|e| refused("can't be opened", e, "check the path and its mode"))?;
    let is = file.metadata().map_err(|e| refused("can't be looked at", e, "check the path"))?;
    if !is.is_file() {
        let source = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(refused("is no regular file", source, "name a file, or a folder for one without a name"));
    }
    // What is there may be somebody's: only an empty file grows.
    match is.len() {
        0 => file.set_len(size).map_err(|e| refused("can't be made as large", e, "free some space there"))?,
        len if len < size => {
            let source = io::Error::other(format!("it has {len} bytes, the guest {size}"));
            return Err(refused("is too short", source, "name an empty file, or one that is as large"));
        }
        _ => {}
    }
    Ok(file)
}

/// A file without a name, in memory, in pages of the given kind.
///
/// # Errors
/// What `memfd_create` says.
pub(crate) fn memfd(pages: Pages) -> io::Result<File> {
    let huge = match pages {
        Pages::Transparent | Pages::Small => 0,
        Pages::Huge2M => libc::MFD_HUGETLB | libc::MFD_HUGE_2MB,
        Pages::Huge1G => libc::MFD_HUGETLB | libc::MFD_HUGE_1GB,
    };
    // SAFETY: the name is a constant with its end; the call makes a descriptor.
    let fd = unsafe { libc::memfd_create(c"tare-memory".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | huge) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: fresh from the kernel, and nobody else's.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// Whether the host has set aside as many huge pages as that takes, before anything is tried.
pub(crate) fn enough_huge_pages(memory: &Memory) -> Result<(), MemError> {
    let page = memory.pages.bytes();
    let folder = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", page >> 10);
    let number =
        |name: &str| -> Option<u64> { std::fs::read_to_string(format!("{folder}/{name}")).ok()?.trim().parse().ok() };
    let want = memory.size / page;
    let free = number("free_hugepages").map(|free| free.saturating_sub(number("resv_hugepages").unwrap_or(0)));
    match free {
        Some(free) if free >= want => Ok(()),
        free => Err(MemError::HugePages { want, free: free.unwrap_or(0), page: show_size(page), folder }),
    }
}

/// Memory of a pool: its files, one after another, in place of `ranges`.
fn from_pool(ranges: &[(Gpa, u64)], size: u64, socket: &Path) -> Result<Backed, MemError> {
    let mut lent = Lent::ask(socket, size)?;
    let refused = |source| MemError::Map { size, source };
    let mut parts = Vec::with_capacity(ranges.len());
    let mut files = lent.take_files().into_iter();
    // File, bytes of it that are used already.
    let mut at_hand: Option<(OwnedFd, u64)> = None;
    for &(at, len) in ranges {
        let whole = usize::try_from(len).map_err(|_| MemError::Layout(format!("{at} of {len} bytes")))?;
        let map =
            Mmap::reserved(whole, usize::try_from(lent.page().max(2 << 20)).unwrap_or(2 << 20)).map_err(refused)?;
        let mut done = 0;
        while done < len {
            let (file, used) = match at_hand.take().filter(|(_, used)| *used < lent.piece()) {
                Some(hand) => hand,
                None => (files.next().ok_or_else(|| refused(io::ErrorKind::UnexpectedEof.into()))?, 0),
            };
            let part = (lent.piece() - used).min(len - done);
            let place = Some((file.as_raw_fd() as RawFd, used));
            map.put(done as usize, part as usize, place, libc::MAP_SHARED).map_err(refused)?;
            done += part;
            at_hand = Some((file, used + part));
        }
        // Whatever pages the pool has, they are there already.
        let _ = map.advise(Advice::HugePages);
        parts.push((at, map));
    }
    Ok(Backed { ram: GuestRam::of(parts, Some(lent), false)?, fell_back: None })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const RANGES: [(Gpa, u64); 2] = [(Gpa(0), 32 << 20), (Gpa(1 << 32), 16 << 20)];

    fn memory() -> Memory {
        Memory { size: 48 << 20, ..Memory::default() }
    }

    fn works(ram: &GuestRam) {
        assert_eq!(ram.size(), 48 << 20);
        for at in [0, (32 << 20) - 4, 1 << 32, (1 << 32) + (16 << 20) - 4] {
            assert_eq!(ram.read::<u32>(Gpa(at)), Some(0), "new memory is zero");
            ram.write(Gpa(at), 0x1234_5678_u32).unwrap();
            assert_eq!(ram.read::<u32>(Gpa(at)), Some(0x1234_5678));
        }
        assert!(ram.regions().all(|(_, _, host)| host.0.is_multiple_of(2 << 20)), "KVM can map huge pages");
    }

    #[test]
    fn each_backing_is_memory() {
        let folder = tempfile::tempdir().unwrap();
        for backing in [MemoryBacking::Anonymous, MemoryBacking::Memfd, MemoryBacking::File] {
            for (pages, shared) in [(Pages::Transparent, None), (Pages::Small, Some(true)), (Pages::Small, Some(false))]
            {
                let path = (backing == MemoryBacking::File).then(|| folder.path().join(format!("{pages:?}{shared:?}")));
                let memory = Memory { backing, path, pages, shared, ..memory() };
                works(&back(&RANGES, None, &memory).unwrap().ram);
            }
        }
    }

    #[test]
    fn a_shared_file_holds_what_the_guest_wrote_and_a_private_one_does_not() {
        let folder = tempfile::tempdir().unwrap();
        for (shared, holds) in [(None, 0x5a), (Some(false), 0)] {
            let path = folder.path().join(format!("{shared:?}"));
            let memory = Memory { backing: MemoryBacking::File, path: Some(path.clone()), shared, ..memory() };
            let backed = back(&RANGES, None, &memory).unwrap();
            backed.ram.write(Gpa((1 << 32) + 5), 0x5a_u8).unwrap();
            drop(backed);
            let bytes = std::fs::read(&path).unwrap();
            assert_eq!((bytes.len(), bytes[(32 << 20) + 5]), (48 << 20, holds));
        }
    }

    #[test]
    fn memory_to_plug_has_the_same_behind_it() {
        let folder = tempfile::tempdir().unwrap();
        let to_plug = ToPlug { at: Gpa(6 << 30), size: 16 << 20, block: 2 << 20 };
        for backing in [MemoryBacking::Anonymous, MemoryBacking::Memfd, MemoryBacking::File] {
            let path = (backing == MemoryBacking::File).then(|| folder.path().join("file"));
            let memory = Memory { hotplug: 16 << 20, backing, path: path.clone(), ..memory() };
            let ram = back(&RANGES, Some(to_plug), &memory).unwrap().ram;
            works(&ram);
            let hot = ram.hot().unwrap();
            hot.populate(Gpa(6 << 30), 16 << 20).unwrap_or_else(|e| eprintln!("skipped: {e}"));
            hot.mark(Gpa(6 << 30), 16 << 20, true);
            ram.write(Gpa((6 << 30) + 3), 0x77u8).unwrap();
            let in_file = path.map(|path| std::fs::read(path).unwrap());
            assert!(in_file.is_none_or(|bytes| bytes.len() == 64 << 20 && bytes[(48 << 20) + 3] == 0x77));
            match hot.discard(Gpa(6 << 30), 2 << 20) {
                Ok(()) => assert_eq!(ram.read::<u8>(Gpa((6 << 30) + 3)), Some(0), "{backing:?}"),
                Err(e) => eprintln!("skipped: the file system makes no holes, {e}"),
            }
        }
    }

    #[test]
    fn files_that_will_not_do_are_one_line() {
        let folder = tempfile::tempdir().unwrap();
        let short = folder.path().join("short");
        std::fs::write(&short, b"mine").unwrap();
        let missing = folder.path().join("no/such");
        for (path, part) in
            [(short.clone(), "too short"), (missing, "can't be opened"), ("/dev/null".into(), "no regular")]
        {
            let memory = Memory { backing: MemoryBacking::File, path: Some(path), ..memory() };
            let said = back(&RANGES, None, &memory).err().unwrap().to_string();
            assert!(said.contains(part) && said.contains("memory.path") && !said.contains('\n'), "{said}");
        }
        assert_eq!(std::fs::read(short).unwrap(), b"mine", "what was there is as it was");
        // A folder gives a file without a name, where the file system can do that.
        let memory = Memory { backing: MemoryBacking::File, path: Some(folder.path().into()), ..memory() };
        match back(&RANGES, None, &memory) {
            Ok(backed) => works(&backed.ram),
            Err(e) => eprintln!("skipped: {e}"),
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn too_few_huge_pages_are_said_and_small_ones_taken_only_if_asked() {
        // More than any host has set aside.
        let memory = Memory { size: 8 << 40, pages: Pages::Huge2M, ..Memory::default() };
        let ranges = [(Gpa(0), 8 << 40)];
        let said = back(&ranges, None, &memory).err().unwrap().to_string();
        assert!(said.contains("4194304 pages of 2M") && said.contains("nr_hugepages"), "{said}");
        let memory = Memory { size: 48 << 20, pages: Pages::Huge1G, fallback: true, ..Memory::default() };
        // 48 MiB are no page at all: enough in any case.
        assert!(enough_huge_pages(&memory).is_ok() || !Path::new("/sys/kernel/mm/hugepages").exists());
        let memory = Memory { size: 8 << 40, pages: Pages::Huge2M, fallback: true, ..Memory::default() };
        match back(&ranges, None, &memory) {
            Ok(backed) => assert!(backed.fell_back.unwrap().contains("transparent huge pages, since fallback=on")),
            // A host that overcommits nothing refuses so much.
            Err(e) => assert!(e.to_string().contains("cannot map"), "{e}"),
        }
    }

    #[test]
    fn pages_merge_only_where_that_is_asked_for() {
        /// Whether the kernel may merge pages of the mapping that starts there.
        fn may_merge(ram: &GuestRam) -> bool {
            let (_, _, host) = ram.regions().next().unwrap();
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let own = smaps.split(&format!("\n{:x}-", host.0)).nth(1).unwrap();
            let flags = own.lines().find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
            flags.split_ascii_whitespace().any(|flag| flag == "mg")
        }
        assert!(!may_merge(&back(&RANGES, None, &memory()).unwrap().ram));
        match back(&RANGES, None, &Memory { ksm: true, ..memory() }) {
            Ok(backed) => assert!(may_merge(&backed.ram)),
            Err(e) => {
                let said = e.to_string();
                assert!(said.contains("merges no pages") && said.contains("memory.ksm; take ksm=on out"), "{said}");
            }
        }
    }

    #[test]
    fn a_node_that_is_not_there_is_named() {
        let memory = Memory { host_node: Some(1000), ..memory() };
        let said = back(&RANGES, None, &memory).err().unwrap().to_string();
        assert!(said.contains("node 1000") && said.contains("memory.host-node"), "{said}");
        let memory = Memory { host_node: None, nodes: 2, host_nodes: vec![0, 1001], ..memory };
        let said = back(&RANGES, None, &memory).err().unwrap().to_string();
        assert!(said.contains("node 1001"), "{said}");
        match back(&RANGES, None, &Memory { host_nodes: vec![0, 0], ..memory }) {
            Ok(backed) => works(&backed.ram),
            Err(e) => eprintln!("skipped: {e}"),
        }
    }
}
