// SPDX-License-Identifier: Apache-2.0
//! One network device: `--net user`, `--net kind=tap,tap=tap0,vhost=on,mac=52:54:00:00:00:01`, `[[net]]` in `vm.toml`.
//!
//! Filled by the command line, read by `machine`; its text form, its words and its check stand here together.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::SpecError;
use crate::check::{MIN_BPS, out_of_range, rate};
use crate::coalesce::Coalesce;
use crate::parse::{FromText, Group, Word, parse_number, parse_on_off, parse_size};
use crate::text::{maybe_size, on_off};

/// Most network devices.
pub const MAX_NETS: usize = 8;
/// Most pairs of queues of one device.
const MAX_QUEUES: u16 = 16;
/// Longest name of an interface in bytes.
const MAX_NAME: usize = 15;
/// The smallest MTU that IPv4 may have, and the largest that a frame can carry.
const MTU: std::ops::RangeInclusive<u16> = 68..=65520;

/// One virtio network device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub struct Net {
    /// What is at the host's end.
    pub kind: NetKind,
    /// Name of the tap, for `kind = tap`.
    pub tap: Option<String>,
    /// Descriptors that tare inherits instead: a tap, or one for each of its queues; for `kind = user` a stream socket to passt.
    pub fd: Descriptors,
    /// The host's kernel moves the packets of a tap (vhost-net), instead of a thread of tare.
    #[serde(deserialize_with = "on_off")]
    pub vhost: bool,
    /// Descriptors of `/dev/vhost-net` that tare inherits, one for each pair of queues; says `vhost` too.
    pub vhostfd: Descriptors,
    /// Pairs of queues that the guest may use, as many as descriptors or one by default; only a tap has several.
    pub queues: Option<u16>,
    /// The guest's address; tare draws one where it is not said.
    pub mac: Option<Mac>,
    /// Largest packet without its Ethernet header, shown to the guest.
    pub mtu: Option<u16>,
    /// Bytes a second, each way, over all queues; `None` is no limit.
    #[serde(deserialize_with = "maybe_size")]
    pub bps: Option<u64>,
    /// Bytes that may go at once after a pause; `None` is a tenth of `bps`.
    #[serde(deserialize_with = "maybe_size")]
    pub bps_burst: Option<u64>,
    /// Packets a second, each way, over all queues; `None` is no limit.
    pub pps: Option<u64>,
    /// Packets that may go at once after a pause; `None` is a tenth of `pps`.
    pub pps_burst: Option<u64>,
    /// Interrupts of a queue wait for further packets; `None` puts nothing off.
    pub coalesce: Option<Coalesce>,
}

/// The keys of the text form.
const KEYS: [&str; 13] = [
    "kind",
    "tap",
    "fd",
    "vhost",
    "vhostfd",
    "queues",
    "mac",
    "mtu",
    "bps",
    "bps-burst",
    "pps",
    "pps-burst",
    "coalesce",
];

/// Numbers of open files that tare inherits: `5`, or `5:6` for several; in a table a list will do, too.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Descriptors(pub Vec<u32>);

impl Descriptors {
    fn parse(place: &str, text: &str) -> Result<Self, SpecError> {
        text.split(':').map(|number| parse_number(place, number)).collect::<Result<_, _>>().map(Self)
    }
}

impl<'de> Deserialize<'de> for Descriptors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Said {
            One(u32),
            Several(Vec<u32>),
            Text(String),
        }
        match Said::deserialize(deserializer)? {
            Said::One(number) => Ok(Self(vec![number])),
            Said::Several(numbers) => Ok(Self(numbers)),
            Said::Text(text) => Self::parse("a descriptor", &text).map_err(serde::de::Error::custom),
        }
    }
}

/// What is at the host's end of a NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NetKind {
    /// passt, started by tare: the host's own network without any rights on it.
    #[default]
    User,
    /// A tap interface.
    Tap,
}

impl Word for NetKind {
    const WHAT: &'static str = "a kind of network";
    const WORDS: &'static [(&'static str, Self)] = &[("user", Self::User), ("tap", Self::Tap)];
}

