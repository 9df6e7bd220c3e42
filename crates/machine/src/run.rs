// SPDX-License-Identifier: Apache-2.0
//! One run of one VM: the main thread's loop over signals, user input and the end of the guest, and the account after it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use std::os::fd::AsRawFd;

use base::reactor::{Reactor, Token};
use irq::IrqLine;
use kvm::Vcpu;
use spec::CpuPin;

use crate::build::{self, Built};
use crate::console::{ConsoleInput, ConsoleIo, Typed};
use crate::control::Outcome;
use crate::dispatch::Dispatch;
use crate::error::{Error, host};
use crate::ledger::{DeviceLedger, Ledger, VcpuLedger, memory, plain, ticks};
use crate::legacy::SerialPort;
use crate::places::{Place, Places};
use crate::ready::{Background, Later, StartUp};
use crate::registry::Registry;
use crate::remote::{Controls, Remote};
use crate::signals::Signals;
use crate::tap;
use crate::timeline::Timeline;
use crate::timer::Timer;
use crate::vcpu::affinity::CpuSet;
use crate::vcpu::{self, Accounting, Stopped};

const CONTROL: Token = 0;
const SIGNALS: Token = 1;
const INPUT: Token = 2;
const HALF_LINE: Token = 3;
/// First token of the devices' own sources.
const DEVICES: Token = 16;

/// How long after its start a guest is left alone with the pages that tare still has: what is given back at once holds up
/// the vCPUs' first steps (their threads map stacks and fault code in under the same lock).
const SETTLE: Duration = Duration::from_millis(50);

/// How a run went.
pub struct Report {
    /// Why it ended.
    pub outcome: Outcome,
    /// What it cost.
    pub ledger: Ledger,
    /// When it began: the ledger's times count from here.
    pub begun: Instant,
    /// The devices of the host that it had at its end: some may have come or gone meanwhile.
    pub vfio: Vec<spec::Vfio>,
}

/// Builds the VM that `vm` describes, runs it to its end and says how it went.
///
/// SIGTERM, SIGINT and SIGHUP belong to the run: the first asks the guest to power off, the second ends it.
///
/// # Errors
/// Everything that keeps the VM from starting; see [`Error`].
pub fn run(vm: &spec::Vm, io: &ConsoleIo) -> Result<Report, Error> {
    run_with(vm, io, Accounting::On)
}

/// [`run`] for a machine that can be asked for things meanwhile, through `remote`.
///
/// # Errors
/// As [`run`].
pub fn run_remote(vm: &spec::Vm, io: &ConsoleIo, remote: &mut dyn Remote) -> Result<Report, Error> {
    whole_run(vm, io, Accounting::On, Some(remote))
}

/// [`run`] whose ledger also says what exits each stretch of the timeline took, and where they came from.
///
/// # Errors
/// As [`run`].
pub fn run_explained(vm: &spec::Vm, io: &ConsoleIo) -> Result<Report, Error> {
    whole_run(vm, io, Accounting::Places, None)
}

/// [`run`] with a choice of accounting, for the benchmark that shows what the ledger costs.
///
/// # Errors
/// As [`run`].
pub fn run_with(vm: &spec::Vm, io: &ConsoleIo, accounting: Accounting) -> Result<Report, Error> {
    whole_run(vm, io, accounting, None)
}

fn whole_run(
    vm: &spec::Vm,
    io: &ConsoleIo,
    accounting: Accounting,
    remote: Option<&mut dyn Remote>,
) -> Result<Report, Error> {
    let clock = Clock::start();
    let timeline = Arc::new(Timeline::new(clock.begun));
    // Before any thread: they inherit it.
    let mut signals = Signals::block().map_err(host("take over signals"))?;
    if accounting != Accounting::Places {
        return guest_run(vm, io, accounting, remote, &mut Whole { clock, timeline, signals: &mut signals });
    }
    let (tapped, tap) = tap::open(io, timeline.clone()).map_err(host("tap the console"))?;
    let mut whole = Whole { clock, timeline: timeline.clone(), signals: &mut signals };
    let report = guest_run(vm, &tapped, accounting, remote, &mut whole);
    drop(tapped);
    tap.finish();
    let mut report = report?;
    report.ledger.timeline = timeline.take();
    Ok(report)
}

