// SPDX-License-Identifier: Apache-2.0
//! An end for what hangs, that does not mind slow machines: work is given up only if for a minute nothing at all moved, neither
//! in this process nor in those it started, nobody waited for a disk and nobody was ready to run. Then it says who waits
//! for what.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Looks, one a second, at which nothing has moved.
const STILL: u32 = 60;
/// Looks after which anything is given up that is as small as these tests.
const MOST: u32 = 1200;

/// Runs `work` on a thread of its own. `Err` says that it panicked, or where it hangs; it is left behind then.
pub fn watch<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let (tell, told) = channel();
    std::thread::spawn(move || {
        let _ = tell.send(catch_unwind(AssertUnwindSafe(work)));
    });
    let (mut still, mut before) = (0, Picture::default());
    for _ in 0..MOST {
        match told.recv_timeout(Duration::from_secs(1)) {
            Ok(result) => return result.map_err(|_| "the test panicked".into()),
            Err(RecvTimeoutError::Disconnected) => return Err("the test is gone".into()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let now = Picture::take();
        still = if now.moved == before.moved && !now.busy { still + 1 } else { 0 };
        before = now;
        if still >= STILL {
            break;
        }
    }
    Err(format!("it hangs:\n{}", before.text))
}

/// What this process and its children are doing.
#[derive(Default)]
struct Picture {
    /// Bytes that each has read and written.
    moved: BTreeMap<PathBuf, String>,
    /// Someone waits for a disk, or wants to run.
    busy: bool,
    text: String,
}

fn tasks(of: &str) -> Vec<PathBuf> {
    let Ok(dir) = fs::read_dir(format!("/proc/{of}/task")) else { return Vec::new() };
    dir.flatten().map(|e| e.path()).collect()
}

impl Picture {
    fn take() -> Self {
        let mut picture = Self::default();
        let mut waiting = vec!["self".to_owned()];
        while let Some(process) = waiting.pop() {
            for task in tasks(&process) {
                let read = |name: &str| fs::read_to_string(task.join(name)).unwrap_or_default();
                waiting.extend(read("children").split_whitespace().map(str::to_owned));
                let stat = read("stat");
                let state = stat.rsplit(") ").next().unwrap_or_default().chars().next().unwrap_or('?');
                // Who looks is running.
                let own = fs::read_link("/proc/thread-self").is_ok_and(|own| task.ends_with(own.file_name().unwrap()));
                picture.busy |= matches!(state, 'D' | 'R') && !own;
                let words = (read("comm"), read("wchan"), read("syscall"));
                picture.text += &format!("{}: {state} {words:?}\n", task.display());
                if !own {
                    picture.moved.insert(task.clone(), read("io"));
                }
            }
        }
        picture
    }
}
