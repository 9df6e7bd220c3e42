// SPDX-License-Identifier: Apache-2.0
//! Disks in a real guest: what is written stays written, what is not to be written is not, and a full host is an I/O error.

use crate::lab::script;

#[test]
#[ignore = "needs the lab: make e2e"]
fn what_the_guest_writes_is_there_afterwards_and_the_file_system_is_clean() {
    let printed = script(
        r#"
for mode in writeback,aio=io_uring writeback,aio=threads none; do
    echo "== $mode"
    guest "$ROOT;dd if=/dev/urandom of=/mnt/data bs=64k count=64 2>/dev/null;sync;sha256sum /mnt/data;umount /mnt/*;umount /mnt;$OFF" \
        --disk "path=/lab/root.ext4,cache=$mode"
    debugfs -R "dump /data /lab/data" /lab/root.ext4 2>/dev/null
    echo "here $(sha256sum </lab/data)"
    e2fsck -fn /lab/root.ext4 >/lab/fsck 2>&1
    echo "fsck $?"
done
"#,
        &[],
    );
    for mode in ["writeback,aio=io_uring", "writeback,aio=threads", "none"] {
        let part = printed.part(mode);
        let sum =
            |end: &str| part.lines().find_map(|line| line.strip_suffix(end)).map(|sum| sum.trim_start_matches("here "));
        let inside = sum("  /mnt/data").unwrap_or_else(|| panic!("no sum: {printed:#?}"));
        assert_eq!(Some(inside), sum("  -"), "{part}");
        assert!(part.contains("status 0") && part.contains("fsck 0"), "{part}");
    }
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_read_only_disk_is_read_only_and_unchanged() {
    let printed = script(
        r#"
truncate -s 64M /lab/second.raw
mkfs.ext4 -q /lab/second.raw
before=$(sha256sum </lab/second.raw)
guest "cat /sys/block/vda/ro;echo x >/dev/vda || echo refused;blockdev --setrw /dev/vda;echo x >/dev/vda || echo refused;$OFF" \
    --disk path=/lab/second.raw,readonly=on
[ "$before" = "$(sha256sum </lab/second.raw)" ] && echo unchanged
"#,
        &[],
    );
    printed.shows("1\n").shows("refused").shows("status 0").shows("unchanged");
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_full_host_disk_is_an_io_error_for_the_guest_and_no_end() {
    let printed = script(
        r#"
mkdir -p /lab/small
mount -t tmpfs -o size=24m small /lab/small
truncate -s 256M /lab/small/disk.raw
guest "dd if=/dev/zero of=/dev/vda bs=1M count=100 oflag=direct && echo all written;dd if=/dev/vda of=/dev/null bs=1M count=8 && echo still reads;$OFF" \
    --disk path=/lab/small/disk.raw
"#,
        &[],
    );
    printed.shows("I/O error").shows("still reads").shows("status 0");
    assert!(!printed.stdout.contains("all written"), "{printed:#?}");
}
