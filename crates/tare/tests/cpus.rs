// SPDX-License-Identifier: Apache-2.0
//! How a machine's threads use the host's CPUs: their names, where they are pinned, and what idle vCPUs are said to cost.
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use common::{Guest, complaint, has_kvm, tare};

/// Name and allowed host CPUs of each thread.
type Threads = BTreeMap<String, String>;

/// The threads of a machine whose guest said "up" and sleeps, once they are as `expected`; the machine is ended.
fn threads(dir: &Path, more: &[&str], expected: &[(&str, &str)]) {
    let kernel = Guest::Hang("up").write(dir);
    let mut command = tare(&["run", "--kernel", kernel.to_str().unwrap(), "--console", "serial"]);
    let mut child = Ended(command.args(more).stdout(Stdio::piped()).spawn().unwrap());
    let mut said = [0; 2];
    child.0.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"up");
    let expected: Threads = expected.iter().map(|(name, cpus)| ((*name).to_owned(), (*cpus).to_owned())).collect();
    let mut found = Threads::new();
    // A thread is there before it has its name and its place; the first vCPU runs before the last is made.
    for _ in 0..2000 {
        found = look(child.0.id());
        if found == expected {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(found, expected);
}

fn look(process: u32) -> Threads {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let read = |task: PathBuf| {
        let name = fs::read_to_string(task.join("comm")).ok()?.trim().to_owned();
        // The kernel's own threads in a process that uses KVM or vhost name themselves.
        let own = !name.starts_with("kvm-") && !name.starts_with("vhost-");
        own.then_some((name, allowed(&fs::read_to_string(task.join("status")).ok()?)))
    };
    tasks.filter_map(|task| read(task.unwrap().path())).collect()
}

/// A machine that doesn't outlive its test.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The host CPUs that a thread may use, as its status file lists them.
fn allowed(status: &str) -> String {
    status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_owned()
}

fn own_cpus() -> String {
    allowed(&fs::read_to_string("/proc/thread-self/status").unwrap())
}

/// The threads of ARCHITECTURE.md's table that such a machine has; nothing runs under a name that says nothing.
#[test]
fn threads_are_named_by_role() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.raw");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let api = dir.path().join("api");
    let disk = format!("{},queues=2", disk.display());
    let own = own_cpus();
    // A disk's threads start with its driver, which this guest has none of.
    let roles = ["api", "tare", "vcpu0", "vcpu1"].map(|name| (name, own.as_str()));
    threads(dir.path(), &["--cpus", "2", "--disk", &disk, "--api", api.to_str().unwrap()], &roles);
}

#[test]
fn vcpus_are_pinned_and_nobody_else() {
    if !has_kvm() {
        return;
    }
    let own = own_cpus();
    let last = own.rsplit([',', '-']).next().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let pair = format!("1:{last}");
    threads(dir.path(), &["--cpus", "2", "--cpu-pin", &pair], &[("tare", &own), ("vcpu0", &own), ("vcpu1", last)]);
    let both = format!("{last},{last}");
    threads(dir.path(), &["--cpus", "2", "--cpu-pin", &both], &[("tare", &own), ("vcpu0", last), ("vcpu1", last)]);
}

/// Runs a guest that says "x"; a KVM that can't is refused in one line that names the flag.
fn run(args: &[&str]) -> Option<Output> {
    let dir = tempfile::tempdir().unwrap();
    let kernel = Guest::Say("x").write(dir.path());
    let output =
        tare(&["run", "--kernel", kernel.to_str().unwrap(), "--console", "serial"]).args(args).output().unwrap();
    let said = complaint(&output);
    if output.status.code() == Some(2) {
        assert!(
            said.starts_with("tare: this host's KVM can't ") && said.contains(&format!(": {}; ", args[0])),
            "{said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
        println!("not shown here: {said}");
        return None;
    }
    assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"x"[..]), "{said}");
    Some(output)
}

#[test]
fn what_idle_vcpus_cost_is_said_at_the_start() {
    if !has_kvm() {
        return;
    }
    for (args, cost) in [
        (["--halt-poll", "0"], "tare: halt-poll 0: a vCPU that halts gives its host CPU back at once;"),
        (
            ["--halt-poll", "50000"],
            "tare: halt-poll 50000: a vCPU that halts keeps its host CPU busy for up to 50000 ns",
        ),
        (["--disable-exits", "hlt"], "tare: disable-exits hlt: a vCPU that halts keeps its host CPU,"),
        (["--disable-exits", "pause"], "tare: disable-exits pause: a vCPU that spins on a lock is not set aside"),
        (["--disable-exits", "mwait"], "tare: disable-exits mwait: a vCPU that waits in MWAIT keeps its host CPU,"),
        (["--disable-exits", "cstate"], "tare: disable-exits cstate: the guest sees how long the host's cores sleep"),
    ] {
        if let Some(output) = run(&args) {
            let said = complaint(&output);
            assert!(said.starts_with(cost) && said.lines().count() == 1, "{said}");
        }
    }
    let Some(output) = run(&["--disable-exits", "hlt", "--ledger", "-"]) else { return };
    assert!(complaint(&output).contains("\nno exits on hlt: vCPUs held host CPUs for "), "{}", complaint(&output));
}