/// What a run has from its first moment to its last.
struct Whole<'a> {
    clock: Clock,
    timeline: Arc<Timeline>,
    signals: &'a mut Signals,
}

fn guest_run(
    vm: &spec::Vm,
    io: &ConsoleIo,
    accounting: Accounting,
    mut remote: Option<&mut dyn Remote>,
    whole: &mut Whole<'_>,
) -> Result<Report, Error> {
    let Whole { clock, timeline, signals } = whole;
    let built = build::build(vm, io, remote.is_some(), timeline)?;
    let setup = clock.begun.elapsed();
    let Built { vm: kvm_vm, ram, vcpus, dispatch, mut registry, timer, button, later, mut startup } = built;
    if accounting == Accounting::Places {
        timeline.count(vcpus.iter().filter_map(Vcpu::stats).collect());
    }
    let serving = match &mut remote {
        Some(remote) => {
            let controls = Controls::new(vm, registry.take_controls(), registry.memory().cloned(), &dispatch);
            Some(remote.started(controls).map_err(host("start a thread for the API"))?)
        }
        None => None,
    };
    let background = Background::start(&later, registry.memory().filter(|_| vm.memory.boot.is_some()))?;
    let vcpus = start(vcpus, &vm.cpu_pin, &dispatch, &later, accounting)?;
    tell_costs(vm, io);
    let mut watched = Watch { dispatch: &dispatch, registry: &mut registry, timer: &timer, button: &*button };
    // From here on the guest is over when this returns: whatever goes wrong can only make the account poorer.
    let outcome = watched.until_over(signals, io).unwrap_or_else(|e| {
        let outcome = Outcome::GuestFault(e.to_string());
        dispatch.control().finish(outcome.clone());
        outcome
    });
    // Nobody asks for anything from here on; what was being done is done.
    drop(serving);
    if let Some(background) = background {
        startup.ready += background.stop();
    }
    if let Later::Vcpus(work) = &later {
        startup.ready = work.done();
    }
    let stopped: Vec<Stopped> = vcpus.into_iter().filter_map(vcpu::Started::stop).collect();
    dispatch.with_serial(SerialPort::flush);
    registry.drain();
    let iommu = dispatch.passthrough().and_then(|all| all.iommu()).unwrap_or_default();
    let vfio = dispatch.bus().passed().into_iter().map(|host| spec::Vfio { host, iommu }).collect();
    dispatch.bus().stop();
    let ranges: Vec<(u64, u64)> = ram.regions().map(|(_, size, host)| (host.0, host.0 + size)).collect();
    let mut devices = registry.ledgers();
    devices.extend(dispatch.vioapic().map(|vioapic| {
        let counts = vioapic.counts();
        DeviceLedger {
            requests: counts.events,
            interrupts: counts.sent,
            name: "vioapic".to_owned(),
            ..DeviceLedger::default()
        }
    }));
    let mut ledger = account(clock, setup, &stopped, devices, &ranges, &kvm_vm);
    ledger.disabled_exits = vm.disable_exits.words().collect();
    ledger.interrupt_hardware = kvm::interrupt_hardware("/".as_ref());
    ledger.startup = startup;
    if accounting != Accounting::Places {
        ledger.timeline = timeline.take();
    }
    Ok(Report { outcome, ledger, begun: clock.begun, vfio })
}

fn start(
    vcpus: Vec<Vcpu>,
    pin: &CpuPin,
    dispatch: &Arc<Dispatch>,
    later: &Later,
    accounting: Accounting,
) -> Result<Vec<vcpu::Started>, Error> {
    let mut started = Vec::with_capacity(vcpus.len());
    let pins = pin.pins();
    for (id, cpu) in (0u8..).zip(vcpus) {
        let pin = pins.iter().find(|(vcpu, _)| *vcpu == id).map(|(_, cpus)| CpuSet::of(cpus));
        let first = if let Later::Vcpus(work) = later { Some(work.clone()) } else { None };
        match vcpu::spawn(id, cpu, vcpu::Before { pin, memory: first }, dispatch.clone(), accounting) {
            Ok(thread) => started.push(thread),
            Err(e) => {
                dispatch.control().finish(Outcome::Killed);
                started.into_iter().for_each(|t| drop(t.stop()));
                return Err(host("start a thread for a vCPU")(e));
            }
        }
    }
    Ok(started)
}

