// SPDX-License-Identifier: Apache-2.0
//! The one place that calls `machine`. Everything above sees how a start ended, its ledger, or a [`Failure`].

use std::any::Any;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use machine::{ConsoleIo, Moment, Outcome, StartUp};
use spec::{Console, Vm};

use crate::exit::{Exit, Failure, reason};

/// How one start of the machine ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// The guest reset itself, when the machine had these devices of the host.
    Reset(Vec<spec::Vfio>),
    /// It is over: with this code, and this line if there is something to say.
    Over(Exit, Option<String>),
}

/// What one start of the machine weighed.
pub struct Weight {
    /// For people.
    pub table: String,
    /// For programs.
    pub json: Vec<u8>,
    /// The boot as a timeline, if it was asked for.
    pub explained: Option<String>,
    /// When what happened.
    pub course: Course,
}

/// When what happened in one start of the machine.
pub struct Course {
    /// Its first moment.
    pub begun: Instant,
    /// What was reached when.
    pub moments: Vec<Moment>,
    /// What each phase of its start took.
    pub startup: StartUp,
    /// How long all of it took.
    pub wall: Duration,
}

/// Connects a console to standard input and output. `raw`: standard input is a terminal in raw mode.
///
/// # Errors
/// [`Failure`] with exit code 3 when the host is out of descriptors.
pub fn console(vm: &Vm, raw: bool) -> Result<ConsoleIo, Failure> {
    let failed = |e: io::Error| {
        Failure::monitor(format!(
            "console can't be connected, {}: standard input and output; see `tare doctor`",
            reason(&e)
        ))
    };
    let stdin = io::stdin();
    // A terminal that isn't raw belongs to somebody else (this is a background job): reading it would stop the process.
    // A pipe is read only for a console that takes it; a raw terminal always, since Ctrl-A x must work.
    let wanted = if stdin.is_terminal() { raw } else { vm.console != Console::None };
    let input = if wanted { Some(stdin.as_fd().try_clone_to_owned().map(File::from).map_err(failed)?) } else { None };
    let output = io::stdout().as_fd().try_clone_to_owned().map(File::from).map_err(failed)?;
    Ok(ConsoleIo { input, output: Arc::new(output), terminal: raw })
}

/// Joins the API's server to the machine.
struct Join<'a>(&'a api::Server);

impl machine::Remote for Join<'_> {
    fn started(&mut self, controls: machine::Controls) -> io::Result<Box<dyn Any>> {
        let serving = self.0.serve(Box::new(move |command| controls.execute(command)))?;
        Ok(Box::new(serving))
    }
}

/// How many places `--explain` shows.
const PLACES: usize = 25;

/// What a machine is started with.
pub enum With<'a> {
    /// Nothing.
    Nothing,
    /// An API that serves meanwhile.
    Api(&'a api::Server),
    /// An explanation of the boot, with these names.
    Explanation(&'a machine::Symbols),
}

/// Starts the machine and comes back when the guest is over.
///
/// # Errors
/// [`Failure`]: a file can't be used, or the host or the monitor failed.
pub fn start(vm: &Vm, io: &ConsoleIo, with: &With<'_>) -> Result<(End, Weight), Failure> {
    let report = match with {
        With::Nothing => machine::run(vm, io),
        With::Api(server) => machine::run_remote(vm, io, &mut Join(server)),
        With::Explanation(_) => machine::run_explained(vm, io),
    }
    .map_err(failure)?;
    let mut json = serde_json::to_vec_pretty(&report.ledger)
        .map_err(|e| Failure::monitor(format!("ledger can't be written, {e}: JSON; please report this line")))?;
    json.push(b'\n');
    let explained = match with {
        With::Explanation(symbols) => Some(format!(
            "{}{}",
            machine::Explained(&report.ledger.timeline),
            machine::places_table(&report.ledger.places, symbols, PLACES)
        )),
        _ => None,
    };
    let table = report.ledger.to_string();
    let course = Course {
        begun: report.begun,
        moments: report.ledger.timeline,
        startup: report.ledger.startup,
        wall: Duration::from_nanos(report.ledger.wall_ns),
    };
    Ok((end(report.outcome, report.vfio), Weight { table, json, explained, course }))
}

fn end(outcome: Outcome, vfio: Vec<spec::Vfio>) -> End {
    let over = |exit, line: &str| End::Over(exit, Some(line.to_owned()));
    match outcome {
        Outcome::PowerOff => End::Over(Exit::Clean, None),
        Outcome::Reset => End::Reset(vfio),
        Outcome::Panic => {
            over(Exit::Panic, "the guest's kernel panicked: guest; its last lines on the console say why")
        }
        Outcome::Exit(status) => End::Over(Exit::Guest(status), None),
        Outcome::Killed => {
            over(Exit::Killed, "the guest was ended from outside: Ctrl-A x or signals; it had no time to save")
        }
        Outcome::GuestFault(what) => End::Over(Exit::GuestFault, Some(what)),
    }
}

/// What the user named wrongly is exit code 2, what the host lacks is 3.
fn failure(error: machine::Error) -> Failure {
    match error {
        machine::Error::Boot(_)
        | machine::Error::Disk(_)
        | machine::Error::Net(_)
        | machine::Error::TooMuch(_)
        | machine::Error::Vfio(_) => Failure::usage(error),
        other => Failure::monitor(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_has_its_code() {
        let code = |outcome| match end(outcome, Vec::new()) {
            End::Reset(_) => None,
            End::Over(exit, _) => Some(exit),
        };
        assert_eq!(code(Outcome::PowerOff), Some(Exit::Clean));
        assert_eq!(code(Outcome::Reset), None);
        assert_eq!(code(Outcome::Panic), Some(Exit::Panic));
        assert_eq!(code(Outcome::Exit(33)).map(Exit::code), Some(33));
        assert_eq!(code(Outcome::Killed), Some(Exit::Killed));
        assert_eq!(code(Outcome::GuestFault("x".into())), Some(Exit::GuestFault));
    }

    #[test]
    fn what_the_user_named_is_usage_and_what_the_host_lacks_is_not() {
        assert_eq!(failure(machine::Error::TooMuch("x".into())).exit, Exit::Usage);
        assert_eq!(failure(machine::Error::Kvm(kvm::KvmError::Missing("x"))).exit, Exit::Monitor);
        let host = machine::Error::Host { what: "x", source: io::ErrorKind::OutOfMemory.into() };
        assert_eq!(failure(host).exit, Exit::Monitor);
    }
}
