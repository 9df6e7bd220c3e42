// SPDX-License-Identifier: Apache-2.0
//! What cannot run is refused: one line that says what, where and what to do, a status of its own, no panic, nothing lost.

use crate::lab::{Printed, script};

/// Asserts that the part `name` is one complaint with `words` in it and the status `status`.
#[track_caller]
fn refused(printed: &Printed, name: &str, status: u8, words: &[&str]) {
    let part = printed.part(name).trim_end();
    let lines: Vec<&str> = part.lines().collect();
    let [complaint, end] = lines[..] else { panic!("{name}: one line and a status, not {part:?}") };
    assert_eq!(end, format!("status {status}"), "{name}: {complaint}");
    assert!(complaint.starts_with("tare: "), "{name}: {complaint}");
    for word in words {
        assert!(complaint.contains(word), "{name}: '{word}' is not in '{complaint}'");
    }
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn bad_kernels_and_initrds() {
    let printed = script(
        r#"
cd /lab
echo "== missing"; refused --kernel /lab/nowhere
echo "== empty"; : >empty; refused --kernel /lab/empty
echo "== folder"; refused --kernel /lab
echo "== text"; cp /etc/os-release text; refused --kernel /lab/text
echo "== cut short"; head -c 100000 vmlinuz >short; refused --kernel /lab/short
echo "== noise"; head -c 1000000 /dev/urandom >noise; refused --kernel /lab/noise
echo "== no initrd"; refused --kernel /lab/vmlinuz --initrd /lab/nowhere
echo "== initrd too large"; truncate -s 600M large; refused --kernel /lab/vmlinuz --initrd /lab/large --memory 512M
"#,
        &[],
    );
    refused(&printed, "missing", 2, &["/lab/nowhere"]);
    for (name, path) in
        [("empty", "/lab/empty"), ("text", "/lab/text"), ("cut short", "/lab/short"), ("noise", "/lab/noise")]
    {
        refused(&printed, name, 2, &[path]);
    }
    refused(&printed, "folder", 2, &["/lab"]);
    refused(&printed, "no initrd", 2, &["/lab/nowhere"]);
    refused(&printed, "initrd too large", 2, &["--memory"]);
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn bad_disks() {
    let printed = script(
        r#"
cd /lab
run() { refused --kernel /lab/vmlinuz --disk "$@"; }
echo "== missing"; run path=/lab/nowhere
echo "== folder"; run path=/lab
echo "== empty"; : >empty; run path=/lab/empty
echo "== odd key"; run path=/lab/root.ext4,colour=red
mkdir -p locked; mount -t tmpfs small locked; truncate -s 1M locked/disk; mount -o remount,ro locked
echo "== read-only place"; run path=/lab/locked/disk
truncate -s 1M used
tare run --kernel /lab/vmlinuz --disk path=/lab/used --cmdline "console=hvc0 panic=0" </dev/null >first 2>&1 &
first=$!
sleep 3
echo "== in use"; run path=/lab/used
kill -9 $first
wait $first
echo "== end"
"#,
        &[],
    );
    refused(&printed, "missing", 2, &["/lab/nowhere"]);
    refused(&printed, "folder", 2, &["/lab"]);
    refused(&printed, "empty", 2, &["/lab/empty"]);
    refused(&printed, "odd key", 2, &["colour"]);
    refused(&printed, "read-only place", 2, &["/lab/locked/disk", "readonly=on"]);
    refused(&printed, "in use", 2, &["/lab/used"]);
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn more_than_there_is_and_no_kvm() {
    let printed = script(
        r#"
cd /lab
echo "== vcpus"; refused --kernel vmlinuz --cpus 65
echo "== memory"; refused --kernel vmlinuz --memory 4T
echo "== config"; printf 'kernel = "vmlinuz"\ncolour = "red"\n' >vm.toml; refused --config vm.toml
echo "== flag"; refused --kernal vmlinuz
mv /dev/kvm /dev/kvm.away
echo "== no kvm"; refused --kernel vmlinuz
mv /dev/kvm.away /dev/kvm; chmod 600 /dev/kvm; chmod 755 /lab /lab/bin; chmod 644 vmlinuz
echo "== not allowed"
setpriv --reuid 65534 --regid 65534 --clear-groups env PATH=$PATH timeout 60 tare run --kernel /lab/vmlinuz </dev/null 2>&1
echo "status $?"
"#,
        &[],
    );
    refused(&printed, "vcpus", 2, &["65", "64"]);
    refused(&printed, "memory", 2, &["--memory"]);
    refused(&printed, "config", 2, &["vm.toml", "colour"]);
    refused(&printed, "flag", 2, &["--kernal", "--kernel"]);
    refused(&printed, "no kvm", 3, &["/dev/kvm"]);
    refused(&printed, "not allowed", 3, &["/dev/kvm", "kvm"]);
}
