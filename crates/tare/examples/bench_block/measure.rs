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
    Imago = 2,
    /// tare with its own choice of calls, `aio=auto`.
    Auto = 3,
}

/// What one run came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Operations a second.
    pub rate: f64,
    /// Processor time of one operation in microseconds, user and system, all threads.
    pub cpu: f64,
}

/// Medians over the pairs of a case.
pub struct Figures {
    pub qemu: Cost,
    pub tare: Cost,
    /// Median of the pairs' ratios of rates.
    pub rate_ratio: f64,
    /// All of them, sorted.
    pub ratios: Vec<f64>,
    /// Median of the pairs' ratios of processor time.
    pub cpu_ratio: f64,
    /// Median of tare's rate over imago's, and of its processor time over imago's, where it was asked for.
    pub imago: Option<(f64, f64)>,
    /// Median of the ratios of tare's rate with `aio=auto` over QEMU's, where that is another way.
    pub auto: Option<f64>,
}

impl Figures {
    /// Of (QEMU, tare) pairs, and imago's costs and those of `aio=auto` in the same order.
    pub fn of(pairs: &[(Cost, Cost)], imago: &[Cost], auto: &[Cost]) -> Self {
        let beside = |f: fn(&Cost) -> f64| median(pairs.iter().zip(imago).map(|((_, t), i)| f(t) / f(i)).collect());
        let over = |f: &dyn Fn(&(Cost, Cost)) -> f64| pairs.iter().map(f).collect::<Vec<f64>>();
        let mut ratios = over(&|(q, t)| t.rate / q.rate);
        ratios.sort_by(f64::total_cmp);
        Self {
            qemu: Cost { rate: median(over(&|(q, _)| q.rate)), cpu: median(over(&|(q, _)| q.cpu)) },
            tare: Cost { rate: median(over(&|(_, t)| t.rate)), cpu: median(over(&|(_, t)| t.cpu)) },
            rate_ratio: median(ratios.clone()),
            ratios,
            imago: (!imago.is_empty()).then(|| (beside(|c| c.rate), beside(|c| c.cpu))),
            auto: (!auto.is_empty())
                .then(|| median(pairs.iter().zip(auto).map(|((q, _), a)| a.rate / q.rate).collect())),
            cpu_ratio: median(over(&|(q, t)| t.cpu / q.cpu)),
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
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
