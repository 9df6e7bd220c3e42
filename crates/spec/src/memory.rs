// SPDX-License-Identifier: Apache-2.0
//! Guest memory: how much, what is behind it on the host, and when it is made to exist. Flag `--memory`, table `[memory]`.
//!
//! Filled by the command line, read by `mem` and `machine`; checks here are those that need no look at the host.

use std::path::PathBuf;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use crate::check::out_of_range;
use crate::parse::{Group, parse_number};
use crate::text::{maybe_size, on_off, size};
use crate::{FromText, SpecError, Word, parse_on_off, parse_size, show_size};

/// Least guest memory in bytes: a distribution kernel doesn't unpack in less.
pub const MIN_MEMORY: u64 = 16 << 20;
/// Most guest memory in bytes; keeps every guest address below the 46 bits that all 64-bit hosts have.
pub const MAX_MEMORY: u64 = 16 << 40;
/// Memory that is plugged later comes in multiples of this many bytes.
pub const PLUG_UNIT: u64 = 128 << 20;
/// Most NUMA nodes of a guest.
pub const MAX_NODES: u16 = 16;
/// Most threads that make memory ready.
pub const MAX_PREALLOC_THREADS: u16 = 256;

/// Guest memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Memory {
    /// Bytes; a multiple of the page size, at least 16 MiB.
    #[serde(deserialize_with = "size")]
    pub size: u64,
    /// What is behind it.
    pub backing: MemoryBacking,
    /// The file, or a folder for a file without a name, of `backing = "file"`.
    pub path: Option<PathBuf>,
    /// Its pages on the host.
    pub pages: Pages,
    /// Small pages will do where there are too few of those asked for.
    #[serde(deserialize_with = "on_off")]
    pub fallback: bool,
    /// Other processes may see it: writes reach the file. `None` is what the backing is for: memfd and file yes, anonymous no.
    pub shared: Option<bool>,
    /// Pages that are alike, in any guests, may become one.
    #[serde(deserialize_with = "on_off")]
    pub ksm: bool,
    /// The node of the host that all of it comes from.
    pub host_node: Option<u32>,
    /// NUMA nodes of the guest, which share its CPUs and what memory it starts with; 1 is none to speak of.
    pub nodes: u16,
    /// Nodes of the host, of which each of the guest's has one.
    #[serde(deserialize_with = "node_list")]
    pub host_nodes: Vec<u32>,
    /// When it is made to exist, and by whom.
    pub prealloc: Prealloc,
    /// Threads that do it; `None` is one for each vCPU.
    pub prealloc_threads: Option<u16>,
    /// The socket of the pool that it comes from.
    pub pool: Option<PathBuf>,
    /// Bytes that the guest may be given beyond its size, and lose again, while it runs.
    #[serde(deserialize_with = "size")]
    pub hotplug: u64,
    /// Bytes that are there when the guest starts, where the rest of its size is plugged as it becomes ready.
    #[serde(deserialize_with = "maybe_size")]
    pub boot: Option<u64>,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            size: 256 << 20,
            backing: MemoryBacking::default(),
            path: None,
            pages: Pages::default(),
            fallback: false,
            shared: None,
            ksm: false,
            host_node: None,
            nodes: 1,
            host_nodes: Vec::new(),
            prealloc: Prealloc::default(),
            prealloc_threads: None,
            pool: None,
            hotplug: 0,
            boot: None,
        }
    }
}

/// What is behind guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryBacking {
    /// Nothing with a name.
    #[default]
    Anonymous,
    /// A file in memory without a name, which can be handed to others.
    Memfd,
    /// A file, for instance on hugetlbfs or tmpfs.
    File,
}

/// Pages of guest memory on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pages {
    /// 4 KiB, and transparent huge pages wherever the kernel finds some.
    #[default]
    #[serde(rename = "thp")]
    Transparent,
    /// 4 KiB.
    #[serde(rename = "4K")]
    Small,
    /// 2 MiB, from those that the host has set aside.
    #[serde(rename = "2M")]
    Huge2M,
    /// 1 GiB, from those that the host has set aside.
    #[serde(rename = "1G")]
    Huge1G,
}

