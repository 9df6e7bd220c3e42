// SPDX-License-Identifier: Apache-2.0
//! Virtual CPUs: how many, and how they are grouped. `--cpus 8,sockets=2,cores=2,threads=2`, `cpus = 4` in `vm.toml`.
//!
//! Filled by the command line, read by `machine`; the text form and its check stand here together.

use serde::{Deserialize, Serialize};

use crate::SpecError;
use crate::check::{MAX_CPUS, out_of_range};
use crate::parse::{FromText, Group};

/// Virtual CPUs and how they are grouped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Keys")]
pub struct Cpus {
    /// 1 to 64; sockets x cores x threads.
    pub count: u8,
    /// Sockets; `None` is as many as the count leaves once cores are said, else one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sockets: Option<u8>,
    /// Cores in each socket; `None` is as many as the count leaves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<u8>,
    /// Threads of each core; `None` is as many as the count leaves once sockets and cores are said, else one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u8>,
}

impl Default for Cpus {
    fn default() -> Self {
        Self::flat(1)
    }
}

/// Sockets of cores of threads, all at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Sockets.
    pub sockets: u8,
    /// Cores in each socket.
    pub cores: u8,
    /// Threads of each core.
    pub threads: u8,
}

/// The keys as given, each perhaps not at all.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Keys {
    count: Option<u8>,
    sockets: Option<u8>,
    cores: Option<u8>,
    threads: Option<u8>,
}

impl TryFrom<Keys> for Cpus {
    type Error = SpecError;

    /// A count that is not said is the product of the rest.
    fn try_from(keys: Keys) -> Result<Self, SpecError> {
        let Keys { count, sockets, cores, threads } = keys;
        let product: u32 = [sockets, cores, threads].iter().map(|n| u32::from(n.unwrap_or(1))).product();
        let count = match count {
            Some(count) => count,
            None => u8::try_from(product).map_err(|_| too_many(product))?,
        };
        Ok(Self { count, sockets, cores, threads })
    }
}

fn too_many(count: u32) -> SpecError {
    out_of_range("cpus", format!("{count} virtual CPUs can't be made"), format!("ask for 1 to {MAX_CPUS}"))
}

impl Cpus {
    /// `count` cores in one socket.
    #[must_use]
    pub const fn flat(count: u8) -> Self {
        Self { count, sockets: None, cores: None, threads: None }
    }

    /// The grouping with nothing left out: cores are preferred to sockets, and sockets to threads, as QEMU's `-smp` does.
    ///
    /// # Errors
    /// [`SpecError::OutOfRange`] for a count that can't be made, and for groups that don't fit it.
    pub fn topology(&self) -> Result<Topology, SpecError> {
        if !(1..=MAX_CPUS).contains(&self.count) {
            return Err(too_many(self.count.into()));
        }
        let one = |n: Option<u8>| n.unwrap_or(1);
        // At most 64, and 0 where there is nothing to divide by.
        let rest = |a: u8, b: u8| u16::from(self.count).checked_div(u16::from(a) * u16::from(b)).unwrap_or(0) as u8;
        let (sockets, cores, threads) = match (self.sockets, self.cores, self.threads) {
            (sockets, None, threads) => (one(sockets), rest(one(sockets), one(threads)), one(threads)),
            (None, Some(cores), threads) => (rest(cores, one(threads)), cores, one(threads)),
            (Some(sockets), Some(cores), None) => (sockets, cores, rest(sockets, cores)),
            (Some(sockets), Some(cores), Some(threads)) => (sockets, cores, threads),
        };
        if u32::from(sockets) * u32::from(cores) * u32::from(threads) != u32::from(self.count) {
            return Err(self.does_not_fit());
        }
        Ok(Topology { sockets, cores, threads })
    }

    fn does_not_fit(&self) -> SpecError {
        let said: Vec<String> =
            [(self.sockets, "sockets"), (self.cores, "cores a socket"), (self.threads, "threads a core")]
                .into_iter()
                .filter_map(|(n, what)| Some(format!("{} {what}", n?)))
                .collect();
        let what = format!("{} CPUs can't be split into {}", self.count, said.join(", "));
        out_of_range("cpus", what, "choose sockets, cores and threads whose product is the count")
    }
}

/// Reads a number of virtual CPUs, sockets, cores or threads.
fn parse_count(place: &str, text: &str) -> Result<u8, SpecError> {
    let number = text.parse::<u64>().map_err(|_| SpecError::NotA {
        place: place.to_owned(),
        value: text.to_owned(),
        want: "a number",
        hint: format!("write a whole number from 1 to {MAX_CPUS}"),
    })?;
    u8::try_from(number)
        .map_err(|_| out_of_range(place, format!("{number} is too many"), format!("ask for 1 to {MAX_CPUS}")))
}

