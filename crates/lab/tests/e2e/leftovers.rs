// SPDX-License-Identifier: Apache-2.0
//! A run of the lab that is interrupted or killed leaves no machine behind, and the next one starts clean.

use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::lab::tare_lab;

/// Process ids of the QEMUs whose command line names a folder of the process `owner`.
fn machines_of(owner: u32) -> Vec<String> {
    let mark = format!("/clones/{owner}-");
    let Ok(processes) = std::fs::read_dir("/proc") else { panic!("no /proc") };
    let of_owner = processes.flatten().filter(|entry| {
        let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        command.starts_with(b"qemu") && String::from_utf8_lossy(&command).contains(&mark)
    });
    of_owner.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Waits until `done` says so, or fails the test after a minute with `what`.
#[track_caller]
fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < Duration::from_secs(120), "still waiting: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A run that is well under way: its machine is up.
#[track_caller]
fn under_way() -> Child {
    let mut command = tare_lab(&["run", "boot", "--subjects", "qemu", "--repeat", "50", "--place", "lab"]);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("tare-lab starts");
    let id = child.id();
    wait_until("a machine of the run", || {
        assert_eq!(child.try_wait().ok().flatten(), None, "the run ended by itself");
        !machines_of(id).is_empty()
    });
    child
}

fn send(signal: &str, child: &Child) {
    let sent = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(sent.is_ok_and(|status| status.success()), "kill {signal}");
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn an_interrupted_run_ends_its_machines_and_says_so() {
    // The images are made first, so that what is interrupted is a measurement.
    assert!(tare_lab(&["host", "make"]).stderr(Stdio::null()).status().is_ok_and(|status| status.success()));
    let mut run = under_way();
    send("-INT", &run);
    let id = run.id();
    let status = run.wait().expect("it ends");
    assert_eq!(status.code(), Some(130), "{status}");
    wait_until("the machines of an interrupted run to be gone", || machines_of(id).is_empty());
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_killed_run_leaves_no_machine_and_the_next_one_works() {
    assert!(tare_lab(&["host", "make"]).stderr(Stdio::null()).status().is_ok_and(|status| status.success()));
    let mut run = under_way();
    send("-KILL", &run);
    let id = run.id();
    assert_eq!(run.wait().expect("it ends").signal(), Some(9));
    wait_until("the machines of a killed run to be gone", || machines_of(id).is_empty());
    let next = tare_lab(&["host", "once", "echo", "clean"]).output().expect("tare-lab starts");
    assert_eq!(String::from_utf8_lossy(&next.stdout), "clean\n", "{}", String::from_utf8_lossy(&next.stderr));
    let info = tare_lab(&["host", "info"]).output().expect("tare-lab starts");
    let info: serde_json::Value = serde_json::from_slice(&info.stdout).expect("info is JSON");
    let clones = format!("{}/clones", info["cache"].as_str().expect("the cache folder"));
    let left = std::fs::read_dir(clones).expect("the folder of clones").flatten();
    let left: Vec<_> =
        left.filter(|entry| entry.file_name().to_string_lossy().starts_with(&format!("{id}-"))).collect();
    assert!(left.is_empty(), "{left:?}");
}
