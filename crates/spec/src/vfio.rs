// SPDX-License-Identifier: Apache-2.0
//! One device of the host that the guest gets: `--vfio 0000:03:00.0`, `[[vfio]]` in `vm.toml`, which of the kernel's ways
//! puts it behind the IOMMU; and how PCI addresses are written.
//!
//! Filled by the command line, read by `machine`, `vfio` and `tare passthrough`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::SpecError;
use crate::check::out_of_range;
use crate::parse::{FromText, Group, Word};

/// Most devices that are passed through.
pub const MAX_VFIO: usize = 16;

/// Where a PCI function is on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    /// Segment, called domain in sysfs.
    pub domain: u32,
    /// Bus.
    pub bus: u8,
    /// Slot, 0 to 31.
    pub slot: u8,
    /// Function, 0 to 7.
    pub function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.slot, self.function)
    }
}

impl FromStr for PciAddress {
    type Err = SpecError;

    /// `0000:03:00.0`, or without the domain if that is 0.
    fn from_str(text: &str) -> Result<Self, SpecError> {
        let number = |text: &str, most: usize| {
            let fits = (1..=most).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit());
            u32::from_str_radix(text, 16).ok().filter(|_| fits)
        };
        let read = || {
            let (rest, function) = text.rsplit_once('.')?;
            let (rest, slot) = rest.rsplit_once(':')?;
            let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
            let (slot, function) = (number(slot, 2)? as u8, number(function, 1)? as u8);
            let there = Self { domain: number(domain, 8)?, bus: number(bus, 2)? as u8, slot, function };
            (slot < 32 && function < 8).then_some(there)
        };
        read().ok_or_else(|| SpecError::NotA {
            place: "vfio".to_owned(),
            value: text.to_owned(),
            want: "a PCI address",
            hint: "write it as in 0000:03:00.0; `tare passthrough list` shows what there is".to_owned(),
        })
    }
}

impl Serialize for PciAddress {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for PciAddress {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        String::deserialize(input)?.parse().map_err(serde::de::Error::custom)
    }
}

/// One device that is passed through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Vfio {
    /// Where it is on the host.
    pub host: PciAddress,
    /// How it gets behind the IOMMU: all devices of a machine alike.
    #[serde(default)]
    pub iommu: Iommu,
}

impl FromText for Vfio {
    /// An address alone or `host=ADDRESS`, and `iommu=WAY`.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        let group = Group::parse("vfio", text, "host", &["host", "iommu"])?;
        let host = group.read("host", |_, value| value.parse())?;
        let iommu = group.read("iommu", Iommu::from_word)?.unwrap_or_default();
        Ok(Self { host: host.ok_or(SpecError::MissingKey { place: "vfio".to_owned(), key: "host" })?, iommu })
    }
}

/// The kernel's ways to put a device behind the IOMMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Iommu {
    /// That of the machine's other devices; for the first one iommufd where it is there for it, else the container.
    #[default]
    Auto,
    /// `/dev/iommu`, and a node for each device.
    Iommufd,
    /// `/dev/vfio/vfio`, and a node for each group of devices.
    Container,
}

impl Word for Iommu {
    const WHAT: &'static str = "a way behind the IOMMU";
    const WORDS: &'static [(&'static str, Self)] =
        &[("auto", Self::Auto), ("iommufd", Self::Iommufd), ("container", Self::Container)];
}

impl fmt::Display for Iommu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::WORDS.iter().find(|(_, way)| way == self).map_or("", |(word, _)| word))
    }
}

