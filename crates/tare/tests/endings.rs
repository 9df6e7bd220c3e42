// SPDX-License-Identifier: Apache-2.0
//! Each way a run ends has its exit code, and the ledger, the process id and the terminal are left as promised.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use common::{Guest, TARE, complaint, has_kvm, refuses, tare};

fn run(guest: &Guest<'_>, args: &[&str]) -> Option<Output> {
    if !has_kvm() {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let kernel = guest.write(dir.path());
    Some(
        tare(&["run", "--kernel", kernel.to_str().unwrap(), "--console", "serial", "--memory", "64M"])
            .args(args)
            .output()
            .unwrap(),
    )
}

#[test]
fn version_and_help() {
    let output = tare(&["--version"]).output().unwrap();
    assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("tare v{}\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(output.status.code(), Some(0));
    for args in [&["--help"][..], &["run", "--help"]] {
        let output = tare(args).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0));
        for code in 0..=7 {
            assert!(text.contains(&format!("\n  {code}  ")), "exit code {code} in {text}");
        }
    }
    assert_eq!(tare(&["doctor", "--help"]).output().unwrap().status.code(), Some(0));
}

#[test]
fn the_doctor_answers_everywhere() {
    let output = tare(&["doctor", "--json"]).output().unwrap();
    let seen: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let ready = seen["ready"].as_bool().unwrap();
    assert_eq!(output.status.code(), Some(if ready { 0 } else { 1 }));
    assert!(seen["findings"]["kvm.device"]["state"].is_string());
    let missing = tare(&["doctor", "--kvm", "/nonexistent/kvm"]).output().unwrap();
    assert_eq!(missing.status.code(), Some(1));
    assert!(String::from_utf8(missing.stdout).unwrap().contains("MISSING  kvm.device"));
}

#[test]
fn a_power_off_is_clean_and_the_output_is_the_guests() {
    let Some(output) = run(&Guest::Say("hello\r\n"), &[]) else { return };
    assert_eq!(output.status.code(), Some(0), "{}", complaint(&output));
    assert_eq!(output.stdout, b"hello\r\n");
    assert_eq!(complaint(&output), "");
}

#[test]
fn a_reset_loop_has_its_code() {
    let Some(output) = run(&Guest::Reset, &[]) else { return };
    assert_eq!(output.status.code(), Some(4));
    assert!(complaint(&output).starts_with("tare: the guest reset itself 3 times"), "{}", complaint(&output));
}

#[test]
fn a_reset_ends_cleanly_when_asked() {
    let Some(output) = run(&Guest::Reset, &["--on-reset", "exit"]) else { return };
    assert_eq!(output.status.code(), Some(0), "{}", complaint(&output));
}

#[test]
fn a_panic_has_its_code() {
    let Some(output) = run(&Guest::Panic, &[]) else { return };
    assert_eq!(output.status.code(), Some(5));
    assert!(complaint(&output).starts_with("tare: the guest's kernel panicked"), "{}", complaint(&output));
}

#[test]
fn a_triple_fault_is_a_reset() {
    let Some(output) = run(&Guest::TripleFault, &["--on-reset", "exit"]) else { return };
    assert_eq!(output.status.code(), Some(0), "{}", complaint(&output));
    let output = run(&Guest::TripleFault, &[]).unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", complaint(&output));
}

#[test]
fn a_guest_that_cannot_go_on_has_its_code() {
    let Some(output) = run(&Guest::Stray, &[]) else { return };
    let said = complaint(&output);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(said.starts_with("tare: ") && said.lines().count() == 1, "{said}");
}

#[test]
fn the_ledger_goes_where_it_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("out.json");
    let Some(output) = run(&Guest::Say("x"), &["--ledger", file.to_str().unwrap()]) else { return };
    assert_eq!(output.status.code(), Some(0), "{}", complaint(&output));
    let ledger: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert!(ledger["wall_ns"].as_u64().unwrap() > 0, "{ledger}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");

    let output = run(&Guest::Say("x"), &["--ledger", "-"]).unwrap();
    assert_eq!(output.stdout, b"x", "the table stays out of the guest's output");
    assert!(complaint(&output).lines().count() > 3, "{}", complaint(&output));
}