/// Says what the user's choices cost the host, now that there is a machine that makes use of them.
fn tell_costs(vm: &spec::Vm, io: &ConsoleIo) {
    let print = if io.terminal { base::news::print_beside_guest } else { base::news::print };
    for line in vm.costs(|| std::thread::available_parallelism().map_or(1, usize::from)) {
        print(&line);
    }
}

/// What the main thread's loop looks after.
struct Watch<'a> {
    dispatch: &'a Dispatch,
    registry: &'a mut Registry,
    timer: &'a Timer,
    button: &'a dyn IrqLine,
}

impl Watch<'_> {
    /// The main thread's loop. Returns once the guest is over.
    fn until_over(&mut self, signals: &mut Signals, io: &ConsoleIo) -> Result<Outcome, Error> {
        let control = self.dispatch.control();
        let mut reactor = Reactor::new().map_err(host("make an epoll instance"))?;
        for (source, token) in [
            (control.event().as_raw_fd(), CONTROL),
            (signals.as_raw_fd(), SIGNALS),
            (self.timer.as_raw_fd(), HALF_LINE),
        ] {
            reactor.add(&source, token).map_err(host("watch a descriptor"))?;
        }
        for (source, token) in self.registry.sources(DEVICES) {
            reactor.add(&source, token).map_err(host("watch a device"))?;
        }
        // A regular file or /dev/null can't be watched and has no input to wait for.
        let mut input = ConsoleInput::new(io).filter(|source| reactor.add(source.file(), INPUT).is_ok());
        let mut asked = false;
        let mut settled = Some(Instant::now() + SETTLE);
        loop {
            if let Some(outcome) = control.outcome() {
                return Ok(outcome);
            }
            let rest = settled.map(|at| at.saturating_duration_since(Instant::now()));
            if rest == Some(Duration::ZERO) {
                base::forget_code();
                settled = None;
                continue;
            }
            // A part of a millisecond counts as one, or the last one would be spent turning.
            let rest = rest.map(|rest| rest.as_millis() as u32 + 1);
            let ready: Vec<_> = reactor.turn(rest).map_err(host("wait for events"))?.collect();
            for event in ready {
                match (event.token, &mut input) {
                    (SIGNALS, _) => self.on_signals(signals, &mut asked),
                    (HALF_LINE, _) => self.dispatch.with_serial(SerialPort::flush),
                    (INPUT, Some(source)) => {
                        let more = self.on_input(source);
                        if !more {
                            let _ = reactor.remove(source.file());
                            input = None;
                        }
                    }
                    (token @ DEVICES.., _) => self.registry.on_ready(token - DEVICES),
                    _ => {}
                }
            }
        }
    }

    /// The first signal presses the power button, any later one (and a lost terminal at once) ends the run.
    fn on_signals(&self, signals: &mut Signals, asked: &mut bool) {
        while let Some(signal) = signals.next() {
            if *asked || signal == libc::SIGHUP {
                self.dispatch.control().finish(Outcome::Killed);
            } else {
                *asked = true;
                // Only a full counter refuses, and then the press is pending.
                self.button.pulse();
            }
        }
    }

    /// Passes on what the user typed; `false` at the end of the input.
    fn on_input(&mut self, source: &mut ConsoleInput) -> bool {
        match source.read() {
            Typed::Bytes(bytes) => {
                self.dispatch.with_serial(|s| s.input(&bytes));
                self.registry.input(&bytes);
            }
            Typed::Quit => self.dispatch.control().finish(Outcome::Killed),
            Typed::End => return false,
        }
        true
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
        disabled_exits: Vec::new(),
        interrupt_hardware: None,
        startup: StartUp::default(),
        timeline: Vec::new(),
        places: most_frequent(stopped),
        memory: memory(&smaps, guest),
        kvm: vm.stats().map(|s| plain(&s.read())).unwrap_or_default(),
    };
    ledger.total();
    ledger
}

/// Where the exits of all vCPUs came from.
fn most_frequent(stopped: &[Stopped]) -> Vec<Place> {
    let mut rows: Vec<Place> = stopped.iter().filter_map(|s| s.places.as_ref()).flat_map(Places::rows).collect();
    rows.sort_by_key(|place| std::cmp::Reverse(place.count));
    rows
}
