// SPDX-License-Identifier: Apache-2.0
//! One run of one VM: the main thread's loop over signals, user input and the end of the guest, and the account after it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base::reactor::{Reactor, Token};

use crate::build::{self, Built};
use crate::console::{ConsoleInput, ConsoleIo, Typed};
use crate::control::Outcome;
use crate::dispatch::Dispatch;
use crate::error::{Error, host};
use crate::ledger::{DeviceLedger, Ledger, VcpuLedger, memory, plain, ticks};
use crate::signals::Signals;
use crate::timer::Timer;
use crate::vcpu::{self, Stopped};

const CONTROL: Token = 0;
const SIGNALS: Token = 1;
const INPUT: Token = 2;
const HALF_LINE: Token = 3;

/// How a run went.
pub struct Report {
    /// Why it ended.
    pub outcome: Outcome,
    /// What it cost.
    pub ledger: Ledger,
}

/// Builds the VM that `vm` describes, runs it to its end and says how it went.
///
/// SIGTERM, SIGINT and SIGHUP belong to the run: the first asks the guest to power off, the second ends it.
///
/// # Errors
/// Everything that keeps the VM from starting; see [`Error`].
pub fn run(vm: &spec::Vm, io: &ConsoleIo) -> Result<Report, Error> {
    let clock = Clock::start();
    let mut signals = Signals::block().map_err(host("take over signals"))?;
    let built = build::build(vm, io)?;
    let setup = clock.begun.elapsed();
    let kvm_vm = built.vm.clone();
    let ram = built.ram.clone();
    let (dispatch, timer, button) = (built.dispatch.clone(), built.timer.clone(), built.button.clone());
    let vcpus = start(built)?;
    let outcome = watch(&mut signals, io, &dispatch, &timer, || {
        let _ = button.write(1);
    });
    // From here on the guest is over: whatever goes wrong can only make the account poorer.
    let outcome = outcome.unwrap_or_else(|e| {
        dispatch.control().finish(Outcome::GuestFault(e.to_string()));
        Outcome::GuestFault(e.to_string())
    });
    let stopped: Vec<Stopped> = vcpus.into_iter().filter_map(vcpu::Started::stop).collect();
    dispatch.with_serial(crate::legacy::SerialPort::flush);
    let devices = dispatch.pci().stop();
    let ranges: Vec<(u64, u64)> = ram.regions().map(|(_, size, host)| (host.0, host.0 + size)).collect();
    let ledger = account(&clock, setup, &stopped, devices, &ranges, &kvm_vm);
    Ok(Report { outcome, ledger })
}

fn start(built: Built) -> Result<Vec<vcpu::Started>, Error> {
    let mut started = Vec::with_capacity(built.vcpus.len());
    for (id, cpu) in built.vcpus.into_iter().enumerate() {
        match vcpu::spawn(id as u8, cpu, built.dispatch.clone()) {
            Ok(thread) => started.push(thread),
            Err(e) => {
                built.dispatch.control().finish(Outcome::Killed);
                started.into_iter().for_each(|t| drop(t.stop()));
                return Err(host("start a thread for a vCPU")(e));
            }
        }
    }
    Ok(started)
}

/// The main thread's loop. Returns once the guest is over.
fn watch(
    signals: &mut Signals,
    io: &ConsoleIo,
    dispatch: &Arc<Dispatch>,
    timer: &Timer,
    press_button: impl Fn(),
) -> Result<Outcome, Error> {
    let control = dispatch.control();
    let mut reactor = Reactor::new().map_err(host("make an epoll instance"))?;
    let watching = |e| host("watch a descriptor")(e);
    reactor.add(control.event(), CONTROL).map_err(watching)?;
    reactor.add(signals, SIGNALS).map_err(watching)?;
    reactor.add(timer, HALF_LINE).map_err(watching)?;
    let mut input = ConsoleInput::new(io);
    if let Some(source) = &input {
        // A regular file or /dev/null can't be watched and has no input to wait for.
        if reactor.add(source.file(), INPUT).is_err() {
            input = None;
        }
    }
    let mut asked = false;
    loop {
        if let Some(outcome) = control.outcome() {
            return Ok(outcome);
        }
        let ready: Vec<_> = reactor.turn(None).map_err(host("wait for events"))?.collect();
        for event in ready {
            match event.token {
                SIGNALS => {
                    while let Some(signal) = signals.next() {
                        if asked || signal == libc::SIGHUP {
                            control.finish(Outcome::Killed);
                        } else {
                            asked = true;
                            press_button();
                        }
                    }
                }
                HALF_LINE => dispatch.with_serial(crate::legacy::SerialPort::flush),
                INPUT => {
                    let Some(source) = &mut input else { continue };
                    match source.read() {
                        Typed::Bytes(bytes) => dispatch.input(&bytes),
                        Typed::Quit => control.finish(Outcome::Killed),
                        Typed::End => {
                            let _ = reactor.remove(source.file());
                            input = None;
                        }
                    }
                }
                _ => {}
            }
        }
    }
}

/// Wall time and TSC ticks from one moment, so that ticks can be turned into nanoseconds at the end.
struct Clock {
    begun: Instant,
    ticks: u64,
}

impl Clock {
    fn start() -> Self {
        Self { begun: Instant::now(), ticks: ticks() }
    }

    fn ns_per_tick(&self) -> f64 {
        let ns = self.begun.elapsed().as_nanos() as f64;
        ns / (ticks().wrapping_sub(self.ticks).max(1)) as f64
    }
}

fn account(
    clock: &Clock,
    setup: Duration,
    stopped: &[Stopped],
    devices: Vec<DeviceLedger>,
    guest: &[(u64, u64)],
    vm: &kvm::Vm,
) -> Ledger {
    let ns_per_tick = clock.ns_per_tick();
    let vcpus = (0u8..).zip(stopped).map(|(id, s)| VcpuLedger::new(id, &s.counters, ns_per_tick, s.guest_ns, &s.stats));
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    let mut ledger = Ledger {
        version: 1,
        wall_ns: clock.begun.elapsed().as_nanos() as u64,
        setup_ns: setup.as_nanos() as u64,
        exits: 0,
        monitor_exits: 0,
        interrupts: 0,
        vcpus: vcpus.collect(),
        devices,
        memory: memory(&smaps, guest),
        kvm: vm.stats().map(|s| plain(&s.read())).unwrap_or_default(),
    };
    ledger.total();
    ledger
}
