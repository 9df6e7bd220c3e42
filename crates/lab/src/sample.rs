// SPDX-License-Identifier: Apache-2.0
//! One sample: the script that a place runs, and what its report says.
//!
//! The script is `runner.sh` with a preamble; it needs bash, awk and coreutils on the machine where it runs. Its report is
//! lines that start with `%%`, then the subject's console. A report that lacks anything asked for is a failed sample.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::price::Exits;

const RUNNER: &str = include_str!("runner.sh");

/// What a place is asked to run.
#[derive(Clone, Debug)]
pub struct Order {
    /// The subject's command, or the shell that runs the workload natively.
    pub command: Vec<String>,
    /// The monitor's program, to be asked for its version; empty for native.
    pub program: String,
    /// Directory of this sample; made and removed by the script.
    pub scratch: String,
    /// A small file to put into `scratch`: name and content.
    pub file: Option<(String, Vec<u8>)>,
    /// An image to copy before the sample starts, and where to.
    pub copy: Option<(String, String)>,
    /// Shell commands that make the sample's other images in `scratch`; empty for none.
    pub prepare: String,
    /// The command that watches a console; see `agent::watch`. Words are split at spaces.
    pub watch: String,
    /// Guest memory in MiB; 0 for native.
    pub guest_mib: u64,
    /// Least time between two looks at the console.
    pub poll: Duration,
    /// The sample is over after this time on the place's own clock.
    pub limit: Duration,
    /// Network and mount namespaces of its own, which need a root that is a mount (passt makes itself another).
    pub apart: bool,
    /// No other virtual machine runs there, so any counters are this one's.
    pub alone: bool,
}

impl Order {
    /// The complete script for bash.
    pub fn script(&self) -> String {
        let mut out = String::new();
        let (image, disk) = self.copy.clone().unwrap_or_default();
        for (name, value) in [
            ("LAB_SCRATCH", self.scratch.clone()),
            ("LAB_WATCH", self.watch.clone()),
            ("LAB_POLL", self.poll.as_micros().to_string()),
            ("LAB_LIMIT", self.limit.as_secs().max(1).to_string()),
            // Long samples are of large guests on slow machines, which take a while to end, too.
            ("LAB_GRACE", (self.limit.as_secs() / 20).max(3).to_string()),
            ("LAB_GUEST_MIB", self.guest_mib.to_string()),
            ("LAB_IMAGE", image),
            ("LAB_DISK", disk),
            ("LAB_PREPARE", self.prepare.clone()),
            ("LAB_PROGRAM", self.program.clone()),
            ("LAB_ALONE", if self.alone { "1".to_owned() } else { String::new() }),
        ] {
            let _ = writeln!(out, "{name}={}", quote(&value));
        }
        if let Some((name, bytes)) = &self.file {
            let mut text = String::with_capacity(bytes.len() * 4);
            for byte in bytes {
                // Octal: the only escape that every printf knows.
                let _ = write!(text, "\\{byte:03o}");
            }
            let _ = writeln!(out, "mkdir -p \"$LAB_SCRATCH\" && printf '{text}' >\"$LAB_SCRATCH\"/{name}");
        }
        let words: Vec<String> = self.command.iter().map(|word| quote(word)).collect();
        let _ = writeln!(out, "set -- {}", words.join(" "));
        out += RUNNER;
        if self.apart { Self::set_apart(&self.scratch, &out) } else { out }
    }

    /// `script`, in namespaces of its own and in a root that is a mount.
    fn set_apart(scratch: &str, script: &str) -> String {
        const ENTER: &str = "mkdir -p \"$0/top\" && mount --rbind / \"$0/top\" && cd \"$0/top\" && mount --move . / && \
            exec chroot . bash \"$0/sample\"; exec bash \"$0/sample\"";
        let scratch = quote(scratch);
        format!(
            "mkdir -p {scratch} && cat >{scratch}/sample <<'LAB_SAMPLE_ENDS'\nmount -t sysfs sysfs /sys\n{script}\nLAB_SAMPLE_ENDS\n\
             exec unshare --net --mount bash -c {} {scratch}\n",
            quote(ENTER)
        )
    }
}

