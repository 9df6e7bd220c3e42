// SPDX-License-Identifier: Apache-2.0
//! A stock Debian on a network: `user` through passt, a tap on a bridge and another that vhost-net serves, with servers in a
//! namespace of the test's own.

use serde_json::Value;

use crate::lab::{script, tare_lab};

/// Two namespaces: `near`, where tare runs, and `far`, with a DHCP server for the bridge, two DNS servers, a web server and a
/// sink that says what it got. passt takes its gateway's address for its own host, so the servers have others.
const SERVERS: &str = r#"
ip netns add near
ip netns add far
ip link add n0 netns near type veth peer name f0 netns far
ip link add n1 netns near type veth peer name f1 netns far
near() { ip netns exec near "$@"; }
far() { ip netns exec far "$@"; }
near ip link set lo up
far ip link set lo up
near ip addr add 192.0.2.2/24 dev n0
near ip link set n0 up
near ip route add default via 192.0.2.1
far ip addr add 192.0.2.1/24 dev f0
far ip link set f0 up
far ip addr add 198.51.100.1/32 dev lo
near ip link add br0 type bridge
near ip link set n1 master br0
near ip tuntap add tap0 mode tap vnet_hdr
near ip tuntap add tap1 mode tap vnet_hdr multi_queue
near ip link set tap0 master br0
near ip link set tap1 master br0
for port in n1 tap0 tap1 br0; do near ip link set $port up; done
far ip addr add 10.0.5.1/24 dev f1
far ip link set f1 up
mkdir -p /lab/www /etc/netns/near
echo nameserver 198.51.100.1 >/etc/resolv.conf
echo nameserver 198.51.100.1 >/etc/netns/near/resolv.conf
head -c 3000000 /dev/urandom >/lab/www/blob
dns() { far dnsmasq --conf-file=/dev/null --no-resolv --no-hosts --user=root --bind-interfaces --pid-file= --leasefile-ro "$@"; }
dns --listen-address=198.51.100.1 --address=/server.test/198.51.100.1 --except-interface=lo --interface=f0 2>/dev/null ||
    dns --listen-address=198.51.100.1 --address=/server.test/198.51.100.1
dns --interface=f1 --except-interface=lo --address=/inner.test/10.0.5.1 --dhcp-range=10.0.5.50,10.0.5.60,1h --dhcp-authoritative
far busybox httpd -p 80 -h /lab/www
far socat TCP-LISTEN:9000,fork,reuseaddr SYSTEM:'sha256sum >>/lab/sums' &
"#;

/// The guest's first program.
const GUEST: &str = r#"
mkdir -p /lab/extra
cat >/lab/extra/dhcp.sh <<'END'
case $1 in
bound)
    ip addr add $ip/$mask dev $interface
    [ -z "${mtu:-}" ] || ip link set $interface mtu $mtu
    [ -z "${router:-}" ] || ip route add default via ${router%% *}
    : >/mnt/etc/resolv.conf
    for server in $dns; do echo nameserver $server >>/mnt/etc/resolv.conf; done
    echo $interface has $ip
    ;;
