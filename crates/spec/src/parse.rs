// SPDX-License-Identifier: Apache-2.0
//! The text forms of a description: sizes, on/off, words, and `key=value` groups with QEMU's `,,` for a comma.
//!
//! Called by the command line for flags and by `text` for strings in `vm.toml`, so that both read the same.

use std::path::PathBuf;

use crate::{
    Aio, Backing, Cache, Coalesce, Console, Cow, Disk, DiskFormat, DiskThreads, Irqchip, KernelDecompress, KernelLoad,
    MmioStatus, Paths, SpecError, Throttle, Transport, Vioapic, Zeros,
};

/// A value with a text form. The error's place is the bare key (`memory`, `disk.cache`).
pub trait FromText: Sized {
    /// Reads the text form.
    ///
    /// # Errors
    /// [`SpecError`] with the key as its place.
    fn from_text(text: &str) -> Result<Self, SpecError>;
}

/// A value that is one of a few words.
pub trait Word: Copy + PartialEq + 'static {
    /// What the word names, with its article: `a cache mode`.
    const WHAT: &'static str;
    /// Every word and its value; a test holds these to the names that serde uses.
    const WORDS: &'static [(&'static str, Self)];

    /// Reads one of the words.
    ///
    /// # Errors
    /// [`SpecError::NotA`] at `place`, naming all the words.
    fn from_word(place: &str, text: &str) -> Result<Self, SpecError> {
        Self::WORDS.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| SpecError::NotA {
            place: place.to_owned(),
            value: text.to_owned(),
            want: Self::WHAT,
            hint: format!("use {}", any_of(Self::WORDS.iter().map(|(word, _)| *word))),
        })
    }
}

/// `a`, `a or b`, `a, b or c`.
fn any_of<'a>(words: impl DoubleEndedIterator<Item = &'a str>) -> String {
    let mut words = words.rev();
    let last = words.next().unwrap_or_default().to_owned();
    let rest: Vec<_> = words.rev().collect();
    if rest.is_empty() { last } else { format!("{} or {last}", rest.join(", ")) }
}

impl Word for DiskFormat {
    const WHAT: &'static str = "a disk format";
    const WORDS: &'static [(&'static str, Self)] = &[("raw", Self::Raw), ("qcow2", Self::Qcow2)];
}

impl Word for Cache {
    const WHAT: &'static str = "a cache mode";
    const WORDS: &'static [(&'static str, Self)] =
        &[("writeback", Self::Writeback), ("none", Self::None), ("unsafe", Self::Unsafe)];
}

impl Word for Aio {
    const WHAT: &'static str = "a way of doing I/O";
    const WORDS: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("io_uring", Self::IoUring), ("threads", Self::Threads)];
}

impl Word for Cow {
    const WHAT: &'static str = "a way to fill new clusters";
    const WORDS: &'static [(&'static str, Self)] =
        &[("explicit", Self::Explicit), ("unallocated", Self::Unallocated), ("zero-aware", Self::ZeroAware)];
}

impl Word for Zeros {
    const WHAT: &'static str = "a way to write zeroes";
    const WORDS: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("write", Self::Write), ("fallocate", Self::Fallocate)];
}

impl FromText for Backing {
    /// `none`, `folder`, `any`, or paths as [`Paths`] reads them. A path has a slash in it, so that a word misspelt is none.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        match text {
            "none" => Ok(Self::None),
            "folder" => Ok(Self::Folder),
            "any" => Ok(Self::Any),
            paths if paths.split(':').all(|path| path.contains('/')) => Paths::from_text(paths).map(Self::Listed),
            _ => Err(SpecError::NotA {
                place: "backing".to_owned(),
                value: text.to_owned(),
                want: "a gate for other files",
                hint: "use none, folder, any, or paths such as ./base.qcow2:/images/low.raw".to_owned(),
            }),
        }
    }
}

impl FromText for Paths {
    /// `a` or `a:b:c`.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        if text.split(':').any(str::is_empty) {
            return Err(SpecError::NotA {
                place: "paths".to_owned(),
                value: text.to_owned(),
                want: "a list of paths",
                hint: "write PATH or PATH:PATH".to_owned(),
            });
        }
        Ok(Self(text.split(':').map(PathBuf::from).collect()))
    }
}

/// Puts the full name of a key in place of the bare one of the value's own text form.
fn at<T: FromText>(place: &str, text: &str) -> Result<T, SpecError> {
    T::from_text(text).map_err(|error| match error {
        SpecError::NotA { value, want, hint, .. } => SpecError::NotA { place: place.to_owned(), value, want, hint },
        other => other,
    })
}

