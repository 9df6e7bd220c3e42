// SPDX-License-Identifier: Apache-2.0
//! Bad input: each kind gets one line on standard error saying what, where and what to do, its exit code, and no panic.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use common::{Guest, has_kvm, refuses, tare};

const USAGE: i32 = 2;
const MONITOR: i32 = 3;
/// The unprivileged user.
const NOBODY: u32 = 65534;

/// Whether files' modes are no obstacle to these tests.
fn is_superuser() -> bool {
    // SAFETY: no pointers.
    unsafe { libc::geteuid() == 0 }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A folder with a good kernel, a good disk and what `make` adds.
struct Place {
    dir: tempfile::TempDir,
    kernel: String,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let kernel = text(&Guest::Say("").write(dir.path())).to_owned();
        File::create(dir.path().join("good.raw")).unwrap().set_len(1 << 20).unwrap();
        Self { dir, kernel }
    }

    fn path(&self, name: &str) -> String {
        text(&self.dir.path().join(name)).to_owned()
    }

    fn file(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.path(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    /// `tare run` with this kernel and these further arguments.
    fn run(&self, args: &[&str]) -> Command {
        let mut command = tare(&["run", "--kernel", &self.kernel]);
        command.args(args);
        command
    }

    /// The same as an unprivileged user, whatever this user is; the binary and the folder are made reachable.
    fn run_unprivileged(&self, args: &[&str]) -> Command {
        if !is_superuser() {
            return self.run(args);
        }
        let binary = self.path("tare");
        // Copied by another process: a child that another test starts meanwhile would inherit a descriptor that writes to it,
        // and for as long as there is one the copy can't be executed (ETXTBSY).
        let copied = Command::new("cp").args([common::TARE, &binary]).status().unwrap();
        assert!(copied.success());
        fs::set_permissions(self.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new(binary);
        command.args(["run", "--kernel", &self.kernel]).args(args).stdin(std::process::Stdio::null());
        // The node's group, so that KVM is no obstacle where its mode is the usual 0660.
        command.uid(NOBODY).gid(fs::metadata("/dev/kvm").map_or(NOBODY, |node| node.gid()));
        command
    }
}

#[test]
fn no_command_and_unknown_ones() {
    refuses(&mut tare(&[]), USAGE, "no command");
    refuses(&mut tare(&["walk"]), USAGE, "unknown command `walk`");
    refuses(&mut tare(&["--kernel", "k"]), USAGE, "did you mean `tare run --kernel`?");
    refuses(&mut tare(&["doctor", "--yaml"]), USAGE, "unknown flag --yaml");
    refuses(&mut tare(&["run"]), USAGE, "no kernel");
}

#[test]
fn flags_that_cannot_be_read() {
    let place = Place::new();
    for (args, needle) in [
        (&["--memory", "lots"][..], "`lots` is not a size: --memory;"),
        (&["--memory", "1K"], "1K is too little: memory;"),
        (&["--memory", "16777217"], "not a multiple of 4K: memory;"),
        (&["--cpus", "0"], "0 virtual CPUs can't be made: cpus;"),
        (&["--cpus", "65"], "65 virtual CPUs can't be made: cpus; ask for 1 to 64"),
        (&["--cpus", "4,sockets=3"], "4 CPUs can't be split into 3 sockets: cpus; choose sockets, cores and threads"),
        (
            &["--cpus", "8,sockets=2,cores=3,threads=2"],
            "8 CPUs can't be split into 2 sockets, 3 cores a socket, 2 threads",
        ),
        (&["--cpus", "2", "--cpu-pin", "0-2"], "3 host CPUs for 2 vCPUs: cpu-pin; list one for each"),
        (&["--cpu-pin", "1:0"], "there is no vCPU 1: cpu-pin; the first is 0"),
        (&["--cpu-pin", "0:x"], "`0:x` is not a host CPU for each vCPU: --cpu-pin; write a list such as 2-5"),
        (&["--cpu", "Nehalem"], "`Nehalem` is not a CPU model: --cpu; write host, then -NAME"),
        (&["--cpu", "host,-avx51"], "`avx51` is not a CPU feature: --cpu; did you mean avx512f,"),
        (&["--cpu", "host,-avx,+avx2"], "`avx2` needs `avx`, which is taken away: --cpu; take +avx2 or -avx out"),
        (&["--cpu", "host,-lm"], "no 64-bit guest starts without `lm`: --cpu;"),
        (&["--halt-poll", "1ms"], "`1ms` is not a number of nanoseconds: --halt-poll;"),
        (&["--halt-poll", "2000000000"], "2000000000 ns are too long: halt-poll; ask for at most 1000000000"),
        (&["--halt-poll", "0", "--disable-exits", "hlt"], "no halt to poll before: halt-poll; take it out"),
        (&["--disable-exits", "hlt,nap"], "`nap` is not an exit that can be left out: --disable-exits; use hlt, pause"),
        (&["--disk", "a,colour=red"], "unknown key `colour`: --disk; the keys are path, format,"),
        (&["--disk", "a,readonly=perhaps"], "`perhaps` is not on or off: --disk.readonly; use on or off"),
        (&["--disk", "a,format=vmdk"], "`vmdk` is not a disk format: --disk.format; use raw or qcow2"),
        (&["--disk", "a,serial=123456789012345678901"], "disk.serial; use at most 20"),
        (&["--console", "teletype"], "`teletype` is not a console: --console; use virtio, serial or none"),
        (&["--bogus"], "unknown flag --bogus"),
    ] {
        refuses(&mut place.run(args), USAGE, needle);
    }
    refuses(&mut place.run(&["--cmdline", "a\nb"]), USAGE, "cmdline; write it on one line");
}

#[test]
fn configs() {
    let place = Place::new();
    let with = |config: &str| tare(&["run", "--config", config]);
    refuses(&mut with(&place.path("none.toml")), USAGE, "config can't be read, No such file or directory: ");
    refuses(&mut with(text(place.dir.path())), USAGE, "config can't be read, ");
    refuses(&mut with(&place.file("bytes.toml", b"\xff\xfe")), USAGE, "config can't be read, ");
    refuses(&mut with(&place.file("cut.toml", b"kernel = \"vmli")), USAGE, "cut.toml line 1: ");
    refuses(
        &mut with(&place.file("key.toml", b"kernel = 'k'\ncolour = 1\n")),
        USAGE,
        "key.toml line 2: unknown field `colour`",
    );
    refuses(&mut with(&place.file("kind.toml", b"kernel = 'k'\n\nmemory = [1]\n")), USAGE, "kind.toml line 3: ");
    refuses(
        &mut with(&place.file("size.toml", b"kernel = 'k'\nmemory = '12Q'\n")),
        USAGE,
        "size.toml line 2: `12Q` is not a size",
    );
    refuses(
        &mut with(&place.file("disk.toml", b"kernel = 'k'\n[[disk]]\npath = 'd'\nro = true\n")),
        USAGE,
        "disk.toml line 4: unknown field `ro`",
    );
}

#[test]
fn no_kvm() {
    let place = Place::new();
    refuses(&mut place.run(&["--kvm", "/nonexistent/kvm"]), MONITOR, "/nonexistent/kvm");
    refuses(&mut place.run(&["--kvm", "/dev/null"]), MONITOR, "KVM");
    let closed = place.file("kvm", b"");
    fs::set_permissions(&closed, fs::Permissions::from_mode(0o000)).unwrap();
    refuses(&mut place.run_unprivileged(&["--kvm", &closed]), MONITOR, "ermission denied");
}

/// No process may run on the last CPU that there could be.
#[test]
fn host_cpus_that_cannot_be_had() {
    if !has_kvm() {
        return;
    }
    let place = Place::new();
    let needle = "vCPU 0 can't be on host CPU 8191: --cpu-pin; this process may use ";
    refuses(&mut place.run(&["--cpu-pin", "8191"]), USAGE, needle);
    refuses(&mut place.run(&["--cpu-pin", "0:8191-65535"]), USAGE, needle);
}

/// No processor has both of these: one is Intel's, the other AMD's.
#[test]
fn features_that_the_host_cannot_give() {
    if !has_kvm() {
        return;
    }
    let needle =
        ["`serialize`: --cpu; take +serialize out (`tare doctor`", "`sse4a`: --cpu; take +sse4a out (`tare doctor`"];
    let output = Place::new().run(&["--cpu", "+serialize,+sse4a"]).output().unwrap();
    let said = common::complaint(&output);
    assert_eq!(output.status.code(), Some(USAGE), "{said}");
    assert!(said.starts_with("tare: this host's KVM can't give a guest ") && said.lines().count() == 1, "{said}");
    assert!(needle.iter().any(|n| said.contains(n)), "{said}");
    let mwait = "can't give a guest `monitor`: --cpu; add --disable-exits mwait";
    refuses(&mut Place::new().run(&["--cpu", "+monitor"]), USAGE, mwait);
}

#[test]
fn kernels() {
    if !has_kvm() {
        return;
    }
    let place = Place::new();
    let with = |kernel: &str| tare(&["run", "--kernel", kernel]);
    let good = Guest::Say("").elf();
    refuses(&mut with(&place.path("none")), USAGE, &place.path("none"));
    refuses(&mut with(text(place.dir.path())), USAGE, text(place.dir.path()));
    refuses(&mut with(&place.file("empty", b"")), USAGE, &place.path("empty"));
    refuses(&mut with(&place.file("text", &b"#!/bin/sh\n".repeat(500))), USAGE, &place.path("text"));
    for cut in [4, 63, 64, 100, good.len() - 1] {
        refuses(&mut with(&place.file("cut", &good[..cut])), USAGE, &place.path("cut"));
    }
    // A bzImage's marks and nothing that they promise.
    let mut bz = vec![0u8; 4096];
    bz[0x1f1] = 4;
    bz[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
    bz[0x202..0x206].copy_from_slice(b"HdrS");
    refuses(&mut with(&place.file("bz", &bz)), USAGE, &place.path("bz"));
    let mut high = good.clone();
    high[64 + 24..64 + 32].copy_from_slice(&u64::MAX.to_le_bytes());
    refuses(&mut with(&place.file("high", &high)), USAGE, &place.path("high"));
}

#[test]
fn initrds() {
    if !has_kvm() {
        return;
    }
    let place = Place::new();
    refuses(&mut place.run(&["--initrd", &place.path("none")]), USAGE, &place.path("none"));
    refuses(&mut place.run(&["--initrd", text(place.dir.path())]), USAGE, text(place.dir.path()));
    let huge = place.path("huge");
    File::create(&huge).unwrap().set_len(1 << 30).unwrap();
    refuses(&mut place.run(&["--memory", "64M", "--initrd", &huge]), USAGE, "--memory");
}

#[test]
fn disks() {
    if !has_kvm() {
        return;
    }
    let place = Place::new();
    let with = |disk: &str| place.run(&["--disk", disk]);
    refuses(&mut with(&place.path("none")), USAGE, &place.path("none"));
    refuses(&mut with(text(place.dir.path())), USAGE, text(place.dir.path()));
    refuses(&mut with(&place.file("empty", b"")), USAGE, &place.path("empty"));
    refuses(&mut with("/dev/null"), USAGE, "/dev/null");
    let good = place.path("good.raw");
    refuses(&mut place.run(&["--disk", &good, "--disk", &good]), USAGE, "given twice");
}

#[test]
fn a_read_only_disk_asked_for_writing() {
    let mode = fs::metadata("/dev/kvm").map_or(0, |node| node.mode());
    if !has_kvm() {
        return;
    }
    if is_superuser() && mode & 0o060 != 0o060 && mode & 0o006 != 0o006 {
        println!("skipped: /dev/kvm is the superuser's alone, whom a disk's mode does not stop");
        return;
    }
    let place = Place::new();
    let disk = place.path("good.raw");
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o444)).unwrap();
    let mut command = place.run_unprivileged(&["--disk", &disk]);
    refuses(&mut command, USAGE, &disk);
}

#[test]
fn more_than_the_host_has() {
    if !has_kvm() {
        return;
    }
    refuses(&mut Place::new().run(&["--memory", "16T"]), USAGE, "--memory");
}

#[test]
fn places_that_cannot_be_written() {
    let place = Place::new();
    refuses(&mut place.run(&["--ledger", "/nonexistent/out.json"]), USAGE, "/nonexistent/out.json");
    refuses(&mut place.run(&["--ledger", text(place.dir.path())]), USAGE, "it is a folder");
    refuses(&mut place.run(&["--pidfile", "/nonexistent/pid"]), USAGE, "/nonexistent/pid");
}

#[test]
fn a_disk_in_use() {
    if !has_kvm() {
        return;
    }
    let place = Place::new();
    let disk = place.path("good.raw");
    let kernel = Guest::Hang("here").write(place.dir.path());
    let args = ["run", "--kernel", text(&kernel), "--console", "serial", "--disk", &disk];
    let mut first = tare(&args).stdout(std::process::Stdio::piped()).spawn().unwrap();
    // The guest talks, so its disk is open.
    std::io::Read::read_exact(first.stdout.as_mut().unwrap(), &mut [0; 4]).unwrap();
    refuses(&mut tare(&args), USAGE, &format!("{disk}: in use"));
    let read_only = format!("{disk},readonly=on");
    refuses(&mut place.run(&["--disk", &read_only]), USAGE, "in use");
    first.kill().unwrap();
    first.wait().unwrap();
}
