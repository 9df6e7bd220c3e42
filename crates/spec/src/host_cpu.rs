// SPDX-License-Identifier: Apache-2.0
//! How vCPUs use the host's CPUs: which ones (`--cpu-pin`), and whether they give them back when they have nothing to do
//! (`--halt-poll`, `--disable-exits`), with what each choice costs the host in words.
//!
//! Filled by the command line, read by `machine`; text forms and checks stand here together.

use std::fmt;
use std::ops::RangeInclusive;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::check::out_of_range;
use crate::parse::FromText;
use crate::text::text_or_list;
use crate::{SpecError, Vm};

/// Longest halt polling in nanoseconds: a second, after which any sleep has paid for itself many times.
pub const MAX_HALT_POLL: u32 = 1_000_000_000;

/// Host CPUs, first and last.
pub type HostCpus = RangeInclusive<u16>;

/// Where the threads of vCPUs may run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CpuPin {
    /// Wherever the monitor itself may.
    #[default]
    None,
    /// vCPU 0 on the first of these host CPUs, vCPU 1 on the second, and so on: one for each.
    InTurn(Vec<u16>),
    /// These vCPUs on one of their host CPUs; the others wherever the monitor may.
    Each(Vec<(u8, HostCpus)>),
}

impl CpuPin {
    /// Nothing is pinned.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::None
    }

    /// Each pinned vCPU and its host CPUs.
    #[must_use]
    pub fn pins(&self) -> Vec<(u8, HostCpus)> {
        match self {
            Self::None => Vec::new(),
            Self::InTurn(cpus) => (0u8..).zip(cpus).map(|(vcpu, cpu)| (vcpu, *cpu..=*cpu)).collect(),
            Self::Each(pins) => pins.clone(),
        }
    }

    fn check(&self, count: u8) -> Result<(), SpecError> {
        let refuse = |what: String, hint: &str| Err(out_of_range("cpu-pin", what, hint));
        match self {
            Self::InTurn(cpus) if cpus.len() != usize::from(count) => refuse(
                format!("{} host CPUs for {count} vCPUs", cpus.len()),
                "list one for each, or say VCPU:CPU for some",
            ),
            Self::Each(pins) => match pins.iter().find(|(vcpu, _)| *vcpu >= count) {
                Some((vcpu, _)) => refuse(format!("there is no vCPU {vcpu}"), "the first is 0; see --cpus"),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }
}

fn no_pins(value: &str) -> SpecError {
    SpecError::NotA {
        place: "cpu-pin".to_owned(),
        value: value.to_owned(),
        want: "a host CPU for each vCPU",
        hint: "write a list such as 2-5 or 0,2, or pairs VCPU:CPU such as 0:2,1:4-5".to_owned(),
    }
}

/// `3` or `2-5`.
fn parse_range(text: &str) -> Option<HostCpus> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = first.parse().ok()?..=last.parse().ok()?;
    (!range.is_empty()).then_some(range)
}

impl FromText for CpuPin {
    /// `2-5`, `0,2,4-5`: host CPUs for vCPUs 0, 1, ... in turn. `0:2,1:4-5`: host CPUs for the vCPUs named.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        let mut in_turn = Vec::new();
        let mut each: Vec<(u8, HostCpus)> = Vec::new();
        for item in text.split(',') {
            let Some((vcpu, cpus)) = item.split_once(':') else {
                in_turn.extend(parse_range(item).ok_or_else(|| no_pins(item))?);
                continue;
            };
            let vcpu = vcpu.parse().map_err(|_| no_pins(item))?;
            if each.iter().any(|(other, _)| *other == vcpu) {
                return Err(SpecError::Repeated { place: "cpu-pin".to_owned(), key: format!("{vcpu}:") });
            }
            each.push((vcpu, parse_range(cpus).ok_or_else(|| no_pins(item))?));
        }
        match (in_turn.is_empty(), each.is_empty()) {
            (false, true) => Ok(Self::InTurn(in_turn)),
            (true, false) => Ok(Self::Each(each)),
            _ => Err(no_pins(text)),
        }
    }
}

impl fmt::Display for CpuPin {
    /// The text form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let items: Vec<String> = match self {
            Self::None => Vec::new(),
            Self::InTurn(cpus) => cpus.iter().map(u16::to_string).collect(),
            Self::Each(pins) => pins.iter().map(|(vcpu, c)| format!("{vcpu}:{}-{}", c.start(), c.end())).collect(),
        };
        f.write_str(&items.join(","))
    }
}

impl<'de> Deserialize<'de> for CpuPin {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_list(deserializer)
    }
}

impl Serialize for CpuPin {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Instructions of an idle vCPU that don't leave the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DisableExits {
    /// `HLT`.
    pub hlt: bool,
    /// `PAUSE` in loops.
    pub pause: bool,
    /// `MONITOR` and `MWAIT`, which the guest then has.
    pub mwait: bool,
    /// Reads of C-state residency counters.
    pub cstate: bool,
}

