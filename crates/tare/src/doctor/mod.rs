// SPDX-License-Identifier: Apache-2.0
//! `tare doctor`: what this host gives to guests and what it lacks; for each thing lacking, what that costs and how to
//! get it. The text and the JSON hold the same findings under the same keys; keys are stable.

mod devices;
mod memory;
#[cfg(test)]
mod tests;
mod virt;

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use lexopt::{Arg, Parser};
use serde::Serialize;
use serde_json::Value;

use crate::exit::{Exit, Failure};
use crate::flags::{Asked, lexed};

/// `tare doctor --help`.
pub const HELP: &str = "\
usage: tare doctor [--json]

Looks at this host: is there a KVM and is it hardware, what can it do, huge pages,
IOMMU, io_uring, tun, limits. For each thing lacking: what it costs, how to get it.

  --json   the same as JSON, with stable keys

exit codes: 0 guests run here at hardware speed; 1 they don't
";

/// What `tare doctor` was told.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    json: bool,
    kvm: PathBuf,
}

/// How a finding bears on guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// There.
    Ok,
    /// Not there; guests run, at a cost.
    Lacking,
    /// Not there, and guests can't run, or not usefully.
    Missing,
}

/// One thing about the host.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// `area.thing`, stable; the key in the JSON.
    #[serde(skip)]
    pub key: &'static str,
    /// How it bears on guests.
    pub state: State,
    /// For programs.
    pub value: Value,
    /// For people.
    pub said: String,
    /// What the lack costs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost: Option<&'static str>,
    /// How to get it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub get: Option<&'static str>,
}

impl Finding {
    fn ok(key: &'static str, value: impl Into<Value>, said: impl Into<String>) -> Self {
        Self { key, state: State::Ok, value: value.into(), said: said.into(), cost: None, get: None }
    }

    fn without(self, state: State, cost: &'static str, get: &'static str) -> Self {
        Self { state, cost: Some(cost), get: Some(get), ..self }
    }

    fn lacking(self, cost: &'static str, get: &'static str) -> Self {
        self.without(State::Lacking, cost, get)
    }

    fn missing(self, cost: &'static str, get: &'static str) -> Self {
        self.without(State::Missing, cost, get)
    }
}

/// Reads the flags of `tare doctor`.
///
/// # Errors
/// [`Failure`] with exit code 2.
pub fn parse(args: &mut Parser) -> Result<Asked<Request>, Failure> {
    let mut request = Request { json: false, kvm: PathBuf::from("/dev/kvm") };
    while let Some(arg) = args.next().map_err(lexed)? {
        match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(Asked::Help),
            Arg::Long("json") => request.json = true,
            Arg::Long("kvm") => request.kvm = args.value().map_err(lexed)?.into(),
            other => {
                let what = match other {
                    Arg::Long(name) => format!("--{name}"),
                    Arg::Short(c) => format!("-{c}"),
                    Arg::Value(value) => value.to_string_lossy().into_owned(),
                };
                return Err(Failure::usage(format!("unknown flag {what}: command line; see `tare doctor --help`")));
            }
        }
    }
    Ok(Asked::Do(request))
}

/// Looks, prints, and says by the exit code whether guests run here at hardware speed.
///
/// # Errors
/// None today; the signature is that of every command.
pub fn run(request: &Request) -> Result<Exit, Failure> {
    let findings = look(&request.kvm);
    let text = if request.json { json(&findings) } else { table(&findings) };
    // A reader that left early is no error.
    let _ = io::stdout().write_all(text.as_bytes());
    Ok(if is_ready(&findings) { Exit::Clean } else { Exit::NotReady })
}

fn look(kvm_node: &Path) -> Vec<Finding> {
    let mut findings = virt::look(kvm_node);
    findings.extend(memory::look(&Host::real()));
    findings.extend(devices::look(&Host::real()));
    findings
}

