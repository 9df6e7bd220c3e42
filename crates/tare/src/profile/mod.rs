// SPDX-License-Identifier: Apache-2.0
//! `tare profile`: runs a machine and writes a flame graph of where its time went: tare's own phases by the clock, and the
//! CPU time of each thread by function, of the host's kernel too where it lets us look. Runs on the main thread; `sampler`
//! has one of its own.

mod elf;
mod flame;
mod objects;
mod phases;
mod sampler;

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Instant;

use lexopt::{Arg, Parser};
use machine::Symbols;

use crate::exit::{Exit, Failure, complain, reason};
use crate::files::LedgerFile;
use crate::flags::{Asked, Line, OnReset, lexed, once, parse_run, text_of};
use crate::meaning::Meant;
use crate::run;
use crate::vmm::Course;
use flame::{Frame, Kind};
use objects::{Objects, is_kernels};
use phases::{Phase, Until, phases};
use sampler::{Sampler, Samples, monotonic};

/// `tare profile --help`.
pub const HELP: &str = "usage: tare profile --out FILE [flags] -- run --kernel FILE [flags of run]

Runs the machine and writes a flame graph: tare's own phases by the clock, and
beside them the CPU time of each of its threads by function, in tare and in the
host's kernel. A reset ends the run. Where the kernel lets nobody sample
(/proc/sys/kernel/perf_event_paranoid), the graph has the phases alone.

flags:
  --out FILE        the graph, as SVG
  --until WHEN      start: the guest's first instruction, or end: of the run [start]
  --rate N          samples a second of CPU time, 1 to 20000 [2000]
  --stacks WHICH    auto, or off: phases alone [auto]
";

/// What `tare profile` is to do.
#[derive(Debug)]
pub struct ProfileFlags {
    out: PathBuf,
    until: Until,
    rate: u64,
    stacks: bool,
    line: Line,
}

/// Reads its flags, and those of the run.
///
/// # Errors
/// [`Failure`] with exit code 2.
pub fn parse(args: &mut Parser) -> Result<Asked<ProfileFlags>, Failure> {
    let (mut out, mut until, mut rate, mut stacks) = (None, None, None, None);
    let word = |flag: &str, text: &str, is: &str| {
        Failure::usage(format!("`{text}` is not a value of {flag}: {flag}; use {is}"))
    };
    loop {
        match args.next().map_err(lexed)? {
            Some(Arg::Long("help") | Arg::Short('h')) => return Ok(Asked::Help),
            Some(Arg::Long("out")) => once(&mut out, "--out", PathBuf::from(args.value().map_err(lexed)?))?,
            Some(Arg::Long("until")) => {
                let text = text_of("--until", "word", args)?;
                let when = match text.as_str() {
                    "start" => Until::Start,
                    "end" => Until::End,
                    _ => return Err(word("--until", &text, "start or end")),
                };
                once(&mut until, "--until", when)?;
            }
            Some(Arg::Long("rate")) => {
                let text = text_of("--rate", "number", args)?;
                let number = text.parse().ok().filter(|n| (1..=20_000).contains(n));
                once(&mut rate, "--rate", number.ok_or_else(|| word("--rate", &text, "a number from 1 to 20000"))?)?;
            }
            Some(Arg::Long("stacks")) => {
                let text = text_of("--stacks", "word", args)?;
                if text != "auto" && text != "off" {
                    return Err(word("--stacks", &text, "auto or off"));
                }
                once(&mut stacks, "--stacks", text == "auto")?;
            }
            Some(Arg::Value(command)) if command == "run" || command == "boot" => break,
            Some(other) => {
                let what = other.unexpected();
                return Err(Failure::usage(format!(
                    "{what}: command line; write `tare profile --out FILE -- run ...`"
                )));
            }
            None => {
                return Err(Failure::usage(
                    "no run to profile: command line; write `tare profile --out FILE -- run ...`",
                ));
            }
        }
    }
    let out = out.ok_or_else(|| Failure::usage("no --out FILE: command line; see `tare profile --help`"))?;
    let rest: Vec<OsString> = args.raw_args().map_err(lexed)?.collect();
    let Asked::Do(line) = parse_run(&mut Parser::from_args(rest))? else { return Ok(Asked::Help) };
    let (until, rate) = (until.unwrap_or_default(), rate.unwrap_or(2000));
    Ok(Asked::Do(ProfileFlags { out, until, rate, stacks: stacks.unwrap_or(true), line }))
}