impl DisableExits {
    /// The words of those that are set, in a fixed order.
    pub fn words(&self) -> impl Iterator<Item = &'static str> {
        let all = [("hlt", self.hlt), ("pause", self.pause), ("mwait", self.mwait), ("cstate", self.cstate)];
        all.into_iter().filter(|(_, on)| *on).map(|(word, _)| word)
    }
}

impl FromText for DisableExits {
    /// `hlt,pause`.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        let mut out = Self::default();
        for word in text.split(',') {
            let bit = match word {
                "hlt" => &mut out.hlt,
                "pause" => &mut out.pause,
                "mwait" => &mut out.mwait,
                "cstate" => &mut out.cstate,
                _ => {
                    return Err(SpecError::NotA {
                        place: "disable-exits".to_owned(),
                        value: word.to_owned(),
                        want: "an exit that can be left out",
                        hint: "use hlt, pause, mwait or cstate, with commas between them".to_owned(),
                    });
                }
            };
            if std::mem::replace(bit, true) {
                return Err(SpecError::Repeated { place: "disable-exits".to_owned(), key: word.to_owned() });
            }
        }
        Ok(out)
    }
}

impl<'de> Deserialize<'de> for DisableExits {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_list(deserializer)
    }
}

impl Serialize for DisableExits {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.words())
    }
}

/// The three choices of one machine, checked against its number of vCPUs.
pub(crate) fn check(vm: &Vm) -> Result<(), SpecError> {
    vm.cpu_pin.check(vm.cpus.count)?;
    if vm.halt_poll.is_some_and(|ns| ns > MAX_HALT_POLL) {
        let what = format!("{} ns are too long", vm.halt_poll.unwrap_or(0));
        return Err(out_of_range("halt-poll", what, format!("ask for at most {MAX_HALT_POLL}, a second")));
    }
    if vm.halt_poll.is_some() && vm.disable_exits.hlt {
        let what = "a vCPU that never leaves on HLT has no halt to poll before";
        return Err(out_of_range("halt-poll", what, "take it out, or hlt out of disable-exits"));
    }
    Ok(())
}

impl Vm {
    /// What the user's choices cost a host on which the monitor may use as many CPUs as `cpus` says (it is asked if it
    /// matters): one line for each choice, `choice: cost`.
    #[must_use]
    pub fn costs(&self, cpus: impl Fn() -> usize) -> Vec<String> {
        let mut lines = Vec::new();
        let count = self.cpus.count;
        match self.halt_poll {
            Some(0) => lines.push(
                "halt-poll 0: a vCPU that halts gives its host CPU back at once; the guest pays with a slower wake-up"
                    .to_owned(),
            ),
            Some(ns) => lines.push(format!(
                "halt-poll {ns}: a vCPU that halts keeps its host CPU busy for up to {ns} ns before it gives it back"
            )),
            None => {}
        }
        for word in self.disable_exits.words() {
            let cost = match word {
                "hlt" => hlt_cost(usize::from(count), cpus()),
                "mwait" => "a vCPU that waits in MWAIT keeps its host CPU, which saves power but does nothing else \
                            until the host's timer says so"
                    .to_owned(),
                "pause" => {
                    "a vCPU that spins on a lock is not set aside for the one that holds it; where vCPUs outnumber \
                            host CPUs it spins its whole time slice away"
                        .to_owned()
                }
                _ => "the guest sees how long the host's cores sleep; costs no time".to_owned(),
            };
            lines.push(format!("disable-exits {word}: {cost}"));
        }
        lines
    }
}

