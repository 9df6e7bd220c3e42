// SPDX-License-Identifier: Apache-2.0
//! Runs a program to its end and says what it cost; medians of pairs. The only place that asks the kernel for the
//! processor time of a child.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Qemu = 0,
    Tare = 1,
    /// tare with its own choice of calls, `aio=auto`.
    Auto = 2,
    Imago = 3,
    /// `qemu-storage-daemon`, where `Qemu` is `qemu-nbd`.
    Daemon = 4,
}

/// How many sides there are.
pub const SIDES: usize = 5;

/// What one run came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Operations a second.
    pub rate: f64,
    /// Processor time of one operation in microseconds, user and system, all threads.
    pub cpu: f64,
}

/// One turn of a case: what each side that has it came to.
pub type Turn = [Option<Cost>; SIDES];

/// One side over another.
#[derive(Clone, Debug)]
pub struct Ratio {
    /// Median of the turns' ratios of rates.
    pub rate: f64,
    /// Median of the ratios of processor time.
    pub cpu: f64,
    /// The ratios of rates, sorted.
    pub all: Vec<f64>,
}

/// Medians over the turns of a case.
pub struct Figures {
    pub qemu: Cost,
    pub tare: Cost,
    /// tare over QEMU.
    pub ratio: Ratio,
    /// tare with `aio=auto` over QEMU, where that is another way.
    pub auto: Option<Ratio>,
    /// tare over imago, and tare with `aio=auto` over imago.
    pub imago: Option<Ratio>,
    pub auto_imago: Option<Ratio>,
    /// tare over `qemu-storage-daemon`.
    pub daemon: Option<Ratio>,
}

impl Figures {
    /// `None` where QEMU or tare never ran.
    pub fn of(turns: &[Turn]) -> Option<Self> {
        let cost = |side: Side| {
            let of =
                |f: fn(&Cost) -> f64| median(turns.iter().filter_map(|t| t[side as usize].as_ref().map(f)).collect());
            Some(Cost { rate: of(|c| c.rate)?, cpu: of(|c| c.cpu)? })
        };
        let over = |a: Side, b: Side| {
            let pairs: Vec<(Cost, Cost)> = turns.iter().filter_map(|t| t[a as usize].zip(t[b as usize])).collect();
            let mut all: Vec<f64> = pairs.iter().map(|(a, b)| a.rate / b.rate).collect();
            all.sort_by(f64::total_cmp);
            let cpu = median(pairs.iter().map(|(a, b)| a.cpu / b.cpu).collect())?;
            Some(Ratio { rate: median(all.clone())?, cpu, all })
        };
        Some(Self {
            qemu: cost(Side::Qemu)?,
            tare: cost(Side::Tare)?,
            ratio: over(Side::Tare, Side::Qemu)?,
            auto: over(Side::Auto, Side::Qemu),
            imago: over(Side::Tare, Side::Imago),
            auto_imago: over(Side::Auto, Side::Imago),
            daemon: over(Side::Tare, Side::Daemon),
        })
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (below, above) = (values.get((values.len().max(1) - 1) / 2)?, values.get(values.len() / 2)?);
    Some((below + above) / 2.0)
}

/// A program's end.
pub struct Ended {
    pub stdout: String,
    pub wall: Duration,
    pub cpu: Duration,
}

/// Runs `command` to its end; failing is an error with its last line.
pub fn run(command: &mut Command) -> Result<Ended, String> {
    let start = Instant::now();
    let mut child = spawn(command)?;
    let mut stdout = String::new();
    let read = child.stdout.take().map(|mut out| out.read_to_string(&mut stdout));
    let mut stderr = String::new();
    let read_errors = child.stderr.take().map(|mut err| err.read_to_string(&mut stderr));
    let (code, cpu) = reap(&child);
    let wall = start.elapsed();
    if code != 0 || read.is_some_and(|r| r.is_err()) || read_errors.is_some_and(|r| r.is_err()) {
        let program = command.get_program().to_string_lossy().into_owned();
        let line = stderr.lines().last().unwrap_or("no message").to_owned();
        return Err(format!("{program} ended with {code}: {line}"));
    }
    Ok(Ended { stdout, wall, cpu })
}

/// Starts `command` with both outputs caught.
pub fn spawn(command: &mut Command) -> Result<Child, String> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot start {}: {e}", command.get_program().to_string_lossy()))
}

/// Asks a server to end, and gives its processor time.
pub fn end(server: &Child) -> Duration {
    // SAFETY: no pointers; the process is a child of ours that was not reaped yet, so the number is its.
    unsafe { libc::kill(server.id() as libc::pid_t, libc::SIGTERM) };
    reap(server).1
}

/// Waits for the child: its exit code (128 and the signal's number after one) and its processor time.
fn reap(child: &Child) -> (i32, Duration) {
    let mut status = 0;
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills both; all-zero bytes are a valid rusage should it fail.
    let usage = unsafe {
        libc::wait4(child.id() as libc::pid_t, &mut status, 0, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    let code = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
    (code, time(usage.ru_utime) + time(usage.ru_stime))
}