/// A MAC address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Mac {
    type Err = ();

    /// Six pairs of hexadecimal digits with colons between them, of one station.
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut mac = [0; 6];
        let mut pairs = text.split(':');
        for byte in &mut mac {
            let pair = pairs.next().filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit())).ok_or(())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| ())?;
        }
        if pairs.next().is_some() || mac[0] & 1 != 0 || mac == [0; 6] { Err(()) } else { Ok(Self(mac)) }
    }
}

impl Mac {
    fn parse(place: &str, text: &str) -> Result<Self, SpecError> {
        text.parse().map_err(|()| SpecError::NotA {
            place: place.to_owned(),
            value: text.to_owned(),
            want: "a MAC address of one station",
            hint: "write six pairs of hexadecimal digits, such as 52:54:00:12:34:56".to_owned(),
        })
    }
}

impl Serialize for Mac {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Mac {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse("mac", &text).map_err(serde::de::Error::custom)
    }
}

impl FromText for Net {
    /// `user`, `tap,tap=tap0,vhost=on,queues=2` or `kind=tap,fd=5,mac=52:54:00:12:34:56,mtu=9000,bps=10M`. A tap that is
    /// named says `kind=tap` by itself.
    fn from_text(text: &str) -> Result<Self, SpecError> {
        let group = Group::parse("net", text, "kind", &KEYS)?;
        let tap = group.read("tap", |_, v| Ok(v.to_owned()))?;
        let vhostfd = group.read("vhostfd", Descriptors::parse)?.unwrap_or_default();
        let implied = if tap.is_some() { NetKind::Tap } else { NetKind::default() };
        Ok(Self {
            kind: group.read("kind", NetKind::from_word)?.unwrap_or(implied),
            tap,
            fd: group.read("fd", Descriptors::parse)?.unwrap_or_default(),
            vhost: group.read("vhost", parse_on_off)?.unwrap_or(!vhostfd.0.is_empty()),
            vhostfd,
            queues: group.read("queues", parse_number)?,
            mac: group.read("mac", Mac::parse)?,
            mtu: group.read("mtu", parse_number)?,
            bps: group.read("bps", parse_size)?,
            bps_burst: group.read("bps-burst", parse_size)?,
            pps: group.read("pps", parse_number)?,
            pps_burst: group.read("pps-burst", parse_number)?,
            coalesce: group.read("coalesce", Coalesce::parse)?,
        })
    }
}

impl Net {
    /// Pairs of queues, 1 to 16 in a description that was checked.
    #[must_use]
    pub fn pairs(&self) -> u16 {
        self.queues.unwrap_or(self.fd.0.len().max(self.vhostfd.0.len()).max(1).try_into().unwrap_or(u16::MAX))
    }

    fn check(&self) -> Result<(), SpecError> {
        match (self.kind, &self.tap, self.fd.0.first()) {
            (NetKind::User, Some(_), _) => {
                return Err(out_of_range(
                    "net.tap",
                    "a tap is named, but kind is user",
                    "say kind=tap, or take it out",
                ));
            }
            (NetKind::Tap, None, None) => {
                return Err(out_of_range("net.tap", "no tap is named", "add tap=NAME, or fd=N for one that is open"));
            }
            (NetKind::Tap, Some(_), Some(_)) => {
                return Err(out_of_range("net.fd", "both a tap and a descriptor are named", "keep one of them"));
            }
            _ => {}
        }
        if let Some(name) = &self.tap {
            let odd = |b: u8| b == b'/' || b == b'%' || b == b':' || !b.is_ascii_graphic();
            if name.is_empty() || name.len() > MAX_NAME || name.bytes().any(odd) {
                let what = format!("`{}` can't be an interface's name", name.escape_default());
                return Err(out_of_range("net.tap", what, format!("use at most {MAX_NAME} plain characters")));
            }
        }
        self.check_service()?;
        match self.mtu {
            Some(mtu) if !MTU.contains(&mtu) => {
                let hint = format!("ask for {} to {}", MTU.start(), MTU.end());
                Err(out_of_range("net.mtu", format!("an MTU of {mtu} can't be had"), hint))
            }
            _ => Ok(()),
        }
    }
}

