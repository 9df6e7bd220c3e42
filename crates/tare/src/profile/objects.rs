// SPDX-License-Identifier: Apache-2.0
//! The files that this process was loaded from, for two questions of a profile: who called whom on a copied stack, and what
//! the functions are called. Made before anything is sampled; the sampler's thread unwinds, the main thread asks for names
//! at the end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, Module, Unwinder};
use machine::Symbols;

use super::elf::Elf;

/// Most callers that are followed.
const DEEP: usize = 96;
/// Addresses of the kernel's half.
const KERNEL: u64 = 1 << 63;

/// A file and where it is.
struct Object {
    at: Range<u64>,
    name: String,
    elf: Elf,
}

/// All of them.
pub struct Objects(Vec<Object>);

/// Where runs of a file are mapped: the lowest address is that of the file's base.
fn mapped(maps: &str) -> BTreeMap<PathBuf, Range<u64>> {
    let mut out: BTreeMap<PathBuf, Range<u64>> = BTreeMap::new();
    for line in maps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(range), Some(path)) = (words.next(), words.nth(4).filter(|path| path.starts_with('/'))) else {
            continue;
        };
        let Some((from, to)) = range.split_once('-') else { continue };
        let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)) else { continue };
        let whole = out.entry(path.into()).or_insert(from..to);
        *whole = whole.start.min(from)..whole.end.max(to);
    }
    out
}

impl Objects {
    /// Those of this process.
    #[must_use]
    pub fn own() -> Self {
        let exe = std::fs::read_link("/proc/self/exe").unwrap_or_default();
        let object = |(path, at): (PathBuf, Range<u64>)| {
            // A program that was replaced meanwhile is still there by this name.
            let open = if path == exe { Path::new("/proc/self/exe") } else { &path };
            let elf = Elf::parse(&std::fs::read(open).ok()?);
            elf.text.as_ref()?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Some(Object { at, name, elf })
        };
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        Self(mapped(&maps).into_iter().filter_map(object).collect())
    }

    /// One that follows calls through them.
    #[must_use]
    pub fn stacks(&self) -> Stacks {
        let mut unwinder = UnwinderX86_64::new();
        for Object { at, name, elf } in &self.0 {
            let section = |section: &Option<super::elf::Section>| {
                (
                    section.as_ref().map(|s| s.at.clone()),
                    section.as_ref().map(|s| Arc::<[u8]>::from(s.bytes.as_slice())),
                )
            };
            let ((text_svma, text), (eh_frame_svma, eh_frame)) = (section(&elf.text), section(&elf.frames));
            let (eh_frame_hdr_svma, eh_frame_hdr) = section(&elf.index);
            let sections = ExplicitModuleSectionInfo {
                base_svma: 0,
                text_svma,
                text,
                eh_frame_svma,
                eh_frame,
                eh_frame_hdr_svma,
                eh_frame_hdr,
                ..ExplicitModuleSectionInfo::default()
            };
            unwinder.add_module(Module::new(name.clone(), at.clone(), at.start, sections));
        }
        let code = self.0.iter().map(|object| object.at.clone()).collect();
        Stacks { unwinder, cache: CacheX86_64::new(), code }
    }

    /// What the function at `at` is called, in this process or, by `kernel`, in the host's kernel.
    #[must_use]
    pub fn name(&self, at: u64, kernel: &Symbols) -> String {
        if at & KERNEL != 0 {
            let name = kernel.name(at);
            return name.split_once('+').map_or_else(|| "[kernel]".to_owned(), |(function, _)| function.to_owned());
        }
        let Some(object) = self.0.iter().find(|object| object.at.contains(&at)) else { return "[unknown]".to_owned() };
        match object.elf.function(at - object.at.start) {
            // Without the hash that tells two builds apart.
            Some(function) => format!("{:#}", rustc_demangle::demangle(&function.name)),
            None => format!("[{}]", object.name),
        }
    }
}

/// Whether an address is the kernel's.
#[must_use]
pub const fn is_kernels(at: u64) -> bool {
    at & KERNEL != 0
}

/// Follows calls on copied stacks.
pub struct Stacks {
    unwinder: UnwinderX86_64<Arc<[u8]>>,
    cache: CacheX86_64,
    /// Where there is code; what else looks like a return address is none.
    code: Vec<Range<u64>>,
}

impl Stacks {
    /// The callers of a thread of this process, innermost first, from its registers and a copy of its stack from `sp` on.
    pub fn follow(&mut self, ip: u64, sp: u64, bp: u64, stack: &[u8]) -> Vec<u64> {
        let mut word = |at: u64| {
            let from = at.checked_sub(sp).and_then(|from| usize::try_from(from).ok()).ok_or(())?;
            let bytes = stack.get(from..from.checked_add(8).ok_or(())?).ok_or(())?;
            Ok(bytes.try_into().map_or(0, u64::from_le_bytes))
        };
        let mut frames = self.unwinder.iter_frames(ip, UnwindRegsX86_64::new(ip, sp, bp), &mut self.cache, &mut word);
        let mut out = Vec::new();
        while let Ok(Some(frame)) = frames.next() {
            let at = frame.address_for_lookup();
            if out.len() == DEEP || !out.is_empty() && !self.code.iter().any(|code| code.contains(&at)) {
                break;
            }
            out.push(at);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_where_they_are_mapped() {
        let maps = "\
            5580a0000000-5580a0010000 r--p 00000000 fe:00 12 /usr/bin/tare\n\
            5580a0010000-5580a0400000 r-xp 00010000 fe:00 12 /usr/bin/tare\n\
            7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n\
            7ffc00000000-7ffc00020000 rw-p 00000000 00:00 0 [stack]\n";
        let found: Vec<_> = mapped(maps).into_iter().collect();
        assert_eq!(found, [(PathBuf::from("/usr/bin/tare"), 0x5580_a000_0000..0x5580_a040_0000)]);
    }

    #[test]
    fn functions_of_this_process_and_of_the_kernel_have_names() {
        let (objects, kernel) = (Objects::own(), Symbols::default());
        let at = functions_of_this_process_and_of_the_kernel_have_names as fn() as usize as u64;
        let name = objects.name(at, &kernel);
        assert!(name.ends_with("functions_of_this_process_and_of_the_kernel_have_names"), "{name}");
        assert_eq!(
            (objects.name(1, &kernel).as_str(), objects.name(1 << 63, &kernel).as_str()),
            ("[unknown]", "[kernel]")
        );
    }
}