/// Runs the machine and writes the graph.
///
/// # Errors
/// [`Failure`]: those of the run, and a graph that can't be written.
pub fn run(asked: ProfileFlags) -> Result<Exit, Failure> {
    let ProfileFlags { out, until, rate, stacks, mut line } = asked;
    line.on_reset.get_or_insert(OnReset::Exit);
    let meant = Meant::new(line)?;
    let file = LedgerFile::reserve_as("profile", &out)?;
    let objects = Objects::own();
    let sampler = if stacks { start(rate, &objects) } else { None };
    let (now, monotonic) = (Instant::now(), monotonic());
    let ended = run::weigh(&meant);
    let samples = sampler.map(Sampler::stop);
    let (exit, weight) = ended?;
    let Course { begun, moments, startup, wall } = weight.course;
    let phases = phases(&moments, &startup, wall, until);
    // When it began, by the clock of the samples.
    let begun = monotonic + begun.saturating_duration_since(now).as_nanos() as u64;
    if let Some(samples) = samples.as_ref().filter(|samples| samples.lost > 0) {
        let all = samples.lost + samples.taken.len() as u64;
        complain(&format!("{} of {all} samples were lost: --rate; take fewer a second", samples.lost));
    }
    let graph = graph(&phases, samples.as_ref().map(|samples| Cpu { samples, objects: &objects, begun, rate }));
    let title =
        format!("tare run, {}", if until == Until::Start { "to the guest's first instruction" } else { "to its end" });
    file.write(graph.svg(&title).as_bytes())?;
    Ok(exit)
}

/// A sampler, where there can be one; says in a line what is missing.
fn start(rate: u64, objects: &Objects) -> Option<Sampler> {
    const HOW: &str = "write 1 to /proc/sys/kernel/perf_event_paranoid, or give it CAP_PERFMON";
    match Sampler::start(rate, objects.stacks()) {
        Ok(sampler) => {
            if !sampler.kernel {
                complain(&format!("the profile has no stacks of the kernel: permission; {HOW}"));
            }
            Some(sampler)
        }
        Err(e) => {
            let hint = if e.kind() == io::ErrorKind::PermissionDenied { HOW } else { "this kernel has no perf events" };
            complain(&format!("the profile has phases alone, {}: perf_event_open; {hint}", reason(&e)));
            None
        }
    }
}

/// What is known of CPU time.
struct Cpu<'a> {
    samples: &'a Samples,
    objects: &'a Objects,
    /// When the monitor began, by the clock of the samples.
    begun: u64,
    rate: u64,
}

fn graph(phases: &[Phase], cpu: Option<Cpu<'_>>) -> Frame {
    let mut root = Frame::new("tare", Kind::Own);
    for phase in phases {
        let own = |part: Option<&'static str>| {
            ["phases, by the clock", &phase.name].into_iter().chain(part).map(|name| (name, Kind::Own))
        };
        let mut left = phase.to - phase.from;
        for (name, ns) in &phase.parts {
            let ns = left.min(*ns);
            root.add(own(Some(name)), ns);
            left -= ns;
        }
        root.add(own(None), left);
    }
    if let Some(cpu) = cpu {
        cpu.add_to(&mut root, phases);
    }
    root
}