fn is_ready(findings: &[Finding]) -> bool {
    findings.iter().all(|f| f.state != State::Missing)
}

fn json(findings: &[Finding]) -> String {
    let by_key: serde_json::Map<String, Value> =
        findings.iter().map(|f| (f.key.to_owned(), serde_json::to_value(f).unwrap_or(Value::Null))).collect();
    let all = serde_json::json!({
        "tare": env!("CARGO_PKG_VERSION"),
        "ready": is_ready(findings),
        "findings": by_key,
    });
    format!("{all:#}\n")
}

/// Columns of the text.
const WIDTH: usize = 100;
/// Where what is said begins.
const INDENT: usize = 32;

fn table(findings: &[Finding]) -> String {
    let mut text = String::new();
    // Capabilities that are there fill a screen and interest nobody one by one: they share an entry.
    let (shared, own): (Vec<_>, Vec<_>) = findings.iter().partition(|f| capability_name(f).is_some());
    for finding in own {
        let state = match finding.state {
            State::Ok => "ok",
            State::Lacking => "lacking",
            State::Missing => "MISSING",
        };
        wrap(&mut text, &format!("{state:<8} {:<22}", finding.key), &finding.said);
        for (what, line) in [("costs: ", finding.cost), ("get it: ", finding.get)] {
            if let Some(line) = line {
                wrap(&mut text, "", &format!("{what}{line}"));
            }
        }
    }
    let names = shared.iter().filter_map(|f| Some((capability_name(f)?, &f.said)));
    let list: Vec<String> =
        names.map(|(name, said)| if said == "yes" { name.to_owned() } else { format!("{name}={said}") }).collect();
    if !list.is_empty() {
        wrap(&mut text, "ok       kvm.cap", &list.join(", "));
    }
    let verdict = if is_ready(findings) {
        "guests run on this host at hardware speed"
    } else {
        "guests don't run usefully on this host; see what is MISSING above"
    };
    text.push_str(&format!("\n{verdict}\n"));
    text
}

/// The bare name of a capability that is there.
fn capability_name(finding: &Finding) -> Option<&'static str> {
    finding.key.strip_prefix("kvm.cap.").filter(|_| finding.state == State::Ok)
}

/// Appends `said` after `head`, broken at spaces to fit the columns.
fn wrap(text: &mut String, head: &str, said: &str) {
    let mut line = format!("{head:<INDENT$}");
    if head.len() >= INDENT {
        line.push(' ');
    }
    let mut fresh = true;
    for word in said.split(' ') {
        if !fresh && line.len() + 1 + word.len() > WIDTH {
            text.push_str(line.trim_end());
            text.push('\n');
            line = " ".repeat(INDENT + 2);
            fresh = true;
        }
        if !fresh {
            line.push(' ');
        }
        line.push_str(word);
        fresh = false;
    }
    text.push_str(&line);
    text.push('\n');
}

/// The host's files below a root, so that tests can look at a made-up host.
struct Host(PathBuf);

impl Host {
    fn real() -> Self {
        Self(PathBuf::from("/"))
    }

    /// The trimmed text of a file, or `None` if it can't be read.
    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.0.join(path)).ok().map(|text| text.trim().to_owned())
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    /// Whether this process holds the capability of that bit.
    fn may(&self, capability: u32) -> bool {
        let status = self.read("proc/self/status").unwrap_or_default();
        let effective = status.lines().find_map(|l| l.strip_prefix("CapEff:"));
        effective.and_then(|v| u64::from_str_radix(v.trim(), 16).ok()).is_some_and(|all| all & (1 << capability) != 0)
    }

    /// Names in a folder, sorted; empty for a folder that isn't there.
    fn list(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.0.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Opens a device for reading and writing, to see whether that is allowed.
    fn opens(&self, path: &str) -> io::Result<()> {
        fs::OpenOptions::new().read(true).write(true).open(self.0.join(path)).map(drop)
    }
}
