// SPDX-License-Identifier: Apache-2.0
//! `tare run`: from flags to an exit code. Starts the machine, starts it again when the guest resets itself, writes the
//! ledger. Runs on the main thread.

use std::io::{self, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::exit::{Exit, Failure, complain, reason};
use crate::files::{LedgerFile, PidFile};
use crate::flags::OnReset;
use crate::meaning::Meant;
use crate::terminal::RawTerminal;
use crate::vmm::{self, End, Weight, With};

/// A start that ends in a reset within this time counts towards a loop.
const QUICK: Duration = Duration::from_secs(30);
/// This many quick ones in a row are a loop.
const LOOP: u32 = 3;

/// Tells a guest that reboots from one that can't stop.
#[derive(Default)]
struct ResetLimiter {
    quick: u32,
}

impl ResetLimiter {
    /// Notes a reset after `lived`; true when it is time to give up.
    fn is_loop(&mut self, lived: Duration) -> bool {
        self.quick = if lived < QUICK { self.quick + 1 } else { 0 };
        self.quick >= LOOP
    }
}

/// Where the ledger goes.
enum LedgerTo {
    Nowhere,
    StandardError,
    File(LedgerFile),
}

impl LedgerTo {
    fn new(path: Option<&Path>) -> Result<Self, Failure> {
        match path {
            None => Ok(Self::Nowhere),
            Some(path) if path == Path::new("-") => Ok(Self::StandardError),
            Some(path) => LedgerFile::reserve(path).map(Self::File),
        }
    }

    fn write(&self, weight: &Weight) -> Result<(), Failure> {
        match self {
            Self::Nowhere => Ok(()),
            Self::StandardError => {
                // Standard error may be closed; there is nobody left to tell.
                let _ = io::stderr().write_all(weight.table.as_bytes());
                Ok(())
            }
            Self::File(file) => file.write(&weight.json),
        }
    }
}

/// Runs the machine to its end and gives the code to exit with.
///
/// # Errors
/// [`Failure`], for the caller to print once the terminal is back.
pub fn run(meant: &Meant) -> Result<Exit, Failure> {
    weigh(meant).map(|(exit, _)| exit)
}

/// [`run`], and what the last start of the machine weighed.
///
/// # Errors
/// As there.
pub fn weigh(meant: &Meant) -> Result<(Exit, Weight), Failure> {
    let ledger = LedgerTo::new(meant.vm.ledger.as_deref())?;
    let _pid = meant.pidfile.as_deref().map(PidFile::create).transpose()?;
    let api = meant.api.as_deref().map(api::Server::bind).transpose().map_err(Failure::usage)?;
    let symbols = meant.symbols.as_deref().map(read_symbols).transpose()?.unwrap_or_default();
    let with = match &api {
        Some(server) => With::Api(server),
        None if meant.explain => With::Explanation(&symbols),
        None => With::Nothing,
    };
    let terminal = RawTerminal::enter().map_err(|e| {
        Failure::monitor(format!("terminal can't be made raw, {}: standard input; use a pipe", reason(&e)))
    })?;
    let console = vmm::console(&meant.vm, terminal.is_raw());
    let ended = console.and_then(|io| start_until_over(meant, |vm| vmm::start(vm, &io, &with), Instant::now));
    drop(terminal);
    let (exit, said, weight) = ended?;
    if let Some(said) = said {
        complain(&said);
    }
    if let Some(text) = &weight.explained {
        // Standard error may be closed; there is nobody left to tell.
        let _ = io::stderr().write_all(text.as_bytes());
    }
    ledger.write(&weight)?;
    Ok((exit, weight))
}

fn read_symbols(path: &Path) -> Result<machine::Symbols, Failure> {
    machine::Symbols::read(path).map_err(|e| {
        Failure::usage(format!(
            "symbols can't be read, {}: {}; check the path and its mode",
            reason(&e),
            path.display()
        ))
    })
}

/// Starts the machine again for each reset until it is over. `start` and `now` are parameters for the tests.
fn start_until_over(
    meant: &Meant,
    mut start: impl FnMut(&spec::Vm) -> Result<(End, Weight), Failure>,
    mut now: impl FnMut() -> Instant,
) -> Result<(Exit, Option<String>, Weight), Failure> {
    let mut limiter = ResetLimiter::default();
    let mut vm = meant.vm.clone();
    loop {
        let started = now();
        let (end, weight) = start(&vm)?;
        match end {
            End::Over(exit, said) => return Ok((exit, said, weight)),
            End::Reset(_) if meant.on_reset == OnReset::Exit => return Ok((Exit::Clean, None, weight)),
            End::Reset(_) if limiter.is_loop(now().duration_since(started)) => {
                let said = format!(
                    "the guest reset itself {LOOP} times, each within {} s of its start: reset loop; look at its last \
                     lines, or give --on-reset exit to stop at the first",
                    QUICK.as_secs()
                );
                return Ok((Exit::ResetLoop, Some(said), weight));
            }
            // What was added or removed while it ran stays so.
            End::Reset(vfio) => vm.vfio = vfio,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::flags::Typed;

    /// Plays starts that live so many seconds and end so; gives the code and how many were used.
    fn play(on_reset: OnReset, script: &[(u64, End)]) -> (Exit, usize) {
        let typed = Typed { kernel: Some("k".into()), on_reset: Some(on_reset), ..Typed::default() };
        let meant = Meant::new(typed).unwrap();
        let clock = std::cell::Cell::new(Instant::now());
        let mut used = 0;
        let start = |_: &spec::Vm| {
            let (lived, end) = script[used].clone();
            used += 1;
            clock.set(clock.get() + Duration::from_secs(lived));
            let course = vmm::Course {
                begun: clock.get(),
                moments: Vec::new(),
                startup: machine::StartUp::default(),
                wall: Duration::ZERO,
            };
            Ok((end, Weight { table: String::new(), json: Vec::new(), explained: None, course }))
        };
        let (exit, _, _) = start_until_over(&meant, start, || clock.get()).unwrap();
        (exit, used)
    }

    #[test]
    fn a_reboot_starts_the_machine_again() {
        let script = [(60, End::Reset(Vec::new())), (1, End::Reset(Vec::new())), (1, End::Over(Exit::Clean, None))];
        assert_eq!(play(OnReset::Restart, &script), (Exit::Clean, 3));
    }

    #[test]
    fn devices_that_came_and_went_are_so_after_a_reboot() {
        let typed = Typed { kernel: Some("k".into()), ..Typed::default() };
        let meant = Meant::new(typed).unwrap();
        let one = spec::Vfio { host: "01:00.0".parse().unwrap(), iommu: spec::Iommu::Iommufd };
        let mut seen = Vec::new();
        let start = |vm: &spec::Vm| {
            seen.push(vm.vfio.clone());
            let end = if seen.len() == 1 { End::Reset(vec![one.clone()]) } else { End::Over(Exit::Clean, None) };
            let course = vmm::Course {
                begun: Instant::now(),
                moments: Vec::new(),
                startup: machine::StartUp::default(),
                wall: Duration::ZERO,
            };
            Ok((end, Weight { table: String::new(), json: Vec::new(), explained: None, course }))
        };
        start_until_over(&meant, start, Instant::now).unwrap();
        assert_eq!(seen, [vec![], vec![one]]);
    }

    #[test]
    fn three_quick_resets_are_a_loop() {
        let quick = (29, End::Reset(Vec::new()));
        assert_eq!(play(OnReset::Restart, &[quick.clone(), quick.clone(), quick.clone()]), (Exit::ResetLoop, 3));
        let slow = (30, End::Reset(Vec::new()));
        let script = [quick.clone(), quick.clone(), slow, quick.clone(), quick.clone(), quick];
        assert_eq!(play(OnReset::Restart, &script), (Exit::ResetLoop, 6), "a start that lived begins the count anew");
    }

    #[test]
    fn exit_on_reset_is_clean() {
        assert_eq!(play(OnReset::Exit, &[(0, End::Reset(Vec::new()))]), (Exit::Clean, 1));
    }

    #[test]
    fn other_ends_keep_their_code() {
        for exit in [Exit::Clean, Exit::Panic, Exit::Killed, Exit::GuestFault] {
            assert_eq!(play(OnReset::Restart, &[(0, End::Over(exit, None))]), (exit, 1));
        }
    }
}
