// SPDX-License-Identifier: Apache-2.0
//! Suite `interrupts`: what one interrupt costs, by controller. The guest is `guests/interrupts`, a few kilobytes without a
//! kernel, which answers each interrupt with the register accesses of the study of DESIGN.md's S5 and counts its own time.
//!
//! A subject takes part if its template says `controller=` to the guest. What makes an interrupt come is the guest's own
//! doing: one exit with the paravirtual controller, three with a serial port. The guest has that done without an interrupt
//! first, so that the injection is what the interrupt adds to it.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::{Bundle, Kind};
use crate::report::{Better, Figure, Row};
use crate::sample::Sample;

/// Name in tables.
const NAME: &str = "interrupt";
/// What the study found: cycles of one interrupt, injection and response, in these modes.
const STUDY: [(&str, f64); 4] = [("trap", 91_769.0), ("kernel", 37_985.0), ("ro-page", 23_227.0), ("pv", 18_647.0)];
/// What the guest says once its line is out: the lab reads KVM's counters then.
const MARK: &str = "\n@@lab done\n";
/// The part that the guest's handler takes.
const RESPONSE: &str = "response";
/// The metric that the study's figures stand beside.
const BOTH: &str = "injection and response";

/// The bundle of the suite.
pub fn bundles(scale: f64) -> Vec<Bundle> {
    let count = ((20_000.0 * scale) as u64).max(200);
    let kind = Kind::Guest { count };
    vec![Bundle { name: NAME, kind, memory_mib: 32, limit_seconds: 60 + count / 5_000, disk: None, net: None }]
}

/// The guest's file: beside the programs, where `scripts/guests` puts it.
pub fn guest() -> Result<Vec<u8>> {
    let program = std::env::current_exe().context("which program this is")?;
    let beside = program.parent().and_then(|dir| dir.parent()).map(|dir| dir.join("guests/interrupts"));
    let path = std::env::var_os("TARE_GUEST").map(PathBuf::from).or(beside).unwrap_or_default();
    std::fs::read(&path).with_context(|| format!("can't read {}; make it with scripts/guests", path.display()))
}

/// A number that the guest printed.
fn said(line: &str, name: &str) -> Result<f64> {
    let word = line.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    word.with_context(|| format!("the guest did not say {name}"))?
        .parse()
        .with_context(|| format!("{name} is no number"))
}

/// The figures of one sample.
pub fn figures(sample: &Sample) -> Result<Vec<(&'static str, Figure)>> {
    let done = sample.need("done")?;
    let line =
        sample.console.lines().find(|line| line.starts_with("interrupts: ")).context("the guest said nothing")?;
    let (count, served) = (said(line, "count")?, said(line, "served")?);
    anyhow::ensure!(count == served, "of {count} interrupts {served} were served");
    // What makes an interrupt come leaves to the monitor, too, in the interrupts and in the tries without one before them; those
    // are forgotten by one more exit, in `trap` and `ro-page`.
    let paravirtual = line.contains("controller=vioapic");
    let cause = if paravirtual { 1.0 } else { 3.0 };
    let forget = if paravirtual && !line.contains("mode=2") { 1.0 } else { 0.0 };
    let tried = said(line, "causes")? * (cause + forget);
    let get = |name: &str| done.counters.get(name).copied().unwrap_or(0) as f64;
    let (mmio, pio) = match paravirtual {
        true => ((get("mmio_exits") - tried) / count, get("io_exits") / count),
        // Its port says the guest's words to the user, too, a character an exit.
        false => (get("mmio_exits") / count, (get("io_exits") - tried - (line.len() + MARK.len()) as f64) / count),
    };
    let all = (get("exits") - tried) / count;
    let (response, injection) = (said(line, "response")?, said(line, "injection")?);
    let lower = |metric: &str, unit, value| Figure::new(metric, unit, Better::Lower, value);
    let mut out = vec![
        lower(RESPONSE, "ticks", response),
        lower("injection", "ticks", injection),
        lower(BOTH, "ticks", injection + response),
        lower("with what makes it come", "ticks", said(line, "ticks")?),
        lower("spurious", "", said(line, "spurious")? / count),
    ];
    if all > 0.0 {
        // A run begins and ends, too: what is left of that by the count is cut off.
        // The paravirtual controller has no ports: those are the guest's few words to the user.
        let answered = if paravirtual { mmio } else { mmio + pio };
        let tenths = |value: f64| (value * 10.0).round() / 10.0;
        out.push(lower("exits to the monitor, response", "", tenths((answered - cause).max(0.0))));
        out.push(lower("exits to the monitor, what makes it come", "", cause));
        out.push(lower("exits, all", "", tenths(all)));
        out.push(lower("exits: mmio", "", tenths(mmio)));
        out.push(lower("exits: pio", "", tenths(pio)));
        out.push(lower("exits: halt", "", tenths(get("halt_exits") / count)));
        out.push(lower("exits: irq window", "", tenths(get("irq_window_exits") / count)));
    }
    Ok(out.into_iter().map(|figure| (NAME, figure)).collect())
}

