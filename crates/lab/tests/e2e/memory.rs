// SPDX-License-Identifier: Apache-2.0
//! Guest memory in a real guest: plugged and unplugged while it runs.

use crate::lab::script;

/// The stock kernel with the driver of the memory device.
const PREPARE: &str = r#"
mkdir -p /lab/stock
mount -o loop,ro /lab/root.ext4 /lab/stock
pack_initrd /lab/small.img $(modprobe -d /lab/stock -S "$(uname -r)" --show-depends -a \
    virtio_pci virtio_mmio virtio_blk virtio_console virtio_net virtio_mem | awk '$1 == "insmod" && !seen[$2]++ { print $2 }')
umount /lab/stock
# says WORD: waits, not for ever, until the guest has said it.
says() { for _ in $(seq 500); do grep -q "$1" /lab/out && return; sleep 0.2; done; }
# In a guest: says what it has, then waits until it has at least (at most) so many MiB.
HAS='h(){ a=$(sed -n s/MemTotal:.//p /proc/meminfo);set -- $a;echo $(($1/1024)); }'
GROWN='more(){ until [ $(h) -ge $1 ];do sleep 0.2;done;echo grown; }'
SHRUNK='less(){ until [ $(h) -le $1 ];do sleep 0.2;done;echo shrunk; }'
"#;

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_guest_grows_and_shrinks_and_sees_it() {
    let printed = script(
        &format!(
            "{PREPARE}{}",
            r#"
for transport in pci mmio; do
    rm -f /lab/asked
    (
        ctl() { tare ctl --api /lab/api "$@"; echo "ctl $?"; }
        says first
        ctl resize-memory --size 768M
        says grown
        ctl info
        says filled
        ctl resize-memory --size 320M
        says shrunk
        ctl info
        ctl resize-memory --size 1G 2>&1
        ctl resize-memory --size 128M 2>&1
        ctl resize-memory --size 257M 2>&1
    ) >/lab/asked &
    FILL='mount -t tmpfs -o size=90% t /mnt;dd if=/dev/zero of=/mnt/f bs=1M count=400 2>/dev/null && echo filled;rm /mnt/f;'
    MEMORY=256M,hotplug=512M guest "$HAS;$GROWN;$SHRUNK;echo first \$(h);more 620;$FILL less 300;sleep 3;echo last \$(h);$OFF" \
        --transport $transport --api /lab/api >/lab/out
    wait
    echo "== $transport"
    cat /lab/out /lab/asked
done
"#
        ),
        &[],
    );
    for transport in ["pci", "mmio"] {
        let part = printed.part(transport);
        let number = |name: &str| -> u64 {
            let line = part.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|n| n.parse().ok()).unwrap_or_else(|| panic!("no {name} in {printed:#?}"))
        };
        assert!(number("first") < 256 && number("last") <= 320, "{part}");
        assert!(part.contains("grown") && part.contains("filled") && part.contains("shrunk"), "{part}");
        assert!(part.contains("status 0"), "{part}");
        let actual: Vec<&str> = part.lines().filter_map(|l| l.trim().strip_prefix("\"memory_actual\": ")).collect();
        assert_eq!(actual.first(), Some(&"805306368,"), "{part}");
        assert!(part.contains("\"memory_most\": 805306368"), "{part}");
        for refused in ["at most 512 MiB can be plugged", "256 MiB of its memory stay", "blocks of 2 MiB"] {
            assert!(part.contains(refused), "{refused} is not in {part}");
        }
    }
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_guest_starts_with_a_part_and_ends_with_all_of_its_memory() {
    let printed = script(
        &format!(
            "{PREPARE}{}",
            r#"
mkdir -p /lab/www
head -c 32M /dev/urandom >/lab/www/blob
ip tuntap add tap0 mode tap vnet_hdr
ip addr add 10.0.6.1/24 dev tap0
ip link set tap0 up
busybox httpd -p 10.0.6.1:80 -h /lab/www
# What comes in by then lies in memory that was not there at first: the kernel's own, in the highest zone.
GET='ip addr add 10.0.6.2/24 dev eth0;ip link set eth0 up;echo got $(wget -qO- http://10.0.6.1/blob | sha256sum)'
MEMORY=1G,prealloc=background,boot=256M guest "$HAS;$GROWN;echo first \$(h);more 880;$GET;$OFF" --ledger /lab/ledger \
    --net tap=tap0,vhost=on
grep -E '"(ready|prealloc)"' /lab/ledger
echo "sent $(sha256sum </lab/www/blob)"
"#
        ),
        &[],
    );
    printed.shows("grown").shows("status 0").shows("\"ready\": 1073741824");
    let sum = |name: &str| {
        let line = printed.stdout.lines().find_map(|line| line.trim().strip_prefix(name));
        line.and_then(|sum| sum.split_ascii_whitespace().next()).map(str::to_owned)
    };
    assert!(sum("sent ").is_some() && sum("got ") == sum("sent "), "{printed:#?}");
    assert!(!printed.stderr.contains("vhost"), "the host's kernel serves: {printed:#?}");
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_guest_sees_its_numa_nodes() {
    let printed = script(
        r#"
LOOK='cd /sys/devices/system/node;for n in node*;do set -- $(grep MemTotal $n/meminfo);echo $n cpus $(cat $n/cpulist)'
LOOK="$LOOK"' distance $(cat $n/distance) mib $(($4/1024));done'
MEMORY=512M,nodes=2,host-nodes=0:0 guest "$LOOK;dmesg | grep -c WARNING;$OFF" --cpus 4,sockets=2
"#,
        &[],
    );
    printed.shows("status 0").shows("node0 cpus 0-1 distance 10 20 mib ").shows("node1 cpus 2-3 distance 20 10 mib ");
    for line in printed.stdout.lines().filter(|line| line.starts_with("node")) {
        let mib: u64 = line.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        assert!((200..=256).contains(&mib), "{printed:#?}");
    }
}
