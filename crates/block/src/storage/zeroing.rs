// SPDX-License-Identifier: Apache-2.0
//! How zeroes around the data of a new cluster get into the file: written together with it, or by `fallocate` beside it.
//! Which is cheaper depends on the file system: some only note an extent, others take the file's lock and wait for all
//! that is in flight. So it is measured, once for a file system and way to it, on a scratch file without a name in the
//! image's folder, by a thread of its own; until it has an answer, and wherever it can't have one, zeroes are written.
//!
//! Asked by the engine's allocating writes, on any thread.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::options::Zeros;

use super::Storage;
use super::buffer::AlignedBuf;
use super::sys;

/// What `fallocate` is asked for starts and ends at multiples of this many bytes: blocks of most file systems.
pub const BLOCK: u64 = 4096;
/// Writing is cheaper, however much it is.
const NEVER: u64 = u64::MAX;
/// Nobody knows yet.
const UNKNOWN: u64 = u64::MAX - 1;
/// Bytes of a measured cluster.
const CLUSTER: u64 = 64 << 10;
/// Clusters of each thread that measures.
const CLUSTERS: u64 = 8;
/// Threads that measure: what makes others wait shows only where there are others.
const THREADS: u64 = 2;
/// Longest time for one way in one round, and rounds.
const LIMIT: Duration = Duration::from_micros(700);
const ROUNDS: usize = 2;
/// More zeroes than this around one piece of data there never are.
const MOST: u64 = 4 << 20;

/// File systems on which a scratch file would tell of a network or of another program.
const FOREIGN: &[i64] = &[0x6969, 0xff53_4d42, 0xfe53_4d42, 0x6573_5546, 0x0102_1997, 0x00c3_6400, 0x517b];

/// Answers by device and by whether I/O goes past the page cache.
static ANSWERS: Mutex<BTreeMap<(u64, bool), Arc<AtomicU64>>> = Mutex::new(BTreeMap::new());

/// The choice for one file.
#[derive(Debug, Default)]
pub struct Zeroing {
    choice: Zeros,
    /// Where the file lies, if anything is to be measured: the file, and whether its I/O is direct.
    file: Option<(Arc<File>, bool)>,
    answer: OnceLock<Arc<AtomicU64>>,
}

impl Zeroing {
    /// For data that goes to `storage`.
    pub fn new(choice: Zeros, storage: &Storage) -> Self {
        let file = match storage {
            Storage::File(file) => file.plain(),
            _ => None,
        };
        Self { choice, file, answer: OnceLock::new() }
    }

    /// From how many bytes on `fallocate` is the way; `by_name`: only if that was asked for. Never waits: the first who asks
    /// starts the measurement.
    pub fn least(&self, by_name: bool) -> u64 {
        match self.choice {
            Zeros::Fallocate => BLOCK,
            Zeros::Write => NEVER,
            Zeros::Auto if by_name => NEVER,
            Zeros::Auto => self.answer.get_or_init(|| self.ask()).load(Ordering::Relaxed),
        }
    }

    fn ask(&self) -> Arc<AtomicU64> {
        let never = || Arc::new(AtomicU64::new(NEVER));
        let Some((file, direct)) = &self.file else { return never() };
        let Ok(device) = file.metadata().map(|m| m.dev()) else { return never() };
        let mut answers = ANSWERS.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = answers.get(&(device, *direct)) {
            return Arc::clone(known);
        }
        let answer = Arc::new(AtomicU64::new(UNKNOWN));
        answers.insert((device, *direct), Arc::clone(&answer));
        drop(answers);
        // The thread gets the scratch file alone: the image's would keep its locks for as long as the measurement takes.
        let started = scratch(file, *direct).and_then(|scratch| {
            let told = Arc::clone(&answer);
            let measure = move || told.store(measure(&scratch).unwrap_or(NEVER), Ordering::Relaxed);
            std::thread::Builder::new().name("blk-probe".into()).spawn(measure)
        });
        if started.is_err() {
            answer.store(NEVER, Ordering::Relaxed);
        }
        answer
    }
}

/// What each way costs: data alone, data and zeroes in one write, data and zeroes by `fallocate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Costs {
    data: Duration,
    merged: Duration,
    beside: Duration,
}

impl Costs {
    /// From how many zeroes on `fallocate` is clearly cheaper.
    fn least(self) -> u64 {
        let around = u128::from(CLUSTER - BLOCK);
        let written = self.merged.saturating_sub(self.data).as_nanos();
        let noted = self.beside.saturating_sub(self.data).as_nanos();
        if written == 0 {
            return NEVER;
        }
        // A fourth more than what is even: the measurement is short.
        let even = u64::try_from(noted * around * 5 / (written * 4)).unwrap_or(NEVER);
        if even > MOST { NEVER } else { even.next_multiple_of(BLOCK).max(BLOCK) }
    }
}

