// SPDX-License-Identifier: Apache-2.0
//! What a process's memory is made of, from the text of `/proc/PID/smaps` (proc(5)), guest memory left out.

use std::path::Path;

/// An anonymous mapping of this many bytes or more is guest memory: the monitor has none that large.
const GUEST: u64 = 32 << 20;

/// KiB of some mappings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weight {
    /// In memory.
    pub rss: u64,
    /// The same, shared pages divided among their users.
    pub pss: u64,
    /// Written to, so no longer a file's: what each further process costs.
    pub written: u64,
}

impl Weight {
    pub fn plus(&self, other: &Self) -> Self {
        Self { rss: self.rss + other.rss, pss: self.pss + other.pss, written: self.written + other.written }
    }
}

/// All mappings but the guest's memory, those of one kind together, the heaviest first by PSS.
pub fn parts(smaps: &str) -> Vec<(String, Weight)> {
    let mut parts: Vec<(String, Weight)> = Vec::new();
    let mut current = None;
    for line in smaps.lines() {
        let words: Vec<&str> = line.split_ascii_whitespace().collect();
        match words[..] {
            [range, mode, _, _, _, ref path @ ..] if mode.len() == 4 => {
                current = kind(range, mode, path.first().copied().unwrap_or_default()).map(|kind| {
                    let at = parts.iter().position(|(name, _)| *name == kind);
                    at.unwrap_or_else(|| {
                        parts.push((kind, Weight::default()));
                        parts.len() - 1
                    })
                });
            }
            [field, kib, "kB"] => {
                let (Some(at), Ok(kib)) = (current, kib.parse::<u64>()) else { continue };
                let weight = &mut parts[at].1;
                match field {
                    "Rss:" => weight.rss += kib,
                    "Pss:" => weight.pss += kib,
                    "Anonymous:" => weight.written += kib,
                    _ => {}
                }
            }
            _ => {}
        }
    }
    parts.retain(|(_, weight)| weight.rss > 0);
    parts.sort_by_key(|(_, weight)| std::cmp::Reverse(weight.pss));
    parts
}

/// What a mapping is called in the table; `None` for guest memory.
fn kind(range: &str, mode: &str, path: &str) -> Option<String> {
    let (start, end) = range.split_once('-')?;
    let len = u64::from_str_radix(end, 16).ok()?.checked_sub(u64::from_str_radix(start, 16).ok()?)?;
    if path.is_empty() {
        return (len < GUEST).then(|| "heaps and thread stacks".into());
    }
    let name = Path::new(path).file_name().map_or(path.into(), |name| name.to_string_lossy());
    let what = match mode {
        "r-xp" => " code",
        "r--p" => " constants",
        "rw-p" if path.starts_with('/') => " data",
        _ => "",
    };
    Some(format!("{name}{what}"))
}