esac
END
cat >/lab/extra/net.sh <<'END'
mount -t ext4 /dev/vda /mnt
for d in proc sys dev; do mount --bind /$d /mnt/$d; done
use() {
    ip link set $1 up
    udhcpc -i $1 -n -q -f -t 10 -O mtu -s /dhcp.sh 2>/dev/null
    echo "$1 finds $(chroot /mnt getent ahostsv4 $2 | sed -n '1s/ .*//p')"
    chroot /mnt /usr/lib/apt/apt-helper -o APT::Sandbox::User=root download-file http://$2/blob /tmp/$1 >/log 2>&1 || cat /log
    echo "$1 downloads $(sha256sum </mnt/tmp/$1)"
    nc $3 9000 </mnt/tmp/$1
    ip route del default 2>/dev/null
    ip addr flush dev $1
}
lost() {
    while [ "$(cat /sys/class/net/$1/carrier)" != 0 ]; do sleep 0.1; done
    echo $1 lost its link
}
sh -n /dhcp.sh && chmod +x /dhcp.sh
use eth1 inner.test 10.0.5.1
use eth2 inner.test 10.0.5.1
use eth0 server.test 198.51.100.1
echo UNPLUG
lost eth0
lost eth1
lost eth2
echo still here
sync
echo o >/proc/sysrq-trigger
sleep 60
END
chmod +x /lab/extra/*.sh
sed -i '1i#!/bin/sh' /lab/extra/dhcp.sh
mkdir -p /lab/stock
mount -o loop,ro /lab/root.ext4 /lab/stock
pack_initrd /lab/net.img $(modprobe -d /lab/stock -S "$(uname -r)" --show-depends -a \
    virtio_pci virtio_blk virtio_console virtio_rng virtio_net af_packet | awk '$1 == "insmod" && !seen[$2]++ { print $2 }')
umount /lab/stock
(cd /lab/extra && find . | busybox cpio -o -H newc 2>/dev/null) >>/lab/net.img
"#;

/// passt makes a root of its own, which it can't below the initial one: tare gets a root that is a mount.
const RUN: &str = r#"
mkdir -p /lab/top
near sh -c 'mount --rbind / /lab/top && cd /lab/top && mount --move . / && exec chroot . timeout -k 5 240 tare run \
    --kernel /lab/vmlinuz --initrd /lab/net.img --memory 256M --disk path=/lab/root.ext4 --ledger /lab/ledger.json \
    --net user --net tap,tap=tap0,mac=52:54:00:aa:bb:cc --net tap=tap1,vhost=on,queues=2 \
    --cmdline "console=tty0 console=hvc0 quiet panic=-1 -- /net.sh"' </dev/null >/lab/out 2>/lab/err &
run=$!
for i in $(seq 900); do grep -q UNPLUG /lab/out && break; kill -0 $run 2>/dev/null || break; sleep 0.2; done
pgrep -a passt
pkill -KILL passt
near ip link del tap0
near ip link del tap1
wait $run
echo "status $?"
echo "== out"
cat /lab/out
echo "== err"
cat /lab/err
echo "== sums"
echo "served $(sha256sum </lab/www/blob)"
cat /lab/sums
echo "== ledger"
cat /lab/ledger.json; echo
"#;

#[test]
#[ignore = "needs the lab: make e2e"]
fn a_stock_debian_resolves_and_downloads_through_passt_a_tap_and_vhost_net_and_outlives_them() {
    let printed = script(&[SERVERS, GUEST, RUN].concat(), &[]);
    printed.shows("status 0\n");
    let out = printed.part("out");
    let sums = printed.part("sums");
    let served = sums.lines().find_map(|line| line.strip_prefix("served ")).expect("a sum");
    for line in [
        "eth0 has 192.0.2.2",
        "eth0 finds 198.51.100.1",
        "eth1 has 10.0.5.",
        "eth1 finds 10.0.5.1",
        &format!("eth0 downloads {served}"),
        &format!("eth1 downloads {served}"),
        "eth2 has 10.0.5.",
        "eth2 finds 10.0.5.1",
        &format!("eth2 downloads {served}"),
        "eth0 lost its link",
        "eth1 lost its link",
        "eth2 lost its link",
        "still here",
    ] {
        assert!(out.contains(line), "'{line}' is not in {printed:#?}");
    }
    assert_eq!(sums.matches(served.trim()).count(), 4, "what the guest sent arrived: {printed:#?}");
    let err = printed.part("err");
    for line in ["tare: net0: passt ended", "tare: net1: tap tap0 is gone", "tare: net2: tap tap1 is gone"] {
        assert!(err.contains(line), "'{line}' is not in {printed:#?}");
    }
    let ledger: Value = serde_json::from_str(printed.part("ledger").trim()).expect("the ledger is JSON");
    let number = |value: &Value, key: &str| value[key].as_u64().expect("a number");
    assert!(!err.contains("vhost"), "it serves: {printed:#?}");
    for name in ["net0", "net1", "net2"] {
        let device = ledger["devices"].as_array().expect("devices").iter().find(|d| d["name"] == name);
        let device = device.expect("the NIC has its line");
        let (packets, read, written) =
            (number(device, "requests"), number(device, "bytes_read"), number(device, "bytes_written"));
        assert!(packets > 100 && read > 3_000_000 && written > 3_000_000, "{device:#}");
        assert!(number(device, "interrupts") <= packets, "{device:#}");
    }
}

#[test]
#[ignore = "needs the lab: make e2e"]
fn transactions_of_suite_irq_load_are_answered_through_the_hosts_nat() {
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let json = scratch.path().join("report.json");
    let run = tare_lab(&["run", "irq-load/wire", "--subjects", "load-msi", "--scale", "0.001", "--repeat", "1"])
        .args(["--place", "lab", "--json"])
        .arg(&json)
        .output()
        .expect("tare-lab starts");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let report: Value = serde_json::from_slice(&std::fs::read(&json).expect("a report")).expect("the report is JSON");
    // The server has no route to the guest: what was answered was masqueraded.
    for (workload, count) in [("TCP_RR", 50.0), ("TCP_CRR", 20.0)] {
        let rows = report["results"].as_array().expect("results");
        let row = rows.iter().find(|row| row["workload"] == workload && row["metric"] == "events");
        assert_eq!(row.expect("a row")["median"]["load-msi"], count, "{report:#}");
    }
}
