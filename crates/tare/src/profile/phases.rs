// SPDX-License-Identifier: Apache-2.0
//! tare's own phases, from the moments and the account of a run: they are in every profile, also where the kernel lets
//! nobody look at stacks.

use std::time::Duration;

use machine::{GUEST_STARTS, Moment, StartUp};

/// A stretch of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Phase {
    /// What was done in it.
    pub name: String,
    /// Nanoseconds since the monitor began.
    pub from: u64,
    /// See `from`.
    pub to: u64,
    /// What parts of it are known to have taken.
    pub parts: Vec<(&'static str, u64)>,
}

/// How far a profile goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Until {
    /// To the guest's first instruction.
    #[default]
    Start,
    /// To the guest's end.
    End,
}

/// The phases of a run that took `wall`, of which `startup` is the account and `moments` the timeline.
#[must_use]
pub fn phases(moments: &[Moment], startup: &StartUp, wall: Duration, until: Until) -> Vec<Phase> {
    let (mut out, mut from, mut started) = (Vec::new(), 0, false);
    for moment in moments {
        if started && until == Until::Start {
            break;
        }
        let parts: &[(&'static str, u64)] = match moment.what.as_str() {
            "virtual machine and its memory" => {
                &[("mmap", startup.mmap_ns), ("fault and zero", startup.fault_and_zero_ns), ("map", startup.map_ns)]
            }
            "memory pinned" => &[("pin", startup.pin_ns)],
            "vCPUs" => &[("vCPU", startup.vcpu_ns)],
            _ => &[],
        };
        let name = if moment.what == GUEST_STARTS { "threads" } else { &moment.what };
        let parts = parts.iter().copied().filter(|(_, ns)| *ns > 0).collect();
        out.push(Phase { name: name.to_owned(), from, to: moment.ns.max(from), parts });
        from = moment.ns.max(from);
        started |= moment.what == GUEST_STARTS;
    }
    if until == Until::End {
        let to = (wall.as_nanos() as u64).max(from);
        out.push(Phase { name: "the guest runs".to_owned(), from, to, parts: Vec::new() });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_follow_each_other_to_where_the_profile_ends() {
        let moment = |what: &str, ns| Moment { what: what.to_owned(), ns, ..Moment::default() };
        let moments = [
            moment("virtual machine and its memory", 100),
            moment("devices", 120),
            moment("vCPUs", 150),
            moment(GUEST_STARTS, 160),
            moment("boot marker", 500),
        ];
        let startup = StartUp { mmap_ns: 5, fault_and_zero_ns: 80, vcpu_ns: 20, ..StartUp::default() };
        let wall = Duration::from_nanos(900);
        let start = phases(&moments, &startup, wall, Until::Start);
        let names = |phases: &[Phase]| -> Vec<(String, u64, u64)> {
            phases.iter().map(|phase| (phase.name.clone(), phase.from, phase.to)).collect()
        };
        let mut want = vec![
            ("virtual machine and its memory".to_owned(), 0, 100),
            ("devices".to_owned(), 100, 120),
            ("vCPUs".to_owned(), 120, 150),
            ("threads".to_owned(), 150, 160),
        ];
        assert_eq!(names(&start), want);
        assert_eq!(
            (&start[0].parts, &start[2].parts),
            (&vec![("mmap", 5), ("fault and zero", 80)], &vec![("vCPU", 20)])
        );
        want.extend([("boot marker".to_owned(), 160, 500), ("the guest runs".to_owned(), 500, 900)]);
        assert_eq!(names(&phases(&moments, &startup, wall, Until::End)), want);
    }
}
