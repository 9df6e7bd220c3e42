// SPDX-License-Identifier: Apache-2.0
//! The lab machine itself: the one that stays, and its copies.

use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::lab::tare_lab;

/// A cache folder of its own for a test, with what is built taken from the common one.
struct Apart(TempDir);

impl Apart {
    fn new() -> Self {
        assert!(tare_lab(&["host", "make"]).stderr(Stdio::null()).status().is_ok_and(|status| status.success()));
        let info = tare_lab(&["host", "info"]).output().expect("tare-lab starts");
        let info: Value = serde_json::from_slice(&info.stdout).expect("info is JSON");
        let apart = Self(tempfile::tempdir().expect("a temporary folder"));
        let built = ["/guest_image", "/machine_root", "/snapshots/counted", "/snapshots/threaded"];
        for path in built.iter().map(|name| info.pointer(name).and_then(Value::as_str).expect("it was just made")) {
            let name = Path::new(path).file_name().expect("a folder's name");
            std::os::unix::fs::symlink(path, apart.0.path().join(name)).expect("a link");
        }
        apart
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = tare_lab(args);
        command.env("TARE_CACHE", self.0.path());
        command
    }

    fn host(&self, args: &[&str]) -> Output {
        self.command(&["host"]).args(args).output().expect("tare-lab starts")
    }

    fn info(&self) -> Value {
        serde_json::from_slice(&self.host(&["info"]).stdout).expect("info is JSON")
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = self.host(&["down"]);
    }
}

fn says(output: &Output, code: i32, stdout: &str, stderr: &str) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!((output.status.code(), out.as_str()), (Some(code), stdout), "{err}");
    assert!(err.contains(stderr), "'{stderr}' is not in '{err}'");
}

fn kill(signal: &str, pid: u64) {
    let sent = Command::new("kill").args([signal, &pid.to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()), "kill {signal} {pid}");
}

fn line(child: &mut Child) -> String {
    use std::io::BufRead;
    let mut line = String::new();
    let stdout = child.stdout.as_mut().expect("a pipe");
    std::io::BufReader::new(stdout).read_line(&mut line).expect("a line");
    line
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn the_standing_machine_comes_works_and_goes() {
    let apart = Apart::new();
    assert_eq!(apart.info()["state"], "down");
    says(&apart.host(&["exec", "true"]), 1, "", "the lab machine is down: `tare-lab host up` starts it");
    says(&apart.host(&["up"]), 0, "", "");
    says(&apart.host(&["up"]), 0, "", "up already");
    let info = apart.info();
    assert_eq!((&info["state"], &info["mode"]), (&Value::from("up"), &Value::from("threaded")));

    let script = "test -c /dev/kvm && nproc && echo to-stderr >&2; exit 7";
    says(&apart.host(&["exec", script]), 7, "2\n", "to-stderr");
    says(&apart.host(&["exec", "printf", "%s|", "a b", "c"]), 0, "a b|c|", "");
    says(&apart.host(&["exec", "no-such-program", "x"]), 1, "", "no-such-program");

    let (here, back) = (apart.0.path().join("here"), apart.0.path().join("back"));
    let bytes: Vec<u8> = (0..9_000_000_u32).flat_map(|i| i.to_le_bytes()).collect();
    std::fs::write(&here, &bytes).expect("a file");
    let (here, back) = (here.to_str().expect("text"), back.to_str().expect("text"));
    says(&apart.host(&["put", here, "/lab/new/there"]), 0, "", "");
    says(&apart.host(&["get", "/lab/new/there", back]), 0, "", "");
    assert!(std::fs::read(back).expect("a file") == bytes, "a file changed on its way there and back");

    // An interrupt goes to the command in the machine, and what that says still arrives.
    let waits = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.05; done";
    let mut exec = apart.command(&["host", "exec", waits]).stdout(Stdio::piped()).spawn().expect("tare-lab starts");
    assert_eq!(line(&mut exec), "ready\n");
    kill("-INT", exec.id().into());
    assert_eq!(line(&mut exec), "caught\n");
    assert_eq!(exec.wait().expect("it ends").code(), Some(9));

    // A client that is killed takes its command with it as soon as the next one comes.
    let mut exec = apart.command(&["host", "exec", "echo ready; exec sleep 4321"]);
    let mut exec = exec.stdout(Stdio::piped()).spawn().expect("tare-lab starts");
    assert_eq!(line(&mut exec), "ready\n");
    kill("-KILL", exec.id().into());
    exec.wait().expect("it ends");
    says(&apart.host(&["exec", "pgrep -fx 'sleep 4321' | wc -l"]), 0, "0\n", "");

    // Killed from outside it is down, and comes again.
    kill("-KILL", info["pid"].as_u64().expect("a pid"));
    says(&apart.host(&["exec", "true"]), 1, "", "is down");
    says(&apart.host(&["up"]), 0, "", "");
    says(&apart.host(&["exec", "test ! -e /lab/new/there"]), 0, "", "");
    says(&apart.host(&["down"]), 0, "", "");
    assert_eq!(apart.info()["state"], "down");
    assert!(!apart.0.path().join("host").exists());
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn counted_time_repeats_to_the_last_instruction_of_a_copy() {
    let apart = Apart::new();
    let job = "cat /sys/devices/system/clocksource/clocksource0/current_clocksource; nproc; \
               sysbench cpu --events=200 --time=0 run | grep 'total time:'; touch /lab/mark; ls /lab/mark*";
    let once = |job: &str| {
        apart.command(&["host", "once", "--counted", job]).stderr(Stdio::piped()).stdout(Stdio::piped()).spawn()
    };
    let runs: Vec<Child> = (0..2).map(|_| once(job).expect("tare-lab starts")).collect();
    let outputs: Vec<Output> = runs.into_iter().map(|run| run.wait_with_output().expect("it ends")).collect();
    let texts: Vec<String> =
        outputs.iter().map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).collect();
    assert!(texts[0].starts_with("tsc\n1\n"), "{}", texts[0]);
    assert!(texts[0].ends_with("/lab/mark\n"), "{}", texts[0]);
    assert_eq!(texts[0], texts[1]);
    let clocks: Vec<String> = outputs
        .iter()
        .map(|output| {
            String::from_utf8_lossy(&output.stderr)
                .split(" on the machine's clock")
                .next()
                .unwrap_or_default()
                .to_owned()
        })
        .collect();
    assert!(clocks[0].contains("tare-lab: 0."), "{}", clocks[0]);
    assert_eq!(clocks[0], clocks[1]);

    let stuck = apart.host(&["once", "--counted", "--clock-limit", "0.5", "echo begun; exec sleep 100000"]);
    says(&stuck, 137, "begun\n", "ended at its limit");
    let spins = apart.host(&["once", "--counted", "--real-limit", "6", "while :; do :; done"]);
    says(&spins, 1, "", "did not answer in time");
}