/// Puts a word in single quotes for the shell.
pub fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Something the subject said on its console, with KVM's counters at that moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    /// Microseconds since the subject was started.
    pub micros: u64,
    /// KVM's counters; empty for native.
    pub counters: BTreeMap<String, u64>,
}

/// Resident memory of the monitor, KiB.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Memory {
    /// RSS beside guest memory.
    pub rss_kib: u64,
    /// PSS beside guest memory.
    pub pss_kib: u64,
    /// RSS of guest memory.
    pub guest_rss_kib: u64,
    /// Address space of the process, guest memory included.
    pub total_kib: u64,
    /// Of all resident memory, what was written to.
    pub dirty_kib: u64,
}

/// A sample as it came back.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Marks by name: `begin cpu`, `end cpu`, `out cpu`, `ready`, `done`.
    pub marks: BTreeMap<String, Mark>,
    /// The monitor's memory at `ready` or `done`.
    pub memory: Option<Memory>,
    /// How it ended: `exit 0`, `killed 0`, `limit 0`.
    pub end: String,
    /// Microseconds from start to end.
    pub end_micros: u64,
    /// What the monitor says of its version; empty for native.
    pub version: String,
    /// The console's text.
    pub console: String,
    /// The end of the subject's standard error.
    pub stderr: String,
}

impl Sample {
    /// Reads the report of the script.
    pub fn parse(text: &str) -> Result<Self> {
        let mut sample = Sample::default();
        let (head, rest) = text.split_once("%% console\n").context("the sample's report has no console")?;
        let (console, rest) = rest.rsplit_once("\n%% stderr\n").context("the sample's report is cut short")?;
        let (stderr, _) = rest.rsplit_once("\n%% stop").context("the sample's report is cut short")?;
        sample.console = console.to_owned();
        sample.stderr = stderr.trim().to_owned();
        for line in head.lines() {
            let Some(line) = line.strip_prefix("%% ") else { continue };
            let mut words = line.split_whitespace();
            match words.next() {
                Some("mark") => sample.mark(words)?,
                Some("memory") => {
                    let kib: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().context("a memory line")?;
                    // The first reading counts; one of a monitor that is just leaving is all zeros.
                    if let ([rss_kib, pss_kib, guest_rss_kib, rest @ ..], None) = (&kib[..], sample.memory)
                        && *rss_kib > 0
                    {
                        let (rss_kib, pss_kib, guest_rss_kib) = (*rss_kib, *pss_kib, *guest_rss_kib);
                        let (total_kib, dirty_kib) = match rest {
                            [_, total, dirty] => (*total, *dirty),
                            _ => (0, 0),
                        };
                        sample.memory = Some(Memory { rss_kib, pss_kib, guest_rss_kib, total_kib, dirty_kib });
                    }
                }
                Some("version") => sample.version = words.collect::<Vec<_>>().join(" "),
                Some("end") => {
                    sample.end_micros = words.next().unwrap_or_default().parse().context("an end line")?;
                    sample.end = words.collect::<Vec<_>>().join(" ");
                }
                _ => bail!("the sample's report has an unknown line: {line}"),
            }
        }
        if sample.end.is_empty() {
            bail!("the sample's report has no end");
        }
        Ok(sample)
    }

