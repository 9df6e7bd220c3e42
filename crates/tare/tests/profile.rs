// SPDX-License-Identifier: Apache-2.0
//! `tare profile` as its users run it: the graph has tare's own phases always, and stacks where the kernel gives them.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;

use common::{Guest, complaint, has_kvm, refuses, tare};

/// A frame of a graph: its time in milliseconds.
fn frame(svg: &str, name: &str) -> Option<f64> {
    let (_, after) = svg.split_once(&format!("<title>{name} ("))?;
    after.split_once(" ms,")?.0.parse().ok()
}

#[test]
fn a_graph_has_phases_always_and_stacks_where_they_can_be_had() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (kernel, out) = (Guest::Say("hello").write(dir.path()), dir.path().join("out.svg"));
    for stacks in ["auto", "off"] {
        let output =
            tare(&["profile", "--out", out.to_str().unwrap(), "--rate", "4000", "--stacks", stacks, "--", "run"])
                .args(["--kernel", kernel.to_str().unwrap(), "--console", "serial"])
                .args(["--memory", "256M,pages=4K,prealloc=parallel,prealloc-threads=2"])
                .output()
                .unwrap();
        let said = complaint(&output);
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(0), &b"hello"[..]), "{said}");
        let svg = fs::read_to_string(&out).unwrap();
        let ms = |name: &str| frame(&svg, name).unwrap_or_else(|| panic!("no {name} in {svg}"));
        let memory = ms("virtual machine and its memory");
        assert!(ms("fault and zero") <= memory && memory <= ms("phases, by the clock"), "{svg}");
        assert!(svg.contains("to the guest's first instruction") && !svg.contains("the guest runs"));
        if stacks == "off" || said.contains("phases alone") {
            assert_eq!(ms("tare"), ms("phases, by the clock"));
            assert!(!svg.contains("CPU time, by thread") && said.lines().count() <= 1, "{said}");
        } else if !said.contains("were lost") {
            // 256 MiB in small pages take one of these threads longer than a sample, on any machine.
            assert!(frame(&svg, "ready-0").or(frame(&svg, "ready-1")).is_some(), "{svg}");
            assert!(svg.contains("mem::prealloc::Prealloc::"), "{svg}");
        }
    }
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "nothing else is left: {left:?}");
}

#[test]
fn what_can_not_be_profiled_is_one_line() {
    let run = ["--", "run", "--kernel", "/dev/null"];
    refuses(tare(&["profile"]).args(run), 2, "no --out FILE");
    refuses(tare(&["profile", "--out", "/nonexistent/o.svg"]).args(run), 2, "profile can't be written");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.svg");
    let (out_arg, kernel) = (out.to_str().unwrap(), dir.path().join("none"));
    refuses(
        tare(&["profile", "--stacks", "off", "--out", out_arg, "--", "run", "--kernel"])
            .arg(&kernel)
            .args(["--memory", "1M"]),
        2,
        "memory",
    );
    assert!(!out.exists(), "a machine that did not start has no profile");
}