/// A guest that said "up" and sleeps, and its pid file.
fn hanging(dir: &Path, more: &[&str]) -> Child {
    let kernel = Guest::Hang("up").write(dir);
    let pidfile = dir.join("pid");
    let args =
        ["run", "--kernel", kernel.to_str().unwrap(), "--console", "serial", "--pidfile", pidfile.to_str().unwrap()];
    let mut child = tare(&args).args(more).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = [0; 2];
    child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
    assert_eq!(&said, b"up");
    child
}

fn send(child: &Child, signal: libc::c_int) {
    // SAFETY: no pointers; the child has not been waited for, so the id is its.
    assert_eq!(unsafe { libc::kill(child.id() as libc::pid_t, signal) }, 0);
}

#[test]
fn a_second_sigterm_kills_and_the_pid_file_goes() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let child = hanging(dir.path(), &[]);
    let pidfile = dir.path().join("pid");
    assert_eq!(fs::read_to_string(&pidfile).unwrap().trim(), child.id().to_string());
    // Two different signals, since two of a kind may merge before they are read.
    send(&child, libc::SIGTERM);
    send(&child, libc::SIGINT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", complaint(&output));
    assert!(!pidfile.exists());
}

#[test]
fn a_machine_that_runs_is_asked_through_its_socket() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (disk, socket) = (dir.path().join("d.raw"), dir.path().join("api"));
    fs::write(&disk, vec![7; 1 << 20]).unwrap();
    let (group, socket) = (format!("{},queues=3", disk.display()), socket.to_str().unwrap());
    let child = hanging(dir.path(), &["--disk", &group, "--api", socket]);
    assert_eq!(fs::metadata(socket).unwrap().permissions().mode() & 0o777, 0o600);
    let ctl = |args: &[&str]| tare(&["ctl", "--api", socket]).args(args).output().unwrap();
    let info = || serde_json::from_slice::<serde_json::Value>(&ctl(&["info"]).stdout).unwrap();
    assert_eq!((&info()["state"], &info()["disks"][0]["id"]), (&"Running".into(), &"disk0".into()));
    assert_eq!((&info()["disks"][0]["size"], &info()["disks"][0]["queues"]), (&(1 << 20).into(), &3.into()));
    let done = ctl(&["resize-disk", "--disk", "disk0", "--size", "3M"]);
    assert_eq!((done.status.code(), complaint(&done).as_str()), (Some(0), ""));
    assert_eq!(info()["disks"][0]["size"], 3 << 20);
    assert_eq!(fs::metadata(&disk).unwrap().len(), 3 << 20);
    for (id, size, why) in [
        ("disk0", "1M", "a disk in use does not shrink"),
        ("disk0", "3145729", "no multiple of the disk's block size"),
        ("disk9", "9M", "the machine has no disk `disk9`: id; it has disk0"),
    ] {
        refuses(&mut tare(&["ctl", "--api", socket, "resize-disk", "--disk", id, "--size", size]), 2, why);
    }
    refuses(&mut tare(&["run", "--kernel", "k", "--api", socket]), 2, "another server listens there");
    // The first signal asks the guest, which is deaf; the socket goes with the machine.
    send(&child, libc::SIGTERM);
    send(&child, libc::SIGINT);
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(6));
    assert!(!Path::new(socket).exists());
    refuses(&mut tare(&["ctl", "--api", socket, "info"]), 3, "no machine answers");
}

/// A terminal: its two ends.
fn terminal() -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (0, 0);
    let null = std::ptr::null_mut();
    // SAFETY: both descriptors are valid for writing; the other arguments may be null.
    let rc = unsafe { libc::openpty(&mut ours, &mut theirs, null, null.cast(), null.cast()) };
    assert_eq!(rc, 0);
    // SAFETY: openpty made both and nobody else owns them.
    unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

