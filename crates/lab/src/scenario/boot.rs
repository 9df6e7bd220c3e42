// SPDX-License-Identifier: Apache-2.0
//! Suite `boot`: from the start of the monitor to the first line of user space, of a stock kernel with the smallest user
//! space there is (see `init`).
//!
//! Three bundles: a serial console with all kernel messages, the same for every monitor; `quiet` on the monitor's own default
//! console; and that without the tests of its cryptography that a stock kernel makes when it starts, which are more than
//! half of its boot and no monitor's doing.

use anyhow::{Result, bail};

use super::{Bundle, Kind, stamps};
use crate::report::{Better, Figure};
use crate::sample::Sample;

/// The bundles of the suite.
pub fn bundles() -> Vec<Bundle> {
    let bundle = |name, quiet, words| Bundle {
        name,
        kind: Kind::Boot { quiet, words },
        memory_mib: 256,
        limit_seconds: 20,
        disk: None,
        net: None,
    };
    vec![bundle("boot", false, ""), bundle("boot quiet", true, ""), bundle("boot untested", true, " cryptomgr.notests")]
}

/// The figures of one boot.
pub fn figures(name: &'static str, sample: &Sample) -> Result<Vec<(&'static str, Figure)>> {
    let ready = sample.need("ready")?;
    let total = ready.micros as f64 / 1e6;
    let mut out = vec![Figure::new("time to user space", "s", Better::Lower, total)];
    for (part, seconds) in
        stamps::parts(&sample.console, total).into_iter().flat_map(|p| stamps::PARTS.into_iter().zip(p))
    {
        out.push(Figure::new(&format!("of it {part}"), "s", Better::Lower, seconds));
    }
    if let Some(exits) = sample.exits(None, "ready") {
        out.push(Figure::new("exits", "", Better::Lower, exits.total as f64));
        for (kind, count) in &exits.by_kind {
            out.push(Figure::new(&format!("exits: {kind}"), "", Better::Lower, *count as f64));
        }
    }
    let Some(memory) = sample.memory else {
        bail!("the monitor was gone before its memory could be read ({})", sample.ending())
    };
    out.push(Figure::new("RSS beside guest memory", "MiB", Better::Lower, memory.rss_kib as f64 / 1024.0));
    out.push(Figure::new("PSS beside guest memory", "MiB", Better::Lower, memory.pss_kib as f64 / 1024.0));
    out.push(Figure::new("guest memory touched", "MiB", Better::Lower, memory.guest_rss_kib as f64 / 1024.0));
    let all = memory.rss_kib + memory.guest_rss_kib;
    for (name, kib) in [("total", memory.total_kib), ("resident", all), ("dirty", memory.dirty_kib)] {
        // As a list of the process's mappings adds them up, guest memory included.
        out.push(Figure::new(&format!("mapped memory, {name}"), "MiB", Better::Lower, kib as f64 / 1024.0));
    }
    Ok(out.into_iter().map(|figure| (name, figure)).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const REPORT: &str = "%% mark 2050000 ready exits=43798 io_exits=41220 irq_exits=649\n%% memory 6041 5900 80000 80000 1200000 81000\n\
        %% end 2300000 exit 0\n%% console\nhello\n%% stderr\n\n%% stop\n";

    #[test]
    fn a_boot_gives_time_exits_and_memory() {
        let figures = figures("boot", &Sample::parse(REPORT).unwrap()).unwrap();
        let get = |metric: &str| figures.iter().find(|(_, f)| f.metric == metric).map(|(_, f)| f.value);
        assert_eq!(get("time to user space"), Some(2.05));
        assert_eq!(get("exits"), Some(43798.0));
        assert_eq!(get("exits: pio"), Some(41220.0));
        assert_eq!(get("RSS beside guest memory"), Some(6041.0 / 1024.0));
        assert_eq!(figures[0].1.metric, "time to user space");
    }

    #[test]
    fn a_guest_that_never_came_up_is_a_failed_sample() {
        let report = REPORT.replace(" ready ", " other ").replace("exit 0", "exit 1").replace("hello", "Kernel panic");
        let error = figures("boot", &Sample::parse(&report).unwrap()).unwrap_err().to_string();
        assert!(error.contains("never said 'ready'") && error.contains("Kernel panic"), "{error}");
    }
}
