// SPDX-License-Identifier: Apache-2.0
//! What a disk's user hears while it is in use: requests that the host failed, and damage in the image. Called by
//! [`crate::Disk::reap`] for each completion with an error, on whatever thread reaps.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::news::{News, Tally};

/// Kinds of errors that are counted one by one; more than hosts have for a file.
const MOST_KINDS: usize = 16;

/// Where a disk says what went wrong; shared by its handles.
#[derive(Debug)]
pub struct Voice {
    news: Arc<News>,
    /// Kinds of errors met, by number. Taken for requests that failed, and no others.
    kinds: Mutex<Vec<(i32, Arc<Tally>)>>,
    /// Damage was reported.
    damage: AtomicBool,
}

impl Voice {
    /// A voice that says its lines through `news`.
    pub fn new(news: Arc<News>) -> Self {
        Self { news, kinds: Mutex::default(), damage: AtomicBool::new(false) }
    }

    /// A request of the disk at `path` ended with `error`; `damaged`: the image takes no more writes.
    pub fn failed(&self, path: &Path, error: &io::Error, damaged: bool) {
        let path = path.display();
        if damaged {
            if !self.damage.swap(true, Ordering::AcqRel) {
                self.news.say(format!(
                    "disk {path}: the image contradicts itself and takes no more writes; stop using it, then run `tare img check --repair {path}`"
                ));
            }
            return;
        }
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        // What the asker got wrong is the asker's own affair.
        if matches!(errno, libc::EINVAL | libc::EROFS) {
            return;
        }
        let Some(count) = self.tally(errno).and_then(|tally| tally.count()) else { return };
        let times = if count == 1 { "a request".into() } else { format!("{count} requests so far") };
        let full = matches!(errno, libc::ENOSPC | libc::EDQUOT);
        let what = io::Error::from_raw_os_error(errno).to_string();
        let reason = what.split(" (os error").next().unwrap_or_default();
        let to_do = if full {
            "make room there: each failed alone, as an I/O error, and the disk goes on"
        } else {
            "the host's kernel log may say why; each failed alone, as an I/O error"
        };
        self.news.say(format!("disk {path}: the host failed {times}, {reason}; {to_do}"));
    }

    fn tally(&self, errno: i32) -> Option<Arc<Tally>> {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, tally)) = kinds.iter().find(|(kind, _)| *kind == errno) {
            return Some(Arc::clone(tally));
        }
        if kinds.len() == MOST_KINDS {
            return None;
        }
        let tally = Arc::<Tally>::default();
        kinds.push((errno, Arc::clone(&tally)));
        Some(tally)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_told_once_and_then_by_tens() {
        let news = Arc::new(News::new().unwrap());
        let voice = Voice::new(Arc::clone(&news));
        let path = Path::new("/d.qcow2");
        let fail = |errno| voice.failed(path, &io::Error::from_raw_os_error(errno), false);
        (0..10).for_each(|_| fail(libc::ENOSPC));
        fail(libc::EIO);
        fail(libc::EINVAL);
        let lines = news.take();
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].starts_with("disk /d.qcow2: the host failed a request, No space left on device; make room"));
        assert!(lines[1].contains("10 requests so far, No space left"), "{lines:?}");
        assert!(lines[2].contains("a request, Input/output error; the host's kernel log"), "{lines:?}");
        (0..2).for_each(|_| voice.failed(path, &io::Error::from_raw_os_error(libc::EIO), true));
        let lines = news.take();
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(lines[0].contains("takes no more writes") && lines[0].contains("check --repair /d.qcow2"), "{lines:?}");
    }
}