impl Cpu<'_> {
    fn add_to(&self, root: &mut Frame, phases: &[Phase]) {
        let kernel = Symbols::read(Path::new("/proc/kallsyms")).unwrap_or_default();
        let mut names: HashMap<u64, String> = HashMap::new();
        let end = phases.last().map_or(0, |phase| phase.to);
        for &(time, thread, stack) in &self.samples.taken {
            let at = time.saturating_sub(self.begun);
            let phase = phases.iter().find(|phase| at < phase.to);
            let (Some(phase), Some(stack)) = (phase.filter(|_| at < end), self.samples.stacks.get(stack as usize))
            else {
                continue;
            };
            for at in stack.iter() {
                names.entry(*at).or_insert_with(|| self.objects.name(*at, &kernel));
            }
            // The first thread has its name from before.
            let thread = self.samples.names.get(&thread).map_or("tare", String::as_str);
            let own = ["CPU time, by thread", thread, &phase.name].into_iter().map(|name| (name, Kind::Own));
            let frames = stack.iter().rev().filter_map(|at| {
                Some((names.get(at)?.as_str(), if is_kernels(*at) { Kind::Kernel } else { Kind::User }))
            });
            root.add(own.chain(frames), 1_000_000_000 / self.rate);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn parsed(flags: &[&str]) -> Result<ProfileFlags, String> {
        match parse(&mut Parser::from_args(flags)) {
            Ok(Asked::Do(asked)) => Ok(asked),
            Ok(Asked::Help) => Err("help".to_owned()),
            Err(failure) => Err(failure.message),
        }
    }

    #[test]
    fn flags_say_what_is_profiled() {
        let asked = parsed(&["--out", "/o", "--until", "end", "--rate=99", "--", "run", "--kernel", "k"]).unwrap();
        assert_eq!((asked.out, asked.until, asked.rate, asked.stacks), ("/o".into(), Until::End, 99, true));
        assert_eq!(asked.line.kernel, Some("k".into()));
        let asked = parsed(&["--out", "/o", "--stacks", "off", "boot", "--kernel", "k"]).unwrap();
        assert_eq!((asked.until, asked.rate, asked.stacks), (Until::Start, 2000, false));
    }

    #[test]
    fn what_can_not_be_is_one_line() {
        for (flags, part) in [
            (&["--", "run", "--kernel", "k"][..], "no --out FILE"),
            (&["--out", "/o"], "no run to profile"),
            (&["--out", "/o", "--", "doctor"], "write `tare profile --out FILE -- run ...`"),
            (&["--out", "/o", "--until", "noon", "run"], "start or end"),
            (&["--out", "/o", "--rate", "0", "run"], "1 to 20000"),
            (&["--out", "/o", "--stacks", "on", "run"], "auto or off"),
            (&["--out", "/o", "--out", "/p", "run"], "given twice"),
            (&["--out", "/o", "run", "--kernl", "k"], "did you mean --kernel?"),
            (&["--out", "/o", "run", "--help"], "help"),
        ] {
            let said = parsed(flags).unwrap_err();
            assert!(said.contains(part) && !said.contains('\n'), "{flags:?}: {said}");
        }
    }

    #[test]
    fn phases_are_a_graph_without_any_samples() {
        let phase = |name: &str, from, to, parts: &[(&'static str, u64)]| Phase {
            name: name.to_owned(),
            from,
            to,
            parts: parts.to_vec(),
        };
        let all = [
            phase(
                "virtual machine and its memory",
                0,
                9_000_000,
                &[("mmap", 1_000_000), ("fault and zero", 6_000_000)],
            ),
            // A part can't be longer than the whole.
            phase("vCPUs", 9_000_000, 10_000_000, &[("vCPU", 5_000_000)]),
        ];
        let svg = graph(&all, None).svg("t");
        for title in [
            "tare (10.000 ms, 100.00 %)",
            "phases, by the clock (10.000 ms, 100.00 %)",
            "virtual machine and its memory (9.000 ms, 90.00 %)",
            "fault and zero (6.000 ms, 60.00 %)",
            "vCPU (1.000 ms, 10.00 %)",
        ] {
            assert!(svg.contains(&format!("<title>{title}</title>")), "{title} in {svg}");
        }
        assert!(!svg.contains("CPU time"));
    }
}