impl Word for DiskThreads {
    const WHAT: &'static str = "a way to serve queues";
    const WORDS: &'static [(&'static str, Self)] = &[("per-queue", Self::PerQueue), ("shared", Self::Shared)];
}

impl Word for Console {
    const WHAT: &'static str = "a console";
    const WORDS: &'static [(&'static str, Self)] =
        &[("virtio", Self::Virtio), ("serial", Self::Serial), ("none", Self::None)];
}

impl Word for Transport {
    const WHAT: &'static str = "a transport";
    const WORDS: &'static [(&'static str, Self)] = &[("pci", Self::Pci), ("mmio", Self::Mmio)];
}

impl Word for Irqchip {
    const WHAT: &'static str = "a place for the interrupt chips";
    const WORDS: &'static [(&'static str, Self)] = &[("split", Self::Split), ("kernel", Self::Kernel)];
}

impl Word for MmioStatus {
    const WHAT: &'static str = "a way to read registers";
    const WORDS: &'static [(&'static str, Self)] = &[("trap", Self::Trap), ("ro-page", Self::RoPage)];
}

impl Word for Vioapic {
    const WHAT: &'static str = "a way to reach the paravirtual interrupt controller";
    const WORDS: &'static [(&'static str, Self)] = &[("trap", Self::Trap), ("ro-page", Self::RoPage), ("pv", Self::Pv)];
}

impl Word for KernelDecompress {
    const WHAT: &'static str = "a place to unpack the kernel";
    const WORDS: &'static [(&'static str, Self)] = &[("guest", Self::Guest), ("monitor", Self::Monitor)];
}

impl Word for KernelLoad {
    const WHAT: &'static str = "a way to load the kernel";
    const WORDS: &'static [(&'static str, Self)] = &[("copy", Self::Copy), ("map", Self::Map)];
}

/// Reads `on`, `off`, `true` or `false`.
///
/// # Errors
/// [`SpecError::NotA`] at `place`.
pub fn parse_on_off(place: &str, text: &str) -> Result<bool, SpecError> {
    match text {
        "on" | "true" => Ok(true),
        "off" | "false" => Ok(false),
        _ => Err(SpecError::NotA {
            place: place.to_owned(),
            value: text.to_owned(),
            want: "on or off",
            hint: "use on or off".to_owned(),
        }),
    }
}

/// Reads an I/O port: a number, hexadecimal after `0x`.
///
/// # Errors
/// [`SpecError::NotA`] at `place`.
pub fn parse_port(place: &str, text: &str) -> Result<u16, SpecError> {
    let number = match text.strip_prefix("0x") {
        // `from_str_radix` takes a sign.
        Some(digits) if digits.starts_with('+') => None,
        Some(digits) => u16::from_str_radix(digits, 16).ok(),
        None => text.parse().ok().filter(|_| !text.starts_with('+')),
    };
    number.ok_or_else(|| SpecError::NotA {
        place: place.to_owned(),
        value: text.to_owned(),
        want: "a port",
        hint: "write a number below 65536, such as 0xf4".to_owned(),
    })
}

/// Reads a size in bytes: a whole number, then nothing, or K, M, G or T (powers of 1024, either case, `iB` allowed).
///
/// # Errors
/// [`SpecError::NotA`] at `place` for anything else, and for 2^64 bytes and more.
pub fn parse_size(place: &str, text: &str) -> Result<u64, SpecError> {
    let bad = || SpecError::NotA {
        place: place.to_owned(),
        value: text.to_owned(),
        want: "a size",
        hint: "write a whole number with K, M, G or T, such as 512M".to_owned(),
    };
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits).ok_or_else(bad)?;
    let shift = match unit.strip_suffix("iB").filter(|u| !u.is_empty()).unwrap_or(unit) {
        "" => 0,
        "K" | "k" => 10,
        "M" | "m" => 20,
        "G" | "g" => 30,
        "T" | "t" => 40,
        _ => return Err(bad()),
    };
    let number: u64 = number.parse().map_err(|_| bad())?;
    number.checked_mul(1 << shift).ok_or_else(bad)
}