impl Net {
    /// Who moves the packets, through how many queues and how fast.
    fn check_service(&self) -> Result<(), SpecError> {
        rate("net.bps", self.bps, "net.bps-burst", self.bps_burst, MIN_BPS)?;
        rate("net.pps", self.pps, "net.pps-burst", self.pps_burst, 1)?;
        let limited = self.bps.is_some() || self.pps.is_some();
        let (queues, wanted) = (self.pairs(), self.vhost || !self.vhostfd.0.is_empty());
        if queues == 0 || queues > MAX_QUEUES {
            let what = format!("{queues} pairs of queues can't be had");
            return Err(out_of_range("net.queues", what, format!("ask for 1 to {MAX_QUEUES}")));
        }
        if queues > 1 && self.kind == NetKind::User {
            let what = "only a tap has several pairs of queues";
            return Err(out_of_range("net.queues", what, "say kind=tap, or ask for one"));
        }
        for (place, given) in [("net.fd", &self.fd.0), ("net.vhostfd", &self.vhostfd.0)] {
            if !given.is_empty() && given.len() != usize::from(queues) {
                let what = format!("descriptors given: {}, pairs of queues: {queues}", given.len());
                return Err(out_of_range(place, what, "give one for each pair, as in fd=5:6, or say queues="));
            }
        }
        if wanted && self.kind == NetKind::User {
            let hint = "say kind=tap, or take it out";
            return Err(out_of_range("net.vhost", "the host's kernel has no part in kind=user", hint));
        }
        if !self.vhostfd.0.is_empty() && !self.vhost {
            return Err(out_of_range("net.vhostfd", "vhost is off", "say vhost=on, or take it out"));
        }
        if wanted && limited {
            let what = "the host's kernel knows no rate limits";
            return Err(out_of_range("net.vhost", what, "use tc on the tap, or take vhost out"));
        }
        if let Some(coalesce) = self.coalesce {
            coalesce.check("net.coalesce")?;
            if wanted {
                let what = "the host's kernel puts no interrupts off";
                return Err(out_of_range("net.coalesce", what, "take it out, or vhost"));
            }
        }
        Ok(())
    }
}

/// Checks all network devices of a machine.
pub(crate) fn check(nets: &[Net]) -> Result<(), SpecError> {
    if nets.len() > MAX_NETS {
        let what = format!("{} network devices are too many", nets.len());
        return Err(out_of_range("net", what, format!("use at most {MAX_NETS}")));
    }
    for (index, net) in nets.iter().enumerate() {
        net.check()?;
        let before = nets.get(..index).unwrap_or_default();
        let twice = |same: &dyn Fn(&Net) -> bool| before.iter().any(same);
        let what = match net {
            Net { tap: Some(tap), .. } if twice(&|n| n.tap.as_ref() == Some(tap)) => {
                format!("tap {tap} is given twice")
            }
            Net { fd: Descriptors(fds), .. } if again(fds, before).is_some() => {
                format!("descriptor {} is given twice", again(fds, before).unwrap_or_default())
            }
            Net { mac: Some(mac), .. } if twice(&|n| n.mac == Some(*mac)) => format!("address {mac} is given twice"),
            _ => continue,
        };
        return Err(out_of_range("net", what, "give each network device its own"));
    }
    Ok(())
}

