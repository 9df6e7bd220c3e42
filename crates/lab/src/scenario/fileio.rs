// SPDX-License-Identifier: Apache-2.0
//! Suite `fileio`: a second disk under fio, for what a disk format adds. The disk is a fresh qcow2 image of three regions,
//! so that one boot meets every ground an allocating write can find: data of a backing file, zero clusters above such
//! data, and nothing at all past that file's end. Subjects that name `{raw}` get a raw file with the same content.
//!
//! An allocating write is 4 KiB into a 64 KiB cluster, one write for each cluster.

use super::{Bundle, Kind, Step};
use crate::sample::quote;
use crate::sysbench::Test;

/// The disk's images in a sample's scratch directory.
pub const QCOW2: &str = "data.qcow2";
pub const RAW: &str = "data.raw";
const BACKING: &str = "backing.raw";

/// The second disk of a bundle: three regions of so many MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Disk {
    region_mib: u64,
}

impl Disk {
    /// With data in the first region only, where the template names `{raw}`.
    pub fn of(region_mib: u64) -> Self {
        Self { region_mib }
    }

    /// Shell commands that make the image a template asks for, in directory `scratch`. They need qemu-utils.
    pub fn prepare(self, scratch: &str, qcow2: bool) -> String {
        let path = |name: &str| quote(&format!("{scratch}/{name}"));
        let (mib, last) = (self.region_mib, 3 * self.region_mib);
        let data = |file: &str, regions: u64| format!("yes tare | head -c {}M >{file}", regions * mib);
        let raw = path(RAW);
        if !qcow2 {
            return format!("{} && truncate -s {last}M {raw}", data(&raw, 1));
        }
        let image = path(QCOW2);
        format!(
            "{} && qemu-img create -q -f qcow2 -b {BACKING} -F raw {image} {last}M && qemu-io -f qcow2 -c 'write -z {mib}M {mib}M' {image}",
            data(&path(BACKING), 2)
        )
    }
}

/// The bundle of the suite.
pub fn bundles(scale: f64) -> Vec<Bundle> {
    let mib = (512.0 * scale).round().max(4.0) as u64;
    let fio = |rest: String| {
        format!("fio --name=x --filename=/dev/vdb --minimal --thread --direct=1 --ioengine=libaio --iodepth=16 {rest}")
    };
    // One region: 4 KiB, then 60 KiB left out, so the writes together are a sixteenth of it.
    let allocate = |region: u64| {
        let kib = mib * 1024 / 16;
        fio(format!("--rw=write:60k --bs=4k --offset={}M --size={mib}M --io_size={kib}k", region * mib))
    };
    let step = |workload, mark, command| Step { workload, mark, test: Test::Fio, command, after: "sync" };
    let small = mib * 1024 / 16;
    let steps = vec![
        step("allocate over nothing", "nothing", allocate(2)),
        step("allocate over zeroes", "zeroes", allocate(1)),
        step("allocate over data", "data", allocate(0)),
        step(
            "rewrite",
            "rewrite",
            fio(format!("--rw=write:60k --bs=4k --offset={}M --size={mib}M --io_size={small}k", 2 * mib)),
        ),
        step(
            "rndrw",
            "rndrw",
            fio(format!(
                "--rw=randrw --rwmixread=60 --bs=16k --fsync=100 --size={}M --io_size={}k",
                3 * mib,
                mib * 512
            )),
        ),
    ];
    let limit_seconds = 40 + (400.0 * scale) as u64;
    vec![Bundle {
        name: "qcow2",
        kind: Kind::Work(steps),
        memory_mib: 512,
        limit_seconds,
        disk: Some(Disk { region_mib: mib }),
        net: None,
    }]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn every_cluster_of_a_region_gets_one_write() {
        let text = format!("{:?}", bundles(0.125));
        for part in ["--offset=128M --size=64M --io_size=4096k", "--offset=64M --size", "--offset=0M --size"] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }

    #[test]
    fn the_image_has_its_three_regions() {
        if !crate::facts::installed("qemu-img") || !crate::facts::installed("qemu-io") {
            println!("skipped: qemu-img is not installed");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let scratch = dir.path().to_str().unwrap();
        let disk = Disk { region_mib: 1 };
        for qcow2 in [true, false] {
            let made = std::process::Command::new("sh").args(["-c", &disk.prepare(scratch, qcow2)]).output().unwrap();
            assert!(made.status.success(), "{made:?}");
        }
        let map = std::process::Command::new("qemu-img")
            .args(["map", "--output=json", "-f", "qcow2"])
            .arg(dir.path().join(QCOW2))
            .output()
            .unwrap();
        let map: Vec<serde_json::Value> = serde_json::from_slice(&map.stdout).unwrap();
        let what: Vec<_> =
            map.iter().map(|e| (e["start"].as_u64(), e["depth"].as_u64(), e["zero"].as_bool())).collect();
        let mib = |n: u64| Some(n << 20);
        assert_eq!(what[0], (mib(0), Some(1), Some(false)), "{map:?}");
        assert!(what.contains(&(mib(1), Some(0), Some(true))), "{map:?}");
        assert_eq!(std::fs::metadata(dir.path().join(RAW)).unwrap().len(), 3 << 20);
    }
}