/// Writes a size the way [`parse_size`] reads it, in the largest unit that divides it.
#[must_use]
pub fn show_size(bytes: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
        if bytes != 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

/// A group of `key=value` items, each key known and given once.
pub(crate) struct Group {
    name: &'static str,
    items: Vec<(String, String)>,
}

impl Group {
    /// Splits `text`. A first item without `=` is the value of `first`.
    pub(crate) fn parse(name: &'static str, text: &str, first: &str, known: &[&str]) -> Result<Self, SpecError> {
        let mut group = Self { name, items: Vec::new() };
        for (index, item) in split_items(text).into_iter().enumerate() {
            let (key, value) = match item.split_once('=') {
                Some((key, value)) => (key.to_owned(), value.to_owned()),
                None if index == 0 => (first.to_owned(), item),
                None if item.is_empty() => {
                    return Err(SpecError::NotA {
                        place: name.to_owned(),
                        value: text.to_owned(),
                        want: "a list of key=value",
                        hint: "take the empty item out, or write a comma in a path as `,,`".to_owned(),
                    });
                }
                None => {
                    return Err(SpecError::NotA {
                        place: name.to_owned(),
                        value: item,
                        want: "of the form key=value",
                        hint: format!("the keys are {}", known.join(", ")),
                    });
                }
            };
            if !known.contains(&key.as_str()) {
                return Err(SpecError::UnknownKey { place: name.to_owned(), key, known: known.join(", ") });
            }
            if group.items.iter().any(|(k, _)| *k == key) {
                return Err(SpecError::Repeated { place: name.to_owned(), key });
            }
            group.items.push((key, value));
        }
        Ok(group)
    }

    /// The value of `key` and its full name, through `read`.
    pub(crate) fn read<T>(
        &self,
        key: &str,
        read: impl FnOnce(&str, &str) -> Result<T, SpecError>,
    ) -> Result<Option<T>, SpecError> {
        match self.items.iter().find(|(k, _)| k == key) {
            Some((_, value)) => read(&format!("{}.{key}", self.name), value).map(Some),
            None => Ok(None),
        }
    }
}

/// Splits at single commas; `,,` is a comma inside an item.
fn split_items(text: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let escaped = c == ',' && chars.next_if_eq(&',').is_some();
        match items.last_mut() {
            Some(item) if c != ',' || escaped => item.push(c),
            _ => items.push(String::new()),
        }
    }
    items
}

/// Reads a whole number that `T` can hold.
pub(crate) fn parse_number<T: TryFrom<u64>>(place: &str, text: &str) -> Result<T, SpecError> {
    let number = text.parse::<u64>().ok().and_then(|n| T::try_from(n).ok());
    number.ok_or_else(|| SpecError::NotA {
        place: place.to_owned(),
        value: text.to_owned(),
        want: "a number",
        hint: "write a whole number, and not too large a one".to_owned(),
    })
}

/// Reads a size of fewer than 4 GiB.
fn parse_size32(place: &str, text: &str) -> Result<u32, SpecError> {
    let bytes = parse_size(place, text)?;
    u32::try_from(bytes).map_err(|_| SpecError::OutOfRange {
        place: place.to_owned(),
        what: format!("{} is too much", show_size(bytes)),
        hint: "use less than 4G".to_owned(),
    })
}

impl FromText for Disk {
    /// `root.raw` or `path=root.raw,readonly=on,cache=none,format=raw,aio=io_uring,serial=X`; for qcow2 also `l2-cache=4M`,
    /// `cow=explicit`, `zeros=write`, `backing=any`, `key=FILE`; of the device `queues=4`, `threads=shared`, block sizes, `coalesce=50:8`, and the keys of [`Throttle`].
    fn from_text(text: &str) -> Result<Self, SpecError> {
        const KEYS: &[&str] = &[
            "path",
            "format",
            "readonly",
            "cache",
            "aio",
            "serial",
            "l2-cache",
            "cow",
            "zeros",
            "backing",
            "key",
            "queues",
            "threads",
            "logical-block-size",
            "physical-block-size",
            "bps",
            "bps-burst",
            "iops",
            "iops-burst",
            "coalesce",
        ];
        let group = Group::parse("disk", text, "path", KEYS)?;
        let path = group.read("path", |_, v| Ok(PathBuf::from(v)))?;
        let path = path.ok_or(SpecError::MissingKey { place: "disk".to_owned(), key: "path" })?;
        let default = Self::new(path);
        Ok(Self {
            format: group.read("format", DiskFormat::from_word)?.unwrap_or(default.format),
            readonly: group.read("readonly", parse_on_off)?.unwrap_or(default.readonly),
            cache: group.read("cache", Cache::from_word)?.unwrap_or(default.cache),
            aio: group.read("aio", Aio::from_word)?.unwrap_or(default.aio),
            serial: group.read("serial", |_, v| Ok(v.to_owned()))?,
            l2_cache: group.read("l2-cache", parse_size)?,
            cow: group.read("cow", Cow::from_word)?.unwrap_or(default.cow),
            zeros: group.read("zeros", Zeros::from_word)?.unwrap_or(default.zeros),
            backing: group.read("backing", at)?.unwrap_or(default.backing),
            key: group.read("key", at)?.unwrap_or(default.key),
            queues: group.read("queues", parse_number)?,
            threads: group.read("threads", DiskThreads::from_word)?.unwrap_or(default.threads),
            logical_block_size: group.read("logical-block-size", parse_size32)?,
            physical_block_size: group.read("physical-block-size", parse_size32)?,
            throttle: Throttle::from_group(&group)?,
            coalesce: group.read("coalesce", Coalesce::parse)?,
            path: default.path,
        })
    }
}

