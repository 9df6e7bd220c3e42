// SPDX-License-Identifier: Apache-2.0
//! What a check reports: a place, a sentence, and whether it fails the run. Made by every check, printed by `main`.

use std::fmt;

/// Whether a finding fails the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Weight {
    /// Fails the run.
    Breach,
    /// Worth a look; the run passes.
    Look,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    weight: Weight,
    place: String,
    text: String,
}

impl Finding {
    /// A finding that fails the run, at `place` (`file` or `file:line`).
    pub fn breach(place: impl Into<String>, text: impl Into<String>) -> Self {
        Self { weight: Weight::Breach, place: place.into(), text: text.into() }
    }

    /// A finding that asks for a look and lets the run pass.
    pub fn look(place: impl Into<String>, text: impl Into<String>) -> Self {
        Self { weight: Weight::Look, place: place.into(), text: text.into() }
    }

    /// Whether it fails the run.
    pub fn fails(&self) -> bool {
        self.weight == Weight::Breach
    }

    /// The sentence, without the place.
    #[cfg(test)]
    pub fn text(&self) -> &str {
        &self.text
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.fails() { "mend" } else { "look" };
        write!(f, "{word}: {}: {}", self.place, self.text)
    }
}