impl Pages {
    /// Bytes of a page, of which memory has a whole number.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Transparent | Self::Small => 4 << 10,
            Self::Huge2M => 2 << 20,
            Self::Huge1G => 1 << 30,
        }
    }

    /// Whether they come from what the host has set aside (hugetlb).
    #[must_use]
    pub const fn are_reserved(self) -> bool {
        matches!(self, Self::Huge2M | Self::Huge1G)
    }
}

/// When guest memory is made to exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Prealloc {
    /// When the guest first touches it.
    #[default]
    Off,
    /// Before the guest starts, by one thread that touches each page.
    Touch,
    /// Before the guest starts, by one thread and the kernel's own loop.
    Populate,
    /// Before the guest starts, by several threads.
    Parallel,
    /// By the vCPUs' own threads, before they enter the guest.
    Vcpu,
    /// By one thread, while the guest already runs.
    Background,
    /// It comes from a pool that had it ready.
    Pool,
}

impl Word for MemoryBacking {
    const WHAT: &'static str = "a backing of memory";
    const WORDS: &'static [(&'static str, Self)] =
        &[("anonymous", Self::Anonymous), ("memfd", Self::Memfd), ("file", Self::File)];
}

impl Word for Pages {
    const WHAT: &'static str = "a size of pages";
    const WORDS: &'static [(&'static str, Self)] =
        &[("thp", Self::Transparent), ("4K", Self::Small), ("2M", Self::Huge2M), ("1G", Self::Huge1G)];
}

impl Word for Prealloc {
    const WHAT: &'static str = "a time to make memory ready";
    const WORDS: &'static [(&'static str, Self)] = &[
        ("off", Self::Off),
        ("touch", Self::Touch),
        ("populate", Self::Populate),
        ("parallel", Self::Parallel),
        ("vcpu", Self::Vcpu),
        ("background", Self::Background),
        ("pool", Self::Pool),
    ];
}

impl FromText for Memory {
    /// `1G` or `size=1G,backing=memfd,pages=2M,prealloc=parallel` and so on.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        const KEYS: &[&str] = &[
            "size",
            "backing",
            "path",
            "pages",
            "fallback",
            "shared",
            "ksm",
            "host-node",
            "nodes",
            "host-nodes",
            "prealloc",
            "prealloc-threads",
            "pool",
            "hotplug",
            "boot",
        ];
        let group = Group::parse("memory", text, "size", KEYS)?;
        let default = Self::default();
        let pool = group.read("pool", |_, v| Ok(PathBuf::from(v)))?;
        let prealloc = group.read("prealloc", Prealloc::from_word)?;
        Ok(Self {
            size: group.read("size", |_, v| parse_size("memory", v))?.unwrap_or(default.size),
            backing: group.read("backing", MemoryBacking::from_word)?.unwrap_or(default.backing),
            path: group.read("path", |_, v| Ok(PathBuf::from(v)))?,
            pages: group.read("pages", Pages::from_word)?.unwrap_or(default.pages),
            fallback: group.read("fallback", parse_on_off)?.unwrap_or(default.fallback),
            shared: group.read("shared", parse_on_off)?,
            ksm: group.read("ksm", parse_on_off)?.unwrap_or(default.ksm),
            host_node: group.read("host-node", parse_number)?,
            nodes: group.read("nodes", parse_number)?.unwrap_or(default.nodes),
            host_nodes: group.read("host-nodes", parse_nodes)?.unwrap_or_default(),
            prealloc: prealloc.unwrap_or(default.prealloc),
            prealloc_threads: group.read("prealloc-threads", parse_number)?,
            pool,
            hotplug: group.read("hotplug", |_, v| parse_size("memory", v))?.unwrap_or(default.hotplug),
            boot: group.read("boot", |_, v| parse_size("memory", v))?,
        })
    }
}

/// `0:1:1`.
fn parse_nodes(key: &str, text: &str) -> Result<Vec<u32>, SpecError> {
    text.split(':').map(|number| parse_number(key, number)).collect()
}

/// Nodes as numbers in a list, or as in `host-nodes=`.
fn node_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u32>, D::Error> {
    /// Either form.
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        List(Vec<u32>),
        Text(String),
    }
    match Either::deserialize(deserializer)? {
        Either::List(nodes) => Ok(nodes),
        Either::Text(text) => parse_nodes("memory.host-nodes", &text).map_err(D::Error::custom),
    }
}

