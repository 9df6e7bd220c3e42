// SPDX-License-Identifier: Apache-2.0
//! A stock Debian whose root is a qcow2 over a backing file, and whose monitor is killed in the middle of the guest's writes.

use crate::lab::script;

/// The first boot's work, as the guest's shell reads it from a disk of its own.
const FIRST: &str = r#"
fio $JOB --name=whole --filename=whole --size=4M --do_verify=1 --end_fsync=1 >/dev/null && echo "whole: verified"
: >blocks
sync
fio $JOB --name=cut --filename=cut --size=16M --fsync=8 --time_based --runtime=10000 >/dev/null &
n=0
while :; do
    n=$((n + 1))
    yes "block $n" | dd of=blocks bs=64k count=1 seek=$n iflag=fullblock conv=notrunc,fsync 2>/dev/null && echo "synced $n"
done
"#;

/// The second boot's; `LAST` is the last number that the first one printed.
const SECOND: &str = r#"
fio $JOB --name=whole --filename=whole --size=4M --verify_only >/dev/null && echo "whole: still verified"
n=0 intact=0
while [ $n -lt $LAST ]; do
    n=$((n + 1))
    dd if=blocks of=/run/there bs=64k skip=$n count=1 2>/dev/null
    yes "block $n" | head -c 65536 | cmp -s - /run/there && intact=$((intact + 1))
done
echo "intact: $intact of $LAST"
fio $JOB --name=again --filename=again --size=4M --do_verify=1 --end_fsync=1 >/dev/null && echo "again: verified"
echo "file system errors: $(dmesg | grep -c 'EXT4-fs error')"
sync
echo o >/proc/sysrq-trigger
sleep 60
"#;

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_debian_on_qcow2_survives_the_sigkill_of_its_monitor() {
    let text = r#"
JOB="--thread --ioengine=libaio --iodepth=8 --direct=1 --bs=4k --rw=randwrite --verify=crc32c --verify_fatal=1 --verify_state_save=0 --minimal"
# work FILE LINE...: a script as a disk, its length a whole number of sectors.
work() {
    file=$1
    shift
    { printf '%s\n' "$@"; head -c 4096 /dev/zero | tr '\0' '\n'; } >$file.text
    head -c $((($(stat -c %s $file.text) / 512) * 512)) $file.text >$file
}
HEAD='mount -t proc p /proc;mount -t sysfs s /sys;mount -t tmpfs t /run;cd /var/tmp'
# boot FILE: the stock kernel, its own initrd and its own root on the overlay; FILE is what its shell does.
boot() {
    exec tare run --kernel /lab/vmlinuz --initrd /lab/initrd.img --cpus 1 --memory 512M --disk path=/lab/over.qcow2,format=qcow2 \
        --disk path=$1,readonly=on --console serial --cmdline 'console=ttyS0 quiet root=/dev/vda rw init=/bin/sh -- /dev/vdb' </dev/null
}
checked() {
    tare img check /lab/over.qcow2 >/lab/said 2>&1
    echo "tare $?"
    cat /lab/said
    qemu-img check -f qcow2 /lab/over.qcow2 >/lab/said 2>&1
    echo "qemu $?"
    cat /lab/said
}
before=$(stat -c '%s %b %Y %Z' /lab/root.ext4)
tare img create -q -f qcow2 -b root.ext4 -F raw /lab/over.qcow2
echo "== first"
work /lab/first.work "$HEAD" "JOB='$JOB'" "$FIRST"
boot /lab/first.work >/lab/first.out 2>&1 &
tare=$!
for i in $(seq 600); do
    grep -q "synced 24" /lab/first.out && break
    [ -d /proc/$tare ] || break
    sleep 0.1
done
kill -KILL $tare
wait $tare
echo "status $?"
last=$(tr -d '\r' </lab/first.out | sed -n 's/^.*synced \([0-9]*\)$/\1/p' | tail -n 1)
tail -n 40 /lab/first.out
echo
echo "last $last"
echo "== after the kill"
checked
echo "== second"
work /lab/second.work "$HEAD" "JOB='$JOB'" "LAST=$last" "$SECOND"
(boot /lab/second.work) 2>&1 &
tare=$!
(sleep 60; kill -KILL $tare 2>/dev/null) &
wait $tare
echo "status $?"
echo "== at the end"
checked
[ "$before" = "$(stat -c '%s %b %Y %Z' /lab/root.ext4)" ] && echo "nobody wrote to the backing file"
"#;
    let printed = script(&format!("FIRST='{FIRST}'\nSECOND='{}'\n{text}", SECOND.replace('\'', "'\\''")), &[]);
    let first = printed.part("first");
    // 128 and SIGKILL's number.
    assert!(first.contains("whole: verified") && first.contains("status 137"), "{printed:#?}");
    let last: u32 = first.lines().find_map(|l| l.strip_prefix("last ")).and_then(|n| n.parse().ok()).unwrap_or(0);
    assert!(last >= 24, "{first}");

    // Leaks (3) at worst, never corruption (2).
    for part in [printed.part("after the kill"), printed.part("at the end")] {
        for tool in ["tare", "qemu"] {
            let clean = [0, 3].iter().any(|code| part.contains(&format!("{tool} {code}\n")));
            assert!(clean, "{part}");
        }
    }
    let second = printed.part("second");
    let intact = format!("intact: {last} of {last}");
    for line in ["whole: still verified", &intact, "again: verified", "file system errors: 0", "status 0"] {
        assert!(second.contains(line), "'{line}' is not in {printed:#?}");
    }
    printed.shows("nobody wrote to the backing file");
}
