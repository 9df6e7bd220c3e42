// SPDX-License-Identifier: Apache-2.0
//! What the guest's CPUs can do: `--cpu host,-avx512f,+x2apic`, with the names of `/proc/cpuinfo`.
//!
//! Filled by the command line, read by `machine`, which knows what the host's KVM can give; here it is only said and
//! checked for sense. The names stand in `cpu_features`.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::SpecError;
use crate::check::out_of_range;
use crate::cpu_features::{cpu_features, needed_by, needs};
use crate::parse::FromText;
use crate::text::text_or_list;

/// A guest doesn't start without these, so nobody means to take them away.
const NEEDED: &[&str] = &["fpu", "tsc", "msr", "pae", "cx8", "apic", "cmov", "fxsr", "sse", "sse2", "syscall", "lm"];
/// These say what `--cpus` says.
const TOPOLOGY: &[&str] = &["ht", "cmp_legacy"];

/// The host's CPU as KVM gives it, less some features.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuModel {
    /// Features that must be there.
    pub with: Vec<&'static str>,
    /// Features that must not be there; what needs them goes too.
    pub without: Vec<&'static str>,
}

impl CpuModel {
    /// The host's CPU, whole.
    #[must_use]
    pub fn is_host(&self) -> bool {
        *self == Self::default()
    }

    /// The features taken away and all that need them, each once.
    #[must_use]
    pub fn taken(&self) -> Vec<&'static str> {
        let mut taken = self.without.clone();
        let mut next = 0;
        while let Some(gone) = taken.get(next).copied() {
            for name in needed_by(gone) {
                if !taken.contains(&name) {
                    taken.push(name);
                }
            }
            next += 1;
        }
        taken
    }

    /// The feature taken away that takes `name` along.
    fn culprit(&self, name: &str) -> Option<&'static str> {
        match self.without.iter().find(|gone| **gone == name) {
            Some(gone) => Some(gone),
            None => needs(name).find_map(|need| self.culprit(need)),
        }
    }

    fn add(&mut self, sign: char, name: &str) -> Result<(), SpecError> {
        let Some((known, _)) = cpu_features().find(|(known, _)| *known == name) else {
            return Err(SpecError::NotA {
                place: "cpu".to_owned(),
                value: name.to_owned(),
                want: "a CPU feature",
                hint: near(name),
            });
        };
        if self.with.contains(&known) || self.without.contains(&known) {
            return Err(SpecError::Repeated { place: "cpu".to_owned(), key: known.to_owned() });
        }
        if TOPOLOGY.contains(&known) {
            let what = format!("`{known}` follows from the topology");
            return Err(out_of_range("cpu", what, "choose sockets, cores and threads with --cpus"));
        }
        if sign == '-' && NEEDED.contains(&known) {
            return Err(out_of_range("cpu", format!("no 64-bit guest starts without `{known}`"), "take it out"));
        }
        if sign == '-' {
            self.without.push(known)
        } else {
            self.with.push(known)
        }
        Ok(())
    }
}

/// What to do about a name that is none: those that begin alike.
fn near(name: &str) -> String {
    let common = |known: &str| known.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
    let best = cpu_features().map(|(known, _)| common(known)).max().unwrap_or(0);
    if best < 3 {
        return "use the names of /proc/cpuinfo; `tare doctor` lists those that this host can give".to_owned();
    }
    let alike: Vec<&str> =
        cpu_features().map(|(known, _)| known).filter(|known| common(known) == best).take(3).collect();
    format!("did you mean {}? `tare doctor` lists those that this host can give", alike.join(", "))
}

