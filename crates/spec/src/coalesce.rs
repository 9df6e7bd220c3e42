// SPDX-License-Identifier: Apache-2.0
//! Interrupt coalescing of a device: `coalesce=50:8` of `--disk` and `--net`, in `vm.toml` the same text.
//!
//! Off by default: what an interrupt waits for is latency of the request before it.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::SpecError;
use crate::check::out_of_range;
use crate::parse::parse_number;

/// Longest time that a finished request may wait for its interrupt, microseconds.
const MOST_USEC: u32 = 100_000;
/// Most finished requests that one interrupt may stand for; no queue holds more.
const MOST_FRAMES: u32 = 256;

/// An interrupt goes out once `frames` requests (packets) are finished, or `usec` after the first of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coalesce {
    /// Microseconds, 1 to 100,000.
    pub usec: u32,
    /// Requests or packets of one queue, 1 to 256.
    pub frames: u32,
}

impl Coalesce {
    /// `50:8`, or `50` for as many frames as there are.
    pub(crate) fn parse(place: &str, text: &str) -> Result<Self, SpecError> {
        let (usec, frames) = match text.split_once(':') {
            Some((usec, frames)) => (usec, parse_number(place, frames)?),
            None => (text, MOST_FRAMES),
        };
        Ok(Self { usec: parse_number(place, usec)?, frames })
    }

    pub(crate) fn check(self, place: &'static str) -> Result<(), SpecError> {
        if (1..=MOST_USEC).contains(&self.usec) && (1..=MOST_FRAMES).contains(&self.frames) {
            return Ok(());
        }
        let advice =
            format!("say microseconds (1 to {MOST_USEC}) and frames (1 to {MOST_FRAMES}) as 50:8, or leave it out");
        Err(out_of_range(place, format!("coalesce={self}"), advice))
    }
}

impl fmt::Display for Coalesce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.usec, self.frames)
    }
}

impl Serialize for Coalesce {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Coalesce {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        Self::parse("coalesce", &text).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn time_and_frames_or_time_alone() {
        assert_eq!(Coalesce::parse("p", "50:8"), Ok(Coalesce { usec: 50, frames: 8 }));
        assert_eq!(Coalesce::parse("p", "50"), Ok(Coalesce { usec: 50, frames: 256 }));
        for text in ["", ":", "50:", ":8", "50:8:1", "-1:8", "50us"] {
            assert!(Coalesce::parse("p", text).is_err(), "{text}");
        }
        assert_eq!(Coalesce { usec: 50, frames: 8 }.to_string(), "50:8");
        for (usec, frames, fine) in
            [(1, 1, true), (100_000, 256, true), (0, 1, false), (1, 0, false), (100_001, 1, false), (1, 257, false)]
        {
            assert_eq!(Coalesce { usec, frames }.check("disk.coalesce").is_ok(), fine, "{usec} {frames}");
        }
    }
}