impl FromText for Cpus {
    /// `4`, `8,sockets=2,cores=2,threads=2`, `count=4,...`, or without the count, which is then the product.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        let group = Group::parse("cpus", text, "count", &["count", "sockets", "cores", "threads"])?;
        let keys = Keys {
            count: group.read("count", |_, v| parse_count("cpus", v))?,
            sockets: group.read("sockets", parse_count)?,
            cores: group.read("cores", parse_count)?,
            threads: group.read("threads", parse_count)?,
        };
        Self::try_from(keys)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn grouped(text: &str) -> (u8, [u8; 3]) {
        let cpus = Cpus::from_text(text).unwrap();
        let Topology { sockets, cores, threads } = cpus.topology().unwrap();
        (cpus.count, [sockets, cores, threads])
    }

    #[test]
    fn what_is_left_out_follows_from_the_rest() {
        assert_eq!(Cpus::from_text("4").unwrap(), Cpus::flat(4));
        for (text, count, split) in [
            ("4", 4, [1, 4, 1]),
            ("count=6,threads=2", 6, [1, 3, 2]),
            ("8,sockets=2", 8, [2, 4, 1]),
            ("8,sockets=2,threads=2", 8, [2, 2, 2]),
            ("8,cores=2", 8, [4, 2, 1]),
            ("8,cores=2,threads=2", 8, [2, 2, 2]),
            ("8,sockets=2,cores=2", 8, [2, 2, 2]),
            ("8,sockets=2,cores=2,threads=2", 8, [2, 2, 2]),
            ("sockets=2,cores=3,threads=2", 12, [2, 3, 2]),
            ("threads=2", 2, [1, 1, 2]),
            ("cores=7", 7, [1, 7, 1]),
        ] {
            assert_eq!(grouped(text), (count, split), "{text}");
        }
    }

    /// Against the definition: whatever is given appears in the result, and the product is the count.
    #[test]
    fn groups_fit_or_are_refused() {
        let some = [None, Some(0), Some(1), Some(2), Some(3), Some(5), Some(64), Some(255)];
        for count in 0..=u8::MAX {
            for n in 0..some.len().pow(3) {
                let [sockets, cores, threads] =
                    [n, n / some.len(), n / some.len().pow(2)].map(|i| some[i % some.len()]);
                let cpus = Cpus { count, sockets, cores, threads };
                let given: u32 = [sockets, cores, threads].iter().map(|n| n.map_or(1, u32::from)).product();
                let open = [sockets, cores, threads].contains(&None);
                let fits = (1..=64).contains(&count)
                    && given > 0
                    && if open { u32::from(count) % given == 0 } else { u32::from(count) == given };
                match cpus.topology() {
                    Ok(t) => {
                        assert!(fits, "{cpus:?}");
                        assert_eq!(u32::from(t.sockets) * u32::from(t.cores) * u32::from(t.threads), u32::from(count));
                        for (asked, got) in [(sockets, t.sockets), (cores, t.cores), (threads, t.threads)] {
                            assert!(asked.is_none_or(|n| n == got), "{cpus:?} gave {t:?}");
                        }
                    }
                    Err(_) => assert!(!fits, "{cpus:?}"),
                }
            }
        }
    }

    #[test]
    fn refusals_say_what_where_and_what_to_do() {
        let says = |text: &str| match Cpus::from_text(text) {
            Ok(cpus) => cpus.topology().unwrap_err().to_string(),
            Err(error) => error.to_string(),
        };
        assert_eq!(says("65"), "65 virtual CPUs can't be made: cpus; ask for 1 to 64");
        assert_eq!(says("sockets=16,cores=16"), "256 virtual CPUs can't be made: cpus; ask for 1 to 64");
        assert_eq!(says("300"), "300 is too many: cpus; ask for 1 to 64");
        assert_eq!(says("4,cores=300"), "300 is too many: cpus.cores; ask for 1 to 64");
        assert_eq!(says("many"), "`many` is not a number: cpus; write a whole number from 1 to 64");
        assert_eq!(
            says("8,sockets=2,cores=3,threads=2"),
            "8 CPUs can't be split into 2 sockets, 3 cores a socket, 2 threads a core: cpus; choose sockets, cores and \
             threads whose product is the count"
        );
        assert!(says("4,sockets=3").starts_with("4 CPUs can't be split into 3 sockets: cpus; "));
        assert!(says("4,threads=0").starts_with("4 CPUs can't be split into 0 threads a core: cpus; "));
        assert_eq!(says("4,dies=2"), "unknown key `dies`: cpus; the keys are count, sockets, cores, threads");
        assert_eq!(says("4,count=2"), "`count` is given twice: cpus; give it once");
    }
}