fn hlt_cost(vcpus: usize, cpus: usize) -> String {
    format!(
        "a vCPU that halts keeps its host CPU, which then does nothing else and looks fully used; {vcpus} vCPUs hold up to \
         {} of the {cpus} CPUs that tare may use{}",
        vcpus.min(cpus),
        if vcpus > cpus { ", and idle ones take time from busy ones" } else { "" }
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Cpus;

    fn pin(text: &str) -> CpuPin {
        CpuPin::from_text(text).unwrap()
    }

    #[test]
    fn pins_are_lists_or_pairs() {
        assert_eq!(pin("2-5"), CpuPin::InTurn(vec![2, 3, 4, 5]));
        assert_eq!(pin("0,2,8-9"), CpuPin::InTurn(vec![0, 2, 8, 9]));
        assert_eq!(pin("2,2").pins(), [(0, 2..=2), (1, 2..=2)], "two vCPUs may share a host CPU");
        assert_eq!(pin("0:2,1:3-4"), CpuPin::Each(vec![(0, 2..=2), (1, 3..=4)]));
        let read = |v| serde_json::from_value::<CpuPin>(v).unwrap();
        assert_eq!(read(json!("2-5")), pin("2-5"));
        assert_eq!(read(json!(["0:2", "1:3-4"])), pin("0:2,1:3-4"));
        assert_eq!(read(json!([4, 5])), pin("4-5"));
        assert_eq!(read(json!(3)), pin("3"));
        for value in [pin("0,2,8-9"), pin("0:2,1:3-4")] {
            assert_eq!(read(serde_json::to_value(&value).unwrap()), value, "what is written reads back");
        }
    }

    #[test]
    fn pins_that_cannot_be_are_named() {
        let bad = |text: &str| CpuPin::from_text(text).unwrap_err().to_string();
        assert_eq!(
            bad("two"),
            "`two` is not a host CPU for each vCPU: cpu-pin; write a list such as 2-5 or 0,2, or pairs VCPU:CPU such as \
             0:2,1:4-5"
        );
        for text in ["", "1,", "5-2", "0:", ":1", "0:1:2", "0:2,3", "-1", "65536", "0:5-2", "256:0"] {
            assert!(bad(text).contains("is not a host CPU for each vCPU: cpu-pin;"), "{text}");
        }
        assert_eq!(bad("0:1,0:2"), "`0:` is given twice: cpu-pin; give it once");
        let fails = |text: &str| {
            Vm { cpus: Cpus::flat(2), cpu_pin: pin(text), ..Vm::new("k") }.check().unwrap_err().to_string()
        };
        assert_eq!(fails("2-4"), "3 host CPUs for 2 vCPUs: cpu-pin; list one for each, or say VCPU:CPU for some");
        assert!(fails("2").starts_with("1 host CPUs for 2 vCPUs: cpu-pin;"));
        assert_eq!(fails("2:1"), "there is no vCPU 2: cpu-pin; the first is 0; see --cpus");
    }

    #[test]
    fn exits_are_words() {
        let all = DisableExits { hlt: true, pause: true, mwait: true, cstate: true };
        assert_eq!(DisableExits::from_text("cstate,hlt,mwait,pause").unwrap(), all);
        assert_eq!(all.words().collect::<Vec<_>>(), ["hlt", "pause", "mwait", "cstate"]);
        let read = |v| serde_json::from_value::<DisableExits>(v).unwrap();
        assert_eq!(read(json!(["hlt", "pause"])), DisableExits { mwait: false, cstate: false, ..all });
        assert_eq!(read(serde_json::to_value(all).unwrap()), all);
        assert_eq!(read(json!([])), DisableExits::default());
        let bad = |text: &str| DisableExits::from_text(text).unwrap_err().to_string();
        assert_eq!(
            bad("halt"),
            "`halt` is not an exit that can be left out: disable-exits; use hlt, pause, mwait or cstate, with commas \
             between them"
        );
        assert_eq!(bad("hlt,hlt"), "`hlt` is given twice: disable-exits; give it once");
    }

    #[test]
    fn halt_polling_has_its_limits() {
        let says = |halt_poll, exits: &str| {
            let disable_exits = DisableExits::from_text(exits).unwrap();
            Vm { halt_poll: Some(halt_poll), disable_exits, ..Vm::new("k") }.check().err().map(|e| e.to_string())
        };
        assert_eq!(says(0, "pause"), None);
        assert_eq!(says(MAX_HALT_POLL, "pause"), None);
        assert_eq!(
            says(MAX_HALT_POLL + 1, "pause").unwrap(),
            "1000000001 ns are too long: halt-poll; ask for at most 1000000000, a second"
        );
        assert!(says(0, "hlt").unwrap().starts_with("a vCPU that never leaves on HLT has no halt to poll before"));
    }

    #[test]
    fn each_choice_has_its_cost_and_no_choice_has_none() {
        assert!(Vm::new("k").costs(|| 4).is_empty());
        let vm = Vm {
            cpus: Cpus::flat(3),
            disable_exits: DisableExits::from_text("hlt,pause,mwait,cstate").unwrap(),
            ..Vm::new("k")
        };
        let lines = vm.costs(|| 2);
        assert_eq!(lines.len(), 4);
        assert!(lines[0].starts_with("disable-exits hlt: ") && lines[0].contains("3 vCPUs hold up to 2 of the 2 CPUs"));
        assert!(lines[0].ends_with("take time from busy ones"), "{lines:?}");
        assert!(vm.costs(|| 8)[0].ends_with("3 vCPUs hold up to 3 of the 8 CPUs that tare may use"));
        let polls = |ns| Vm { halt_poll: Some(ns), ..Vm::new("k") }.costs(|| 2);
        assert!(polls(50_000)[0].contains("for up to 50000 ns"));
        assert!(polls(0)[0].contains("at once"));
    }
}