/// The settings of a terminal, in comparable form, and whether it hands over whole lines.
fn settings(fd: &impl AsRawFd) -> (String, bool) {
    let mut found = MaybeUninit::<libc::termios>::uninit();
    // SAFETY: tcgetattr fills the termios or fails.
    assert_eq!(unsafe { libc::tcgetattr(fd.as_raw_fd(), found.as_mut_ptr()) }, 0);
    // SAFETY: filled above.
    let t = unsafe { found.assume_init() };
    let text = format!("{:x} {:x} {:x} {:x} {:?}", t.c_iflag, t.c_oflag, t.c_cflag, t.c_lflag, t.c_cc);
    (text, t.c_lflag & libc::ICANON != 0)
}

/// `tare run` of a guest that says "up" and sleeps, as the foreground job of `theirs`, ready for keys.
fn in_terminal(dir: &Path, ours: &mut File, theirs: &OwnedFd) -> Child {
    let kernel = Guest::Hang("up").write(dir);
    let mut command = Command::new(TARE);
    command.args(["run", "--kernel", kernel.to_str().unwrap(), "--console", "serial"]);
    let end = || Stdio::from(theirs.try_clone().unwrap());
    command.stdin(end()).stdout(end()).stderr(Stdio::piped());
    // SAFETY: setsid and ioctl are async-signal-safe; descriptor 0 is the terminal by then.
    unsafe {
        command.pre_exec(|| {
            libc::setsid();
            libc::ioctl(0, libc::TIOCSCTTY, 0);
            Ok(())
        });
    }
    let child = command.spawn().unwrap();
    let mut said = [0; 2];
    ours.read_exact(&mut said).unwrap();
    assert_eq!(&said, b"up");
    child
}

#[test]
fn ctrl_a_x_quits_and_the_terminal_is_as_it_was() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (mut ours, theirs) = terminal();
    let before = settings(&theirs);
    assert!(before.1, "a fresh terminal hands over lines");
    let child = in_terminal(dir.path(), &mut ours, &theirs);
    assert!(!settings(&theirs).1, "raw while the guest has it");
    ours.write_all(b"\x03\x01x").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", complaint(&output));
    assert_eq!(settings(&theirs), before);
}

#[test]
fn a_deadly_signal_gives_the_terminal_back() {
    if !has_kvm() {
        return;
    }
    for signal in [libc::SIGQUIT, libc::SIGSEGV, libc::SIGABRT] {
        let dir = tempfile::tempdir().unwrap();
        let (mut ours, theirs) = terminal();
        let before = settings(&theirs);
        let child = in_terminal(dir.path(), &mut ours, &theirs);
        send(&child, signal);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.signal(), Some(signal), "dies of the same signal: {}", complaint(&output));
        assert_eq!(settings(&theirs), before);
    }
}

#[test]
fn a_stopped_job_gives_the_terminal_back_until_it_goes_on() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (mut ours, theirs) = terminal();
    let before = settings(&theirs);
    let child = in_terminal(dir.path(), &mut ours, &theirs);
    send(&child, libc::SIGTSTP);
    let mut status = 0;
    // SAFETY: status is valid for writing; the child stays waitable, since only its stop is collected.
    let stopped = unsafe { libc::waitpid(child.id() as libc::pid_t, &raw mut status, libc::WUNTRACED) };
    assert_eq!(stopped, child.id() as libc::pid_t);
    assert!(libc::WIFSTOPPED(status), "{status:#x}");
    assert_eq!(settings(&theirs), before);
    send(&child, libc::SIGCONT);
    while settings(&theirs).1 {
        std::thread::yield_now();
    }
    ours.write_all(b"\x01x").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(6), "{}", complaint(&output));
    assert_eq!(settings(&theirs), before);
}
