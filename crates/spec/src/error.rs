// SPDX-License-Identifier: Apache-2.0
//! What can be wrong with a description: one line each, saying what, where and what to do.
//!
//! Made by `parse` and `check`, printed by the command line, which adds where the text came from with `SpecError::under`.

use thiserror::Error;

/// A description that can't be used. The text reads `what: where; what to do`.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SpecError {
    /// A value that is not of the key's kind.
    #[error("`{value}` is not {want}: {place}; {hint}")]
    NotA {
        /// The key, such as `disk.cache`.
        place: String,
        /// The text as typed.
        value: String,
        /// What the key wants, such as `a size`.
        want: &'static str,
        /// How to write it.
        hint: String,
    },
    /// A key that its group doesn't have.
    #[error("unknown key `{key}`: {place}; the keys are {known}")]
    UnknownKey {
        /// The group, such as `disk`.
        place: String,
        /// The key as typed.
        key: String,
        /// All keys of the group.
        known: String,
    },
    /// A key that must be there and isn't.
    #[error("`{key}` is missing: {place}; add {key}=VALUE")]
    MissingKey {
        /// The group, such as `disk`.
        place: String,
        /// The key.
        key: &'static str,
    },
    /// The same key twice in one group.
    #[error("`{key}` is given twice: {place}; give it once")]
    Repeated {
        /// The group, such as `disk`.
        place: String,
        /// The key.
        key: String,
    },
    /// A well-formed value that no machine can have.
    #[error("{what}: {place}; {hint}")]
    OutOfRange {
        /// The key, such as `cpus`.
        place: String,
        /// What is wrong with it.
        what: String,
        /// What to ask for instead.
        hint: String,
    },
}

impl SpecError {
    /// The same error with `prefix` before its place: `under("--")` makes `memory` read `--memory`.
    #[must_use]
    pub fn under(mut self, prefix: &str) -> Self {
        let (Self::NotA { place, .. }
        | Self::UnknownKey { place, .. }
        | Self::MissingKey { place, .. }
        | Self::Repeated { place, .. }
        | Self::OutOfRange { place, .. }) = &mut self;
        place.insert_str(0, prefix);
        self
    }
}