/// A file without a name beside `file`, on the same file system.
fn scratch(file: &File, direct: bool) -> io::Result<File> {
    let unsupported = || io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    if sys::file_system(file).is_none_or(|kind| FOREIGN.contains(&kind)) {
        return Err(unsupported());
    }
    let path = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let flags = libc::O_TMPFILE | if direct { libc::O_DIRECT } else { 0 };
    let scratch = OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(folder)?;
    if scratch.metadata()?.dev() == file.metadata()?.dev() { Ok(scratch) } else { Err(unsupported()) }
}

fn measure(scratch: &File) -> io::Result<u64> {
    let zeroes = AlignedBuf::zeroed(CLUSTER as usize)?;
    // Clusters that are used again have been written before.
    for cluster in 0..CLUSTERS * THREADS {
        sys::write_all(scratch, &[zeroes.seg(0, zeroes.len())], cluster * CLUSTER)?;
    }
    let write = |at: u64, len: u64| sys::write_all(scratch, &[zeroes.seg(0, len as usize)], at);
    let mut best = Costs { data: Duration::MAX, merged: Duration::MAX, beside: Duration::MAX };
    for _ in 0..ROUNDS {
        best.data = best.data.min(time(&|at| write(at, BLOCK))?);
        best.merged = best.merged.min(time(&|at| write(at, CLUSTER))?);
        best.beside = best.beside.min(time(&|at| {
            sys::zero_range(scratch, at + BLOCK, CLUSTER - BLOCK)?;
            write(at, BLOCK)
        })?);
    }
    Ok(best.least())
}

/// What `way` costs for one cluster where several threads use it.
fn time(way: &(dyn Fn(u64) -> io::Result<()> + Sync)) -> io::Result<Duration> {
    let barrier = Barrier::new(THREADS as usize);
    let run = |thread: u64| {
        barrier.wait();
        let start = Instant::now();
        let mut done = 0;
        while done < CLUSTERS && (done == 0 || start.elapsed() < LIMIT) {
            way((thread * CLUSTERS + done) * CLUSTER)?;
            done += 1;
        }
        Ok(start.elapsed() / u32::try_from(done).unwrap_or(1))
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run(1));
        let mine: io::Result<Duration> = run(0);
        let other = other.join().unwrap_or_else(|_| Err(io::Error::from_raw_os_error(libc::EIO)));
        Ok((mine? + other?) / 2)
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cheaper_is_chosen() {
        let costs = |data, merged, beside| {
            let [data, merged, beside] = [data, merged, beside].map(Duration::from_micros);
            Costs { data, merged, beside }.least()
        };
        assert_eq!(costs(10, 10, 50), NEVER, "zeroes cost nothing");
        assert_eq!(costs(10, 70, 10), BLOCK, "fallocate costs nothing");
        assert_eq!(costs(10, 70, 22), 16 << 10, "12 for a call, 1 for a kilobyte, and a fourth of it for doubt");
        assert_eq!(costs(10, 11, 900), NEVER, "for no cluster is it worth it");
        assert_eq!(costs(90, 70, 22), NEVER, "noise");
    }

    #[test]
    fn the_probe_gives_an_answer_everywhere() {
        for direct in [false, true] {
            let file = Arc::new(tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap());
            let of = |file| Zeroing { choice: Zeros::Auto, file: Some((file, direct)), ..Zeroing::default() };
            of(Arc::clone(&file)).least(false);
            assert_eq!(Arc::strong_count(&file), 1, "who closes an image has closed it, whatever is being measured");
            let zeroing = of(file);
            while zeroing.least(false) == UNKNOWN {
                std::thread::yield_now();
            }
            let least = zeroing.least(false);
            println!("direct {direct}: from {least} bytes on");
            assert!(least == NEVER || (least.is_multiple_of(BLOCK) && (BLOCK..=MOST).contains(&least)), "{least}");
        }
        let file = Some((Arc::new(File::open("/proc/self/stat").unwrap()), false));
        let nowhere = Zeroing { choice: Zeros::Auto, file, ..Zeroing::default() };
        while nowhere.least(false) == UNKNOWN {
            std::thread::yield_now();
        }
        assert_eq!(nowhere.least(false), NEVER, "no scratch file can be had there");
        assert_eq!(Zeroing { choice: Zeros::Fallocate, ..Zeroing::default() }.least(false), BLOCK);
        assert_eq!(Zeroing { choice: Zeros::Write, ..Zeroing::default() }.least(false), NEVER);
        assert_eq!(Zeroing::default().least(false), NEVER, "memory");
    }
}
