// SPDX-License-Identifier: Apache-2.0
//! Options of `tare img`: a thin layer over lexopt that gives values their types and every complaint its line. Used by
//! each command's parser.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::PathBuf;

use lexopt::{Arg, Parser};

/// Why a command ends early: a line for the user and the exit code, or that help was asked for.
#[derive(Debug)]
pub struct Refusal {
    /// The process's exit code.
    pub code: u8,
    /// `what: where; what to do`.
    pub message: String,
    /// No failure: `--help` was among the options.
    pub help: bool,
}

impl Refusal {
    /// A failure with exit code 1.
    pub fn new(message: impl Display) -> Self {
        Self::with(1, message)
    }

    /// A failure with this exit code.
    pub fn with(code: u8, message: impl Display) -> Self {
        Self { code, message: message.to_string(), help: false }
    }

    /// The same failure with another exit code.
    pub fn coded(mut self, code: u8) -> Self {
        self.code = code;
        self
    }
}

/// What lexopt says, as one of ours.
pub fn lexed(error: lexopt::Error) -> Refusal {
    match error {
        lexopt::Error::MissingValue { option: Some(option) } => {
            Refusal::new(format!("{option} has no value: command line; write one after it"))
        }
        lexopt::Error::UnexpectedValue { option, .. } => {
            Refusal::new(format!("{option} takes no value: command line; take it out"))
        }
        other => Refusal::new(format!("{other}: command line; see --help")),
    }
}

/// An argument as it was typed.
pub fn name(arg: &Arg<'_>) -> String {
    match arg {
        Arg::Long(name) => format!("--{name}"),
        Arg::Short(c) => format!("-{c}"),
        Arg::Value(value) => value.to_string_lossy().into_owned(),
    }
}

/// One option or a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Word {
    /// `-x`
    Short(char),
    /// `--long`
    Long(String),
    /// A file name or another word that is no option.
    File(PathBuf),
}

/// The options of one command, taken one after the other.
pub struct Options<'a> {
    parser: &'a mut Parser,
    command: &'static str,
    /// The option taken last, for complaints about its value.
    last: String,
}

impl<'a> Options<'a> {
    /// What is left in `parser`, for `command`.
    pub fn new(parser: &'a mut Parser, command: &'static str) -> Self {
        Self { parser, command, last: String::new() }
    }

    /// The next option or file; `--help` ends everything.
    pub fn next(&mut self) -> Result<Option<Word>, Refusal> {
        let Some(arg) = self.parser.next().map_err(lexed)? else { return Ok(None) };
        self.last = name(&arg);
        Ok(Some(match arg {
            Arg::Short('h') | Arg::Long("help") => return Err(Refusal { code: 0, message: String::new(), help: true }),
            Arg::Short(c) => Word::Short(c),
            Arg::Long(name) => Word::Long(name.to_owned()),
            Arg::Value(value) => Word::File(value.into()),
        }))
    }

    /// The complaint about an option that the command has not.
    pub fn unknown(&self) -> Refusal {
        Refusal::new(format!("unknown flag {}: tare img {1}; see `tare img {1} --help`", self.last, self.command))
    }

    /// The value of the option taken last.
    pub fn value(&mut self) -> Result<OsString, Refusal> {
        self.parser.value().map_err(lexed)
    }

    /// The value as text.
    pub fn text(&mut self) -> Result<String, Refusal> {
        let value = self.value()?;
        value.into_string().map_err(|v| self.not(&v.to_string_lossy(), "UTF-8", "use a name that is"))
    }