impl FromText for CpuModel {
    /// `host`, then `-NAME` and `+NAME`; `host` may be left out.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        let mut model = Self::default();
        for (index, item) in text.split(',').enumerate() {
            match (item.chars().next(), item.get(1..)) {
                (Some(sign @ ('+' | '-')), Some(name)) => model.add(sign, name)?,
                _ if index == 0 && item == "host" => {}
                _ => {
                    return Err(SpecError::NotA {
                        place: "cpu".to_owned(),
                        value: item.to_owned(),
                        want: if index == 0 { "a CPU model" } else { "a change to one" },
                        hint: "write host, then -NAME to take a feature away and +NAME to insist on one, such as \
                               host,-avx512f,+x2apic"
                            .to_owned(),
                    });
                }
            }
        }
        for name in &model.with {
            if let Some(gone) = model.culprit(name) {
                let what = format!("`{name}` needs `{gone}`, which is taken away");
                return Err(out_of_range("cpu", what, format!("take +{name} or -{gone} out")));
            }
        }
        Ok(model)
    }
}

impl fmt::Display for CpuModel {
    /// The text form.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("host")?;
        self.without.iter().try_for_each(|name| write!(f, ",-{name}"))?;
        self.with.iter().try_for_each(|name| write!(f, ",+{name}"))
    }
}

impl<'de> Deserialize<'de> for CpuModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        text_or_list(deserializer)
    }
}

impl Serialize for CpuModel {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn masks_are_lists() {
        let masked = CpuModel { with: vec!["x2apic"], without: vec!["avx512f", "sgx"] };
        assert_eq!(CpuModel::from_text("host,-avx512f,-sgx,+x2apic").unwrap(), masked);
        assert_eq!(CpuModel::from_text("-avx512f,+x2apic,-sgx").unwrap(), masked);
        assert!(CpuModel::from_text("host").unwrap().is_host());
        let read = |v| serde_json::from_value::<CpuModel>(v).unwrap();
        assert_eq!(read(json!(["host", "-avx512f", "-sgx", "+x2apic"])), masked);
        assert_eq!(read(json!([])), CpuModel::default());
        assert_eq!(read(serde_json::to_value(&masked).unwrap()), masked, "what is written reads back");
    }

    #[test]
    fn what_needs_a_feature_goes_with_it() {
        let taken = CpuModel::from_text("-avx").unwrap().taken();
        for name in ["avx", "avx2", "fma", "avx512f", "avx512_vnni", "vaes"] {
            assert!(taken.contains(&name), "{name}");
        }
        for name in ["sse4_2", "xsave", "aes"] {
            assert!(!taken.contains(&name), "{name}");
        }
    }

    #[test]
    fn what_cannot_be_is_named() {
        let says = |text: &str| CpuModel::from_text(text).unwrap_err().to_string();
        assert_eq!(
            says("Skylake"),
            "`Skylake` is not a CPU model: cpu; write host, then -NAME to take a feature away and +NAME to insist on one, \
             such as host,-avx512f,+x2apic"
        );
        assert!(says("host,avx2").starts_with("`avx2` is not a change to one: cpu; write host, then -NAME"));
        assert!(says("").starts_with("`` is not a CPU model: cpu;"));
        assert!(says("host,").starts_with("`` is not a change to one: cpu;"));
        assert_eq!(
            says("host,-avx51"),
            "`avx51` is not a CPU feature: cpu; did you mean avx512f, avx512dq, avx512ifma? `tare doctor` lists those that \
             this host can give"
        );
        assert!(says("-zz").contains("cpu; use the names of /proc/cpuinfo; `tare doctor`"));
        assert!(says("-").starts_with("`` is not a CPU feature: cpu;"));
        assert_eq!(says("-avx2,+avx2"), "`avx2` is given twice: cpu; give it once");
        assert_eq!(
            says("-avx,+avx512_vnni"),
            "`avx512_vnni` needs `avx`, which is taken away: cpu; take +avx512_vnni or -avx out"
        );
        assert_eq!(says("-lm"), "no 64-bit guest starts without `lm`: cpu; take it out");
        assert_eq!(says("-ht"), "`ht` follows from the topology: cpu; choose sockets, cores and threads with --cpus");
    }
}
