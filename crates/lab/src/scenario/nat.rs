// SPDX-License-Identifier: Apache-2.0
//! A network that a sample's guest reaches by NAT, as one of libvirt's default network does everything: its host forwards what
//! comes over the wire of [`net`](super::net) and masquerades it. Called by `net::Wire::prepare` for suite `irq-load`.
//!
//! The server of transactions is alone there, in a namespace with no route to the guest's addresses: without NAT no transaction
//! gets an answer, so that a figure is the proof that the server saw the host's address in place of the guest's.

use super::net::{NETWORK, PORT};

/// The server's address, and the host's beside it, which is what the server sees of the guest.
pub const SERVER: &str = "10.0.6.2";
const HOST: &str = "10.0.6.1";
/// Enters the server's namespace, which descriptor 7 of the sample's shell holds.
const ENTER: &str = "nsenter --net=/proc/self/fd/7";

/// Shell commands that make it and start its server, in the sample's own namespaces and its scratch directory.
pub fn prepare(agent: &str) -> String {
    // The file that the namespace is bound to would keep the directory from being removed; a descriptor is enough.
    format!(
        "touch far && unshare --net=far ip link set lo up && exec 7<far && umount --lazy far && \
         ip link add nat0 type veth peer name far0 netns /proc/self/fd/7 && \
         ip addr add {HOST}/24 dev nat0 && ip link set nat0 up && \
         {ENTER} ip addr add {SERVER}/24 dev far0 && {ENTER} ip link set far0 up && \
         echo 1 >/proc/sys/net/ipv4/ip_forward && \
         nft 'table ip nat {{ chain out {{ type nat hook postrouting priority srcnat; \
         ip saddr {NETWORK} ip daddr != {NETWORK} masquerade; }}; }}' && \
         {{ {ENTER} {agent} answer {SERVER} {PORT} & }}"
    )
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Duration;

    use super::*;
    use crate::sample::Order;
    use crate::sample::tests::{STAND_IN, run_here};

    /// Stands in for the agent: says to each client at what address it sees it.
    const SERVE: &str = r#"perl -MIO::Socket::INET -e '
        $server = IO::Socket::INET->new(LocalAddr => "$ARGV[1]:$ARGV[2]", Listen => 1) or die;
        while ($client = $server->accept) { print $client $client->peerhost, "\n"; close $client }'"#;
    /// A namespace in the guest's place, at the other end of the wire.
    const GUEST: &str = "touch guest && unshare --net=guest ip link set lo up && exec 8<guest && umount --lazy guest && \
        ip link add lab0 type veth peer name eth0 netns /proc/self/fd/8 && ip addr add 10.0.5.1/24 dev lab0 && \
        ip link set lab0 up && nsenter --net=/proc/self/fd/8 sh -c 'ip addr add 10.0.5.2/24 dev eth0 && \
        ip link set eth0 up && ip route add default via 10.0.5.1'";
    /// Asks the server who it sees, once it is there; and the server's namespace for a way to the guest.
    const ASK: &str = "echo @@lab end seen; \
        nsenter --net=/proc/self/fd/8 timeout 10 bash -c 'until exec 9<>/dev/tcp/10.0.6.2/5301; do sleep 0.05; done; cat <&9' 2>/dev/null; \
        nsenter --net=/proc/self/fd/7 ip route get 10.0.5.2 2>&1; echo @@lab out seen";

    #[test]
    fn the_server_sees_the_host_and_has_no_way_to_the_guest() {
        let needs = "nft list ruleset && ip link add lab0 type veth && perl -MIO::Socket::INET -e 1";
        let can = Command::new("unshare").args(["--net", "--mount", "sh", "-c", needs]).stderr(Stdio::null()).status();
        if !can.is_ok_and(|status| status.success()) {
            println!("skipped: no namespaces for this user, or no nft, ip or perl");
            return;
        }
        let scratch = std::env::temp_dir().join(format!("tare-lab-test-{}-nat", std::process::id()));
        let sample = run_here(&Order {
            command: vec!["bash".into(), "-c".into(), ASK.into()],
            program: String::new(),
            scratch: scratch.display().to_string(),
            file: None,
            copy: None,
            prepare: format!("ip link set lo up && {GUEST} && {}", prepare(SERVE)),
            watch: STAND_IN.to_owned(),
            guest_mib: 0,
            poll: Duration::from_millis(2),
            limit: Duration::from_secs(20),
            apart: true,
            alone: false,
        });
        let seen: Vec<&str> =
            sample.section("seen").unwrap().lines().map(str::trim).filter(|l| !l.is_empty()).collect();
        assert_eq!(seen, [HOST, "RTNETLINK answers: Network is unreachable"]);
        assert!(!scratch.exists(), "the scratch directory is removed");
    }
}