/// The first of `fds` that is there twice, or in one of `before`.
fn again(fds: &[u32], before: &[Net]) -> Option<u32> {
    let known = |(index, fd): (usize, &u32)| fds[..index].contains(fd) || before.iter().any(|n| n.fd.0.contains(fd));
    fds.iter().enumerate().find(|one| known(*one)).map(|(_, fd)| *fd)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn says(text: &str) -> String {
        match Net::from_text(text) {
            Ok(net) => check(&[net]).unwrap_err().to_string(),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn groups() {
        assert_eq!(Net::from_text("user").unwrap(), Net::default());
        let tap = Net { kind: NetKind::Tap, tap: Some("tap0".into()), ..Net::default() };
        assert_eq!(Net::from_text("tap,tap=tap0").unwrap(), tap);
        let mac = Some(Mac([0x52, 0x54, 0, 0x12, 0x34, 0xab]));
        let off = Coalesce { usec: 50, frames: 8 };
        assert_eq!(Net::from_text("user,coalesce=50:8").unwrap(), Net { coalesce: Some(off), ..Net::default() });
        assert!(says("tap,tap=a,vhost=on,coalesce=50:8").contains("puts no interrupts off"));
        assert!(says("user,coalesce=0:8").contains("net.coalesce"));
        let full = Net { fd: Descriptors(vec![5]), mac, mtu: Some(9000), tap: None, ..tap };
        assert_eq!(Net::from_text("fd=5,kind=tap,mac=52:54:00:12:34:AB,mtu=9000").unwrap(), full);
        assert_eq!(check(&[full, Net::default(), Net::default()]), Ok(()));
    }

    #[test]
    fn the_table_and_the_text_read_alike() {
        let net = Net::from_text("tap,fd=3,mac=52:54:00:12:34:56,mtu=1400").unwrap();
        let table = serde_json::to_value(&net).unwrap();
        assert_eq!(table["mac"], "52:54:00:12:34:56");
        assert_eq!(serde_json::from_value::<Net>(table).unwrap(), net);
        for (word, kind) in NetKind::WORDS {
            assert_eq!(serde_json::to_string(kind).unwrap(), format!("\"{word}\""));
        }
    }

    #[test]
    fn says_what_where_and_what_to_do() {
        assert_eq!(says("bridge"), "`bridge` is not a kind of network: net.kind; use user or tap");
        assert_eq!(says("tap"), "no tap is named: net.tap; add tap=NAME, or fd=N for one that is open");
        assert_eq!(says("kind=user,tap=t"), "a tap is named, but kind is user: net.tap; say kind=tap, or take it out");
        assert_eq!(says("tap,tap=t,fd=3"), "both a tap and a descriptor are named: net.fd; keep one of them");
        assert_eq!(
            says("tap,tap=../x"),
            "`../x` can't be an interface's name: net.tap; use at most 15 plain characters"
        );
        assert!(says("tap,tap=tap%d").contains("net.tap"));
        assert!(says("tap,tap=sixteen-letters-").contains("net.tap"));
        assert_eq!(says("user,mtu=67"), "an MTU of 67 can't be had: net.mtu; ask for 68 to 65520");
        assert!(says("user,mtu=70000").contains("net.mtu; write a whole number"));
        assert!(says("user,fd=-1").contains("net.fd"));
        for mac in
            ["", "52:54:00:12:34", "52:54:00:12:34:56:78", "53:54:00:12:34:56", "00:00:00:00:00:00", "5254:0:1:2:3:4"]
        {
            assert!(says(&format!("user,mac={mac}")).contains("is not a MAC address of one station: net.mac"), "{mac}");
        }
        assert_eq!(says("user,speed=1"), format!("unknown key `speed`: net; the keys are {}", KEYS.join(", ")));
    }

    #[test]
    fn who_moves_the_packets() {
        let net = Net::from_text("tap=t0,vhost=on,queues=4").unwrap();
        assert_eq!(
            (net.kind, net.vhost, net.queues, net.vhostfd.clone()),
            (NetKind::Tap, true, Some(4), Descriptors::default())
        );
        assert_eq!(check(std::slice::from_ref(&net)), Ok(()));
        let table = serde_json::json!({"kind": "tap", "tap": "t0", "vhost": "on", "queues": 4});
        assert_eq!(serde_json::from_value::<Net>(table).unwrap(), net);
        let passed = Net::from_text("tap,fd=5,vhostfd=6").unwrap();
        assert_eq!((passed.vhost, &passed.vhostfd, passed.pairs()), (true, &Descriptors(vec![6]), 1));
        assert_eq!(check(&[passed]), Ok(()));
        let several = Net::from_text("tap,fd=5:7,vhostfd=6:8").unwrap();
        assert_eq!((several.pairs(), &several.fd.0[..], &several.vhostfd.0[..]), (2, &[5, 7][..], &[6, 8][..]));
        for fds in [serde_json::json!([5, 7]), serde_json::json!("5:7")] {
            let table = serde_json::json!({"kind": "tap", "fd": fds, "vhost": true, "vhostfd": [6, 8]});
            assert_eq!(serde_json::from_value::<Net>(table).unwrap(), several);
        }
        assert_eq!(serde_json::from_value::<Net>(serde_json::json!({"fd": 9})).unwrap().fd, Descriptors(vec![9]));
        assert_eq!(check(&[several, Net::from_text("tap=t,queues=2,vhostfd=9:10").unwrap()]), Ok(()));
        let limited = Net::from_text("user,bps=10M,pps=1000,pps-burst=5").unwrap();
        assert_eq!((limited.bps, limited.pps, limited.pps_burst), (Some(10 << 20), Some(1000), Some(5)));
        assert_eq!(check(&[limited]), Ok(()));
        for (text, line) in [
            ("user,vhost=on", "the host's kernel has no part in kind=user: net.vhost; say kind=tap, or take it out"),
            ("tap=t,vhost=off,vhostfd=6", "vhost is off: net.vhostfd; say vhost=on, or take it out"),
            (
                "tap=t,vhost=on,bps=1M",
                "the host's kernel knows no rate limits: net.vhost; use tc on the tap, or take vhost out",
            ),
            ("tap=t,queues=0", "0 pairs of queues can't be had: net.queues; ask for 1 to 16"),
            ("tap=t,queues=17", "17 pairs of queues can't be had: net.queues; ask for 1 to 16"),
            (
                "tap,fd=5,queues=2",
                "descriptors given: 1, pairs of queues: 2: net.fd; give one for each pair, as in fd=5:6, or say queues=",
            ),
            (
                "tap,fd=5:6,vhostfd=7",
                "descriptors given: 1, pairs of queues: 2: net.vhostfd; give one for each pair, as in fd=5:6, or say queues=",
            ),
            ("user,queues=2", "only a tap has several pairs of queues: net.queues; say kind=tap, or ask for one"),
            ("user,fd=5:6", "only a tap has several pairs of queues: net.queues; say kind=tap, or ask for one"),
            ("tap,fd=5:6:5", "descriptor 5 is given twice: net; give each network device its own"),
            ("tap,fd=5:", "`` is not a number: net.fd; write a whole number, and not too large a one"),
            ("user,pps-burst=5", "a burst needs a rate: net.pps-burst; say pps too"),
        ] {
            assert_eq!(says(text), line);
        }
    }

    #[test]
    fn two_nics_share_nothing() {
        let all = |texts: &[&str]| {
            let nets: Vec<_> = texts.iter().map(|t| Net::from_text(t).unwrap()).collect();
            check(&nets).map_err(|e| e.to_string())
        };
        assert_eq!(all(&["tap,tap=a", "tap,tap=b", "user", "user"]), Ok(()));
        assert!(all(&["tap,tap=a", "tap,tap=a"]).unwrap_err().contains("tap a is given twice"));
        assert!(all(&["tap,fd=2:3", "tap,fd=3:4"]).unwrap_err().contains("descriptor 3 is given twice"));
        assert!(all(&["user,fd=3", "tap,fd=3"]).unwrap_err().contains("descriptor 3 is given twice"));
        let mac = "user,mac=52:54:00:12:34:56";
        assert!(all(&[mac, mac]).unwrap_err().contains("address 52:54:00:12:34:56 is given twice"));
        assert!(all(&["user"; 9]).unwrap_err().contains("9 network devices are too many"));
    }
}