    /// The value as one of `words`.
    pub fn word<T: Copy>(&mut self, what: &str, words: &[(&str, T)]) -> Result<T, Refusal> {
        let text = self.text()?;
        words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value).ok_or_else(|| {
            let all: Vec<_> = words.iter().map(|(word, _)| *word).collect();
            self.not(&text, what, &format!("use {}", either(&all)))
        })
    }

    /// The value as a whole number from `range`.
    pub fn number(&mut self, range: std::ops::RangeInclusive<u64>) -> Result<u64, Refusal> {
        let text = self.text()?;
        text.parse().ok().filter(|n| range.contains(n)).ok_or_else(|| {
            let hint = format!("write a whole number from {} to {}", range.start(), range.end());
            self.not(&text, "such a number", &hint)
        })
    }

    /// What is glued to the option taken last, perhaps nothing.
    pub fn rest(&mut self) -> String {
        self.parser.optional_value().map(|v| v.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// The value behind `=`, if there is one, as a whole number.
    pub fn optional_number(&mut self) -> Result<Option<u64>, Refusal> {
        let Some(value) = self.parser.optional_value() else { return Ok(None) };
        let text = value.to_string_lossy();
        text.parse().map(Some).map_err(|_| self.not(&text, "a whole number", "write digits"))
    }

    /// The value as a number of bytes.
    pub fn size(&mut self) -> Result<u64, Refusal> {
        let text = self.text()?;
        size(&text).ok_or_else(|| self.not(&text, "a size", "write bytes, or a number with k, M, G or T, such as 512M"))
    }

    fn not(&self, value: &str, what: &str, hint: &str) -> Refusal {
        Refusal::new(format!("`{value}` is not {what}: {}; {hint}", self.last))
    }

    /// The one file that the command works on.
    pub fn one_file(&self, files: Vec<PathBuf>) -> Result<PathBuf, Refusal> {
        <[PathBuf; 1]>::try_from(files).map(|[file]| file).map_err(|files| self.files(files.len(), "one image"))
    }

    /// The complaint about `count` files where `want` is needed.
    pub fn files(&self, count: usize, want: &str) -> Refusal {
        let what = if count == 0 { "no image named".to_owned() } else { format!("{count} files named") };
        Refusal::new(format!("{what}: tare img {0}; it takes {want}, see `tare img {0} --help`", self.command))
    }
}

fn either(words: &[&str]) -> String {
    match words {
        [] => String::new(),
        [one] => (*one).to_owned(),
        [head @ .., last] => format!("{} or {last}", head.join(", ")),
    }
}

/// Bytes from text as qemu-img reads it: a number, perhaps with a fraction, and a suffix (`b`, `k`, `M`, `G`, `T`, `P`,
/// `E`, either case; powers of 1024).
pub fn size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text.get(digits.len()..)?.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        "p" => 50,
        "e" => 60,
        _ => return None,
    };
    let unit = 1u128 << shift;
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    let plain = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !plain(whole) || !plain(fraction) || fraction.len() > 18 {
        return None;
    }
    let mut bytes = whole.parse::<u128>().ok()?.checked_mul(unit)?;
    if !fraction.is_empty() {
        let scale = 10u128.pow(u32::try_from(fraction.len()).ok()?);
        bytes += fraction.parse::<u128>().ok()? * unit / scale;
    }
    u64::try_from(bytes).ok().filter(|b| i64::try_from(*b).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_qemu_img_reads_them() {
        for (text, bytes) in [
            ("0", Some(0)),
            ("512", Some(512)),
            ("4k", Some(4096)),
            ("4K", Some(4096)),
            ("1.5G", Some(3 << 29)),
            ("10b", Some(10)),
            ("1e", Some(1 << 60)),
            ("8E", None),
            ("", None),
            ("k", None),
            ("-1", None),
            ("1.2.3", None),
            ("99999999999999999999999", None),
            ("1Q", None),
        ] {
            assert_eq!(size(text), bytes, "{text}");
        }
    }

    fn parse<T>(args: &[&str], take: impl Fn(&mut Options<'_>) -> Result<T, Refusal>) -> Result<T, String> {
        let mut parser = Parser::from_args(args);
        let mut options = Options::new(&mut parser, "bench");
        options.next().and_then(|_| take(&mut options)).map_err(|r| r.message)
    }

    #[test]
    fn complaints_say_what_where_and_what_to_do() {
        assert_eq!(
            parse(&["-s", "lots"], |o| o.size()),
            Err("`lots` is not a size: -s; write bytes, or a number with k, M, G or T, such as 512M".into())
        );
        assert_eq!(
            parse(&["-d", "0"], |o| o.number(1..=9)),
            Err("`0` is not such a number: -d; write a whole number from 1 to 9".into())
        );
        assert_eq!(
            parse(&["-t", "x"], |o| o.word("a cache mode", &[("a", 1), ("b", 2), ("c", 3)])),
            Err("`x` is not a cache mode: -t; use a, b or c".into())
        );
        assert_eq!(
            parse(&["-d"], |o| o.number(1..=9)),
            Err("-d has no value: command line; write one after it".into())
        );
        assert_eq!(parse(&["-d", "7"], |o| o.number(1..=9)), Ok(7));
    }
}