    fn mark<'a>(&mut self, mut words: impl Iterator<Item = &'a str>) -> Result<()> {
        let micros = words.next().unwrap_or_default().parse().context("a mark without a time")?;
        let mut name: Vec<&str> = Vec::new();
        let mut counters = BTreeMap::new();
        for word in words {
            match word.split_once('=').and_then(|(key, value)| Some((key, value.parse().ok()?))) {
                Some((key, value)) => drop(counters.insert(key.to_owned(), value)),
                None => name.push(word),
            }
        }
        self.marks.insert(name.join(" "), Mark { micros, counters });
        Ok(())
    }

    /// The mark called `name`, or an error that tells how the sample ended.
    pub fn need(&self, name: &str) -> Result<&Mark> {
        self.marks.get(name).with_context(|| format!("the guest never said '{name}' ({})", self.ending()))
    }

    /// What was printed between `end NAME` and `out NAME`: the output of a step that has ended.
    pub fn section(&self, name: &str) -> Result<&str> {
        self.need(&format!("out {name}"))?;
        let (_, rest) = self.console.split_once(&format!("@@lab end {name}")).context("console cut short")?;
        let (text, _) = rest.split_once(&format!("@@lab out {name}")).context("console cut short")?;
        Ok(text)
    }

    /// Exits between two marks, or from the start to one mark; `None` where there are no counters.
    pub fn exits(&self, from: Option<&str>, to: &str) -> Option<Exits> {
        let to = &self.marks.get(to)?.counters;
        let from = match from {
            Some(name) => Some(&self.marks.get(name)?.counters),
            None => None,
        };
        if !to.contains_key("exits") {
            return None;
        }
        let difference = |(name, value): (&String, &u64)| {
            let before = from.and_then(|from| from.get(name)).copied().unwrap_or(0);
            (name.clone(), value.saturating_sub(before))
        };
        Some(Exits::from_kvm(&to.iter().map(difference).collect()))
    }

    /// How the sample ended, with the last thing said, for an error message.
    pub fn ending(&self) -> String {
        let last = |text: &str| text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("").trim().to_owned();
        let said = if self.stderr.is_empty() { last(&self.console) } else { last(&self.stderr) };
        let how = match self.end.as_str() {
            "limit 0" => "stopped by the watchdog".to_owned(),
            "killed 0" => "it did not power off".to_owned(),
            other => other.replace("exit", "exit status"),
        };
        if said.is_empty() { how } else { format!("{how}; last words: {said}") }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    /// A watcher for places in tests.
    pub(crate) const STAND_IN: &str = concat!("bash ", env!("CARGO_MANIFEST_DIR"), "/src/testdata/watch.sh");

    pub(crate) fn run_here(order: &Order) -> Sample {
        let mut child =
            Command::new("bash").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), order.script().as_bytes()).unwrap();
        let out = child.wait_with_output().unwrap();
        Sample::parse(&String::from_utf8_lossy(&out.stdout)).unwrap()
    }

    fn order(script: &str, name: &str) -> Order {
        let scratch = std::env::temp_dir().join(format!("tare-lab-test-{}-{name}", std::process::id()));
        Order {
            command: vec!["sh".into(), "-c".into(), script.into()],
            program: String::new(),
            scratch: scratch.display().to_string(),
            file: None,
            copy: None,
            prepare: String::new(),
            watch: STAND_IN.to_owned(),
            guest_mib: 0,
            poll: Duration::from_millis(2),
            limit: Duration::from_secs(20),
            apart: false,
            alone: false,
        }
    }

    #[test]
    fn the_runner_reports_marks_sections_and_the_end() {
        let order = order(
            "echo noise; echo '@@lab begin a'; echo '@@lab end a'; echo \"it's 42\"; echo '@@lab out a'; echo @@lab done; exit 3",
            "marks",
        );
        let sample = run_here(&order);
        assert_eq!(sample.section("a").unwrap().trim(), "it's 42");
        assert!(sample.need("begin a").unwrap().micros <= sample.need("end a").unwrap().micros);
        assert_eq!(sample.end, "exit 3");
        assert!(sample.exits(Some("begin a"), "end a").is_none(), "no VM, no counters");
        assert!(sample.need("ready").unwrap_err().to_string().contains("exit status 3"));
        assert!(!std::path::Path::new(&order.scratch).exists(), "the scratch directory is removed");
    }

    #[test]
    fn a_file_comes_along_byte_for_byte() {
        let mut with = order("od -An -v -tu1 -w8 f", "file");
        let bytes: Vec<u8> = (0..=255).collect();
        with.file = Some(("f".to_owned(), bytes.clone()));
        with.program = "bash".to_owned();
        let sample = run_here(&with);
        assert!(sample.version.contains("bash"), "{}", sample.version);
        let text = sample.console;
        let read: Vec<u8> = text.split_whitespace().map(|word| word.parse().unwrap()).collect();
        assert_eq!(read, bytes);
    }

    #[test]
    fn a_sample_set_apart_sees_another_network() {
        let can = Command::new("unshare").args(["--net", "--mount", "true"]).stderr(Stdio::null()).status();
        if !can.is_ok_and(|status| status.success()) {
            println!("skipped: no namespaces for this user");
            return;
        }
        let mut apart = order("echo @@lab end net; readlink /proc/self/ns/net; echo @@lab out net", "apart");
        apart.apart = true;
        let inside = run_here(&apart).section("net").map(str::trim).unwrap_or_default().to_owned();
        let outside = std::fs::read_link("/proc/self/ns/net").unwrap();
        assert!(inside.starts_with("net:[") && inside != outside.to_str().unwrap(), "{inside} and {outside:?}");
        assert!(!std::path::Path::new(&apart.scratch).exists(), "the scratch directory is removed");
    }

    #[test]
    fn the_runner_ends_a_subject_that_stays() {
        let mut stays = order("echo @@lab done; exec sleep 100", "stays");
        stays.guest_mib = 1024;
        let sample = run_here(&stays);
        assert_eq!(sample.end, "killed 0");
        assert!(sample.memory.unwrap().rss_kib > 0);
        let mut stuck = order("echo hello; exec sleep 100", "stuck");
        stuck.limit = Duration::from_secs(1);
        let sample = run_here(&stuck);
        assert_eq!(sample.end, "limit 0");
        assert!(sample.need("done").unwrap_err().to_string().contains("watchdog"));
    }

    #[test]
    fn counters_between_marks_become_exits() {
        let text = "%% mark 10 begin cpu exits=100 io_exits=90\n%% mark 30 end cpu exits=150 io_exits=95 halt_exits=5\n\
                    %% memory 5000 4000 90000 90000\n%% memory 0 0 0 0\n%% end 40 exit 0\n%% console\nx\n%% stderr\n\n%% stop\n";
        let sample = Sample::parse(text).unwrap();
        let exits = sample.exits(Some("begin cpu"), "end cpu").unwrap();
        assert_eq!((exits.total, exits.by_kind["pio"], exits.by_kind["halt"]), (50, 5, 5));
        assert_eq!(sample.exits(None, "end cpu").unwrap().total, 150);
        assert_eq!(
            sample.memory.unwrap(),
            Memory { rss_kib: 5000, pss_kib: 4000, guest_rss_kib: 90000, total_kib: 0, dirty_kib: 0 }
        );
        assert_eq!(sample.end_micros, 40);
    }

    #[test]
    fn a_report_cut_short_is_an_error() {
        for text in [
            "",
            "%% end 4 exit 0\n",
            "%% console\n\n%% stderr\n\n%% stop\n",
            "%% what\n%% console\n\n%% stderr\n\n%% stop",
        ] {
            assert!(Sample::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn quoting_survives_the_shell() {
        let order = order("printf '%s' \"$1\"", "quote");
        let mut order = order;
        order.command.extend(["x".to_owned(), "a 'b' \"c\" $d `e` \\".to_owned()]);
        assert_eq!(run_here(&order).console.trim(), "a 'b' \"c\" $d `e` \\");
    }
}