/// Whether a machine can have all of them.
pub(crate) fn check(devices: &[Vfio], transport: crate::Transport) -> Result<(), SpecError> {
    if devices.len() > MAX_VFIO {
        let what = format!("{} devices passed through are too many", devices.len());
        return Err(out_of_range("vfio", what, format!("give at most {MAX_VFIO}")));
    }
    if !devices.is_empty() && transport == crate::Transport::Mmio {
        let what = "a machine without a PCI bus can't have a PCI device".to_owned();
        return Err(out_of_range("vfio", what, "take --transport mmio out".to_owned()));
    }
    for (index, device) in devices.iter().enumerate() {
        if devices.iter().take(index).any(|other| other.host == device.host) {
            let what = format!("{} is given twice", device.host);
            return Err(out_of_range("vfio", what, "give it once".to_owned()));
        }
        let other = devices.iter().take(index).find(|other| {
            let both = [device.iommu, other.iommu];
            both.contains(&Iommu::Iommufd) && both.contains(&Iommu::Container)
        });
        if let Some(other) = other {
            let what = format!("{} has iommu={} and {} iommu={}", other.host, other.iommu, device.host, device.iommu);
            return Err(out_of_range("vfio", what, "say the same for all devices of a machine".to_owned()));
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        let at = |domain, bus, slot, function| PciAddress { domain, bus, slot, function };
        for (text, is) in [
            ("0000:03:00.0", at(0, 3, 0, 0)),
            ("03:1f.7", at(0, 3, 0x1f, 7)),
            ("10000:ff:00.1", at(0x1_0000, 0xff, 0, 1)),
            ("0:0:0.0", at(0, 0, 0, 0)),
        ] {
            assert_eq!(text.parse::<PciAddress>().unwrap(), is, "{text}");
            assert_eq!(is.to_string().parse::<PciAddress>().unwrap(), is);
        }
        for bad in [
            "",
            "3",
            "03:00",
            "03:20.0",
            "03:00.8",
            "03:+0.0",
            "0:03:00.0.0",
            "123456789:0:0.0",
            "00:000:0.0",
            "x:0:0.0",
        ] {
            let said = bad.parse::<PciAddress>().unwrap_err().to_string();
            assert!(said.starts_with(&format!("`{bad}` is not a PCI address: vfio; ")), "{said}");
        }
    }

    #[test]
    fn both_text_forms_say_the_same() {
        let plain = Vfio::from_text("0000:03:00.0").unwrap();
        assert_eq!(Vfio::from_text("host=03:00.0").unwrap(), plain);
        assert!(Vfio::from_text("hots=03:00.0").unwrap_err().to_string().contains("unknown key `hots`"));
        assert_eq!(plain.iommu, Iommu::Auto);
        for (word, iommu) in Iommu::WORDS {
            let said = Vfio::from_text(&format!("03:00.0,iommu={word}")).unwrap();
            assert_eq!((said.host, said.iommu, iommu.to_string().as_str()), (plain.host, *iommu, *word));
        }
        let said = Vfio::from_text("03:00.0,iommu=type1").unwrap_err().to_string();
        assert!(
            said.contains("`type1` is not a way behind the IOMMU: vfio.iommu; use auto, iommufd or container"),
            "{said}"
        );
    }

    #[test]
    fn what_no_machine_can_have_is_refused() {
        let device = |bus| Vfio { host: PciAddress { bus, ..PciAddress::default() }, iommu: Iommu::Auto };
        let said = |devices: &[Vfio], transport| check(devices, transport).map_err(|e| e.to_string());
        assert_eq!(said(&[device(1), device(2)], crate::Transport::Pci), Ok(()));
        assert!(
            said(&[device(1), device(1)], crate::Transport::Pci).unwrap_err().contains("0000:01:00.0 is given twice")
        );
        assert!(said(&[device(1)], crate::Transport::Mmio).unwrap_err().contains("without a PCI bus"));
        let many: Vec<Vfio> = (0..17).map(device).collect();
        assert!(said(&many, crate::Transport::Pci).unwrap_err().contains("17 devices"));
        let with = |bus, iommu| Vfio { iommu, ..device(bus) };
        let mixed = [with(1, Iommu::Iommufd), with(2, Iommu::Auto), with(3, Iommu::Container)];
        let wrong = "0000:01:00.0 has iommu=iommufd and 0000:03:00.0 iommu=container";
        assert!(said(&mixed, crate::Transport::Pci).unwrap_err().starts_with(wrong));
        assert_eq!(said(&mixed[1..], crate::Transport::Pci), Ok(()), "what auto becomes, the host knows");
    }
}
