// SPDX-License-Identifier: Apache-2.0
//! `tare-lab host ...`: the lab machine by hand.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use agent::wire::Exec;
use anyhow::{Context, Result, bail};
use clap::Subcommand;

use super::cache::Cache;
use super::clone::{self, Bring, Job};
use super::kernel::Kernel;
use super::module;
use super::qemu::Mode;
use super::session::Stream;
use super::snapshot::Snapshot;
use super::standing::Standing;
use crate::progress::Making;

/// What to do with the lab machine.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Start the standing lab machine, making it first if needed
    Up,
    /// Run a command in the standing machine; a single argument is given to a shell
    Exec {
        /// Program and arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Copy a file into the standing machine, its mode included
    Put {
        /// File here
        source: PathBuf,
        /// Full path there
        target: String,
    },
    /// Copy a file out of the standing machine
    Get {
        /// Full path there
        source: String,
        /// File here
        target: PathBuf,
    },
    /// Run a command in a fresh copy of the machine that is thrown away afterwards
    Once {
        /// One CPU that counts instructions (one is one nanosecond) instead of two that run freely
        #[arg(long)]
        counted: bool,
        /// With an IOMMU, and devices to hand to a guest: an NVMe disk and a network card
        #[arg(long, conflicts_with = "counted")]
        passthrough: bool,
        /// The machine's kernel instead of the guests': a folder such as scripts/kernel-iommufd makes
        #[arg(long, value_name = "FOLDER", conflicts_with = "counted")]
        kernel: Option<PathBuf>,
        /// Files to bring along, as HERE:THERE
        #[arg(long = "put", value_name = "HERE:THERE")]
        files: Vec<String>,
        /// Longest time on the machine's clock, in seconds
        #[arg(long, default_value_t = 120.0)]
        clock_limit: f64,
        /// Longest time here, in seconds
        #[arg(long, default_value_t = 900.0)]
        real_limit: f64,
        /// Program and arguments; a single argument is given to a shell
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Make everything that the lab machine needs and stop there
    Make,
    /// Build the guests' kernel module (guests/vioapic-linux) and say where it is
    Module,
    /// End the standing machine
    Down,
    /// Say what there is, as JSON
    Info,
}

static SIGNAL: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(signal: libc::c_int) {
    SIGNAL.store(signal, Ordering::Relaxed);
}

/// The snapshot of the machine with `kernel` or the guests', made if it is not there; says what it is doing meanwhile.
fn saved(cache: &Cache, mode: Mode, kernel: Option<&Kernel>) -> Result<Snapshot> {
    let making = Making::new();
    Snapshot::get(cache, (mode, kernel), &|| false, &|step, done| making.tell(step, done))
}

/// Does what `verb` says and gives the exit code of this program.
///
/// # Errors
/// One line on what went wrong and what to do.
pub fn run(verb: Verb) -> Result<u8> {
    let cache = Cache::open()?;
    let standing = Standing::of(&cache);
    match verb {
        Verb::Up => {
            if standing.pid().is_some() {
                eprintln!("tare-lab: the lab machine is up already");
                return Ok(0);
            }
            let snapshot = saved(&cache, Mode::Threaded, None)?;
            standing.up(&snapshot, &|| false)?;
        }
        Verb::Exec { command } => {
            catch_signals();
            let exec = Exec { argv: words(command), cwd: "/lab".into(), ..Exec::default() };
            let signal = || SIGNAL.swap(0, Ordering::Relaxed);
            return Ok(code(standing.exec(&exec, &mut print, &signal)?.code));
        }
        Verb::Put { source, target } => {
            standing.put(&source, &target, mode_of(&source)?)?;
        }
        Verb::Get { source, target } => standing.get(&source, &target)?,
        Verb::Once { counted, passthrough, kernel, files, clock_limit, real_limit, command } => {
            let mode = match (counted, passthrough) {
                (true, _) => Mode::Counted,
                (_, true) => Mode::Passthrough,
                _ => Mode::Threaded,
            };
            let job = Job {
                files: files.iter().map(|text| bring(text)).collect::<Result<_>>()?,
                argv: words(command),
                env: Vec::new(),
                clock_limit: seconds(clock_limit)?,
                real_limit: seconds(real_limit)?,
                quiet: counted,
            };
            let kernel = kernel.map(|folder| Kernel::at(&folder)).transpose()?;
            let snapshot = saved(&cache, mode, kernel.as_ref())?;
            let outcome = clone::run(&cache, &snapshot, &job, &|| false)?;
            print(Stream::Out, &outcome.stdout)?;
            print(Stream::Err, &outcome.stderr)?;
            let (clock, real) = (Duration::from_nanos(outcome.exit.clock_ns), outcome.real);
            eprintln!(
                "tare-lab: {:.6} s on the machine's clock, {:.1} s here",
                clock.as_secs_f64(),
                real.as_secs_f64()
            );
            if outcome.exit.timed_out {
                eprintln!("tare-lab: the command was ended at its limit on the machine's clock");
            }
            return Ok(code(outcome.exit.code));
        }
        Verb::Make => {
            for mode in [Mode::Counted, Mode::Threaded] {
                saved(&cache, mode, None)?;
            }
        }
        Verb::Module => {
            let making = Making::new();
            let module = module::vioapic(&cache, &|step, done| making.tell(step, done))?;
            drop(making);
            println!("{}", module.display());
        }
        Verb::Down => standing.down()?,
        Verb::Info => println!("{:#}", standing.info(&cache)?),
    }
    Ok(0)
}

fn catch_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: `note` only stores to an atomic, which is allowed in a signal handler.
        unsafe { libc::signal(signal, note as extern "C" fn(libc::c_int) as libc::sighandler_t) };
    }
}

fn print(stream: Stream, bytes: &[u8]) -> Result<()> {
    match stream {
        Stream::Out => {
            let mut out = std::io::stdout().lock();
            out.write_all(bytes)?;
            out.flush()?;
        }
        Stream::Err => std::io::stderr().lock().write_all(bytes)?,
    }
    Ok(())
}

fn words(command: Vec<String>) -> Vec<String> {
    if command.len() == 1 { ["bash".into(), "-c".into()].into_iter().chain(command).collect() } else { command }
}

fn code(code: i32) -> u8 {
    u8::try_from(code).unwrap_or(255)
}

fn seconds(number: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(number).ok().with_context(|| format!("{number} s is no usable limit"))
}

fn bring(text: &str) -> Result<Bring> {
    let Some((here, there)) = text.split_once(':') else {
        bail!("--put {text}: write it as HERE:THERE");
    };
    let source = PathBuf::from(here);
    Ok(Bring { mode: mode_of(&source)?, source, target: there.to_owned() })
}

fn mode_of(path: &std::path::Path) -> Result<u32> {
    use std::os::unix::fs::PermissionsExt;
    let data = path.metadata().with_context(|| format!("read {}", path.display()))?;
    Ok(data.permissions().mode() & 0o7777)
}
