// SPDX-License-Identifier: Apache-2.0
//! As much of QEMU's machine protocol as a snapshot takes: greet, command, answer, with events skipped.
//!
//! One client per machine, used by the thread that owns the machine. Every wait has a limit.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Longest wait for one answer.
const ANSWER: Duration = Duration::from_secs(30);

/// A connection to QEMU's control socket, past the greeting.
#[derive(Debug)]
pub struct Qmp<S = UnixStream> {
    stream: BufReader<S>,
}

impl Qmp {
    /// Takes over a connected socket and greets.
    ///
    /// # Errors
    /// When QEMU does not greet back.
    pub fn greet(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(ANSWER))?;
        stream.set_write_timeout(Some(ANSWER))?;
        Self::over(stream)
    }
}

impl<S: std::io::Read + Write> Qmp<S> {
    fn over(stream: S) -> Result<Self> {
        let mut qmp = Self { stream: BufReader::new(stream) };
        let hello = qmp.line()?;
        if hello.get("QMP").is_none() {
            bail!("the machine's control socket does not speak QMP: it said {hello}");
        }
        qmp.command("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).context("no answer from QEMU on its control socket")? == 0 {
            bail!("QEMU closed its control socket");
        }
        serde_json::from_str(&line).with_context(|| format!("QEMU said something that is not JSON: {}", line.trim()))
    }

    /// Gives a command and returns what QEMU returns.
    ///
    /// # Errors
    /// QEMU's own description when it refuses, or what the socket says.
    pub fn command(&mut self, name: &str, arguments: Value) -> Result<Value> {
        let mut text = json!({ "execute": name, "arguments": arguments }).to_string();
        text.push('\n');
        self.stream.get_mut().write_all(text.as_bytes()).with_context(|| format!("send {name} to QEMU"))?;
        loop {
            let mut answer = self.line()?;
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get("error") {
                bail!("QEMU refused {name}: {}", error["desc"].as_str().unwrap_or("it did not say why"));
            }
        }
    }

    /// Sets up a migration that leaves shared memory where it is: only the devices' state travels.
    ///
    /// # Errors
    /// As [`Qmp::command`].
    pub fn leave_shared_memory(&mut self) -> Result<()> {
        let capabilities = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }] });
        self.command("migrate-set-capabilities", capabilities).map(drop)
    }

    /// Waits until the migration under way is through.
    ///
    /// # Errors
    /// When it fails or takes longer than `limit`.
    pub fn await_migration(&mut self, limit: Duration) -> Result<()> {
        let begin = Instant::now();
        loop {
            let state = self.command("query-migrate", json!({}))?;
            match state["status"].as_str() {
                Some("completed") => return Ok(()),
                Some(end @ ("failed" | "cancelled")) => {
                    bail!(
                        "saving or restoring the machine {end}: {}",
                        state["error-desc"].as_str().unwrap_or("no reason given")
                    )
                }
                _ if begin.elapsed() > limit => bail!("saving or restoring the machine took too long"),
                _ => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::io::{Cursor, Read};

    #[derive(Debug)]
    struct Script {
        answers: Cursor<Vec<u8>>,
        asked: Vec<u8>,
    }

    impl Read for Script {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            self.answers.read(into)
        }
    }

    impl Write for Script {
        fn write(&mut self, from: &[u8]) -> std::io::Result<usize> {
            self.asked.write(from)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    fn script(answers: &str) -> Script {
        Script { answers: Cursor::new(answers.as_bytes().to_vec()), asked: Vec::new() }
    }

    const HELLO: &str = "{\"QMP\": {\"version\": {}}}\n{\"return\": {}}\n";

    #[test]
    fn answers_are_found_behind_events() {
        let text =
            format!("{HELLO}{{\"event\": \"STOP\", \"data\": {{}}}}\n{{\"return\": {{\"status\": \"paused\"}}}}\n");
        let mut qmp = Qmp::over(script(&text)).unwrap();
        assert_eq!(qmp.command("query-status", json!({})).unwrap()["status"], "paused");
        let asked = String::from_utf8(qmp.stream.get_ref().asked.clone()).unwrap();
        let names: Vec<Value> =
            asked.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["execute"].take()).collect();
        assert_eq!(names, ["qmp_capabilities", "query-status"]);
    }

    #[test]
    fn refusals_and_endings_say_what_happened() {
        let text = format!("{HELLO}{{\"error\": {{\"class\": \"GenericError\", \"desc\": \"no such thing\"}}}}\n");
        let mut qmp = Qmp::over(script(&text)).unwrap();
        assert!(qmp.command("frob", json!({})).unwrap_err().to_string().contains("refused frob: no such thing"));
        assert!(qmp.command("frob", json!({})).unwrap_err().to_string().contains("closed"));
        assert!(Qmp::over(script("hello\n")).is_err());
        assert!(Qmp::over(script("{\"ssh\": 2}\n")).unwrap_err().to_string().contains("does not speak QMP"));
    }

    #[test]
    fn a_failed_migration_is_an_error() {
        let text = format!(
            "{HELLO}{{\"return\": {{\"status\": \"active\"}}}}\n{{\"return\": {{\"status\": \"failed\", \"error-desc\": \"disk full\"}}}}\n"
        );
        let mut qmp = Qmp::over(script(&text)).unwrap();
        let error = qmp.await_migration(Duration::from_secs(5)).unwrap_err();
        assert!(error.to_string().contains("disk full"));
    }
}