impl Memory {
    /// Bytes of each of the guest's nodes, of what it starts with: equal parts in whole pages of 2 MiB (or its own); the last
    /// one has what is over.
    #[must_use]
    pub fn node_sizes(&self) -> Vec<u64> {
        let (count, page) = (u64::from(self.nodes.max(1)), self.pages.bytes().max(2 << 20));
        let part = self.at_start() / count / page * page;
        let mut sizes = vec![part; usize::from(self.nodes.max(1))];
        sizes.last_mut().into_iter().for_each(|last| *last = self.at_start() - part * (count - 1));
        sizes
    }

    /// Whether others may see its writes.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.shared.unwrap_or(self.backing != MemoryBacking::Anonymous)
    }

    /// Bytes that are there when the guest starts.
    #[must_use]
    pub fn at_start(&self) -> u64 {
        self.boot.unwrap_or(self.size)
    }

    /// The most bytes that the guest may ever have.
    #[must_use]
    pub const fn most(&self) -> u64 {
        self.size.saturating_add(self.hotplug)
    }

    /// Bytes that may be plugged while the guest runs; a multiple of [`PLUG_UNIT`].
    #[must_use]
    pub fn to_plug(&self) -> u64 {
        self.most().saturating_sub(self.at_start())
    }

    pub(crate) fn check(&self) -> Result<(), SpecError> {
        let size = self.size;
        if size < MIN_MEMORY {
            let hint = if (16..=(1 << 20)).contains(&size) {
                format!("a plain number counts bytes, so for {size} MiB write {size}M")
            } else {
                format!("ask for at least {}", show_size(MIN_MEMORY))
            };
            return Err(out_of_range("memory", format!("{} is too little", show_size(size)), hint));
        }
        if size > MAX_MEMORY {
            let hint = format!("ask for at most {}", show_size(MAX_MEMORY));
            return Err(out_of_range("memory", format!("{} is too much", show_size(size)), hint));
        }
        let page = self.pages.bytes();
        if !size.is_multiple_of(page) {
            let hint = match size / page * page {
                0 => format!("ask for {} or for smaller pages", show_size(page)),
                below => format!("the nearest below is {}", show_size(below)),
            };
            let what = format!("{} bytes are not a multiple of {}", size, show_size(page));
            return Err(out_of_range("memory", what, hint));
        }
        self.check_backing()?;
        self.check_prealloc()?;
        self.check_hotplug()?;
        self.check_nodes()
    }

    fn check_nodes(&self) -> Result<(), SpecError> {
        let wrong = |key: &str, what: String, hint: &str| Err(out_of_range(format!("memory.{key}"), what, hint));
        if !(1..=MAX_NODES).contains(&self.nodes) {
            return wrong("nodes", format!("{} nodes can't be had", self.nodes), "use 1 to 16");
        }
        if self.nodes > 1 && self.node_sizes().contains(&0) {
            let what = format!("{} are too little for {} nodes", show_size(self.at_start()), self.nodes);
            return wrong("nodes", what, "ask for fewer nodes, more memory, or smaller pages");
        }
        let named = self.host_nodes.len();
        if named > 0 && (named != usize::from(self.nodes) || self.host_node.is_some() || self.pool.is_some()) {
            let what = format!("{named} nodes of the host for {} of the guest's", self.nodes);
            return wrong("host-nodes", what, "name one for each, without host-node= and pool=");
        }
        Ok(())
    }

    fn check_hotplug(&self) -> Result<(), SpecError> {
        let wrong = |key: &str, what: String, hint: &str| Err(out_of_range(format!("memory.{key}"), what, hint));
        if self.most() > MAX_MEMORY {
            let what = format!("{} and {} are too much together", show_size(self.size), show_size(self.hotplug));
            return wrong("hotplug", what, "ask for at most 16T in all");
        }
        let unit = PLUG_UNIT.max(self.pages.bytes());
        if !self.hotplug.is_multiple_of(unit) {
            let what = format!("{} are not a multiple of {}", show_size(self.hotplug), show_size(unit));
            return wrong("hotplug", what, "memory is plugged in such pieces");
        }
        if self.hotplug > 0 && self.pool.is_some() {
            let what = "memory that is plugged comes from no pool".to_owned();
            return wrong("hotplug", what, "take prealloc=pool or hotplug= out");
        }
        let Some(boot) = self.boot else { return Ok(()) };
        if self.prealloc != Prealloc::Background {
            let what = "only with prealloc=background the rest comes later".to_owned();
            return wrong("boot", what, "add prealloc=background, or take boot= out");
        }
        if boot < MIN_MEMORY || boot > self.size || !(self.size - boot).is_multiple_of(unit) {
            let what = format!("{} of {} can't be what a guest starts with", show_size(boot), show_size(self.size));
            let hint = format!("it starts with at least 16M, and the rest is a multiple of {}", show_size(unit));
            return Err(out_of_range("memory.boot", what, hint));
        }
        Ok(())
    }

    fn check_backing(&self) -> Result<(), SpecError> {
        let wrong = |key: &str, what: &str, hint: &str| Err(out_of_range(format!("memory.{key}"), what, hint));
        match (self.backing, &self.path) {
            (MemoryBacking::File, None) => return wrong("path", "backing=file needs a file", "name one with path="),
            (MemoryBacking::Anonymous | MemoryBacking::Memfd, Some(_)) => {
                return wrong("path", "only backing=file has a file", "add backing=file, or take path= out");
            }
            _ => {}
        }
        if self.backing == MemoryBacking::File && self.pages.are_reserved() {
            return wrong(
                "pages",
                "a file has the pages of its file system",
                "take pages= out, and name a file on hugetlbfs",
            );
        }
        if self.ksm && (self.pages.are_reserved() || self.is_shared() || self.pool.is_some()) {
            return wrong("ksm", "only private memory in small or transparent pages merges", "take ksm= out");
        }
        Ok(())
    }

    fn check_prealloc(&self) -> Result<(), SpecError> {
        let wrong = |key: &str, what: String, hint: &str| Err(out_of_range(format!("memory.{key}"), what, hint));
        match (self.prealloc, &self.pool) {
            (Prealloc::Pool, None) => {
                return wrong("pool", "prealloc=pool needs a pool".to_owned(), "name its socket with pool=");
            }
            (Prealloc::Pool, Some(_)) if *self != self.as_from_pool() => {
                let what = "memory from a pool has the pool's backing, pages and node".to_owned();
                return wrong("pool", what, "leave all keys but size, prealloc, pool and fallback out");
            }
            (Prealloc::Pool, Some(_)) | (_, None) => {}
            (_, Some(_)) => {
                let what = "only prealloc=pool takes memory from a pool".to_owned();
                return wrong("pool", what, "add prealloc=pool, or take pool= out");
            }
        }
        match self.prealloc_threads {
            Some(_) if self.prealloc != Prealloc::Parallel => {
                let what = "only prealloc=parallel has threads".to_owned();
                wrong("prealloc-threads", what, "add prealloc=parallel, or take prealloc-threads= out")
            }
            Some(threads) if !(1..=MAX_PREALLOC_THREADS).contains(&threads) => {
                let what = format!("{threads} threads are too {}", if threads == 0 { "few" } else { "many" });
                wrong("prealloc-threads", what, "use 1 to 256")
            }
            _ => Ok(()),
        }
    }

    /// This, with nothing said that is the pool's to say.
    fn as_from_pool(&self) -> Self {
        let (size, fallback, pool) = (self.size, self.fallback, self.pool.clone());
        Self { size, fallback, pool, prealloc: Prealloc::Pool, ..Self::default() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn said(text: &str) -> String {
        match Memory::from_text(text).and_then(|memory| memory.check()) {
            Ok(()) => String::new(),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn text_and_keys_say_the_same() {
        let text = "4G,backing=memfd,pages=2M,fallback=on,shared=off,host-node=1,prealloc=parallel,prealloc-threads=4";
        let memory = Memory::from_text(text).unwrap();
        assert_eq!((memory.size, memory.pages, memory.host_node), (4 << 30, Pages::Huge2M, Some(1)));
        assert_eq!((memory.prealloc, memory.prealloc_threads), (Prealloc::Parallel, Some(4)));
        assert!(memory.fallback && !memory.is_shared());
        memory.check().unwrap();
        assert!(Memory::from_text("1G,backing=memfd").unwrap().is_shared());
        assert_eq!(Memory::from_text("1G").unwrap(), Memory { size: 1 << 30, ..Memory::default() });
    }

    #[test]
    fn what_does_not_go_together_is_one_line() {
        for (text, part) in [
            ("1G,backing=file", "memory.path"),
            ("1G,path=/x", "backing=file"),
            ("1G,backing=file,path=/x,pages=2M", "hugetlbfs"),
            ("1G,ksm=on,pages=2M", "memory.ksm"),
            ("1G,ksm=on,backing=memfd", "private"),
            ("1G,prealloc=pool", "memory.pool"),
            ("1G,pool=/x", "prealloc=pool"),
            ("1G,prealloc=pool,pool=/x,pages=2M", "the pool's"),
            ("1G,prealloc-threads=2", "prealloc=parallel"),
            ("1G,prealloc=parallel,prealloc-threads=0", "too few"),
            ("1G,prealloc=parallel,prealloc-threads=257", "too many"),
            ("1025M,pages=2M", "not a multiple of 2M"),
            ("512M,pages=1G", "smaller pages"),
            ("1G,prealloc=soon", "touch, populate, parallel"),
            ("1G,pages=3M", "thp, 4K, 2M or 1G"),
            ("1G,nodes=0", "use 1 to 16"),
            ("1G,nodes=17", "use 1 to 16"),
            ("1G,nodes=2,pages=1G", "too little for 2 nodes"),
            ("1G,nodes=2,host-nodes=0", "memory.host-nodes"),
            ("1G,nodes=2,host-nodes=0:1,host-node=0", "without host-node="),
            ("1G,nodes=2,host-nodes=0:x", "host-nodes"),
            ("1G,hotplug=100M", "memory.hotplug"),
            ("1G,hotplug=16T", "too much together"),
            ("1G,hotplug=512M,pages=1G", "not a multiple of 1G"),
            ("1G,hotplug=1G,prealloc=pool,pool=/x", "the pool's"),
            ("1G,boot=512M", "prealloc=background"),
            ("1G,boot=2G,prealloc=background", "can't be what a guest starts with"),
            ("1G,boot=1000M,prealloc=background", "multiple of 128M"),
            ("1G,boot=0,prealloc=background", "at least 16M"),
        ] {
            let said = said(text);
            assert!(said.contains(part) && !said.contains('\n'), "{text}: {said}");
        }
        assert_eq!(said("1G,prealloc=pool,pool=/run/pool,fallback=on"), "");
        assert_eq!(said("1G,ksm=on,prealloc=background,pages=4K"), "");
        assert_eq!(said("2G,pages=1G,hotplug=8G"), "");
    }

    #[test]
    fn nodes_have_equal_parts_in_whole_pages() {
        let sizes = |text: &str| {
            let memory = Memory::from_text(text).unwrap();
            memory.check().unwrap();
            memory.node_sizes().iter().map(|bytes| bytes >> 20).collect::<Vec<_>>()
        };
        assert_eq!(sizes("1G"), [1024]);
        assert_eq!(sizes("1G,nodes=3,host-nodes=0:0:1"), [340, 340, 344]);
        assert_eq!(sizes("5G,nodes=2,pages=1G"), [2048, 3072]);
        let table: Memory = serde_json::from_str(r#"{"size":"1G","nodes":2,"host-nodes":[0,1]}"#).unwrap();
        assert_eq!(table, Memory::from_text("1G,nodes=2,host-nodes=0:1").unwrap());
    }

    #[test]
    fn what_comes_later_is_what_is_not_there_at_the_start() {
        let parts = |text: &str| {
            let memory = Memory::from_text(text).unwrap();
            memory.check().unwrap();
            [memory.at_start(), memory.to_plug(), memory.most()].map(|bytes| bytes >> 20)
        };
        assert_eq!(parts("1G"), [1024, 0, 1024]);
        assert_eq!(parts("1G,hotplug=2G"), [1024, 2048, 3072]);
        assert_eq!(parts("8G,prealloc=background,boot=512M"), [512, 7680, 8192]);
        assert_eq!(parts("8G,prealloc=background,boot=512M,hotplug=1G"), [512, 8704, 9216]);
    }
}