/// The study's figures beside ours: what is left of trap's in each mode.
pub fn beside_study(rows: &[Row]) -> Vec<String> {
    let Some(row) = rows.iter().find(|row| row.workload == NAME && row.metric == BOTH) else { return Vec::new() };
    let Some(trap) = row.median.get("tare-trap") else { return Vec::new() };
    let ours = |mode: &str| row.median.get(&format!("tare-{mode}")).map(|ticks| ticks / trap * 100.0);
    let parts: Vec<String> = STUDY
        .iter()
        .filter_map(|(mode, cycles)| {
            let theirs = cycles / STUDY[0].1 * 100.0;
            Some(format!("{mode} {:.0} % (the study {theirs:.0} %)", ours(mode)?))
        })
        .chain(["split", "msi"].iter().filter_map(|mode| Some(format!("{mode} {:.0} %", ours(mode)?))))
        .collect();
    let response = rows.iter().find(|row| row.workload == NAME && row.metric == RESPONSE);
    let less = response.and_then(|row| {
        let (trap, pv, msi) = (row.median.get("tare-trap")?, row.median.get("tare-pv")?, row.median.get("tare-msi")?);
        Some(format!(
            "The response alone: pv {:.1} % and msi {:.1} % below trap.",
            (1.0 - pv / trap) * 100.0,
            (1.0 - msi / trap) * 100.0
        ))
    });
    let head = format!("One interrupt, injection and response, as a share of trap's: {}.", parts.join(", "));
    std::iter::once(head).chain(less).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const REPORT: &str = "%% mark 2050000 done exits=5502 io_exits=120 mmio_exits=4504 halt_exits=7 irq_window_exits=1000\n\
        %% end 2300000 killed 0\n%% console\ninterrupts: controller=vioapic mode=1 count=1000 served=1000 spurious=0 rings=0 \
        eoi-skipped=0 ticks=1700 causes=251 cause=800 injection=300 response=600\n@@lab done\n%% stderr\n\n%% stop\n";

    #[test]
    fn an_interrupt_has_its_exits_by_kind_and_its_two_parts() {
        let figures = figures(&Sample::parse(REPORT).unwrap()).unwrap();
        let get = |metric: &str| figures.iter().find(|(_, f)| f.metric == metric).map(|(_, f)| f.value);
        assert_eq!((get("response"), get("injection"), get(BOTH)), (Some(600.0), Some(300.0), Some(900.0)));
        assert_eq!(get("exits to the monitor, response"), Some(3.0));
        assert_eq!(get("with what makes it come"), Some(1700.0));
        assert_eq!((get("exits: mmio"), get("exits, all")), (Some(4.0), Some(5.0)));
    }

    #[test]
    fn a_guest_that_lost_one_is_a_failed_sample() {
        let report = REPORT.replace("served=1000", "served=999");
        let error = super::figures(&Sample::parse(&report).unwrap()).unwrap_err().to_string();
        assert!(error.contains("999"), "{error}");
    }
}