impl Throttle {
    fn from_group(group: &Group) -> Result<Self, SpecError> {
        Ok(Self {
            bps: group.read("bps", parse_size)?,
            bps_burst: group.read("bps-burst", parse_size)?,
            iops: group.read("iops", parse_number)?,
            iops_burst: group.read("iops-burst", parse_number)?,
        })
    }
}

impl FromText for Throttle {
    /// `bps=10M,bps-burst=1M,iops=1000,iops-burst=100`.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        let known = ["bps", "bps-burst", "iops", "iops-burst"];
        Self::from_group(&Group::parse("disk.throttle", text, "bps", &known)?)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::Memory;

    #[test]
    fn ports_are_decimal_or_hexadecimal() {
        for (text, port) in [("0xf4", 0xf4), ("244", 244), ("0", 0), ("0xFFFF", 0xffff)] {
            assert_eq!(parse_port("p", text), Ok(port));
        }
    }

    fn fails<T: FromText + std::fmt::Debug>(text: &str) -> String {
        T::from_text(text).unwrap_err().to_string()
    }

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 64 << 10),
            ("1M", 1 << 20),
            ("3g", 3 << 30),
            ("2T", 2 << 40),
            ("512MiB", 512 << 20),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_size("memory", text), Ok(bytes), "{text}");
        }
        for text in
            ["", "G", "-1", "+1", "1.5G", "1GB", "1 G", "0x10", "iB", "1iB", "16777216T", "18446744073709551616", "１G"]
        {
            assert!(parse_size("memory", text).is_err(), "{text}");
        }
        assert_eq!(
            fails::<Memory>("12Q"),
            "`12Q` is not a size: memory; write a whole number with K, M, G or T, such as 512M"
        );
    }

    #[test]
    fn shown_sizes_read_back() {
        for bytes in [0, 1, 1023, 1024, 1025, 3 << 20, (1 << 30) + 4096, 5 << 40, u64::MAX] {
            assert_eq!(parse_size("x", &show_size(bytes)), Ok(bytes));
        }
        assert_eq!(show_size(1536 << 20), "1536M");
    }

    #[test]
    fn memory_groups() {
        assert_eq!(Memory::from_text("1G").unwrap().size, 1 << 30);
        assert_eq!(Memory::from_text("size=64M").unwrap().size, 64 << 20);
    }

    #[test]
    fn disk_groups() {
        assert_eq!(Disk::from_text("root.raw").unwrap(), Disk::new("root.raw"));
        assert_eq!(Disk::from_text("a,,b,readonly=on").unwrap(), Disk { readonly: true, ..Disk::new("a,b") });
        assert_eq!(Disk::from_text("path=k=v.raw").unwrap(), Disk::new("k=v.raw"));
        assert_eq!(
            Disk::from_text("path=root.raw,readonly=off,cache=none,format=raw,aio=io_uring,serial=X1").unwrap(),
            Disk { cache: Cache::None, aio: Aio::IoUring, serial: Some("X1".to_owned()), ..Disk::new("root.raw") }
        );
        assert_eq!(fails::<Disk>("readonly=on"), "`path` is missing: disk; add path=VALUE");
        assert_eq!(
            fails::<Disk>("a.raw,ro"),
            "`ro` is not of the form key=value: disk; the keys are path, format, readonly, cache, aio, serial, l2-cache, cow, zeros, backing, key, \
             queues, threads, logical-block-size, physical-block-size, bps, bps-burst, iops, iops-burst, coalesce"
        );
        assert_eq!(
            fails::<Disk>("a,cache=writethrough"),
            "`writethrough` is not a cache mode: disk.cache; use writeback, none or unsafe"
        );
        let coalesced = Disk { coalesce: Some(Coalesce { usec: 50, frames: 8 }), ..Disk::new("a") };
        assert_eq!(Disk::from_text("a,coalesce=50:8").unwrap(), coalesced);
        assert_eq!(fails::<Disk>("a,format=vmdk"), "`vmdk` is not a disk format: disk.format; use raw or qcow2");
        assert_eq!(
            Disk::from_text("a,format=qcow2,l2-cache=4M,cow=explicit,zeros=fallocate,backing=any").unwrap(),
            Disk {
                format: DiskFormat::Qcow2,
                l2_cache: Some(4 << 20),
                cow: Cow::Explicit,
                zeros: Zeros::Fallocate,
                backing: Backing::Any,
                ..Disk::new("a")
            }
        );
        assert_eq!(
            Disk::from_text("a,queues=2,threads=shared,logical-block-size=4K,bps=1M,bps-burst=64K,iops=50").unwrap(),
            Disk {
                queues: Some(2),
                threads: DiskThreads::Shared,
                logical_block_size: Some(4096),
                throttle: Throttle { bps: Some(1 << 20), bps_burst: Some(64 << 10), iops: Some(50), iops_burst: None },
                ..Disk::new("a")
            }
        );
        let listed = |paths: &[&str]| Paths(paths.iter().map(PathBuf::from).collect());
        assert_eq!(
            Disk::from_text("a,format=qcow2,backing=./low:/b/base.raw,key=top.key:low.key").unwrap(),
            Disk {
                format: DiskFormat::Qcow2,
                backing: Backing::Listed(listed(&["./low", "/b/base.raw"])),
                key: listed(&["top.key", "low.key"]),
                ..Disk::new("a")
            }
        );
        assert_eq!(
            fails::<Disk>("a,queues=70000"),
            "`70000` is not a number: disk.queues; write a whole number, and not too large a one"
        );
        assert_eq!(
            fails::<Disk>("a,logical-block-size=4G"),
            "4G is too much: disk.logical-block-size; use less than 4G"
        );
        assert_eq!(
            fails::<Disk>("a,backing=foldr"),
            "`foldr` is not a gate for other files: disk.backing; use none, folder, any, or paths such as ./base.qcow2:/images/low.raw"
        );
        assert_eq!(fails::<Disk>("a,key=x::y"), "`x::y` is not a list of paths: disk.key; write PATH or PATH:PATH");
        for gate in [Backing::None, Backing::Folder, Backing::Any, Backing::Listed(listed(&["a", "b:c"]))] {
            let text = serde_json::to_string(&gate).unwrap();
            assert_eq!(serde_json::from_str::<Backing>(&text).unwrap(), gate, "{text}");
        }
        assert_eq!(serde_json::from_str::<Paths>("\"a:b\"").unwrap(), listed(&["a", "b"]));
        assert_eq!(fails::<Disk>("a,readonly=maybe"), "`maybe` is not on or off: disk.readonly; use on or off");
        assert!(fails::<Disk>("a,").contains("empty item"));
    }

    #[test]
    fn comma_escapes_split_as_qemu_does() {
        assert_eq!(split_items("a,,b"), ["a,b"]);
        assert_eq!(split_items("a,,,b"), ["a,", "b"]);
        assert_eq!(split_items(",,,,"), [",,"]);
        assert_eq!(split_items(""), [""]);
        assert_eq!(split_items("a,b,"), ["a", "b", ""]);
    }

    /// The words of flags are the words of `vm.toml`.
    #[test]
    fn words_agree_with_serde() {
        fn check<T: Word + serde::Serialize + std::fmt::Debug>() {
            for (word, value) in T::WORDS {
                assert_eq!(serde_json::to_string(value).unwrap(), format!("\"{word}\""));
                assert_eq!(T::from_word("x", word).unwrap(), *value);
            }
            assert!(T::from_word("x", "nonsense").is_err());
        }
        check::<DiskFormat>();
        check::<Cow>();
        check::<Zeros>();
        check::<DiskThreads>();
        check::<Cache>();
        check::<Aio>();
        check::<Console>();
        check::<Irqchip>();
        check::<Vioapic>();
        check::<MmioStatus>();
        check::<KernelDecompress>();
        check::<KernelLoad>();
        check::<Transport>();
        check::<crate::Iommu>();
    }
}
